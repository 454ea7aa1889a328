"""What was asked of AWS: every call of EC2 and Auto Scaling that may change something, as CloudTrail would have it.

Invariant: a call that was refused is no less a call; it is recorded with its status. Reading alone leaves no record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final
from urllib.parse import parse_qsl

import msgspec

RECORDED_SERVICES: Final = frozenset({"autoscaling", "ec2"})
READING: Final = ("Describe", "Get", "List")
MAX_CALLS: Final = 20_000


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One call that may have changed something."""

    at: float
    """Unix seconds, when it came."""
    service: str
    action: str
    parameters: dict[str, str]
    """As on the wire."""
    status: int
    """Of HTTP."""


CALLS: Final = msgspec.json.Decoder(list[Call])


class CallRecord:
    """The newest calls of a local AWS, oldest first. Calls come in one at a time, under the lock of its server."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque(maxlen=MAX_CALLS)

    def add(self, service: str, body: bytes, status: str, at: float) -> None:
        """Record a call, unless it only reads.

        Args:
            service: that it was signed for.
            body: of the request, in AWS's query protocol.
            status: the answer's, as `200 OK`.
            at: Unix seconds.
        """
        parameters: Mapping[str, str] = dict(parse_qsl(body.decode(errors="replace"), keep_blank_values=True))
        action = parameters.get("Action", "")
        if service in RECORDED_SERVICES and action and not action.startswith(READING):
            given = {name: value for name, value in parameters.items() if name not in ("Action", "Version")}
            code = int(status.partition(" ")[0] or 0)
            self._calls.append(Call(at=at, service=service, action=action, parameters=given, status=code))

    def every(self) -> list[Call]:
        """Return all that is remembered."""
        return list(self._calls)
