"""A tmpfs of the node's own: its size is what slots may take, whatever /dev/shm has left, and its pages are huge where the kernel has such.

Huge pages are given ten times as fast, and a rank that maps a slot needs five hundred times fewer entries in its page table. Invariant: without the
right to mount, or on a kernel that refuses, the folder is used as it is.

The mount outlives the agent, as the slots on it must: the next agent finds it. It goes with the instance.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
_mount = ctypes.CDLL(None, use_errno=True).mount
_mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)


def mount(folder: Path, size_bytes: int) -> bool:
    """Mount a tmpfs at `folder`, once: by the agent when it starts. A folder that already holds something stays as it is.

    Args:
        folder: made here, with mode 0700; its store lets ranks through.
        size_bytes: what may lie on it.

    Returns:
        Whether the folder is a mount of its own now.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if os.path.ismount(folder):
        return True
    if any(folder.iterdir()):
        return False
    size = f"size={size_bytes},mode=0700"
    return _try_mount(folder, f"{size},huge=within_size") or _try_mount(folder, size)


def _try_mount(folder: Path, options: str) -> bool:
    return int(_mount(b"everstep", os.fsencode(folder), b"tmpfs", _NOSUID_NODEV_NOEXEC, options.encode())) == 0
