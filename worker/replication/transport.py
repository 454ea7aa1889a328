"""Interfaces of the network that replication uses: authenticated sessions for messages, and their streams for shards.

Invariant: a `Session` exists only after the other side has proved for this session that it has the generation's key.
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
    """Identity and key with which a node opens and accepts sessions of one generation."""

    job: JobName
    run: RunId
    generation: Generation
    node_id: NodeId
    key: bytes
    silence_seconds: float
    """Time without an answer of a peer's kernel after which its connection is lost (`worker.node.sockets`)."""

    def __repr__(self) -> str:
        return f"Credentials(run={self.run}, generation={self.generation}, node_id={self.node_id})"


class Session(Protocol):
    """An open connection to another agent. Messages arrive in order or not at all."""

    opened: Open
    """The first message of the dialling side, with the purpose of the session."""
    peer: NodeId
    addresses: tuple[tuple[str, int], ...]
    """The listener's addresses, one per network card; empty on the listener's side."""

    async def send(self, *messages: Message) -> None:
        """Send messages in one write, so that the other side wakes up once.

        Args:
            *messages: each has at most `MAX_PEER_MESSAGE_BYTES` when encoded; the other side rejects longer ones.

        Raises:
            PeerLost: the connection is lost.
        """

    async def receive(self) -> Message:
        """Return the next message.

        Returns:
            A message of the union `PeerMessage`.

        Raises:
            PeerLost: the connection is lost.
            ProtocolError: the other side sent no valid message; the connection is closed.
        """

    def close(self) -> None:
        """Close the connection immediately. Further calls change nothing."""


class Dialler(Protocol):
    """Opens connections to one peer, in one generation."""

    async def session(self) -> Session:
        """Open a session.

        Returns:
            The session, authenticated on both sides; the caller closes it.

        Raises:
            PeerError: the peer does not answer, or the answering node is not the peer.
        """

    async def stream(self, session: Session, number: int) -> socket.socket:
        """Open a stream of a session.

        Args:
            session: a session that this dialler opened.
            number: number of the stream, from 0; it selects the network cards on both nodes.

        Returns:
            A connected, blocking socket, authenticated on both sides.

        Raises:
            PeerError: the peer does not answer, or the answering node is not the peer.
        """
