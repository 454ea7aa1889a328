"""Events: what happened, in order. Append-only.

Readers go on from the last id that they have seen, so no id may appear below one that was seen. A database gives ids when rows are inserted, and
shows them when their transaction commits: they become visible in order because one transaction writes at a time (`control_plane.db.session`).

Invariant: an event is never changed; ids become visible in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from control_plane.db.models import Event
from control_plane.db.session import record_of, values_of


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
    """Store an event, after those that the session was given before."""
    session.add(Event(**values_of(event)))


def newest_id(session: Session) -> int:
    """Return the id of the newest event, 0 where there is none."""
    return session.scalar(select(func.max(Event.id))) or 0


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
