"""Manages the slots of this node's ranks: creation on request, then grant, capture and seal for each proposed step.

    SlotsRequest ─▶ slots here ─▶ slots of the holders ─┐
    Announcement ───────────────────────────────────────┴▶ grant ─▶ the rank's page
    Capturing ─▶ digests of the finished part ─▶ holders receive this part
    Captured  ─▶ all digests ─▶ slot sealed ─▶ `OwnedShard.seal`

Invariant: a rank receives a slot only for the proposed step, and only after all holders in view have created their
slots. The agent ignores a rank's message about a slot that the rank may not write.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass

from everstep.protocol.agent_messages import state_count
from everstep.protocol.codec import Message
from everstep.protocol.ids import Rank, Step
from everstep.protocol.plan import GenerationPlan
from everstep.protocol.rank_messages import (
    Abandoned,
    Captured,
    Capturing,
    PageChanged,
    SlotsGranted,
    SlotsRefused,
    SlotsRequest,
    UnkeptCause,
)
from everstep.protocol.slot import (
    DIGEST_BYTES,
    HEADER_BYTES,
    SlotHeader,
    SlotState,
    chunk_count,
    chunk_range,
    digest,
)
from worker.core.parity import Stripe, parity_bytes_per_node
from worker.core.rounds import NONE
from worker.core.slots import Content, being_written, slot_bytes_per_node
from worker.core.transfers import chunk_digest
from worker.errors import NoRoom
from worker.member.faults import ReportedFaults
from worker.shards.owned_shard import OwnedShard
from worker.shm.chunk_digests import ChunkDigests
from worker.shm.slot_file import SlotFile
from worker.shm.store import Slot, SlotStore
from worker.tasks import Background

log = logging.getLogger(__name__)
NO_LAYOUT = "the rank's slots are not ready yet"


@dataclass(eq=False, repr=False)
class RankSlots:
    """Creates, grants and seals the slots of this node's ranks in one generation.

    `on_snapshot` receives the seconds from the end of a step to the end of its capture.
    """

    plan: GenerationPlan
    shards: Mapping[Rank, OwnedShard]
    store: SlotStore
    _: KW_ONLY
    keep: Callable[[Rank], Collection[Content]]
    slot_count: int
    send: Callable[[Rank, Message], None]
    on_snapshot: Callable[[float], None]
    faults: ReportedFaults
    background: Background

    def __post_init__(self) -> None:
        self.capacities: dict[Rank, int] = {}
        """Bytes that each rank last requested, or after a refusal the last capacity that was granted."""
        self._layouts: dict[Rank, tuple[bytes, int]] = {}
        self._refused: dict[Rank, str] = {}
        self._unmet: dict[Rank, SlotsRequest] = {}
        """Requests for which this node lacks memory at the moment, repeated at each proposed step."""
        self._unprepared: dict[Rank, Step] = {}
        """By rank: the last step that was proposed before the rank's slots were ready, as happens after every start."""
        self._sealing: dict[Rank, Step] = {}
        self._granting: defaultdict[Rank, asyncio.Lock] = defaultdict(asyncio.Lock)

    def request(self, shard: OwnedShard, request: SlotsRequest) -> None:
        """Create the requested slots in the background. Then grant a slot for the proposed step."""
        self.background.begin(self._reserve(shard, request))

    def grant_if_due(self, shard: OwnedShard) -> None:
        """Grant the rank a slot for the proposed step, unless the rank already has one."""
        if shard.core.proposed in (NONE, self.plan.base_step) or shard.granted_slot >= 0:
            return
        # The rank's slots do not exist yet. `_reserve` grants a slot for this step after it has created the slots.
        if shard.rank not in self._layouts:
            self._unprepared[shard.rank] = shard.core.proposed
        unmet = self._unmet.pop(shard.rank, None)
        self.background.begin(self._grant(shard) if unmet is None else self._reserve(shard, unmet))

    def revoke_captured(self, shard: OwnedShard) -> None:
        """Revoke the grant of a slot that the rank has filled."""
        step = shard.core.proposed
        # A rank that returns from a rehearsal has forgotten its capture, and would write into the sealed slot
        # again.
        if step in shard.core.sealed or self._sealing.get(shard.rank) == step:
            shard.grant(NONE)

    async def _reserve(self, shard: OwnedShard, request: SlotsRequest) -> None:
        self._layouts.pop(shard.rank, None)
        self._unmet.pop(shard.rank, None)
        self._refused.pop(shard.rank, None)
        if shard.granted_slot < 0:
            self._settle(shard)
        self.capacities[shard.rank] = request.capacity_bytes
        needed = self._needed_bytes(self.capacities)
        try:
            if needed > self.store.memory_bytes:
                raise NoRoom(needed_bytes=needed, available_bytes=self.store.memory_bytes)
            await self.store.reserve(
                shard.rank,
                capacity_bytes=request.capacity_bytes,
                layout_hash=request.layout_hash,
                slot_count=self.slot_count,
            )
        except NoRoom as error:
            requested = dict(self.capacities)
            if error.is_passing:  # Training continues. `grant_if_due` repeats the rank's request.
                shard.refuse(UnkeptCause.MEMORY, f"Protection waits for memory on its node: {error}")
                self._unmet[shard.rank] = request
                return
            if shard.reserved is None:
                self.capacities.pop(shard.rank, None)
            else:
                self.capacities[shard.rank] = shard.reserved[0]
            figures = self._figures(shard.rank, requested, request, error)
            self._refused[shard.rank] = figures
            shard.refuse(UnkeptCause.MEMORY, figures)
            self.send(shard.rank, SlotsRefused(layout_hash=request.layout_hash, reason=figures))
            # Without these slots, the rank takes no snapshots. A job that can be restored continues nevertheless. Any
            # other job would run unprotected, which is a fault.
            if shard.core.foundation == NONE and self.plan.relayout is None:
                self.faults.report("protection_does_not_fit", figures, is_permanent=True)
            return
        shard.accept()
        shard.reserve(request.capacity_bytes, request.layout_hash)
        self.send(
            shard.rank,
            SlotsGranted(
                layout_hash=request.layout_hash, capacity_bytes=request.capacity_bytes, paths=self._paths(shard)
            ),
        )
        if not await shard.holders_ready():
            return  # The rank has sent a new request meanwhile. The handler of the new request continues.
        self._layouts[shard.rank] = (request.layout_hash, request.capacity_bytes)
        if shard.granted_slot < 0:
            await self._grant(shard)

    def _needed_bytes(self, capacities: Mapping[Rank, int]) -> int:
        plans = {rank: self.plan.ranks[rank] for rank in capacities}
        striped = [(Stripe(plan.stripe), capacities[rank]) for rank, plan in plans.items() if plan.stripe]
        shards = [capacities[rank] + HEADER_BYTES for rank, plan in plans.items() if not plan.stripe]
        copies = max(len(plan.copy_nodes) for plan in plans.values())
        return parity_bytes_per_node(
            stripes=striped, header_bytes=HEADER_BYTES, slot_count=self.slot_count
        ) + slot_bytes_per_node(copies=copies, shard_bytes=shards, slot_count=self.slot_count)

    def _figures(self, rank: Rank, capacities: Mapping[Rank, int], request: SlotsRequest, error: NoRoom) -> str:
        # Assume that a rank without a request needs as much as the refused request.
        each = {**dict.fromkeys(self.shards, request.capacity_bytes), **capacities}
        needed = self._needed_bytes(each)
        besides = ", with its other slots," if needed < error.needed_bytes else ""
        plan, every = self.plan.ranks[rank], sum(each.values()) + len(each) * HEADER_BYTES
        field, kept, advice = (
            ("ParityGroupSize", f"shards and shares in groups of {len(plan.stripe)} nodes", "larger groups")
            if plan.stripe
            else ("Copies", f"{len(plan.copy_nodes)} copies", "fewer copies")
        )
        return (
            f"Protection.{field}: {self.slot_count} slots · {kept} · {every:,} bytes of shards per node{besides} "
            f"need {max(needed, error.needed_bytes):,} bytes of host memory per node; {error.available_bytes:,} "
            f"are available. Use {advice}, more nodes, or an instance type with more memory."
        )

    async def _grant(self, shard: OwnedShard) -> None:
        async with self._granting[shard.rank]:
            step = shard.core.proposed
            layout = self._layouts.get(shard.rank)
            if shard.rank in self._unmet:
                return
            if layout is None:
                late = ", ".join(shard.late_holders)
                if refused := self._refused.get(shard.rank):
                    shard.refuse(UnkeptCause.MEMORY, refused)
                else:
                    shard.refuse(UnkeptCause.NO_SLOT, f"{late} has not created its slots yet" if late else NO_LAYOUT)
                return
            if not shard.needs_slot():
                return
            if self._sealing.get(shard.rank) == step:
                # The coordinator has proposed a step again that the rank has already captured. It needs no other slot.
                return
            self._settle(shard)
            before = self._files(shard)
            try:
                index = await self.store.grant(
                    shard.rank,
                    shard.content(step),
                    keep=self.keep(shard.rank),
                    capacity_bytes=layout[1],
                    layout_hash=layout[0],
                    slot_count=self.slot_count,
                )
                shard.accept()
                if index is None:
                    words = "no slot is free: one slot is being uploaded or exported, another holds the committed step"
                    shard.refuse(UnkeptCause.NO_SLOT, words)
            except NoRoom as error:
                index = None
                shard.refuse(UnkeptCause.MEMORY, str(error))
            shard.forget_lost()
            if index is None or shard.core.proposed != step:
                return
            if self._files(shard) != before:  # The slot has a new file, which the rank must map.
                self.send(
                    shard.rank, SlotsGranted(layout_hash=layout[0], capacity_bytes=layout[1], paths=self._paths(shard))
                )
            shard.grant(index)
            if shard.may_wait():
                self.send(shard.rank, PageChanged())

    def _settle(self, shard: OwnedShard) -> None:
        """Empty the slots in the state WRITING that an earlier agent process left, unless the rank still copies."""
        if shard.page.rank().copying == NONE:
            self.store.settle_copiers(shard.rank)

    def _files(self, shard: OwnedShard) -> list[SlotFile]:
        return [slot.file for slot in self.store.shards.get(shard.rank, [])]

    def _paths(self, shard: OwnedShard) -> tuple[str, ...]:
        return tuple(file.name for file in self._files(shard))

    def capturing(self, shard: OwnedShard, capturing: Capturing) -> None:
        """Digest the chunks that the rank has already written to the slot, and announce them to the holders."""
        slot = self._slot_of(shard, capturing)
        if slot is not None and 0 <= capturing.final_bytes <= capturing.payload_bytes:
            self._follow(shard, slot, capturing).grow(capturing.final_bytes)
            shard.capture(capturing.step)

    def captured(self, shard: OwnedShard, captured: Captured) -> None:
        """Seal a captured step, even if it is not proposed now: it may be again, but the rank captures it once."""
        slot = self._slot_of(shard, captured)
        if slot is None:
            # The agent has granted the slot for another step since the rank sent this message.
            self.store.settle_copiers(shard.rank)
            return
        slot.is_busy = False
        if _is_of_another_file(captured, slot):
            log.warning(
                "rank %d: step %d is not in slot %d, because the slot's file was replaced during the capture",
                shard.rank,
                captured.step,
                captured.slot,
            )
            self.store.give_up(shard.rank, shard.content(captured.step))
            shard.abandon(captured.step, UnkeptCause.LAYOUT, "the slot's file was replaced during the capture")
            return
        digests = self._follow(shard, slot, captured)
        if not digests.is_sealed:  # A repeated `Captured` may find the slot sealed.
            self._sealing[shard.rank] = captured.step
            if _may_stand(captured.chunk_digests, digests):
                digests.add(captured.chunk_digests)
            digests.complete()
            self.on_snapshot(captured.seconds)

    def abandoned(self, shard: OwnedShard, abandoned: Abandoned) -> None:
        """Free the slot of a step that the rank does not capture, and vote ABANDON for this step."""
        self.store.settle_copiers(shard.rank)
        self.store.give_up(shard.rank, shard.content(abandoned.step))
        cause, reason = abandoned.known_cause, abandoned.reason
        # LATE makes the coordinator propose steps earlier, which would not help if the agent had no slot for the step.
        if shard.refusal:
            cause, reason = shard.refusal_cause, shard.refusal
        elif self._unprepared.get(shard.rank) == abandoned.step:
            cause, reason = UnkeptCause.NO_SLOT, NO_LAYOUT
        shard.abandon(abandoned.step, cause, reason)

    def _slot_of(self, shard: OwnedShard, message: Capturing | Captured) -> Slot | None:
        """Return the slot that the rank's message names, or None if the rank may not write to it."""
        slots = self.store.shards.get(shard.rank, [])
        # A restarted agent may have marked the rank's granted slot as empty, but the rank may still write to it.
        is_granted = (message.step, message.slot) == (
            shard.core.proposed,
            shard.granted_slot,
        )
        is_written = message.slot == being_written([slot.view for slot in slots], shard.content(message.step))
        if message.slot < 0 or not (is_granted or is_written):
            return None
        capacity = slots[message.slot].file.header.capacity_bytes
        if not (
            0 < message.payload_bytes <= capacity
            and 0 <= message.index_offset <= message.payload_bytes - message.index_bytes <= message.payload_bytes
        ):
            shard.abandon(
                message.step,
                UnkeptCause.LAYOUT,
                f"the captured state of {message.payload_bytes} bytes does not fit into its slot of {capacity} bytes",
            )
            return None
        return slots[message.slot]

    def _follow(self, shard: OwnedShard, slot: Slot, message: Capturing | Captured) -> ChunkDigests:
        content = shard.content(message.step)
        header = SlotHeader(
            job=self.store.job,
            run=self.plan.run,
            owner_rank=shard.rank,
            origin_generation=content.origin,
            step=content.step,
            state=SlotState.WRITING,
            capacity_bytes=slot.file.header.capacity_bytes,
            payload_bytes=message.payload_bytes,
            index_offset=message.index_offset,
            index_bytes=message.index_bytes,
            layout_hash=message.layout_hash,
        )
        digests, has_begun = self.store.follow(slot, header)
        if has_begun:
            self.background.begin(self._seal(shard, message.step, slot, digests))
        return digests

    async def _seal(self, shard: OwnedShard, step: Step, slot: Slot, digests: ChunkDigests) -> None:
        try:
            if await self.store.seal_followed(slot, digests) is None:
                return
            shard.seal(step)
        finally:
            if self._sealing.get(shard.rank) == step:
                del self._sealing[shard.rank]
        # The vote does not wait for this digest.
        if (state := await self.store.state_digest(slot)) is not None:
            shard.note_state(step, state, most=state_count(len(self.plan.ranks)))


def _is_of_another_file(captured: Captured, slot: Slot) -> bool:
    """Return whether the rank has written its capture into the previous file of this slot."""
    count = chunk_count(captured.payload_bytes)
    if not captured.chunk_digests or len(captured.chunk_digests) != DIGEST_BYTES * count:
        return False
    # The last chunk contains the payload's index.
    with slot.file.payload(*chunk_range(count - 1, captured.payload_bytes)) as chunk:
        return digest(chunk) != chunk_digest(captured.chunk_digests, count - 1)


def _may_stand(chunk_digests: bytes, digests: ChunkDigests) -> bool:
    """Return whether the rank's chunk digests cover all chunks and the agent has computed none itself."""
    # Holders detect wrong digests on arrival, and this node before a restore.
    return len(chunk_digests) == DIGEST_BYTES * digests.chunk_count and not digests.due_count
