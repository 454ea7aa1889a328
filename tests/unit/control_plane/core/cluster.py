"""Two jobs on one fleet, decided by the cores alone, for unit tests that need a job in the middle of its life.

Plain values replace the database and AWS, and messages reach the agents directly. `tests.sim` simulates the whole
system, with every kind of fault; here, a test causes one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from control_plane.core import elastic, evidence, fleets, moves, queue
from control_plane.core.absence import resolve_absence
from control_plane.core.actions import LaunchInstances, PutManifest, Send, SendLoad, SetDesired, TerminateMember
from control_plane.core.job import decide
from control_plane.core.observed.facts import InstanceEnded
from control_plane.core.observed.fleets import (
    FleetJob,
    FleetObserved,
    FleetSpec,
    GroupMember,
    GroupObserved,
    LaunchRecord,
    NodeRecord,
)
from control_plane.core.observed.jobs import JobObserved, JobRecord
from control_plane.core.observed.nodes import InstanceCondition, NodeObserved
from control_plane.core.observed.specs import JobSpec, Policy
from control_plane.core.observed.steps import CheckpointRecord, GenerationRecord
from control_plane.core.states import ENDED_JOBS, JobState, NodeState
from control_plane.core.timeouts import ladder
from everstep.protocol.agent_messages import (
    ControlToAgent,
    ExitClass,
    Load,
    MemberPhase,
    MemberReport,
    RankExit,
    TakeStacks,
    UploadedShard,
)
from everstep.protocol.codec import PROTOCOL_MINOR
from everstep.protocol.ids import FleetName, Generation, JobName, NodeId, RunId, Step
from everstep.protocol.plan import GenerationPlan, ObjectReference, ScriptPlan, SourceArchive
from tests.sim.world import Agent, digest, seal_shares, uploaded_object

REFERENCE = ObjectReference(bucket="b", key="k/")
POLICY = Policy(timeouts=ladder(3.0))
FLEET = FleetSpec(
    name=FleetName("main"), group="group", min_node_count=4, spare_count=1, max_replacements_per_hour=1000
)
MAX_SIZE = 12
BOOT_SECONDS = 5.0
SETTLE_STEPS = 400


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
    """What the real control plane would read about a job from its database."""

    spec: JobSpec
    record: JobRecord
    plans: dict[Generation, GenerationPlan] = field(default_factory=dict)
    started: set[Generation] = field(default_factory=set)
    checkpoints: list[CheckpointRecord] = field(default_factory=list)

    @property
    def plan(self) -> GenerationPlan | None:
        return self.plans.get(self.record.generation)

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

    def __init__(self, parity: tuple[int, int] | None = None) -> None:
        self.seconds = 1_000_000.0
        self.agents: dict[NodeId, Agent] = {}
        self.booting: dict[NodeId, float] = {}
        self.ended: set[NodeId] = set()
        self.removed: set[NodeId] = set()
        self.deaf: set[NodeId] = set()
        """Nodes that have lost their connection to the control plane."""
        self.unplugged: set[NodeId] = set()
        """Nodes that have lost their connections to other nodes."""
        self.silent_since: dict[NodeId, float] = {}
        self.last_reports: dict[NodeId, MemberReport | None] = {}
        self.desired = 0
        self.launch: LaunchRecord | None = None
        self.launched = 0
        self.table: dict[NodeId, NodeRecord] = {}
        self.is_stopped = False
        specs = [spec_of("gpt", "a", 4, 2), spec_of("bert", "b", 3, 3)]
        if parity is not None:
            specs = [replace(spec, copies=1, parity_group_size=size) for spec, size in zip(specs, parity, strict=True)]
        now = self.seconds
        new = JobRecord(state=JobState.QUEUED, reason="", created_at=now, state_since=now)
        self.jobs = [SimulatedJob(spec, new) for spec in specs]

    @property
    def now(self) -> datetime:
        """The simulated time, for `Agent`."""
        return datetime.fromtimestamp(self.seconds, UTC)

    def serves(self, node_id: NodeId) -> bool:
        return node_id in self.agents and node_id not in self.unplugged

    def step(self, seconds: float = 1.0) -> None:
        """Advance the time, and let the control plane decide about the fleet and both jobs."""
        self.seconds += seconds
        members = {*self.agents, *self.booting, *self.ended} - self.removed
        for _ in range(self.desired - len(members)):
            self.launched += 1
            self.booting[NodeId(f"i-{self.launched}")] = self.seconds + BOOT_SECONDS
        for node_id in [node_id for node_id, due in self.booting.items() if due <= self.seconds]:
            del self.booting[node_id]
            self.agents[node_id] = Agent(self, node_id, int(node_id[2:]))  # type: ignore[arg-type]
        self._decide_about_fleet()
        for job in self.jobs:
            self._decide_about_job(job)

    def nodes(self) -> dict[NodeId, NodeObserved]:
        """Return every node as the control plane observes it."""
        seen = {}
        for node_id in {*self.table, *self.agents, *self.booting, *self.ended}:
            agent = self.agents.get(node_id)
            is_silent = agent is None or node_id in self.deaf
            since = self.silent_since.setdefault(node_id, self.seconds) if is_silent else self.seconds
            if agent is not None and not is_silent:
                self.silent_since.pop(node_id, None)
                self.last_reports[node_id] = agent.member()
            has_ended = node_id in self.ended | self.removed
            seen[node_id] = NodeObserved(
                node_id=node_id,
                instance=resolve_absence(
                    InstanceCondition.ENDED if has_ended else InstanceCondition.PRESENT,
                    is_connected=not is_silent,
                    silent_seconds=self.seconds - since,
                    timeouts=POLICY.timeouts,
                ),
                ended=InstanceEnded(node_id=node_id, state="terminated") if has_ended else None,
                is_connected=not is_silent,
                silent_seconds=self.seconds - since,
                heard_at=since,
                address=node_id,
                peer_port=1,
                protocol_minor=None if is_silent else PROTOCOL_MINOR,
                has_reported=node_id in self.last_reports and agent is not None,
                member=self.last_reports.get(node_id) if agent is not None else None,
                burn_in=agent.burn_in if agent is not None and not is_silent else None,
            )
        return seen

    def _decide_about_fleet(self) -> None:
        members = sorted({*self.agents, *self.booting, *self.ended} - self.removed)
        observed = FleetObserved(
            group=GroupObserved(
                desired_count=self.desired,
                min_size=0,
                max_size=MAX_SIZE,
                members=tuple(GroupMember(node_id=id, is_leaving=False, awaits_termination=False) for id in members),
                termination_hooks=(),
                drift=(),
                zone="zone",
            ),
            launch=self.launch,
            records=tuple(row for row in self.table.values() if row.state is not NodeState.GONE),
            nodes=self.nodes(),
            jobs=tuple(self.fleet_jobs()),
            rebooted={},
        )
        decision = fleets.decide(self.seconds, FLEET, observed, POLICY)
        self.table |= {row.node_id: row for row in decision.records}
        for action in decision.actions:
            match action:
                case SetDesired(desired_count=desired):
                    self.desired = desired
                case LaunchInstances(key=key, count=count, desired_count=desired):
                    self.desired += count
                    self.launch = LaunchRecord(key=key, count=count, desired_count=desired, since=self.seconds)
                case TerminateMember(node_id=node_id, decrement=decrement):
                    self.agents.pop(node_id, None)
                    self.booting.pop(node_id, None)
                    self.removed.add(node_id)
                    self.desired -= decrement
                case Send(node_id, message):
                    self._send(node_id, message)
                case _:
                    raise AssertionError(action)

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
                is_preemptible=False,
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
        nodes, now = self.nodes(), self.seconds
        turns = queue.schedule(self.fleet_jobs(), MAX_SIZE, now)
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
                row.state is NodeState.SPARE and moves.is_ready(nodes[row.node_id], self.seconds, POLICY.timeouts)
                for row in rows
            ),
            is_fleet_blind=evidence.is_fleet_blind(in_use, POLICY.timeouts),
        )

    def _decide_about_job(self, job: SimulatedJob) -> None:
        decision = decide(self.seconds, job.spec, self.observe(job), POLICY)
        job.record = decision.record
        if decision.plan is not None:
            job.plans[decision.plan.generation] = decision.plan
        if job.record.state is JobState.STARTING:
            job.started.add(job.record.generation)
        for action in decision.actions:
            match action:
                case SendLoad():
                    self._send(action.node_id, Load(plan=action.plan, key=b""))
                case Send(_, TakeStacks()):
                    pass
                case Send(node_id, message):
                    self._send(node_id, message)
                case PutManifest(manifest=manifest):
                    put = CheckpointRecord(
                        generation=manifest.generation, step=manifest.step, bucket="b", shards=manifest.shards
                    )
                    job.checkpoints.append(put)
                case _:
                    raise AssertionError(action)

    def _send(self, node_id: NodeId, message: ControlToAgent) -> None:
        if node_id in self.agents:
            self.agents[node_id].handle(message)

    def running(self, job: SimulatedJob) -> list[Agent]:
        """Return the agents of the job's newest generation if all its ranks run, otherwise no agents."""
        nodes = () if job.plan is None else job.plan.nodes
        team = [self.agents[node.node_id] for node in nodes if node.node_id in self.agents]
        runs = [(agent.run, agent.generation, agent.phase) for agent in team]
        is_whole = runs == [(job.spec.run, job.record.generation, MemberPhase.RUNNING)] * len(nodes)
        return team if is_whole else []

    def train(self, job: SimulatedJob, steps: int) -> None:
        """Let all ranks finish `steps` steps."""
        for _ in range(steps):
            team, plan = self.running(job), job.plan
            members = {agent.node_id: agent for agent in team if self.serves(agent.node_id)}
            assert plan is not None
            seal_shares(plan, plan.base_step, members)  # a new generation first commits its start step
            for agent in team:
                for rank in agent.boundary:
                    agent.boundary[rank] += 1
                    for holder in plan.ranks[rank].copy_nodes:
                        if holder == agent.node_id or self.serves(holder):
                            self.agents[holder].seal(rank, plan.generation, agent.boundary[rank])
            seal_shares(plan, max(step for agent in team for step in agent.boundary.values()), members)

    def upload(self, job: SimulatedJob) -> None:
        """Complete the upload of the newest step that all ranks have finished."""
        team = self.running(job)
        step = Step(min(agent.boundary[rank] for agent in team for rank in agent.boundary))
        for agent in team:
            assert agent.plan is not None
            agent.uploads = tuple(
                UploadedShard(
                    rank=rank,
                    step=step,
                    origin_generation=agent.generation,
                    object=uploaded_object(agent.plan, step, rank),
                    object_bytes=1,
                    etag="",
                    payload_bytes=100,
                    payload_digest=digest(rank, agent.generation, step),
                    layout_hash=b"l" * 16,
                )
                for rank in agent.boundary
            )

    def kill_rank(self, agent: Agent) -> None:
        rank, step = next(iter(agent.boundary.items()))
        agent.exits[rank] = RankExit(exit_class=ExitClass.KILLED, code=-9, at_seconds=self.seconds, boundary=Step(step))
        agent.phase = MemberPhase.EXITED

    def terminate(self, node_id: NodeId) -> None:
        self.agents.pop(node_id, None)
        self.ended.add(node_id)


def fresh(*, parity: tuple[int, int] | None = None) -> Simulation:
    """Return a simulation in which both jobs run. `parity` has the number of nodes per parity group for each job."""
    simulation = Simulation(parity)
    for _ in range(SETTLE_STEPS):
        simulation.step()
        if all(simulation.running(job) and job.record.state is JobState.RUNNING for job in simulation.jobs):
            return simulation
    raise AssertionError([(job.record.state, job.record.reason) for job in simulation.jobs])
