"""API models: the lines that ranks print, in pages and as a stream."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from control_plane.api.schemas.common import Shape


class LogEvent(Shape):
    """One line that a rank printed, or a note that lines are missing."""

    timestamp: datetime
    """When the node's agent read the line, with a precision of one millisecond."""
    generation: int
    node_id: str
    rank: int | None
    """Rank that printed the line. Absent if the event concerns a whole node."""
    stream: Literal["stdout", "stderr", "gap"]
    """`stdout`, `stderr` or `gap`. A gap marks missing lines. Its Message contains their number and the reason."""
    message: str
    """The line without its line feed. Lines of more than 16 KiB are split."""
    overwrites: bool | None
    """True for a state of a line that the rank overwrites, such as a progress bar. Absent for other lines.

    It replaces the previous line of the rank's stream, if that is a state, too. The log has at most one in 5 seconds.
    """


class GetLogEventsResponse(Shape):
    """A page of lines that a job's ranks printed, oldest line first."""

    events: list[LogEvent]
    next_forward_token: str
    """Token for the page after the last line of this page."""
    next_backward_token: str
    """Token for the page before the first line of this page."""


class LogEvents(Shape):
    """A batch of a job's log lines.

    The service sends a batch without lines to show that the stream is alive.
    """

    events: list[LogEvent]
    next_forward_token: str
    """Token with which FollowLogs or GetLogEvents continues after these lines."""


class FollowLogsStream(Shape):
    """The events of a FollowLogs stream."""

    log_events: LogEvents | None = None
