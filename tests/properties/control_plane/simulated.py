"""Simulates two jobs on one fleet, without loops, database or cloud.

The product's `core.job.decide` and `core.fleets.decide` make the decisions. The simulated agents follow the protocol,
and tests can trigger any fault. Plain values replace the database. Messages reach the agents directly, or are lost. The
simulated time, `seconds`, never jumps. The wall clocks of the control plane and of each node may differ from it. The
control plane reads its wall clock through the product's `SteadyClock`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise

from control_plane.accounts.facts import sentence
from control_plane.accounts.jobs import reason
from control_plane.core import accounting, elastic, evidence, fleets, moves, notices, queue, remedies, witnesses
from control_plane.core.absence import resolve_absence
from control_plane.core.actions import (
    Decision,
    FleetDecision,
    LaunchInstances,
    PutManifest,
    RebootMember,
    Send,
    SendLoad,
    SetDesired,
    TerminateMember,
)
from control_plane.core.job import decide
from control_plane.core.observed.causes import Surplus
from control_plane.core.observed.facts import InstanceEnded
from control_plane.core.observed.fleets import (
    FleetJob,
    FleetObserved,
    FleetSpec,
    GroupMember,
    GroupObserved,
    HoldRelease,
    LaunchRecord,
    NodeRecord,
)
from control_plane.core.observed.incidents import IncidentRecord
from control_plane.core.observed.jobs import JobObserved, JobRecord
from control_plane.core.observed.nodes import Implication, InstanceCondition, NodeObserved, Notice, Remedy
from control_plane.core.observed.spans import Bucket, JobSpan
from control_plane.core.observed.specs import JobSpec, Policy, RehearsalMode
from control_plane.core.observed.steps import CheckpointRecord, GenerationRecord
from control_plane.core.states import ENDED_JOBS, JobState, NodeState
from control_plane.core.timeouts import ladder
from control_plane.steady_clock import SteadyClock
from everstep.protocol.agent_messages import (
    ControlToAgent,
    ExitClass,
    HaltRanks,
    Load,
    MemberPhase,
    MemberReport,
    NodeFault,
    NoticeKind,
    Prepare,
    RankExit,
    Rehearse,
    Release,
    RunBurnIn,
    Start,
    StopTraining,
    TakeCheckpoint,
    TakeStacks,
    UploadedShard,
)
from everstep.protocol.codec import PROTOCOL_MINOR
from everstep.protocol.ids import FleetName, Generation, JobName, NodeId, Rank, RunId, Step
from everstep.protocol.parity import holder_of, is_share, share_owner
from everstep.protocol.plan import GenerationPlan, ObjectReference, ScriptPlan, SourceArchive
from everstep.protocol.rank_messages import StopState
from everstep.protocol.rehearsals import RehearsalVerdict
from tests.properties.control_plane.incident_ledger import check_incidents
from tests.unit.control_plane.loop.world import Agent, digest, seal_shares, uploaded_object

REFERENCE = ObjectReference(bucket="b", key="k/")
POLICY = Policy(timeouts=ladder(3.0))
FLEET = FleetSpec(
    name=FleetName("main"), group="group", min_node_count=4, spare_count=1, max_replacements_per_hour=1000
)
MAX_SIZE = 12
EPOCH_SECONDS = 1_000_000.0
Domains = tuple[int, int]
"""The number of failure domains, and the seed from which each instance's domain is derived."""
NO_DOMAINS: Domains = (0, 0)
"""AWS reports no failure domains."""
SILENCE = re.compile(r"(?:agent of|coordinator) (\S+) was silent for ([0-9.]+) s")
ROUNDED_SECONDS = 0.06
"""Tolerance in seconds for a silence that is stated in a message. Messages round it to a tenth of a second."""


def spec_of(name: str, run: str, nodes: int, copies: int, ranks_per_node: int = 1) -> JobSpec:
    script = ScriptPlan(
        source=SourceArchive(object=REFERENCE, sha256="", bytes=1),
        entry_point="t.py",
        hyperparameters={},
        environment={},
        output=REFERENCE,
        logs=REFERENCE,
    )
    return JobSpec(
        job=JobName(name),
        run=RunId(run * 32),
        fleet=FLEET.name,
        node_count=nodes,
        ranks_per_node=ranks_per_node,
        copies=copies,
        script=script,
        checkpoint_prefix=REFERENCE,
        max_attempts=50,
    )


@dataclass
class SimulatedJob:
    """The data about a job that the real control plane would read from its database."""

    spec: JobSpec
    record: JobRecord
    is_preemptible: bool = False
    plans: dict[Generation, GenerationPlan] = field(default_factory=dict)
    started: set[Generation] = field(default_factory=set)
    ended_at: float | None = None
    """Simulated time at which all ranks had ended with success, whatever their nodes' clocks showed."""
    incidents: dict[str, IncidentRecord] = field(default_factory=dict)
    """All incidents of the job by their id, as the control plane stored them last."""
    checkpoints: list[CheckpointRecord] = field(default_factory=list)
    settled_spans: list[tuple[JobSpan, int]] = field(default_factory=list)
    committed: int = -1
    """The newest step of the job's current history that all holders of all shards had at the same time.

    The control plane may give up this step only for a documented reason.
    """
    advanced_at: float = 0.0
    """The last time at which the ranks finished enough steps to prove progress (`COUNTER_EVIDENCE_BOUNDARIES`).

    A single step proves no progress, because it may have been under way when a node became silent. Only the steps of
    one call of `train` count together.
    """

    @property
    def plan(self) -> GenerationPlan | None:
        return self.plans.get(self.record.generation)

    @property
    def newest_plan(self) -> GenerationPlan | None:
        """The newest stored plan. It exists even while the job's present generation has no plan yet."""
        return self.plans[max(self.plans)] if self.plans else None

    @property
    def lineage(self) -> tuple[GenerationRecord, ...]:
        return tuple(
            GenerationRecord(
                generation=plan.generation,
                parent=plan.parent,
                base_step=plan.base_step,
                world_size=plan.world_size,
                was_started=plan.generation in self.started,
            )
            for plan in self.plans.values()
        )


class Simulation:
    """The fleet, its two jobs and the simulated time."""

    def __init__(
        self,
        max_size: int = MAX_SIZE,
        domains: Domains = NO_DOMAINS,
        ranks_per_node: tuple[int, int] = (1, 1),
        *,
        is_elastic: bool = False,
        parity: tuple[int, int] | None = None,
    ) -> None:
        self.seconds = EPOCH_SECONDS
        self.wall_ahead_seconds = 0.0
        """Seconds by which the control plane's wall clock is ahead of `seconds`."""
        self.clock = self.started_clock()
        self.passed_at: dict[NodeId, dict[int, float]] = {}
        """When each node's ranks finished their steps, by the node's wall clock."""
        self.domain_count, self.domain_seed = domains
        self.max_size = max_size
        self.agents: dict[NodeId, Agent] = {}
        self.silent_since: dict[NodeId, float] = {}
        self.rebooted: dict[tuple[NodeId, float], float] = {}
        self.cut: set[NodeId] = set()
        self.deaf: set[NodeId] = set()
        """Nodes that have lost their connection to the control plane, but not to other nodes."""
        self.unplugged: set[NodeId] = set()
        """Nodes that have lost their connections to other nodes, but not to the control plane."""
        self.histories: dict[NodeId, dict[str, Implication]] = {}
        self.has_told: set[NodeId] = set()
        """Nodes whose agent has reported a fault that justifies terminating the node."""
        self.people_say: set[NodeId] = set()
        """Nodes whose termination a person has requested."""
        self.last_decisions: list[Decision | FleetDecision] = []
        self.last_words: dict[NodeId, MemberReport | None] = {}
        self.ended: dict[NodeId, str] = {}
        self.removed: set[NodeId] = set()
        self.desired = 0
        self.newest_launch: LaunchRecord | None = None
        self.launched = 0
        self.capacity: int | None = None
        """Largest number of instances that AWS provides. None: no limit."""
        self.booting: dict[NodeId, float] = {}
        self.launching: set[NodeId] = set()
        """Booting instances that their group does not list yet."""
        self.table: dict[NodeId, NodeRecord] = {}
        self.is_stopped = False
        self.announced: dict[NodeId, tuple[Notice, ...]] = {}
        self.was_announced: set[NodeId] = set()
        """Nodes for which AWS has announced an event, including withdrawn announcements."""
        self.due: dict[NodeId, float] = {}
        """The announced times at which AWS will end instances."""
        self.pause = ""
        """Reason of an administrator's pause of all automatic actions. Empty while automation is active."""
        self.replacement_limit = FLEET.max_replacements_per_hour
        """Largest number of nodes that the fleet may replace within an hour."""
        self.omitted: set[NodeId] = set()
        """Running instances that AWS's answers omit."""
        self.reported_ended: set[NodeId] = set()
        """Running instances that AWS reports as terminated."""
        self.listed_twice: set[NodeId] = set()
        """Members that the answer of the Auto Scaling group contains twice."""
        self.lies: dict[NodeId, Callable[[MemberReport], MemberReport]] = {}
        """Functions that falsify the reports of a node's agent."""
        self.losses = 0
        """Number of messages that the simulation will lose, counted from the next message."""
        self.upload_seconds = 1.0
        """Seconds from the successful end of all ranks until the last upload has ended."""
        self.verdict: RehearsalVerdict | None = RehearsalVerdict.PROVEN
        """The verdict that rank 0 reports after a rehearsal. If it is None, no rank reports."""
        specs = (spec_of("gpt", "a", 4, 2, ranks_per_node[0]), spec_of("bert", "b", 3, 3, ranks_per_node[1]))
        specs = (replace(specs[0], rehearsal_mode=RehearsalMode.ON, rehearsal_at_step=3), specs[1])
        if is_elastic:
            specs = (
                replace(specs[0], min_node_count=2, patience_seconds=10, priority=1),
                replace(specs[1], min_node_count=1, max_node_count=4, patience_seconds=3),
            )
        if parity is not None:
            specs = (
                replace(specs[0], copies=1, parity_group_size=parity[0]),
                replace(specs[1], copies=1, parity_group_size=parity[1]),
            )
        if is_elastic and parity is not None:
            specs = (
                replace(specs[0], min_node_count=max(2, parity[0])),
                replace(specs[1], min_node_count=parity[1]),
            )
        self.jobs = [
            SimulatedJob(
                spec,
                JobRecord(
                    state=JobState.QUEUED, reason="", created_at=self.control_seconds, state_since=self.control_seconds
                ),
                is_preemptible=is_elastic and spec.priority == 0,
            )
            for spec in specs
        ]

    # Methods that `Agent` calls

    @property
    def now(self) -> datetime:
        return datetime.fromtimestamp(self.seconds, UTC)

    # Methods that read and set the clocks

    def started_clock(self) -> SteadyClock:
        """Return the clock of a control plane that starts now."""
        return SteadyClock(wall=lambda: self.seconds + self.wall_ahead_seconds, elapsed=lambda: self.seconds)

    @property
    def control_seconds(self) -> float:
        """The Unix time that the control plane's clock shows."""
        return self.clock().timestamp()

    def control_time_of(self, seconds: float) -> float:
        """Return the control plane's time for the simulated time `seconds`.

        It is the control plane's present time minus the age of `seconds`.
        """
        return self.control_seconds - (self.seconds - seconds)

    def step_wall_clock(self, process: int, seconds: float) -> None:
        """Set the wall clock of one process forward or back. 0 is the control plane, and any other number is a node."""
        names = sorted(self.agents)
        if process == 0:
            self.wall_ahead_seconds += seconds
        elif names:
            self.agents[names[process % len(names)]].wall_ahead_seconds += seconds

    def serves(self, node_id: NodeId) -> bool:
        return node_id in self.agents and node_id not in self.cut | self.unplugged

    # Methods that advance the simulated time

    def step(self, seconds: float = 1.0) -> None:
        self.advance(seconds)
        self.last_decisions = [self.pass_over_fleet()]
        for job in self.jobs:
            self.last_decisions.append(self.pass_over_job(job))
            self.agree(job)
            self.save(job)

    def restart(self, seconds: int) -> None:
        """Stop the control plane, and start another one after `seconds`.

        The new control plane has received no reports.
        """
        for _ in range(seconds):
            self.advance(1.0)
        self.last_words.clear()
        self.silent_since.clear()
        self.clock = self.started_clock()

    def advance(self, seconds: float) -> None:
        """Advance the time, and launch, boot and terminate the instances whose time has come."""
        self.seconds += seconds
        members = [node_id for node_id in [*self.agents, *self.booting, *self.ended] if node_id not in self.removed]
        self.launching.clear()
        present = len(self.agents) + len(self.booting)
        room = self.desired - len(members)
        for _ in range(room if self.capacity is None else min(room, self.capacity - present)):
            self.launched += 1
            self.booting[NodeId(f"i-{self.launched}")] = self.seconds + 5
            self.launching.add(NodeId(f"i-{self.launched}"))
        for node_id in [node_id for node_id, due in self.booting.items() if due <= self.seconds]:
            del self.booting[node_id]
            self.agents[node_id] = Agent(self, node_id, int(node_id[2:]))  # type: ignore[arg-type]
            if node_id in self.table:
                self.table[node_id] = replace(self.table[node_id], connected_at=self.control_seconds)
        for node_id in [node_id for node_id, due in self.due.items() if due <= self.seconds]:
            del self.due[node_id]
            if node_id in self.agents or node_id in self.booting:
                self.terminate(node_id)

    def agree(self, job: SimulatedJob) -> None:
        """If the ranks of a job have been asked to stop, let all of them stop at their agreed step."""
        team = self.running(job)
        if any(agent.is_told_to_stop for agent in team):
            for agent in team:
                agent.exit_all(ExitClass.SUCCESS, 0)

    def nodes(self) -> dict[NodeId, NodeObserved]:
        seen = {}
        for node_id in {*self.table, *self.agents, *self.booting, *self.ended}:
            agent = self.agents.get(node_id)
            silent = node_id in self.cut | self.deaf or agent is None
            since = self.silent_since.setdefault(node_id, self.seconds) if silent else self.seconds
            if not silent:
                self.silent_since.pop(node_id, None)
            member = agent.member() if agent is not None else None
            if member is not None and node_id in self.lies:
                member = self.lies[node_id](member)
            if agent is not None and silent:
                member = self.last_words.get(node_id)
            elif agent is not None:
                self.last_words[node_id] = member
            gone = (
                node_id in self.ended
                or node_id in self.removed
                or (node_id in self.table and self.table[node_id].state is NodeState.GONE)
            )
            seen[node_id] = NodeObserved(
                node_id=node_id,
                instance=resolve_absence(
                    InstanceCondition.ENDED
                    if gone or node_id in self.reported_ended
                    else InstanceCondition.ABSENT
                    if node_id in self.omitted
                    else InstanceCondition.PRESENT,
                    is_connected=agent is not None and not silent,
                    silent_seconds=self.seconds - since,
                    timeouts=POLICY.timeouts,
                ),
                ended=InstanceEnded(node_id=node_id, state=self.ended.get(node_id, "terminated"))
                if gone or node_id in self.reported_ended
                else None,
                is_connected=agent is not None and not silent,
                silent_seconds=self.seconds - since,
                heard_at=self.control_time_of(since),
                domain=self.domain_of(node_id),
                address=node_id,
                peer_port=1,
                protocol_minor=PROTOCOL_MINOR if agent is not None and not silent else None,
                has_reported=agent is not None and node_id in self.last_words,
                member=member,
                faults=self.told_faults(node_id, agent, silent=silent),
                burn_in=agent.burn_in if agent is not None and not silent else None,
                history=tuple(self.histories.get(node_id, {}).values()),
                notices=notices.merged(self.announced.get(node_id, ())),
            )
        return seen

    def domain_of(self, node_id: NodeId) -> str | None:
        """Return the failure domain of an instance, derived from its id and the seed."""
        if not self.domain_count:
            return None
        return f"d{(int(node_id[2:]) + 31 * self.domain_seed) * 2654435761 % 2**32 % 997 % self.domain_count}"

    def told_faults(self, node_id: NodeId, agent: Agent | None, *, silent: bool) -> tuple[NodeFault, ...]:
        if agent is None or silent:
            return ()
        if any(
            remedies.of_fault(fault, (), self.control_seconds) in (Remedy.REBOOT, Remedy.REPLACE)
            for fault in agent.node_faults
        ):
            self.has_told.add(node_id)
        return agent.node_faults

    def remember(self, lines: tuple[Implication, ...]) -> None:
        for line in lines:
            self.histories.setdefault(line.node_id, {}).setdefault(line.incident_id, line)

    def pass_over_fleet(self) -> FleetDecision:
        nodes = self.nodes()
        members = tuple(
            GroupMember(node_id=node_id, is_leaving=False, awaits_termination=False)
            for node_id in sorted(
                [*{*self.agents, *self.booting, *self.ended} - self.removed - self.launching, *self.listed_twice]
            )
        )
        observed = FleetObserved(
            group=GroupObserved(
                desired_count=self.desired,
                min_size=0,
                max_size=self.max_size,
                members=members,
                termination_hooks=(),
                drift=(),
                zone="zone",
            ),
            launch=self.newest_launch,
            records=tuple(row for row in self.table.values() if row.state is not NodeState.GONE),
            nodes=nodes,
            jobs=tuple(self.fleet_jobs()),
            rebooted={
                row.node_id: at
                for row in self.table.values()
                if (at := self.rebooted.get((row.node_id, row.since))) is not None
            },
        )
        now = self.control_seconds
        spec = replace(FLEET, max_replacements_per_hour=self.replacement_limit)
        policy = replace(POLICY, pause=self.pause)
        observed = replace(observed, replaced=self.replaced_before(now))
        decision = fleets.decide(now, spec, observed, policy)
        assert fleets.decide(now, spec, observed, policy) == decision
        replaced = [row.node_id for row in decision.records if row.replaced_at == now]
        assert not replaced or len(observed.replaced) + len(replaced) <= self.replacement_limit, (
            f"{replaced} are replaced beyond the hourly limit"
        )
        if self.pause:
            assert (decision.actions, decision.records, decision.is_empty) == ((), (), False), "a paused fleet acts"
        for row in decision.records:
            self.table[row.node_id] = row
        self.remember(decision.implications)
        for action in decision.actions:
            match action:
                case SetDesired(desired_count=desired):
                    assert len(members) <= desired <= self.max_size, "an instance that nobody named would be ended"
                    assert desired != self.desired
                    self.desired = desired
                case LaunchInstances(key=key, count=count, desired_count=desired):
                    assert self.newest_launch is None or self.newest_launch.key != key, "a token launches once"
                    self.desired += count
                    assert len(members) <= self.desired <= self.max_size
                    self.newest_launch = LaunchRecord(key=key, count=count, desired_count=desired, since=now)
                case TerminateMember(node_id=node_id, decrement=decrement):
                    owner = self.table.get(node_id)  # None if a restored database has no row of the ended instance
                    assert owner is None or owner.state is not NodeState.ASSIGNED, "a node was ended while a job had it"
                    is_allowed = (
                        node_id in self.ended
                        or node_id in self.has_told
                        or node_id in self.people_say
                        or node_id in self.was_announced
                    )
                    assert is_allowed or (owner is not None and isinstance(owner.reason, Surplus)), (
                        f"nothing allows to end {node_id}: {owner}"
                    )
                    self.agents.pop(node_id, None)
                    self.booting.pop(node_id, None)
                    self.removed.add(node_id)
                    self.desired -= decrement
                case RebootMember(node_id=node_id, since=since):
                    assert node_id in self.has_told
                    assert (node_id, since) not in self.rebooted
                    self.rebooted[node_id, since] = self.control_seconds
                    self.agents.pop(node_id, None)
                    self.booting[node_id] = self.seconds + 5
                case Send(node_id, Release() | HaltRanks() | RunBurnIn() as message):
                    self.send(node_id, message)
                case _:
                    raise AssertionError(action)
        return decision

    def replaced_before(self, now: float) -> tuple[float, ...]:
        """Return when the fleet replaced nodes within the last hour."""
        times = (row.replaced_at for row in self.table.values())
        return tuple(at for at in times if at is not None and now - at <= fleets.RATE_WINDOW_SECONDS)

    def fleet_jobs(self) -> list[FleetJob]:
        return [
            FleetJob(
                job=job.spec.job,
                run=job.spec.run,
                state=job.record.state,
                node_count=job.spec.node_count,
                least_node_count=job.spec.least_node_count,
                most_node_count=job.spec.most_node_count,
                member_count=job.record.reduced_count or job.record.member_count,
                smaller_from=elastic.smaller_from(job.spec, job.record),
                is_settled=elastic.is_settled(job.record),
                is_preemptible=job.is_preemptible,
                priority=job.spec.priority,
                created_at=job.record.created_at,
                exclusions=job.record.exclusions,
                is_paused=job.record.pause_requested_at is not None,
                is_taken_over=bool(job.record.taken_over_by),
                not_before=job.record.not_before,
                no_pause_before=job.record.no_pause_before,
                moves=job.record.moves,
                avoided=tuple(trial.node_id for trial in job.record.trials if trial.node_id is not None),
            )
            for job in self.jobs
            if job.record.state not in ENDED_JOBS
        ]

    def observe(self, job: SimulatedJob) -> JobObserved:
        nodes, now = self.nodes(), self.control_seconds
        turns = queue.schedule(self.fleet_jobs(), self.max_size, now)
        first, reduction = turns.giving_way.get(job.spec.run), turns.reductions.get(job.spec.run)
        rows = sorted(self.table.values(), key=lambda row: (row.created_at, row.node_id))
        in_use = [nodes[row.node_id] for row in rows if row.state in (NodeState.SPARE, NodeState.ASSIGNED)]
        return JobObserved(
            record=job.record,
            plan=job.plan,
            lineage=job.lineage,
            checkpoints=tuple(job.checkpoints),
            assigned=tuple(row.node_id for row in rows if row.state is NodeState.ASSIGNED and row.run == job.spec.run),
            nodes=nodes,
            is_admitted=job.spec.run in turns.admitted,
            gives_way_to="" if first is None else first.job,
            keep_count=None if reduction is None else reduction.keep_count,
            returns_to="" if reduction is None else reduction.head.job,
            spare_count=sum(
                row.state is NodeState.SPARE
                and moves.is_ready(nodes[row.node_id], self.control_seconds, POLICY.timeouts)
                for row in rows
            ),
            is_fleet_blind=evidence.is_fleet_blind(in_use, POLICY.timeouts),
        )

    def check_pause(self, job: SimulatedJob, decision: Decision) -> None:
        """Check that a paused job starts nothing. Ranks of earlier generations may still be ended."""
        before, after = job.record, decision.record
        assert (after.state, after.issued_generation) == (before.state, before.issued_generation)
        assert decision.plan is None
        assert decision.fleet is None
        for action in decision.actions:
            match action:
                case PutManifest():
                    pass
                case Send(_, HaltRanks(generation=generation)):
                    assert generation < before.issued_generation
                case _:
                    raise AssertionError(f"{action} leaves while automation is paused")

    def pass_over_job(self, job: SimulatedJob) -> Decision:
        observed = self.observe(job)
        now = self.control_seconds
        policy = replace(POLICY, pause=self.pause)
        decision = decide(now, job.spec, observed, policy)
        assert decide(now, job.spec, observed, policy) == decision
        if self.pause:
            self.check_pause(job, decision)
        self.check_exclusions(job, observed, decision)
        self.check_silences(observed, decision)
        self.remember(decision.implications)
        before, job.record = job.record, decision.record
        if before.state in ENDED_JOBS:
            assert decision == Decision(record=before)
            return decision
        if before.state is JobState.PAUSING and job.record.state is JobState.QUEUED:
            assert max((each.step for each in job.checkpoints), default=0) >= before.committed, (
                "nodes were let go of with what only they had"
            )
        stored = (*decision.incidents, job.record.incident)
        job.incidents |= {each.id: each for each in stored if each is not None}
        job.settled_spans += decision.settled_spans
        self.check_ledger(before, job)
        check_incidents(job.record, job.incidents.values())
        if not self.lies:
            assert job.record.max_boundary >= job.record.committed, "no rank has finished the committed step"
            assert job.record.boundary >= job.record.committed, "no rank of this generation has finished that step"
        assert job.record.issued_generation >= before.issued_generation
        if decision.plan is not None:
            self.check_plan(job, observed, decision.plan)
            job.plans[decision.plan.generation] = decision.plan
        if job.record.state is JobState.STARTING:
            job.started.add(job.record.generation)
        for action in decision.actions:
            match action:
                case SendLoad():
                    assert action.plan is job.plan
                    self.send(action.node_id, Load(plan=action.plan, key=b""))
                case Send(_, TakeStacks()):
                    pass  # simulated agents send no stacks, so no hang can be proven
                case Send(_, TakeCheckpoint()):
                    self.upload(job)
                case Send(node_id, Prepare() | Start() | HaltRanks() | StopTraining() | Rehearse() as message):
                    assert not isinstance(message, Prepare) or message.generation == job.record.issued_generation
                    self.send(node_id, message)
                case PutManifest(manifest=manifest):
                    record = CheckpointRecord(
                        generation=manifest.generation, step=manifest.step, bucket="b", shards=manifest.shards
                    )
                    job.checkpoints.append(record)
                case _:
                    raise AssertionError(action)
        return decision

    def check_ledger(self, before: JobRecord, job: SimulatedJob) -> None:
        after = job.record
        spans = [*job.settled_spans, *accounting.open_spans(after)]
        assert all(end == later.start for (_, end), (later, _) in pairwise(spans)), "the spans have gaps"
        for bucket in set(Bucket) - {Bucket.TRAIN, Bucket.SHORTAGE}:
            spent = sum(end - span.start for span, end in spans if span.bucket is bucket)
            assert spent == after.microseconds.get(bucket, 0), f"{bucket}: the spans differ from their sums"
        wall = accounting.microseconds(accounting.accounted_until(after)) - accounting.microseconds(after.created_at)
        assert sum(after.microseconds.values()) == wall
        assert all(spent >= 0 for spent in after.microseconds.values())
        assert accounting.accounted_until(after) >= accounting.accounted_until(before)
        assert after.node_microseconds >= before.node_microseconds
        assert after.ended_at in (None, accounting.accounted_until(after))

    def send(self, node_id: NodeId, message: ControlToAgent) -> None:
        if self.losses > 0:
            self.losses -= 1
        elif node_id in self.agents and node_id not in self.cut:
            self.agents[node_id].handle(message)

    # Methods that check invariants after each decision of the control plane (pass)

    def check_plan(self, job: SimulatedJob, observed: JobObserved, plan: GenerationPlan) -> None:
        assert plan.generation > max(job.plans, default=0)
        assert all(agent.generation <= plan.generation for agent in self.agents.values() if agent.run == plan.run)
        nodes = [node.node_id for node in plan.nodes]
        assert len(nodes) == len(set(nodes))
        # A person may have lowered the maximum below the present number of nodes.
        most = max(job.spec.most_node_count, elastic.count_before(job.spec, observed.record))
        assert job.spec.least_node_count <= len(nodes) <= most
        assert set(nodes) <= set(observed.assigned)
        owners = {rank: node.node_id for node in plan.nodes for rank in node.ranks}
        assert sorted(owners) == list(range(len(nodes) * job.spec.ranks_per_node))
        if job.newest_plan is not None:
            before = [node.node_id for node in job.newest_plan.nodes]
            if len(before) == len(nodes):
                assert all(a == b for a, b in zip(nodes, before, strict=True) if a in before), "a node changed place"
            else:
                staying = [node for node in before if node in nodes]
                assert nodes[: len(staying)] == staying, "the order of the ranks changed"
        for rank in plan.ranks:
            assert len(rank.copy_nodes) == len(set(rank.copy_nodes)) == min(job.spec.copies, len(nodes))
            assert rank.holders[0] == owners[rank.rank]
            assert set(rank.holders) <= set(nodes)
            assert bool(rank.sources) == (plan.base_step > 0 and plan.relayout is None)
        for shard, sources in plan.base_shards:
            assert bool(sources) == (plan.base_step > 0)
            for source in (each for each in sources if not self.lies):
                assert source.step == plan.base_step
                assert self.maker(job, plan.parent, source.step) == source.origin_generation, "a source off the path"
                assert source.digest == digest(shard, source.origin_generation, source.step)
                assert job.plans[source.origin_generation].world_size == len(plan.base_shards)
        self.check_placement(job, plan)
        self.check_base(job, observed, plan)
        for node in plan.nodes:
            for reference in node.keep:
                assert reference.step <= plan.base_step
                assert self.maker(job, plan.parent, reference.step) == reference.origin_generation
            by_rank = [reference.owner_rank for reference in node.keep]
            assert all(by_rank.count(rank) <= 2 for rank in by_rank)

    def held_steps(self, job: SimulatedJob, parent: Generation, nodes: Iterable[NodeId]) -> set[Step]:
        """Return the steps that these nodes have completely in memory, among the steps in the history of generation
        `parent`.
        """
        slots = {
            key
            for node_id in nodes
            if node_id in self.agents and (agent := self.agents[node_id]).run == job.spec.run
            for key in agent.slots
        }
        steps = {Step(step) for _, _, step in slots}
        return {
            step
            for step in steps
            if (maker := self.maker(job, parent, step)) is not None
            and all(
                (rank.rank, maker, step) in slots
                or (
                    len(rank.stripe) > 1
                    and all(self.is_left(slots, each, maker, step) for each in rank.stripe if each != rank.rank)
                )
                for rank in job.plans[maker].ranks
            )
        }

    @staticmethod
    def is_left(slots: set[tuple[int, int, int]], rank: Rank, maker: Generation, step: Step) -> bool:
        """Return whether a rank's shard and share of a step are among these slots."""
        return (rank, maker, step) in slots and (share_owner(rank), maker, step) in slots

    def check_base(self, job: SimulatedJob, observed: JobObserved, plan: GenerationPlan) -> None:
        """Check that a plan starts from the newest step of which its nodes hold all shards, or from a newer step.

        It may start from an older step only after a source of a newer step failed verification, by two readers. A
        relayout with parity may start from the committed step, because the shares of a newer step can be incomplete.
        """
        if not observed.record.refused and not self.lies:
            held = self.held_steps(job, plan.parent, (node.node_id for node in plan.nodes))
            held -= {each.step for each in witnesses.refused(observed.record.failed_reads, observed.checkpoints)}
            if plan.relayout is not None and job.spec.parity_group_size is not None:
                held = {step for step in held if step <= observed.record.committed}
            assert plan.base_step >= max(held, default=0), "a step that is whole in memory was given up"

    def check_placement(self, job: SimulatedJob, plan: GenerationPlan) -> None:
        """Check that as few shards as possible have all their holders in one failure domain.

        If the previous placement of the same number of nodes reaches this minimum too, it must stay unchanged.
        """
        if job.spec.parity_group_size is not None:
            self.check_stripes(job, plan, job.spec.parity_group_size)
            return
        nodes = [node.node_id for node in plan.nodes]
        copies = len(plan.ranks[0].holders)
        if copies < job.spec.copies:
            # The job requests at least as many copies as the generation has nodes, so every node holds all shards.
            return
        domains = [self.domain_of(node_id) or node_id for node_id in nodes]

        def places(other: GenerationPlan) -> list[list[int]]:
            place = {node.node_id: i for i, node in enumerate(other.nodes)}
            return [sorted(place[holder] for holder in other.ranks[node.ranks[0]].holders) for node in other.nodes]

        def exposed(held: list[list[int]]) -> int:
            return sum(len({domains[place] for place in holders}) == 1 for holders in held)

        most = max(domains.count(domain) for domain in domains)
        # Smallest possible number of shards whose holders are all in one failure domain.
        least = max(0, len(nodes) - job.spec.copies * (len(nodes) - most))
        assert exposed(places(plan)) == least
        is_same_size = job.newest_plan is not None and len(job.newest_plan.nodes) == len(nodes)
        if job.newest_plan is not None and is_same_size and exposed(places(job.newest_plan)) == least:
            assert places(plan) == places(job.newest_plan), "a surviving group changed without a reason"

    def check_stripes(self, job: SimulatedJob, plan: GenerationPlan, group_size: int) -> None:
        """Check the stripes of a new plan.

        A stripe consists of the ranks with the same LOCAL_RANK on the nodes of a group.

        If a member has a share, the new plan must not discard it without need. A new plan with as many nodes as the
        previous plan (`newest_plan`) must have the same stripes. Otherwise, it must have the stripes of the generation
        that made the base, if every such stripe still has a share of the base.
        """
        owners = {rank: node.node_id for node in plan.nodes for rank in node.ranks}
        for rank in plan.ranks:
            assert rank.rank in rank.stripe
            assert group_size <= len(rank.stripe) < 2 * group_size
            assert list(rank.stripe) == sorted(rank.stripe)
            assert {each % job.spec.ranks_per_node for each in rank.stripe} == {rank.rank % job.spec.ranks_per_node}
            assert all(plan.ranks[each].stripe == rank.stripe for each in rank.stripe)
            assert {*rank.holders} == {owners[each] for each in rank.stripe}
        before = job.newest_plan
        inventories = [agent.inventory for node in plan.nodes if (agent := self.agents.get(node.node_id)) is not None]
        shares = [slot for slots in inventories for slot in slots if is_share(slot.owner_rank)]
        if before is None or not shares:
            return
        if len(before.nodes) == len(plan.nodes):
            assert [rank.stripe for rank in plan.ranks] == [rank.stripe for rank in before.ranks], "stripes changed"
        elif plan.relayout is None and plan.base_step:
            maker = job.plans[plan.ranks[0].sources[0].origin_generation]
            of_base = {holder_of(slot.owner_rank) for slot in shares if slot.step == plan.base_step}
            if all(of_base & {*rank.stripe} for rank in maker.ranks):
                assert [rank.stripe for rank in plan.ranks] == [rank.stripe for rank in maker.ranks], "stripes changed"

    def check_exclusions(self, job: SimulatedJob, observed: JobObserved, decision: Decision) -> None:
        """Check that no node is excluded while its job's steps advance.

        There are two exceptions: nodes that AWS reports as ended, and jobs whose ranks have all agreed on a stop.
        """
        known = {exclusion.node_id for exclusion in observed.record.exclusions}
        fresh = [exclusion for exclusion in decision.record.exclusions if exclusion.node_id not in known]
        for exclusion in fresh:
            node_id = exclusion.node_id
            if exclusion.may_terminate:
                is_taken = observed.nodes[node_id].instance is InstanceCondition.ENDED or node_id in self.was_announced
                failed = {read.generation for read in observed.record.failed_reads if read.reader == node_id}
                if len(failed) > 1:  # Its own agent reported two failed loads.
                    self.has_told.add(node_id)
                assert node_id in self.has_told or is_taken, exclusion
            is_member = job.plan is not None and any(node.node_id == node_id for node in job.plan.nodes)
            is_training = observed.record.state is JobState.RUNNING and bool(self.running(job)) and is_member
            if is_training and observed.nodes[node_id].instance is not InstanceCondition.ENDED:
                lasted = self.seconds - job.advanced_at
                assert lasted > POLICY.timeouts.lease_seconds, (
                    f"{node_id} was excluded while steps advanced: {exclusion.evidence}"
                )

    def check_silences(self, observed: JobObserved, decision: Decision) -> None:
        """Assert that no message overstates how long a node has been silent, whatever the clocks show."""
        told = [
            reason(observed.record.reason),
            *(map(sentence, observed.record.incident.evidence) if observed.record.incident is not None else ()),
        ]
        tells = [
            reason(decision.record.reason),
            *(map(sentence, decision.record.incident.evidence) if decision.record.incident is not None else ()),
        ]
        for words in tells:
            for node_id, seconds in SILENCE.findall(words) if words not in told else ():
                lasted = observed.nodes[NodeId(node_id)].silent_seconds
                assert float(seconds) <= lasted + ROUNDED_SECONDS, f"{words}: it was silent for {lasted} s"

    def maker(self, job: SimulatedJob, generation: Generation, step: int) -> Generation | None:
        """Return the generation that made a step, which is this generation or an ancestor.

        Return None if none of them made it.
        """
        while generation in job.plans:
            plan = job.plans[generation]
            if step > plan.base_step:
                return plan.generation
            generation = plan.parent
        return None

    def check(self) -> None:
        working = [row.node_id for row in self.table.values() if row.state is NodeState.ASSIGNED]
        assert len(working) == len(set(working))
        for node_id, agent in self.agents.items():
            if agent.phase is MemberPhase.RUNNING and agent.run is not None and node_id not in self.cut:
                holders = [job for job in self.jobs if job.spec.run == agent.run]
                assert holders

    # Events that a test can trigger

    def team(self, job: SimulatedJob) -> list[Agent]:
        """Return the agents of the job's newest generation, or an empty list if one of them is dead or does not work
        for it.
        """
        plan = job.plan
        if plan is None:
            return []
        team = [self.agents[node.node_id] for node in plan.nodes if node.node_id in self.agents]
        is_whole = len(team) == len(plan.nodes) and all(
            agent.generation == plan.generation and agent.run == plan.run for agent in team
        )
        return team if is_whole else []

    def running(self, job: SimulatedJob) -> list[Agent]:
        team = self.team(job)
        return team if all(agent.phase is MemberPhase.RUNNING for agent in team) else []

    def ask(self, job: SimulatedJob, what: str) -> None:
        """Store a person's request to stop, pause or resume a job, if the job's state allows it."""
        record = job.record
        if record.state in ENDED_JOBS:
            return
        match what:
            case "stop" if record.stop_requested_at is None:
                record = replace(record, stop_requested_at=self.control_seconds)
            case "pause" if record.stop_requested_at is None and record.pause_requested_at is None:
                record = replace(record, pause_requested_at=self.control_seconds)
            case "rehearse":
                record = replace(record, rehearsal_requested_at=self.control_seconds)
            case "resume":
                record = replace(record, pause_requested_at=None)
            case "take over":
                record = replace(record, taken_over_by="somebody")
            case "hand back":
                record = replace(record, taken_over_by="")
        job.record = record

    def finish(self, job: SimulatedJob) -> None:
        """End the script of a running job with success."""
        for agent in self.running(job):
            agent.exit_all(ExitClass.SUCCESS, 0)

    def train(
        self, job: SimulatedJob, steps: int, *, is_lagging: Callable[[NodeId, Rank], bool] = lambda holder, rank: False
    ) -> None:
        """Let all ranks finish `steps` steps.

        If `is_lagging` returns True for a node and a rank, this node does not store the steps of this rank's shard.
        """
        plan = job.plan
        if steps >= evidence.COUNTER_EVIDENCE_BOUNDARIES and self.running(job):
            job.advanced_at = self.seconds
        for _ in range(steps):
            team = self.running(job)
            members = {agent.node_id: agent for agent in team if self.serves(agent.node_id)}
            if plan is not None and team:
                seal_shares(plan, plan.base_step, members)  # a new generation first commits its start step
            for agent in team:
                assert plan is not None
                agent.stamp = agent.stamp or partial(self.stamped, agent.node_id)
                for rank in agent.boundary:
                    agent.boundary[rank] += 1
                    self.passed_at.setdefault(agent.node_id, {})[agent.boundary[rank]] = agent.unix_seconds
                    for holder in plan.ranks[rank].copy_nodes:
                        if holder != agent.node_id and is_lagging(holder, rank):
                            continue
                        other = self.agents[holder]
                        if (
                            other.run == plan.run
                            and other.generation == plan.generation
                            and (holder == agent.node_id or self.serves(holder))
                        ):
                            other.seal(rank, plan.generation, agent.boundary[rank])
            if plan is not None and team:
                newest = max(step for agent in team for step in agent.boundary.values())
                seal_shares(plan, newest, members, is_lagging=is_lagging)
                self.rehearse(plan, team)

    def rehearse(self, plan: GenerationPlan, team: list[Agent]) -> None:
        """End a rehearsal five steps after the coordinator took its order, with the drawn verdict of rank 0."""
        coordinator = next(agent for agent in team if agent.node_id == plan.coordinator)
        newest = max(coordinator.boundary.values(), default=-1)
        if coordinator.rehearsal_state is StopState.ANNOUNCED and newest >= coordinator.rehearses_from + 5:
            verdicts = dict.fromkeys(range(plan.world_size), RehearsalVerdict.PROVEN)
            for agent in team:
                agent.end_rehearsal({} if self.verdict is None else {**verdicts, 0: self.verdict}, seconds=3.0)

    def stamped(self, node_id: NodeId, step: int) -> float:
        """Return when a node's ranks finished a step, by the node's wall clock.

        Return 0 if they have not finished it.
        """
        return self.passed_at.get(node_id, {}).get(step, 0.0)

    def kill_rank(self, agent: Agent) -> None:
        if agent.phase is MemberPhase.RUNNING:
            for rank, step in list(agent.boundary.items())[:1]:
                agent.exits[rank] = RankExit(
                    exit_class=ExitClass.KILLED, code=-9, at_seconds=agent.unix_seconds, boundary=Step(step)
                )
            agent.phase = MemberPhase.EXITED

    def terminate(self, node_id: NodeId) -> None:
        self.agents.pop(node_id, None)
        self.booting.pop(node_id, None)
        self.cut.discard(node_id)
        self.ended[node_id] = "terminated"

    def announce(self, node_id: NodeId, kind: NoticeKind, seconds: float, *, is_true: bool = True) -> None:
        """Announce an event of AWS for an instance.

        The notice arrives twice, and the second must have no further effect. If `is_true`, the announced event really
        occurs at its time.
        """
        notice = Notice(kind=kind, message="", ends_at=None if kind is NoticeKind.REBALANCE else self.seconds + seconds)
        self.was_announced.add(node_id)
        self.announced[node_id] = (notice, *self.announced.get(node_id, ()), notice)
        if is_true and kind is not NoticeKind.REBALANCE:
            self.due[node_id] = min(self.seconds + seconds, self.due.get(node_id, self.seconds + seconds))

    def upload(self, job: SimulatedJob) -> None:
        """Complete the upload of the newest step that all running ranks of the job have finished."""
        self.put(self.running(job))

    def save(self, job: SimulatedJob) -> None:
        """Complete the upload of the job's last step.

        This happens `upload_seconds` after the last of its ranks ended with success.
        """
        team = self.team(job)
        exits = [rank_exit for agent in team for rank_exit in agent.exits.values()]
        world_size = 0 if job.plan is None else job.plan.world_size
        if not (len(exits) == world_size > 0 and all(each.exit_class is ExitClass.SUCCESS for each in exits)):
            job.ended_at = None
            return
        if job.ended_at is None:
            job.ended_at = self.seconds
        if self.seconds - job.ended_at >= self.upload_seconds:
            self.put(team)

    def put(self, team: list[Agent]) -> None:
        step = min((agent.boundary[rank] for agent in team for rank in agent.boundary), default=0)
        for agent in team:
            assert agent.plan is not None
            if agent.plan.relayout is not None and step == agent.plan.base_step:
                continue  # no rank has captured its shard of the base yet
            agent.uploads = tuple(
                UploadedShard(
                    rank=rank,
                    step=Step(step),
                    origin_generation=origin,
                    object=uploaded_object(agent.plan, step, rank),
                    object_bytes=1,
                    etag="",
                    payload_bytes=100,
                    payload_digest=digest(rank, origin, step),
                    layout_hash=b"l" * 16,
                )
                for rank in agent.boundary
                for origin in [
                    next((key[1] for key in agent.slots if key[0] == rank and key[2] == step), agent.generation)
                ]
            )

    def forget(self, agent: Agent) -> None:
        agent.run, agent.slots, agent.plan, agent.boundary, agent.exits = None, {}, None, {}, {}

    def settle(self, limit: int = 400) -> None:
        """Inject no further faults, and let the control plane decide until every unfinished job trains again.

        Announced events that are true occur immediately. AWS withdraws all other announcements.
        """
        self.pause = ""
        self.cut.clear()
        self.deaf.clear()
        self.unplugged.clear()
        self.losses = 0
        self.replacement_limit = FLEET.max_replacements_per_hour
        self.omitted.clear()
        self.reported_ended.clear()
        self.listed_twice.clear()
        self.lies.clear()
        self.upload_seconds = 1.0
        self.capacity = None
        self.announced = {node_id: words for node_id, words in self.announced.items() if node_id in self.due}
        self.due = dict.fromkeys(self.due, self.seconds)
        for agent in self.agents.values():
            agent.fails_load = False
        for job in self.jobs:
            self.ask(job, "hand back")
            self.ask(job, "resume")
        for _ in range(limit):
            self.release()
            self.step()
            self.check()
            if all(
                job.record.state in ENDED_JOBS or (job.record.state is JobState.RUNNING and self.running(job))
                for job in self.jobs
            ):
                return
        raise AssertionError([(job.record.state, job.record.reason) for job in self.jobs])

    def release(self) -> None:
        """Decide about every held node, as a person would: end an unreachable node, return any other to the fleet."""
        for node_id, row in self.table.items():
            if row.state is NodeState.HELD:
                self.histories.pop(node_id, None)
                is_unreachable = node_id in self.cut | self.deaf | self.unplugged
                release = HoldRelease.TERMINATE if is_unreachable else HoldRelease.RETURN
                self.table[node_id] = replace(row, release=release)


def fresh(
    max_size: int = MAX_SIZE,
    domains: Domains = NO_DOMAINS,
    ranks_per_node: tuple[int, int] = (1, 1),
    *,
    is_elastic: bool = False,
    parity: tuple[int, int] | None = None,
) -> Simulation:
    """Return a simulation in which both jobs run. Its group may have `max_size` instances.

    `parity` has the number of nodes per parity group for each job. None: copies protect the jobs.
    """
    simulation = Simulation(max_size, domains, ranks_per_node, is_elastic=is_elastic, parity=parity)
    simulation.settle()
    return simulation
