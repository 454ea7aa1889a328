"""Uploads the committed shards that the coordinator marks as checkpoints to S3.

Invariant: the slot of an upload is pinned before a later step can reuse it. At most `CheckpointPlan.max_uploads`
uploads of a shard run at the same time.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial

from everstep.protocol.agent_messages import NodeFault, RunningUpload, UploadedShard
from everstep.protocol.errors import ProtocolError
from everstep.protocol.ids import NodeId, Rank, Step
from everstep.protocol.limits import cut
from everstep.protocol.plan import GenerationPlan, ObjectReference
from everstep.protocol.rounds import Announcement
from worker.core.rounds import NONE
from worker.core.slots import is_superseded, may_upload, newest_uploads, retry_pause
from worker.core.upload_division import MAX_OFFERED, Division, Item
from worker.core.upload_progress import UploadProgress
from worker.errors import CorruptCheckpoint, StorageError
from worker.member.faults import ReportedFaults
from worker.member.retained_steps import RetainedSteps
from worker.member.shared_uploads import HelpedUpload
from worker.replication.transport import Session
from worker.shards.owned_shard import OwnedShard
from worker.shm.slot_file import SlotFile
from worker.shm.store import Slot, SlotStore, in_thread
from worker.storage.checkpoints import is_abandoned, upload_shard
from worker.storage.object_store import ObjectStore
from worker.storage.shared_tensors import SharedTensors
from worker.tasks import Background, end

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class CheckpointUploads:
    """Uploads shards of one generation from this node to S3.

    `contents` names the committed step; only it or the base may be uploaded. `faults` receives a fault for each failed
    upload, until the shard is uploaded. `agree` divides the tensors of a rank (`UploadDivision.agree`). `grant_if_due`
    is called when a cancelled upload no longer reads its slot. `pause` waits for the given seconds.
    """

    plan: GenerationPlan
    shards: Mapping[Rank, OwnedShard]
    store: SlotStore
    objects: ObjectStore
    contents: RetainedSteps
    faults: ReportedFaults
    _: KW_ONLY
    dial: Callable[[NodeId], Awaitable[Session]]
    agree: Callable[[Rank, Step, Sequence[Item]], Awaitable[Division | None]]
    grant_if_due: Callable[[OwnedShard], None]
    on_change: Callable[[], None]
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep

    def __post_init__(self) -> None:
        self.uploaded: list[UploadedShard] = []
        self._persist: Step = NONE
        # A job with a single rank shares no tensors between ranks, so it needs no digests of its tensors.
        max_offered = MAX_OFFERED if self.plan.world_size > 1 else 0
        self._shared = defaultdict[Rank, SharedTensors](partial(SharedTensors, max_offered=max_offered))
        self._max_uploads = self.plan.checkpoint.max_uploads
        self._divisions: dict[tuple[Rank, Step], Division | None] = {}
        """By local rank and step: which shared tensors the rank writes; None if the ranks could not agree."""
        self._background = Background()
        self._cleaned = asyncio.Event()
        self._progress: dict[tuple[Rank, Step], UploadProgress] = {}
        """Progress of the running uploads, also during the pauses between attempts."""
        self._uploading: dict[tuple[Rank, Step], asyncio.Task[None]] = {}

    def apply_announcement(self, announcement: Announcement) -> None:
        """Upload the marked step. For the final step, cancel uploads of steps before the committed one."""
        self.begin(announcement.persist_step)
        for shard in self.shards.values():
            for step in shard.pinned:
                if is_superseded(
                    step,
                    committed=announcement.committed,
                    proposed=announcement.proposed,
                    persist=announcement.persist_step,
                ):
                    log.info(
                        "the upload of step %d of rank %d is cancelled for the final step %d",
                        step,
                        shard.rank,
                        announcement.proposed,
                    )
                    self._background.begin(self._end_upload(shard, step), f"end of the upload of rank {shard.rank}")

    def begin(self, persist: Step) -> None:
        """Upload the shards of step `persist`, if this node's slots still contain them."""
        self._persist = persist
        for shard in self.shards.values():
            self._upload_if_due(shard)

    async def abort_abandoned(self) -> None:
        """Remove from S3 the unfinished uploads of ended agent processes. New uploads wait for the end of the call."""
        prefix = self.plan.checkpoint.prefix
        where = ObjectReference(bucket=prefix.bucket, key=f"{prefix.key}run={self.plan.run}/")

        def is_left(key: str) -> bool:
            return is_abandoned(key, self.plan, self.shards.keys())

        try:
            count = await in_thread(lambda _: self.objects.abort_uploads(where, is_left))
            if count:
                log.info("aborted %d unfinished uploads of ended agents", count)
        except StorageError as error:
            # A lifecycle rule of the bucket removes them later (docs/operating.md#server).
            log.info("unfinished uploads of ended agents stay in S3: %s", error)
        finally:
            self._cleaned.set()

    def stalls(self, now: float) -> tuple[NodeFault, ...]:
        """Return a fault for each upload without progress for `STALL_SECONDS`. `now` is the loop's time."""
        return tuple(
            NodeFault(code="upload_stalled", message=cut(message), is_permanent=False)
            for progress in self._progress.values()
            if (message := progress.stall(now))
        )

    def running(self) -> tuple[RunningUpload, ...]:
        """Return the progress of each running upload, in the order of ranks and steps."""
        return tuple(self._progress[key].report for key in sorted(self._progress))

    async def idle(self) -> None:
        """Wait until no shard of this node is being uploaded."""
        await self._background.idle()

    async def close(self) -> None:
        """Cancel all uploads of this node's shards."""
        await self._background.close()

    def _upload_if_due(self, shard: OwnedShard) -> None:
        step, is_kept = self._persist, self._persist in (self.contents.committed, self.plan.base_step)
        is_due = may_upload(step, begun=shard.uploaded, uploading=shard.pinned, max_uploads=self._max_uploads)
        slot = shard.slot(step) if is_due and is_kept else None
        if slot is None:
            return
        shard.uploaded = step
        shard.pinned |= {step}
        # Pin the slot at once, before a later step can overwrite it.
        slot.pins += 1
        self._progress[shard.rank, step] = UploadProgress(
            rank=shard.rank,
            step=step,
            moved_at=asyncio.get_running_loop().time(),
            object_bytes=slot.file.header.payload_bytes,
        )

        async def work() -> None:
            failures = 0
            try:
                while (pause := await self._try_upload(shard, slot, step, failures)) is not None:
                    failures += 1
                    await self.pause(pause * random.random())
            finally:
                slot.pins -= 1
                shard.pinned -= {step}
                del self._progress[shard.rank, step]
                self._uploading.pop((shard.rank, step), None)
                self._divisions.pop((shard.rank, step), None)
                self._shared[shard.rank].forget(step)
                self.on_change()
            self._upload_if_due(shard)

        self._uploading[shard.rank, step] = self._background.begin(work(), f"upload rank {shard.rank} step {step}")

    async def _try_upload(self, shard: OwnedShard, slot: Slot, step: Step, failures: int) -> float | None:
        """Try once to upload a step. Return the longest pause in seconds before the next attempt; None for none."""
        subject = f"rank {shard.rank}"
        try:
            digests = await self.store.digests(slot)
            if digests is None:
                raise CorruptCheckpoint(f"step {step} in memory no longer matches its digest")
            await self._cleaned.wait()
            uploaded = await self._upload(shard, slot.file, digests.known, with_helpers=not failures)
        except Exception as error:  # The rank chooses the content of its slot, whatever the agent expects of it.
            if not isinstance(error, StorageError | ProtocolError):
                log.exception("the upload of step %d of %s failed", step, subject)
            pause = retry_pause(failures + 1) if isinstance(error, StorageError) and error.retryable else None
            follows = "" if pause is None else "; the agent tries again"
            message = f"step {step} of {subject} is not in S3: {error}{follows}"
            self.faults.report("upload_failed", message, subject=subject)
            self.on_change()
            return pause
        shard.stored = max(shard.stored, step)
        self.uploaded = newest_uploads([*self.uploaded, uploaded], max_uploads=self._max_uploads)
        self.faults.withdraw("upload_failed", subject)
        return None

    async def _upload(self, shard: OwnedShard, slot: SlotFile, digests: bytes, *, with_helpers: bool) -> UploadedShard:
        loop, rank = asyncio.get_running_loop(), shard.rank
        key = rank, slot.header.step

        def note(change: Callable[[UploadProgress], UploadProgress]) -> None:
            if key in self._progress:  # The upload may have ended since its thread scheduled this call.
                self._progress[key] = change(self._progress[key])

        def on_begun(name: str, object_bytes: int) -> None:
            loop.call_soon_threadsafe(note, lambda progress: progress.begun(name, object_bytes, loop.time()))

        def on_stored(part_bytes: int) -> None:
            loop.call_soon_threadsafe(note, lambda progress: progress.stored(part_bytes, loop.time()))

        def on_waiting(name: str) -> None:
            note(lambda progress: progress.waiting(name, loop.time()))

        def on_digested() -> None:
            loop.call_soon_threadsafe(note, lambda progress: progress.digested(loop.time()))

        helpers = HelpedUpload(slot.header, shard.holders_of(slot.header.step), self.dial, on_stored=on_stored)
        return await upload_shard(
            self.objects,
            slot,
            digests,
            self.plan,
            rank=rank,
            shared=self._shared[rank],
            agree=partial(self._divide, rank, slot.header.step),
            on_begun=on_begun,
            on_stored=on_stored,
            on_waiting=on_waiting,
            on_digested=on_digested,
            share=helpers if helpers.peers and with_helpers else None,
            pause=self.pause,
        )

    async def _divide(self, rank: Rank, step: Step, items: Sequence[Item]) -> Division | None:
        if (rank, step) not in self._divisions:
            self._divisions[rank, step] = await self.agree(rank, step, items)
        return self._divisions[rank, step]

    async def _end_upload(self, shard: OwnedShard, step: Step) -> None:
        if (task := self._uploading.get((shard.rank, step))) is not None:
            await end(task)
        self._upload_if_due(shard)
        self.grant_if_due(shard)
