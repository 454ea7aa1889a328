"""API models: incidents, and the sources from which a recovery restored the shards."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from control_plane.accounts.incidents import IncidentOutcome, MilestoneKind
from control_plane.api.schemas.common import CapacityWait, OfRun, Request, Shape, ShortText
from control_plane.api.schemas.duties import DutyAction
from control_plane.api.schemas.notes import Note
from control_plane.core.observed.nodes import Cause
from control_plane.core.similar_incidents import Likeness
from control_plane.core.states import IncidentPhase


class RankSource(Shape):
    """The source from which a range of ranks restored their shards."""

    source: Literal["local", "peer", "parity", "s3"]
    first_rank: int
    last_rank: int


class EvidenceFact(Shape):
    """The values of a sentence of Evidence."""

    kind: str
    """Type of the fact, for example `InstanceEnded` or `RankEnded`. `Recorded`: only the sentence is stored."""
    node_ids: list[str]
    ranks: list[int]
    code: str | None
    """Code of the fault that an agent reported, or EC2's code of the state reason."""
    xid: int | None
    exit_code: int | None
    """Exit code of the rank, or the negated signal number."""


class Milestone(Shape):
    """A moment of an incident."""

    kind: MilestoneKind
    time: datetime
    description: str


class IncidentFields(OfRun):
    """The fields of an incident that a list of similar incidents contains."""

    incident_id: str
    decision: str
    lost_steps: int | None
    """Number of steps that training had to repeat: ReachedStep − FromStep."""
    faulted_instance_ids: list[str]
    """Instances on which the failure occurred, whether or not the job lost them.

    Either ranks, the agent, network connections or hardware of the instance failed, or AWS announced the end or a
    maintenance of the instance. Empty if Everstep cannot determine the instances.
    """
    opened_at: datetime
    closed_at: datetime | None
    outcome: IncidentOutcome
    """How the incident ended."""


class Incident(IncidentFields):
    """A failure and its recovery."""

    headline: str
    """What failed, in a few words without a full stop."""
    project: str
    cause: Cause
    phase: IncidentPhase
    evidence: list[str]
    evidence_facts: list[EvidenceFact]
    """The values of each sentence of Evidence, in the same order."""
    reason: str
    restore_source: Literal["local", "peer", "parity", "s3"] | None
    """The most distant source from which any rank was restored.

    The order is the own node, a peer, parity (shards and shares of several peers), and S3.
    """
    from_step: int | None
    reached_step: int | None
    generation_before: int
    generation_after: int | None
    node_count_before: int | None
    """Number of nodes of the generation that failed or stopped.

    The control plane stores this number together with NodeCountAfter, once the next generation has a plan. Absent until
    then.
    """
    node_count_after: int | None
    """Number of nodes of the generation after the failure or stop. Absent until that generation has a plan."""
    instance_id: str | None
    """The first of InstanceIds. Absent if the job lost no instance."""
    replacement_instance_id: str | None
    instance_ids: list[str]
    """Instances that the job lost or gave up, for any reason."""
    replacement_instance_ids: list[str]
    failed_at: datetime
    restored_at: datetime | None
    """When training ran again after the failure. Absent until then."""
    detect_seconds: float | None
    replace_seconds: float | None
    restore_seconds: float | None
    rework_seconds: float | None
    control_plane_absent_seconds: float | None = None
    """Time after the failure for which no control plane was running.

    Ranks train without a control plane, but nothing recovers a job after a failure. Absent if a control plane was
    running.
    """
    cost_usd: float | None
    """The fleet's price × the time during which the job's nodes made no new step because of this incident.

    While the incident is open, this is the cost until now. Absent if the fleet has no price.
    """
    rank_sources: list[RankSource]
    """Restore source of each rank, by rank.

    Empty until the recovery plan exists, and if no rank had to be restored.
    """
    stacks_event_id: int | None
    """EventId of the event `RanksHang`, whose Detail contains the stacks of all ranks.

    Only in DescribeIncident, only if ranks hung, and only while the service keeps the event.
    """
    acknowledgement_time: datetime | None
    """When a person first acknowledged the incident."""
    acknowledged_by: str | None
    acknowledgement: str | None
    """The note of the person who acknowledged the incident."""
    owner: str | None
    """The person who takes care of the incident, as UpdateIncident sets it."""
    verdict: str | None = None
    """What failed, and the state of the job now, in two short sentences. Only in DescribeIncident."""
    why: str | None = None
    """The exception of the script, the reported fault, or a sentence about the cause.

    The text begins with "Cause unknown" if no stored fact explains the failure. It ends with "Outage: cause unknown."
    if the control plane was down when the failure occurred. Only in DescribeIncident.
    """
    done: list[str] | None = None
    """What Everstep has done. The first sentence sums up all actions, and the others give details.

    Only in DescribeIncident.
    """
    continuing_cost: str | None = None
    """What the incident costs from now on, in at most two sentences. Absent if it costs nothing or the cost is unknown.

    Only in DescribeIncident.
    """
    wait: CapacityWait | None = None
    """The wait for instances that AWS does not launch. Only in DescribeIncident, and only during such a wait."""
    duty_sentence: str | None = None
    """Whether a person must act on the incident, in the words of the job's duty. Only in DescribeIncident."""
    actions: list[DutyAction] | None = None
    """Actions that a person can take now, the most urgent first. Only in DescribeIncident."""
    milestones: list[Milestone] | None = None
    """The moments that have occurred, oldest first. Only in DescribeIncident."""
    notes: list[Note] | None = None
    """At most 100 notes, oldest first. Only in DescribeIncident."""


class AcknowledgeIncidentRequest(Request):
    """Confirms that a person has seen an incident."""

    note: ShortText = ""


class UpdateIncidentRequest(Request):
    """Changes the fields of an incident that only people set."""

    owner: ShortText | None = None
    """The person who takes care of the incident. An empty text removes the owner. Omitted: the owner stays."""


class SimilarIncident(IncidentFields):
    """An incident that is similar to a given incident, with the same cause and project."""

    fleet_name: str
    likeness: list[Likeness]
    """Properties that both incidents share in addition to cause and project, the most significant first."""


class ListSimilarIncidentsResponse(Shape):
    """Incidents with the same cause and in the same project as the requested incident."""

    incidents: list[SimilarIncident]
    """The most similar incident first: incidents that share the instance, then the instance type, then the fleet.

    Among equally similar incidents, the newest is first.
    """


class ExportIncidentResponse(Shape):
    """The post-mortem of an incident."""

    incident_id: str
    format: Literal["markdown"]
    file_name: str
    """A suitable name for a file with the content."""
    content: str
    """The document in UTF-8, with line feeds."""


class ListIncidentsResponse(Shape):
    """A page of incidents."""

    incidents: list[Incident]
    """The incidents in the order in which they were opened, or newest first with SortOrder Descending."""
    next_token: str | None = None
