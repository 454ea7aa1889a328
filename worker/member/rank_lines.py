"""Handles the messages between the ranks of one generation and the agent of their node.

A rank requests slots and reports captured or abandoned steps. The agent writes the coordinator's announcements to the
rank's page.

Invariant: a rank is granted a slot only for the proposed step. Its reports about any other step have no effect.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from everstep.protocol.agent_messages import MetricPoint, NodeFault
from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, Rank, RunId, Step
from everstep.protocol.plan import GenerationPlan
from everstep.protocol.rank_messages import (
    LATE_REASON,
    Abandoned,
    Boundary,
    Captured,
    Capturing,
    IdleSpans,
    Logged,
    RankFault,
    RankHello,
    SlotsGranted,
    SlotsRefused,
    SlotsRequest,
    Standing,
    Welcome,
    WordChanged,
)
from everstep.protocol.rounds import Announcement
from everstep.protocol.slot import DIGEST_BYTES, HEADER_BYTES, SlotHeader, SlotState, chunk_count, chunk_range, digest
from worker.core.metric_outbox import MetricOutbox
from worker.core.own_metrics import NodeUsage, OwnMetrics
from worker.core.rounds import NONE
from worker.core.slots import Content, being_written, slot_bytes_per_node
from worker.core.transfers import chunk_digest
from worker.errors import NoRoom
from worker.member.traffic import Traffic
from worker.ranks.server import RankLine
from worker.shards.owned_shard import OwnedShard
from worker.shm.chunk_digests import ChunkDigests
from worker.shm.slot_file import SlotFile
from worker.shm.store import Slot, SlotStore
from worker.tasks import end

log = logging.getLogger(__name__)
FIRST_STEPS = 2
"""Number of boundaries after a launch that are reported to the control plane immediately.

Later boundaries wait for the next regular report.
"""
NO_LAYOUT = "the rank's slots are not ready yet"


class RankLines:
    """Connects the ranks of one generation with their agent. Implements `RankEvents`; the node's `Member` owns it."""

    def __init__(
        self,
        plan: GenerationPlan,
        shards: Mapping[Rank, OwnedShard],
        store: SlotStore,
        *,
        keep: Callable[[Rank], Collection[Content]],
        on_change: Callable[[], None],
        on_round_change: Callable[[], None],
        traffic: Traffic,
        outbox: MetricOutbox,
        slot_count: int,
        now: Callable[[], float],
        usage: Callable[[], NodeUsage],
        sent_bytes: Callable[[], int],
        on_snapshot: Callable[[float], None],
    ) -> None:
        """Create the object before any rank has connected.

        Args:
            plan: plan of the running generation; never changes.
            shards: shards of this node's ranks.
            store: this node's slots.
            keep: returns the contents of a shard that must not be overwritten.
            on_change: called after a change that is reported to the control plane immediately.
            on_round_change: called after a change that is reported to the coordinator.
            traffic: receives boundaries, snapshots and idle spans.
            outbox: receives the values that rank 0 logs, and the measurements of its node.
            slot_count: maximum number of slots per shard on this node.
            now: returns Unix time in seconds.
            usage: returns the use of the node's devices.
            sent_bytes: returns the bytes sent to holders of this node's shards so far.
            on_snapshot: called for every snapshot with the seconds from its boundary to the end of its capture.
        """
        self.faults: dict[str, NodeFault] = {}
        self.measured: dict[str, float] = {}
        """The newest measurements of iterations on this node, by name (`worker.core.own_metrics`)."""
        self._plan = plan
        self._shards = shards
        self._store = store
        self._keep = keep
        self._on_change = on_change
        self._on_round_change = on_round_change
        self._traffic = traffic
        self._outbox = outbox
        self._slot_count = slot_count
        self._now = now
        self._usage = usage
        self._sent_bytes = sent_bytes
        self._on_snapshot = on_snapshot
        self._own_metrics = OwnMetrics()
        self._passed: tuple[Step, float] = (NONE, 0.0)
        """The newest captured boundary of this node's first rank, and the time at which that rank passed it."""
        self._lines: dict[Rank, RankLine] = {}
        self._waiting: dict[Rank, RankLine] = {}
        """Ranks that connected before every node had verified its shards.

        The agent sends these ranks only messages about the progress of their base.
        """
        self._early: dict[Rank, SlotsRequest] = {}
        """Slot requests of the ranks in `_waiting`.

        These slots are created after the load, because the load needs memory for its own slots first.
        """
        self._is_loaded = False
        # A rank that returns from `init` early waits for the other ranks in a collective with a time limit. Loads from
        # memory take seconds, loads from S3 take minutes.
        self._is_followed = bool(plan.base_step) and all(
            rank.sources and rank.sources[0].kind != "s3" for rank in plan.ranks
        )
        """True if ranks may copy the verified prefix of the base before the whole base has arrived."""
        self._layouts: dict[Rank, tuple[bytes, int]] = {}
        """Layout hash and capacity that each rank requested."""
        self._asked: dict[Rank, int] = {}
        """Slot capacity of each rank in bytes.

        This is the capacity that the rank requested, or the last granted capacity if a larger request was refused. The
        capacities of ranks differ if their shards differ in size.
        """
        self._refused: dict[Rank, str] = {}
        """Reason why a rank's last slot request was refused permanently."""
        self._unmet: dict[Rank, SlotsRequest] = {}
        """Slot requests for which this node has no room at the moment."""
        self._sealing: dict[Rank, Step] = {}
        """Captured steps whose slots are being digested."""
        self._unprepared: dict[Rank, Step] = {}
        """The last step that was proposed before the rank's slots were ready.

        The first steps of every launch are proposed before the slots are ready.
        """
        self._tasks: set[asyncio.Task[None]] = set()
        self._granting: defaultdict[Rank, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def run(self) -> RunId:
        """The run of these ranks."""
        return self._plan.run

    @property
    def generation(self) -> Generation:
        """The generation of these ranks."""
        return self._plan.generation

    @property
    def is_idle(self) -> bool:
        """True if no slot is being created, granted or digested."""
        return not self._tasks and not self._sealing

    async def idle(self) -> None:
        """Wait until the work that messages and announcements started has ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """End every task and connection of the ranks."""
        await end(*self._tasks)
        for line in (*self._lines.values(), *self._waiting.values()):
            line.close()

    # -- messages of ranks

    def hello(self, hello: RankHello, line: RankLine) -> bool:
        """Accept the connection of a rank of this generation, and refuse other connections (see `RankEvents`)."""
        shard = self._shards.get(hello.rank)
        if shard is None or (hello.run, hello.generation) != (self.run, self.generation):
            return False
        if self._is_loaded:
            self._welcome(shard, line)
        else:
            self._waiting[hello.rank] = line
            if self._is_followed and shard.arriving is not None:
                line.send(shard.arriving)
        return True

    def arrived(self, rank: Rank, file: SlotFile, header: SlotHeader, verified_bytes: int) -> None:
        """Record progress of a rank's base (see `OwnedShard.arrive`), and inform the rank."""
        shard = self._shards[rank]
        was_told = shard.arriving is not None
        shard.arrive(file, header, verified_bytes)
        line = self._waiting.get(rank)
        if line is not None and self._is_followed and shard.arriving is not None:
            line.send(WordChanged() if was_told else shard.arriving)

    def welcome_all(self) -> None:
        """Start the training of all ranks, because every node has verified its shards.

        Ranks that connected earlier are waiting for this message.
        """
        self._is_loaded = True
        for rank, line in self._waiting.items():
            self._welcome(self._shards[rank], line)
        self._waiting.clear()
        for rank, request in self._early.items():
            self._begin(self._reserve(self._shards[rank], request))
        self._early.clear()

    def _welcome(self, shard: OwnedShard, line: RankLine) -> None:
        self._lines[shard.rank] = line
        base = shard.slot(self._plan.base_step) if self._plan.base_step else None
        line.send(
            Welcome(
                generation=self.generation,
                word_path=self._store.open_to_rank(shard.page.path),
                base_step=self._plan.base_step,
                base_slot_path=self._store.open_to_rank(base.file.path) if base is not None else None,
            )
        )

    def lost(self, rank: Rank, line: RankLine) -> None:
        """Record that a rank's connection has ended (see `RankEvents`)."""
        for lines in (self._lines, self._waiting):
            if lines.get(rank) is line:
                del lines[rank]

    def message(self, rank: Rank, message: Message) -> None:
        """Handle one message of a rank, such as a boundary or a captured step (see `RankEvents`)."""
        shard = self._shards[rank]
        if getattr(message, "generation", self.generation) != self.generation:
            return
        match message:
            case SlotsRequest() if not self._is_loaded:
                self._early[rank] = message
            case SlotsRequest():
                self._begin(self._reserve(shard, message))
            case Capturing():
                self._capturing(shard, message)
            case Captured():
                self._traffic.captured(rank)
                self._captured(shard, message)
            case Abandoned():
                self._store.settle_copiers(rank)
                self._store.give_up(rank, shard.content(message.step))
                refusal = shard.refusal or (NO_LAYOUT if self._unprepared.get(rank) == message.step else "")
                # With a refusal, an earlier proposal would not have helped, so the step does not count as late.
                late = message.reason.startswith(LATE_REASON) and not refusal
                shard.abandon(message.step, refusal or message.reason, late=late)
            case Boundary():
                if message.at_seconds:
                    shard.note_passed(message.boundary, message.at_seconds)
                self._on_round_change()
                half = shard.page.rank()
                # The rank was between boundaries when the present step was proposed.
                if half.standing is not Standing.MOVING:
                    self.grant_if_due(shard)
                if message.boundary <= self._plan.base_step + FIRST_STEPS:
                    self._on_change()  # users wait for the first steps of a launch
                seconds = self._traffic.boundary(rank, message, half, is_sending=shard.is_under_way)
                if rank == min(self._shards):  # The first rank represents all ranks of the node.
                    self._measure(shard, message, seconds)
            case IdleSpans():
                self._traffic.spans(rank, message)
            case Logged() if rank == 0:
                points = [
                    MetricPoint(
                        generation=self.generation, step=each.step, values=each.values, at_seconds=each.at_seconds
                    )
                    for each in message.records
                ]
                self._outbox.add(self.run, points, message.dropped_count)
            case Logged():
                pass  # only rank 0's values are stored
            case RankFault():
                self.fault(
                    message.code, f"rank {rank}: {message.message}", is_permanent=message.code == "cannot_resume"
                )
            case _:
                log.warning("rank %d sends %s", rank, type(message).__name__)

    def _measure(self, shard: OwnedShard, message: Boundary, seconds: float | None) -> None:
        """Record the measurements of an iteration. `seconds` is the iteration's duration; None if it is unknown."""
        (step, acked_at), (passed, passed_at) = shard.acked, self._passed
        if step == passed != NONE:
            self._own_metrics = self._own_metrics.replicated(acked_at - passed_at)
            self._passed = NONE, 0.0
        if message.boundary == shard.proposed and message.at_seconds:
            self._passed = message.boundary, message.at_seconds
        if seconds is None:
            return
        self._own_metrics = self._own_metrics.iteration(seconds, message.blocked_seconds)
        values, self._own_metrics = self._own_metrics.due(message.at_seconds, self._sent_bytes(), self._usage())
        if not values:
            return
        self.measured = values
        # Only rank 0's node queues values until they are stored. The control plane adds the values of the other nodes.
        if shard.rank == 0:
            point = MetricPoint(
                generation=self.generation, step=message.boundary, values=values, at_seconds=self._now()
            )
            self._outbox.add(self.run, [point])

    def fault(self, code: str, message: str, *, is_permanent: bool, subject: str | None = None) -> None:
        """Report a typed fault to the control plane.

        Args:
            code: type of the fault, part of the protocol.
            message: a sentence for the user.
            is_permanent: True if a retry gives the same result.
            subject: the object with the fault. Only the newest fault per code and subject is reported, until `mended`
                withdraws it. Without a subject, the fault stays reported.
        """
        self.faults[f"{code} {message if subject is None else subject}"] = NodeFault(
            code=code, message=message, is_permanent=is_permanent
        )
        self._on_change()

    def mended(self, code: str, subject: str) -> None:
        """Withdraw the fault with this code and subject, if there is one."""
        if self.faults.pop(f"{code} {subject}", None) is not None:
            self._on_change()

    def _begin(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # The exception is a bug, which the event loop's exception hook reports.
            raise task.exception()  # type: ignore[misc]

    # -- slots

    async def _reserve(self, shard: OwnedShard, request: SlotsRequest) -> None:
        self._layouts.pop(shard.rank, None)
        self._unmet.pop(shard.rank, None)
        self._refused.pop(shard.rank, None)
        if shard.granted_slot < 0:
            self._settle(shard)
        copies = len(self._plan.ranks[shard.rank].holders)
        self._asked[shard.rank] = request.capacity_bytes
        shards = [capacity + HEADER_BYTES for capacity in self._asked.values()]
        needed = slot_bytes_per_node(copies=copies, shard_bytes=shards, slot_count=self._slot_count)
        try:
            if needed > self._store.memory_bytes:
                raise NoRoom(needed_bytes=needed, available_bytes=self._store.memory_bytes)
            await self._store.reserve(
                shard.rank,
                capacity_bytes=request.capacity_bytes,
                layout_hash=request.layout_hash,
                slot_count=self._slot_count,
            )
        except NoRoom as error:
            if error.is_passing:  # The request is repeated with every proposed step, and training continues.
                shard.refusal = f"Protection waits for memory on its node: {error}"
                self._unmet[shard.rank] = request
                return
            if shard.reserved is None:
                self._asked.pop(shard.rank, None)
            else:
                self._asked[shard.rank] = shard.reserved[0]
            figures = self._figures(copies, shards, request, error)
            self._refused[shard.rank] = shard.refusal = figures
            self._send(shard, SlotsRefused(layout_hash=request.layout_hash, reason=figures))
            if shard.foundation == NONE:  # A job that already has a protected state continues with it.
                self.fault("protection_does_not_fit", figures, is_permanent=True)
            return
        shard.refusal = ""
        shard.reserve(request.capacity_bytes, request.layout_hash)
        self._send(
            shard,
            SlotsGranted(
                layout_hash=request.layout_hash, capacity_bytes=request.capacity_bytes, paths=self._paths(shard)
            ),
        )
        if not await shard.holders_ready():
            return  # A later request of the rank has replaced this request.
        self._layouts[shard.rank] = (request.layout_hash, request.capacity_bytes)
        if shard.granted_slot < 0:
            await self._grant(shard)

    def _figures(self, copies: int, shards: Sequence[int], request: SlotsRequest, error: NoRoom) -> str:
        """Return the fault message with the sizes of the required and the available memory.

        A rank that has not requested slots yet counts with the size of the refused request.
        """
        every = sum(shards) + (len(self._shards) - len(shards)) * (request.capacity_bytes + HEADER_BYTES)
        needed = slot_bytes_per_node(copies=copies, shard_bytes=[every], slot_count=self._slot_count)
        besides = ", with what else it holds," if needed < error.needed_bytes else ""
        return (
            f"Protection.Copies: {self._slot_count} slots · {copies} copies · {every:,} bytes of shards per "
            f"node{besides} "
            f"need {max(needed, error.needed_bytes):,} bytes of host memory per node; {error.available_bytes:,} "
            "are there. "
            "Use fewer copies, more nodes, or an instance type with more memory."
        )

    async def _grant(self, shard: OwnedShard) -> None:
        """Prepare a slot for the proposed step, unless the rank has passed the step or its slots are not ready."""
        async with self._granting[shard.rank]:
            step = shard.proposed
            layout = self._layouts.get(shard.rank)
            if shard.rank in self._unmet:
                return
            if layout is None:
                late = ", ".join(shard.late_holders)
                shard.refusal = self._refused.get(shard.rank) or (f"{late} makes slots for it" if late else NO_LAYOUT)
                return
            if not shard.needs_slot():
                return
            if self._sealing.get(shard.rank) == step:
                return  # The rank has already captured the step for the first proposal.
            self._settle(shard)
            before = self._files(shard)
            try:
                index = await self._store.grant(
                    shard.rank,
                    shard.content(step),
                    keep=self._keep(shard.rank),
                    capacity_bytes=layout[1],
                    layout_hash=layout[0],
                    slot_count=self._slot_count,
                )
                shard.refusal = (
                    ""
                    if index is not None
                    else "no slot is free: one is being uploaded, the other holds the committed step"
                )
            except NoRoom as error:
                index, shard.refusal = None, str(error)
            shard.forget_lost()
            if index is None or shard.proposed != step:
                return
            if self._files(shard) != before:  # The file was replaced, so the rank must map it again.
                self._send(
                    shard, SlotsGranted(layout_hash=layout[0], capacity_bytes=layout[1], paths=self._paths(shard))
                )
            shard.grant(index)
            if shard.may_wait():
                self._send(shard, WordChanged())

    def _settle(self, shard: OwnedShard) -> None:
        """Release slots that were being written when the agent restarted, once the rank's copier is idle."""
        if shard.page.rank().copying == NONE:
            self._store.settle_copiers(shard.rank)

    def _files(self, shard: OwnedShard) -> list[SlotFile]:
        return [slot.file for slot in self._store.shards.get(shard.rank, [])]

    def _paths(self, shard: OwnedShard) -> tuple[str, ...]:
        return tuple(self._store.open_to_rank(file.path) for file in self._files(shard))

    def _capturing(self, shard: OwnedShard, capturing: Capturing) -> None:
        """Digest the part of a capture that is final, and offer this part to the holders."""
        slot = self._slot_of(shard, capturing)
        if slot is not None and 0 <= capturing.final_bytes <= capturing.payload_bytes:
            self._follow(shard, slot, capturing).grow(capturing.final_bytes)
            shard.capture(capturing.step)

    def _captured(self, shard: OwnedShard, captured: Captured) -> None:
        """Seal a captured step, even if it is not proposed at the moment.

        The step may be proposed again, but the rank captures each step only once.
        """
        slot = self._slot_of(shard, captured)
        if slot is None:
            self._store.settle_copiers(shard.rank)  # The slot was granted again meanwhile.
            return
        slot.is_busy = False
        if _is_of_another_file(captured, slot):
            log.warning(
                "rank %d: step %d is not what lies in slot %d: that was made anew since",
                shard.rank,
                captured.step,
                captured.slot,
            )
            self._store.give_up(shard.rank, shard.content(captured.step))
            shard.abandon(captured.step, "the rank wrote into a slot that was made anew since")
            return
        digests = self._follow(shard, slot, captured)
        if not digests.is_sealed:  # A sealed slot means that the message is a duplicate.
            self._sealing[shard.rank] = captured.step
            if _may_stand(captured.chunk_digests, digests):
                digests.add(captured.chunk_digests)
            digests.complete()
            self._on_snapshot(captured.seconds)

    def _slot_of(self, shard: OwnedShard, said: Capturing | Captured) -> Slot | None:
        """Return the slot that the rank's message names, if the rank is allowed to write it."""
        slots = self._store.shards.get(shard.rank, [])
        # The rank may write the slot even if a restarted agent has marked it as empty.
        is_granted = (said.step, said.slot) == (
            shard.proposed,
            shard.granted_slot,
        )
        is_written = said.slot == being_written([slot.view for slot in slots], shard.content(said.step))
        if said.slot < 0 or not (is_granted or is_written):
            return None
        capacity = slots[said.slot].file.header.capacity_bytes
        if not (
            0 < said.payload_bytes <= capacity
            and 0 <= said.index_offset <= said.payload_bytes - said.index_bytes <= said.payload_bytes
        ):
            shard.abandon(said.step, f"a payload of {said.payload_bytes} bytes in {capacity}")
            return None
        return slots[said.slot]

    def _follow(self, shard: OwnedShard, slot: Slot, said: Capturing | Captured) -> ChunkDigests:
        content = shard.content(said.step)
        header = SlotHeader(
            job=self._store.job,
            run=self.run,
            owner_rank=shard.rank,
            origin_generation=content.origin,
            step=content.step,
            state=SlotState.WRITING,
            capacity_bytes=slot.file.header.capacity_bytes,
            payload_bytes=said.payload_bytes,
            index_offset=said.index_offset,
            index_bytes=said.index_bytes,
            layout_hash=said.layout_hash,
        )
        digests, has_begun = self._store.follow(slot, header)
        if has_begun:
            self._begin(self._seal(shard, said.step, slot, digests))
        return digests

    async def _seal(self, shard: OwnedShard, step: Step, slot: Slot, digests: ChunkDigests) -> None:
        try:
            if await self._store.seal_followed(slot, digests) is not None:
                shard.seal(step)
        finally:
            if self._sealing.get(shard.rank) == step:
                del self._sealing[shard.rank]

    # -- announcements of the coordinator

    def hear(self, announcement: Announcement) -> None:
        """Apply an announcement to the shards and their ranks' pages."""
        self._traffic.hear(announcement.pacing)
        for shard in self._shards.values():
            if shard.hear(announcement):
                self._send(shard, WordChanged())
            self.grant_if_due(shard)
        self._on_round_change()

    def grant_if_due(self, shard: OwnedShard) -> None:
        """Grant a slot for the proposed step, if the rank has none yet.

        Called for each announcement, and when a pinned slot becomes free.
        """
        if shard.proposed in (NONE, self._plan.base_step) or shard.granted_slot >= 0:
            return
        if shard.rank not in self._layouts:  # Slots are missing or being created; the grant waits.
            self._unprepared[shard.rank] = shard.proposed
        unmet = self._unmet.pop(shard.rank, None)
        self._begin(self._grant(shard) if unmet is None else self._reserve(shard, unmet))

    def _send(self, shard: OwnedShard, message: Message) -> None:
        line = self._lines.get(shard.rank)
        if line is not None:
            line.send(message)


def _is_of_another_file(captured: Captured, slot: Slot) -> bool:
    """Return whether a rank's digests show that it wrote into another file than the slot's present file.

    The check compares the last chunk, which contains the index.
    """
    count = chunk_count(captured.payload_bytes)
    if not captured.chunk_digests or len(captured.chunk_digests) != DIGEST_BYTES * count:
        return False
    with slot.file.payload(*chunk_range(count - 1, captured.payload_bytes)) as chunk:
        return digest(chunk) != chunk_digest(captured.chunk_digests, count - 1)


def _may_stand(chunk_digests: bytes, digests: ChunkDigests) -> bool:
    """Return whether the rank's chunk digests can replace digests of the agent.

    The rank's digests must cover all chunks, and the agent must have digested no chunk yet. An error in the rank's
    digests is detected later: every holder verifies each chunk on arrival, and this node verifies all chunks before a
    restore.
    """
    return len(chunk_digests) == DIGEST_BYTES * digests.chunk_count and not digests.due_count
