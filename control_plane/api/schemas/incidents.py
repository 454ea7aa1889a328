"""Shapes of the API: incidents and the sources of restored shards."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from control_plane.api.schemas.common import Request, Shape, ShortText
from control_plane.core.observed.nodes import Cause
from control_plane.core.states import IncidentPhase


class RankSource(Shape):
    """Where the shards of some ranks came from."""

    source: Literal["local", "peer", "s3"]
    first_rank: int
    last_rank: int


class Incident(Shape):
    """A failure and its recovery."""

    incident_id: str
    training_job_name: str
    run_id: str
    cause: Cause
    phase: IncidentPhase
    evidence: list[str]
    decision: str
    reason: str
    restore_source: Literal["local", "peer", "s3"] | None
    """The farthest source that any rank used."""
    from_step: int | None
    reached_step: int | None
    lost_steps: int | None
    """Steps done again: reached_step − from_step."""
    generation_before: int
    generation_after: int | None
    instance_id: str | None
    """The first of those that were lost, if any."""
    replacement_instance_id: str | None
    instance_ids: list[str]
    """Those that were left, for whatever cause."""
    faulted_instance_ids: list[str]
    """Where it happened: whose ranks, agent, links or hardware failed, or what AWS announced, lost by it or not.

    Empty where that cannot be told.
    """
    replacement_instance_ids: list[str]
    failed_at: datetime
    opened_at: datetime
    restored_at: datetime | None
    """When training ran again; absent where it has not."""
    closed_at: datetime | None
    detect_seconds: float | None
    replace_seconds: float | None
    restore_seconds: float | None
    rework_seconds: float | None
    cost_usd: float | None
    """The fleet's price × the seconds in which the job's nodes made no new step; so far, while it is open.

    Absent where the fleet has no price.
    """
    rank_sources: list[RankSource]
    """By rank; empty before that is known, or when nothing was restored."""
    stacks_event_id: int | None
    """The event `RanksHang` whose Detail has the stacks of all ranks: where ranks hung, in DescribeIncident alone, for as long as events are kept."""
    acknowledgement_time: datetime | None
    """When a person first said to have seen it."""
    acknowledged_by: str | None
    acknowledgement: str | None
    """What they noted."""


class AcknowledgeIncidentRequest(Request):
    """Somebody has seen an incident."""

    note: ShortText = ""


class ListIncidentsResponse(Shape):
    """A page of incidents."""

    incidents: list[Incident]
    """In the order they were opened, unless the newest were asked for first."""
    next_token: str | None = None
