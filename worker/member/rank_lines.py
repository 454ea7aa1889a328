"""What ranks and their shards say to each other through the agent, in one generation on one node.

A rank asks for slots, says what it captured or gave up; the coordinator's announcements come down to its page.
Invariant: a rank is granted a slot for the proposed step only, and nothing that it reports of any other step has an
effect.
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
    StopState,
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
"""So many boundaries of a launch are told to the control plane at once; later ones when it hears of this node anyway."""
NO_LAYOUT = "the rank's slots are not ready yet"


class RankLines:
    """`RankEvents` of one generation. One owner: the node's `Member`."""

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
        """Begin.

        Args:
            plan: the generation's.
            shards: of this node's ranks.
            store: this node's slots.
            keep: what must survive of a shard now.
            on_change: something that the control plane should hear has changed.
            on_round_change: something that the coordinator should hear has changed.
            traffic: is told of boundaries, snapshots and idle spans.
            outbox: takes what rank 0 logs, and what is measured on its node.
            slot_count: slots per shard.
            now: Unix time.
            usage: of the node's devices.
            sent_bytes: to holders of this node's shards so far.
            on_snapshot: told of every snapshot, and how many seconds after its boundary it was captured.
        """
        self.faults: dict[str, NodeFault] = {}
        self.measured: dict[str, float] = {}
        """What was measured last of iterations on this node, by name (`worker.core.own_metrics`)."""
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
        """The newest boundary of this node's first rank that is captured, and when it was passed."""
        self._lines: dict[Rank, RankLine] = {}
        self._waiting: dict[Rank, RankLine] = {}
        """Ranks that have come before every node had verified its shards; they hear of what arrives, and of nothing else yet."""
        self._early: dict[Rank, SlotsRequest] = {}
        """What those have asked for: slots are made when what is being loaded has its own."""
        self._is_loaded = False
        # A rank that comes from `init` long before the others meets them in a collective, which has a time limit:
        # memory takes seconds, S3 minutes.
        self._is_followed = bool(plan.base_step) and all(
            rank.sources and rank.sources[0].kind != "s3" for rank in plan.ranks
        )
        """Ranks may copy what has arrived before all of it has."""
        self._layouts: dict[Rank, tuple[bytes, int]] = {}
        """Layout hash and capacity that each rank asked for."""
        self._asked: dict[Rank, int] = {}
        """Capacity that each rank has asked for, or has slots of where it was refused more; shards need not be of one size."""
        self._refused: dict[Rank, str] = {}
        """Why a rank has no slots of what it asked for last, and will have none."""
        self._unmet: dict[Rank, SlotsRequest] = {}
        """What ranks asked for that this node has no room for just now."""
        self._sealing: dict[Rank, Step] = {}
        """Steps whose slots are being digested."""
        self._unprepared: dict[Rank, Step] = {}
        """The last step that was proposed before the rank's slots were there: the first ones of every launch."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._granting: defaultdict[Rank, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def run(self) -> RunId:
        """The run whose ranks these are."""
        return self._plan.run

    @property
    def generation(self) -> Generation:
        """The generation whose ranks these are."""
        return self._plan.generation

    async def close(self) -> None:
        """End everything that was begun for a rank."""
        await end(*self._tasks)
        for line in (*self._lines.values(), *self._waiting.values()):
            line.close()

    # -- from the ranks

    def hello(self, hello: RankHello, line: RankLine) -> bool:
        """Welcome a rank of this generation (see `RankEvents`)."""
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
        """More of a rank's base is there, its index among it (see `OwnedShard.arrive`): tell the rank."""
        shard = self._shards[rank]
        was_told = shard.arriving is not None
        shard.arrive(file, header, verified_bytes)
        line = self._waiting.get(rank)
        if line is not None and self._is_followed and shard.arriving is not None:
            line.send(WordChanged() if was_told else shard.arriving)

    def welcome_all(self) -> None:
        """Let ranks train: every node has verified what the plan names.

        Those that have come so far wait for this word.
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
        """A rank's line has ended (see `RankEvents`)."""
        for lines in (self._lines, self._waiting):
            if lines.get(rank) is line:
                del lines[rank]

    def message(self, rank: Rank, message: Message) -> None:
        """Take what a rank says (see `RankEvents`)."""
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
                late = message.reason.startswith(LATE_REASON) and not refusal  # more notice would not have helped
                shard.apply(shard.core.abandon(message.step, refusal or message.reason, late=late))
            case Boundary():
                if message.at_seconds:
                    shard.note_passed(message.boundary, message.at_seconds)
                self._on_round_change()
                half = shard.page.rank()
                if half.standing is not Standing.MOVING:  # it did when the step was proposed at which it stands now
                    self.grant_if_due(shard)
                if message.boundary <= self._plan.base_step + FIRST_STEPS:
                    self._on_change()  # that is what everybody waits for after a launch
                seconds = self._traffic.boundary(rank, message, half, is_sending=shard.core.is_under_way)
                if rank == min(self._shards):  # it speaks for the node
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
                pass  # rank 0 speaks for all
            case RankFault():
                self.fault(
                    message.code, f"rank {rank}: {message.message}", is_permanent=message.code == "cannot_resume"
                )
            case _:
                log.warning("rank %d sends %s", rank, type(message).__name__)

    def _measure(self, shard: OwnedShard, message: Boundary, seconds: float | None) -> None:
        """Note what an iteration tells of saving; `seconds`: how long it took, None where that is not known."""
        (step, acked_at), (passed, passed_at) = shard.acked, self._passed
        if step == passed != NONE:
            self._own_metrics = self._own_metrics.replicated(acked_at - passed_at)
            self._passed = NONE, 0.0
        if message.boundary == shard.core.proposed and message.at_seconds:
            self._passed = message.boundary, message.at_seconds
        if seconds is None:
            return
        self._own_metrics = self._own_metrics.iteration(seconds, message.blocked_seconds)
        values, self._own_metrics = self._own_metrics.due(message.at_seconds, self._sent_bytes(), self._usage())
        if not values:
            return
        self.measured = values
        if (
            shard.rank == 0
        ):  # whose values are kept until they are stored: those of the others are worth something beside them alone
            point = MetricPoint(
                generation=self.generation, step=message.boundary, values=values, at_seconds=self._now()
            )
            self._outbox.add(self.run, [point])

    def fault(self, code: str, message: str, *, is_permanent: bool, subject: str | None = None) -> None:
        """Tell the control plane of a typed fault.

        Args:
            code: its type.
            message: a sentence for the user.
            is_permanent: trying again gives the same.
            subject: what has it; the newest of a code and a subject is told alone, until it is `mended`. None: it is
                told for good.
        """
        self.faults[f"{code} {message if subject is None else subject}"] = NodeFault(
            code=code, message=message, is_permanent=is_permanent
        )
        self._on_change()

    def mended(self, code: str, subject: str) -> None:
        """A subject has this fault no more; nothing where it had none."""
        if self.faults.pop(f"{code} {subject}", None) is not None:
            self._on_change()

    def _begin(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            raise task.exception()  # type: ignore[misc]  # a bug: the loop's exception hook reports it

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
            if error.is_passing:  # asked for again with every step that is proposed; training goes on
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
            if (
                shard.core.foundation == NONE
            ):  # what is kept already of a state that has grown since is worth more than an end of the job
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
            return  # a later request waits for its own
        self._layouts[shard.rank] = (request.layout_hash, request.capacity_bytes)
        if shard.granted_slot < 0:
            await self._grant(shard)

    def _figures(self, copies: int, shards: Sequence[int], request: SlotsRequest, error: NoRoom) -> str:
        """Say what there is too little of; ranks that have not asked yet count as the one that is refused."""
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
        """Make a slot ready for the proposed step, unless the rank has passed it or its layout is not known yet."""
        async with self._granting[shard.rank]:
            step = shard.core.proposed
            layout = self._layouts.get(shard.rank)
            if shard.rank in self._unmet:
                return
            if layout is None:
                late = ", ".join(sorted(shard.unready & shard.core.view))
                shard.refusal = self._refused.get(shard.rank) or (f"{late} makes slots for it" if late else NO_LAYOUT)
                return
            if (
                step == NONE
                or step in shard.core.sealed
                or shard.granted_slot >= 0
                or not self._can_capture(shard, step)
            ):
                return
            if self._sealing.get(shard.rank) == step:
                return  # it was captured when it was proposed before
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
            for lost in [sealed for sealed in shard.core.sealed if shard.slot(sealed) is None]:
                shard.apply(shard.core.forget(lost))
            if index is None or shard.core.proposed != step:
                return
            if self._files(shard) != before:  # made anew under the same name: the rank must map it again
                self._send(
                    shard, SlotsGranted(layout_hash=layout[0], capacity_bytes=layout[1], paths=self._paths(shard))
                )
            shard.granted_slot = index
            shard.publish()
            self._wake(shard, shard.page.agent.stop_state)

    def _settle(self, shard: OwnedShard) -> None:
        """Let slots go that a restarted agent found being written, once nobody writes them any more."""
        if shard.page.rank().copying == NONE:
            self._store.settle_copiers(shard.rank)

    def _files(self, shard: OwnedShard) -> list[SlotFile]:
        return [slot.file for slot in self._store.shards.get(shard.rank, [])]

    def _paths(self, shard: OwnedShard) -> tuple[str, ...]:
        return tuple(self._store.open_to_rank(file.path) for file in self._files(shard))

    @staticmethod
    def _can_capture(shard: OwnedShard, step: Step) -> bool:
        half = shard.page.rank()
        return half.boundary < step or (half.boundary == step and half.standing is not Standing.MOVING)

    def _capturing(self, shard: OwnedShard, capturing: Capturing) -> None:
        """Digest what is final already, and let the holders have it."""
        slot = self._slot_of(shard, capturing)
        if slot is not None and 0 <= capturing.final_bytes <= capturing.payload_bytes:
            self._follow(shard, slot, capturing).grow(capturing.final_bytes)
            shard.apply(shard.core.capture(capturing.step))

    def _captured(self, shard: OwnedShard, captured: Captured) -> None:
        """Seal what was captured, also when the step is not proposed just now: it may be proposed again, and its rank captures it once."""
        slot = self._slot_of(shard, captured)
        if slot is None:
            self._store.settle_copiers(shard.rank)  # the slot was granted anew
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
            shard.apply(shard.core.abandon(captured.step, "the rank wrote into a slot that was made anew since"))
            return
        digests = self._follow(shard, slot, captured)
        if not digests.is_sealed:  # else it was said twice
            self._sealing[shard.rank] = captured.step
            if _may_stand(captured.chunk_digests, digests):
                digests.add(captured.chunk_digests)
            digests.complete()
            self._on_snapshot(captured.seconds)

    def _slot_of(self, shard: OwnedShard, said: Capturing | Captured) -> Slot | None:
        """Return the slot that the rank speaks of, if it is the one that it should write."""
        slots = self._store.shards.get(shard.rank, [])
        is_granted = (said.step, said.slot) == (
            shard.core.proposed,
            shard.granted_slot,
        )  # also where a restarted agent took it for void
        is_written = said.slot == being_written([slot.view for slot in slots], shard.content(said.step))
        if said.slot < 0 or not (is_granted or is_written):
            return None
        capacity = slots[said.slot].file.header.capacity_bytes
        if not (
            0 < said.payload_bytes <= capacity
            and 0 <= said.index_offset <= said.payload_bytes - said.index_bytes <= said.payload_bytes
        ):
            shard.apply(shard.core.abandon(said.step, f"a payload of {said.payload_bytes} bytes in {capacity}"))
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
                shard.apply(shard.core.seal(step))
        finally:
            if self._sealing.get(shard.rank) == step:
                del self._sealing[shard.rank]

    # -- from the coordinator

    def hear(self, announcement: Announcement) -> None:
        """Bring an announcement down to the shards and their ranks."""
        self._traffic.hear(announcement.pacing)
        for shard in self._shards.values():
            stop_before = shard.page.agent.stop_state
            shard.apply(shard.core.hear(announcement.committed, announcement.proposed))
            shard.publish(
                finished=announcement.finished, stop=announcement.stop_step, stop_state=announcement.stop_state
            )
            self._wake(shard, stop_before)
            self.grant_if_due(shard)
        self._on_round_change()

    def grant_if_due(self, shard: OwnedShard) -> None:
        """Grant a slot for the proposed step, if the rank has none yet.

        Called for each announcement, and when a pinned slot becomes free.
        """
        if shard.core.proposed in (NONE, self._plan.base_step) or shard.granted_slot >= 0:
            return
        if shard.rank not in self._layouts:  # also while they are being made: the grant waits for that
            self._unprepared[shard.rank] = shard.core.proposed
        unmet = self._unmet.pop(shard.rank, None)
        self._begin(self._grant(shard) if unmet is None else self._reserve(shard, unmet))

    def _wake(self, shard: OwnedShard, stop_before: StopState) -> None:
        """Have a rank look at its page that may be waiting for it; one that moves looks at every boundary, and a word takes time from its step."""
        may_wait = StopState.ANNOUNCED in (stop_before, shard.page.agent.stop_state)
        if may_wait or shard.page.rank().standing is not Standing.MOVING:
            self._send(shard, WordChanged())

    def _send(self, shard: OwnedShard, message: Message) -> None:
        line = self._lines.get(shard.rank)
        if line is not None:
            line.send(message)


def _is_of_another_file(captured: Captured, slot: Slot) -> bool:
    """Say whether a rank's digests show that it wrote into another file than lies here: the last chunk, where the index lies, has another one."""
    count = chunk_count(captured.payload_bytes)
    if not captured.chunk_digests or len(captured.chunk_digests) != DIGEST_BYTES * count:
        return False
    with slot.file.payload(*chunk_range(count - 1, captured.payload_bytes)) as chunk:
        return digest(chunk) != chunk_digest(captured.chunk_digests, count - 1)


def _may_stand(chunk_digests: bytes, digests: ChunkDigests) -> bool:
    """Say whether a rank's digests may stand for the agent's own: of all chunks, none of which is being digested here.

    Whether all of them hold is seen by every holder, chunk by chunk as they come, and by the own node before it
    restores.
    """
    return len(chunk_digests) == DIGEST_BYTES * digests.chunk_count and not digests.due_count
