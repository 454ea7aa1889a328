"""A tmpfs of the node's own: its size is what slots may take, whatever /dev/shm has left, and its pages are huge where the kernel has such.

Huge pages are given ten times as fast, and a rank that maps a slot needs five hundred times fewer entries in its page
table. Invariant: without the right to mount, or on a kernel that refuses, the folder is used as it is.

The mount outlives the agent, as the slots on it must: the next agent finds it. It goes with the instance.
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
    """Mount a tmpfs at `folder`, once: by the agent when it starts.

    A folder that already holds something stays as it is.

    Args:
        folder: made here, with mode 0700; its store lets ranks through.
        size_bytes: what may lie on it.

    Returns:
        Whether the folder is a mount of its own now.

    Raises:
        NotADirectoryError: something else is there, or a link.
        PermissionError: another user has made the folder, or may write to it: /dev/shm is open to everybody, and the
            name can be foreseen.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "slots go into a directory; remove what is there", str(folder))
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
    return _try_mount(folder, f"{size},huge=within_size") or _try_mount(folder, size)


def _try_mount(folder: Path, options: str) -> bool:
    return int(_mount(b"everstep", os.fsencode(folder), b"tmpfs", _NOSUID_NODEV_NOEXEC, options.encode())) == 0
