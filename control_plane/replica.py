"""Determines the identity of a control-plane process, with which it claims leases.

    <state directory>/replicas/0   locked while a process lives
                               1   for a second process with the same state directory
    owner = lineage-incarnation@url
                                   lineage: hash of the kernel's boot id and the locked file
                                   incarnation: random, new at each start
                                   url: where other servers reach this server; absent if they cannot

The kernel releases the lock when a process ends, so its holder proves that earlier owners of the lineage are dead, and
takes over their leases at once. Another lineage waits until the lease expires. Two living processes never have the same
lineage.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import uuid
from pathlib import Path
from types import TracebackType

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LINEAGE_CHARS = 16
MAX_REPLICAS = 64
"""Processes with a lock in one state directory. Further ones have no lineage, so they wait for expiry after a restart.
"""


class ServerReplica:
    """The identity of this process, and the file lock that proves it, until the end of this context manager.

    The state directory must be writable. `url` is empty if other servers cannot reach this one.
    """

    def __init__(self, state_directory: Path, url: str = "") -> None:
        incarnation = uuid.uuid4().hex
        self._lock = _lock_free_place(state_directory / "replicas")
        lineage = _lineage(self._lock)
        name = f"{lineage}-{incarnation}" if lineage else incarnation
        self.owner = f"{name}@{url}" if url else name

    def __enter__(self) -> ServerReplica:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def is_predecessor(owner: str, other: str) -> bool:
    """Return whether the owner `other` of a lease is a dead process, whose place the caller `owner` has taken.

    True for the same lineage and another incarnation, because the caller holds the file's lock.
    """
    lineage, dash, _ = owner.partition("@")[0].partition("-")
    return bool(dash) and other != owner and other.startswith(f"{lineage}-")


def is_in_use(state_directory: Path) -> bool:
    """Return whether a server runs with this state directory. False without support for locks."""
    for place in sorted((state_directory / "replicas").glob("*")):
        descriptor = os.open(place, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)
    return False


def url_of(owner: str) -> str:
    """Return the URL of the server that wrote `owner` into a lease, or empty."""
    return owner.partition("@")[2]


def _lock_free_place(directory: Path) -> int | None:
    directory.mkdir(mode=0o700, exist_ok=True)
    for place in range(MAX_REPLICAS):
        descriptor = os.open(directory / str(place), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # Another process holds the lock, or the file system does not support locks.
            os.close(descriptor)
        else:
            return descriptor
    return None


def _lineage(lock: int | None) -> str:
    """Return the lineage. Empty without a locked file or the kernel's boot id."""
    if lock is None or not BOOT_ID.exists():
        return ""
    file = os.fstat(lock)
    return hashlib.sha256(f"{BOOT_ID.read_text()} {file.st_dev} {file.st_ino}".encode()).hexdigest()[:LINEAGE_CHARS]
