"""Incidents: failures and their recoveries.

Invariant: an incident is written under its job's lease; once closed it is history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypedDict, Unpack

from sqlalchemy import and_, func, or_, select, update
from sqlalchemy.orm import Session

from control_plane.db import leases
from control_plane.db.errors import NotFound
from control_plane.db.leases import Lease
from control_plane.db.models import Incident
from control_plane.db.session import changed_rows, record_of, values_of


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentRecord:
    """An incident as it is stored."""

    id: str
    run_id: str
    job_name: str
    project: str
    phase: str
    """Of the recovery: detect, replace, restore, rework, or closed."""
    cause: str
    evidence: tuple[str, ...]
    decision: str
    reason: str
    restore_source: str | None
    from_step: int | None
    reached_step: int | None
    lost_steps: int | None
    generation_before: int
    generation_after: int | None
    instance_ids: tuple[str, ...]
    replacement_instance_ids: tuple[str, ...]
    failed_at: datetime
    opened_at: datetime
    replaced_at: datetime | None
    restored_at: datetime | None
    closed_at: datetime | None
    detect_seconds: float | None
    replace_seconds: float | None
    restore_seconds: float | None
    rework_seconds: float | None
    cost_usd: float | None
    detail: Mapping[str, Any]


class IncidentUpdate(TypedDict, total=False):
    """What changes while a recovery goes on; what is left out stays."""

    phase: str
    cause: str
    evidence: tuple[str, ...]
    decision: str
    reason: str
    restore_source: str | None
    from_step: int | None
    reached_step: int | None
    lost_steps: int | None
    generation_after: int | None
    instance_ids: tuple[str, ...]
    replacement_instance_ids: tuple[str, ...]
    replaced_at: datetime | None
    restored_at: datetime | None
    closed_at: datetime | None
    detect_seconds: float | None
    replace_seconds: float | None
    restore_seconds: float | None
    rework_seconds: float | None
    cost_usd: float | None
    detail: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewIncident:
    """What is known when a failure is noticed."""

    job_name: str
    project: str
    phase: str
    cause: str
    evidence: tuple[str, ...]
    decision: str
    reason: str
    reached_step: int | None
    generation_before: int
    instance_ids: tuple[str, ...]
    failed_at: datetime
    opened_at: datetime
    detect_seconds: float | None
    detail: Mapping[str, Any]


def open_incident(session: Session, lease: Lease, incident_id: str, incident: NewIncident) -> IncidentRecord:
    """Store a new incident of the lease's job. Opening the same id again changes nothing.

    Args:
        session: a writing one.
        lease: of the incident's job.
        incident_id: fresh, or the same to try again.
        incident: what is known so far.

    Returns:
        The incident as stored.

    Raises:
        StaleLease: the lease was taken over; nothing was written.
    """
    leases.guard(session, lease)
    row = session.get(Incident, incident_id)
    if row is None:
        row = Incident(**values_of(incident), id=incident_id, run_id=lease.key)
        session.add(row)
        session.flush()
    return record_of(row, IncidentRecord)


def change(session: Session, lease: Lease, incident_id: str, **changes: Unpack[IncidentUpdate]) -> None:
    """Write how a recovery goes on.

    Args:
        session: a writing one.
        lease: of the incident's job.
        incident_id: which.
        **changes: what changes.

    Raises:
        StaleLease: the lease was taken over; nothing was written.
        NotFound: the job has no such incident.
    """
    leases.guard(session, lease)
    values: dict[str, Any] = dict(changes)
    if "detail" in values:
        values["detail"] = dict(values["detail"])
    found = session.execute(update(Incident).where(Incident.id == incident_id, Incident.run_id == lease.key).values(**values))
    if not changed_rows(found):
        raise NotFound("incident", incident_id)


def get(session: Session, incident_id: str) -> IncidentRecord:
    """Return one incident.

    Args:
        session: any.
        incident_id: which.

    Returns:
        The incident as stored.

    Raises:
        NotFound: there is none of this id.
    """
    row = session.get(Incident, incident_id)
    if row is None:
        raise NotFound("incident", incident_id)
    return record_of(row, IncidentRecord)


def find(session: Session, incident_id: str) -> IncidentRecord | None:
    """Return one incident, or None: an implication may name one that no job had."""
    row = session.get(Incident, incident_id)
    return None if row is None else record_of(row, IncidentRecord)


def count_of_run(session: Session, run_id: str) -> int:
    """Return how many incidents a run has had."""
    return session.scalar(select(func.count()).select_from(Incident).where(Incident.run_id == run_id)) or 0


def page(
    session: Session, *, job_name: str | None, project: str | None, after: tuple[datetime, str] | None, limit: int
) -> tuple[IncidentRecord, ...]:
    """Return incidents in the order they were opened.

    Args:
        session: any.
        job_name: only of this job, or None.
        project: only of this project, or None.
        after: `(opened_at, id)` of the last one of the page before, or None for the first page.
        limit: at most this many.

    Returns:
        At most `limit` incidents.
    """
    query = select(Incident).order_by(Incident.opened_at, Incident.id).limit(limit)
    if job_name is not None:
        query = query.where(Incident.job_name == job_name)
    if project is not None:
        query = query.where(Incident.project == project)
    if after is not None:
        opened_at, incident_id = after
        query = query.where(or_(Incident.opened_at > opened_at, and_(Incident.opened_at == opened_at, Incident.id > incident_id)))
    return tuple(record_of(row, IncidentRecord) for row in session.scalars(query))
