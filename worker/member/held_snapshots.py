"""Keeps the snapshots of one step in memory while a user exports them (a *hold*), and returns their bytes.

    HoldSnapshot ──▶ pins one slot per rank of this node ──▶ SnapshotHeld
    ReadSnapshot ──▶ a range of the shard's checkpoint object, built from the slot ──▶ SnapshotBytes

Invariant: a pinned slot keeps its content until the hold ends. A node has at most one hold. A hold ends on request,
after `HOLD_SECONDS` without a request, with the generation, or when the final step or an urgent checkpoint needs its
slot. It never begins again, although the control plane repeats requests.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial

from everstep.protocol.agent_messages import (
    ANOTHER_EXPORT,
    HOLD_SECONDS,
    MAX_SNAPSHOT_READ_BYTES,
    HeldShard,
    HoldSnapshot,
    ReadSnapshot,
    SnapshotBytes,
    SnapshotHeld,
)
from everstep.protocol.ids import Rank, Step
from everstep.protocol.limits import cut
from everstep.protocol.rounds import Announcement
from worker.core.rounds import NONE
from worker.core.slots import is_superseded
from worker.errors import StorageError
from worker.member.retained_steps import RetainedSteps
from worker.shards.owned_shard import OwnedShard
from worker.shm.store import Slot, SlotStore, in_thread
from worker.storage.checkpoints import PIECE_BYTES
from worker.storage.shard_object import ShardObject

KEPT_ENDS = 64
"""Number of ended exports that a node remembers, so that a late request does not start one of them again."""
RELEASED = "the export has ended"


@dataclass(slots=True)
class _Hold:
    """The pinned slots of one export, and the checkpoint objects whose bytes the export reads."""

    hold_id: str
    step: Step
    slots: Mapping[Rank, Slot]
    objects: Mapping[Rank, ShardObject]
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False, repr=False)
class HeldSnapshots:
    """Keeps slots of one committed step unchanged while a client exports the job's state from node memory."""

    shards: Mapping[Rank, OwnedShard]
    store: SlotStore
    contents: RetainedSteps
    _: KW_ONLY
    grant_if_due: Callable[[OwnedShard], None]
    on_change: Callable[[], None]

    def __post_init__(self) -> None:
        self.hold_seconds = HOLD_SECONDS
        self._hold: _Hold | None = None
        self._ends: dict[str, str] = {}
        """Reason of each of the last `KEPT_ENDS` ends, also of holds released before their first request."""
        self._announcement: Announcement | None = None
        self._is_closed = False
        self._turn = asyncio.Lock()
        """Held by a request that begins or prolongs a hold, so that two requests do not pin slots together."""

    async def hold(self, wanted: HoldSnapshot) -> SnapshotHeld:
        """Keep the slots of one step unchanged for an export, or prolong the hold. The answer may be a refusal."""
        async with self._turn:
            if self._hold is not None and self._hold.hold_id != wanted.hold_id:
                return SnapshotHeld(request_id=wanted.request_id, refusal=ANOTHER_EXPORT)
            if self._hold is None and (wanted.is_renewal or wanted.hold_id in self._ends):
                return SnapshotHeld(request_id=wanted.request_id, refusal=self._end_of(wanted.hold_id))
            newest = self.contents.committed if self._hold is None else self._hold.step
            step = newest if wanted.step == NONE else wanted.step
            if self._hold is None or self._hold.step != step:
                problem = await self._begin(wanted.hold_id, step)
                if problem:
                    return SnapshotHeld(request_id=wanted.request_id, refusal=cut(problem))
            assert self._hold is not None
            self._renew(self._hold)
            return SnapshotHeld(
                request_id=wanted.request_id,
                step=self._hold.step,
                shards=tuple(
                    HeldShard(
                        rank=rank,
                        origin_generation=slot.file.header.origin_generation,
                        object_bytes=self._hold.objects[rank].bytes,
                        payload_bytes=slot.file.header.payload_bytes,
                        payload_digest=slot.file.header.payload_digest,
                        layout_hash=slot.file.header.layout_hash,
                    )
                    for rank, slot in self._hold.slots.items()
                ),
            )

    async def _begin(self, hold_id: str, step: Step) -> str:
        """Pin the slots of a step, and unpin those of the step before. Return the reason of a failure, or ""."""
        if step == NONE:
            return "no step is committed yet"
        if obstacle := self._obstacle(hold_id, step):
            return obstacle
        slots: dict[Rank, Slot] = {}
        for rank, shard in self.shards.items():
            slot = shard.slot(step)
            if slot is None:
                return f"step {step} of rank {rank} is not in memory"
            slots[rank] = slot
        objects: dict[Rank, ShardObject] = {}
        problem = "the request was cancelled"
        self._pin(slots)
        try:
            problem = await self._describe(slots, objects) or self._obstacle(hold_id, step)
        finally:
            if problem:
                self._unpin(slots)
        if problem:
            return problem
        self._end()
        self._hold = _Hold(hold_id, step, slots, objects)
        for shard in self.shards.values():
            shard.exported = step
        self.on_change()
        return ""

    def _obstacle(self, hold_id: str, step: Step) -> str:
        """Return the reason why this node cannot hold slots for an export now, or ""."""
        announcement = self._announcement
        if self._is_closed:
            return "the generation has ended on this node"
        if hold_id in self._ends:
            return self._ends[hold_id]
        if announcement is not None and is_superseded(
            step, committed=announcement.committed, proposed=announcement.proposed, persist=announcement.persist_step
        ):
            return f"the job stops, and its final step {announcement.proposed} needs the memory"
        if announcement is not None and announcement.ends_exports:
            return "AWS announced the end of a node, and the checkpoint that the job stores before needs the memory"
        return ""

    def _end_of(self, hold_id: str) -> str:
        return self._ends.get(hold_id, "the snapshot is no longer held")

    async def _describe(self, slots: Mapping[Rank, Slot], objects: dict[Rank, ShardObject]) -> str:
        try:
            for rank, slot in slots.items():
                digests = await self.store.digests(slot)
                if digests is None:
                    return f"the snapshot of rank {rank} is damaged in memory"
                objects[rank] = await in_thread(partial(_object_of, slot, digests.known))
        except StorageError as error:
            return str(error)
        return ""

    async def read(self, wanted: ReadSnapshot) -> SnapshotBytes:
        """Return a range of the bytes of an exported shard, in the format of a checkpoint, or a refusal."""
        hold = self._hold
        if hold is None or hold.hold_id != wanted.hold_id:
            return SnapshotBytes(request_id=wanted.request_id, refusal=self._end_of(wanted.hold_id))
        content = hold.objects.get(wanted.rank)
        if content is None:
            return SnapshotBytes(request_id=wanted.request_id, refusal=f"rank {wanted.rank} is not on this node")
        begin, end = wanted.begin, wanted.end
        if not 0 <= begin < end <= content.bytes or end - begin > MAX_SNAPSHOT_READ_BYTES:
            return SnapshotBytes(
                request_id=wanted.request_id,
                refusal=f"bytes {begin} to {end} of {content.bytes} cannot be read in one request",
            )
        self._renew(hold)

        def work(_: threading.Event) -> bytes:
            return b"".join(content.pieces(begin, end))

        data = await self.store.reading(hold.slots[wanted.rank], in_thread(work))
        if data is None:
            return SnapshotBytes(request_id=wanted.request_id, refusal=self._end_of(wanted.hold_id))
        return SnapshotBytes(request_id=wanted.request_id, data=data)

    def release(self, hold_id: str, why: str = RELEASED) -> None:
        """End the export `hold_id`, and refuse its later requests with `why`, a part of a message for users."""
        self._ends.setdefault(hold_id, why)
        while len(self._ends) > KEPT_ENDS:
            del self._ends[next(iter(self._ends))]
        if self._hold is not None and self._hold.hold_id == hold_id:
            self._end()

    def apply_announcement(self, announcement: Announcement) -> None:
        """End the export if training needs its slots for the final step or an urgent checkpoint."""
        self._announcement = announcement
        if self._hold is not None and (obstacle := self._obstacle(self._hold.hold_id, self._hold.step)):
            self.release(self._hold.hold_id, obstacle)

    def close(self) -> None:
        """End the running export, if any. No further export begins."""
        self._is_closed = True
        self._end()

    def _renew(self, hold: _Hold) -> None:
        if hold.timer is not None:
            hold.timer.cancel()
        silent = f"the export sent no request for {self.hold_seconds:g} s"
        hold.timer = asyncio.get_running_loop().call_later(self.hold_seconds, self.release, hold.hold_id, silent)

    def _end(self) -> None:
        hold, self._hold = self._hold, None
        if hold is None:
            return
        if hold.timer is not None:
            hold.timer.cancel()
        for shard in self.shards.values():
            shard.exported = NONE
        self._unpin(hold.slots)
        self.on_change()

    @staticmethod
    def _pin(slots: Mapping[Rank, Slot]) -> None:
        for slot in slots.values():
            slot.pins += 1

    def _unpin(self, slots: Mapping[Rank, Slot]) -> None:
        for slot in slots.values():
            slot.pins -= 1
        if not self._is_closed:
            for rank in slots:
                self.grant_if_due(self.shards[rank])


def _object_of(slot: Slot, chunk_digests: bytes, _: threading.Event) -> ShardObject:
    return ShardObject(slot.file, chunk_digests, piece_bytes=PIECE_BYTES)
