"""Downloads shards from the object store into slots, in parts of a few consecutive chunks.

    S3 objects ─▶ parts, which several nodes may read ─▶ slot of this node, sealed if all chunks match the plan

Invariant: a slot is sealed only if the downloaded objects have exactly the requested content.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from everstep.bulk import CONNECTIONS, full_jitter, side_by_side
from everstep.protocol import safetensors
from everstep.protocol.ids import Rank
from everstep.protocol.plan import ObjectReference, ShardSource
from everstep.protocol.safetensors import Restore
from everstep.protocol.slot import SlotHeader, SlotState
from worker.core.slots import Content
from worker.errors import BucketMissing, CorruptCheckpoint, NoRoom, ObjectMissing, StorageError
from worker.shm.slot_file import SlotFile
from worker.shm.store import SlotStore, in_thread
from worker.storage.checkpoints import MAX_ATTEMPTS
from worker.storage.node_loads import NodeLoad, NodeLoads
from worker.storage.object_store import ObjectReader, ObjectStore, cut, require_missing
from worker.storage.shard_parts import ShardParts, read_length
from worker.tasks import finish, together

log = logging.getLogger(__name__)


class LoadShare(Protocol):
    """Helpers of one load: other nodes that read some parts for this node. One thread calls all but `ended`."""

    def begin(self, check: Callable[[], None]) -> None:
        """Ask the helper nodes for parts of the shard. Called once.

        The caller may already have claimed the part whose bytes S3's first response contains. `check` raises an error
        when the download is cancelled.
        """

    def claim(self, number: int) -> bool:
        """Return whether the caller must read a part, because no helper node does. Called in ascending order."""
        ...

    def ended(self, number: int) -> None:
        """Record that the caller has read a part, or that this read has failed. Called in the reading thread."""

    def next_missing(self, has_failed: Callable[[], bool]) -> int | None:
        """Wait for the helpers after the last `claim`, and return a part that none has delivered.

        None when the helpers have delivered all their parts, or when one of the caller's own reads has failed.
        """

    def end(self) -> None:
        """End the help, once after `begin`. After this call, no bytes of the helpers reach the slot."""


LoadShareOf = Callable[[ShardParts, ShardSource, SlotFile, Sequence[int]], LoadShare]
"""Returns the nodes that help with one attempt to load a shard, and write verified chunks into the slot."""


class ObjectShare(Protocol):
    """Nodes that share the reads of S3 objects with tensors of several shards. All methods run on the event loop."""

    async def read(self) -> None:
        """Read this node's parts of the shared objects into the slot, while other nodes send theirs. Called once.

        Raises StorageError if the store refused a read.
        """

    async def settle(self) -> None:
        """Wait until the slot contains all parts; read those that do not arrive in time. Called once, after `read`."""

    async def close(self) -> None:
        """Stop receiving parts of objects: no byte of another node reaches the slot any more. Idempotent."""


ObjectShareOf = Callable[[NodeLoad], ObjectShare]
"""Returns the nodes that share the reads of the objects in `NodeLoad.objects`."""


class _Cancelled(Exception):
    """Raised in the thread of a download after the task that waits for the thread was cancelled."""


async def download_shard(
    objects: ObjectStore,
    source: ShardSource,
    store: SlotStore,
    *,
    rank: Rank,
    content: Content,
    keep: Collection[Content],
    slot_count: int,
    share: LoadShareOf | None = None,
    loads: NodeLoads | None = None,
    share_objects: ObjectShareOf | None = None,
) -> None:
    """Download one shard into a slot and seal it, if no node holds the shard in memory.

    The download must not overwrite the contents in `keep`. `loads` are the other loads of this node. Without
    `share_objects`, this node reads shared objects alone.

    Raises CorruptCheckpoint if the object contradicts the plan; no slot is sealed. Raises StorageError if the store
    refused the download, or `MAX_ATTEMPTS` attempts failed, and NoRoom if the shard does not fit into the memory for
    slots or `keep` protects every slot.
    """
    if source.object is None:
        raise CorruptCheckpoint(f"the plan names no object for step {source.step} of rank {rank}")
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            await _download(
                objects,
                source.object,
                source,
                store,
                rank=rank,
                content=content,
                keep=keep,
                slot_count=slot_count,
                share=share,
                loads=loads,
                share_objects=share_objects,
            )
            return
        except StorageError as error:
            if not error.retryable or attempt == MAX_ATTEMPTS:
                raise
            log.warning(
                "download of step %d of rank %d: attempt %d failed and is retried: %s",
                source.step,
                rank,
                attempt,
                error,
            )
            await asyncio.sleep(full_jitter(attempt))


async def _download(
    objects: ObjectStore,
    where: ObjectReference,
    source: ShardSource,
    store: SlotStore,
    *,
    rank: Rank,
    content: Content,
    keep: Collection[Content],
    slot_count: int,
    share: LoadShareOf | None,
    loads: NodeLoads | None,
    share_objects: ObjectShareOf | None,
) -> None:
    reading = objects.open(where)

    def begin(cancelled: threading.Event) -> tuple[ObjectReader, ShardParts]:
        try:
            reader = reading.__enter__()
        except ObjectMissing as error:
            if not isinstance(error, BucketMissing):
                require_missing(objects, where)
            raise
        try:
            parts = _read_header(reader, where)
        except BaseException:
            reading.__exit__(None, None, None)
            raise
        if cancelled.is_set():
            reading.__exit__(None, None, None)
        return reader, parts

    reader, parts = await in_thread(begin)
    plan = parts.plan
    try:
        _check(plan, source, where)
        index = await store.grant(
            rank,
            content,
            keep=keep,
            capacity_bytes=plan.payload_bytes,
            layout_hash=plan.layout_hash,
            slot_count=slot_count,
        )
        if index is None:
            raise NoRoom(needed_bytes=plan.payload_bytes, available_bytes=0)
        slot = store.shards[rank][index]
        load = (NodeLoads() if loads is None else loads).join(store, rank, content, parts, slot)
        shared = share_objects(load) if share_objects is not None and load.objects else None
        try:
            later = load.parts_with(load.awaited if shared is None else parts.shared)
            early = [each for each in parts.numbers if each not in later]
            helpers = share(parts, source, slot.file, early) if share is not None and len(early) > 1 else None
            filling = _Filling(objects, reader, parts, slot.file)
            fill = partial(filling.fill, early, share=helpers)
            await together(in_thread(fill), *([] if shared is None else [shared.read()]))
            if later:
                present = await load.copy_awaited(slot.file)
                if shared is not None:
                    await shared.settle()
                    present |= load.objects.keys()
                await in_thread(partial(filling.fill, sorted(later), present=present))
            store.seal_verified(slot, _header(store, slot.file, plan, rank, content), plan.chunk_digests)
            load.end(is_loaded=True)
        except BaseException:
            load.end(is_loaded=False)
            if shared is not None:
                await finish(shared.close())
            slot.file.empty()
            raise
    finally:
        reading.__exit__(None, None, None)


def _header(store: SlotStore, slot: SlotFile, plan: Restore, rank: Rank, content: Content) -> SlotHeader:
    return SlotHeader(
        job=store.job,
        run=slot.header.run,
        owner_rank=rank,
        origin_generation=content.origin,
        step=content.step,
        state=SlotState.WRITING,
        capacity_bytes=slot.header.capacity_bytes,
        payload_bytes=plan.payload_bytes,
        index_offset=plan.index_offset,
        index_bytes=len(plan.index),
        layout_hash=plan.layout_hash,
    )


def _read_header(reader: ObjectReader, where: ObjectReference) -> ShardParts:
    name = f"s3://{where.bucket}/{where.key}"
    prefix = bytearray(min(safetensors.LENGTH.size, reader.bytes))
    reader.read_into(memoryview(prefix))
    header = bytearray(read_length(prefix, reader.bytes, name))
    reader.read_into(memoryview(header))
    return ShardParts(where, bytes(header), reader.bytes)


def _check(plan: Restore, source: ShardSource, where: ObjectReference) -> None:
    """Raise CorruptCheckpoint if the S3 object differs from the plan. No slot is changed yet."""
    if plan.payload_bytes != source.payload_bytes or plan.payload_digest != source.digest:
        raise CorruptCheckpoint(
            f"s3://{where.bucket}/{where.key} holds {plan.payload_bytes} bytes with digest "
            f"{plan.payload_digest.hex()}; "
            f"the plan requires {source.payload_bytes} bytes with digest {source.digest.hex()}"
        )


@dataclass(eq=False, repr=False)
class _Filling:
    """Reads parts of a shard's S3 object into a slot and verifies them, in several threads. All methods block."""

    objects: ObjectStore
    reader: ObjectReader
    parts: ShardParts
    slot: SlotFile

    def __post_init__(self) -> None:
        self._ready: int | None = None
        """Number of payload bytes in S3's first response; None before the first `fill`."""
        self._ready_end = 0
        """End of the bytes of S3's first response, as a position in the payload."""

    def fill(
        self,
        numbers: Sequence[int],
        cancelled: threading.Event,
        *,
        share: LoadShare | None = None,
        present: Collection[ObjectReference] = (),
    ) -> None:
        """Read and verify some parts, in increasing order. The slot already contains the objects in `present`."""

        def check() -> None:
            if cancelled.is_set():
                raise _Cancelled

        try:
            if self._ready is None:
                self._ready = self._begin(check)
            after = self.parts.data_begin + self._ready
            read = partial(self._read, after=after, share=share, present=present, cancelled=cancelled)
            claimed = 0
            if share is not None:
                # S3's first response contains bytes of the first part, so no helper node should read this part again.
                if self.parts.bounds(numbers[0])[0] < self._ready_end and share.claim(numbers[0]):
                    claimed = numbers[0]
                share.begin(check)
            try:
                _read_parts(numbers, claimed, read, share, check)
            finally:
                if share is not None:
                    share.end()
        except _Cancelled:
            return  # The download was cancelled, so nothing uses its slot.

    def _begin(self, check: Callable[[], None]) -> int:
        """Check that S3 has the shared objects, and copy the payload bytes of S3's first response into the slot."""
        for place, size in self.parts.shared.items():
            check()
            found = self.objects.head(place)
            if found is None:
                require_missing(self.objects, place)
                raise ObjectMissing(f"s3://{place.bucket}/{place.key} does not exist")
            if found.bytes != size:
                raise CorruptCheckpoint(f"s3://{place.bucket}/{place.key} has {found.bytes} bytes, not {size}")
        plan = self.parts.plan
        ready = min(self.reader.ready_bytes, plan.data_bytes)
        if ready:
            spans = next(cut(plan.spans, ready))
            with self.slot.payload(0, plan.payload_bytes) as payload:
                self.reader.read_into(payload, spans)
            self._ready_end = spans[-1][1]
        return ready

    def _read(
        self,
        number: int,
        *,
        after: int,
        share: LoadShare | None,
        present: Collection[ObjectReference],
        cancelled: threading.Event,
    ) -> None:
        """Read one part of the shard into the slot."""
        parts, is_cancelled = self.parts, cancelled.is_set
        has_others_bytes = bool(present) or (share is not None and after > parts.data_begin)
        try:
            with self.slot.payload(*parts.bounds(number)) as target:
                try:
                    parts.read(self.objects, number, target, after=after, present=present, is_cancelled=is_cancelled)
                except CorruptCheckpoint as error:
                    if not has_others_bytes:
                        raise
                    # Another load or node may have written wrong bytes of the part.
                    log.warning("this node reads part %d of a shard again from S3: %s", number, error)
                    parts.read(self.objects, number, target, is_cancelled=is_cancelled)
        finally:
            if share is not None:
                share.ended(number)


def _read_parts(
    numbers: Sequence[int],
    claimed: int,
    read: Callable[[int], None],
    share: LoadShare | None,
    check: Callable[[], None],
) -> None:
    """Read the parts that no helper node reads. The parts up to `claimed` are already claimed."""
    with side_by_side("s3-get", CONNECTIONS) as (begin, errors):
        in_flight: set[Future[None]] = set()

        def start(number: int) -> None:
            nonlocal in_flight
            in_flight.add(begin(partial(read, number)))
            while len(in_flight) >= CONNECTIONS:
                in_flight = wait(in_flight, return_when=FIRST_COMPLETED).not_done

        for number in numbers:
            check()
            if errors:
                return
            if share is None or number <= claimed or share.claim(number):
                start(number)
        while share is not None and (missing := share.next_missing(lambda: bool(errors))) is not None:
            start(missing)
