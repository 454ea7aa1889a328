"""Uploads shards from slots to the object store, and downloads shards into slots.

    upload      slot ─▶ shared objects that S3 lacks, then one safetensors object, streamed and digested on the way
    download    objects ─▶ parts, read by several nodes ─▶ granted slot ─▶ sealed only if all chunks match the plan

Invariant: an object named by an `UploadedShard` is complete, and its content matches its slot's digest. A slot is
sealed only if the downloaded objects have exactly the requested content.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import re
import secrets
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Protocol, TypeVar

import msgspec

from everstep.bulk import CONNECTIONS, full_jitter, side_by_side
from everstep.protocol import safetensors
from everstep.protocol.agent_messages import UploadedShard
from everstep.protocol.errors import OversizedMessage
from everstep.protocol.ids import Rank
from everstep.protocol.manifest import SharedObject
from everstep.protocol.plan import GenerationPlan, ObjectReference, ShardSource
from everstep.protocol.safetensors import Restore, SharedGroups
from everstep.protocol.slot import SlotHeader, SlotState
from worker.core.slots import Content
from worker.core.upload_division import Division, Item
from worker.errors import CorruptCheckpoint, NoRoom, ObjectMissing, StorageError, StoreRefused
from worker.shm.slot_file import SlotFile
from worker.shm.store import SlotStore, in_thread
from worker.storage.object_store import ObjectReader, ObjectStore, OnStored, Share, cut
from worker.storage.shard_object import ShardObject, tensors_of
from worker.storage.shard_parts import ShardParts, read_length
from worker.storage.shared_tensors import Planned, SharedTensors, groups_of, missing, write_missing

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
POLL_SECONDS = 0.5
"""Seconds between two checks for objects that other ranks write."""
LEAST_PATIENCE_SECONDS = 30.0
"""Minimum seconds after which a rank stores missing objects that another rank should write."""
PIECE_BYTES = 4 * 1024 * 1024
"""Maximum bytes of a slot that a thread digests or sends in one piece."""


class ShareOf(Protocol):
    """Returns the helpers of an upload: nodes that also hold the shard, and can send parts of the object."""

    def of(self, where: ObjectReference, object_bytes: int, shared: SharedGroups, check: Callable[[], None]) -> Share:
        """Return the helpers of one upload.

        Args:
            where: bucket and key that the upload will write.
            object_bytes: size of the whole object, the safetensors header included.
            shared: the tensors whose data the object does not contain.
            check: raises an error when the upload is cancelled; called while the upload waits for helpers.

        Returns:
            The helpers. The upload requests parts from them while it runs.
        """


class LoadShare(Protocol):
    """The helpers of one load: other nodes that read some of the shard's parts and send them to this node.

    The download calls all methods but `ended` in one thread.
    """

    def begin(self, check: Callable[[], None]) -> None:
        """Ask the helpers for parts. Called once, before the first `claim`.

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
        """Record that the caller's read of a part has succeeded or failed. Called in the part's thread."""

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


class Agree(Protocol):
    """Divides equal tensors among the ranks that hold them."""

    async def __call__(self, items: Sequence[Item]) -> Division | None:
        """Return this rank's part of the division, or None if the ranks could not agree.

        Each attempt to upload a step receives the same result.
        """


class _Cancelled(Exception):
    """Raised in the thread of an upload or download after the task that waits for the thread was cancelled."""


def shard_key(plan: GenerationPlan, header: SlotHeader, upload_id: str) -> ObjectReference:
    """Return the key of a shard's object (layout: `everstep.protocol.manifest`). No I/O.

    Args:
        plan: plan of the generation that uploads.
        header: header of the sealed slot, which names the step and the owner.
        upload_id: a new random id per attempt, so that each attempt writes its own key.

    Returns:
        Bucket and key.
    """
    folder = f"run={plan.run}/gen={plan.generation}/step={header.step}"
    prefix = plan.checkpoint.prefix
    return ObjectReference(
        bucket=prefix.bucket, key=f"{prefix.key}{folder}/{upload_id}/rank={header.owner_rank}.safetensors"
    )


def is_abandoned(key: str, plan: GenerationPlan, ranks: Collection[Rank]) -> bool:
    """Return whether an unfinished upload to S3 has no running agent that continues the upload. Pure.

    An agent calls this function before its first upload of a generation. At this time, all earlier generations and all
    earlier processes of the agent have ended. Each unfinished upload of the agent's ranks is therefore abandoned.

    Args:
        key: key of the unfinished upload.
        plan: plan of the running generation.
        ranks: ranks of the agent's node. The node of rank 0 is also responsible for ranks that the generation no longer
            has, and for replicated objects of earlier generations.

    Returns:
        True if no process continues the upload.
    """
    folder = re.escape(f"{plan.checkpoint.prefix.key}run={plan.run}/")
    replicated = re.fullmatch(folder + r"gen=(\d+)/step=\d+/replicated/\w+\.safetensors", key)
    if replicated is not None:
        return int(replicated[1]) < plan.generation and Rank(0) in ranks
    found = re.fullmatch(folder + r"gen=(\d+)/step=\d+/\w+/rank=(\d+)\.safetensors", key)
    if found is None or int(found[1]) > plan.generation:
        return False
    rank = Rank(int(found[2]))
    return rank in ranks or (rank >= plan.world_size and Rank(0) in ranks)


async def upload_shard(
    objects: ObjectStore,
    slot: SlotFile,
    chunk_digests: bytes,
    plan: GenerationPlan,
    *,
    rank: Rank,
    shared: SharedTensors | None = None,
    agree: Agree | None = None,
    on_begun: Callable[[str, int], None] = lambda _name, _bytes: None,
    on_stored: OnStored = lambda _: None,
    share: ShareOf | None = None,
    draw: Callable[[], float] = random.random,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> UploadedShard:
    """Upload one sealed slot. The agent of the shard's owner calls this function once per checkpoint.

    The caller must have pinned the slot. A cancelled call returns after its thread has stopped reading the slot.

    Args:
        objects: object store that receives the shard.
        slot: mapped file of the slot, which is sealed and pinned.
        chunk_digests: digests of the slot's chunks, as computed when the slot was sealed. The object contains them.
        plan: plan of the generation that uploads.
        rank: the rank that owns the shard.
        shared: chooses the shared objects of the shard. None: the shard's object contains all tensors.
        agree: divides the offered tensors among the ranks that hold them. None: no other rank is asked.
        on_begun: called with an object's name and size before the object is sent, in a thread.
        on_stored: called in a thread with the size in bytes of each part that S3 has stored.
        share: the holders that help with the first attempt; None without helpers. Later attempts use no helpers, so
            that a misbehaving helper cannot fail an upload.
        draw: returns a random number from 0 to 1, for the pauses between attempts.
        pause: waits for the given seconds while other ranks write objects that the shard needs.

    Returns:
        The facts that the control plane writes to the manifest.

    Raises:
        StorageError: the store refused the upload, or `MAX_ATTEMPTS` attempts failed.
        CorruptCheckpoint: the slot no longer matches its digest.
    """
    header = slot.header
    if header.state is not SlotState.SEALED or header.owner_rank != rank:
        raise StoreRefused(f"the slot of rank {rank} is not sealed")

    async def once() -> UploadedShard:
        upload = _Upload(
            objects,
            slot,
            chunk_digests,
            shard_key(plan, header, secrets.token_hex(8)),
            plan.world_size,
            on_begun,
            on_stored,
        )
        planned: tuple[Planned, ...] = ()
        if shared is not None:
            offer = await _run(lambda check: shared.look(slot, upload.entries, check))
            division = None if agree is None else await agree(offer.items)
            planned = await _run(lambda check: shared.plan(slot, upload.entries, upload.where, offer, division, check))
        uploaded = await _run(lambda check: upload.write(planned, share if attempt == 1 else None, check))
        await upload.await_others([each for each in planned if not each.is_own], clock() - begun, pause)
        return uploaded

    clock = asyncio.get_running_loop().time
    begun = clock()
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            return msgspec.structs.replace(await once(), upload_seconds=clock() - begun)
        except StorageError as error:
            # A helper may have replaced a part after the owner sent it, so that S3 refuses to complete the upload.
            may_be_helper = share is not None and attempt == 1 and not isinstance(error, CorruptCheckpoint)
            if not (error.retryable or may_be_helper) or attempt == MAX_ATTEMPTS:
                raise
            log.warning(
                "upload of step %d of rank %d: attempt %d failed and is retried: %s", header.step, rank, attempt, error
            )
            await asyncio.sleep(full_jitter(attempt, draw))
    raise AssertionError


async def _run(work: Callable[[Callable[[], None]], T]) -> T:
    """Run `work` in a thread. It receives a function that raises an error if the waiting task was cancelled.

    Raises StoreRefused if a header of an object exceeds the limit of safetensors.
    """

    def body(cancelled: threading.Event) -> tuple[T] | None:
        def check() -> None:
            if cancelled.is_set():
                raise _Cancelled

        try:
            return (work(check),)
        except _Cancelled:
            return None  # the waiting task was cancelled, so nothing uses the result

    try:
        result = await in_thread(body)
    except OversizedMessage as error:
        raise StoreRefused(str(error)) from error
    assert result is not None, "a cancelled thread returned to somebody"
    return result[0]


class _Upload:
    """One attempt to upload a slot."""

    def __init__(
        self,
        objects: ObjectStore,
        slot: SlotFile,
        chunk_digests: bytes,
        where: ObjectReference,
        world_size: int,
        on_begun: Callable[[str, int], None],
        on_stored: OnStored,
    ) -> None:
        self._objects = objects
        self._slot = slot
        self._chunk_digests = chunk_digests
        self.where = where
        self.entries = tensors_of(slot)
        """All tensors of the slot, in the order of the payload."""
        self._world_size = world_size
        self._on_begun = on_begun
        self._on_stored = on_stored

    def write(self, planned: Sequence[Planned], share: ShareOf | None, check: Callable[[], None]) -> UploadedShard:
        """Store the shared objects that this rank writes, then the shard's own object. Blocks."""
        self._write_missing([each for each in planned if each.is_own], check)
        where, header, groups = self.where, self._slot.header, groups_of(planned)
        content = ShardObject(self._slot, self._chunk_digests, piece_bytes=PIECE_BYTES, shared=groups)
        self._on_begun(f"s3://{where.bucket}/{where.key}", content.bytes)
        pieces, on_stored = content.verified_pieces(check), self._on_stored
        if share is None:
            stored = self._objects.put_stream(where, pieces, content.bytes, on_stored=on_stored)
        else:
            named = share.of(where, content.bytes, groups, check)
            stored = self._objects.put_shared(
                where, pieces, content.bytes, read=content.pieces, share=named, on_stored=on_stored
            )
        return UploadedShard(
            rank=header.owner_rank,
            step=header.step,
            origin_generation=header.origin_generation,
            object=stored.reference,
            object_bytes=stored.bytes,
            etag=stored.etag,
            payload_bytes=header.payload_bytes,
            payload_digest=header.payload_digest,
            layout_hash=header.layout_hash,
            sha256=stored.sha256,
            part_bytes=stored.part_bytes,
            frozen=tuple(_named(each) for each in planned if each.is_frozen),
            replicated=tuple(_named(each) for each in planned if not each.is_frozen),
        )

    async def await_others(
        self, needed: Sequence[Planned], own_seconds: float, pause: Callable[[float], Awaitable[None]]
    ) -> None:
        """Return when S3 has all objects that other ranks write.

        If objects are missing after as much time as this rank needed for its own ones, this rank stores them.

        Args:
            needed: the objects that the shard needs and that this rank does not write.
            own_seconds: seconds that this rank needed for its own objects.
            pause: waits for the given seconds.
        """
        left = list(needed)
        for _ in range(1 + math.ceil(max(LEAST_PATIENCE_SECONDS, own_seconds) / POLL_SECONDS)):
            left = await _run(lambda _: missing(self._objects, left))  # noqa: B023 - runs before the next iteration
            if not left:
                return
            await pause(POLL_SECONDS)
        log.warning("%d objects that other ranks should write are missing; this node writes them", len(left))
        await _run(lambda check: self._write_missing(left, check))

    def _write_missing(self, planned: Sequence[Planned], check: Callable[[], None]) -> None:
        write_missing(
            self._objects,
            self._slot,
            self.entries,
            planned,
            world_size=self._world_size,
            on_begun=self._on_begun,
            on_stored=self._on_stored,
            check=check,
        )


def _named(planned: Planned) -> SharedObject:
    return SharedObject(key=planned.place.key, object_bytes=planned.group.object_bytes, sha256=planned.group.sha256)


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
        found = objects.head(place)
        if found is None:
            raise ObjectMissing(f"s3://{place.bucket}/{place.key} does not exist")
        if found.bytes != size:
            raise CorruptCheckpoint(f"s3://{place.bucket}/{place.key} has {found.bytes} bytes; the shard says {size}")
    ready = min(reader.ready_bytes, parts.plan.data_bytes)
    if ready:
        with slot.payload(0, parts.plan.payload_bytes) as payload:
            reader.read_into(payload, next(cut(parts.plan.spans, ready)))

    def read(number: int) -> None:
        try:
            with slot.payload(*parts.bounds(number)) as target:
                parts.read(objects, number, target, after=parts.data_begin + ready, is_cancelled=cancelled.is_set)
        finally:
            if share is not None:
                share.ended(number)

    try:
        if share is not None:
            share.begin(check)
        try:
            _read_parts(parts.count, read, share, check)
        finally:
            if share is not None:
                share.end()
    except _Cancelled:
        return  # the waiting task was cancelled, so nothing uses the slot


def _read_parts(count: int, read: Callable[[int], None], share: LoadShare | None, check: Callable[[], None]) -> None:
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
            if share is None or share.claim(number):
                start(number)
        while share is not None and (missing := share.next_missing(lambda: bool(errors))) is not None:
            start(missing)
