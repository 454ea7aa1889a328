"""Opens this node's connections to the other nodes of one generation: sessions for messages, streams for chunks."""

from __future__ import annotations

import socket

from everstep.protocol.ids import NO_RANK, NodeId, Rank
from everstep.protocol.peer_messages import SessionKind
from everstep.protocol.plan import GenerationPlan
from worker.node.network_cards import NetworkCard, network_cards
from worker.replication.identity import PeerIdentity
from worker.replication.routes import Address, Ways
from worker.replication.tcp import TcpSession, dial
from worker.replication.transport import Dialler, PeerCredentials, Session


class PeerSessions:
    """Opens authenticated sessions and streams to the nodes of one generation."""

    def __init__(
        self,
        node_id: NodeId,
        address: str,
        plan: GenerationPlan,
        key: bytes,
        *,
        identity: PeerIdentity | None = None,
    ) -> None:
        assert identity is not None or not plan.encrypts_peers, "a plan with TLS needs an identity"
        self.credentials = PeerCredentials(
            plan.job,
            plan.run,
            plan.generation,
            node_id,
            key,
            silence_seconds=plan.timeouts.holder_deadline_seconds,
            identity=identity if plan.encrypts_peers else None,
        )
        self._address = address
        self._plan = plan
        self._ways = Ways(network_cards(address))

    def dialler(self, peer: NodeId, kind: SessionKind, owner_rank: Rank) -> Dialler:
        """Return the object with which a sender or a fetch opens its connections to `peer`."""
        return _PeerDialler(self, peer, kind, owner_rank)

    async def dial(self, peer: NodeId, kind: SessionKind, owner_rank: Rank = NO_RANK) -> TcpSession:
        """Open a session to another node of this generation (see `tcp.dial`)."""
        node = self._plan.node(peer)
        return await dial(
            self.credentials,
            peer=peer,
            address=node.address,
            port=node.peer_port,
            kind=kind,
            owner_rank=owner_rank,
            source=NetworkCard(self._address),
        )

    async def stream(self, session: Session, number: int) -> socket.socket:
        """Open stream `number` of a session. Consecutive streams use different pairs of network cards."""

        async def over(card: NetworkCard, to: Address) -> TcpSession:
            address, port = to
            return await dial(
                self.credentials,
                peer=session.peer,
                address=address,
                port=port,
                kind="stream",
                owner_rank=session.opened.owner_rank,
                source=card,
                session=session.opened.nonce,
            )

        return (await self._ways.open(session.peer, session.addresses, number, over)).detach()


class _PeerDialler:
    def __init__(self, sessions: PeerSessions, peer: NodeId, kind: SessionKind, owner_rank: Rank) -> None:
        self._sessions = sessions
        self._peer = peer
        self._kind = kind
        self._owner_rank = owner_rank

    async def session(self) -> Session:
        return await self._sessions.dial(self._peer, self._kind, self._owner_rank)

    async def stream(self, session: Session, number: int) -> socket.socket:
        return await self._sessions.stream(session, number)
