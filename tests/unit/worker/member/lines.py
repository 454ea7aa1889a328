"""Connects two nodes in one process. Their sessions pass messages through queues, and streams use loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine

from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, NodeId, Rank, RunId
from everstep.protocol.peer_messages import Open, SessionKind
from worker.errors import PeerLost
from worker.replication.streams import Streams
from worker.replication.transport import Session
from worker.tasks import finish

Serve = Callable[[Session, Streams], Coroutine[object, object, None]]


class Line:
    """One end of a session between two nodes. It passes messages through queues, and implements `Session`."""

    def __init__(
        self,
        peer: NodeId,
        kind: SessionKind,
        inbox: asyncio.Queue[Message | None],
        outbox: asyncio.Queue[Message | None],
    ) -> None:
        self.opened = Open(
            run=RunId("ab" * 16),
            generation=Generation(1),
            kind=kind,
            node_id=peer,
            owner_rank=Rank(-1),
            nonce=bytes(32),
        )
        self.peer = peer
        self.addresses: tuple[tuple[str, int], ...] = ()
        self._inbox = inbox
        self._outbox = outbox

    async def send(self, *messages: Message) -> None:
        for message in messages:
            self._outbox.put_nowait(message)

    async def receive(self) -> Message:
        message = await self._inbox.get()
        if message is None:
            self._inbox.put_nowait(None)
            raise PeerLost("the session ended")
        return message

    def close(self) -> None:
        self._outbox.put_nowait(None)
        self._inbox.put_nowait(None)


class LineDialler:
    """Opens sessions to one peer. Implements `Dialler`.

    Args:
        here: the dialling node.
        peer: the node to which the sessions lead.
        serve: serves the peer's end of a session, with its streams.
        on_stream: receives the socket of each new stream, and returns the socket that the dialling node reads.
    """

    def __init__(
        self,
        here: NodeId,
        peer: NodeId,
        kind: SessionKind,
        serve: Serve,
        *,
        on_stream: Callable[[socket.socket], socket.socket] = lambda line: line,
    ) -> None:
        self._here = here
        self._peer = peer
        self._kind: SessionKind = kind
        self._serve = serve
        self._on_stream = on_stream
        self.serving: set[asyncio.Task[None]] = set()
        self._streams: dict[int, Streams] = {}

    async def session(self) -> Session:
        there: asyncio.Queue[Message | None] = asyncio.Queue()
        back: asyncio.Queue[Message | None] = asyncio.Queue()
        line = Line(self._peer, self._kind, back, there)
        streams = self._streams[id(line)] = Streams()
        self.serving.add(asyncio.create_task(self._run(Line(self._here, self._kind, there, back), streams)))
        return line

    async def _run(self, line: Line, streams: Streams) -> None:
        try:
            await self._serve(line, streams)
        finally:
            line.close()
            await finish(streams.close())

    async def stream(self, session: Session, number: int) -> socket.socket:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            here = socket.create_connection(listener.getsockname())
            there, _ = listener.accept()
        self._streams[id(session)].add(there)
        return self._on_stream(here)
