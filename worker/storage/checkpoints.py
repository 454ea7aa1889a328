"""Uploads shards from slots to the object store. `worker.storage.downloads` downloads them.

Invariant: an object named by an `UploadedShard` is complete, and its content matches its slot's digest.
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
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from everstep.bulk import full_jitter
from everstep.protocol.agent_messages import UploadedShard
from everstep.protocol.errors import OversizedMessage
from everstep.protocol.ids import Rank
from everstep.protocol.manifest import SharedObject
from everstep.protocol.plan import GenerationPlan, ObjectReference
from everstep.protocol.safetensors import SharedGroups
from everstep.protocol.slot import SlotHeader, SlotState
from worker.core.upload_division import Division, Item
from worker.errors import CorruptCheckpoint, StorageError, StoreRefused
from worker.shm.slot_file import SlotFile
from worker.shm.store import in_thread
from worker.storage.object_store import ObjectStore, OnStored, UploadShare
from worker.storage.shard_object import ShardObject, tensors_of
from worker.storage.shared_tensors import Planned, SharedTensors, groups_of, missing, write_missing

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
OBJECT_POLL_SECONDS = 0.5
"""Pause between two checks whether other ranks have written their objects to S3."""
LEAST_PATIENCE_SECONDS = 30.0
"""Shortest wait for shared objects of other ranks. Then the rank stores the missing objects itself."""
PIECE_BYTES = 4 * 1024 * 1024
"""Maximum bytes of a slot that a thread digests or sends in one piece."""


class ShareOf(Protocol):
    """Creates an `UploadShare`, which divides an upload between this node and the shard's other holders."""

    def of(
        self, where: ObjectReference, object_bytes: int, shared: SharedGroups, check: Callable[[], None]
    ) -> UploadShare:
        """Return the division of one upload between this node and helper nodes.

        `object_bytes` includes the safetensors header. The tensors of `shared` are in other objects. `check` raises an
        error when the upload is cancelled.
        """


class Agree(Protocol):
    """Function with which ranks agree on the writer of each tensor that several ranks hold."""

    async def __call__(self, items: Sequence[Item]) -> Division | None:
        """Return which tensors of `items` this rank writes to S3, or None if the ranks could not agree.

        Each attempt to upload the same step receives the same result.
        """


class _Cancelled(Exception):
    """Raised in the thread of an upload after the task that waits for the thread was cancelled."""


def shard_key(plan: GenerationPlan, header: SlotHeader, upload_id: str) -> ObjectReference:
    """Return the key of a shard's object (layout: `everstep.protocol.manifest`). Pure."""
    folder = f"run={plan.run}/gen={plan.generation}/step={header.step}"
    prefix = plan.checkpoint.prefix
    return ObjectReference(
        bucket=prefix.bucket, key=f"{prefix.key}{folder}/{upload_id}/rank={header.owner_rank}.safetensors"
    )


def is_abandoned(key: str, plan: GenerationPlan, ranks: Collection[Rank]) -> bool:
    """Return whether no running agent continues an unfinished upload to S3. Pure.

    Called before the agent's first upload of a generation. `ranks` are those of the agent's node. The node of rank 0 is
    also responsible for ranks that the generation no longer has, and for earlier generations' shared objects.
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
    on_waiting: Callable[[str], None] = lambda _: None,
    on_digested: Callable[[], None] = lambda: None,
    share: ShareOf | None = None,
    draw: Callable[[], float] = random.random,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> UploadedShard:
    """Upload one sealed and pinned slot. The agent of the shard's owner calls this function once per checkpoint.

    A cancelled call returns after its thread has stopped reading the slot. Without `shared`, the shard's object
    contains all tensors. `agree` divides the tensors that several ranks hold; with None, no other rank is asked.
    `share` lets holders help with the first attempt. Later attempts use no helpers, so that a misbehaving helper cannot
    fail an upload.

    The callbacks `on_begun` (name and size of an object), `on_stored` (bytes of a part) and `on_digested` (a piece) run
    in a thread. `on_waiting` is called repeatedly with the name of an object of another rank that S3 lacks.

    Raises StorageError if the store refused the upload, or `MAX_ATTEMPTS` attempts failed. Raises CorruptCheckpoint if
    the slot no longer matches its digest, and StoreRefused if the slot is not sealed.
    """
    header = slot.header
    if header.state is not SlotState.SEALED or header.owner_rank != rank:
        raise StoreRefused(f"the slot of rank {rank} is not sealed")

    def piece(check: Callable[[], None]) -> None:
        check()
        on_digested()

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
            offer = await _run(lambda check: shared.look(slot, upload.entries, lambda: piece(check)))
            division = None if agree is None else await agree(offer.items)
            planned = await _run(
                lambda check: shared.plan(slot, upload.entries, upload.where, offer, division, lambda: piece(check))
            )
        uploaded = await _run(lambda check: upload.write(planned, share if attempt == 1 else None, check))
        needed = [each for each in planned if not each.is_own]
        await upload.await_others(needed, clock() - begun, on_waiting, pause)
        return uploaded

    clock = asyncio.get_running_loop().time
    begun = clock()
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            return msgspec.structs.replace(await once(), upload_seconds=clock() - begun)
        except StorageError as error:
            # A helper node may have sent a part that the owner had sent already. S3 then refuses to complete the
            # upload. An attempt without helper nodes can succeed.
            may_be_helper = share is not None and attempt == 1 and not isinstance(error, CorruptCheckpoint)
            if not (error.retryable or may_be_helper) or attempt == MAX_ATTEMPTS:
                raise
            log.warning(
                "upload of step %d of rank %d: attempt %d failed and is retried: %s", header.step, rank, attempt, error
            )
            await pause(full_jitter(attempt, draw))
    raise AssertionError


async def _run(work: Callable[[Callable[[], None]], T]) -> T:
    """Run `work` in a thread. `work` receives a function that raises an error once the waiting task is cancelled."""

    def body(cancelled: threading.Event) -> tuple[T] | None:
        def check() -> None:
            if cancelled.is_set():
                raise _Cancelled

        try:
            return (work(check),)
        except _Cancelled:
            return None  # The waiting task was cancelled, so the result is unused.

    try:
        result = await in_thread(body)
    except OversizedMessage as error:
        raise StoreRefused(str(error)) from error
    assert result is not None, "the thread was cancelled, but its caller was not"
    return result[0]


@dataclass(eq=False, repr=False)
class _Upload:
    """One attempt to upload the shard in a slot to S3: its own object, and the shared objects that the rank writes."""

    objects: ObjectStore
    slot: SlotFile
    chunk_digests: bytes
    where: ObjectReference
    world_size: int
    on_begun: Callable[[str, int], None]
    on_stored: OnStored

    def __post_init__(self) -> None:
        self.entries = tensors_of(self.slot)

    def write(self, planned: Sequence[Planned], share: ShareOf | None, check: Callable[[], None]) -> UploadedShard:
        """Store the S3 objects that this rank writes for several ranks, then the shard's own object. Blocks."""
        self._write_missing([each for each in planned if each.is_own], check)
        where, header, groups = self.where, self.slot.header, groups_of(planned)
        content = ShardObject(self.slot, self.chunk_digests, piece_bytes=PIECE_BYTES, shared=groups)
        self.on_begun(f"s3://{where.bucket}/{where.key}", content.bytes)
        pieces, on_stored = content.verified_pieces(check), self.on_stored
        if share is None:
            stored = self.objects.put_stream(where, pieces, content.bytes, on_stored=on_stored)
        else:
            named = share.of(where, content.bytes, groups, check)
            stored = self.objects.put_shared(
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
        self,
        needed: Sequence[Planned],
        own_seconds: float,
        on_waiting: Callable[[str], None],
        pause: Callable[[float], Awaitable[None]],
    ) -> None:
        """Wait until S3 has all objects with tensors of this shard that other ranks write.

        This rank waits for as long as it needed for its own objects, but at least `LEAST_PATIENCE_SECONDS`. Then it
        stores the missing objects itself.
        """
        left = needed
        for _ in range(1 + math.ceil(max(LEAST_PATIENCE_SECONDS, own_seconds) / OBJECT_POLL_SECONDS)):
            try:
                left = await _run(lambda _: missing(self.objects, left))  # noqa: B023 - runs before the next iteration
            except StorageError as error:
                if not error.retryable:
                    raise
                # An exception would repeat the upload of the rank's own object, so only ask S3 again.
                log.info("S3 does not say whether it has the objects of other ranks: %s", error)
            if not left:
                return
            on_waiting(f"s3://{left[0].place.bucket}/{left[0].place.key}")
            await pause(OBJECT_POLL_SECONDS)
        log.warning("up to %d objects that other ranks should write are missing; this node writes them", len(left))
        await _run(lambda check: self._write_missing(left, check))

    def _write_missing(self, planned: Sequence[Planned], check: Callable[[], None]) -> None:
        write_missing(
            self.objects,
            self.slot,
            self.entries,
            planned,
            world_size=self.world_size,
            on_begun=self.on_begun,
            on_stored=self.on_stored,
            check=check,
        )


def _named(planned: Planned) -> SharedObject:
    return SharedObject(key=planned.place.key, object_bytes=planned.group.object_bytes, sha256=planned.group.sha256)
