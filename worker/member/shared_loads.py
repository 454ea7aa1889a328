"""Shares the load of a shard from S3 between the node that needs the shard and other nodes of the generation.

    owner's agent (HelpedLoad)    reads parts from the beginning ◀── S3
                                  LoadShard, ShardWanted ──▶ helper's agent (LoadHelper),
                                  ◀── chunks over streams    reads parts from the end ◀── S3

Invariant: the owner's slot receives only chunks whose digests match the plan's digest of the shard. After
`HelpedLoad.end`, no helper's byte reaches the slot. A helper reads only objects that the plan names, and keeps at most
`MAX_HELPED_PARTS` parts in memory for all owners together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic

from everstep.protocol.errors import MalformedMessage, ProtocolError
from everstep.protocol.ids import NodeId, Rank
from everstep.protocol.peer_messages import (
    HEADER_PIECE_BYTES,
    LoadObject,
    LoadShard,
    ObjectHeader,
    ReadyToLoad,
    ShardRefused,
    ShardWanted,
)
from everstep.protocol.plan import GenerationPlan, ObjectReference, ShardSource
from everstep.protocol.safetensors import MAX_HEADER_BYTES
from worker.core.shared_parts import SharedParts, is_read_first
from worker.core.transfers import ranges
from worker.errors import CorruptCheckpoint, PeerError, PeerLost
from worker.member.part_sharing import PartSharing, deliver, dial, silent
from worker.member.part_supply import MAX_HELPED_PARTS, PartSupply
from worker.member.shared_objects import ObjectSupply
from worker.replication.streams import IncomingShard, Receiver, Streams
from worker.replication.transport import Dialler, Session
from worker.shm.slot_file import SlotFile
from worker.shm.store import in_thread
from worker.storage.node_loads import NodeLoads
from worker.storage.object_store import ObjectStore
from worker.storage.shard_parts import ShardParts
from worker.tasks import end, finish, first_of

log = logging.getLogger(__name__)
TRANSFER = 1


class HelpedLoad(PartSharing):
    """One attempt to load a shard of this node with the help of other nodes. Implements `LoadShare`."""

    def __init__(
        self,
        rank: Rank,
        peers: Sequence[NodeId],
        dialler: Callable[[NodeId], Dialler],
        parts: ShardParts,
        source: ShardSource,
        slot: SlotFile,
        numbers: Sequence[int],
    ) -> None:
        """Create the object. `peers` may read the parts `numbers`, in increasing order, from S3 for this node."""
        super().__init__(SharedParts.begin(len(numbers)), peers, "load")
        self._numbers = numbers
        """`SharedParts` numbers these parts from 1."""
        self._places = {number: place for place, number in enumerate(numbers, 1)}
        self._rank = rank
        self._dialler = dialler
        self._parts = parts
        self._source = source
        self._slot = slot
        self._news: dict[NodeId, asyncio.Event] = {peer: asyncio.Event() for peer in peers}
        """By helper: set on the event loop when a chunk of it has arrived."""
        self._landed: set[int] = set()

    def begin(self, check: Callable[[], None]) -> None:
        """Ask other nodes to read parts of the shard from S3."""
        self._check = check
        self._loop.call_soon_threadsafe(self._ask_all)

    def claim(self, number: int) -> bool:
        """Return True if the owner (this node) must read a part of the shard from S3, False if a helper does."""
        return super().claim(self._places[number])

    def ended(self, number: int) -> None:
        """Record that this node has read a part of the shard from S3, or failed to read it."""
        self._end_own(self._places[number])

    def next_missing(self, has_failed: Callable[[], bool]) -> int | None:
        """Wait until a helper fails to read a part of the shard; return the part."""

        def review(now: float, slowest_seconds: float) -> None:
            for peer in self._state.late(now, slowest_seconds):
                self._loop.call_soon_threadsafe(self._give_up, peer, "is late")

        place = self._next_missing(review, has_failed)
        return None if place is None else self._numbers[place - 1]

    def _land(self, peer: NodeId, chunk: int, is_good: bool) -> None:
        """Record a helper's chunk, in the thread of its stream. After a wrong chunk, stop asking this helper."""
        if not is_good:
            self._loop.call_soon_threadsafe(self._give_up, peer, f"sent other bytes as chunk {chunk} than S3 holds")
            return
        part = self._parts.part_of(chunk)
        with self._changed:
            self._landed.add(chunk)
            if self._landed.issuperset(self._parts.chunks(part)):
                self._state = self._state.finish(peer, self._places[part])
                self._changed.notify_all()
        self._loop.call_soon_threadsafe(self._news[peer].set)

    def _give_up(self, peer: NodeId, why: str) -> None:
        if not self._tasks[peer].done() and not self._tasks[peer].cancelling():
            log.warning("load of rank %d: %s %s", self._rank, peer, why)
            self._tasks[peer].cancel()

    async def _run(self, peer: NodeId) -> None:
        plan = self._parts.plan
        streams, receiver = Streams(), Receiver()
        incoming = receiver.current = IncomingShard(
            self._slot, transfer=TRANSFER, payload_bytes=plan.payload_bytes, on_land=partial(self._land, peer)
        )
        incoming.name(plan.chunk_digests, ())
        try:
            session = await dial(self._dialler(peer))
            try:
                await self._begin(session)
                streams.add(await self._dialler(peer).stream(session, 0))
                (line,) = streams.lines
                await first_of(
                    self._assign_all(session, peer, incoming), self._receive(session), deliver(streams, line, receiver)
                )
            finally:
                session.close()
        except (PeerError, ProtocolError) as error:
            log.info("%s no longer helps with the load of rank %d: %s", peer, self._rank, error)
        finally:
            await finish(self._let_go(peer, incoming, streams))

    async def _let_go(self, peer: NodeId, incoming: IncomingShard, streams: Streams) -> None:
        """Stop all threads that write a helper's bytes into the slot, then mark its undelivered parts as missing."""
        incoming.shut()
        await streams.close()
        await incoming.close()
        with self._changed:
            self._state = self._state.exclude(peer)
            self._changed.notify_all()

    async def _begin(self, session: Session) -> None:
        header = self._parts.header
        await session.send(
            LoadShard(
                owner_rank=self._rank,
                digest=self._source.digest,
                object=self._parts.where,
                object_bytes=self._parts.object_bytes,
                header_bytes=len(header),
            )
        )
        answer = await session.receive()
        if isinstance(answer, ShardRefused):
            raise PeerLost(answer.reason)
        if not isinstance(answer, ReadyToLoad):
            raise MalformedMessage(f"{type(answer).__name__} received, expected ReadyToLoad")
        for begin in range(0, len(header), HEADER_PIECE_BYTES):
            await session.send(ObjectHeader(data=header[begin : begin + HEADER_PIECE_BYTES]))

    async def _assign_all(self, session: Session, peer: NodeId, incoming: IncomingShard) -> None:
        news = self._news[peer]
        while True:
            news.clear()
            with self._changed:
                self._state, place = self._state.assign(peer, monotonic())
                is_over = self._state.is_over(peer)
            if place is not None:
                chunks = self._parts.chunks(self._numbers[place - 1])
                incoming.name(b"", chunks)
                await session.send(ShardWanted(transfer=TRANSFER, chunks=ranges(chunks)))
            elif is_over:
                return
            else:
                await news.wait()

    async def _receive(self, session: Session) -> None:
        message = await session.receive()
        if isinstance(message, ShardRefused):
            raise PeerLost(message.reason)
        raise MalformedMessage(f"{type(message).__name__} received, expected only chunks on the stream")


class LoadHelper:
    """Reads parts of shards of other nodes from S3, and sends these parts to the other nodes."""

    def __init__(
        self,
        plan: GenerationPlan,
        objects: ObjectStore,
        *,
        is_loaded: asyncio.Event,
        ranks: Sequence[Rank] = (),
        loads: NodeLoads | None = None,
    ) -> None:
        """Create the helper; `is_loaded` is set once this node's own shards are here, `loads` supply shared objects."""
        self._objects = objects
        self._is_loaded = is_loaded
        self._places: dict[tuple[Rank, bytes], ObjectReference] = {
            (rank, source.digest): source.object
            for rank, sources in plan.base_shards
            for source in sources
            if source.object is not None
        }
        self._room = asyncio.Semaphore(MAX_HELPED_PARTS)
        expected = frozenset(rank for rank in ranks if is_read_first(plan, rank))
        self._shared = ObjectSupply(
            NodeLoads() if loads is None else loads, self._room, expected=expected, is_loaded=is_loaded
        )
        self._serving: dict[tuple[NodeId, Rank], asyncio.Task[None]] = {}

    async def serve(self, session: Session, streams: Streams) -> None:
        """Read the requested parts of a shard from S3, and send them to its owner's agent until it disconnects.

        Raises MalformedMessage for an unexpected message, a damaged header, or too many requests.
        """
        wanted = await session.receive()
        if isinstance(wanted, LoadObject):
            await self._shared.serve(session, streams, wanted)
            return
        if not isinstance(wanted, LoadShard) or not 0 < wanted.header_bytes <= MAX_HEADER_BYTES:
            raise MalformedMessage(f"{type(wanted).__name__} received, expected a request to load a shard")
        if self._places.get((wanted.owner_rank, wanted.digest)) != wanted.object:
            await session.send(ShardRefused(transfer=TRANSFER, reason="the plan does not name the object"))
            return
        key, task = (session.peer, wanted.owner_rank), asyncio.current_task()
        assert task is not None
        earlier, self._serving[key] = self._serving.get(key), task
        try:
            # The parts of the owner's earlier session occupy memory.
            if earlier is not None:
                await end(earlier)
            await self._supply(session, streams, wanted)
        finally:
            if self._serving.get(key) is task:
                del self._serving[key]

    async def _supply(self, session: Session, streams: Streams, wanted: LoadShard) -> None:
        if not self._is_loaded.is_set():
            await first_of(self._is_loaded.wait(), silent(session))
        await session.send(ReadyToLoad())
        parts = await _received(session, wanted)

        async def read(number: int, target: memoryview) -> None:
            await in_thread(lambda stop: parts.read(self._objects, number, target, is_cancelled=stop.is_set))

        message = await PartSupply(parts, read, self._room, transfer=TRANSFER).run(session, streams)
        raise MalformedMessage(f"{type(message).__name__} received, expected a request for a part")


async def _received(session: Session, wanted: LoadShard) -> ShardParts:
    header = bytearray()
    while len(header) < wanted.header_bytes:
        message = await session.receive()
        if not isinstance(message, ObjectHeader) or not 0 < len(message.data) <= wanted.header_bytes - len(header):
            raise MalformedMessage(f"{type(message).__name__} received, expected the rest of an object's header")
        header += message.data
    try:
        # A large header takes long to decode, so a thread decodes it.
        parts = await in_thread(lambda _: ShardParts(wanted.object, bytes(header), wanted.object_bytes))
    except CorruptCheckpoint as error:
        raise MalformedMessage(str(error)) from error
    if parts.plan.payload_digest != wanted.digest:
        raise MalformedMessage("the object's header belongs to another shard than the requested one")
    return parts
