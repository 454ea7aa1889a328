"""Lines of a log as CloudWatch Logs takes them: in calls of limited size, time and order. Pure.

Invariant: a batch is within every limit of PutLogEvents, and each line is in one batch.
Source: API reference of CloudWatch Logs, PutLogEvents: 10,000 events, 1,048,576 bytes (each message in UTF-8, and 26
bytes besides), 24 hours, in order of time; a message is at most 256 KiB with those 26 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

MAX_EVENTS: Final = 10_000
MAX_BYTES: Final = 1_048_576
EVENT_BYTES: Final = 26
"""What each event counts besides its message."""
MAX_MESSAGE_BYTES: Final = 256 * 1024 - EVENT_BYTES
MAX_SPAN_MS: Final = 24 * 3600 * 1000 - 1


@dataclass(frozen=True, slots=True)
class Line:
    """One line on its way out."""

    at_ms: int
    message: str
    """Not empty."""


def batches(lines: Iterable[Line]) -> Iterator[tuple[Line, ...]]:
    """Yield lines in batches, those of one stream.

    Args:
        lines: in any order; those of one page are put into order of time. What is too long is cut.

    Yields:
        Batches, one call each.
    """
    batch: list[Line] = []
    size = 0
    for line in sorted(map(_cut, lines), key=lambda each: each.at_ms):
        needed = len(line.message.encode()) + EVENT_BYTES
        if batch and (
            len(batch) == MAX_EVENTS or size + needed > MAX_BYTES or line.at_ms - batch[0].at_ms > MAX_SPAN_MS
        ):
            yield tuple(batch)
            batch, size = [], 0
        batch.append(line)
        size += needed
    if batch:
        yield tuple(batch)


def _cut(line: Line) -> Line:
    data = line.message.encode()
    if len(data) <= MAX_MESSAGE_BYTES:
        return line
    return Line(line.at_ms, data[: MAX_MESSAGE_BYTES - 3].decode(errors="ignore") + "…")
