"""Removes torch's build locks that killed ranks left behind, because later ranks would wait for their removal forever.

Invariant: this module never removes a lock that a process holds open, or that a process of another node may hold open.
It follows no symbolic links. Source: torch 2.13, `torch.utils.file_baton` (the holder keeps the file open) and
`torch.utils.cpp_extension` (the location of the file).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Final

from worker.node.rank_user import RankUser

log = logging.getLogger(__name__)

MAX_EXTENSIONS: Final = 1000
OWN_FILE_SYSTEMS: Final = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
"""File systems that only one machine can mount, so that /proc shows every process that has a lock file open."""


def remove_stale(environment: Mapping[str, str], user: RankUser | None) -> None:
    """Remove torch's build locks that no process holds open, except on file systems that other nodes may mount."""
    found = {}
    for path in _locks(environment):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                continue
            if (kind := file_system_of(path.parent)) in OWN_FILE_SYSTEMS:
                found[status.st_dev, status.st_ino] = path
            else:
                log.info(
                    "build lock %s is not removed: it is on %s, where another node may hold it",
                    path,
                    kind or "a file system of unknown type",
                )
    if not found:
        return
    for lock in found.keys() - _held():
        path = found[lock]
        try:
            status = path.lstat()
            if (status.st_dev, status.st_ino) == lock:
                _unlink(path, user)
        except OSError as error:
            log.warning(
                "build lock %s, which no process holds, cannot be removed; ranks that build there wait for it: %s",
                path,
                error,
            )
        else:
            log.warning(
                "removed build lock %s, which a rank left when it was killed during a build",
                path,
            )


def _unlink(path: Path, user: RankUser | None) -> None:
    """Remove a file, unless its path contains a symbolic link."""
    folder = os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        for name in path.parent.parts[1:]:
            below = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = below
        if user is not None and os.fstat(folder).st_uid != user.uid:
            raise PermissionError(errno.EACCES, "its folder does not belong to the ranks' user")
        os.unlink(path.name, dir_fd=folder)
    finally:
        os.close(folder)


def _locks(environment: Mapping[str, str]) -> list[Path]:
    if named := environment.get("TORCH_EXTENSIONS_DIR"):
        return [path / "lock" for path in _entries(Path(named))]
    try:
        # `_unlink` follows no link, but a user's home may lie behind one. `realpath` does not fail at a loop of links.
        home = os.path.realpath(environment.get("HOME", "/"))
    except ValueError:
        return []
    builds = _entries(Path(environment.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"), "torch_extensions"))
    return [path / "lock" for folder in builds for path in _entries(folder)][:MAX_EXTENSIONS]


def _entries(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as found:
            return [Path(entry.path) for entry in islice(found, MAX_EXTENSIONS)]
    except (OSError, ValueError):
        return []


def file_system_of(folder: Path) -> str:
    """Return the kernel's name of the file system of `folder`, or an empty string if it is unknown."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        fdinfo = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    finally:
        os.close(descriptor)
    mount = dict(line.split(":\t", 1) for line in fdinfo.splitlines()).get("mnt_id")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        where, _, what = line.partition(" - ")
        if where.split()[0] == mount:
            return what.split()[0]
    return ""


def _held() -> set[tuple[int, int]]:
    held = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # The process may have ended or closed the file meanwhile.
            if os.readlink(descriptor).endswith("/lock"):
                status = descriptor.stat()
                held.add((status.st_dev, status.st_ino))
    return held
