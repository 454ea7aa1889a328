"""Drills: faults that users inject deliberately, and the outcome of each drill.

Invariant: a job has at most one unfinished drill, and only the holder of the job's lease writes its progress.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import bindparam, select, tuple_, update
from sqlalchemy.orm import Session

from control_plane.db import leases
from control_plane.db.errors import Conflict
from control_plane.db.leases import Lease
from control_plane.db.models import DrillRow
from control_plane.db.session import columns_for, equal_to, record_of, values_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NewDrill:
    """The columns of a drill, without the id that `create` assigns."""

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
class DrillRecord(NewDrill):
    """A row of the table of drills."""

    id: str
    generation: int
    struck_at: datetime | None
    incident_id: str
    ended_at: datetime | None
    outcome: str


def create(session: Session, drill: NewDrill) -> DrillRecord:
    """Store a new drill. Raises Conflict if the job has an unfinished drill."""
    before = open_of_run(session, drill.run_id)
    if before is not None:
        raise Conflict(f"the drill {before.id} of {drill.job_name} has not ended")
    row = DrillRow(**values_of(drill), id="drill-" + secrets.token_hex(6))
    session.add(row)
    session.flush()
    return record_of(row, DrillRecord)


_DRILL: Final = DrillRow.__table__.c
_OPEN_OF_RUN: Final = (
    select(*columns_for(DrillRow, DrillRecord))
    .where(_DRILL.run_id == bindparam("of_run"), _DRILL.ended_at.is_(None))
    .limit(1)
)
"""A constant, because each DescribeTrainingJob executes it and its construction takes time."""


def open_of_run(session: Session, run_id: str) -> DrillRecord | None:
    """Return the run's drill that has not ended, or None."""
    row = session.execute(_OPEN_OF_RUN, {"of_run": run_id}).one_or_none()
    return None if row is None else record_of(row, DrillRecord)


def change(session: Session, lease: Lease, drill_id: str, **changes: object) -> None:
    """Update the progress or the outcome of a drill. Raises StaleLease."""
    leases.guard(session, lease)
    session.execute(update(DrillRow).where(DrillRow.id == drill_id, DrillRow.run_id == lease.key).values(**changes))


def page(
    session: Session, *, job_name: str | None, project: str | None, after: tuple[datetime, str] | None, limit: int
) -> tuple[DrillRecord, ...]:
    """Return drills in the order of their requests, of one job or project, or of all (None).

    `after` is `(requested_at, id)` of the previous page's last drill. None means the first page.
    """
    place = DrillRow.requested_at, DrillRow.id
    query = (
        select(DrillRow).where(*equal_to(DrillRow, job_name=job_name, project=project)).order_by(*place).limit(limit)
    )
    if after is not None:
        query = query.where(tuple_(*place) > after)
    return tuple(record_of(row, DrillRecord) for row in session.scalars(query))
