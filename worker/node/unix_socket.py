"""A listening unix socket that only this user's processes can open, made without touching the process's umask, which all its threads share."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def listen_private(path: Path, backlog: int = 128) -> socket.socket:
    """Listen at a path with mode 0600 from the first moment; a socket that an earlier owner left there is replaced.

    Linux gives the file the mode of the unbound socket, so there is no moment at which others could open it, and no
    umask to set and restore. The path may be of any length: the address holds 107 bytes, so it goes by the directory's
    descriptor.

    Args:
        path: where the socket's file is to be; its directory exists.
        backlog: connections that may wait to be accepted.

    Returns:
        The listener, non-blocking.

    Raises:
        OSError: the directory is not there, or not ours to write in.
    """
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), 0o600)
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            listener.bind(f"/proc/self/fd/{directory}/{path.name}")
        finally:
            os.close(directory)
        listener.listen(backlog)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
