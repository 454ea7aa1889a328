"""Which replica of the control plane a process is, over its restarts: a successor need not wait for the leases of a process that is known to be dead.

    <state directory>/replicas/0   locked for as long as a process lives
                               1   a second process that shares the state directory
    owner  = lineage-incarnation   lineage: this kernel's boot and the locked file; incarnation: fresh at every start

The kernel drops the lock when its process ends, however it ends. Whoever holds the lock therefore knows that every
owner of the same lineage is dead. A copied state directory, another machine or another boot is another lineage: there a
lease has to stand still first, as between strangers.

Invariant: of two living processes, no two have the same lineage.
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
"""On one state directory; more have no lineage."""


class Replica:
    """This process's place among the replicas; holds its lock until closed.

    Args:
        state_directory: of the server; writable.

    Attributes:
        owner: the id under which this process holds leases, never used before.
    """

    def __init__(self, state_directory: Path) -> None:
        incarnation = uuid.uuid4().hex
        self._lock = _lock_free_place(state_directory / "replicas")
        lineage = _lineage(self._lock)
        self.owner = f"{lineage}-{incarnation}" if lineage else incarnation

    def __enter__(self) -> Replica:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def is_predecessor(owner: str, other: str) -> bool:
    """Say whether `other` was an earlier process in the place of `owner`, which is therefore dead.

    Args:
        owner: of the living process that asks.
        other: as found in a lease.

    Returns:
        True only where it is proven.
    """
    lineage, dash, _ = owner.partition("-")
    return bool(dash) and other != owner and other.startswith(f"{lineage}-")


def _lock_free_place(directory: Path) -> int | None:
    directory.mkdir(mode=0o700, exist_ok=True)
    for place in range(MAX_REPLICAS):
        descriptor = os.open(directory / str(place), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held, or a file system without locks
            os.close(descriptor)
        else:
            return descriptor
    return None


def _lineage(lock: int | None) -> str:
    """A name that no other locked file has; empty where that cannot be known."""
    if lock is None or not BOOT_ID.exists():
        return ""
    file = os.fstat(lock)
    return hashlib.sha256(f"{BOOT_ID.read_text()} {file.st_dev} {file.st_ino}".encode()).hexdigest()[:LINEAGE_CHARS]
