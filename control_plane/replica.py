"""Determines the identity of a control-plane process, with which it claims leases.

With this identity, a restarted server takes over the leases of its dead predecessor immediately. Each process locks a
file in its state directory. The locked file and the boot of the machine determine its *lineage*:

    <state directory>/replicas/0   locked while a process lives
                               1   for a second process with the same state directory
    owner = lineage-incarnation@url
                                   lineage: hash of the kernel's boot id and the locked file
                                   incarnation: random, new at each start
                                   url: where other servers reach this server; absent if they cannot

The kernel releases the lock when the process ends, even after a crash. The process that holds the lock therefore proves
that all earlier owners of the same lineage are dead. A copied state directory, another machine or another boot yields
another lineage. A process with another lineage must wait until the lease expires.

Invariant: two living processes never have the same lineage.
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
"""Maximum number of processes that lock a file in the same state directory.

A process beyond this number locks no file, so its identity has no lineage. After its restart, it must wait until its
old leases expire.
"""


class ServerReplica:
    """The identity of this control-plane process (one of several replicas), and the file lock that proves the identity.

    A context manager that holds the lock until its end.

    The state directory of the server must be writable. `url` is the URL at which the other servers of the installation
    reach this server. It is empty if they cannot reach it.
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
    """Return whether the owner `other` of a lease is a dead process, whose place the calling process has taken.

    Args:
        owner: owner of the calling process.
        other: an owner read from a lease.

    Returns:
        True only if `other` has the lineage of `owner` (same locked file, same boot) and another incarnation (start).
        The calling process holds the file's lock, so `other` is dead.
    """
    lineage, dash, _ = owner.partition("@")[0].partition("-")
    return bool(dash) and other != owner and other.startswith(f"{lineage}-")


def is_in_use(state_directory: Path) -> bool:
    """Return whether a control-plane server runs with this state directory.

    False if the file system does not support locks.
    """
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
    """Return the address of the server that wrote `owner` into a lease. Empty if other servers cannot reach it."""
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
    """Return the server's lineage (see the module's docstring): a hash of the locked file and the kernel's boot id.

    Empty if no file is locked or the kernel has no boot id.
    """
    if lock is None or not BOOT_ID.exists():
        return ""
    file = os.fstat(lock)
    return hashlib.sha256(f"{BOOT_ID.read_text()} {file.st_dev} {file.st_ino}".encode()).hexdigest()[:LINEAGE_CHARS]
