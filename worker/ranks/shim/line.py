"""Sends and receives messages between shim and agent over a stream socket without blocking.

Invariant: `receive` returns whole frames in order. `send` either delivers all messages in order or reports that the
connection is lost.
"""

from __future__ import annotations

import socket

from everstep.protocol import codec
from everstep.protocol.codec import Message

_MAX_UNSENT_BYTES = 4 * codec.MAX_MESSAGE_BYTES
"""Limit of unsent bytes. Beyond it, the connection counts as lost, and the client receives the full state later."""
_RECEIVE_BYTES = 1 << 18


class ShimLine:
    """Connection over a stream socket that sends and receives frames and never blocks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._received = bytearray()
        self._unsent = bytearray()

    def receive(self) -> list[bytes] | None:
        """Return the complete frames that have arrived; None once the peer has closed. Raises OversizedMessage."""
        try:
            data = self.socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self._received += data
        frames = []
        prefix = codec.LENGTH.size
        while len(self._received) >= prefix:
            end = prefix + codec.frame_length(bytes(self._received[:prefix]))
            if len(self._received) < end:
                break
            frames.append(bytes(self._received[prefix:end]))
            del self._received[:end]
        return frames

    def send(self, message: Message) -> bool:
        """Send a message, and store the bytes that the socket does not accept. Return False if the peer is lost."""
        self._unsent += codec.frame(message)
        return self.flush()

    def flush(self) -> bool:
        """Send stored bytes as far as the socket accepts them. Return False if the peer is lost or does not read."""
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            return len(self._unsent) <= _MAX_UNSENT_BYTES
        except OSError:
            return False
        return True

    @property
    def has_unsent(self) -> bool:
        """True while `flush` must be called."""
        return bool(self._unsent)
