"""Records all calls of EC2 and Auto Scaling that may change state, also refused ones, as CloudTrail does."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import Final
from urllib.parse import parse_qsl

import msgspec

RECORDED_SERVICES: Final = frozenset({"autoscaling", "ec2"})
READING: Final = ("Describe", "Get", "List")
MAX_CALLS: Final = 20_000
_APPLICATION: Final = re.compile(r"(?:^| )app/(?P<id>\S+)")


class RecordedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One API call that may have changed the state of the local cloud."""

    at: float
    """Unix seconds of the request."""
    service: str
    action: str
    parameters: dict[str, str]
    """Parameters in AWS's query protocol, without Action and Version."""
    status: int
    """HTTP status of the answer."""
    caller: str = ""
    """Application id in the User-Agent header, as in CloudTrail. May be empty."""


CALLS: Final = msgspec.json.Decoder(list[RecordedCall])


class CallRecord:
    """The newest calls of a local AWS, oldest first. The server's lock protects it."""

    def __init__(self) -> None:
        self._calls: deque[RecordedCall] = deque(maxlen=MAX_CALLS)

    def add(self, service: str, body: bytes, status: str, at: float, user_agent: str) -> None:
        """Record a call, unless its operation is read-only.

        `body` has AWS's query protocol, `at` is in Unix seconds.
        """
        parameters: Mapping[str, str] = dict(parse_qsl(body.decode(errors="replace"), keep_blank_values=True))
        action = parameters.get("Action", "")
        if service in RECORDED_SERVICES and action and not action.startswith(READING):
            given = {name: value for name, value in parameters.items() if name not in ("Action", "Version")}
            code = int(status.partition(" ")[0] or 0)
            caller = _APPLICATION.search(user_agent)
            self._calls.append(
                RecordedCall(
                    at=at,
                    service=service,
                    action=action,
                    parameters=given,
                    status=code,
                    caller=caller["id"] if caller else "",
                )
            )

    def every(self) -> list[RecordedCall]:
        """Return the recorded calls, oldest first."""
        return list(self._calls)
