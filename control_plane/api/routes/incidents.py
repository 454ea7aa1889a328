"""Incidents: list and describe failures with their recoveries, and acknowledge them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from fastapi import Query
from sqlalchemy.orm import Session

from control_plane.api import page_tokens, views
from control_plane.api.auth import Caller, Reader, User
from control_plane.api.deps import (
    IncidentIdPath,
    MaxResults,
    NextToken,
    Router,
    ServicesDep,
    SortOrder,
    TrainingJobNameFilter,
    page_of,
    same_order,
)
from control_plane.api.schemas import incidents as incidents_schemas
from control_plane.core import accounting, hangs
from control_plane.db import events, fleets, incidents, jobs
from control_plane.db.errors import NotFound
from control_plane.db.events import NewEvent
from control_plane.db.incidents import IncidentFilter, IncidentRecord
from control_plane.loop.records import job_record


class IncidentStatus(StrEnum):
    """Whether the job has recovered from the incident (Closed) or not (Open)."""

    OPEN = "Open"
    CLOSED = "Closed"


router = Router(prefix="/v1/incidents", tags=["Incidents"])


@router.get("", operation_id="ListIncidents")
def list_incidents(
    caller: Reader,
    services: ServicesDep,
    training_job_name: TrainingJobNameFilter = None,
    status_equals: Annotated[IncidentStatus | None, Query(alias="StatusEquals")] = None,
    max_results: MaxResults = 100,
    next_token: NextToken = None,
    sort_order: Annotated[SortOrder, Query(alias="SortOrder")] = SortOrder.ASCENDING,
) -> incidents_schemas.ListIncidentsResponse:
    """List the incidents of all jobs or of one job, in the order in which they were opened.

    SortOrder Descending lists the newest first. StatusEquals selects open or closed incidents.
    """
    after = None
    if next_token is not None:
        _, opened_at, incident_id = page_tokens.position(
            next_token, same_order(sort_order), page_tokens.moment, page_tokens.text
        )
        after = (opened_at, incident_id)
    with services.database.read() as session:
        which = IncidentFilter(
            run_ids=_runs_of(session, training_job_name, caller),
            project=caller.project_filter,
            is_open=None if status_equals is None else status_equals is IncidentStatus.OPEN,
        )
        is_ascending = sort_order is SortOrder.ASCENDING
        page = incidents.page(session, which, after=after, limit=max_results + 1, is_ascending=is_ascending)
        shown, more = page_of(page, max_results, lambda record: (sort_order, record.opened_at.isoformat(), record.id))
        costs = [_cost_usd(session, record, services.now()) for record in shown]
    return incidents_schemas.ListIncidentsResponse(
        incidents=[views.incident(record, cost) for record, cost in zip(shown, costs, strict=True)], next_token=more
    )


@router.get("/{IncidentId}", operation_id="DescribeIncident")
def describe_incident(incident_id: IncidentIdPath, caller: Reader, services: ServicesDep) -> incidents_schemas.Incident:
    """Describe one incident: its evidence, the decision with its reason, and the cost."""
    with services.database.read() as session:
        record = incidents.get(session, incident_id)
        # One transaction stores the incident and the event, so an incident is never read without its event.
        stacks = events.newest_of(
            session,
            hangs.PROVEN,
            project=record.project,
            job_name=record.job_name,
            since=record.opened_at,
            until=record.closed_at,
        )
        cost = _cost_usd(session, record, services.now())
    caller.require_sight("incident", incident_id, record.project)
    return views.incident(record, cost, stacks)


@router.post("/{IncidentId}/acknowledge", operation_id="AcknowledgeIncident", status_code=202)
def acknowledge_incident(
    incident_id: IncidentIdPath,
    request: incidents_schemas.AcknowledgeIncidentRequest,
    caller: User,
    services: ServicesDep,
) -> incidents_schemas.Incident:
    """Confirm that a person has seen an incident, with a note.

    It does not change the recovery. The service stores only the first acknowledgement.
    """
    now = services.now()
    with services.database.write() as session:
        record = incidents.get(session, incident_id)
        caller.require_sight("incident", incident_id, record.project)
        if incidents.acknowledge(session, incident_id, who=caller.name, note=request.note, now=now):
            message = f"{caller.name} acknowledged the incident {incident_id}" + (
                f": {request.note}" if request.note else "."
            )
            event = NewEvent(
                at=now, type="IncidentAcknowledged", message=message, project=record.project, job_name=record.job_name
            )
            events.append(session, event)
        return views.incident(incidents.get(session, incident_id), _cost_usd(session, record, now))


def _runs_of(session: Session, text: str | None, caller: Caller) -> tuple[str, ...] | None:
    """Return the ids of the runs to which a list of incidents is restricted, or None for all runs.

    `text` is a job name, a run id, or None. For a caller without a project, a name selects the jobs of all projects.
    Raises NotFound if the caller sees no such job.
    """
    if text is None:
        return None
    found = jobs.named(session, text, caller.project_filter)
    if not found:
        raise NotFound("training job", text)
    return tuple(job.run_id for job in found)


def _cost_usd(session: Session, record: IncidentRecord, now: datetime) -> float | None:
    """Return the cost of an incident until now.

    For a closed incident, the function returns the stored cost. For the open incident of the job, it computes the cost
    up to `now`.
    """
    if record.closed_at is not None:
        return record.cost_usd
    job = jobs.get_run(session, record.run_id)
    stored = job_record(job)
    if stored.incident is None or stored.incident.id != record.id:
        return record.cost_usd
    idle = accounting.idle_so_far(stored.incident, stored, now.timestamp())
    return accounting.cost_usd(idle, fleets.get(session, job.fleet_name).price_usd_per_hour)
