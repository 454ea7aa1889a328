"""Splits log lines into batches that CloudWatch Logs accepts. Pure.

Invariant: every batch is within the limits of PutLogEvents, and each line is in exactly one batch. Source: CloudWatch
Logs API reference, PutLogEvents: a call has at most 10,000 events and 1,048,576 bytes, spans at most 24 hours, and is
sorted by time. The size of an event is its message in UTF-8 plus 26 bytes, and at most 256 KiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

MAX_EVENTS: Final = 10_000
MAX_BYTES: Final = 1_048_576
EVENT_BYTES: Final = 26
"""Bytes that CloudWatch Logs counts per event in addition to the message."""
MAX_MESSAGE_BYTES: Final = 256 * 1024 - EVENT_BYTES
MAX_SPAN_MS: Final = 24 * 3600 * 1000 - 1


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One log line to send to CloudWatch Logs."""

    at_ms: int
    message: str
    """The text of the line. Never empty."""


def batches(lines: Iterable[BatchLine]) -> Iterator[tuple[BatchLine, ...]]:
    """Yield the lines of one log stream in batches.

    Args:
        lines: the lines in any order. The function sorts them by time and truncates messages that are too long.

    Yields:
        Batches, one per PutLogEvents call.
    """
    batch: list[BatchLine] = []
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


def _cut(line: BatchLine) -> BatchLine:
    data = line.message.encode()
    if len(data) <= MAX_MESSAGE_BYTES:
        return line
    return BatchLine(line.at_ms, data[: MAX_MESSAGE_BYTES - 3].decode(errors="ignore") + "…")
