"""What the loop saw: the whole input of a decision, frozen.

Times are Unix seconds. What agents and plans say is kept in the wire's own immutable types. Nothing here knows where it came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeAlias

from control_plane.core.states import IncidentState, JobState, NodeState
from everstep.protocol.agent_messages import ExitClass, MemberReport, NodeFault, NoticeKind
from everstep.protocol.ids import FIRST_STEP, FleetName, Generation, JobName, NodeId, Rank, RunId, Step
from everstep.protocol.manifest import ManifestShard
from everstep.protocol.plan import DEFAULT_MAX_SLOWDOWN, GenerationPlan, ObjectReference, ScriptPlan, SourceArchive, Timeouts

NO_STEP = Step(-1)
NO_GENERATION = Generation(0)
DEFAULT_REPLACEMENTS_PER_HOUR = 20
"""Nodes that Everstep takes out of one fleet by its own verdict. What AWS ends is not counted: nobody chose it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What holds for every job of this control plane."""

    timeouts: Timeouts


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What the user asked for, checked."""

    job: JobName
    run: RunId
    fleet: FleetName
    node_count: int
    ranks_per_node: int
    copies: int
    script: ScriptPlan
    checkpoint_prefix: ObjectReference
    checkpoint_every_steps: int = 0
    third_slot: bool = False
    max_slowdown: float = DEFAULT_MAX_SLOWDOWN
    max_attempts: int = 3
    """The same failure at the same step this many times ends the job."""
    max_runtime_seconds: float | None = None
    max_pending_seconds: float | None = None
    max_cost_usd: float | None = None
    priority: int = 0
    fleets: tuple[FleetName, ...] = ()
    """Where it may start, in the user's order, `fleet` among them; empty: nowhere else."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.node_count * self.ranks_per_node


class InstanceCondition(StrEnum):
    """What AWS says about an instance.

    PRESENT: pending or running. ENDED: going or gone, or its group is ending it. UNKNOWN: not asked, or no answer.
    """

    PRESENT = "present"
    ENDED = "ended"
    UNKNOWN = "unknown"


class Remedy(StrEnum):
    """What is done about a node, from the mildest to the gravest.

    NONE: it is told. RESTART: ranks start again on the same nodes. RELEASE: it leaves its job and may work for others. HOLD: it leaves its job and
    waits until it is heard again. RETIRE: it leaves its job and waits for a person, because nothing that was proven allows to end it. REBOOT: it
    leaves its job and EC2 is asked to reboot it. REPLACE: it leaves its job and is ended; another one comes. LET_GO: as REPLACE, but AWS takes it
    anyway: nothing speaks against it, there is nothing to inspect, and its successor was asked for when this was announced.
    """

    NONE = "none"
    RESTART = "restart"
    RELEASE = "release"
    HOLD = "hold"
    RETIRE = "retire"
    REBOOT = "reboot"
    REPLACE = "replace"
    LET_GO = "let_go"


@dataclass(frozen=True, slots=True, kw_only=True)
class Implication:
    """A node had its part in an incident. A line of the node's history."""

    node_id: NodeId
    incident_id: str
    """Of a job; or `fleet-<fleet>-<Unix seconds>` when no job had the node."""
    at: float
    what: str
    """A cause, or a fault's code with its number: `node_unreachable`, `gpu_xid 79`."""
    evidence: str
    is_own_word: bool = False
    """The node's own live agent reported it: of such a node the instance may be ended."""
    remedy: Remedy = Remedy.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something that AWS has announced for an instance."""

    kind: NoticeKind
    message: str
    """AWS's own words."""
    ends_at: float | None = None
    """Unix seconds from which the instance may be gone; None where AWS names no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeObserved:
    """One node as AWS and its agent show it."""

    node_id: NodeId
    instance: InstanceCondition = InstanceCondition.UNKNOWN
    instance_words: str = ""
    """AWS's own words: `terminated, Client.UserInitiatedShutdown`."""
    complaint: str = ""
    """What AWS finds wrong with an instance that runs; empty: nothing. Healthy ones fail checks, too."""
    is_connected: bool = False
    silent_seconds: float = 0.0
    """How long its control link has been silent. Silence before the end of this control plane's own grace after its start does not count."""
    heard_at: float | None = None
    """Its last message; None when this control plane has heard none."""
    address: str = ""
    peer_port: int = 0
    has_reported: bool = False
    """This control plane has had a report from the agent that is there now."""
    is_warm: bool = False
    """Its ranks start without importing first."""
    sources: frozenset[str] = frozenset()
    """SHA-256 of the source archives that it holds ready."""
    member: MemberReport | None = None
    """What it last reported to do, whatever the run; None: nothing, or it has not reported."""
    faults: tuple[NodeFault, ...] = ()
    """Of the node itself, in its agent's last report."""
    history: tuple[Implication, ...] = ()
    """Incidents that it had its part in, oldest first, since a person last returned it to service."""
    request_words: str = ""
    """What a person asked to be done with it, in a sentence, while that is not done: its job leaves it first."""
    domain: str | None = None
    """Failure domain, where AWS tells it."""
    notices: tuple[Notice, ...] = ()
    """What AWS has announced for its instance, one of a kind; `control_plane.core.notices` says what counts."""


class Cause(StrEnum):
    """Why an incident was opened, from the mildest to the gravest: a graver one found later replaces a milder.

    NOTICE: nothing has failed; ranks leave a node that AWS has announced to take away. REQUESTED: nor here; a person wants the node for something
    else. PAUSE_FAILED: nor here; the job was to pause, and could not. DRILL: a person had it done, and all that is found follows from it.
    """

    NOTICE = "notice"
    REQUESTED = "requested"
    PAUSE_FAILED = "pause_failed"
    DRILL = "drill"
    LOAD_FAILED = "load_failed"
    RANK_EXIT = "rank_exit"
    HANG = "hang"
    AGENT_LOST = "agent_lost"
    NODE_UNREACHABLE = "node_unreachable"
    NODE_FAULT = "node_fault"
    INSTANCE_TERMINATED = "instance_terminated"
    GROUP_LOST = "group_lost"

    @property
    def is_failure(self) -> bool:
        """Something failed by itself: what MTTF and MTTR are about."""
        return self not in (Cause.NOTICE, Cause.REQUESTED, Cause.PAUSE_FAILED, Cause.DRILL)

    @property
    def takes_nodes(self) -> bool:
        """A node that is left for this asks for a spare: it failed, or AWS takes it. People's wishes say nothing about what comes next."""
        return self.is_failure or self is Cause.NOTICE


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentRecord:
    """A failure and its recovery, as it is stored."""

    id: str
    state: IncidentState
    cause: Cause
    evidence: tuple[str, ...]
    decision: str
    reason: str
    generation_before: Generation
    failed_at: float
    opened_at: float
    reached_step: Step
    """The highest boundary before the failure."""
    generation_after: Generation | None = None
    from_step: Step | None = None
    """The base that training went on from."""
    restore_source: str | None = None
    """local, peer or s3: the farthest that any rank needed."""
    instance_ids: tuple[NodeId, ...] = ()
    """The nodes that were left, for whatever cause."""
    faulted_instance_ids: tuple[NodeId, ...] = ()
    """The nodes where it happened, lost by it or not."""
    lost_node_count: int = 0
    """Of those that were left, how many failed or were taken by AWS."""
    kept_instance_ids: tuple[NodeId, ...] = ()
    """The nodes that a launch was tried with although they report a fault of their own: a committed step was to be saved."""
    replacement_instance_ids: tuple[NodeId, ...] = ()
    replaced_at: float | None = None
    restored_at: float | None = None
    closed_at: float | None = None
    rank_sources: tuple[tuple[str, int], ...] = ()
    """Where each rank's shard came from, by rank, run-length encoded: `(("local", 2), ("peer", 1))`. Empty before that is known."""
    node_microseconds_before: int = 0
    """The job's `node_microseconds` when it failed."""
    idle_node_microseconds: int = 0
    """Of the job's nodes during the incident; set in what a decision stores of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """A failure of the job's own making; what the breaker remembers."""

    generation: Generation
    step: Step
    exit_class: ExitClass | None
    """None: not a rank's exit, but a load that failed, or a hang."""
    code: int
    at: float
    max_boundary: Step
    """The highest boundary that any generation had reached: has there been progress since?"""
    last_lines: str = ""
    words: str = ""
    """How the first rank ended and what to do, where more is known than its class and code: it ran out of memory."""
    is_hang: bool = False
    """Nothing ended: its ranks stood still."""
    node_id: NodeId | None = None
    """Where it happened first; of a hang, who alone was stuck, if it could be told."""
    base_step: Step = FIRST_STEP
    """The state that its generation began with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Something that was changed once to tell why a job keeps failing alike: another node, or an older state."""

    kind: Literal["node", "state"]
    failure: FailureRecord
    """The last one before it."""
    node_id: NodeId | None = None
    """Whose rank went to another node; None: a state was left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """A node that the job will not use again. The fleet loop acts on it."""

    node_id: NodeId
    evidence: str
    may_terminate: bool
    """AWS's word or the live agent's own fault; a node that is only unreachable is held, never ended."""
    remedy: Remedy | None = None
    """None: REPLACE where it may be ended, else HOLD."""

    @property
    def is_to(self) -> Remedy:
        """What the fleet is to do about the node. Never one that ends it where nothing allows that."""
        if self.may_terminate:
            return self.remedy or Remedy.REPLACE
        return self.remedy if self.remedy in (Remedy.RELEASE, Remedy.RETIRE) else Remedy.HOLD


@dataclass(frozen=True, slots=True, kw_only=True)
class Impairment:
    """A member that trains on and has something wrong: a fault of its own, or replicas that do not answer. Followed from pass to pass."""

    node_id: NodeId
    is_out_of_view: bool
    """Else its agent reports a fault."""
    since: float
    boundary: Step
    stepped_at: float
    """When two more boundaries had last been completed; `since` before that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A member that is to be left at an agreed stop, so that the job loses nothing (ADR 0016)."""

    node_id: NodeId
    evidence: str
    cause: Cause
    remedy: Remedy
    may_terminate: bool
    asked_at: float | None = None
    """When the stop was decided upon; it cannot be called off from then on."""
    what: str = ""
    """The fault by its name, where there is one."""
    is_kept: bool = False
    """It could not be spared: a committed step would have been lost by leaving it."""
    has_left: bool = False
    """The fleet has taken it back: should it be given to the job once more, rebooted, it is a node as any other."""
    is_history: bool = False
    """Its history speaks against it, not what it is like now: it is left at the failure that this came of."""
    ends_at: float | None = None
    """When AWS may have taken its instance; None where nobody names a time."""

    @property
    def is_announced(self) -> bool:
        """Whether AWS takes its instance: nothing is wrong with it, and it cannot stay."""
        return self.cause is Cause.NOTICE

    @property
    def is_faulty(self) -> bool:
        """Whether its own live agent says what is wrong with it."""
        return self.cause is Cause.NODE_FAULT and self.may_terminate and not self.is_history


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A node whose control link is silent, and how far training was when the silence last began to count."""

    node_id: NodeId
    since: float
    boundary: Step
    committed: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long ranks of a job have stood still at the most before they moved on: what the limits of its phases are learned from."""

    world_size: int = 0
    longest: Mapping[str, float] = field(default_factory=dict)
    """By phase, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """Ranks stand still for longer than a first limit."""

    since: float
    """When the first of them stopped moving."""
    began_at: float
    """When the limit was passed."""
    number: int
    """Of the last look at their stacks."""
    asked_at: float
    """When it was first asked for."""
    is_answered: bool = False
    limit_seconds: float = 0.0
    """After so long without progress a look at the stacks can prove a hang; 0 in records of an older server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedSource:
    """A shard of a step that could not be had verified; a later plan does not ask for it again."""

    rank: Rank
    origin_generation: Generation
    step: Step
    is_object: bool = False
    """The object in S3; else the slots in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """What is stored of a job. `decide` returns the next one."""

    state: JobState
    reason: str
    created_at: float
    state_since: float
    stop_requested_at: float | None = None
    pause_requested_at: float | None = None
    """When a person paused it; None once a person has resumed it."""
    checkpoint_wanted: Step = NO_STEP
    """A person wants a checkpoint of this step or a later one."""
    taken_over_by: str = ""
    """Who looks after it instead of Everstep; empty: nobody does."""
    started_at: float | None = None
    ended_at: float | None = None
    generation: Generation = NO_GENERATION
    """The newest with a plan; 0 before the first."""
    issued_generation: Generation = NO_GENERATION
    """The highest number that any agent can have seen."""
    base_step: Step = FIRST_STEP
    committed: Step = NO_STEP
    proposed: Step = NO_STEP
    boundary: Step = NO_STEP
    """The highest in the newest generation."""
    boundary_at: float | None = None
    """When a rank was the first to pass it, by its own stamp; None where nobody has told."""
    stepped_at: float | None = None
    """When a rank made the first new step of the newest generation, by its own stamp, Unix seconds; None before it did."""
    max_boundary: Step = NO_STEP
    """The highest in any generation."""
    target: Step = NO_STEP
    """Steps finished when its script will be done, as its ranks said last."""
    committed_at: float | None = None
    progress_at: float = 0.0
    asked: tuple[tuple[NodeId, float], ...] = ()
    """Since when each member owes its promise of the issued generation; who has promised is not named."""
    failures: tuple[FailureRecord, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()
    silences: tuple[Silence, ...] = ()
    refused: tuple[RefusedSource, ...] = ()
    doubted: tuple[RefusedSource, ...] = ()
    """Slots in memory that were out of reach once: they are refused the next time."""
    impairments: tuple[Impairment, ...] = ()
    moves: tuple[Departure, ...] = ()
    moves_after: float = 0.0
    """No node is left before: the last agreed stop could not spare it."""
    trials: tuple[Trial, ...] = ()
    stop_reason: str = ""
    """Why the job is stopped, when it is not a user who asked."""
    upload_seconds: float | None = None
    """How long the slowest shard of the newest checkpoint took to S3; None before there was one."""
    microseconds: Mapping[str, int] = field(default_factory=dict)
    """By bucket of `accounting.Bucket`, up to `accounted_until`."""
    paused_microseconds_before_start: int = 0
    """Of its paused time, what lay before `started_at`."""
    node_microseconds: int = 0
    """Up to there: how long its nodes have worked for it, all together."""
    node_count: int = 0
    """Nodes that work for it since then."""
    gang_attempts: int = 0
    """How often its gang did not come together since it last did."""
    not_before: float | None = None
    """Until then it stands aside in the queue."""
    no_pause_before: float | None = None
    """Until then it is not asked to pause again: the last time did not work out."""
    accounted_until: float | None = None
    incident: IncidentRecord | None = None
    """The open one."""
    pace: Pace = field(default_factory=Pace)
    suspicion: Suspicion | None = None
    unwatched: tuple[float, float] | None = None
    """From when until when, Unix seconds, no control plane worked on the job, the last time that it was so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """One link of a job's lineage."""

    generation: Generation
    parent: Generation
    base_step: Step
    was_started: bool
    """Its Start may have been sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """A complete checkpoint."""

    generation: Generation
    step: Step
    bucket: str
    shards: tuple[ManifestShard, ...]


class DrillKind(StrEnum):
    """What a drill does. KILL_RANK: one rank's process. KILL_AGENT: a node's agent. TERMINATE_INSTANCE: a node's instance, in EC2."""

    KILL_RANK = "kill-rank"
    KILL_AGENT = "kill-agent"
    TERMINATE_INSTANCE = "terminate-instance"


class DrillState(StrEnum):
    """How far a drill is: see `core.drills`."""

    REQUESTED = "requested"
    STRUCK = "struck"
    RECOVERED = "recovered"
    NOT_RECOVERED = "not_recovered"
    ABSORBED = "absorbed"
    NOT_DONE = "not_done"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillObserved:
    """A drill that has not ended."""

    id: str
    kind: DrillKind
    node_id: NodeId
    rank: Rank | None
    requested_by: str
    requested_at: float
    state: DrillState = DrillState.REQUESTED
    generation: Generation = NO_GENERATION
    """That it struck."""
    struck_at: float | None = None
    incident_id: str = ""
    ended_at: float | None = None
    outcome: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobObserved:
    """Everything that a job's decision may look at."""

    record: JobRecord
    plan: GenerationPlan | None
    """Of `record.generation`."""
    lineage: tuple[GenerationRecord, ...]
    checkpoints: tuple[CheckpointRecord, ...]
    """The complete ones."""
    assigned: tuple[NodeId, ...]
    """Nodes that the fleet loop has given to this job, in the order given."""
    nodes: Mapping[NodeId, NodeObserved]
    """At least the assigned ones and those of the plan."""
    dropped_checkpoints: frozenset[tuple[Generation, Step]] = frozenset()
    """Generation and step of those that a person has deleted."""
    price_usd_per_hour: float | None = None
    """Of one of its fleet's nodes."""
    drill: DrillObserved | None = None
    """The one that has not ended."""
    is_admitted: bool = False
    gives_way_to: str = ""
    """The job of higher priority that is to get this one's nodes, in words; empty when there is none."""
    queue_words: str = "waits in the queue"
    """Its place in the queue and who is ahead, for as long as it waits."""
    newest_node_at: float | None = None
    """When the fleet's newest node appeared."""
    spare_count: int = 0
    """Idle nodes of the fleet that could take over at once."""
    is_fleet_blind: bool = False
    """Most of the fleet is silent while AWS says that it runs: silence proves nothing."""
    waiting_words: str = ""
    """What AWS says about launches that fail; empty when none does."""
    launch_failed_at: float | None = None
    """When the fleet's newest launch failed; None while none has."""
    open_fleets: frozenset[FleetName] = frozenset()
    """Of those where it may start, the ones that take jobs in now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """A registered fleet."""

    name: FleetName
    group: str
    min_node_count: int
    spare_count: int
    spare_probability: float | None = None
    """Instead of a count: how probable it has to be that a spare is free when a failure comes."""
    is_deleting: bool = False
    """A user asked for its end: all nodes are ended, then the fleet is forgotten."""
    is_blindness_lifted: bool = False
    """A person has said that who is silent is gone: most of the fleet being silent freezes nothing, until sight returns."""
    holds_failed_instances: bool = False
    """Instances that would be ended for a fault are kept running for inspection, as long as that takes nobody's place."""
    max_replacements_per_hour: int = DEFAULT_REPLACEMENTS_PER_HOUR


Vacancies: TypeAlias = tuple[tuple[float, int], ...]
"""The empty places of a group: since when (Unix seconds), and how many since then; the oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetHistory:
    """What a fleet has seen of failures and replacements."""

    node_seconds: float = 0.0
    """How long its nodes have worked for jobs, all together."""
    lost_node_count: int = 0
    """Nodes that its jobs have lost in that time: that failed, or that AWS took."""
    replacement_count: int = 0
    replacement_seconds: float = 0.0
    """How long so many instances took, all together, from when the group lacked them until their agents dialled in: with the wait for capacity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """An instance as its group lists it."""

    node_id: NodeId
    is_leaving: bool
    awaits_termination: bool
    lifecycle_state: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupObserved:
    """The Auto Scaling group behind a fleet."""

    desired_count: int
    min_size: int
    max_size: int
    members: tuple[GroupMember, ...]
    termination_hooks: tuple[str, ...]
    drift: tuple[str, ...]
    launch_failure: str = ""
    """Why the newest launch failed, in AWS's words; empty where none has failed since the last that succeeded."""
    hook_seconds: float = 60.0
    """How long the terminating hooks hold an instance."""
    failed_at: float | None = None
    """When that was, Unix seconds."""
    failing_since: float | None = None
    """When the first one failed since the last that succeeded, Unix seconds; there where `failed_at` is."""
    launch_suspension: str | None = None
    """AWS's reason while the group's Launch process is suspended; None while it is not."""
    is_suspension_administrative: bool = False
    """AWS itself suspended it, after launches had failed for long."""

    @property
    def staying(self) -> tuple[NodeId, ...]:
        """The members that do not leave it."""
        return tuple(member.node_id for member in self.members if not member.is_leaving)


class Hold(StrEnum):
    """Why a node is held.

    UNREACHABLE: until it is heard again and works for nobody. DISTRUSTED: what it did speaks against it and nothing allows to end it; until a person
    releases it. INSPECTION: it failed and its fleet keeps failed instances; until a person releases it.
    PERSON: a person wants it kept; until one releases it.
    """

    UNREACHABLE = "unreachable"
    DISTRUSTED = "distrusted"
    INSPECTION = "inspection"
    PERSON = "person"


class NodeRequest(StrEnum):
    """What a person wants done with a node; its job leaves it first, at an agreed stop.

    DRAIN: it is held. REPLACE: its instance is ended and another one comes. REBOOT: it works again after a reboot. HOLD: as DRAIN, of a node that
    works for nobody.
    """

    DRAIN = "drain"
    REPLACE = "replace"
    REBOOT = "reboot"
    HOLD = "hold"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A row of the fleet's node table."""

    node_id: NodeId
    state: NodeState
    run: RunId | None
    reason: str
    created_at: float
    wanted_at: float | None = None
    """Since when its group had a place for it; None where nobody saw that."""
    since: float = 0.0
    """When it came into its state."""
    hold: Hold | None = None
    """Why it is HELD."""
    replaced_at: float | None = None
    """When another one was asked for in its place."""
    release: Literal["", "return", "terminate"] = ""
    """What a person wants of a held node."""
    request: NodeRequest | None = None
    """What a person wants of it and has not got yet."""
    request_words: str = ""
    connected_at: float | None = None
    """When its agent last dialled in."""
    evidence_at: float | None = None
    """When all that is to be kept of it was in S3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetJob:
    """A live job as its fleet sees it."""

    job: JobName
    run: RunId
    state: JobState
    node_count: int
    priority: int
    created_at: float
    exclusions: tuple[Exclusion, ...] = ()
    source: SourceArchive | None = None
    """What its nodes need before its ranks can start."""
    project: str = ""
    quota: int | None = None
    """Nodes of this fleet that all jobs of its project may hold together; None: any."""
    is_paused: bool = False
    """A person paused it: it waits for nobody's nodes."""
    is_taken_over: bool = False
    """A person looks after it: it is given nothing and loses nothing but what AWS takes."""
    may_pause: bool = False
    """It is preemptible and trains, nothing is wrong with it, and saving has been seen to work."""
    not_before: float | None = None
    no_pause_before: float | None = None
    moves: tuple[Departure, ...] = ()
    """Nodes that it is to leave; while it trains, another one is given to it for each."""
    avoided: tuple[NodeId, ...] = ()
    """Nodes that it was moved away from: others are given to it first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetObserved:
    """Everything that a fleet's decision may look at."""

    group: GroupObserved
    records: tuple[NodeRecord, ...]
    nodes: Mapping[NodeId, NodeObserved]
    jobs: tuple[FleetJob, ...]
    """All that have not ended."""
    history: FleetHistory = FleetHistory()
    vacancies: Vacancies = ()
    """As the pass before left them."""
    replaced: tuple[float, ...] = ()
    """When nodes were replaced by Everstep's own verdict, over the last hour at least."""
    failed_join_count: int = 0
    """How many instances were replaced because they did not join, of those that came after the newest one that did; all of them are gone."""
    rebooted: Mapping[NodeId, float] = field(default_factory=dict)
    """When EC2 was known to have taken the reboot that a row is REBOOTING for, Unix seconds; who is missing is still to be asked for."""
