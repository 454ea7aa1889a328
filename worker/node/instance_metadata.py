"""Reads AWS's notices for this EC2 instance from its metadata service (IMDSv2).

Without the service, the node has no notices. While the service does not answer, the node keeps the last notices.

Invariant: only GET requests and the PUT request for the token are sent, limited in time and size, to the configured
address, or to EC2's own address on an EC2 instance. Source: Amazon EC2 User Guide, `Use the Instance Metadata Service`,
`Spot Instance interruption notices`, `rebalance recommendations`, `scheduled events`; Amazon EC2 Auto Scaling User
Guide, `Retrieve the target lifecycle state through instance metadata`.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

from everstep.host.firmware import DMI, is_ec2_instance
from everstep.host.loopback import url_host
from everstep.protocol.agent_messages import NodeNotice, NoticeKind
from everstep.protocol.limits import cut

log = logging.getLogger(__name__)

NOTICE_POLL_SECONDS = 5.0
"""Pause between two polls, as AWS recommends for spot interruptions."""
TIMEOUT_SECONDS = 1.0
TOKEN_SECONDS = 21_600
"""Lifetime of a session token: the maximum that AWS permits."""
MAX_ANSWER_BYTES = 64 * 1024
EC2_ENDPOINT = "http://169.254.169.254"


def endpoint_of(environment: Mapping[str, str], dmi: Path = DMI) -> str | None:
    """Return the URL of this node's metadata service: as AWS SDKs' variables name it, or EC2's own on an instance."""
    if environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return None
    named = environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")
    if named and urlsplit(named).scheme == "http" and url_host(named):
        return named.rstrip("/")
    if named:
        log.warning("AWS_EC2_METADATA_SERVICE_ENDPOINT %r is not an http URL; no notices are read", named)
        return None
    # On other machines, any host could answer at a link-local address.
    return EC2_ENDPOINT if is_ec2_instance(dmi) else None


@dataclass(frozen=True, slots=True)
class InstanceIdentity:
    """The identity of an EC2 instance, as its metadata service returns it."""

    instance_id: str
    address: str
    """Private IPv4 address of the first network card."""
    region: str


class InstanceMetadata:
    """Polls the metadata service at `http://host[:port]` for notices. `on_change` is called on the event loop."""

    def __init__(
        self, endpoint: str, on_change: Callable[[], None], *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        self._timeout_seconds = timeout_seconds
        parts = urlsplit(endpoint)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._on_change = on_change
        self._token = ""
        self._notices_by_path: dict[str, tuple[NodeNotice, ...]] = {}
        self._is_absent = False

    @property
    def notices(self) -> tuple[NodeNotice, ...]:
        """The current notices of AWS about this instance, in a fixed order."""
        return tuple(notice for path in _READERS for notice in self._notices_by_path.get(path, ()))

    def identity(self) -> InstanceIdentity:
        """Read the identity of this instance. Blocks. Raises OSError if the service does not return all values."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_seconds)
        found: list[str] = []
        try:
            for path in ("instance-id", "local-ipv4", "placement/region"):
                status, body = self._get(connection, path)
                if status != http.client.OK:
                    raise OSError(f"the instance's metadata service answers {status} for {path}")
                found.append(body)
        except (http.client.HTTPException, ValueError) as error:
            raise OSError(f"the instance's metadata service gives no valid answer: {error}") from error
        finally:
            connection.close()
        return InstanceIdentity(*found)

    async def run(self) -> None:
        """Poll the metadata service every `NOTICE_POLL_SECONDS` until the task is cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(NOTICE_POLL_SECONDS)

    async def poll(self) -> None:
        """Read all of AWS's notices for this instance once."""
        before = self.notices
        try:
            self._notices_by_path = await asyncio.to_thread(self._ask, dict(self._notices_by_path))
            if self._is_absent:
                log.info("the instance's metadata service answers again")
            self._is_absent = False
        except (OSError, http.client.HTTPException, ValueError) as error:
            # ValueError: the service has returned a session token that no HTTP header can contain.
            if not self._is_absent:
                log.info("the instance's metadata service does not answer, so notices are missing: %s", error)
            self._is_absent = True
        if self.notices != before:
            log.warning(
                "notices for this instance: %s",
                "; ".join(f"{notice.kind}: {notice.message}" for notice in self.notices) or "none",
            )
            self._on_change()

    def _ask(self, notices_by_path: dict[str, tuple[NodeNotice, ...]]) -> dict[str, tuple[NodeNotice, ...]]:
        """Update and return the notices by URL path, one path per kind of notice. Runs in a thread."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_seconds)
        try:
            for path, read in _READERS.items():
                status, body = self._get(connection, path)
                if status == http.client.NOT_FOUND:
                    notices_by_path[path] = ()
                elif status == http.client.OK:
                    try:
                        notices_by_path[path] = read(body)
                    except (ValueError, KeyError, TypeError, AttributeError) as error:
                        log.warning("the metadata at %s does not have the format that AWS documents: %r", path, error)
        finally:
            connection.close()
        return notices_by_path

    def _get(self, connection: http.client.HTTPConnection, path: str) -> tuple[int, str]:
        """Return status and body of a path; fetch a new token if the current token is missing or has expired."""
        for _ in range(2):
            if not self._token:
                status, token = _request(
                    connection, "PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
                )
                if status != http.client.OK:
                    return status if status != http.client.NOT_FOUND else http.client.SERVICE_UNAVAILABLE, ""
                self._token = token
            status, body = _request(
                connection, "GET", f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": self._token}
            )
            if status != http.client.UNAUTHORIZED:
                break
            self._token = ""
        return status, body


def _request(
    connection: http.client.HTTPConnection, method: str, path: str, headers: dict[str, str]
) -> tuple[int, str]:
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    body = response.read(MAX_ANSWER_BYTES + 1)
    if len(body) > MAX_ANSWER_BYTES:
        raise http.client.HTTPException(f"more than {MAX_ANSWER_BYTES} bytes at {path}")
    return response.status, body.decode(errors="replace").strip()


def _spot(body: str) -> tuple[NodeNotice, ...]:
    instance_action = json.loads(body)
    action, time = instance_action["action"], instance_action["time"]
    return (
        NodeNotice(
            kind=NoticeKind.SPOT_INTERRUPTION,
            message=cut(f"spot instance-action {action} at {time}"),
            ends_at_seconds=_seconds(time),
        ),
    )


def _rebalance(body: str) -> tuple[NodeNotice, ...]:
    return (
        NodeNotice(
            kind=NoticeKind.REBALANCE, message=cut(f"rebalance recommendation of {json.loads(body)['noticeTime']}")
        ),
    )


def _maintenance(body: str) -> tuple[NodeNotice, ...]:
    events = [event for event in json.loads(body) if event.get("State", "active") == "active"]
    return tuple(
        NodeNotice(
            kind=NoticeKind.MAINTENANCE,
            message=cut(f"{event['Code']} from {event['NotBefore']}: {event.get('Description', '')}"),
            ends_at_seconds=_seconds(event["NotBefore"]),
        )
        for event in events
    )


def _lifecycle(body: str) -> tuple[NodeNotice, ...]:
    return (
        (NodeNotice(kind=NoticeKind.TERMINATING, message=f"target-lifecycle-state {body}"),)
        if body == "Terminated"
        else ()
    )


def _seconds(text: str) -> float:
    """Parse a time into Unix seconds: ISO 8601, or the format of mail headers, which scheduled events use."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = parsedate_to_datetime(text)
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()


_READERS: dict[str, Callable[[str], tuple[NodeNotice, ...]]] = {
    "spot/instance-action": _spot,
    "events/recommendations/rebalance": _rebalance,
    "events/maintenance/scheduled": _maintenance,
    "autoscaling/target-lifecycle-state": _lifecycle,
}
