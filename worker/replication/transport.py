"""What replication needs of a network: authenticated sessions that carry messages; shards travel on streams that belong to them (`streams`).

Invariant: whoever holds a `Session` knows that the other side proved possession of the generation's key for exactly
this session.
"""

from __future__ import annotations

import socket
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
    """How long a peer's kernel may be silent before a line to it is lost (`worker.node.sockets`)."""

    def __repr__(self) -> str:
        return f"Credentials(run={self.run}, generation={self.generation}, node_id={self.node_id})"


class Session(Protocol):
    """One open line to another agent. Messages arrive in order or not at all."""

    opened: Open
    """What the dialler asked for."""
    peer: NodeId
    addresses: tuple[tuple[str, int], ...]
    """Where the listener can be reached, an address for each of its network cards; empty on the listener's side."""

    async def send(self, *messages: Message) -> None:
        """Send messages, in one go: the other side is woken once.

        Args:
            *messages: each at most `MAX_PEER_MESSAGE_BYTES` when encoded; the other side refuses a longer one.

        Raises:
            PeerLost: the line is gone.
        """

    async def receive(self) -> Message:
        """Return the next message.

        Returns:
            A message of `PeerMessage`.

        Raises:
            PeerLost: the line is gone.
            ProtocolError: the other side sent what is not a message; the line is closed.
        """

    def close(self) -> None:
        """End the line at once; calling it again changes nothing."""


class Dialler(Protocol):
    """Opens lines to one peer, in one generation."""

    async def session(self) -> Session:
        """Open a session.

        Returns:
            The session, both sides proven; the caller closes it.

        Raises:
            PeerError: nobody answers, or who answers is not the peer.
        """

    async def stream(self, session: Session, number: int) -> socket.socket:
        """Open a stream of a session.

        Args:
            session: that this dialler opened.
            number: of the stream, from 0: which of both nodes' network cards it takes.

        Returns:
            A connected, blocking socket, both sides proven.

        Raises:
            PeerError: nobody answers, or who answers is not the peer.
        """
