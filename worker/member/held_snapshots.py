"""Keeps the snapshots of one step in memory while a user exports them, and returns their bytes.

    HoldSnapshot ──▶ pins one slot per rank of this node ──▶ SnapshotHeld
    ReadSnapshot ──▶ a range of the shard's checkpoint object, built from the slot ──▶ SnapshotBytes

Invariant: a pinned slot keeps its content until the hold ends. A hold ends on request, after `HOLD_SECONDS` without a
request, with the generation, or when the slot is needed for the final step of a stop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from everstep.protocol.agent_messages import (
    HOLD_SECONDS,
    MAX_SNAPSHOT_READ_BYTES,
    HeldShard,
    HoldSnapshot,
    ReadSnapshot,
    SnapshotBytes,
    SnapshotHeld,
)
from everstep.protocol.ids import Rank, Step
from everstep.protocol.rounds import Announcement
from worker.core.rounds import NONE
from worker.core.slots import is_superseded
from worker.errors import StorageError
from worker.member.kept_contents import KeptContents
from worker.shards.owned_shard import OwnedShard
from worker.shm.store import Slot, SlotStore, in_thread
from worker.storage.checkpoints import PIECE_BYTES
from worker.storage.shard_object import ShardObject


@dataclass(slots=True)
class _Hold:
    """The slots that one export keeps."""

    hold_id: str
    step: Step
    slots: Mapping[Rank, Slot]
    objects: Mapping[Rank, ShardObject]
    timer: asyncio.TimerHandle | None = None


class HeldSnapshots:
    """The snapshots that this node keeps for an export. The node's `Member` owns the object."""

    def __init__(
        self,
        shards: Mapping[Rank, OwnedShard],
        store: SlotStore,
        contents: KeptContents,
        *,
        grant_if_due: Callable[[OwnedShard], None],
    ) -> None:
        """Create the object without a hold.

        Args:
            shards: shards of this node's ranks; filled when the generation opens.
            store: this node's slots.
            contents: names the newest step whose commit this node has received.
            grant_if_due: called for each shard whose slot is free again.
        """
        self._shards = shards
        self._store = store
        self._contents = contents
        self._grant_if_due = grant_if_due
        self.hold_seconds = HOLD_SECONDS
        """Seconds after its last request until a hold ends."""
        self._hold: _Hold | None = None
        self._turn = asyncio.Lock()
        """Held while a hold begins, so that two requests do not pin slots at the same time."""

    async def hold(self, wanted: HoldSnapshot) -> SnapshotHeld:
        """Pin the slots of one step, or renew the hold.

        Args:
            wanted: the request of the control plane, for the running generation.

        Returns:
            The step and its shards, or a refusal.
        """
        async with self._turn:
            if self._hold is not None and self._hold.hold_id != wanted.hold_id:
                return SnapshotHeld(request_id=wanted.request_id, refusal="another export holds a snapshot")
            if self._hold is None and wanted.is_renewal:
                return SnapshotHeld(request_id=wanted.request_id, refusal="the snapshot is no longer held")
            step = self._contents.committed if wanted.step == NONE else wanted.step
            if self._hold is None or self._hold.step != step:
                problem = await self._begin(wanted.hold_id, step)
                if problem:
                    return SnapshotHeld(request_id=wanted.request_id, refusal=problem)
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
        """Pin the slots of a step, and unpin the slots of the hold's earlier step.

        Return the reason of a failure, or "".
        """
        if step == NONE:
            return "no step is committed yet"
        slots: dict[Rank, Slot] = {}
        for rank, shard in self._shards.items():
            slot = shard.slot(step)
            if slot is None:
                return f"step {step} of rank {rank} is not in memory"
            slots[rank] = slot
        for slot in slots.values():
            slot.pins += 1
        objects: dict[Rank, ShardObject] = {}
        try:
            for rank, slot in slots.items():
                digests = await self._store.digests(slot)
                if digests is None:
                    return f"step {step} of rank {rank} is damaged in memory"
                objects[rank] = await in_thread(partial(_object_of, slot, digests.known))
        except StorageError as error:
            return str(error)
        finally:
            if len(objects) < len(slots):
                for slot in slots.values():
                    slot.pins -= 1
        self._end()
        self._hold = _Hold(hold_id, step, slots, objects)
        return ""

    async def read(self, wanted: ReadSnapshot) -> SnapshotBytes:
        """Return a range of a held shard's checkpoint object.

        Args:
            wanted: the request of the control plane, for the running generation.

        Returns:
            The bytes, or a refusal.
        """
        hold = self._hold
        if hold is None or hold.hold_id != wanted.hold_id:
            return SnapshotBytes(request_id=wanted.request_id, refusal="the snapshot is no longer held")
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

        data = await self._store.reading(hold.slots[wanted.rank], in_thread(work))
        if data is None:
            return SnapshotBytes(request_id=wanted.request_id, refusal="the snapshot is no longer held")
        return SnapshotBytes(request_id=wanted.request_id, data=data)

    def release(self, hold_id: str) -> None:
        """End a hold. A hold with another id continues."""
        if self._hold is not None and self._hold.hold_id == hold_id:
            ranks = list(self._hold.slots)
            self._end()
            for rank in ranks:
                self._grant_if_due(self._shards[rank])

    def hear(self, announcement: Announcement) -> None:
        """End a hold whose slots are needed for the final step. The caller then grants slots for this step."""
        if self._hold is not None and is_superseded(
            self._hold.step, proposed=announcement.proposed, persist=announcement.persist_step
        ):
            self._end()

    def close(self) -> None:
        """End the hold, because the generation ends on this node."""
        self._end()

    def _renew(self, hold: _Hold) -> None:
        if hold.timer is not None:
            hold.timer.cancel()
        hold.timer = asyncio.get_running_loop().call_later(self.hold_seconds, self.release, hold.hold_id)

    def _end(self) -> None:
        hold, self._hold = self._hold, None
        if hold is None:
            return
        if hold.timer is not None:
            hold.timer.cancel()
        for slot in hold.slots.values():
            slot.pins -= 1


def _object_of(slot: Slot, chunk_digests: bytes, _: threading.Event) -> ShardObject:
    return ShardObject(slot.file, chunk_digests, piece_bytes=PIECE_BYTES)
