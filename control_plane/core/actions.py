"""What a decision asks for.

A decision has two halves. The stored half (`record`, `plan`, `incidents`, `events` …) is written in one transaction
under the lease. The actions reach outside; each is idempotent and follows from what is stored already, so a control
plane that dies between the two halves loses nothing: a state is stored in one pass and acted upon in the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from control_plane.core.observed.fleets import NodeRecord, Vacancies
from control_plane.core.observed.incidents import IncidentRecord
from control_plane.core.observed.jobs import JobRecord
from control_plane.core.observed.nodes import Implication
from everstep.protocol.ids import FleetName, Generation, JobName, NodeId, RunId, Step
from everstep.protocol.manifest import CheckpointManifest
from everstep.protocol.plan import GenerationPlan, ObjectReference, SourceArchive


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPrepare:
    """Ask a node to promise a generation."""

    node_id: NodeId
    job: JobName
    run: RunId
    generation: Generation
    parent: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class SendLoad:
    """Give a node the plan; its key is added by the executor."""

    node_id: NodeId
    plan: GenerationPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SendStart:
    """Let a node start its ranks."""

    node_id: NodeId
    job: JobName
    run: RunId
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class SendStop:
    """Ask the coordinator for an agreed stop."""

    node_id: NodeId
    job: JobName
    run: RunId
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class SendHalt:
    """Let a node stop its ranks at once: the generation is over."""

    node_id: NodeId
    job: JobName
    run: RunId
    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTakeCheckpoint:
    """Ask the coordinator to have a step, or a later one, uploaded."""

    node_id: NodeId
    job: JobName
    run: RunId
    generation: Generation
    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTakeStacks:
    """Let a node look what its ranks are doing."""

    node_id: NodeId
    job: JobName
    run: RunId
    generation: Generation
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRelease:
    """Let a node forget a run."""

    node_id: NodeId
    run: RunId


@dataclass(frozen=True, slots=True, kw_only=True)
class PutManifest:
    """Make a set of uploaded shards a checkpoint."""

    at: ObjectReference
    manifest: CheckpointManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class SetDesired:
    """Raise a group's desired capacity, or lower it to what is there."""

    group: str
    desired_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminateMember:
    """End one named instance, or remove one that has ended already."""

    group: str
    node_id: NodeId
    decrement: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RebootMember:
    """Reboot one named instance. Once: `since` tells one stay in REBOOTING from another."""

    group: str
    node_id: NodeId
    since: float
    reason: str


def reboot_key(node_id: NodeId, since: float) -> str:
    """Return the key of the intent to reboot a node that is REBOOTING since then: who looks for it is told whether EC2 took it."""
    return f"reboot/{node_id}/{since:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SendKeepEvidence:
    """Let an agent put its own log and its ranks' streams into the object store, for a person who is to look at the node."""

    node_id: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class SendKeepSources:
    """Let a spare hold the source archives of its fleet's jobs ready, and no others."""

    node_id: NodeId
    sources: tuple[SourceArchive, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteTermination:
    """Let an instance go that a terminating hook holds."""

    group: str
    hook: str
    node_id: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldTermination:
    """Let a terminating hook hold an instance for another of its timeouts: its last step is still being saved."""

    group: str
    hook: str
    node_id: NodeId
    seconds: float
    """The hook's timeout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryLaunch:
    """Ask a group once more for the capacity that it desires already: a launch has failed."""

    group: str
    desired_count: int
    failed_at: float
    """When the newest launch failed: each failure is answered once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeLaunch:
    """Lift the suspension that AWS has put on a group's launches."""

    group: str
    reason: str
    """AWS's words for the suspension."""


JobAction = SendPrepare | SendLoad | SendStart | SendStop | SendHalt | SendTakeCheckpoint | SendTakeStacks | PutManifest
MemberAction = SetDesired | TerminateMember | RebootMember | CompleteTermination
"""What changes who is in a fleet's group, or how it fares: what AWS said before is void."""
GroupAction = MemberAction | HoldTermination | RetryLaunch | ResumeLaunch
"""What is asked of a fleet's group or its instances: each is an intent first."""
FleetAction = GroupAction | SendHalt | SendRelease | SendKeepEvidence | SendKeepSources
Action = JobAction | FleetAction


@dataclass(frozen=True, slots=True, kw_only=True)
class EventDraft:
    """Something worth a line in the history."""

    type: str
    message: str
    node_id: NodeId | None = None
    run: RunId | None = None
    """Of a fleet's decision: of the job that the node works for, or did until now.

    Others' people are not to read what befell it.
    """
    detail: Mapping[str, object] = field(default_factory=dict)
    """What is too long for a message; JSON values only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What one pass over a job decided."""

    record: JobRecord
    """The job as it is to be stored; equal to the observed one when nothing changes."""
    actions: tuple[JobAction, ...] = ()
    plan: GenerationPlan | None = None
    """A new generation's plan, to be stored with the record."""
    fleet: FleetName | None = None
    """Where the job waits from now on; None: where it is."""
    incidents: tuple[IncidentRecord, ...] = ()
    """Opened, changed or closed."""
    implications: tuple[Implication, ...] = ()
    """Lines for the histories of nodes."""
    events: tuple[EventDraft, ...] = ()
    requeue_after_seconds: float = 1.0

    @property
    def reason(self) -> str:
        """Why the job is in that state."""
        return self.record.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetDecision:
    """What one pass over a fleet decided."""

    records: tuple[NodeRecord, ...] = ()
    """Rows of the node table that change."""
    actions: tuple[FleetAction, ...] = ()
    desired_count: int = 0
    """What the fleet needs."""
    vacancies: Vacancies = ()
    """Empty places of the group, to be stored."""
    is_frozen: bool = False
    is_blind: bool = False
    """Most of it is silent, whatever a person has said about that."""
    reason: str = ""
    implications: tuple[Implication, ...] = ()
    """Lines for the histories of nodes that no job had."""
    events: tuple[EventDraft, ...] = ()
    forgotten: tuple[NodeId, ...] = ()
    """Nodes that will not come back: their agents' views are dropped."""
    is_empty: bool = False
    """It is being deleted and its last node is gone: the fleet itself can be forgotten."""
