"""The stored record of a job, and the input of one decision about the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from control_plane.core.observed.causes import Reason
from control_plane.core.observed.drills import DrillObserved
from control_plane.core.observed.facts import Fact
from control_plane.core.observed.incidents import FailureRecord, IncidentRecord, Tries
from control_plane.core.observed.nodes import Cause, NodeObserved, Remedy
from control_plane.core.observed.reasons import JobReason, StopReason
from control_plane.core.observed.rehearsals import Rehearsals
from control_plane.core.observed.spans import JobSpan
from control_plane.core.observed.steps import (
    NO_GENERATION,
    CheckpointRecord,
    CheckpointUpload,
    FailedRead,
    GenerationRecord,
    Lapse,
    RefusedSource,
    RepeatedWork,
    SealedStates,
    StoreListing,
)
from control_plane.core.states import JobState
from control_plane.core.verification import Blocked
from everstep.protocol.agent_messages import CheckpointPace, OutputFailure
from everstep.protocol.ids import FIRST_STEP, NO_STEP, FleetName, Generation, NodeId, Step
from everstep.protocol.plan import GenerationPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One change after repeated equal failures: another node for the failing ranks, or the restore of an older step."""

    kind: Literal["node", "state"]
    failure: FailureRecord
    node_id: NodeId | None = None
    """None if the job instead restored an older state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """A node that the job will not use again. The fleet loop removes it from the job and applies the remedy."""

    node_id: NodeId
    evidence: Fact | Tries
    may_terminate: bool
    """Whether AWS's report, or a fault that the node's live agent reports, permits termination."""
    remedy: Remedy | None = None
    """None: REPLACE if `may_terminate`, else HOLD."""

    @property
    def is_to(self) -> Remedy:
        """The fleet's action for the node."""
        if self.may_terminate:
            return self.remedy or Remedy.REPLACE
        if self.remedy is Remedy.RELEASE or self.remedy is Remedy.RETIRE:
            return self.remedy
        return Remedy.HOLD


@dataclass(frozen=True, slots=True, kw_only=True)
class Impairment:
    """A member that trains although its agent reports a fault, or although it does not answer other members."""

    node_id: NodeId
    is_out_of_view: bool
    since: float
    boundary: Step
    stepped_at: float
    """Time of the last update of `boundary`, which follows training two steps at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A member that the job gives up as planned, after all ranks have stopped at one step (ADR 0016)."""

    node_id: NodeId
    evidence: Fact
    cause: Cause
    remedy: Remedy
    may_terminate: bool
    asked_at: float | None = None
    """Unix time of the decision to stop all ranks. The job cannot cancel this stop."""
    what: str = ""
    is_kept: bool = False
    """Whether the job kept the node, because it would otherwise have lost a committed step."""
    has_left: bool = False
    """Whether the node has left the job. If it returns after a reboot, the departure no longer applies."""
    is_history: bool = False
    """Whether the node leaves only because its history makes it a lemon, in the recovery from the newest incident."""
    ends_at: float | None = None
    """Unix time at which AWS may end the instance."""

    @property
    def is_announced(self) -> bool:
        """Whether AWS announced the end of the node's instance."""
        return self.cause is Cause.NOTICE

    @property
    def is_returned(self) -> bool:
        """Whether the job returns the node to its fleet and continues without a replacement."""
        return self.cause is Cause.RETURNED

    @property
    def is_faulty(self) -> bool:
        """Whether the node's agent reports a fault of the node now."""
        return self.cause is Cause.NODE_FAULT and self.may_terminate and not self.is_history


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSilence:
    """The silence of a node's agent, and the progress of training at its start."""

    node_id: NodeId
    since: float
    boundary: Step
    committed: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Nodes that the fleet has assigned to a running job and that its generation does not use."""

    node_ids: tuple[NodeId, ...]
    """Sorted."""
    since: float
    """Unix seconds since which all nodes have been ready."""
    asked_at: float | None = None
    """The job cannot cancel the stop after this Unix time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A job's longest times without progress after which the ranks continued by themselves."""

    world_size: int = 0
    longest: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds by phase of the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """A rank has made no progress for longer than the first limit of `core.hangs`. Times are Unix seconds."""

    since: float
    """Last progress of the slowest rank."""
    began_at: float
    """Time at which a rank exceeded the first limit."""
    number: int
    """The number of the newest request for stacks."""
    asked_at: float
    is_answered: bool = False
    limit_seconds: float = 0.0
    """Time without progress after which stacks can prove a hang. 0 in records that an older server wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedLaunches:
    """The launches of a fleet's instances that have failed since the last successful launch."""

    message: str
    failed_count: int
    """Everstep's own failed attempts, at least 1, without retries by Auto Scaling."""
    is_shortage: bool = False
    next_attempt_at: float
    """A Unix time in the past means that the attempt is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityWait(FailedLaunches):
    """A job's wait for instances whose launches fail, as the job loop stores it with each decision."""

    missing_count: int
    """At least 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitedCommit:
    """The first step that was proposed since the newest commit. It is the next step that the job keeps."""

    generation: Generation
    kept: Step
    step: Step
    passed_at: float | None = None
    """Unix time at which training had first finished `step`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnstoredOutputs:
    """The output files of a job's ranks that are not in S3."""

    generation: Generation
    """The generation of outputs that name none. Older agents name none."""
    outputs: tuple[OutputFailure, ...]
    """The first `MAX_NAMED_OUTPUTS` outputs."""
    count: int


MAX_NAMED_OUTPUTS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Memo:
    """The part of a job's record that the database stores in one JSON column. Times are Unix seconds.

    A new field needs a default value for records that an earlier version of the server stored.
    """

    state_since: float
    reason: JobReason = ""
    """Records of an earlier version have only the sentence."""
    boundary_at: float | None = None
    """Time at which the first rank finished step `boundary`, by its report."""
    stepped_at: float | None = None
    """Time of the newest generation's first new step, by the rank's clock."""
    progress_at: float = 0.0
    asked: tuple[tuple[NodeId, float], ...] = ()
    """Members that have not promised to join the issued generation, each with the time of the first request."""
    exclusions: tuple[Exclusion, ...] = ()
    silences: tuple[AgentSilence, ...] = ()
    refused: tuple[RefusedSource, ...] = ()
    """Copies of shards that plans skip by a decision of the job. Plans also skip those in which two nodes agree."""
    failed_reads: tuple[FailedRead, ...] = ()
    """The failed loads since the last commit (`core.witnesses`)."""
    impairments: tuple[Impairment, ...] = ()
    moves: tuple[Departure, ...] = ()
    moves_after: float = 0.0
    """Until this time, a job that kept a node for a committed step plans no departure without a notice."""
    trials: tuple[Trial, ...] = ()
    stop_reason: StopReason | None = None
    """None if only a user can stop the job. A plain text comes from an earlier version."""
    checkpoints: CheckpointPace = field(default_factory=CheckpointPace)
    uploading: CheckpointUpload | None = None
    noticed: tuple[NodeId, ...] = ()
    """Members with a notice for which the control plane has already requested a checkpoint."""
    notice_wanted: Step = NO_STEP
    """The lowest step of a checkpoint for AWS's newest notice."""
    upload_seconds: float | None = None
    """Upload time of the slowest shard of the newest checkpoint."""
    paused_microseconds_before_start: int = 0
    """Paused time before `started_at`."""
    node_count: int = 0
    """Nodes that have worked for the job since `accounted_until`."""
    member_count: int = 0
    """Nodes of the newest plan. 0 before the first plan and after a pause."""
    missing_count: int = 0
    """Nodes by which the newest plan is smaller than NodeCount."""
    reduced_count: int = 0
    """Nodes of the next generation if it will be smaller, else 0."""
    vacant_since: float | None = None
    """Time since which a member is missing. None while a person has paused the job."""
    capacity_wait: CapacityWait | None = None
    store_wait: Blocked | None = None
    """None once the nodes have loaded."""
    growth: Growth | None = None
    repeat: RepeatedWork | None = None
    gang_attempts: int = 0
    """Number of times in a row that the job gave up its wait for all of its nodes."""
    not_before: float | None = None
    """The job stands aside until this time: it neither holds nodes nor delays other jobs in the queue."""
    no_pause_before: float | None = None
    """The job does not pause before this time, because the last pause failed."""
    incident: IncidentRecord | None = None
    last_incident_ended_at: float | None = None
    awaited: AwaitedCommit | None = None
    commit_seconds: float = 0.0
    """Time from the end of the newest committed step to its commit, as the control plane observed them."""
    lapse: Lapse | None = None
    """Set while training goes on and the newest generation keeps no further step."""
    unstored: UnstoredOutputs | None = None
    """The outputs of the newest generation with outputs that are not in S3."""
    final_checkpoint: Step | None = None
    """The newest checkpoint at the success of all ranks, or `NO_STEP`.

    None before, for determinism checks, and for jobs that finished no step.
    """
    pace: Pace = field(default_factory=Pace)
    suspicion: Suspicion | None = None
    left_alone: bool = False
    """Whether Everstep observes a fault that it must not handle, because it only observes the job."""
    unwatched: tuple[float, float] | None = None
    """Start and end of the last period in which no control plane worked on the job."""
    spans: tuple[JobSpan, ...] = ()
    """The spans that a late report can still change (`accounting`), oldest first."""
    rehearsal: Rehearsals = field(default_factory=Rehearsals)
    states: SealedStates = field(default_factory=SealedStates)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord(Memo):
    """The stored record of a job. Times are Unix seconds."""

    state: JobState
    created_at: float
    stop_requested_at: float | None = None
    pause_requested_at: float | None = None
    """None once a person has resumed the job."""
    checkpoint_wanted: Step = NO_STEP
    """Lowest step of the checkpoint that a person has requested."""
    rehearsal_requested_at: float | None = None
    """A person's newest request."""
    accepted_step: Step = NO_STEP
    """The oldest step from which a person lets the job continue (AcceptLoss)."""
    accepted_after: Generation = NO_GENERATION
    """The generation after whose end the consent is valid (`RepeatedWork.after`)."""
    taken_over_by: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    generation: Generation = NO_GENERATION
    """The newest generation with a plan. 0 before the first plan."""
    issued_generation: Generation = NO_GENERATION
    """The highest generation number that any agent can have received."""
    base_step: Step = FIRST_STEP
    committed: Step = NO_STEP
    proposed: Step = NO_STEP
    boundary: Step = NO_STEP
    """The newest step that any rank of the newest generation has finished."""
    max_boundary: Step = NO_STEP
    """The newest step that any rank of any generation has finished."""
    target: Step = NO_STEP
    """The number of finished steps at which the script ends, as the ranks last reported."""
    committed_at: float | None = None
    failures: tuple[FailureRecord, ...] = ()
    microseconds: Mapping[str, int] = field(default_factory=dict[str, int])
    """Microseconds by bucket, up to `accounted_until`."""
    node_microseconds: int = 0
    """Working time, summed over nodes, up to `accounted_until`."""
    accounted_until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobObserved:
    """The input of one decision about a job, except its specification (`JobSpec`) and the `Policy`."""

    record: JobRecord
    plan: GenerationPlan | None
    """The plan of `record.generation`."""
    lineage: tuple[GenerationRecord, ...]
    checkpoints: tuple[CheckpointRecord, ...]
    """The newest ones on the path of the newest started generation, and the initial one."""
    assigned: tuple[NodeId, ...]
    """The order is that of assignment."""
    nodes: Mapping[NodeId, NodeObserved]
    """All nodes that are assigned or named in the plan, and possibly others of the fleet."""
    dropped_checkpoints: frozenset[tuple[Generation, Step]] = frozenset()
    """Checkpoints that must get no manifest again, although agents may still report their shards."""
    price_usd_per_hour: float | None = None
    drill: DrillObserved | None = None
    is_admitted: bool = False
    gives_way_to: str = ""
    """The job of higher priority for which this job must release all of its nodes."""
    keep_count: int | None = None
    """Number of nodes that the first job of the queue leaves to this job."""
    returns_to: str = ""
    """The job that receives the nodes beyond `keep_count`."""
    queue_words: str = "waits in the queue"
    """Valid while the job waits in the queue."""
    newest_node_at: float | None = None
    """Unix time at which the control plane first observed the fleet's newest instance."""
    spare_count: int = 0
    """Spares that can replace a node immediately."""
    listing: StoreListing | None = None
    """None before the first listing, and unless the job waits for consent."""
    is_fleet_blind: bool = False
    """Whether most of the fleet is silent while AWS reports its instances running. Silence then proves nothing."""
    lack_reasons: tuple[Reason, ...] = ()
    """Empty if no launch fails."""
    failed_launches: FailedLaunches | None = None
    """None while launches succeed, and if a person suspended them."""
    launch_failed_at: float | None = None
    """Unix seconds. None while launches succeed."""
    open_fleets: frozenset[FleetName] = frozenset()
    encrypts_peers: bool = False
