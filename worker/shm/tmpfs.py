"""Mounts a tmpfs for the node's slots, independent of the size of /dev/shm, with huge pages if possible.

Huge pages are allocated ten times as fast as normal pages. The mount outlives the agent, like the slots in it, and ends
with the instance.

Invariant: without the permission to mount, or if the kernel refuses, the agent stores the slots in the folder without a
mount. The default folder is in /dev/shm, so they still are in memory.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from pathlib import Path

_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
_mount = ctypes.CDLL(None, use_errno=True).mount
_mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)


def mount(folder: Path, size_bytes: int) -> bool:
    """Mount a tmpfs at `folder` if it is not mounted yet. The agent calls this when it starts.

    A folder that already contains files stays unchanged.

    Args:
        folder: created with mode 0700 if missing. Its `SlotStore` gives ranks access.
        size_bytes: size of the file system.

    Returns:
        True if the folder is a mount point now.

    Raises:
        NotADirectoryError: the path is a link or another kind of file.
        PermissionError: another user owns the folder or may write to it. The check is needed because all users can
            write to /dev/shm, and they can predict the name.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "the path for the slots is not a directory; remove it", str(folder))
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        words = (
            f"it is of uid {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}, and this agent trusts its own "
            "folder alone; remove it"
        )
        raise PermissionError(errno.EPERM, words, str(folder))
    if os.path.ismount(folder):
        return True
    if any(folder.iterdir()):
        return False
    size = f"size={size_bytes},mode=0700"
    return try_mount(folder, f"{size},huge=within_size") or try_mount(folder, size)


def try_mount(folder: Path, options: str) -> bool:
    """Mount a tmpfs on a folder. Return whether the kernel permitted it."""
    return int(_mount(b"everstep", os.fsencode(folder), b"tmpfs", _NOSUID_NODEV_NOEXEC, options.encode())) == 0
