"""Provides functions that read from a socket, or wait for it, if its bytes pass through OpenSSL or NIXL.

These libraries hold received bytes in buffers of their own, where the kernel's blocking calls do not see them. The
functions let such a socket behave like a plain blocking socket.

Invariant: a call waits at most as long as SO_SNDTIMEO or SO_RCVTIMEO allows.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable
from typing import Any

_TIMEVAL = struct.Struct("ll")


def wait_for(line: socket.socket, event: int, limit: int) -> bool:
    """Wait until the socket can send or receive.

    Args:
        line: a connected socket. Its options contain the time limit.
        event: `select.POLLIN` or `select.POLLOUT`.
        limit: option with the time limit, `socket.SO_RCVTIMEO` or `socket.SO_SNDTIMEO`. Zero means no limit.

    Returns:
        False if the time limit ended the wait.
    """
    seconds, micros = _TIMEVAL.unpack(line.getsockopt(socket.SOL_SOCKET, limit, _TIMEVAL.size))
    poll = select.poll()
    poll.register(line, event)
    return bool(poll.poll((1000 * seconds + micros / 1000) or None))


def fill(buffer: Any, flags: int, receive: Callable[[memoryview], int]) -> int:
    """Receive bytes as `socket.recv_into` does.

    Args:
        buffer: uint8[n], the destination.
        flags: with MSG_WAITALL, the call fills the buffer unless a time limit or the end of the connection comes first.
        receive: receives at least one byte, and returns the number of bytes; 0 at the end of the connection. It raises
            BlockingIOError after its time limit.

    Returns:
        The number of received bytes; 0 at the end of the connection.

    Raises:
        BlockingIOError: the time limit passed before the first byte.
    """
    filled = 0
    with memoryview(buffer) as whole:
        while filled < whole.nbytes:
            try:
                with whole[filled:] as rest:
                    count = receive(rest)
            except BlockingIOError:
                if filled:
                    break
                raise
            filled += count
            if count == 0 or not flags & socket.MSG_WAITALL:
                break
    return filled
