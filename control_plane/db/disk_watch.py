"""Detects full disks from failed writes of requests and of the server's background loops.

Invariant: any thread may call any method. No method writes to a disk or raises an exception.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.exc import DBAPIError

from control_plane.core import full_disk
from control_plane.core.full_disk import DiskRecord

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_POSTGRESQL_DISK_FULL = "53100"
"""Source: PostgreSQL, Appendix A, class 53."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullDisk:
    """A disk to which the server cannot write, because the disk is full."""

    place: str
    """A directory on the disk, or the description of a remote database."""
    free_bytes: int | None
    """None if the disk is not on this machine."""
    words: str
    """Error message of the newest failed write."""
    seconds: float
    """Seconds since the first failed write."""


class DiskWatch:
    """Records failed writes for the disks to which one server writes.

    `place` is the directory of SQLite's file, or a description of a remote database if not `is_here`.
    """

    def __init__(self, place: str, *, is_here: bool, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._database = place
        self._directories = {place} if is_here else set()
        self.monotonic = monotonic
        self._records: dict[str, DiskRecord] = {}
        self._lock = threading.Lock()

    def failed(self, error: BaseException, directory: Path | None = None) -> None:
        """Record a failed write if a full disk caused the failure. Ignore other errors.

        `error` may wrap the driver's exception. `directory` is used if an OSError contains no file name.
        """
        if not is_disk_full(error):
            return
        place = self._database
        if isinstance(error, OSError) and (error.filename is not None or directory is not None):
            place = str(directory if error.filename is None else Path(os.fsdecode(error.filename)).parent)
            self._directories.add(place)
        cause = error.orig if isinstance(error, DBAPIError) else error
        with self._lock:
            self._records[place] = full_disk.failed(self._records.get(place), self.monotonic(), str(cause).strip())

    def stored(self) -> None:
        """Record a committed transaction, which proves that the database's disk has space."""
        if not self._records:  # Return without the lock in the usual case, in which no write has failed.
            return
        with self._lock:
            for place, record in self._records.items():
                if (newer := full_disk.stored(record)) is not None:
                    self._records[place] = newer

    def full(self) -> tuple[FullDisk, ...]:
        """Return the full disks, sorted, and forget disks that have space again."""
        if not self._records:
            return ()
        now = self.monotonic()
        with self._lock:
            found = {place: self._free_bytes(place) for place in self._records}
            self._records = {
                place: each for place, each in self._records.items() if full_disk.is_full(each, now, found[place])
            }
            return tuple(
                FullDisk(place=place, free_bytes=found[place], words=record.words, seconds=now - record.since)
                for place, record in sorted(self._records.items())
            )

    def _free_bytes(self, place: str) -> int | None:
        if place not in self._directories:
            return None
        try:
            facts = os.statvfs(place)
        except OSError:
            return None
        return facts.f_bavail * facts.f_frsize


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error means a full disk or quota, on a file system, SQLite or PostgreSQL."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(cause, OSError) and cause.errno in _FULL:
        return True
    return "database or disk is full" in str(cause) or getattr(cause, "sqlstate", None) == _POSTGRESQL_DISK_FULL
