"""The results of decisions about jobs and fleets: what to store, and which actions to execute.

The control plane decides about each job and each fleet at short intervals. A decision has two parts. The control plane
first writes the stored part (`record`, `plan`, `incidents`, `events` …) in one transaction. Then it executes the
actions: it sends messages to agents and calls AWS. Each action is idempotent and follows from stored state. If a
control plane crashes between the two parts, its successor therefore decides on the same actions again.
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
    """Send a node the stored plan of its generation.

    The executor (`loop.executor`) adds the key with which the agents of the generation authenticate each other.
    """

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
    """Launch instances into an Auto Scaling group. AWS raises the desired capacity, and returns ids and errors at once.

    A repeated action has the same key, count and zone, so that AWS launches only once.
    """

    group: str
    key: str
    count: int
    desired_count: int
    """Desired capacity that the group has after the call."""
    zone: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminateMember:
    """Terminate one instance by its id, or remove an instance that has already ended from its Auto Scaling group."""

    group: str
    node_id: NodeId
    decrement: bool
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RebootMember:
    """Reboot one instance by its id, once for each time that its node enters the state REBOOTING.

    `since` is the Unix time at which the node entered this state.
    """

    group: str
    node_id: NodeId
    since: float
    reason: Reason


def reboot_key(node_id: NodeId, since: float) -> str:
    """Return the key of the database row in which the control plane records a node's reboot before it calls EC2.

    `since` is the Unix time at which the node entered the state REBOOTING.
    """
    return f"reboot/{node_id}/{since:.3f}"


LAUNCH_CALL = "LaunchInstances"
"""Name under which the control plane stores a call of LaunchInstances before it makes the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendKeepEvidence:
    """Send an agent the order to upload its own log and its ranks' output to S3.

    The fleet loop sends this order to the agents of nodes that a person will inspect.
    """

    node_id: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteTermination:
    """Permit AWS to terminate an instance immediately although a terminating lifecycle hook holds it."""

    group: str
    hook: str
    node_id: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldTermination:
    """Extend a terminating lifecycle hook by its timeout, so that the job can store its last step before AWS ends the
    node.
    """

    group: str
    hook: str
    node_id: NodeId
    seconds: float
    """The hook's timeout in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryLaunch:
    """After a failed launch, request again the capacity that the Auto Scaling group already desires."""

    group: str
    desired_count: int
    failed_at: float
    """Time at which the newest launch failed, in Unix seconds. Each failed launch causes at most one retry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeLaunch:
    """Let an Auto Scaling group launch instances again after AWS has suspended its launches."""

    group: str
    reason: str
    """AWS's reason for the suspension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectMembers:
    """Protect instances of an Auto Scaling group from scale-in.

    An instance lacks protection if its group launched it before the group was set to protect new instances.
    """

    group: str
    node_ids: tuple[NodeId, ...]


JobAction = Send | SendLoad | PutManifest
MemberAction = SetDesired | LaunchInstances | TerminateMember | RebootMember | CompleteTermination
"""Actions that change the members of a fleet's Auto Scaling group, or the members' state.

After such an action, earlier answers of AWS about the group are outdated, and the control plane ignores them.
"""
GroupAction = MemberAction | HoldTermination | RetryLaunch | ResumeLaunch | ProtectMembers
"""Actions on a fleet's Auto Scaling group or on its instances.

Before it executes such an action, the executor records the intended call in the database.
"""
FleetAction = GroupAction | Send | SendKeepEvidence


@dataclass(frozen=True, slots=True, kw_only=True)
class EventDraft:
    """One entry for the event history."""

    type: str
    message: Message
    """What happened. Without `reason`, the whole message."""
    reason: Reason | None = None
    """Why it happened. The stored message contains its sentence after a colon."""
    node_id: NodeId | None = None
    run: RunId | None = None
    """The run of the job that the event is about. Only users of this job's project may read the event.

    An event about a node names the job that the node works for, or last worked for.
    """
    detail: Mapping[str, object] = field(default_factory=dict[str, object])
    """Details that are too long for the message. JSON values only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision about a job: what the job loop stores, and which actions it then executes."""

    record: JobRecord
    """The job's record to store. It equals the record from which the decision was made if nothing changed."""
    actions: tuple[JobAction, ...] = ()
    plan: GenerationPlan | None = None
    """The plan of a new generation, to store with the record."""
    fleet: FleetName | None = None
    """The fleet to whose queue the job moves. None means that the job stays in its fleet."""
    incidents: tuple[IncidentRecord, ...] = ()
    """Incidents that the decision opened, changed or closed."""
    implications: tuple[Implication, ...] = ()
    """Entries for the histories of nodes that were involved in incidents."""
    doubted: tuple[DoubtedCheckpoint, ...] = ()
    """Checkpoints whose content differed from the manifest when nodes loaded them."""
    settled_spans: tuple[tuple[JobSpan, int], ...] = ()
    """Spans of the job's time that no later report can change, with their ends. The record no longer contains them."""
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
    """Changed rows of the node table."""
    actions: tuple[FleetAction, ...] = ()
    desired_count: int = 0
    """The number of nodes that the fleet needs."""
    vacancies: Vacancies = ()
    """Instances that the Auto Scaling group desires but lacks, as input for the next decision about the fleet."""
    is_frozen: bool = False
    is_blind: bool = False
    """Whether most of the fleet's agents are silent, even if a person has confirmed that the silent nodes are lost.

    After the confirmation, the fleet acts on the silence again. The fleet loop deletes the confirmation when it stores
    a decision with False here. While automation is paused, True only keeps the confirmation.
    """
    reasons: tuple[Reason, ...] = ()
    """Why the fleet is frozen or waits, or how many nodes it keeps."""
    implications: tuple[Implication, ...] = ()
    """Entries for the fault histories of nodes that work for no job."""
    events: tuple[EventDraft, ...] = ()
    forgotten: tuple[NodeId, ...] = ()
    """Nodes whose instances have ended. The control plane deletes the last reports of their agents."""
    roll_progress: RollProgress | None = None
    """The progress of the fleet's newest roll (replacement or reboot of all its nodes). None without a roll."""
    is_empty: bool = False
    """Whether the fleet is being deleted and has no more nodes. If so, the control plane deletes the fleet's row."""
