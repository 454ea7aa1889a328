"""Decides from failed and successful writes whether a disk of the control plane, or its database, counts as full. Pure.

    a write fails for lack of space                                         full
    a write succeeds, the last failure is `QUIET_SECONDS` old,
    and at least `LEAST_FREE_BYTES` are free, or free space is unknown      usable again

On a nearly full disk, small writes succeed while larger writes fail. Because of the wait of `QUIET_SECONDS` after each
failure, such a disk continues to count as full.

Invariant: once space is free, the disk counts as usable again without a restart or a person's action.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

QUIET_SECONDS = 30.0
LEAST_FREE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRecord:
    """The history of one disk or database since a write failed. Times are monotonic seconds."""

    since: float
    """Time of the first failed write since the disk last counted as usable."""
    failed_at: float
    """Time of the newest failed write."""
    words: str
    """The error message of the newest failure."""
    has_stored: bool = False
    """Whether a write has succeeded since the newest failure."""


def failed(record: DiskRecord | None, now: float, words: str) -> DiskRecord:
    """Return the history of a disk after another write has failed because the disk was full.

    Args:
        record: the history before this write. None if the disk counted as usable.
        now: monotonic seconds.
        words: the error message of the failed write.

    Returns:
        The history with this failure as the newest one.
    """
    return DiskRecord(since=record.since if record is not None else now, failed_at=now, words=words)


def stored(record: DiskRecord | None) -> DiskRecord | None:
    """Return a disk's history of failed writes after a write has succeeded. None if no write had failed before."""
    return None if record is None else replace(record, has_stored=True)


def is_full(record: DiskRecord | None, now: float, free_bytes: int | None) -> bool:
    """Return whether the disk still counts as full.

    Args:
        record: the history of the disk. None means that no write has failed.
        now: monotonic seconds.
        free_bytes: free space of the file system. None if the control plane cannot measure it, as for PostgreSQL.

    Returns:
        False if no write has failed. Also False if all of these are true: a later write succeeded, the newest failure
        is `QUIET_SECONDS` old, and at least `LEAST_FREE_BYTES` are free or `free_bytes` is None.
    """
    if record is None:
        return False
    is_quiet = record.has_stored and now - record.failed_at >= QUIET_SECONDS
    return not is_quiet or (free_bytes is not None and free_bytes < LEAST_FREE_BYTES)
