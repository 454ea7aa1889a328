"""Gives an instance shared memory of its own, so that its agent may remove what ranks leave. Standard library only."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

SHARED: Final = Path("/dev/shm")
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x20000, 0x08000000, 0x10000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000


def make_own_memory(sockets: Path) -> int | None:
    """Give this single-threaded process and its descendants a /dev/shm and System V memory of their own.

    The folder for sockets is a mount of the outer one, which no program without privileges can imitate. The agent
    recognizes by it that all other files come from this instance. Return a descriptor of the outer /dev/shm, or None,
    without a change, if the kernel refuses.
    """
    trial = os.fork()  # a process cannot leave a namespace, and the kernel may refuse the mounts
    if trial == 0:
        try:
            _enter(sockets)
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(trial, 0)[1] != 0:
        return None
    try:
        return _enter(sockets)
    except OSError:  # for example because the trial created the last namespace that the limit permits
        return None


def _enter(sockets: Path) -> int:
    uid, gid = os.getuid(), os.getgid()
    sockets.mkdir(mode=0o700, exist_ok=True)
    size = os.statvfs(SHARED)
    libc = ctypes.CDLL(None, use_errno=True)

    def checked(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def mount(source: str, target: Path, kind: str, flags: int, options: str) -> None:
        checked(libc.mount(source.encode(), os.fsencode(target), kind.encode(), flags, options.encode()))

    checked(libc.unshare(_CLONE_NEWNS | _CLONE_NEWIPC | (_CLONE_NEWUSER if uid else 0)))
    if uid:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path("/proc/self", name).write_text(text)
    mount("none", Path("/"), "", _MS_REC | _MS_PRIVATE, "")
    shared = os.open(SHARED, os.O_PATH | os.O_DIRECTORY)  # before the mount that hides it
    outside = os.open(sockets.name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=shared)
    options = f"mode=1777,size={size.f_blocks * size.f_frsize}"
    mount("tmpfs", SHARED, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    sockets.mkdir(mode=0o700)
    mount(f"/proc/self/fd/{outside}", sockets, "", _MS_BIND, "")
    os.close(outside)
    return shared
