"""TCP ports that stay reserved for libraries that need a port number before they listen."""

from __future__ import annotations

import socket


class ReservedPort:
    """A TCP port that the kernel assigns to no other process while this object is open.

    The process that receives the number can still listen on the port, at any address.

    Linux lets a second socket bind the port if both sockets have SO_REUSEADDR and neither listens yet; torch's store
    sets this option. When the kernel chooses a port itself, it skips bound ports. Without the reservation, another
    process could use the port before the intended process does.
    """

    def __init__(self, number: int = 0, address: str = "") -> None:
        """Reserve a port that the kernel chooses on all addresses, or the given port.

        A given port is reserved on `address` only, because other processes may use its number on other addresses.
        """
        self._holder = socket.socket()
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holder.bind((address if number else "", number))
        self.number: int = self._holder.getsockname()[1]

    def close(self) -> None:
        """Release the reservation. A process that already listens on the port continues."""
        self._holder.close()
