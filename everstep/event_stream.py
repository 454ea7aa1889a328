"""Events as they come: the service's server-sent events, read as a program reads them. botocore has no reader for these.

    retry: 1000
    id: 18
    data: {"EventId": 18, …}
    (an empty line)                      an event is whole
    : alive                              a sign of life
    event: end
    data: {"Code": …, "Message": …}      why the service ends the stream

Invariant: an event is given once it is whole, and in the order that it came in. A connection that breaks raises; who
goes on says `last_event_id`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlencode

import urllib3
from botocore.exceptions import ClientError, EndpointConnectionError
from botocore.utils import get_environ_proxies

from everstep import exchanges
from everstep.config import ClientConfig
from everstep.protocol.loopback import is_loopback

Json = dict[str, Any]

OPERATION: Final = "StreamEvents"
PATH: Final = "/v1/events/stream"
CONNECT_SECONDS: Final = 5.0
SILENT_SECONDS: Final = 30.0
"""The service gives a sign of life every ten seconds."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What the service has sent at once."""

    kind: str
    """`message`; `end`; `position`: nothing happened up to here that this reader was not told."""
    data: Json
    event_id: int | None
    """Where the reader is after it."""


def frames(lines: Iterable[bytes]) -> Iterator[Frame]:
    """Yield what a stream says.

    Args:
        lines: of its body, with or without their ends.

    Yields:
        Whole frames; signs of life are passed over. Source: HTML Standard, server-sent events.
    """
    kind, data, event_id = "message", "", None
    for line in lines:
        name, _, value = line.rstrip(b"\r\n").decode().partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            kind = value
        elif name == "data":
            data += value
        elif name == "id":
            event_id = int(value)
        elif not name and not value and (data or event_id is not None):
            yield Frame(kind, json.loads(data), event_id) if data else Frame("position", {}, event_id)
            kind, data, event_id = "message", "", None


class EventStream:
    """One connection. Gives events, as ListEvents has them; `close` ends it.

    `last_event_id` is where a reader is that has taken what it was given; None before the service has said so.
    """

    def __init__(self, configuration: ClientConfig, query: Mapping[str, object]) -> None:
        """Connect.

        Args:
            configuration: whom to ask, as whom.
            query: TrainingJobName, FleetName, AfterEventId.

        Raises:
            ClientError: the service refuses.
            EndpointConnectionError: it does not answer.
        """
        self.last_event_id: int | None = None
        url = configuration.endpoint_url
        settings: Json = {
            "timeout": urllib3.Timeout(connect=CONNECT_SECONDS, read=SILENT_SECONDS),
            "retries": False,
            "ca_certs": configuration.ca_bundle,
        }
        proxy = None if is_loopback(url) else get_environ_proxies(url).get(url.partition(":")[0])
        self._pool = urllib3.PoolManager(**settings) if proxy is None else urllib3.ProxyManager(proxy, **settings)
        address = f"{url}{PATH}?{urlencode(query)}"
        headers = {"Authorization": f"Bearer {configuration.token}", "Accept": "text/event-stream"}
        exchanges.told_request("GET", address, headers.items())
        try:
            self._answer = self._pool.request(
                "GET",
                address,
                headers=headers,
                preload_content=False,
                redirect=False,
            )
        except urllib3.exceptions.HTTPError as error:
            self._pool.clear()
            raise EndpointConnectionError(endpoint_url=url, error=error) from error
        exchanges.told_answer(str(self._answer.status), self._answer.headers.items())
        if self._answer.status != 200:
            status, body = self._answer.status, self._answer.read()
            self.close()
            raise ClientError(_refusal(status, body), OPERATION)

    def __iter__(self) -> Iterator[Json]:
        for frame in frames(_lines(self._answer)):
            if frame.kind == "end":
                raise ClientError({"Error": frame.data, "ResponseMetadata": {"HTTPStatusCode": 200}}, OPERATION)
            self.last_event_id = frame.event_id
            if frame.kind == "message":
                yield {**frame.data, "Time": datetime.fromtimestamp(frame.data["Time"], UTC)}

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._answer.close()
        self._pool.clear()


def _lines(answer: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """Yield lines as they come: urllib3 gives chunks, as the service has sent them."""
    rest = b""
    for chunk in answer.stream(amt=None, decode_content=True):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole


def _refusal(status: int, body: bytes) -> Json:
    try:
        said = json.loads(body)
    except ValueError:
        said = {}
    error = {"Code": str(said.get("Code", "")), "Message": str(said.get("Message", ""))}
    return {
        "Error": error,
        "Hint": said.get("Hint", ""),
        "ResponseMetadata": {"HTTPStatusCode": status, "RequestId": said.get("RequestId", "")},
    }
