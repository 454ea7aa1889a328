"""A listening unix socket that only this user's processes can open.

The module does not change the process's umask, which all threads share.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path


def listen_private(path: Path) -> socket.socket:
    """Listen at a path, with mode 0600 from the first moment. A socket file of an earlier process is replaced.

    On Linux, the file receives the mode of the unbound socket, so that other users can never open the socket. The path
    may have any length: the address, which is limited to 107 bytes, refers to the folder's descriptor.

    Args:
        path: path of the socket; its folder exists.

    Returns:
        The listening socket, non-blocking.

    Raises:
        OSError: the folder does not exist or is not writable.
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
        listener.listen(128)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
