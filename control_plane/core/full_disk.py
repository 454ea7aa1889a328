"""Decides whether a disk of the control plane, or its database, counts as full. Pure.

    a write fails for lack of space                                         full
    a write succeeds, the last failure is `QUIET_SECONDS` old,
    and at least `LEAST_FREE_BYTES` are free, or free space is unknown      usable again

Invariant: once space is free, the disk counts as usable again without a restart or a person's action.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# On a nearly full disk, small writes succeed while larger writes fail. The wait keeps such a disk full.
QUIET_SECONDS = 30.0
LEAST_FREE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRecord:
    """The history of one disk or database since a write failed. Times are monotonic seconds."""

    since: float
    """Time of the first failed write since the disk last counted as usable."""
    failed_at: float
    words: str
    has_stored: bool = False


def failed(record: DiskRecord | None, now: float, words: str) -> DiskRecord:
    """Return the history with another failed write. `record` is None if the disk counted as usable."""
    return DiskRecord(since=record.since if record is not None else now, failed_at=now, words=words)


def stored(record: DiskRecord | None) -> DiskRecord | None:
    """Return a disk's history of failed writes after a write has succeeded. None if no write had failed before."""
    return None if record is None else replace(record, has_stored=True)


def is_full(record: DiskRecord | None, now: float, free_bytes: int | None) -> bool:
    """Return whether the disk still counts as full. `free_bytes` is None if unknown, as for PostgreSQL."""
    if record is None:
        return False
    is_quiet = record.has_stored and now - record.failed_at >= QUIET_SECONDS
    return not is_quiet or (free_bytes is not None and free_bytes < LEAST_FREE_BYTES)
