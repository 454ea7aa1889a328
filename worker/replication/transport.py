"""Network interfaces for replication: sessions for messages, and their streams for chunks.

Invariant: a `Session` exists only after the other side has proved, for this session, that it holds the generation's
key.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Protocol

from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, JobName, NodeId, RunId
from everstep.protocol.peer_messages import Open
from worker.replication.identity import PeerIdentity


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """Identity and key with which a node opens and accepts sessions of one generation."""

    job: JobName
    run: RunId
    generation: Generation
    node_id: NodeId
    key: bytes
    silence_seconds: float
    """Seconds without a packet of the peer's kernel after which a connection counts as lost (`worker.node.sockets`)."""
    identity: PeerIdentity | None = None
    """Encrypts the generation's connections; None leaves them plain."""

    def __repr__(self) -> str:
        return f"Credentials(run={self.run}, generation={self.generation}, node_id={self.node_id})"


class Session(Protocol):
    """An open connection to another agent. Messages arrive in order, or the session fails."""

    opened: Open
    """The first message of the dialling side, with the purpose of the session."""
    peer: NodeId
    addresses: tuple[tuple[str, int], ...]
    """The listener's addresses, one per network card; empty in the listener's own session object."""

    async def send(self, *messages: Message) -> None:
        """Send messages of at most `MAX_PEER_MESSAGE_BYTES` each in one write. Raises PeerLost."""

    async def receive(self) -> Message:
        """Return the next message of the union `PeerMessage`. Raises PeerLost, or ProtocolError for an invalid one."""

    def close(self) -> None:
        """Close the connection immediately. Further calls change nothing."""


class Dialler(Protocol):
    """Opens connections to one peer, in one generation."""

    async def session(self) -> Session:
        """Open a session, which the caller closes. Raises PeerError if the peer does not answer."""

    async def stream(self, session: Session, number: int) -> socket.socket:
        """Open a stream of a session of this dialler: a connected, authenticated, blocking socket.

        `number`, from 0, selects the network cards on both nodes. Raises PeerError if the peer does not answer.
        """
