"""Simulates a fleet in one process, for tests of the control plane's loops.

The runner, the database and the decisions are real. The cloud and the agents are fakes that follow the protocol. Time
is virtual and advances with `tick`. An agent stores its promises, lists its slots, loads, starts, halts and reports.
Training is simulated: after each step, every holder seals a slot with the step and keeps the newest two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from math import inf
from pathlib import Path
from typing import ParamSpec, TypeVar

from control_plane.accounts.facts import sentence
from control_plane.cloud.contract import ensure
from control_plane.cloud.errors import CloudError
from control_plane.cloud.operator import GroupState, ScheduledEvent
from control_plane.core.observed.fleets import FleetHistory
from control_plane.core.observed.steps import NO_GENERATION
from control_plane.core.states import FleetStatus, JobState, NodeState
from control_plane.core.timeouts import ladder
from control_plane.db import checkpoints, events, fleets, incidents, jobs, nodes
from control_plane.db.session import Database
from control_plane.loop.agents import AgentConnection, AgentRegistry
from control_plane.loop.context import LoopContext
from control_plane.loop.observer import Observer
from control_plane.loop.runner import Runner
from control_plane.steady_clock import SteadyClock
from everstep.protocol.agent_messages import (
    AgentReport,
    BurnInOutcome,
    BurnInPartner,
    BurnInResult,
    BurnInTest,
    ControlToAgent,
    EndedRanks,
    ExitClass,
    FaultCode,
    HaltRanks,
    Hello,
    KeepEvidence,
    KeepSources,
    KillForDrill,
    Load,
    MemberPhase,
    MemberReport,
    MemoryEnd,
    MetricBatch,
    MetricsStored,
    NodeFault,
    NodeNotice,
    NoticeKind,
    Obstacle,
    OutputCause,
    OutputFailure,
    PageCommit,
    Prepare,
    RankExit,
    RankStacks,
    RankStatus,
    RankValues,
    Rehearse,
    Release,
    RoundStatus,
    RunBurnIn,
    RunningUpload,
    SendLines,
    ShardProtection,
    Start,
    StopTraining,
    TakeCheckpoint,
    TakeStacks,
    UploadedShard,
)
from everstep.protocol.codec import PROTOCOL_MINOR
from everstep.protocol.ids import FleetName, Generation, JobName, NodeId, Rank, RunId, Step
from everstep.protocol.manifest import SharedObject
from everstep.protocol.parity import Contribution, Rebuild, share_owner
from everstep.protocol.plan import GenerationPlan, ObjectReference, RankPlan, ShardSource, SlotRecord, SourceKind
from everstep.protocol.rank_messages import StopState, UnkeptCause
from everstep.protocol.rehearsals import RehearsalVerdict, Rehearsed, ReplayDifference
from tests.fakes.cloud import FakeOperator, MemoryObjectStore
from tests.sqlite import make_migrated

BUCKET = "everstep"
GROUP = "group"
FLEET = FleetName("main")
START = datetime(2026, 3, 1, tzinfo=UTC)

P = ParamSpec("P")
T = TypeVar("T")
Lagging = Callable[[NodeId, Rank], bool]


class InTurn(ThreadPoolExecutor):
    """An executor that runs each submitted call inline, in order of submission.

    A test with virtual time waits for the end of every call, so threads would only cost time. On PostgreSQL, the tests
    use real threads.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        done = Future[T]()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


@dataclass
class Agent:
    """The simulated agent of one node."""

    world: World
    node_id: NodeId
    number: int
    sequence: int = 0
    connection: AgentConnection | None = None
    job: JobName | None = None
    run: RunId | None = None
    generation: Generation = NO_GENERATION
    phase: MemberPhase = MemberPhase.PROMISED
    plan: GenerationPlan | None = None
    slots: dict[tuple[int, Generation, int], SlotRecord] = field(default_factory=dict)
    boundary: dict[Rank, int] = field(default_factory=dict)
    unheard: int = 0
    """Number of steps that the node's ranks complete between the agent's last report and the end of the ranks."""
    ended: EndedRanks | None = None
    commits: tuple[PageCommit, ...] = ()
    """The newest committed step on the shared-memory page of each rank. Loading a plan clears the pages."""
    exits: dict[Rank, RankExit] = field(default_factory=dict)
    inventory: tuple[SlotRecord, ...] = ()
    faults: tuple[NodeFault, ...] = ()
    unstored_at_release: tuple[str, ...] = ()
    """Outputs that S3 refuses when the control plane first releases the node."""
    notices: tuple[NodeNotice, ...] = ()
    """Announcements of AWS in the instance's own metadata."""
    uploads: tuple[UploadedShard, ...] = ()
    running_uploads: tuple[RunningUpload, ...] = ()
    last_kept: float = inf
    """The newest step that the ranks can keep."""
    unkept: UnkeptCause | None = None
    """Why the agent has abandoned the newest proposed step. None if it has not."""
    leaves_much: bool = False
    """True while the agent uploads output of ranks that ended with success.

    Until the upload ends, the agent reports these ranks as running.
    """
    has_decided: bool = False
    """True if the coordinator has decided on the final step.

    The agent's ranks make no further step, but have not ended.
    """
    restored_from: tuple[SourceKind, ...] = ()
    fails_load: bool = False
    load_fault: str = FaultCode.SOURCE_MISMATCH
    load_obstacle: Obstacle | None = None
    is_patient: bool = False
    """Whether the agent repeats a load while a store is out of reach. Otherwise, as an older agent, it reports a failed
    load."""
    is_told_to_stop: bool = False
    is_deaf: bool = False
    """True if the control connection is cut. The agent still runs, but receives and sends no messages."""
    keys: list[bytes] = field(default_factory=list)
    moved_at: dict[Rank, tuple[int, datetime]] = field(default_factory=dict)
    """The newest step of each rank, and when the rank finished it."""
    phase_of: dict[Rank, str] = field(default_factory=dict)
    limit_of: dict[Rank, float] = field(default_factory=dict)
    wall_ahead_seconds: float = 0.0
    """Seconds by which the node's wall clock is ahead of the simulated time.

    The offset affects the agent's Unix time stamps, and does not affect the ages that it measures.
    """
    stamp: Callable[[int], float] | None = None
    """Returns the Unix time at which the ranks finished a step. None: the ranks report no times."""
    longest: dict[str, float] = field(default_factory=lambda: {"train": 1.0, "first_step": 2.0})
    """The longest time in seconds that the node's ranks needed for one step, by phase."""
    stands_at: dict[Rank, str] = field(default_factory=dict)
    """The code location that each rank's stack shows. By default, a rank waits for the other ranks."""
    stopped: set[Rank] = field(default_factory=set)
    cpu_share: float = 0.0
    look: tuple[int, datetime] | None = None
    looked_first: datetime | None = None
    node_faults: tuple[NodeFault, ...] = ()
    evidence_key: str = ""
    exposure: str = ""
    sources: tuple[str, ...] = ()
    """SHA-256 digests of the source archives that this agent has downloaded and verified."""
    wanted_checkpoint: int = -1
    rehearsal_number: int = 0
    """Number of the newest order to rehearse that the agent has taken. 0 after a restart."""
    rehearsal_state: StopState = StopState.NONE
    rehearses_from: int = -1
    """The newest step of the node's ranks when the agent took that order."""
    is_slow_to_rehearse: bool = False
    """True while the agent does not answer orders to rehearse."""
    rehearsed: dict[Rank, Rehearsed] = field(default_factory=dict)
    """The newest rehearsal of each rank."""
    resume_revision: int = 0
    """Number of changes that each rank of this node reports."""
    protocol_minor: int = PROTOCOL_MINOR
    burn_in: BurnInResult | None = None
    tests: tuple[BurnInTest, ...] = (BurnInTest(name="matmul", outcome=BurnInOutcome.PASSED),)
    """Results of the node's tests. The agent reports them at the next order to test the node."""
    spoils_sums: bool = False
    """Whether all all-reduces with this node fail."""
    denies_sums: bool = False
    """Whether the agent reports all its all-reduces as failed."""
    target: int = 0
    measured: dict[str, float] = field(default_factory=dict)
    logged: tuple[RankValues, ...] = ()
    claims: tuple[ShardProtection, ...] = ()
    """False statements about shards. The agent adds them to its true report."""
    lie: Callable[[MemberReport], MemberReport] | None = None
    """Falsifies each report about the job."""
    verified: dict[tuple[Rank, NodeId], tuple[Step, float]] = field(default_factory=dict)
    """For each rank of this node and each holder: the newest step verified there, and the time of the verification."""

    def connect(self) -> None:
        hello = Hello(
            node_id=self.node_id,
            agent_id=f"agent-{self.number}",
            address=f"127.0.1.{self.number}",
            peer_port=4000,
            memory_bytes=1 << 30,
            version="1",
            protocol_minor=self.protocol_minor,
        )
        self.world.note(hello)
        self.connection = self.world.registry.accept(hello, self.world.fleet_of(self.node_id))
        self.report()

    def disconnect(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = None

    def report(self, metrics: MetricBatch | None = None) -> None:
        if self.connection is None or self.is_deaf:
            return
        self.sequence += 1
        member = self.member()
        report = AgentReport(
            node_id=self.node_id,
            sequence=self.sequence,
            member=self.lie(member) if self.lie is not None and member is not None else member,
            metrics=metrics,
            faults=self.node_faults,
            notices=self.notices,
            evidence_key=self.evidence_key,
            exposure=self.exposure,
            sources=self.sources,
            burn_in=self.burn_in,
        )
        self.connection.report(report)

    def member(self) -> MemberReport | None:
        if self.run is None or self.job is None:
            return None
        has_ended_well, committed = self.has_ended_well, self.committed
        is_coordinator = (
            self.plan is not None
            and self.plan.coordinator == self.node_id
            and self.phase in (MemberPhase.RUNNING, MemberPhase.EXITED)
        )
        running = self.phase in (MemberPhase.RUNNING, MemberPhase.EXITED)
        protection: tuple[ShardProtection, ...] = ()
        if self.plan is not None and running:
            protection = tuple(
                ShardProtection(
                    rank=rank,
                    holders=self.plan.ranks[rank].holders,
                    in_view=self.in_view(self.plan.ranks[rank]),
                    committed=Step(committed),
                    payload_bytes=100,
                    verified=tuple(self.seen(rank, holder) for holder in self.plan.ranks[rank].holders),
                    unkept=self.unkept,
                    lasts=self.unkept is not None and self.unkept.lasts,
                )
                for rank in self.boundary
            )
        return MemberReport(
            job=self.job,
            run=self.run,
            generation=self.generation,
            phase=self.phase,
            inventory=self.inventory if self.phase is MemberPhase.PROMISED else (),
            ended=self.ended if self.phase is MemberPhase.PROMISED else None,
            commits=self.commits if self.phase is MemberPhase.PROMISED else (),
            ranks=tuple(self.status(rank, step) for rank, step in sorted(self.boundary.items())),
            longest=self.longest if self.boundary else {},
            stacks=self.stacks(),
            protection=(*protection, *self.claims),
            round=RoundStatus(
                committed=Step(committed),
                proposed=Step(max(committed + 1, max(self.boundary.values(), default=-1))),
                boundary=Step(max(self.boundary.values(), default=-1)),
                committed_at_seconds=self.unix_seconds,
                stopped=self.is_told_to_stop,
                finished=has_ended_well,
                rehearsal_number=self.rehearsal_number,
                rehearsal_state=self.rehearsal_state,
            )
            if is_coordinator
            else None,
            uploads=self.uploads,
            running_uploads=self.running_uploads,
            faults=self.faults,
            restored_from=self.restored_from,
            silent_peers=self.silent_peers,
            measured=self.measured,
            logged=self.logged,
            target=Step(self.target),
        )

    @property
    def unix_seconds(self) -> float:
        """Return the Unix time of the node's wall clock."""
        return self.world.now.timestamp() + self.wall_ahead_seconds

    @property
    def has_ended_well(self) -> bool:
        return self.has_decided or (
            bool(self.exits) and all(each.exit_class is ExitClass.SUCCESS for each in self.exits.values())
        )

    @property
    def committed(self) -> int:
        """Return the newest committed step.

        It is the step before the ranks' newest step, or the newest step itself after the final round or its upload.
        """
        newest = max(self.boundary.values(), default=-1) - (not self.has_ended_well)
        return int(max(min(newest, self.last_kept), -1, *(upload.step for upload in self.uploads)))

    def in_view(self, rank: RankPlan) -> tuple[NodeId, ...]:
        """Return the nodes that count as holders of a rank's shard: its reachable holders.

        If this node is cut off, only this node counts. With parity, only this node counts if any other holder is
        unreachable.
        """
        served = tuple(holder for holder in rank.holders if self.world.serves(holder))
        if self.node_id not in served or (rank.stripe and served != rank.holders):
            return (self.node_id,)
        return served

    @property
    def silent_peers(self) -> tuple[NodeId, ...]:
        """Return the silent nodes among those that exchange reports with this agent. Empty without parity."""
        if self.plan is None or not any(rank.stripe for rank in self.plan.ranks):
            return ()
        neighbours = (
            [node.node_id for node in self.plan.nodes]
            if self.plan.coordinator == self.node_id
            else [self.plan.coordinator]
        )
        return tuple(
            peer
            for peer in neighbours
            if peer != self.node_id and not (self.world.serves(peer) and self.world.serves(self.node_id))
        )

    def seen(self, rank: Rank, holder: NodeId) -> tuple[Step, float]:
        """Return the newest step of a rank that the owner has verified on a holder, and the time of this verification.

        If the holder is unreachable, return the step that was verified last.
        """
        before = self.verified.get((rank, holder), (Step(-1), 0.0))
        if not self.world.serves(holder) or not self.world.serves(self.node_id):
            return before
        newest = max((step for owner, _, step in self.world.agents[holder].slots if owner == rank), default=-1)
        if newest != before[0]:
            self.verified[rank, holder] = Step(newest), self.unix_seconds
        return self.verified.get((rank, holder), before)

    def status(self, rank: Rank, step: int) -> RankStatus:
        if rank not in self.moved_at or self.moved_at[rank][0] != step:
            self.moved_at[rank] = step, self.world.now
        base = self.plan.base_step if self.plan is not None else step
        return RankStatus(
            rank=rank,
            boundary=Step(step),
            exit=self.exits.get(rank),
            phase=self.phase_of.get(rank, "train" if step > base else "first_step"),
            still_seconds=(self.world.now - self.moved_at[rank][1]).total_seconds(),
            limit_seconds=self.limit_of.get(rank, 0.0),
            passed_at_seconds=self.stamp(step) if self.stamp is not None else 0.0,
            first_passed_at_seconds=self.stamp(base + 1) if self.stamp is not None and step > base else 0.0,
            rehearsed=self.rehearsed.get(rank),
            resume_revision=self.resume_revision,
        )

    def stacks(self) -> tuple[RankStacks, ...]:
        if self.look is None or self.looked_first is None:
            return ()
        number, at = self.look
        same = (at - self.looked_first).total_seconds()
        return tuple(
            RankStacks(
                rank=rank,
                number=number,
                text=f"MainThread\n    {self.stands_at.get(rank, 'all_reduce (distributed.py:7)')}\n    main "
                "(train.py:3)",
                same_seconds=same,
                cpu_seconds=same * self.cpu_share,
                is_stopped=rank in self.stopped,
            )
            for rank in self.boundary
            if rank not in self.exits
        )

    async def act(self) -> None:
        """Process the messages received since the last tick."""
        while self.connection is not None and self.connection._queue and not self.is_deaf:
            message = await self.connection.next_message()
            if message is not None and self.world.losses > 0:
                self.world.losses -= 1
            elif message is not None:
                self.world.said.append((self.node_id, message))
                self.handle(message)
        if self.phase is MemberPhase.LOADING and self.plan is not None:
            self.load(self.plan)

    def handle(self, message: ControlToAgent) -> None:
        match message:
            case Prepare(job=job, run=run, generation=generation):
                if self.run == run and generation <= self.generation:
                    return
                if self.run != run:
                    self.slots, self.ended, self.commits = {}, None, ()
                if self.run == run and self.boundary:
                    self.ended = EndedRanks(
                        generation=self.generation, boundary=Step(max(self.boundary.values()) + self.unheard)
                    )
                    self.commits = (PageCommit(generation=self.generation, step=Step(self.committed)),)
                    self.unheard = 0
                self.job, self.run, self.generation, self.phase = job, run, generation, MemberPhase.PROMISED
                self.sources = ()
                self.plan, self.exits, self.uploads, self.faults = None, {}, (), ()
                self.boundary, self.moved_at, self.look, self.looked_first = {}, {}, None, None
                self.rehearsal_number, self.rehearsal_state, self.rehearsed = 0, StopState.NONE, {}
                self.stands_at, self.stopped, self.cpu_share, self.is_told_to_stop, self.has_decided = (
                    {},
                    set(),
                    0.0,
                    False,
                    False,
                )
                self.inventory = tuple(self.slots[key] for key in sorted(self.slots))
            case Load(plan=plan, key=key):
                if (plan.run, plan.generation) != (self.run, self.generation) or self.phase is not MemberPhase.PROMISED:
                    return
                self.keys.append(key)
                self.plan = plan
                self.commits = ()
                self.load(plan)
            case Start(generation=generation):
                if generation == self.generation and self.phase is MemberPhase.LOADED and self.plan is not None:
                    self.phase = MemberPhase.RUNNING
                    self.world.is_stopped = False
                    self.boundary = dict.fromkeys(self.plan.node(self.node_id).ranks, self.plan.base_step)
            case HaltRanks(generation=generation):
                if (
                    generation == self.generation
                    and self.phase is MemberPhase.RUNNING
                    and len(self.exits) < len(self.boundary)
                ):
                    self.exit_all(ExitClass.HALTED, -9)
            case StopTraining(generation=generation):
                if generation == self.generation:
                    self.is_told_to_stop = self.world.is_stopped = True
            case TakeCheckpoint(generation=generation, step=step):
                if generation == self.generation:
                    self.wanted_checkpoint = step
            case Rehearse(generation=generation, number=number):
                is_new = generation == self.generation and number > self.rehearsal_number
                if is_new and not self.is_slow_to_rehearse:
                    self.rehearsal_number, self.rehearsal_state = number, StopState.ANNOUNCED
                    self.rehearses_from = max(self.boundary.values(), default=-1)
            case TakeStacks(generation=generation, number=number):
                if generation == self.generation and (self.look is None or number > self.look[0]):
                    self.look = number, self.world.now
                    self.looked_first = self.looked_first or self.world.now
            case Release(run=run, unstored_count=recorded):
                for path in self.unstored_at_release if run == self.run else ():
                    output = OutputFailure(rank=Rank(0), path=path, cause=OutputCause.REFUSED)
                    fault = NodeFault(code="output_missing", message="x", is_permanent=False, output=output)
                    self.faults = (*self.faults, fault)
                self.unstored_at_release = ()
                unstored = [fault for fault in self.faults if fault.output is not None]
                if run == self.run and (recorded is None or len(unstored) <= recorded):
                    self.run, self.slots, self.plan, self.boundary, self.exits = None, {}, None, {}, {}
            case KillForDrill(rank=rank, generation=generation):
                if generation == self.generation and rank is not None:
                    self.world.kill_rank(self)
                elif generation == self.generation:
                    self.disconnect()
            case KeepEvidence(place=place):
                self.evidence_key = place.key
            case KeepSources(sources=sources):
                if self.run is None:
                    self.sources = tuple(source.sha256 for source in sources)
            case RunBurnIn(number=number, level=level, partner=partner):
                if self.run is None:
                    tests = self.tests if partner is None else (self.all_reduce(partner),)
                    self.burn_in = BurnInResult(number=number, level=level, seconds=0.5, tests=tests)
            case MetricsStored():
                pass  # the simulated agent buffers no metrics
            case SendLines():
                pass  # the simulated agent sends no lines
            case _:
                raise AssertionError(message)
        self.report()

    def all_reduce(self, partner: BurnInPartner) -> BurnInTest:
        """Return the result of an all-reduce. It is unknown if the partner works for a job, or cannot be reached."""
        other = self.world.agents.get(partner.node_id)
        if other is None or other.run is not None or {self.node_id, other.node_id} & self.world.cut:
            outcome = BurnInOutcome.UNKNOWN
        elif self.denies_sums or self.spoils_sums or other.spoils_sums:
            outcome = BurnInOutcome.FAILED
        else:
            outcome = BurnInOutcome.PASSED
        rate = 1_000_000 if outcome is BurnInOutcome.PASSED else None
        return BurnInTest(name="all-reduce", outcome=outcome, rate=rate)

    def end_rehearsal(self, verdicts: Mapping[int, RehearsalVerdict], seconds: float) -> None:
        """Let the node's ranks train again after five repeated steps. Each rank with a verdict reports it."""
        self.phase_of, self.limit_of, self.rehearsal_state = {}, {}, StopState.NONE
        for rank, boundary in self.boundary.items():
            if (verdict := verdicts.get(rank)) is None:
                continue
            is_proven = verdict is RehearsalVerdict.PROVEN
            step = Step(boundary - 5)
            found = ReplayDifference(step=Step(step + 2 + rank), kind="loss", source="unknown")
            self.rehearsed[rank] = Rehearsed(
                generation=self.generation,
                step=step,
                steps=5,
                seconds=seconds,
                verdict=verdict,
                difference=None if is_proven else found,
                message="" if is_proven else "the loss differs",
                advice="" if is_proven else "Register it.",
            )

    def load(self, plan: GenerationPlan) -> None:
        """Load the shards once. A patient agent repeats the load if a store is out of reach."""
        if self.fetch(plan):
            self.phase, self.faults = MemberPhase.LOADED, ()
            return
        is_held = self.is_patient and self.load_obstacle is not None
        self.phase = MemberPhase.LOADING if is_held else MemberPhase.LOAD_FAILED
        self.faults = (
            NodeFault(
                code=self.load_fault,
                message="a source failed verification",
                is_permanent=False,
                obstacle=self.load_obstacle,
            ),
        )

    def fetch(self, plan: GenerationPlan) -> bool:
        """Fetch the shards from which this node's ranks start.

        Return False if a rank has no source that contains the shard with the plan's digest.
        """
        if self.fails_load:
            return False
        self.restored_from = ()
        kept = {(slot.owner_rank, slot.origin_generation, slot.step) for slot in plan.node(self.node_id).keep}
        self.slots = {key: slot for key, slot in self.slots.items() if key in kept}
        if plan.relayout is not None:
            return all(self.has_earlier(Rank(rank), sources) for rank, sources in enumerate(plan.relayout.shards))
        for rank in plan.node(self.node_id).ranks:
            for source in plan.ranks[rank].sources:
                if self.reads(rank, source):
                    self.slots[rank, source.origin_generation, source.step] = record_of(rank, source)
                    self.restored_from += (source.kind,)
                    break
            else:
                if plan.base_step and plan.relayout is None:
                    return False
        return True

    def has_earlier(self, rank: Rank, sources: tuple[ShardSource, ...]) -> bool:
        """Return True if a source still has the shard of a rank of the generation that made the base.

        The caller uses this method after a change of the number of ranks. Ranks then read parts of such shards directly
        into their state. The node keeps these shards in none of its slots, so the method changes no slot.
        """
        found = next((source for source in sources if self.reads(rank, source)), None)
        self.restored_from += () if found is None else (found.kind,)
        return found is not None

    def reads(self, rank: Rank, source: ShardSource) -> bool:
        """Return True if the source still has the shard, with the digest that the plan contains."""
        if source.kind == "s3":
            return True
        if source.rebuild is not None:
            return self.rebuilds(source, source.rebuild)
        holder = self.world.agents.get(source.node_id or NodeId(""))
        return (
            holder is not None
            and (holder is self or holder.world.serves(holder.node_id))
            and holder.slots.get((rank, source.origin_generation, source.step)) == record_of(rank, source)
        )

    def rebuilds(self, source: ShardSource, rebuild: Rebuild) -> bool:
        """Return True if all survivors have the shards and shares that the plan names."""
        content = (source.origin_generation, source.step)
        for survivor in rebuild.survivors:
            holder = self.world.agents.get(survivor.node_id)
            if holder is None or not holder.world.serves(holder.node_id):
                return False
            shard, share = (
                holder.slots.get((owner, *content)) for owner in (survivor.rank, share_owner(survivor.rank))
            )
            if shard is None or share is None or rebuild.lost not in share.contributions:
                return False
            if (shard.digest, share.digest) != (survivor.shard_digest, survivor.share_digest):
                return False
        return True

    def exit_all(self, exit_class: ExitClass, code: int) -> None:
        for rank, step in self.boundary.items():
            if rank not in self.exits:
                self.exits[rank] = RankExit(
                    exit_class=exit_class, code=code, at_seconds=self.unix_seconds, boundary=Step(step)
                )
        if not (self.leaves_much and exit_class is ExitClass.SUCCESS):
            self.phase = MemberPhase.EXITED

    def seal(self, rank: Rank, origin: Generation, step: int, contributions: tuple[Contribution, ...] = ()) -> None:
        """Seal a slot of a shard on this node, or of a share if `contributions` is not empty.

        The agent first empties its oldest slots for `rank`, so that with the new slot at most two remain.
        """
        mine = sorted((key for key in self.slots if key[0] == rank), key=lambda key: key[2])
        for key in mine[: max(0, len(mine) - 1)]:
            del self.slots[key]
        self.slots[rank, origin, step] = SlotRecord(
            owner_rank=rank,
            origin_generation=origin,
            step=Step(step),
            payload_bytes=100,
            digest=digest(rank, origin, step),
            layout_hash=b"l" * 16,
            contributions=contributions,
        )


def seal_shares(
    plan: GenerationPlan,
    step: int,
    members: Mapping[NodeId, Agent],
    *,
    is_lagging: Lagging = lambda holder, rank: False,
) -> None:
    """Seal each share of a step to which all other members of its stripe have contributed.

    Args:
        plan: the plan of the generation, whose ranks have stripes.
        step: the step whose shards the members have sealed.
        members: the agents that are connected with each other.
        is_lagging: returns True for a node and a rank if the node does not receive the chunks of this rank.
    """
    owners = {rank: node.node_id for node in plan.nodes for rank in node.ranks}
    for rank in plan.ranks:
        holder = members.get(owners[rank.rank])
        others = [each for each in rank.stripe if each != rank.rank]
        origin = (
            next((key[1] for key in holder.slots if (key[0], key[2]) == (rank.rank, step)), None) if holder else None
        )
        if holder is None or origin is None or not others or (share_owner(rank.rank), origin, step) in holder.slots:
            continue
        contributors = [members.get(owners[each]) for each in others]
        if all(
            member is not None and (each, origin, step) in member.slots and not is_lagging(holder.node_id, each)
            for each, member in zip(others, contributors, strict=True)
        ):
            named = tuple(contribution_of(each, origin, step) for each in others)
            holder.seal(share_owner(rank.rank), origin, step, named)


def contribution_of(rank: Rank, origin: Generation, step: int) -> Contribution:
    """Return the entry for a rank's shard in the share that a simulated agent holds."""
    return Contribution(
        rank=rank,
        payload_bytes=100,
        digest=digest(rank, origin, step),
        layout_hash=b"l" * 16,
        index_offset=90,
        index_bytes=10,
    )


def record_of(rank: Rank, source: ShardSource) -> SlotRecord:
    """Return the description of the slot in which a source has a rank's shard."""
    return SlotRecord(
        owner_rank=rank,
        origin_generation=source.origin_generation,
        step=source.step,
        payload_bytes=100,
        digest=source.digest,
        layout_hash=b"l" * 16,
    )


def uploaded_object(plan: GenerationPlan, step: int, rank: int) -> ObjectReference:
    """Return the object in which the plan's generation stores a shard. Its upload id is `u`."""
    prefix = plan.checkpoint.prefix
    folder = f"{prefix.key}run={plan.run}/gen={plan.generation}/step={step}/u"
    return ObjectReference(bucket=prefix.bucket, key=f"{folder}/rank={rank}.safetensors")


def digest(rank: int, origin: int, step: int) -> bytes:
    return hashlib.sha256(f"{rank}/{origin}/{step}".encode()).digest()[:16]


def evidence_of(incident: incidents.SavedIncident) -> tuple[str, ...]:
    """Return the evidence of an incident in sentences."""
    return tuple(map(sentence, incident.evidence))


class World:
    """A simulated fleet, with the control plane that runs it and the cloud that it uses."""

    def __init__(
        self,
        directory: Path,
        *,
        nodes: int = 4,
        spares: int = 1,
        boot_seconds: float = 10.0,
        max_size: int = 20,
        database_url: str = "",
    ) -> None:
        self.now = START
        self.wall_ahead_seconds = 0.0
        """Seconds by which the wall clock of the control plane's machine is ahead of the simulated time."""
        self.losses = 0
        """Number of the next messages to agents that are lost."""
        self.operator = FakeOperator(now=START, boot_delay=timedelta(seconds=boot_seconds))
        self.groups: dict[FleetName, str] = {}
        self.objects = MemoryObjectStore(BUCKET)
        self.objects.now = lambda: self.now
        if not database_url:
            make_migrated(directory / "everstep.db")
        self.database = Database(database_url or f"sqlite:///{directory / 'everstep.db'}")
        self.timeouts = ladder(3.0)
        self.agents: dict[NodeId, Agent] = {}
        self.said: list[tuple[NodeId, ControlToAgent]] = []
        self.is_stopped = False
        self.server_count = 0
        self.cut: set[NodeId] = set()
        self.known_fleets: dict[NodeId, FleetName] = {}
        self.reboots: dict[NodeId, datetime] = {}
        """When each rebooting instance will be up again."""
        self.never_return: set[NodeId] = set()
        self.is_mended_by_reboot = True
        self.boot_seconds = boot_seconds
        self.seen_calls = 0
        self.started = 0
        self.left_faults: dict[NodeId, tuple[NodeFault, ...]] = {}
        self.before_pass: Callable[[], Awaitable[None]] | None = None
        self.refusal: CloudError | None = None
        """Error with which AWS refuses every call of the loops. None: AWS accepts the calls."""
        self.is_local = False
        self.hangs = False
        """True if calls to S3 and AWS that one turn of the loops starts are still running when the next turn begins."""
        self.add_fleet(FLEET, GROUP, "us-east-1a", nodes=nodes, spares=spares, max_size=max_size)
        self.start_server()

    def add_fleet(
        self, name: FleetName, group: str, zone: str, *, nodes: int, spares: int = 0, max_size: int = 20
    ) -> None:
        """Register a fleet in its own availability zone."""
        self.operator.create_group(group, max_size=max_size, availability_zones=(zone,))
        ensure(self.operator, self.operator.describe_group(group))
        self.groups[name] = group
        with self.database.write() as session:
            new = fleets.NewFleet(
                name=name,
                auto_scaling_group_name=group,
                project="",
                state=FleetStatus.ACTIVE.value,
                min_node_count=nodes,
                spare_count=spares,
                max_node_count=max_size,
                instance_type="p5",
                availability_zone=zone,
                tags={},
            )
            fleets.create(session, new, self.now)

    def fleet_of(self, node_id: NodeId) -> FleetName:
        """Return the fleet whose group contains the instance."""
        if node_id in self.known_fleets:
            return self.known_fleets[node_id]
        members = {name: self.operator.running(group) for name, group in self.groups.items()}
        self.known_fleets[node_id] = next(name for name, some in members.items() if node_id in some)
        return self.known_fleets[node_id]

    def start_server(self) -> None:
        """Start or restart the control plane, with no state other than its database."""
        self.server_count += 1
        clock = SteadyClock(wall=lambda: self.now.timestamp() + self.wall_ahead_seconds, elapsed=self.monotonic)
        self.registry = AgentRegistry(monotonic=self.monotonic, unix=lambda: clock().timestamp())
        self.context = LoopContext(
            database=self.database,
            operator=self.operator,
            objects=self.objects,
            registry=self.registry,
            timeouts=self.timeouts,
            secret=b"secret",
            owner=f"server{self.server_count}",
            bucket=BUCKET,
            is_local=self.is_local,
            now=clock,
            monotonic=self.monotonic,
        )
        self.runner = Runner(self.context)
        for agent in self.agents.values():
            agent.connection = None

    def note(self, hello: Hello) -> None:
        """Store what an agent reports when it connects, as the websocket route does."""
        facts = nodes.AgentFacts(
            node_id=hello.node_id,
            fleet_name=self.fleet_of(hello.node_id),
            address=hello.address,
            peer_port=hello.peer_port,
            memory_bytes=hello.memory_bytes,
            agent_id=hello.agent_id,
            version=hello.version,
        )
        with self.database.write() as session:
            nodes.note_hello(session, facts, initial_state=NodeState.JOINING.value, now=self.now)

    def monotonic(self) -> float:
        return (self.now - START).total_seconds()

    def close(self) -> None:
        self.database.close()

    def reboot(self, node_id: NodeId) -> None:
        """Reboot a node: its agent is gone for the duration of a boot, and its memory is empty afterwards.

        Its faults end too, unless `is_mended_by_reboot` is False.
        """
        agent = self.agents.pop(node_id)
        agent.disconnect()
        self.reboots[node_id] = self.now + timedelta(seconds=self.boot_seconds)
        if not self.is_mended_by_reboot:
            self.left_faults[node_id] = agent.node_faults

    def serves(self, node_id: NodeId) -> bool:
        """Return True if peers can read the node's memory over the network."""
        return node_id in self.agents and node_id not in self.cut

    def submit(
        self,
        name: str = "gpt",
        *,
        nodes: int = 4,
        copies: int = 2,
        ranks_per_node: int = 1,
        priority: int = 0,
        project: str = "",
        **changes: object,
    ) -> RunId:
        run = RunId(hashlib.md5(name.encode(), usedforsecurity=False).hexdigest())
        spec = jobs.SavedJobSpec(
            source_sha256="0" * 64,
            source_bucket=BUCKET,
            source_key="sources/0",
            source_bytes=10,
            entry_point="train.py",
            node_count=nodes,
            ranks_per_node=ranks_per_node,
            copies=copies,
            checkpoint_uri=f"s3://{BUCKET}/jobs/{name}/checkpoints/",
            output_uri=f"s3://{BUCKET}/jobs/{name}/run={run}/output/",
            log_uri=f"s3://{BUCKET}/jobs/{name}/logs/",
            **changes,  # type: ignore[arg-type]
        )
        with self.database.write() as session:
            new = jobs.NewJob(
                run_id=run,
                name=name,
                fleet_name=FLEET,
                project=project,
                priority=priority,
                tags={},
                spec=spec,
                state=JobState.QUEUED.value,
                reason="is new",
            )
            jobs.create(session, new, self.now)
        return run

    def job(self, name: str = "gpt") -> jobs.SavedJob:
        with self.database.read() as session:
            return jobs.get(session, name)

    def incidents(self, name: str = "gpt") -> tuple[incidents.SavedIncident, ...]:
        with self.database.read() as session:
            which = incidents.IncidentFilter(run_ids=[jobs.get(session, name).run_id])
            return incidents.page(session, which, after=None, limit=100)

    def failures(self) -> tuple[int, int, int]:
        """Return three counts: the fleet's incidents, its failures, and its nodes that were replaced by a spare."""
        with self.database.read() as session:
            totals = incidents.totals(session, fleet_name=FLEET)
        assert self.history().lost_node_count == totals.lost_node_count
        return totals.count, totals.failure_count, totals.lost_node_count

    def history(self) -> FleetHistory:
        """Read the fleet's history from the database, as a new server does. A running server caches it for a minute."""
        return Observer(self.context, self.runner.cloud, self.runner.silence_clock).read_history(FLEET)

    def checkpoints(self, name: str = "gpt") -> tuple[checkpoints.SavedCheckpoint, ...]:
        run = self.job(name).run_id
        with self.database.read() as session:
            return checkpoints.of_run(session, run)

    def nodes(self) -> dict[NodeId, nodes.SavedNode]:
        with self.database.read() as session:
            return {NodeId(node.id): node for node in nodes.of_fleet(session, FLEET, with_ended=True)}

    def events(self) -> list[str]:
        with self.database.read() as session:
            return [event.message for event in events.page(session, events.EventFilter(), limit=10_000)]

    def plan(self, name: str = "gpt") -> GenerationPlan:
        job = self.job(name)
        with self.database.read() as session:
            return jobs.generation(session, job.run_id, job.generation).plan

    def team(self, name: str = "gpt") -> list[Agent]:
        """Return the living agents of a job's newest plan, in the order of their positions in the plan."""
        return [self.agents[node.node_id] for node in self.plan(name).nodes if node.node_id in self.agents]

    def stepping(self, plan: GenerationPlan | None) -> list[Agent]:
        """Return the agents of a plan if all their ranks run, otherwise no agents."""
        nodes = () if plan is None else plan.nodes
        team = [agent for node in nodes if (agent := self.agents.get(node.node_id)) is not None]
        runs = [(agent.run, agent.generation, agent.phase) for agent in team]
        is_whole = plan is not None and runs == [(plan.run, plan.generation, MemberPhase.RUNNING)] * len(nodes)
        return team if is_whole else []

    async def tick(self, seconds: float = 0.5) -> None:
        """Advance time, and let each agent and each control-plane loop act once.

        Calls to S3 and AWS that a loop starts end before any agent acts, unless `hangs` is True.
        """
        self.now += timedelta(seconds=seconds)
        self.operator.advance(timedelta(seconds=seconds))
        alive = {id for group in self.groups.values() for id in self.operator.running(group)}
        for call in self.operator.calls[self.seen_calls :]:
            if call[0] == "reboot_member":
                self.reboot(NodeId(str(call[2])))
        self.seen_calls = len(self.operator.calls)
        for node_id in sorted(alive - self.agents.keys()):
            if node_id not in self.never_return and self.reboots.get(node_id, self.now) <= self.now:
                self.agents[node_id] = Agent(
                    self, node_id, self.started + 1, node_faults=self.left_faults.pop(node_id, ())
                )
                self.started += 1
        for node_id in sorted(self.agents.keys() - alive):
            self.agents.pop(node_id).disconnect()
        for agent in list(self.agents.values()):
            if agent.connection is None or not agent.connection.is_open:
                if not agent.is_deaf:
                    agent.connect()
            else:
                agent.report()
        if self.before_pass is not None:
            await self.before_pass()
        self.operator.refusal = self.refusal
        await self.runner.cloud.poll()
        await self.runner.cloud.survey()
        for sweep in (self.runner.fleet_loop.sweep, self.runner.job_loop.sweep):
            await sweep()
            await self.runner.job_loop.idle()
            if not self.hangs:
                # Wait for the calls that the loops have started, so that every run has the same order of events.
                await self.runner.executor.close()
        self.operator.refusal = None
        for agent in list(self.agents.values()):
            await agent.act()

    async def until(self, what: Callable[[], bool], limit: int = 400) -> None:
        for _ in range(limit):
            if what():
                return
            await self.tick()
        job = self.job()
        raise AssertionError(f"not within {limit} ticks; the job is {job.state}: {job.reason}; nodes {self.nodes()}")

    async def running(self, name: str = "gpt") -> None:
        await self.until(lambda: self.job(name).state == JobState.RUNNING)

    async def train(self, steps: int, name: str = "gpt") -> None:
        """Complete the given number of steps, then run the loops once."""
        self.complete_steps(steps, name)
        await self.tick()

    def complete_steps(
        self,
        steps: int,
        name: str = "gpt",
        *,
        is_lagging: Lagging = lambda holder, rank: False,
        plan: GenerationPlan | None = None,
    ) -> None:
        """Complete the given number of steps of the newest generation. The loops do not run.

        A node for which `is_lagging` returns True for a rank does not store the shards of this rank.
        """
        plan = plan or self.plan(name)
        team = [self.agents[node.node_id] for node in plan.nodes if node.node_id in self.agents]
        members = {agent.node_id: agent for agent in team if self.serves(agent.node_id)}
        for _ in range(steps):
            seal_shares(plan, plan.base_step, members)  # a new generation first commits its start step
            for agent in team:
                for rank in agent.boundary:
                    agent.boundary[rank] += 1
                    for holder in plan.ranks[rank].copy_nodes:
                        if holder == agent.node_id or (
                            self.serves(holder) and self.serves(agent.node_id) and not is_lagging(holder, rank)
                        ):
                            self.agents[holder].seal(rank, plan.generation, agent.boundary[rank])
            newest = max((step for agent in team for step in agent.boundary.values()), default=plan.base_step)
            seal_shares(plan, newest, members, is_lagging=is_lagging)

    async def upload(
        self,
        step: int,
        name: str = "gpt",
        *,
        seconds: float = 0.0,
        nodes: int | None = None,
        frozen: tuple[SharedObject, ...] = (),
    ) -> None:
        """Report every agent's shard of a step as uploaded to S3, and run the loops twice. See `report_uploads`."""
        self.report_uploads(step, name, seconds=seconds, nodes=nodes, frozen=frozen)
        await self.tick()
        await self.tick()

    def report_uploads(
        self,
        step: int,
        name: str = "gpt",
        *,
        seconds: float = 0.0,
        nodes: int | None = None,
        frozen: tuple[SharedObject, ...] = (),
    ) -> None:
        """Let every agent's next report contain its shard of a step as uploaded to S3 in `seconds`.

        With `nodes`, only the first `nodes` agents in the order of GROUP_RANK report an upload. Each report names the
        frozen objects.
        """
        for agent in self.team(name)[:nodes]:
            assert agent.run is not None
            assert agent.plan is not None
            agent.uploads = tuple(
                UploadedShard(
                    rank=rank,
                    step=Step(step),
                    origin_generation=origin,
                    object=uploaded_object(agent.plan, step, rank),
                    object_bytes=100,
                    etag="e",
                    payload_bytes=100,
                    payload_digest=digest(rank, origin, step),
                    layout_hash=b"l" * 16,
                    upload_seconds=seconds,
                    frozen=frozen,
                )
                for rank in agent.boundary
                for origin in [
                    next((key[1] for key in agent.slots if key[0] == rank and key[2] == step), agent.generation)
                ]
            )

    def begin_rehearsal(self, limit_seconds: float = 300.0) -> None:
        """Let all ranks repeat steps from now on, within a limit."""
        for agent in self.team():
            agent.phase_of = dict.fromkeys(agent.boundary, "rehearse")
            agent.limit_of = dict.fromkeys(agent.boundary, limit_seconds)

    def end_rehearsal(self, *verdicts: RehearsalVerdict | None, seconds: float = 3.0) -> None:
        """Let each rank train again and report its verdict, or nothing."""
        for agent in self.team():
            agent.end_rehearsal(
                {rank: verdict for rank, verdict in enumerate(verdicts) if verdict is not None}, seconds
            )

    def spare(self) -> Agent:
        """Return a living agent whose node is not assigned to a job."""
        return next(agent for agent in self.agents.values() if agent.run is None)

    def wish(self, **wishes: object) -> None:
        """Change settings of the fleet, as a user does with UpdateFleet."""
        with self.database.write() as session:
            fleets.set_wanted(session, FLEET, **wishes)

    def silence(self, agent: Agent) -> None:
        """Cut a node off from the control plane and from its peers."""
        agent.is_deaf = True
        agent.disconnect()
        self.cut.add(agent.node_id)

    def kill_rank(
        self,
        agent: Agent,
        *,
        exit_class: ExitClass = ExitClass.KILLED,
        code: int = -9,
        lines: str = "",
        memory: MemoryEnd | None = None,
    ) -> None:
        rank, step = next(iter(agent.boundary.items()))
        agent.exits[rank] = RankExit(
            exit_class=exit_class,
            code=code,
            at_seconds=self.now.timestamp(),
            boundary=Step(step),
            last_lines=lines,
            memory=memory,
        )
        agent.phase = MemberPhase.EXITED
        agent.report()

    def finish(self, name: str = "gpt") -> None:
        for agent in self.team(name):
            agent.exit_all(ExitClass.SUCCESS, 0)

    def announce(self, agent: Agent, kind: NoticeKind, seconds: float | None = None) -> None:
        """Add an announcement to an instance's metadata, due in `seconds`."""
        ends_at = None if seconds is None else self.now.timestamp() + seconds
        agent.notices = (*agent.notices, NodeNotice(kind=kind, message="as AWS says it", ends_at_seconds=ends_at))

    def schedule(self, agent: Agent, seconds: float) -> None:
        """Schedule the instance's retirement in EC2, due in `seconds`."""
        event = ScheduledEvent(
            event_id=f"instance-event-{agent.number}",
            code="instance-retirement",
            description="The instance is running on degraded hardware",
            not_before=self.now + timedelta(seconds=seconds),
        )
        self.operator.events[agent.node_id] = (event,)

    def suspended(self, reason: str) -> Callable[[GroupState], GroupState]:
        """Return a function that marks launches of the group as suspended, for the given reason."""
        return lambda group: replace(
            group, suspended_processes=group.suspended_processes | {"Launch"}, suspension_reasons={"Launch": reason}
        )

    def terminate(self, agent: Agent) -> None:
        self.operator.end_instance(agent.node_id)
