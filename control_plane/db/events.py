"""Events: what happened, in order. Append-only.

Readers go on from the last id that they have seen, so no id may appear below one that was seen. A database gives ids
when rows are inserted, and shows them when their transaction commits: they become visible in order because one
transaction writes at a time (`control_plane.db.session`).

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


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """Which events; what is None leaves all."""

    job_name: str | None = None
    fleet_name: str | None = None
    project: str | None = None
    after_id: int = 0
    """Only events with a higher id."""
    before_id: int | None = None
    """Only events with a lower id."""
    after: datetime | None = None
    """Only events that happened then or later."""
    before: datetime | None = None
    """Only events that happened before."""


def newest_of(
    session: Session, event_type: str, *, job_name: str, since: datetime, until: datetime | None
) -> int | None:
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


def page(session: Session, which: EventFilter, *, limit: int, is_ascending: bool = True) -> tuple[EventRecord, ...]:
    """Return events, oldest first, or the newest first.

    Args:
        session: any.
        which: of them.
        limit: at most this many.
        is_ascending: the oldest first.

    Returns:
        At most `limit` events.
    """
    query = (
        select(Event)
        .where(Event.id > which.after_id)
        .order_by(Event.id if is_ascending else Event.id.desc())
        .limit(limit)
    )
    if which.job_name is not None:
        query = query.where(Event.job_name == which.job_name)
    if which.fleet_name is not None:
        query = query.where(Event.fleet_name == which.fleet_name)
    if which.project is not None:
        query = query.where(Event.project == which.project)
    if which.before_id is not None:
        query = query.where(Event.id < which.before_id)
    if which.after is not None:
        query = query.where(Event.at >= which.after)
    if which.before is not None:
        query = query.where(Event.at < which.before)
    return tuple(record_of(row, EventRecord) for row in session.scalars(query))
