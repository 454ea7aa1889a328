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
    """One change that the control plane tried after repeated equal failures of a job (`core.breakers`).

    The change is either another node for the failing ranks, or the restore of an older step than in the last attempts.
    """

    kind: Literal["node", "state"]
    failure: FailureRecord
    """The last failure before the job changed the node or the state."""
    node_id: NodeId | None = None
    """The node whose ranks moved to another node. None if the job instead restored an older state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """A node that the job will not use again.

    The fleet loop removes the node from the job and applies the remedy, for example a reboot or a termination.
    """

    node_id: NodeId
    evidence: Fact | Tries
    may_terminate: bool
    """Whether AWS's report, or a fault that the node's live agent reports, permits termination.

    The fleet holds a node that is only unreachable, and never terminates it.
    """
    remedy: Remedy | None = None
    """Action of the fleet for the node. None means REPLACE if the node may be terminated, else HOLD."""

    @property
    def is_to(self) -> Remedy:
        """The fleet's action for the node after the job gave it up. REPLACE and REBOOT require `may_terminate`."""
        if self.may_terminate:
            return self.remedy or Remedy.REPLACE
        if self.remedy is Remedy.RELEASE or self.remedy is Remedy.RETIRE:
            return self.remedy
        return Remedy.HOLD


@dataclass(frozen=True, slots=True, kw_only=True)
class Impairment:
    """A member that continues to train with a problem.

    Either the member's own agent reports a fault, or the member does not answer other members.
    """

    node_id: NodeId
    is_out_of_view: bool
    """True if the node does not answer other members. False if its own agent reports a fault."""
    since: float
    boundary: Step
    stepped_at: float
    """Unix time at which the control plane last updated `boundary`, the step that training had reached.

    The control plane updates `boundary` each time training has advanced by two more steps.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A member that the job gives up as planned: all ranks first stop at one step, so no step is lost (ADR 0016)."""

    node_id: NodeId
    evidence: Fact
    cause: Cause
    remedy: Remedy
    may_terminate: bool
    asked_at: float | None = None
    """Unix time at which the job loop decided to ask all ranks to stop. The job cannot cancel this stop."""
    what: str = ""
    """The code of the node's fault, for example `gpu_lost`. Empty if the node has no fault."""
    is_kept: bool = False
    """Whether the job kept the node, because it would otherwise have lost a committed step."""
    has_left: bool = False
    """Whether the fleet has removed the node from the job.

    If the fleet assigns the node to the job again after a reboot, this departure no longer applies.
    """
    is_history: bool = False
    """Whether the only reason for the departure is that the node was involved in too many incidents (it is a lemon).

    The job gives the node up during the recovery from the newest of these incidents.
    """
    ends_at: float | None = None
    """Time at which AWS may end the instance, in Unix seconds. None if no source names a time."""

    @property
    def is_announced(self) -> bool:
        """Whether the job gives the node up because AWS announced the end of its instance, not for a fault."""
        return self.cause is Cause.NOTICE

    @property
    def is_returned(self) -> bool:
        """Whether the job returns the node to its fleet and continues without a replacement."""
        return self.cause is Cause.RETURNED

    @property
    def is_faulty(self) -> bool:
        """Whether the job gives up the node because the node's agent reports a fault of the node now."""
        return self.cause is Cause.NODE_FAULT and self.may_terminate and not self.is_history


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSilence:
    """The silence of a node's agent, and the progress of training at the start of this silence."""

    node_id: NodeId
    since: float
    boundary: Step
    committed: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Ready nodes by which a running job can grow to more nodes.

    The fleet has assigned these nodes to the job, but the running generation does not use them.
    """

    node_ids: tuple[NodeId, ...]
    """The ready nodes by which the job can grow, sorted."""
    since: float
    """Time since which all nodes in `node_ids` have been ready, in Unix seconds."""
    asked_at: float | None = None
    """Unix time at which the job loop decided to ask all ranks to stop. The job cannot cancel this stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A job's longest times without progress after which the ranks continued by themselves.

    `core.hangs` derives its limits from these times.
    """

    world_size: int = 0
    longest: Mapping[str, float] = field(default_factory=dict[str, float])
    """The longest time without progress in seconds, by phase of the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """A suspected hang: a rank has made no progress for longer than the first limit of `core.hangs`."""

    since: float
    """Unix time of the last progress of the rank that has made no progress for the longest time."""
    began_at: float
    """Time at which a rank exceeded the first limit, in Unix seconds."""
    number: int
    """The number of the newest request to agents for the stacks of their ranks."""
    asked_at: float
    """Time at which the control plane first sent request `number`."""
    is_answered: bool = False
    limit_seconds: float = 0.0
    """Time without progress after which the ranks' stacks can prove a hang.

    0 in records that an older server wrote.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedLaunches:
    """The launches of a fleet's instances that have failed since the last successful launch."""

    message: str
    """AWS's message about the newest failed launch."""
    failed_count: int
    """Number of Everstep's launch attempts that have failed, at least 1: the first launch and Everstep's retries.

    Retries by Auto Scaling itself do not count.
    """
    is_shortage: bool = False
    """Whether AWS has too few instances of the type."""
    next_attempt_at: float
    """Unix time at which Everstep next requests the instances. A time in the past means that the attempt is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityWait(FailedLaunches):
    """A job's wait for instances whose launches fail, as the job loop stores it with each decision."""

    missing_count: int
    """Number of nodes that the job lacks, at least 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitedCommit:
    """The first step that was proposed since the newest commit. It is the next step that the job keeps."""

    generation: Generation
    kept: Step
    """The newest step that the job keeps."""
    step: Step
    passed_at: float | None = None
    """Unix time at which training had first finished `step`. None before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnstoredOutputs:
    """The output files of a job's ranks that are not in S3."""

    generation: Generation
    """The generation of outputs that name none. Older agents name none."""
    outputs: tuple[OutputFailure, ...]
    """At most `MAX_NAMED_OUTPUTS` of them."""
    count: int


MAX_NAMED_OUTPUTS = 50
"""Maximum number of unstored outputs that a job's record names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memo:
    """The part of a job's record that the database stores in one JSON column.

    A new field needs a default value: records that an earlier version of the server stored lack this field, and get the
    default.
    """

    state_since: float
    """Time at which the job entered its state, in Unix seconds."""
    reason: JobReason = ""
    """Why the job is in its state, and what it does. Records of an earlier version have only the sentence."""
    boundary_at: float | None = None
    """Unix time at which the first rank finished step `JobRecord.boundary`, as the rank reported it.

    None if no rank reported this time.
    """
    stepped_at: float | None = None
    """Time at which a rank completed the first new step of the newest generation, in Unix seconds.

    The time stamp is the rank's own. None until a rank has completed that step.
    """
    progress_at: float = 0.0
    asked: tuple[tuple[NodeId, float], ...] = ()
    """Members that have not promised to join the issued generation, each with the Unix time of the first request."""
    exclusions: tuple[Exclusion, ...] = ()
    silences: tuple[AgentSilence, ...] = ()
    refused: tuple[RefusedSource, ...] = ()
    """Copies of shards that plans skip by a decision of the job. Plans also skip those in which two nodes agree."""
    failed_reads: tuple[FailedRead, ...] = ()
    """The loads that failed because of their sources, since the last commit (`core.witnesses`)."""
    impairments: tuple[Impairment, ...] = ()
    moves: tuple[Departure, ...] = ()
    moves_after: float = 0.0
    """Unix time before which the job plans to give up no further node, unless AWS announced the node's end.

    It is set when the job keeps a node, because giving it up would lose a committed step.
    """
    trials: tuple[Trial, ...] = ()
    stop_reason: StopReason | None = None
    """The limit or the finding that stops the job. None if only a user can stop it. A text: an earlier version's."""
    checkpoints: CheckpointPace = field(default_factory=CheckpointPace)
    """When the next checkpoint is due, as the coordinator reported last."""
    uploading: CheckpointUpload | None = None
    """The newest checkpoint that is being uploaded, as the agents last reported; None if no upload runs."""
    noticed: tuple[NodeId, ...] = ()
    """Members whose end AWS has announced, and for which the control plane has already requested a checkpoint."""
    notice_wanted: Step = NO_STEP
    """The lowest step that a checkpoint for AWS's newest notice may have. `NO_STEP` without a notice."""
    upload_seconds: float | None = None
    """Upload time of the slowest shard of the newest checkpoint, in seconds.

    None before the first checkpoint.
    """
    paused_microseconds_before_start: int = 0
    """Time for which the job was paused before its ranks were first started (`started_at`)."""
    node_count: int = 0
    """Number of nodes that have worked for the job since the last update of its ledger (`accounted_until`)."""
    member_count: int = 0
    """Number of nodes of the newest plan. 0 before the first plan and after a pause."""
    missing_count: int = 0
    """Number of nodes by which the newest plan is smaller than the specification's NodeCount."""
    reduced_count: int = 0
    """Number of nodes of the next generation, if the job will continue on fewer nodes than before. 0 otherwise."""
    vacant_since: float | None = None
    """Unix seconds since which the next generation lacks a member, or the job waits for its first nodes.

    None if no member is missing, and while a person has paused the job.
    """
    capacity_wait: CapacityWait | None = None
    """The wait for instances whose launches fail. None if the job lacks no node or no launch has failed."""
    store_wait: Blocked | None = None
    """Why S3, IAM or KMS prevents the restore, and since when. None once the nodes have loaded."""
    growth: Growth | None = None
    """Ready nodes by which the running job can grow. None without such nodes."""
    repeat: RepeatedWork | None = None
    """The choice for which the job waits. None while it waits for no such choice."""
    gang_attempts: int = 0
    """Number of times in a row that the job gave up its wait for all of its nodes. 0 once it has had all of them."""
    not_before: float | None = None
    """Unix time until which the job stands aside: it neither holds nodes nor delays other jobs in the queue."""
    no_pause_before: float | None = None
    """Unix time before which the control plane requests no pause of the job, because the last pause failed."""
    incident: IncidentRecord | None = None
    """The job's open incident, or None."""
    last_incident_ended_at: float | None = None
    """Unix time at which the job's last closed incident ended. None before the first."""
    awaited: AwaitedCommit | None = None
    commit_seconds: float = 0.0
    """Seconds from the end of the newest committed step to its commit, as the control plane observed them."""
    lapse: Lapse | None = None
    """Set while training goes on and the newest generation keeps no further step."""
    unstored: UnstoredOutputs | None = None
    """Outputs of the newest generation that left outputs which are not in S3."""
    final_checkpoint: Step | None = None
    """Step of the newest checkpoint when all ranks had ended with success; `NO_STEP` without a checkpoint.

    None before, and for a job that makes no checkpoint at its end.
    """
    pace: Pace = field(default_factory=Pace)
    suspicion: Suspicion | None = None
    left_alone: bool = False
    """Whether Everstep observes a fault that it must not handle, because it only observes the job."""
    unwatched: tuple[float, float] | None = None
    """Start and end, in Unix seconds, of the last period in which no control plane worked on the job."""
    spans: tuple[JobSpan, ...] = ()
    """What the job did lately, as far as a late report can still change it (`accounting`). Oldest first."""
    rehearsal: Rehearsals = field(default_factory=Rehearsals)
    states: SealedStates = field(default_factory=SealedStates)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord(Memo):
    """The stored record of a job. `core.job.decide` receives this record and returns the changed record to store."""

    state: JobState
    created_at: float
    stop_requested_at: float | None = None
    pause_requested_at: float | None = None
    """Time at which a person paused the job. None if no person paused the job, or once a person has resumed it."""
    checkpoint_wanted: Step = NO_STEP
    """Lowest step of the checkpoint that a person has requested. `NO_STEP` without a request."""
    rehearsal_requested_at: float | None = None
    """Unix time of a person's newest request for a rehearsal (RehearseTrainingJob). None without a request."""
    accepted_step: Step = NO_STEP
    """The oldest step from which a person lets the job continue (AcceptLoss). `NO_STEP` without a consent."""
    accepted_after: Generation = NO_GENERATION
    """The generation after whose end the consent is valid (`RepeatedWork.after`)."""
    taken_over_by: str = ""
    """The person who has taken the job over (TakeOverTrainingJob). Empty if Everstep makes the decisions about it."""
    started_at: float | None = None
    ended_at: float | None = None
    generation: Generation = NO_GENERATION
    """Number of the newest generation with a plan. 0 before the first plan."""
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
    """The sums of all spans of the job's time: microseconds by bucket, up to `accounted_until`."""
    node_microseconds: int = 0
    """Time that nodes have worked for the job, summed over nodes, up to `accounted_until`."""
    accounted_until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobObserved:
    """The input of one decision about a job, except its specification (`JobSpec`) and the `Policy`."""

    record: JobRecord
    plan: GenerationPlan | None
    """The plan of the newest generation (`record.generation`). None before the first plan."""
    lineage: tuple[GenerationRecord, ...]
    checkpoints: tuple[CheckpointRecord, ...]
    """The complete checkpoints of the job."""
    assigned: tuple[NodeId, ...]
    """Nodes that the fleet loop has assigned to this job, in the order of assignment."""
    nodes: Mapping[NodeId, NodeObserved]
    """All nodes that are assigned to the job or named in the plan. Other nodes of the fleet may also be in the mapping.
    """
    dropped_checkpoints: frozenset[tuple[Generation, Step]] = frozenset()
    """Generation and step of each checkpoint that a person has deleted."""
    price_usd_per_hour: float | None = None
    """The hourly price of one node of the fleet."""
    drill: DrillObserved | None = None
    """The job's open drill (a fault that a person ordered). None without a drill."""
    is_admitted: bool = False
    gives_way_to: str = ""
    """Description of the job of higher priority for which this job must release all of its nodes.

    Empty if no such job exists.
    """
    keep_count: int | None = None
    """Number of nodes with which the job must continue, because the first job of the queue needs its other nodes.

    None if the job may keep its nodes.
    """
    returns_to: str = ""
    """Description of the job for which this job returns nodes. Empty if `keep_count` is None."""
    queue_words: str = "waits in the queue"
    """Text about the job's position in the queue and the jobs ahead of it. Valid while the job waits."""
    newest_node_at: float | None = None
    """Unix time at which the control plane first observed the fleet's newest instance. None if there was none."""
    spare_count: int = 0
    """Number of the fleet's spares that can replace a node immediately."""
    listing: StoreListing | None = None
    """The newest listing of the run in S3. None before the first one, and unless the job waits for consent."""
    is_fleet_blind: bool = False
    """Whether most of the fleet is silent while AWS reports its instances running. If so, silence proves nothing."""
    lack_reasons: tuple[Reason, ...] = ()
    """Why the fleet has no nodes for the job. Empty if no launch fails."""
    failed_launches: FailedLaunches | None = None
    """The fleet's failed launches that Everstep retries. None while launches succeed, and if a person suspended them.
    """
    launch_failed_at: float | None = None
    """Time of the fleet's newest failed launch, in Unix seconds. None while launches succeed."""
    open_fleets: frozenset[FleetName] = frozenset()
    """The fleets of `JobSpec.fleets` that accept jobs now."""
    encrypts_peers: bool = False
    """Whether agents of the next generation use TLS for the connections between its nodes (`core.encryption`)."""
