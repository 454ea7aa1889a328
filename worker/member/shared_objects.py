"""Divides the reads of shared S3 objects among the nodes that load from S3, normally one node per part.

    node A   reads parts 1, 3 ◀── S3        sends them to B ──▶
    node B   reads parts 2, 4 ◀── S3        sends them to A ──▶

Invariant: a load verifies all bytes of other nodes with the digests of its shard, and reads damaged parts from S3.
After `SharedReads.close`, no byte of another node reaches the slot. A node supplies only objects that its own shards
use.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import count
from time import monotonic

from everstep.bulk import CONNECTIONS, side_by_side
from everstep.protocol.errors import MalformedMessage, ProtocolError
from everstep.protocol.ids import NodeId, Rank
from everstep.protocol.peer_messages import LoadObject, ReadyToLoad, ShardRefused, ShardWanted
from everstep.protocol.plan import ObjectReference
from worker.core.object_readers import ObjectReaders, patience_seconds
from worker.core.shared_parts import MAX_WINDOW
from worker.core.transfers import ranges
from worker.errors import PeerError
from worker.member.part_sharing import deliver, dial, silent
from worker.member.part_supply import PartSupply
from worker.replication.streams import IncomingPieces, Receiver, Streams
from worker.replication.transport import Dialler, Session
from worker.shm.store import in_thread
from worker.storage.node_loads import NodeLoad, NodeLoads
from worker.storage.object_parts import ObjectParts
from worker.storage.object_store import ObjectStore
from worker.tasks import Signal, end, finish, first_of

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class SharedReads:
    """One attempt to load the S3 objects that a shard shares with other nodes' shards. Implements `ObjectShare`.

    `dialler` opens sessions of kind load. `patience` returns for how many seconds the load waits for the other nodes
    after its own reads.
    """

    readers: ObjectReaders
    dialler: Callable[[NodeId], Dialler]
    objects: ObjectStore
    load: NodeLoad
    _: KW_ONLY
    patience: Callable[[float], float] = patience_seconds

    def __post_init__(self) -> None:
        self._parts = sorted(self.load.objects.values(), key=lambda each: each.place.key)
        self._absent_count = sum(each.count for each in self._parts)
        self._division: dict[NodeId, dict[ObjectParts, list[int]]] = {}
        """The missing parts that each node reads: by node and object, the parts' numbers in ascending order."""
        self._changed = Signal()
        """Notified when a part arrives, and when parts are assigned to other nodes."""
        self._tasks: list[asyncio.Task[None]] = []
        self._begun = 0.0
        self._divide(self.readers)

    def _divide(self, readers: ObjectReaders) -> None:
        """Assign each part that this node's slot still lacks to the node that reads it from S3."""
        self.readers, self._division = readers, {}
        for each in self._parts:
            for number in each.numbers:
                if number not in each.present:
                    reader = readers.reader(each.place.key, number)
                    self._division.setdefault(reader, {}).setdefault(each, []).append(number)
        self._changed.notify()

    def _absent(self, reader: NodeId) -> list[tuple[ObjectParts, int]]:
        division = self._division.get(reader, {}).items()
        return [(each, number) for each, numbers in division for number in numbers if number not in each.present]

    def _mark(self, parts: ObjectParts, number: int) -> None:
        if number not in parts.present:
            parts.mark(number)
            self._absent_count -= 1
            self._changed.notify()

    async def read(self) -> None:
        """Read this node's parts from S3, and request the other parts from the other nodes."""
        self._begun = monotonic()
        self._tasks = [asyncio.create_task(self._run(peer), name=f"objects of {peer}") for peer in self.readers.peers]
        await self._read_own()

    async def settle(self) -> None:
        """Wait for the parts that other nodes read, and read those that do not arrive."""
        now = monotonic()
        until = now + self.patience(now - self._begun)
        while self._absent_count:
            seen = self._changed.version
            await self._read_own()
            left = until - monotonic()
            if self._absent_count and left <= 0:
                late = ", ".join(peer for peer in self.readers.peers if self._absent(peer))
                log.warning("shared objects: this node reads %d parts from S3 for %s", self._absent_count, late)
                await self.close()
                self._divide(self.readers.exclude(*self.readers.peers))
            elif self._absent_count:
                await self._changed.wait(seen, left)
        await self.close()

    async def close(self) -> None:
        """Stop receiving parts from other nodes."""
        await end(*self._tasks)

    async def _read_own(self) -> None:
        own = self._absent(self.readers.here)
        loop = asyncio.get_running_loop()

        def read(parts: ObjectParts, number: int, cancelled: threading.Event) -> None:
            parts.read(self.objects, number, cancelled.is_set)
            if not cancelled.is_set():
                loop.call_soon_threadsafe(self._mark, parts, number)

        def work(cancelled: threading.Event) -> None:
            with side_by_side("s3-get", CONNECTIONS) as (begin, _):
                for parts, number in own:
                    begin(partial(read, parts, number, cancelled))

        if own:
            await in_thread(work)

    async def _run(self, peer: NodeId) -> None:
        await self._until(lambda: bool(self._absent(peer)))
        streams, receiver = Streams(), Receiver()
        try:
            session = await dial(self.dialler(peer))
            try:
                streams.add(await self.dialler(peer).stream(session, 0))
                (line,) = streams.lines
                await first_of(self._request_all(session, peer, receiver), deliver(streams, line, receiver))
            finally:
                session.close()
        except (PeerError, ProtocolError) as error:
            log.info("%s sends no more parts of shared objects: %s", peer, error)
        except Exception:
            log.exception("the parts of shared objects cannot be requested from %s", peer)
        finally:
            await finish(self._let_go(peer, receiver, streams))

    async def _let_go(self, peer: NodeId, receiver: Receiver, streams: Streams) -> None:
        """Stop the thread that can write a peer's bytes into the slot. Then assign the peer's parts to other nodes."""
        incoming = receiver.current
        if incoming is not None:
            incoming.shut()
        await streams.close()
        if incoming is not None:
            await incoming.close()
        self._divide(self.readers.exclude(peer))

    async def _request_all(self, session: Session, peer: NodeId, receiver: Receiver) -> None:
        for transfer in count(1):
            await self._until(lambda: bool(self._absent(peer)))
            parts, _ = self._absent(peer)[0]
            await session.send(LoadObject(transfer=transfer, object=parts.place))
            answer = await session.receive()
            if isinstance(answer, ReadyToLoad):
                await self._request(session, peer, receiver, parts, transfer)
            elif isinstance(answer, ShardRefused):
                self._divide(self.readers.lack(peer, parts.place.key))
            else:
                raise MalformedMessage(f"{type(answer).__name__} received, expected ReadyToLoad")

    async def _request(
        self, session: Session, peer: NodeId, receiver: Receiver, parts: ObjectParts, transfer: int
    ) -> None:
        loop = asyncio.get_running_loop()
        landed: set[int] = set()

        def keep(chunk: int, data: memoryview) -> bool:
            parts.write(chunk, data)
            loop.call_soon_threadsafe(land, chunk)
            return True

        def land(chunk: int) -> None:
            landed.add(chunk)
            number = parts.part_of(chunk)
            if landed.issuperset(parts.chunks(number)):
                self._mark(parts, number)

        incoming = receiver.current = IncomingPieces(keep, transfer=transfer, payload_bytes=parts.payload_bytes)
        requested: set[int] = set()
        while numbers := [each for each in self._division.get(peer, {}).get(parts, ()) if each not in parts.present]:
            seen = self._changed.version
            in_flight = sum(each not in parts.present for each in requested)
            for number in [each for each in numbers if each not in requested][: MAX_WINDOW - in_flight]:
                incoming.name(b"", parts.chunks(number))
                requested.add(number)
                await session.send(ShardWanted(transfer=transfer, chunks=ranges(parts.chunks(number))))
            await self._changed.wait(seen)

    async def _until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            await self._changed.wait(self._changed.version)


class ObjectSupply:
    """Sends parts of shared S3 objects from this node's slots to other nodes."""

    def __init__(
        self, loads: NodeLoads, room: asyncio.Semaphore, *, expected: Collection[Rank], is_loaded: asyncio.Event
    ) -> None:
        """Create the supply. `room` limits the parts in memory. `expected` are this node's ranks that load from S3."""
        self._loads = loads
        self._room = room
        self._expected = frozenset(expected)
        self._is_loaded = is_loaded

    async def serve(self, session: Session, streams: Streams, wanted: LoadObject) -> None:
        """Send the parts that another node requests until it disconnects. Raises MalformedMessage."""
        while True:
            place = wanted.object
            if not self._is_known(place):
                await first_of(self._until_known(place), silent(session))
            load = self._loads.reader(place)
            if load is None:
                await session.send(ShardRefused(transfer=wanted.transfer, reason="no shard here uses the object"))
                message = await session.receive()
            else:
                await session.send(ReadyToLoad())
                supply = PartSupply(
                    load.objects[place],
                    partial(load.supply, place),
                    self._room,
                    transfer=wanted.transfer,
                    is_ready=partial(load.arrived, place),
                )
                message = await supply.run(session, streams)
            if not isinstance(message, LoadObject):
                raise MalformedMessage(f"{type(message).__name__} received, expected a request for an object")
            wanted = message

    def _is_known(self, place: ObjectReference) -> bool:
        """Return whether this node can already decide if one of its loads reads this S3 object."""
        is_complete = self._is_loaded.is_set() or self._loads.joined >= self._expected
        return is_complete or self._loads.reader(place) is not None

    async def _until_known(self, place: ObjectReference) -> None:
        while not self._is_known(place):
            await self._loads.changed.wait(self._loads.changed.version)
