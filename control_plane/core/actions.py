"""The results of decisions about jobs and fleets: what to store, and which actions to execute.

Invariant: each action is idempotent and follows from the stored part of the decision (`record`, `plan`, `incidents` …),
which is written first. After a crash in between, the next control plane decides on the same actions again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from control_plane.core.observed.causes import Reason
from control_plane.core.observed.fleets import NodeRecord, Vacancies
from control_plane.core.observed.incidents import IncidentRecord
from control_plane.core.observed.jobs import JobRecord
from control_plane.core.observed.nodes import Implication
from control_plane.core.observed.reasons import JobReason, Message
from control_plane.core.observed.rolls import RollProgress
from control_plane.core.observed.spans import JobSpan
from control_plane.core.observed.steps import DoubtedCheckpoint
from everstep.protocol.agent_messages import (
    HaltRanks,
    KeepSources,
    Prepare,
    Rehearse,
    Release,
    RunBurnIn,
    Start,
    StopTraining,
    TakeCheckpoint,
    TakeStacks,
)
from everstep.protocol.ids import FleetName, NodeId, RunId
from everstep.protocol.manifest import CheckpointManifest
from everstep.protocol.plan import GenerationPlan, ObjectReference


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a node's agent."""

    node_id: NodeId
    message: (
        Prepare
        | Start
        | StopTraining
        | HaltRanks
        | TakeCheckpoint
        | TakeStacks
        | Rehearse
        | Release
        | KeepSources
        | RunBurnIn
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SendLoad:
    """Send a node the stored plan of its generation. The executor adds the key by which agents trust each other."""

    node_id: NodeId
    plan: GenerationPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PutManifest:
    """Write the manifest of a checkpoint to S3, after the upload of all its shards."""

    at: ObjectReference
    manifest: CheckpointManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class SetDesired:
    """Set an Auto Scaling group's desired capacity, never below the number of its existing instances."""

    group: str
    desired_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchInstances:
    """Launch instances, and return their ids and errors at once. A repeated action has the same key, count and zone."""

    group: str
    key: str
    count: int
    desired_count: int
    """Desired capacity of the group after the call."""
    zone: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminateMember:
    """Terminate one instance by its id, or remove an ended instance from its Auto Scaling group."""

    group: str
    node_id: NodeId
    decrement: bool
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RebootMember:
    """Reboot one instance, once for each Unix time `since` at which its node enters the state REBOOTING."""

    group: str
    node_id: NodeId
    since: float
    reason: Reason


def reboot_key(node_id: NodeId, since: float) -> str:
    """Return the key of the database row in which the control plane records a reboot before it calls EC2."""
    return f"reboot/{node_id}/{since:.3f}"


LAUNCH_CALL = "LaunchInstances"
"""The control plane stores a call of LaunchInstances under this name before it makes the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendKeepEvidence:
    """Order an agent to upload its own log and its ranks' output to S3, before a person inspects the node."""

    node_id: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteTermination:
    """Permit AWS to terminate an instance immediately although a terminating lifecycle hook holds it."""

    group: str
    hook: str
    node_id: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldTermination:
    """Extend a terminating lifecycle hook by its timeout, so that the job can store its last step."""

    group: str
    hook: str
    node_id: NodeId
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryLaunch:
    """Request again the capacity that the Auto Scaling group already desires, after a failed launch."""

    group: str
    desired_count: int
    failed_at: float
    """Unix seconds. Each failed launch causes at most one retry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeLaunch:
    """Let an Auto Scaling group launch instances again after AWS has suspended its launches."""

    group: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectMembers:
    """Protect instances from scale-in that their group launched before it protected new instances."""

    group: str
    node_ids: tuple[NodeId, ...]


JobAction = Send | SendLoad | PutManifest
MemberAction = SetDesired | LaunchInstances | TerminateMember | RebootMember | CompleteTermination
"""Earlier answers of AWS about the group are outdated after such an action, and the control plane ignores them."""
GroupAction = MemberAction | HoldTermination | RetryLaunch | ResumeLaunch | ProtectMembers
"""The executor records the call in the database before it executes such an action."""
FleetAction = GroupAction | Send | SendKeepEvidence


@dataclass(frozen=True, slots=True, kw_only=True)
class EventDraft:
    """One entry for the event history."""

    type: str
    message: Message
    reason: Reason | None = None
    """The stored message contains the sentence of this reason after a colon."""
    node_id: NodeId | None = None
    run: RunId | None = None
    """Only users of this job's project may read the event. For an event about a node: its current or last job."""
    detail: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision about a job: what the job loop stores, and which actions it then executes."""

    record: JobRecord
    actions: tuple[JobAction, ...] = ()
    plan: GenerationPlan | None = None
    fleet: FleetName | None = None
    """The fleet to whose queue the job moves. None if the job stays in its fleet."""
    incidents: tuple[IncidentRecord, ...] = ()
    implications: tuple[Implication, ...] = ()
    doubted: tuple[DoubtedCheckpoint, ...] = ()
    settled_spans: tuple[tuple[JobSpan, int], ...] = ()
    """Spans that no later report can change, with their ends. The record no longer contains them."""
    events: tuple[EventDraft, ...] = ()
    requeue_after_seconds: float = 1.0

    @property
    def reason(self) -> JobReason:
        """The reason for the job's current state."""
        return self.record.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetDecision:
    """The decision about a fleet: what the fleet loop stores, and which actions it then executes."""

    records: tuple[NodeRecord, ...] = ()
    actions: tuple[FleetAction, ...] = ()
    desired_count: int = 0
    vacancies: Vacancies = ()
    is_frozen: bool = False
    is_blind: bool = False
    """Whether most of the agents are silent, even if a person has confirmed that the silent nodes are lost.

    False deletes the stored confirmation.
    """
    reasons: tuple[Reason, ...] = ()
    implications: tuple[Implication, ...] = ()
    events: tuple[EventDraft, ...] = ()
    forgotten: tuple[NodeId, ...] = ()
    """Nodes whose instances have ended. The control plane deletes the last reports of their agents."""
    roll_progress: RollProgress | None = None
    is_empty: bool = False
    """Whether the fleet is being deleted and has no nodes. The control plane then deletes the fleet's row."""
