"""Shapes of the API: logs, listed, paged and followed."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from control_plane.api.schemas.common import Shape


class LogEntry(Shape):
    """One stream of one rank in one generation, or the fact that it is missing."""

    generation: int
    rank: int
    stream: Literal["stdout", "stderr"] | None
    """None for what is missing altogether."""
    key: str | None
    bytes: int | None
    missing_reason: str | None


class ListLogsResponse(Shape):
    """A page of the streams of a job's ranks, by generation, rank and stream."""

    logs: list[LogEntry]
    next_token: str | None = None


class LogEvent(Shape):
    """One line that a rank printed, or the fact that lines are missing."""

    timestamp: datetime
    """When the node's agent read it, to the millisecond."""
    generation: int
    node_id: str
    rank: int | None
    """Absent where a whole node is meant."""
    stream: Literal["stdout", "stderr", "gap"]
    """`gap`: what was here is not kept; Message says what and why."""
    message: str
    """Without the line feed; lines of more than 16 KiB come in pieces."""


class GetLogEventsResponse(Shape):
    """A page of what a job's ranks printed, oldest line first."""

    events: list[LogEvent]
    next_forward_token: str
    """Reads on after the last of these lines."""
    next_backward_token: str
    """Reads on before the first of them."""


class LogEvents(Shape):
    """Lines that came together; without lines it is a sign of life."""

    events: list[LogEvent]
    next_forward_token: str
    """For FollowLogs and GetLogEvents: goes on after these lines."""


class FollowLogsStream(Shape):
    """What a followed log is made of."""

    log_events: LogEvents | None = None
