"""The results of decisions: what to store and which actions to execute.

A decision has two parts. The control plane first writes the stored part (`record`, `plan`, `incidents`, `events` …) in
one transaction, under its lease. Then it executes the actions: it sends messages to agents and calls AWS. Each action
is idempotent and follows from stored state: one pass stores a state, and the next pass acts on it. A control plane that
crashes between both parts therefore repeats the actions after its restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from control_plane.core.observed.fleets import NodeRecord, Vacancies
from control_plane.core.observed.incidents import IncidentRecord
from control_plane.core.observed.jobs import JobRecord
from control_plane.core.observed.nodes import Implication
from control_plane.core.observed.steps import DamagedCheckpoint
from everstep.protocol.agent_messages import (
    HaltRanks,
    KeepSources,
    Prepare,
    Release,
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
    message: Prepare | Start | StopTraining | HaltRanks | TakeCheckpoint | TakeStacks | Release | KeepSources


@dataclass(frozen=True, slots=True, kw_only=True)
class SendLoad:
    """Send a node the plan of its generation. The executor adds the generation's key."""

    node_id: NodeId
    plan: GenerationPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PutManifest:
    """Write the manifest that turns uploaded shards into a checkpoint."""

    at: ObjectReference
    manifest: CheckpointManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class SetDesired:
    """Set a group's desired capacity, either to a higher value or to the number of instances that the group has."""

    group: str
    desired_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminateMember:
    """Terminate one named instance, or remove an instance that has already ended from the group."""

    group: str
    node_id: NodeId
    decrement: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RebootMember:
    """Reboot one named instance, once each time that its node enters state REBOOTING.

    `since` is the time at which the node entered this state. It distinguishes one reboot from the next.
    """

    group: str
    node_id: NodeId
    since: float
    reason: str


def reboot_key(node_id: NodeId, since: float) -> str:
    """Return the key of the stored intent to reboot a node.

    `since` is the time at which the node entered state REBOOTING. The intent under this key shows whether EC2 accepted
    the reboot.
    """
    return f"reboot/{node_id}/{since:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SendKeepEvidence:
    """Command an agent to upload its own log and its ranks' output streams to the object store.

    The fleet sends it to nodes that a person will inspect.
    """

    node_id: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteTermination:
    """Permit AWS to terminate an instance immediately although a terminating hook holds it."""

    group: str
    hook: str
    node_id: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldTermination:
    """Extend a terminating hook by its timeout, because the upload of the job's last step is not complete."""

    group: str
    hook: str
    node_id: NodeId
    seconds: float
    """The hook's timeout in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryLaunch:
    """Request again the capacity that a group already desires, after a failed launch."""

    group: str
    desired_count: int
    failed_at: float
    """Time at which the newest launch failed, in Unix seconds. Each failure causes at most one retry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeLaunch:
    """Resume a group's launches that AWS has suspended."""

    group: str
    reason: str
    """AWS's reason for the suspension."""


JobAction = Send | SendLoad | PutManifest
MemberAction = SetDesired | TerminateMember | RebootMember | CompleteTermination
"""Actions that change the group's members or their state.

After such an action, the control plane ignores earlier answers of AWS about the group.
"""
GroupAction = MemberAction | HoldTermination | RetryLaunch | ResumeLaunch
"""Actions on a fleet's group or its instances.

The executor stores an intent before each of them.
"""
FleetAction = GroupAction | Send | SendKeepEvidence
Action = JobAction | FleetAction


@dataclass(frozen=True, slots=True, kw_only=True)
class EventDraft:
    """One entry for the event history."""

    type: str
    message: str
    node_id: NodeId | None = None
    run: RunId | None = None
    """The run of the job that the event is about.

    An event about a node names the job that the node works for, or last worked for. Members of other projects must not
    read this event.
    """
    detail: Mapping[str, object] = field(default_factory=dict[str, object])
    """Details that are too long for the message. JSON values only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision of one pass over a job."""

    record: JobRecord
    """The record to store. Without a change, it equals the observed record."""
    actions: tuple[JobAction, ...] = ()
    plan: GenerationPlan | None = None
    """The plan of a new generation, to store with the record."""
    fleet: FleetName | None = None
    """The fleet to whose queue the job moves. None: the job stays in its fleet."""
    incidents: tuple[IncidentRecord, ...] = ()
    """Incidents that this pass opened, changed or closed."""
    implications: tuple[Implication, ...] = ()
    """Entries that this pass adds to the histories of nodes, because incidents involved these nodes."""
    damaged: tuple[DamagedCheckpoint, ...] = ()
    """Checkpoints that a failed load proved damaged."""
    events: tuple[EventDraft, ...] = ()
    requeue_after_seconds: float = 1.0

    @property
    def reason(self) -> str:
        """Reason for the job's present state."""
        return self.record.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetDecision:
    """The decision of one pass over a fleet."""

    records: tuple[NodeRecord, ...] = ()
    """Changed rows of the node table."""
    actions: tuple[FleetAction, ...] = ()
    desired_count: int = 0
    """The number of nodes that the fleet needs."""
    vacancies: Vacancies = ()
    """Vacancies of the group, to store for the next pass."""
    is_frozen: bool = False
    is_blind: bool = False
    """Whether most of the fleet's agents are silent. A person may have lifted the resulting freeze."""
    reason: str = ""
    implications: tuple[Implication, ...] = ()
    """Entries that this pass adds to the histories of nodes without a job."""
    events: tuple[EventDraft, ...] = ()
    forgotten: tuple[NodeId, ...] = ()
    """Nodes that have ended for good. The control plane deletes the reports of their agents."""
    is_empty: bool = False
    """Whether a fleet that is being deleted has no more nodes. The control plane then deletes the fleet itself."""
