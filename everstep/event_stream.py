"""Reads the service's stream of server-sent events, which botocore does not support.

    retry: 1000
    id: 18
    data: {"EventId": 18, …}
    (an empty line)                      ends an event
    : alive                              keep-alive
    event: end
    data: {"Code": …, "Message": …}      the service ends the stream for this reason

Invariant: the stream yields complete events, in the order of arrival. A broken connection raises an error. The caller
can continue from `last_event_id` with a new connection.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, cast
from urllib.parse import urlencode

import urllib3
from botocore.exceptions import ClientError, EndpointConnectionError
from botocore.utils import get_environ_proxies

from everstep import exchanges
from everstep.config import ClientConfig
from everstep.host.loopback import is_loopback

Json = dict[str, Any]

OPERATION: Final = "StreamEvents"
PATH: Final = "/v1/events/stream"
CONNECT_SECONDS: Final = 5.0
SILENT_SECONDS: Final = 30.0
"""Longest time in seconds without any data from the service, after which the connection counts as broken.

The service sends a keep-alive every ten seconds.
"""


@dataclass(frozen=True, slots=True)
class StreamFrame:
    """One complete message of a stream of server-sent events."""

    kind: str
    """`message`, `end` or `position`.

    `position` means that the stream has sent all events up to `event_id` that match the reader's query.
    """
    data: Json
    event_id: int | None
    """Id of the event. To continue after this event, a reader passes the id as `AfterEventId`. None without an id."""


def frames(lines: Iterable[bytes]) -> Iterator[StreamFrame]:
    """Yield the complete messages (frames) of a stream of server-sent events.

    Args:
        lines: lines of the response body, with or without line ends.

    Yields:
        Complete frames, without keep-alives. Source: HTML Standard, server-sent events.
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
            yield StreamFrame(kind, json.loads(data), event_id) if data else StreamFrame("position", {}, event_id)
            kind, data, event_id = "message", "", None


class EventStream:
    """One connection, which yields events in the format of ListEvents until `close`.

    `last_event_id` is the id from which a reader can continue after the events it has read. It is None until the
    service has sent an id.
    """

    def __init__(
        self, configuration: ClientConfig, query: Mapping[str, object], *, silent_seconds: float = SILENT_SECONDS
    ) -> None:
        """Open the connection.

        Args:
            configuration: the endpoint and the token.
            query: URL parameters: TrainingJobName, FleetName, AfterEventId; all are optional.
            silent_seconds: seconds without data after which a read fails.

        Raises:
            ClientError: the service rejects the request.
            EndpointConnectionError: the service does not respond.
        """
        self.last_event_id: int | None = None
        url = configuration.endpoint_url
        settings: Json = {
            "timeout": urllib3.Timeout(connect=CONNECT_SECONDS, read=silent_seconds),
            "retries": False,
            "ca_certs": configuration.ca_bundle,
        }
        proxy = None if is_loopback(url) else get_environ_proxies(url).get(url.partition(":")[0])
        self._pool = urllib3.PoolManager(**settings) if proxy is None else urllib3.ProxyManager(proxy, **settings)
        address = f"{url}{PATH}?{urlencode(query)}"
        headers = {"Authorization": f"Bearer {configuration.token}", "Accept": "text/event-stream"}
        exchanges.log_request("GET", address, headers.items())
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
        exchanges.log_response(str(self._answer.status), self._answer.headers.items())
        if self._answer.status != 200:
            status, body = self._answer.status, self._answer.read()
            self.close()
            raise ClientError(cast(Any, _refusal(status, body)), OPERATION)

    def __iter__(self) -> Iterator[Json]:
        for frame in frames(_lines(self._answer)):
            if frame.kind == "end":
                ended = {"Error": frame.data, "ResponseMetadata": {"HTTPStatusCode": 200}}
                raise ClientError(cast(Any, ended), OPERATION)
            self.last_event_id = frame.event_id
            if frame.kind == "message":
                yield {**frame.data, "Time": datetime.fromtimestamp(frame.data["Time"], UTC)}

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._answer.close()
        self._pool.clear()


def _lines(answer: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """Yield complete lines of the body. urllib3 yields chunks as the service sent them, so a chunk may split a line."""
    rest = b""
    for chunk in answer.stream(amt=None, decode_content=True):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole


def _refusal(status: int, body: bytes) -> Json:
    try:
        refusal: Json = json.loads(body)
    except ValueError:
        refusal = {}
    error = {"Code": str(refusal.get("Code", "")), "Message": str(refusal.get("Message", ""))}
    return {
        "Error": error,
        "Hint": refusal.get("Hint", ""),
        "ResponseMetadata": {"HTTPStatusCode": status, "RequestId": refusal.get("RequestId", "")},
    }
