"""Drills: what was broken on purpose, by whom, and what became of it.

Invariant: a job has one drill at a time that has not ended; how it goes on is written under the job's lease.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypedDict, Unpack

from sqlalchemy import and_, bindparam, or_, select, update
from sqlalchemy.orm import Session

from control_plane.db import leases
from control_plane.db.errors import Conflict
from control_plane.db.leases import Lease
from control_plane.db.models import Drill
from control_plane.db.session import record_of, values_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NewDrill:
    """A drill that is about to be asked for."""

    run_id: str
    job_name: str
    fleet_name: str
    project: str
    kind: str
    node_id: str
    rank: int | None
    requested_by: str
    requested_at: datetime
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillRecord:
    """A drill as it is stored."""

    id: str
    run_id: str
    job_name: str
    fleet_name: str
    project: str
    kind: str
    node_id: str
    rank: int | None
    requested_by: str
    requested_at: datetime
    state: str
    generation: int
    struck_at: datetime | None
    incident_id: str
    ended_at: datetime | None
    outcome: str


class DrillUpdate(TypedDict, total=False):
    """What changes as a drill goes on."""

    state: str
    generation: int
    struck_at: datetime | None
    incident_id: str
    ended_at: datetime | None
    outcome: str


def create(session: Session, drill: NewDrill) -> DrillRecord:
    """Store a drill to be made.

    Args:
        session: a writing one.
        drill: what is asked for.

    Returns:
        The drill as stored.

    Raises:
        Conflict: the job has one that has not ended.
    """
    before = open_of_run(session, drill.run_id)
    if before is not None:
        raise Conflict(f"the drill {before.id} of {drill.job_name} has not ended")
    row = Drill(**values_of(drill), id="drill-" + secrets.token_hex(6))
    session.add(row)
    session.flush()
    return record_of(row, DrillRecord)


_OPEN_OF_RUN: Final = select(Drill).where(Drill.run_id == bindparam("of_run"), Drill.ended_at.is_(None)).limit(1)
"""Put together once: every description of a job asks for it."""


def open_of_run(session: Session, run_id: str) -> DrillRecord | None:
    """Return the drill of a run that has not ended, or None."""
    row = session.scalar(_OPEN_OF_RUN, {"of_run": run_id})
    return None if row is None else record_of(row, DrillRecord)


def change(session: Session, lease: Lease, drill_id: str, **changes: Unpack[DrillUpdate]) -> None:
    """Write how a drill goes on.

    Args:
        session: a writing one.
        lease: of its job.
        drill_id: which.
        **changes: what changes.

    Raises:
        StaleLease: the lease was taken over; nothing was written.
    """
    leases.guard(session, lease)
    session.execute(update(Drill).where(Drill.id == drill_id, Drill.run_id == lease.key).values(**changes))


def page(
    session: Session, *, job_name: str | None, project: str | None, after: tuple[datetime, str] | None, limit: int
) -> tuple[DrillRecord, ...]:
    """Return drills in the order they were asked for.

    Args:
        session: any.
        job_name: only of this job, or None.
        project: only of this project, or None.
        after: `(requested_at, id)` of the last one of the page before, or None for the first page.
        limit: at most this many.

    Returns:
        At most `limit` drills.
    """
    query = select(Drill).order_by(Drill.requested_at, Drill.id).limit(limit)
    if job_name is not None:
        query = query.where(Drill.job_name == job_name)
    if project is not None:
        query = query.where(Drill.project == project)
    if after is not None:
        at, drill_id = after
        query = query.where(or_(Drill.requested_at > at, and_(Drill.requested_at == at, Drill.id > drill_id)))
    return tuple(record_of(row, DrillRecord) for row in session.scalars(query))
