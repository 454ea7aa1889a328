"""Unix sockets that only this user's processes can open. The umask, which all threads share, does not change."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path


def make_socket_folder(folder: Path) -> None:
    """Create a folder for sockets, with mode 0700, below a folder that all users can write to, such as /dev/shm.

    Raises NotADirectoryError if the path is a link or another kind of file, and PermissionError if another user owns
    the folder or may write to it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "the path for sockets is not a directory; remove it", str(folder))
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        words = (
            f"it is of uid {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}, and this agent trusts its own "
            "folder alone; remove it"
        )
        raise PermissionError(errno.EPERM, words, str(folder))


def listen_private(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Listen at a path of any length, with mode 0600 from the first moment. An earlier process's file is replaced.

    Return the listening socket, non-blocking. Raises OSError if the folder does not exist or is not writable.
    """
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        # On Linux, the file receives the mode of the unbound socket, so other users can never open the socket.
        os.fchmod(listener.fileno(), 0o600)
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            # The address, which is limited to 107 bytes, refers to the folder's descriptor.
            listener.bind(f"/proc/self/fd/{directory}/{path.name}")
        finally:
            os.close(directory)
        listener.listen(128)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def connect_private(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Connect to a socket at a path of any length. Raises OSError if no process listens."""
    line = socket.socket(socket.AF_UNIX, kind)
    try:
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            line.connect(f"/proc/self/fd/{directory}/{path.name}")
        finally:
            os.close(directory)
    except BaseException:
        line.close()
        raise
    return line
