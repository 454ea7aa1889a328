"""A job's specification, its stored record, and the input of one pass of its loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from control_plane.core.observed.drills import DrillObserved
from control_plane.core.observed.incidents import FailureRecord, IncidentRecord
from control_plane.core.observed.nodes import Cause, NodeObserved, Remedy
from control_plane.core.observed.steps import NO_GENERATION, NO_STEP, CheckpointRecord, GenerationRecord, RefusedSource
from control_plane.core.states import JobState
from everstep.protocol.ids import FIRST_STEP, FleetName, Generation, JobName, NodeId, RunId, Step
from everstep.protocol.plan import DEFAULT_MAX_SLOWDOWN, GenerationPlan, ObjectReference, ScriptPlan, Timeouts

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
    """A member that trains on and has something wrong: a fault of its own, or replicas that do not answer.

    Followed from pass to pass.
    """

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
