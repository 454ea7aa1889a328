"""A stream socket that carries frames both ways and never blocks.

Invariant: what `receive` returns are whole frames in order; what `send` took is sent in order or the other side is
reported gone.
"""

from __future__ import annotations

import socket

from everstep.protocol import codec
from everstep.protocol.codec import Message

_MAX_UNSENT_BYTES = 4 * codec.MAX_MESSAGE_BYTES
"""A peer that reads nothing is given up beyond this; it learns everything again when it reconnects."""
_RECEIVE_BYTES = 1 << 18


class Line:
    """One stream socket with frames in both directions, never blocking."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._received = bytearray()
        self._unsent = bytearray()

    def receive(self) -> list[bytes] | None:
        """Take what has arrived.

        Returns:
            The frames that are whole, or None when the other side is gone.

        Raises:
            OversizedMessage: it announces a frame beyond the limit.
        """
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
        """Send what can be sent and keep the rest; False when the other side is gone or does not read."""
        self._unsent += codec.frame(message)
        return self.flush()

    def flush(self) -> bool:
        """Send more of what was kept; False when the other side is gone or does not read."""
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
        """Whether `flush` has work."""
        return bool(self._unsent)
