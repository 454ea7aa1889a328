"""Locks of torch's compiled extensions that ranks left behind when they were killed while they built one.

torch builds an extension (DeepSpeed's CPU Adam, among others) in a folder below HOME, once, and keeps other processes
out by a file named `lock`. Who is killed meanwhile leaves it there, and every later rank waits for it for ever: the
next generation, and each one after it.

Invariant: a lock that a process has open is let be, and one that a process of another node may have open; nothing is
removed but from the ranks' own folders, wherever their links lead. Source: torch 2.13, `torch.utils.file_baton` (the
holder has the file open) and `torch.utils.cpp_extension` (where it lies).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from worker.node.rank_user import RankUser

log = logging.getLogger(__name__)

OWN_FILE_SYSTEMS: Final = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
"""What is mounted on one machine only: whoever has a file of theirs open is found in its /proc."""


def remove_stale(environment: Mapping[str, str], user: RankUser | None) -> None:
    """Remove the locks that nobody holds, where nobody else can: on file systems that are this machine's alone.

    Before a rank is started; blocks for a millisecond where there is none.

    Args:
        environment: the rank's.
        user: that ranks run as; None: this process's.
    """
    found = {}
    for path in _locks(environment):
        with contextlib.suppress(OSError):
            told = path.lstat()
            if not stat.S_ISREG(told.st_mode):
                continue
            if (kind := _file_system(path.parent)) in OWN_FILE_SYSTEMS:
                found[told.st_dev, told.st_ino] = path
            else:
                log.info(
                    "%s is let be: it lies on %s, where another node may hold it",
                    path,
                    kind or "a file system of unknown type",
                )
    if not found:
        return
    for lock in found.keys() - _held():
        path = found[lock]
        try:
            told = path.lstat()
            if (told.st_dev, told.st_ino) == lock:
                _unlink(path, user)
        except OSError as error:
            log.warning(
                "%s, which nobody holds, cannot be removed; ranks that build there will wait for it: %s", path, error
            )
        else:
            log.warning(
                "%s was left by a rank that was killed while it built an extension; it is removed, or others "
                "would wait for it for ever",
                path,
            )


def _unlink(path: Path, user: RankUser | None) -> None:
    """Remove a file of this user's folder, whatever links it has put in the way."""
    folder = os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        for name in path.parent.parts[1:]:
            below = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = below
        if user is not None and os.fstat(folder).st_uid != user.uid:
            raise PermissionError(errno.EACCES, "its folder is not the ranks'")
        os.unlink(path.name, dir_fd=folder)
    finally:
        os.close(folder)


def _locks(environment: Mapping[str, str]) -> list[Path]:
    if named := environment.get("TORCH_EXTENSIONS_DIR"):
        return list(Path(named).glob("*/lock"))
    cache = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME", "/")).resolve() / ".cache")
    return list(Path(cache, "torch_extensions").glob("*/*/lock"))


def _file_system(folder: Path) -> str:
    """Return the type of what a folder lies on, as the kernel names it; empty where it does not tell."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        told = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    finally:
        os.close(descriptor)
    mount = dict(line.split(":\t", 1) for line in told.splitlines()).get("mnt_id")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        where, _, what = line.partition(" - ")
        if where.split()[0] == mount:
            return what.split()[0]
    return ""


def _held() -> set[tuple[int, int]]:
    """Return device and inode of every lock that a process has open."""
    held = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process, or the descriptor, has gone meanwhile
            if os.readlink(descriptor).endswith("/lock"):
                told = descriptor.stat()
                held.add((told.st_dev, told.st_ino))
    return held
