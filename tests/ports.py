"""Ports for libraries that must be told one before they listen themselves."""

from __future__ import annotations

import socket


class ReservedPort:
    """A TCP port that the kernel gives nobody else while this is open, and that who is told of it can listen on, on any
    address.

    Linux lets a second socket bind the port when both have SO_REUSEADDR and none listens yet (torch's store has it); a
    port that it chooses itself, to bind or to connect, is never one that is bound already. A port that was merely free
    a moment ago may be somebody's by the time it is used.
    """

    def __init__(self, number: int = 0) -> None:
        """Take the port of that number, or one that the kernel chooses."""
        self._holder = socket.socket()
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holder.bind(("", number))
        self.number: int = self._holder.getsockname()[1]

    def close(self) -> None:
        """Let go of it; who listens on it goes on."""
        self._holder.close()
