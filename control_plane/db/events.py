"""Events: an append-only history of jobs, fleets and nodes.

Invariant: an event never changes, and ids become visible in order, because only one write transaction runs at a time
(`control_plane.db.session`). A reader can therefore continue after the last id that it has read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from control_plane.db.models import EventRow, JobRow
from control_plane.db.session import equal_to, record_of, values_of

if TYPE_CHECKING:
    from control_plane.db.fleets import FleetRecord
    from control_plane.db.jobs import SavedJob


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent:
    """An event without the id that the database assigns."""

    at: datetime
    type: str
    """Kind of the event, such as `JobStateChanged`."""
    message: str
    """One sentence for users."""
    project: str = ""
    fleet_name: str | None = None
    job_name: str | None = None
    node_id: str | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord(NewEvent):
    """A row of the table of events."""

    id: int


def append(session: Session, event: NewEvent) -> None:
    """Store an event. Its id is higher than the id of every earlier event."""
    session.add(EventRow(**values_of(event)))


class EventSubject(TypedDict, total=False):
    """The columns of an event that name what the event is about."""

    project: str
    fleet_name: str | None
    job_name: str | None
    node_id: str | None


def add(session: Session, type: str, message: str, at: datetime, **subject: Unpack[EventSubject]) -> None:
    """Store an event about a subject."""
    append(session, NewEvent(at=at, type=type, message=message, **subject))


def append_for_job(
    session: Session,
    job: SavedJob | JobRow,
    type: str,
    message: str,
    at: datetime,
    *,
    node_id: str | None = None,
    detail: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Store an event of a job, with the job's project, fleet and name."""
    of_job = {"project": job.project, "fleet_name": job.fleet_name, "job_name": job.name}
    append(session, NewEvent(at=at, type=type, message=message, node_id=node_id, detail=detail, **of_job))


def append_for_fleet(session: Session, fleet: FleetRecord, type: str, message: str, at: datetime) -> None:
    """Store an event of a fleet, with the fleet's project."""
    add(session, type, message, at, project=fleet.project, fleet_name=fleet.name)


def newest_id(session: Session) -> int:
    """Return the id of the newest event, or 0 without events."""
    return session.scalar(select(func.max(EventRow.id))) or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """Conditions that select events. None is no condition."""

    job_name: str | None = None
    fleet_name: str | None = None
    project: str | None = None
    after_id: int = 0
    """Only events with a higher id."""
    before_id: int | None = None
    """Only events with a lower id."""
    after: datetime | None = None
    """Only events at or after this time."""
    before: datetime | None = None
    """Only events before this time."""


def newest_of(
    session: Session, event_type: str, *, project: str, job_name: str, since: datetime, until: datetime | None
) -> int | None:
    """Return the id of a job's newest event of a type from `since` (inclusive) to `until` (None: no end), or None."""
    of_job = EventRow.project == project, EventRow.job_name == job_name
    query = select(func.max(EventRow.id)).where(*of_job, EventRow.type == event_type, EventRow.at >= since)
    return session.scalar(query if until is None else query.where(EventRow.at <= until))


def page(session: Session, which: EventFilter, *, limit: int, is_ascending: bool = True) -> tuple[EventRecord, ...]:
    """Return events ordered by id."""
    query = (
        select(EventRow)
        .where(
            EventRow.id > which.after_id,
            *equal_to(EventRow, job_name=which.job_name, fleet_name=which.fleet_name, project=which.project),
        )
        .order_by(EventRow.id if is_ascending else EventRow.id.desc())
        .limit(limit)
    )
    if which.before_id is not None:
        query = query.where(EventRow.id < which.before_id)
    if which.after is not None:
        query = query.where(EventRow.at >= which.after)
    if which.before is not None:
        query = query.where(EventRow.at < which.before)
    return tuple(record_of(row, EventRecord) for row in session.scalars(query))
