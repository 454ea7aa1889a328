"""Downloads shards from the object store into slots.

    objects ─▶ parts, read by several nodes ─▶ granted slot ─▶ sealed only if all chunks match the plan

Invariant: a slot is sealed only if the downloaded objects have exactly the requested content.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Protocol

from everstep.bulk import CONNECTIONS, full_jitter, side_by_side
from everstep.protocol import safetensors
from everstep.protocol.ids import Rank
from everstep.protocol.plan import ObjectReference, ShardSource
from everstep.protocol.safetensors import Restore
from everstep.protocol.slot import SlotHeader, SlotState
from worker.core.slots import Content
from worker.errors import CorruptCheckpoint, NoRoom, ObjectMissing, StorageError
from worker.shm.slot_file import SlotFile
from worker.shm.store import SlotStore, in_thread
from worker.storage.checkpoints import MAX_ATTEMPTS
from worker.storage.object_store import ObjectReader, ObjectStore, cut
from worker.storage.shard_parts import ShardParts, read_length

log = logging.getLogger(__name__)


class LoadShare(Protocol):
    """The helpers of one load: other nodes that read some of the shard's parts and send them to this node.

    The download calls all methods but `ended` in one thread.
    """

    def begin(self, check: Callable[[], None]) -> None:
        """Ask the helpers for parts. Called once. Only a part whose bytes the caller already has is claimed before.

        Args:
            check: raises an error when the download is cancelled; called while the download waits for helpers.
        """

    def claim(self, number: int) -> bool:
        """Decide who reads a part. Return True if the caller must read it, because no helper does.

        Args:
            number: number of the part; ascending from 1 over all calls.

        Returns:
            False if a helper reads the part.
        """
        ...

    def ended(self, number: int) -> None:
        """Record that the caller has read a part, or that the read has failed. Called in the part's thread."""

    def next_missing(self, has_failed: Callable[[], bool]) -> int | None:
        """Wait for the helpers, and return a part that no helper has delivered, so that the caller must read it.

        Called after the last `claim`, until the result is None.

        Args:
            has_failed: returns True when one of the caller's own reads has failed. The method checks it while it waits.

        Returns:
            Number of a part. None when the helpers have delivered all their parts, or when the download has failed.
        """

    def end(self) -> None:
        """End the work of all helpers. Afterwards, none of their bytes reach the slot. Called once after `begin`."""


class LoadShareOf(Protocol):
    """Returns the helpers of a load."""

    def of(self, parts: ShardParts, source: ShardSource, slot: SlotFile) -> LoadShare:
        """Return the helpers of one attempt to download a shard. Called on the event loop.

        Args:
            parts: the parts of the shard.
            source: a source of kind s3 from the plan.
            slot: the slot that receives the parts.

        Returns:
            The helpers. They deliver verified chunks into the slot.
        """
        ...


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
) -> None:
    """Download one shard into a slot and seal it.

    The owner's agent calls this function while it loads a generation, if no node holds the shard in memory.

    Args:
        objects: object store that holds the checkpoint.
        source: a source of kind s3 with the expected digest.
        store: this node's slots.
        rank: the rank that owns the shard.
        content: origin generation and step of the slot's new content.
        keep: contents of this shard that the download must not overwrite.
        slot_count: maximum slots of this shard on this node.
        share: the nodes that read some of the parts; None without helpers.

    Raises:
        CorruptCheckpoint: the object contradicts the plan; no slot is sealed.
        StorageError: the store refused the download, or `MAX_ATTEMPTS` attempts failed.
        NoRoom: the shard does not fit into the node's memory for slots, or `keep` protects every slot.
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
) -> None:
    """Download once: read the object's header, reserve a slot of that size, and read the parts into the slot."""
    reading = objects.open(where)

    def begin(cancelled: threading.Event) -> tuple[ObjectReader, ShardParts]:
        reader = reading.__enter__()
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
        helpers = None if share is None or parts.count == 1 else share.of(parts, source, slot.file)
        try:
            await in_thread(lambda cancelled: _fill(objects, reader, parts, slot.file, cancelled, helpers))
        except BaseException:
            slot.file.empty()
            raise
    finally:
        reading.__exit__(None, None, None)
    header = SlotHeader(
        job=store.job,
        run=slot.file.header.run,
        owner_rank=rank,
        origin_generation=content.origin,
        step=content.step,
        state=SlotState.WRITING,
        capacity_bytes=slot.file.header.capacity_bytes,
        payload_bytes=plan.payload_bytes,
        index_offset=plan.index_offset,
        index_bytes=len(plan.index),
        layout_hash=plan.layout_hash,
    )
    store.seal_verified(slot, header, plan.chunk_digests)


def _read_header(reader: ObjectReader, where: ObjectReference) -> ShardParts:
    name = f"s3://{where.bucket}/{where.key}"
    prefix = bytearray(min(safetensors.LENGTH.size, reader.bytes))
    reader.read_into(memoryview(prefix))
    header = bytearray(read_length(prefix, reader.bytes, name))
    reader.read_into(memoryview(header))
    return ShardParts(where, bytes(header), reader.bytes)


def _check(plan: Restore, source: ShardSource, where: ObjectReference) -> None:
    """Raise an error for an object that differs from the plan, before the caller changes any slot."""
    if plan.payload_bytes != source.payload_bytes or plan.payload_digest != source.digest:
        raise CorruptCheckpoint(
            f"s3://{where.bucket}/{where.key} holds {plan.payload_bytes} bytes with digest "
            f"{plan.payload_digest.hex()}; "
            f"the plan requires {source.payload_bytes} bytes with digest {source.digest.hex()}"
        )


def _fill(
    objects: ObjectStore,
    reader: ObjectReader,
    parts: ShardParts,
    slot: SlotFile,
    cancelled: threading.Event,
    share: LoadShare | None,
) -> None:
    """Read and verify all parts of a shard, together with the helpers."""

    def check() -> None:
        if cancelled.is_set():
            raise _Cancelled

    for place, size in parts.shared.items():
        check()
        found = objects.head(place)
        if found is None:
            raise ObjectMissing(f"s3://{place.bucket}/{place.key} does not exist")
        if found.bytes != size:
            raise CorruptCheckpoint(f"s3://{place.bucket}/{place.key} has {found.bytes} bytes, not {size}")
    ready = min(reader.ready_bytes, parts.plan.data_bytes)
    if ready:
        with slot.payload(0, parts.plan.payload_bytes) as payload:
            reader.read_into(payload, next(cut(parts.plan.spans, ready)))

    def read(number: int) -> None:
        try:
            with slot.payload(*parts.bounds(number)) as target:
                try:
                    parts.read(objects, number, target, after=parts.data_begin + ready, is_cancelled=cancelled.is_set)
                except CorruptCheckpoint:
                    if share is None or not ready:
                        raise
                    # A helper may have overwritten bytes that `reader` had written into the slot. The second read reads
                    # all bytes of the part again.
                    parts.read(objects, number, target, is_cancelled=cancelled.is_set)
        finally:
            if share is not None:
                share.ended(number)

    # The first request has returned bytes of the first part. Claim this part before a helper can read them again.
    claimed = 1 if share is not None and ready and share.claim(1) else 0
    try:
        if share is not None:
            share.begin(check)
        try:
            _read_parts(parts.count, claimed, read, share, check)
        finally:
            if share is not None:
                share.end()
    except _Cancelled:
        return  # the waiting task was cancelled, so nothing uses the slot


def _read_parts(
    count: int, claimed: int, read: Callable[[int], None], share: LoadShare | None, check: Callable[[], None]
) -> None:
    """Read the parts that no helper reads. The caller has already claimed the parts up to `claimed`."""
    with side_by_side("s3-get", CONNECTIONS) as (begin, errors):
        in_flight: set[Future[None]] = set()

        def start(number: int) -> None:
            nonlocal in_flight
            in_flight.add(begin(partial(read, number)))
            while len(in_flight) >= CONNECTIONS:
                in_flight = wait(in_flight, return_when=FIRST_COMPLETED).not_done

        for number in range(1, count + 1):
            check()
            if errors:
                return
            if share is None or number <= claimed or share.claim(number):
                start(number)
        while share is not None and (missing := share.next_missing(lambda: bool(errors))) is not None:
            start(missing)
