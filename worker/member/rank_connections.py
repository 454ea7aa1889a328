"""Serves the connections of this node's ranks in one generation.

    rank ─▶ RankServer ─▶ RankConnections.message ─┬─▶ RankSlots      SlotsRequest, Capturing, Captured, Abandoned
                                             └─▶ OwnedShard     Boundary (measured by Traffic and Measurements)
    Announcement ─▶ RankConnections.apply_announcement ─▶ OwnedShard, then RankSlots

Invariant: a rank receives its `Welcome`, which starts its training, only after every node has verified its shards.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass

from everstep.protocol.agent_messages import MetricPoint
from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, Rank, RunId
from everstep.protocol.options import KeptOption, OptionsKept
from everstep.protocol.plan import GenerationPlan
from everstep.protocol.rank_messages import (
    PERMANENT_RANK_FAULTS,
    RANK_FAULTS,
    Abandoned,
    Boundary,
    Captured,
    Capturing,
    EarlierLayout,
    FetchedShard,
    FetchShard,
    IdleSpans,
    Logged,
    PageChanged,
    RankFault,
    RankHello,
    RankStanding,
    SlotsRequest,
    Welcome,
)
from everstep.protocol.rehearsals import Rehearsed
from everstep.protocol.rounds import Announcement
from everstep.protocol.slot import SlotHeader
from worker.core.metric_outbox import MetricOutbox
from worker.core.own_metrics import NodeUsage
from worker.core.rank_values import NewestValues
from worker.core.slots import Content
from worker.member.faults import ReportedFaults
from worker.member.measurements import Measurements
from worker.member.rank_slots import RankSlots
from worker.member.traffic import Traffic
from worker.ranks.server import RankLine
from worker.shards.owned_shard import OwnedShard
from worker.shm.slot_file import SlotFile
from worker.shm.store import SlotStore
from worker.tasks import Background

log = logging.getLogger(__name__)
FIRST_STEPS = 2
"""Number of steps after a start that the agent reports immediately, because users wait for them."""


FetchEarlier = Callable[[Rank, ReportedFaults], Awaitable[FetchedShard | None]]


@dataclass(eq=False, repr=False)
class RankConnections:
    """Connects the ranks of one generation with their agent. Implements `RankEvents`.

    Args:
        on_change: called after a change that the agent reports to the control plane immediately.
        on_round_change: called after a change that the agent reports to the coordinator.
        outbox: receives the values that rank 0 logs, and the measurements of its node.
        now: returns Unix time in seconds.
        on_snapshot: called for every snapshot with the seconds from the end of its step to the end of its capture.
        earlier_layout: returns the base's layout if another number of ranks captured it; otherwise None.
        fetch_earlier: loads a shard of such a launch; None if the number of ranks is unchanged.
        is_loading_earlier: returns whether a rank of this node still loads such shards.
    """

    plan: GenerationPlan
    shards: Mapping[Rank, OwnedShard]
    store: SlotStore
    _: KW_ONLY
    keep: Callable[[Rank], Collection[Content]]
    on_change: Callable[[], None]
    on_round_change: Callable[[], None]
    traffic: Traffic
    outbox: MetricOutbox
    slot_count: int
    now: Callable[[], float]
    usage: Callable[[], NodeUsage]
    sent_bytes: Callable[[], int]
    on_snapshot: Callable[[float], None]
    earlier_layout: Callable[[], EarlierLayout | None] = lambda: None
    fetch_earlier: FetchEarlier | None = None
    is_loading_earlier: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.faults = ReportedFaults(self.on_change)
        self.measurements = Measurements(
            self.plan.run, self.plan.generation, self.outbox, now=self.now, usage=self.usage, sent_bytes=self.sent_bytes
        )
        self.newest_values = NewestValues(self.plan.world_size)
        self.rehearsed: dict[Rank, Rehearsed] = {}
        """The newest rehearsal of each rank. Ranks report it again to a restarted agent."""
        self.kept_options: dict[Rank, tuple[KeptOption, ...]] = {}
        """The options of each rank's script that the restored step replaced. Ranks repeat them to a restarted agent."""
        self.background = Background()
        self.slots = RankSlots(
            self.plan,
            self.shards,
            self.store,
            keep=self.keep,
            slot_count=self.slot_count,
            send=self._send,
            on_snapshot=self.on_snapshot,
            faults=self.faults,
            background=self.background,
        )
        self._lines: dict[Rank, RankLine] = {}
        self._waiting: dict[Rank, RankLine] = {}
        self._early: dict[Rank, SlotsRequest] = {}
        """Slot requests that arrived before the load, which needs the memory first, was over."""
        self._is_loaded = False
        # Ranks may copy their shards while these still arrive, except during loads from S3. A rank that copies early
        # returns early from `init`, and then waits for the other ranks in a collective operation with a time limit. A
        # load from S3 can exceed this limit.
        self._is_followed = bool(self.plan.base_step) and all(
            rank.sources and rank.sources[0].kind != "s3" for rank in self.plan.ranks
        )

    @property
    def waiting(self) -> tuple[Rank, ...]:
        """Connected ranks that must not train yet, because some node has not verified its shards."""
        return tuple(self._waiting)

    @property
    def run(self) -> RunId:
        """The run of these ranks."""
        return self.plan.run

    @property
    def generation(self) -> Generation:
        """The generation of these ranks."""
        return self.plan.generation

    async def close(self) -> None:
        """End the background tasks, and close the ranks' connections."""
        await self.background.close()
        for line in (*self._lines.values(), *self._waiting.values()):
            line.close()

    def hello(self, hello: RankHello, line: RankLine) -> bool:
        """Accept the connection of a rank of this generation, and refuse other connections."""
        shard = self.shards.get(hello.rank)
        if shard is None or (hello.run, hello.generation) != (self.run, self.generation):
            return False
        if self._is_loaded:
            self.slots.revoke_captured(shard)
            self._welcome(shard, line)
        else:
            self._waiting[hello.rank] = line
            if self._is_followed and shard.arriving is not None:
                line.send(shard.arriving)
        return True

    def arrived(self, rank: Rank, file: SlotFile, header: SlotHeader, verified_bytes: int) -> None:
        """Record how many bytes of a rank's base are verified in its slot, and notify the rank."""
        shard = self.shards[rank]
        was_arriving = shard.arriving is not None
        shard.arrive(file, header, verified_bytes)
        line = self._waiting.get(rank)
        if line is not None and self._is_followed and shard.arriving is not None:
            line.send(PageChanged() if was_arriving else shard.arriving)

    def welcome_all(self) -> None:
        """Start the training of all ranks: each receives its `Welcome` now, or when it connects."""
        self._is_loaded = True
        for rank, line in self._waiting.items():
            self._welcome(self.shards[rank], line)
        self._waiting.clear()
        if not self.is_loading_earlier():
            self._request_early()

    def _request_early(self) -> None:
        for rank, request in self._early.items():
            self.slots.request(self.shards[rank], request)
        self._early.clear()

    def _welcome(self, shard: OwnedShard, line: RankLine) -> None:
        self._lines[shard.rank] = line
        base = shard.slot(self.plan.base_step) if self.plan.base_step else None
        line.send(
            Welcome(
                generation=self.generation,
                word_path=shard.page.name,
                base_step=self.plan.base_step,
                base_slot_path=base.file.name if base is not None else None,
                relayout=self.earlier_layout(),
            )
        )

    def lost(self, rank: Rank, line: RankLine) -> None:
        """Record that a rank's connection has ended."""
        for lines in (self._lines, self._waiting):
            if lines.get(rank) is line:
                del lines[rank]

    def message(self, rank: Rank, message: Message) -> None:
        """Handle a message of a rank, unless it is for another generation."""
        shard = self.shards[rank]
        if getattr(message, "generation", self.generation) != self.generation:
            return
        is_loading = not self._is_loaded or self.is_loading_earlier()
        if not is_loading:
            self._request_early()
        match message:
            case FetchShard() if self.fetch_earlier is not None:
                self.background.begin(self._send_earlier(self.fetch_earlier, rank, message.owner_rank))
            case SlotsRequest() if is_loading:
                self._early[rank] = message
            case SlotsRequest():
                self.slots.request(shard, message)
            case Capturing():
                self.slots.capturing(shard, message)
            case Captured():
                self.traffic.captured(rank)
                self.slots.captured(shard, message)
            case Abandoned():
                self.slots.abandoned(shard, message)
            case Boundary():
                self._boundary(shard, message)
            case IdleSpans():
                self.traffic.spans(rank, message)
            case Logged():
                if rank == 0:
                    self.outbox.add(self.run, self._points(message), message.dropped_count)
                else:
                    self.newest_values.record(rank, message.records)
            case Rehearsed():
                if self.rehearsed.get(rank) != message:
                    self.rehearsed[rank] = message
                    self.on_change()
            case OptionsKept() if rank == 0:
                self.kept_options[rank] = message.options
                self.on_change()
            case RankFault():
                code = message.code if message.code in RANK_FAULTS else "training_error"
                is_permanent = code in PERMANENT_RANK_FAULTS
                self.faults.report(code, f"rank {rank}: {message.message}", is_permanent=is_permanent)
            case _:
                log.warning("rank %d sent an unexpected %s message", rank, type(message).__name__)

    async def _send_earlier(self, fetch: FetchEarlier, rank: Rank, owner: Rank) -> None:
        fetched = await fetch(owner, self.faults)
        if fetched is not None:
            self._send(rank, fetched)

    def _boundary(self, shard: OwnedShard, message: Boundary) -> None:
        half = shard.page.rank()
        # A rank that has stopped, or waits in `close`, can still capture its last step if the step is proposed after
        # the rank has finished it.
        if half.standing is not RankStanding.MOVING:
            self.slots.grant_if_due(shard)
        if message.boundary <= self.plan.base_step + FIRST_STEPS:
            self.on_change()
        seconds = self.traffic.boundary(shard.rank, message, half, is_sending=shard.core.is_under_way)
        if shard.rank == min(self.shards):  # The node's ranks have almost equal times, so one of them suffices.
            self.measurements.record(shard, message, seconds)
        shard.pass_boundary(message.boundary, message.at_seconds)

    def _points(self, message: Logged) -> list[MetricPoint]:
        return [
            MetricPoint(generation=self.generation, step=each.step, values=each.values, at_seconds=each.at_seconds)
            for each in message.records
        ]

    def apply_announcement(self, announcement: Announcement) -> None:
        """Apply the coordinator's announcement to shards and pages, notify waiting ranks, and grant slots."""
        self.traffic.apply_announcement(announcement.pacing)
        for shard in self.shards.values():
            if shard.apply_announcement(announcement):
                self._send(shard.rank, PageChanged())
            self.slots.grant_if_due(shard)
        self.on_round_change()

    def _send(self, rank: Rank, message: Message) -> None:
        line = self._lines.get(rank)
        if line is not None:
            line.send(message)
