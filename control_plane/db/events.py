"""Events: what happened, in order. Append-only.

Readers go on from the last id that they have seen, so no id may appear below one that was seen. A database gives ids when rows are inserted, and
shows them when their transaction commits; so events are inserted last in a transaction, one transaction at a time. SQLite has one writer anyway;
elsewhere it is a lock that is held from the insertion to the commit, under which nothing else is waited for.

Invariant: an event is never changed; ids become visible in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.event import listens_for
from sqlalchemy.orm import Session

from control_plane.db.models import Event
from control_plane.db.session import record_of, values_of

_WAITING = "everstep_events"
"""Where a session keeps what is to be inserted before it commits."""
_LOCK = 0x45560001
"""PostgreSQL's number of the lock; of this database alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent:
    """Something that just happened."""

    at: datetime
    type: str
    """`JobStateChanged`, `NodeExcluded`, `FleetDrift` …"""
    message: str
    """A sentence for the user."""
    project: str = ""
    fleet_name: str | None = None
    job_name: str | None = None
    node_id: str | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """An event as it is stored."""

    id: int
    at: datetime
    type: str
    message: str
    project: str
    fleet_name: str | None
    job_name: str | None
    node_id: str | None
    detail: Mapping[str, Any]


def append(session: Session, event: NewEvent) -> None:
    """Store an event when the transaction commits: after all else, in the order of the calls."""
    session.info.setdefault(_WAITING, []).append(event)


@listens_for(Session, "before_commit")
def _insert(session: Session) -> None:
    waiting = session.info.pop(_WAITING, None)
    if not waiting:
        return
    session.flush()
    _queue_up(session, session.get_bind().dialect.name)
    session.add_all([Event(**values_of(event)) for event in waiting])
    session.flush()


def _queue_up(session: Session, dialect: str) -> None:
    """Wait until no other transaction is between inserting its events and their being seen."""
    if dialect == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock(_LOCK)))


def newest_id(session: Session) -> int:
    """Return the id of the newest event, 0 where there is none."""
    return session.scalar(select(func.max(Event.id))) or 0


def newest_of(session: Session, event_type: str, *, job_name: str, since: datetime, until: datetime | None) -> int | None:
    """Return the id of a job's newest event of a type within a time, both ends included; None where there is none, or none any more.

    Args:
        session: any.
        event_type: `RanksHang` …
        job_name: of the job.
        since: from when on.
        until: None: up to now.

    Returns:
        Its id.
    """
    query = select(func.max(Event.id)).where(Event.job_name == job_name, Event.type == event_type, Event.at >= since)
    return session.scalar(query if until is None else query.where(Event.at <= until))


def page(
    session: Session, *, job_name: str | None, fleet_name: str | None, project: str | None, after_id: int, limit: int
) -> tuple[EventRecord, ...]:
    """Return events, oldest first.

    Args:
        session: any.
        job_name: only of this job, or None.
        fleet_name: only of this fleet, or None.
        project: only of this project, or None.
        after_id: only events with a higher id.
        limit: at most this many.

    Returns:
        At most `limit` events.
    """
    query = select(Event).where(Event.id > after_id).order_by(Event.id).limit(limit)
    if job_name is not None:
        query = query.where(Event.job_name == job_name)
    if fleet_name is not None:
        query = query.where(Event.fleet_name == fleet_name)
    if project is not None:
        query = query.where(Event.project == project)
    return tuple(record_of(row, EventRecord) for row in session.scalars(query))
