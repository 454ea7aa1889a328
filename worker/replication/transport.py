"""What replication needs of a network: authenticated sessions that carry messages and chunks.

Invariant: whoever holds a `Session` knows that the other side proved possession of the generation's key for exactly this session.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, JobName, NodeId, RunId
from everstep.protocol.peer_messages import Open


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a node needs to speak for one generation."""

    job: JobName
    run: RunId
    generation: Generation
    node_id: NodeId
    key: bytes
    silence_seconds: float
    """How long a peer's kernel may be silent before a line to it is lost (`worker.sockets`)."""

    def __repr__(self) -> str:
        return f"Credentials(run={self.run}, generation={self.generation}, node_id={self.node_id})"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a payload is next on the stream: `size` bytes that belong at `offset`."""

    offset: int
    size: int


class Session(Protocol):
    """One open line to another agent. Messages arrive in order or not at all."""

    opened: Open
    """What the dialler asked for."""
    peer: NodeId

    async def send(self, message: Message) -> None:
        """Send one message.

        Args:
            message: at most `MAX_PEER_MESSAGE_BYTES` when encoded; the other side refuses a longer one.

        Raises:
            PeerLost: the line is gone.
        """

    async def send_chunk(self, offset: int, data: memoryview) -> None:
        """Send a piece of a payload; `data` is not touched after the call has returned, also when it is cancelled.

        Args:
            offset: where the piece begins in the payload, bytes.
            data: uint8[size], of at most `MAX_CHUNK_BYTES`.

        Raises:
            PeerLost: the line is gone, or was closed because the peer did not take the rest of a cancelled piece.
        """

    async def receive(self) -> Message | Chunk:
        """Return the next message, or the announcement of a chunk whose bytes must be taken next by `receive_into`.

        Returns:
            A message, or the `Chunk` that is next on the stream.

        Raises:
            PeerLost: the line is gone.
            ProtocolError: the other side sent what is not a message; the line is closed.
        """

    async def receive_into(self, view: memoryview) -> None:
        """Fill `view` with the bytes of the announced chunk.

        Args:
            view: uint8[size] of the chunk, filled whole.

        Raises:
            PeerLost: the line is gone.
        """

    def close(self) -> None:
        """End the line at once; calling it again changes nothing."""
