"""Reads each shared object from S3 only once, if several ranks of one node load their shards from S3.

    rank 0   reads its own object, and the shared objects that it is the first to need ◀── S3
    rank 1   reads its own object ◀── S3, waits for rank 0, and copies the shared tensors from rank 0's slot

Other nodes read parts of the shared objects for rank 0, and rank 0's slot supplies parts to them
(`worker.member.shared_objects`).

Invariant: a load waits only for loads that began before it, so loads never wait for each other in a circle. A load that
copies bytes verifies them like bytes from S3, and reads them from S3 if they are wrong.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection
from dataclasses import dataclass

from everstep.protocol.ids import Rank
from everstep.protocol.plan import ObjectReference
from worker.core.slots import Content
from worker.errors import StoreUnavailable
from worker.shm.slot_file import SlotFile
from worker.shm.store import Slot, SlotStore, in_thread
from worker.storage.object_parts import ObjectParts
from worker.storage.shard_parts import ShardParts
from worker.tasks import Signal

PIECE_BYTES = 4 * 1024 * 1024
"""Maximum bytes that a thread copies between two checks for cancellation."""


class NodeLoads:
    """The loads of shards from S3 by this node's ranks, in one generation. All methods run on the event loop."""

    def __init__(self) -> None:
        self._readers: dict[ObjectReference, NodeLoad] = {}
        """By shared object: the load that reads or has read the object."""
        self.joined: set[Rank] = set()
        """The ranks whose loads have begun, so that their shared objects are known."""
        self.changed = Signal()

    def reader(self, place: ObjectReference) -> NodeLoad | None:
        """Return the load that reads or has read a shared object for this node, or None without such a load."""
        return self._readers.get(place)

    def join(self, store: SlotStore, rank: Rank, content: Content, parts: ShardParts, slot: Slot) -> NodeLoad:
        """Begin a load of a shard from S3. The caller must call its `end`.

        The load copies the tensors of each shared object that an earlier load of this node reads from that load's slot.
        """
        readers = {place: self._readers.get(place) for place in parts.shared}
        load = NodeLoad(store, rank, content, parts, slot, readers)
        for place in parts.shared:
            self._readers.setdefault(place, load)
        load.ended.add_done_callback(lambda ended: None if ended.result() else self._drop(load))
        self.joined.add(rank)
        self.changed.notify()
        return load

    def _drop(self, failed: NodeLoad) -> None:
        self._readers = {place: load for place, load in self._readers.items() if load is not failed}


@dataclass(eq=False, repr=False)
class NodeLoad:
    """One load of a shard from S3. `readers` names the earlier load that reads each shared object, or None."""

    store: SlotStore
    rank: Rank
    content: Content
    parts: ShardParts
    slot: Slot
    readers: dict[ObjectReference, NodeLoad | None]

    def __post_init__(self) -> None:
        self.awaited = {place: load for place, load in self.readers.items() if load is not None}
        """By shared object of this shard: the earlier load of this node that reads the object from S3."""
        self.objects = {
            place: ObjectParts(place, self.parts.data_begins[place], self.parts.spans_of(place), self.slot.file)
            for place, load in self.readers.items()
            if load is None
        }
        """The parts of the shared objects that this load reads for all loads of its node."""
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Done when the load has ended; True if its shard is sealed."""

    def parts_with(self, places: Collection[ObjectReference]) -> frozenset[int]:
        """Return the numbers of the shard's parts that contain bytes of these objects."""
        return frozenset(number for place in places for number in self.parts.parts_with(place))

    def end(self, *, is_loaded: bool) -> None:
        """Record that this load has ended, so that loads that wait for it continue. Later calls change nothing."""
        if not self.ended.done():
            self.ended.set_result(is_loaded)
            for each in self.objects.values():
                each.changed.notify()

    async def supply(self, place: ObjectReference, number: int, target: memoryview) -> None:
        """Copy one part (numbered from 1) of a shared S3 object from this load's slot into `target`, for another node.

        The other node verifies the bytes, because the slot is not pinned. Raises StoreUnavailable if the slot does not
        contain the part.
        """
        parts = self.objects[place]
        if not (self._is_sealed if self.ended.done() else number in parts.present):
            raise StoreUnavailable(f"this node no longer holds s3://{place.bucket}/{place.key}")
        await in_thread(lambda _: parts.copy(number, target))

    async def arrived(self, place: ObjectReference, number: int) -> None:
        """Wait until this load's slot contains part `number` of a shared S3 object, or the load has ended."""
        parts = self.objects[place]
        while not (self.ended.done() or number in parts.present):
            await parts.changed.wait(parts.changed.version)

    @property
    def _is_sealed(self) -> bool:
        return self.ended.result() and self.store.sealed(self.rank, self.content) is self.slot

    async def copy_awaited(self, target: SlotFile) -> frozenset[ObjectReference]:
        """Wait for earlier loads that read shared objects of this shard, and copy their tensors without verification.

        Return the objects whose tensors were copied. The caller reads the others from S3.
        """
        copied: set[ObjectReference] = set()
        for place, load in self.awaited.items():
            is_loaded = await asyncio.shield(load.ended)
            source = self.store.sealed(load.rank, load.content) if is_loaded else None
            there, here = load.parts.spans_of(place), self.parts.spans_of(place)
            if source is not None and [end - begin for begin, end in there] == [end - begin for begin, end in here]:
                await self._copy(source, there, target, here)
                copied.add(place)
        return frozenset(copied)

    async def _copy(
        self, source: Slot, there: Collection[tuple[int, int]], target: SlotFile, here: Collection[tuple[int, int]]
    ) -> None:
        def work(cancelled: threading.Event) -> None:
            for (first, last), (begin, end) in zip(there, here, strict=True):
                with source.file.payload(first, last) as data, target.payload(begin, end) as place:
                    for start in range(0, last - first, PIECE_BYTES):
                        if cancelled.is_set():
                            return
                        place[start : start + PIECE_BYTES] = data[start : start + PIECE_BYTES]

        source.pins += 1
        try:
            await in_thread(work)
        finally:
            source.pins -= 1
