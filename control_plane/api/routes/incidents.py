"""Incidents: list, describe and export failures with their recoveries, acknowledge them and set their owner."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from fastapi import Query
from sqlalchemy.orm import Session

from control_plane.accounts import postmortem
from control_plane.api import incident_reports, page_tokens, views
from control_plane.api.auth import Caller, Reader, User
from control_plane.api.deps import (
    IncidentIdPath,
    MaxResults,
    NextToken,
    ServicesDep,
    SortOrder,
    TrainingJobNameFilter,
    page_of,
    same_order,
)
from control_plane.api.router import Router
from control_plane.api.schemas import incidents as incidents_schemas
from control_plane.db import events, incidents, jobs
from control_plane.db.errors import NotFound
from control_plane.db.incidents import IncidentFilter, SavedIncident


class IncidentStatus(StrEnum):
    """Whether the job has recovered from the incident (Closed) or not (Open)."""

    OPEN = "Open"
    CLOSED = "Closed"


class ExportFormat(StrEnum):
    """Format of a post-mortem."""

    MARKDOWN = "markdown"


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
    kinds = same_order(sort_order), page_tokens.moment, page_tokens.text
    after = None if next_token is None else page_tokens.position(next_token, *kinds)[1:]
    with services.database.read() as session:
        which = IncidentFilter(
            run_ids=_runs_of(session, training_job_name, caller),
            project=caller.project_filter,
            is_open=None if status_equals is None else status_equals is IncidentStatus.OPEN,
        )
        is_ascending = sort_order is SortOrder.ASCENDING
        page = incidents.page(session, which, after=after, limit=max_results + 1, is_ascending=is_ascending)
        shown, more = page_of(page, max_results, lambda record: (sort_order, record.opened_at.isoformat(), record.id))
        costs = [incident_reports.cost_usd(session, record, services.now()) for record in shown]
        summaries = incident_reports.summaries(session, shown)
    return incidents_schemas.ListIncidentsResponse(
        incidents=[views.incident(*each) for each in zip(shown, costs, summaries, strict=True)], next_token=more
    )


@router.get("/{IncidentId}", operation_id="DescribeIncident")
def describe_incident(incident_id: IncidentIdPath, caller: Reader, services: ServicesDep) -> incidents_schemas.Incident:
    """Describe one incident: its evidence, the decision with its reason, and the cost."""
    with services.database.read() as session:
        record = _visible(session, incident_id, caller)
        detail = incident_reports.detail(services, session, record)
        (summary,) = incident_reports.summaries(session, [record])
    return views.incident(record, detail.account.cost_usd, summary, detail)


@router.post("/{IncidentId}", operation_id="UpdateIncident")
def update_incident(
    incident_id: IncidentIdPath,
    request: incidents_schemas.UpdateIncidentRequest,
    caller: User,
    services: ServicesDep,
) -> incidents_schemas.Incident:
    """Set or remove the owner of an incident: the person who takes care of it.

    The owner does not affect the recovery.
    """
    now = services.now()
    with services.database.write() as session:
        record = _visible(session, incident_id, caller)
        owner = None if request.owner is None else request.owner.strip()
        if owner is not None and incidents.set_owner(session, incident_id, owner):
            change = f"made {owner} the owner" if owner else f"removed the owner {record.owner}"
            _tell(
                session, record, "IncidentOwnerChanged", f"{caller.name} {change} of the incident {incident_id}.", now
            )
        record = incidents.get(session, incident_id)
        return _changed(session, record, now)


@router.get("/{IncidentId}/similar", operation_id="ListSimilarIncidents")
def list_similar_incidents(
    incident_id: IncidentIdPath,
    caller: Reader,
    services: ServicesDep,
    max_results: Annotated[int, Query(alias="MaxResults", ge=1, le=50)] = 5,
) -> incidents_schemas.ListSimilarIncidentsResponse:
    """List the incidents of the same cause and project that are most similar to a given incident, and how they ended.

    Incidents on the same instance come first, then incidents on the same instance type, then incidents in the same
    fleet. The service compares the newest 200 incidents of the cause.
    """
    with services.database.read() as session:
        record = _visible(session, incident_id, caller)
        found = incident_reports.similar(session, record, max_results)
    return incidents_schemas.ListSimilarIncidentsResponse(incidents=[views.similar_incident(each) for each in found])


@router.get("/{IncidentId}/export", operation_id="ExportIncident")
def export_incident(
    incident_id: IncidentIdPath,
    caller: Reader,
    services: ServicesDep,
    format: Annotated[ExportFormat, Query(alias="Format")] = ExportFormat.MARKDOWN,
) -> incidents_schemas.ExportIncidentResponse:
    """Return the post-mortem of an incident as a document.

    The document contains what failed, the job's state, the impact, the timeline in UTC, the evidence, the decision, the
    last log lines and stacks before the failure, the notes, similar incidents, and what to do.

    If S3 does not return the log, the document says so.
    """
    with services.database.read() as session:
        record = _visible(session, incident_id, caller)
    log = incident_reports.last_lines(services, record)
    with services.database.read() as session:
        record = incidents.get(session, incident_id)
        found = incident_reports.post_mortem(services, session, record, log)
    return incidents_schemas.ExportIncidentResponse(
        incident_id=incident_id,
        format=format.value,
        file_name=f"post-mortem-{record.job_name}-{record.failed_at:%Y-%m-%d-%H%M}.md",
        content=postmortem.markdown(found),
    )


@router.post("/{IncidentId}/acknowledge", operation_id="AcknowledgeIncident", status_code=202)
def acknowledge_incident(
    incident_id: IncidentIdPath,
    request: incidents_schemas.AcknowledgeIncidentRequest,
    caller: User,
    services: ServicesDep,
) -> incidents_schemas.Incident:
    """Confirm that a person has seen an incident, with a note.

    The acknowledgement does not affect the recovery. The service stores only the first acknowledgement.
    """
    now = services.now()
    with services.database.write() as session:
        record = _visible(session, incident_id, caller)
        if incidents.acknowledge(session, incident_id, who=caller.name, note=request.note, now=now):
            message = f"{caller.name} acknowledged the incident {incident_id}" + (
                f": {request.note}" if request.note else "."
            )
            _tell(session, record, "IncidentAcknowledged", message, now)
        return _changed(session, incidents.get(session, incident_id), now)


def _changed(session: Session, record: SavedIncident, now: datetime) -> incidents_schemas.Incident:
    """Return the API's description of an incident that a person has just acknowledged or given an owner."""
    (summary,) = incident_reports.summaries(session, [record])
    return views.incident(record, incident_reports.cost_usd(session, record, now), summary)


def _visible(session: Session, incident_id: str, caller: Caller) -> SavedIncident:
    """Return an incident. Raises NotFound if it does not exist or if the caller may not see it."""
    record = incidents.get(session, incident_id)
    caller.require_sight("incident", incident_id, record.project)
    return record


def _tell(session: Session, record: SavedIncident, type: str, message: str, now: datetime) -> None:
    events.add(session, type, message, now, project=record.project, job_name=record.job_name)


def _runs_of(session: Session, text: str | None, caller: Caller) -> tuple[str, ...] | None:
    """Return the ids of the runs whose incidents a list contains. None means the runs of all jobs.

    `text` is a job name, a run id, or None. For a caller without a project, a name selects the jobs of all projects.
    Raises NotFound if the caller sees no such job.
    """
    if text is None:
        return None
    found = jobs.named(session, text, caller.project_filter)
    if not found:
        raise NotFound("training job", text)
    return tuple(job.run_id for job in found)
