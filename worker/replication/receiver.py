"""Serves the sessions in which other agents send shards to this node or fetch shards from it.

Invariant: one replica session exists per generation and owner. A new session first ends the previous one, so two
sessions never write the same shard.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

from everstep.protocol.errors import MalformedMessage, ProtocolError
from everstep.protocol.ids import NodeId, Rank, Step
from everstep.protocol.limits import cut
from everstep.protocol.peer_messages import (
    BeginShard,
    CancelShard,
    EndShard,
    FetchShard,
    HolderInventory,
    PreparingShard,
    PrintedLines,
    ReserveShard,
    ShardDigests,
    ShardRefused,
    ShardReserved,
    ShardSealed,
    ShardWanted,
)
from worker.core.slots import Content
from worker.errors import NoRoom, PeerError, PeerLost
from worker.replication.contributions import Contributions
from worker.replication.streams import ChunkQueue, Receiver, Streams
from worker.replication.tcp import TcpSession
from worker.replication.transfers import ShardDamaged, ShardRejected, announcement, receive_shard, send_shard
from worker.replication.transport import Session
from worker.shm.shares import Shares
from worker.shm.store import SlotStore
from worker.tasks import end, finish, first_of

log = logging.getLogger(__name__)
PREPARING_SECONDS = 0.1
"""Interval of progress messages while this node creates slots. It must be far below the owner's holder deadline."""
MAX_STREAMS = 64
"""Maximum number of streams per session; further streams are rejected."""


@dataclass(slots=True, eq=False)
class _Open:
    """An open session with its streams. The handshake of a new stream names the session to which it is attached."""

    peer: NodeId
    rank: Rank
    """The rank whose shard the session copies; -1 for a fetch."""
    receiver: Receiver | None
    """Writes arriving chunks into their slot; None if this side of the session sends chunks."""
    streams: Streams = field(default_factory=Streams)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    trouble: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None

    def fail(self, error: Exception) -> None:
        self.error = self.error or error
        self.trouble.set()

    async def failed(self) -> None:
        await self.trouble.wait()
        assert self.error is not None
        raise self.error


@dataclass(eq=False, repr=False)
class ReplicaReceiver:
    """Accepts the sessions in which other nodes send replicas to this node or fetch shards from it.

    Args:
        held_ranks: owners of the shards that the plan places on this node. Replica sessions of others are rejected.
        keep: returns the contents to keep of a shard, given the newest committed step that its owner has reported.
        take_lines: stores log lines that an owner's ranks have printed; None discards them.
        shares: the shares of this node, which accept contributions of other ranks; None without parity.
        load_earlier: after a relayout, loads a requested earlier shard that no slot contains; otherwise None.
    """

    store: SlotStore
    _: KW_ONLY
    held_ranks: Collection[Rank]
    keep: Callable[[Rank, Step], Collection[Content]]
    slot_count: int
    take_lines: Callable[[NodeId, PrintedLines], Awaitable[None]] | None = None
    shares: Shares | None = None
    load_earlier: Callable[[Rank], Coroutine[object, object, None]] | None = None

    def __post_init__(self) -> None:
        self.preparing_seconds = PREPARING_SECONDS
        self._contributions = Contributions(self.shares) if self.shares is not None else None
        self._held = frozenset(self.held_ranks)
        self._sessions: dict[Rank, asyncio.Task[None]] = {}
        self._open: dict[bytes, _Open] = {}
        self.rejected_count = 0

    @property
    def open_sessions(self) -> tuple[_Open, ...]:
        """The open sessions of this node's generation, each with its streams."""
        return tuple(self._open.values())

    async def stream(self, session: TcpSession) -> None:
        """Serve a stream. Raises MalformedMessage if its session is not open, or has `MAX_STREAMS` streams."""
        owner = self._open.get(session.opened.session)
        if owner is None or owner.peer != session.peer or len(owner.streams.lines) >= MAX_STREAMS:
            raise MalformedMessage("a stream names a session that is not open")
        line = session.detach()
        owner.streams.add(line)
        if owner.receiver is None:
            await owner.over.wait()
            return
        try:
            await owner.streams.run(line, owner.receiver.receive)
        except (PeerError, ProtocolError) as error:
            owner.fail(error)
        except Exception as error:
            # The session's transfer would otherwise wait for ever for chunks that this stream has lost.
            owner.fail(PeerLost(f"a stream raised {error!r}"))
            raise
        finally:
            owner.streams.drop(line)

    async def replica(self, session: Session) -> None:
        """Receive replicas of one owner's shard, or parts of it for a share, until the owner disconnects.

        Raises MalformedMessage if this node does not hold the shard, or the owner sent an unexpected message.
        """
        rank = session.opened.owner_rank
        parity = self._parity(rank)
        if rank not in self._held and parity is None:
            raise MalformedMessage(f"this node is not a holder of rank {rank}")
        task = asyncio.current_task()
        assert task is not None
        earlier = self._sessions.get(rank)
        self._sessions[rank] = task
        if earlier is not None:
            await end(earlier)
        if parity is not None:
            parity.connect(rank)
        try:
            await self._serve(session, Receiver(), lambda owner: self._take(session, owner, rank))
        finally:
            if self._sessions.get(rank) is task:
                del self._sessions[rank]
                if parity is not None:
                    parity.disconnect(rank)

    def _parity(self, rank: Rank) -> Contributions | None:
        parity = self._contributions
        return parity if parity is not None and parity.expects(rank) else None

    def _cut(self, ranks: Collection[Rank]) -> None:
        for owner in self.open_sessions:
            if owner.rank in ranks and owner.receiver is not None:
                # The agents then open new sessions and send the shards again.
                owner.fail(PeerLost("another shard of the same step was offered, so this node has emptied its share"))

    async def _serve(
        self, session: Session, receiver: Receiver | None, work: Callable[[_Open], Coroutine[object, object, None]]
    ) -> None:
        """Run `work` for one session. On return, all threads of its streams have ended."""
        owner = _Open(session.peer, session.opened.owner_rank, receiver)
        self._open[session.opened.nonce] = owner
        try:
            await first_of(work(owner), owner.failed())
        finally:
            del self._open[session.opened.nonce]
            owner.over.set()
            await finish(owner.streams.close())

    async def _take(self, session: Session, owner: _Open, rank: Rank) -> None:
        parity = self._parity(rank)
        slot_owner = rank if parity is None else parity.slot_owner(rank)
        sealed = tuple(
            (record.origin_generation, record.step, record.digest)
            for record in self.store.inventory()
            if record.owner_rank == rank
        )
        await session.send(
            HolderInventory(owner_rank=rank, sealed=sealed if parity is None else parity.inventory(rank))
        )
        taking: asyncio.Task[None] | None = None
        reserving: asyncio.Task[None] | None = None
        saying = asyncio.create_task(self._in_turn(owner, None, partial(self._say_preparing, session, slot_owner)))
        message_queue: asyncio.Queue[ShardDigests | EndShard] = asyncio.Queue()
        number = 0
        try:
            while True:
                message = await session.receive()
                match message:
                    case BeginShard() if message.owner_rank == rank and message.transfer > number:
                        number, message_queue = message.transfer, asyncio.Queue()
                        await end(taking)
                        taking = asyncio.create_task(
                            self._in_turn(
                                owner, reserving, partial(self._take_one, session, owner, message, message_queue.get)
                            )
                        )
                    case ShardDigests() | EndShard() if message.transfer <= number:
                        if message.transfer == number:
                            message_queue.put_nowait(message)
                    case PreparingShard() if parity is not None:
                        parity.progress(rank)
                    case PrintedLines():
                        if self.take_lines is not None:
                            await self.take_lines(session.peer, message)
                    case CancelShard():
                        if message.transfer == number:
                            await end(taking)
                    case ReserveShard() if message.capacity_bytes >= 0:
                        await end(reserving)
                        reserving = asyncio.create_task(
                            self._in_turn(owner, taking, partial(self._reserve, session, rank, message))
                        )
                    case _:
                        raise MalformedMessage(
                            f"{type(message).__name__} received, expected the beginning of a shard of rank {rank}"
                        )
        finally:
            await end(taking, reserving, saying)

    @staticmethod
    async def _in_turn(owner: _Open, behind: asyncio.Task[None] | None, work: Callable[[], Awaitable[None]]) -> None:
        """Run one task of a session after the previous task (`behind`) has ended. An error ends the session."""
        try:
            if behind is not None and not behind.done():
                await asyncio.wait([behind])
            await work()
        except Exception as error:
            owner.fail(error)

    async def _say_preparing(self, session: Session, slot_owner: Rank) -> None:
        """Send progress messages while this node creates slots, so that the owner keeps this holder in view."""
        while True:
            if not self.store.is_making(slot_owner):
                await self.store.making.wait(self.store.making.version)
            await asyncio.sleep(self.preparing_seconds)
            if self.store.is_making(slot_owner):
                await session.send(PreparingShard())

    async def _reserve(self, session: Session, rank: Rank, wanted: ReserveShard) -> None:
        parity = self._parity(rank)
        try:
            if parity is not None:
                await parity.shares.reserve(rank, wanted.capacity_bytes)
            else:
                await self.store.reserve(
                    rank,
                    capacity_bytes=wanted.capacity_bytes,
                    layout_hash=wanted.layout_hash,
                    slot_count=self.slot_count,
                )
        except NoRoom as error:
            # When the owner sends the shard, this node refuses it with the same reason.
            log.info("no memory for the shards of rank %d: %s", rank, error)
        await session.send(ShardReserved(capacity_bytes=wanted.capacity_bytes, layout_hash=wanted.layout_hash))

    async def _take_one(
        self,
        session: Session,
        owner: _Open,
        begin: BeginShard,
        next_message: Callable[[], Awaitable[ShardDigests | EndShard]],
    ) -> None:
        assert owner.receiver is not None
        parity = self._parity(begin.owner_rank)
        try:
            digest = (
                await parity.take(session, owner.streams, owner.receiver, begin, next_message, on_emptied=self._cut)
                if parity is not None
                else await receive_shard(
                    session,
                    owner.streams,
                    owner.receiver,
                    begin,
                    next_message,
                    self.store,
                    keep=self.keep(begin.owner_rank, begin.committed),
                    slot_count=self.slot_count,
                    silence_seconds=None,
                )
            )
            await session.send(ShardSealed(transfer=begin.transfer, digest=digest))
        except (ShardRejected, NoRoom) as error:
            self.rejected_count += 1
            await session.send(
                ShardRefused(
                    transfer=begin.transfer, reason=cut(str(error)), is_damaged=isinstance(error, ShardDamaged)
                )
            )

    async def fetch(self, session: Session) -> None:
        """Send the shards that another node requests until it disconnects. Raises MalformedMessage and PeerLost."""
        await self._serve(session, None, lambda owner: self._give(session, owner))

    async def supply(self, session: Session, work: Callable[[Streams], Coroutine[object, object, None]]) -> None:
        """Run `work`, which sends chunks over the streams of a session. On return, all streams are closed."""
        await self._serve(session, None, lambda owner: work(owner.streams))

    async def _give(self, session: Session, owner: _Open) -> None:
        number = 0
        while True:
            wanted = await session.receive()
            if not isinstance(wanted, FetchShard):
                raise MalformedMessage(f"{type(wanted).__name__} received on a fetch session, expected a request")
            number += 1
            content = Content(wanted.origin_generation, wanted.step)
            slot = self.store.sealed(wanted.owner_rank, content)
            if slot is None and self.load_earlier is not None:
                await self._preparing(session, self.load_earlier(wanted.owner_rank))
                slot = self.store.sealed(wanted.owner_rank, content)
            digests = None
            if slot is not None and slot.file.header.payload_digest == wanted.digest:
                slot.pins += 1
                try:
                    digests = await self.store.digests(slot)
                    if digests is not None:
                        begin = announcement(slot.file.header, transfer=number, committed=Step(-1))
                        answer = partial(_answer, session)
                        await send_shard(
                            session,
                            owner.streams,
                            answer,
                            slot.file,
                            digests,
                            begin,
                            ChunkQueue(),
                            progress=lambda _: None,
                        )
                finally:
                    slot.pins -= 1
            if digests is None:
                await session.send(ShardRefused(transfer=number, reason="this node does not hold the shard"))

    async def _preparing(self, session: Session, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=self.preparing_seconds)
                if not task.done():
                    await session.send(PreparingShard())
            task.result()
        finally:
            await end(task)


async def _answer(session: Session) -> ShardWanted | ShardSealed | ShardRefused:
    message = await session.receive()
    if not isinstance(message, ShardWanted | ShardSealed | ShardRefused):
        raise MalformedMessage(f"{type(message).__name__} received, expected a request for chunks")
    return message
