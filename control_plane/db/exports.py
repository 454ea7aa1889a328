"""How far what happens, and what ranks print, has been told to others: one row for each place that it is told to, and one for each log.

Invariant: a position only grows, and only under the lease of its row.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TypedDict, Unpack

from sqlalchemy import and_, not_, or_, select, update
from sqlalchemy.orm import Session

from control_plane.db import events, leases
from control_plane.db.leases import Lease
from control_plane.db.models import Export, Job, LogExport
from control_plane.db.session import record_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord:
    """Where an export stands."""

    name: str
    position: int
    """Id of the last event that was told."""
    failing_since: datetime | None
    failure: str
    """Why the last attempt failed; empty: it did not."""


class ExportUpdate(TypedDict, total=False):
    """Columns that an exporter changes."""

    position: int
    failing_since: datetime | None
    failure: str


def ensure(session: Session, name: str) -> None:
    """Make the row of an export if there is none: it begins with what happens from now on."""
    if session.get(Export, name) is None:
        session.add(Export(name=name, position=events.newest_id(session), failure=""))
        session.flush()


def get(session: Session, name: str) -> ExportRecord:
    """Return where an export stands; `ensure` made it."""
    return record_of(session.get_one(Export, name), ExportRecord)


def every(session: Session) -> tuple[ExportRecord, ...]:
    """Return all exports, by name; those that are no longer wanted stay where they were."""
    return tuple(record_of(row, ExportRecord) for row in session.scalars(select(Export).order_by(Export.name)))


def change(session: Session, lease: Lease, **columns: Unpack[ExportUpdate]) -> None:
    """Store how far an export has come.

    Args:
        session: a writing one.
        lease: of the export.
        **columns: what changed.

    Raises:
        StaleLease: another replica goes on with it; nothing was written.
    """
    leases.guard(session, lease)
    session.execute(update(Export).where(Export.name == lease.key).values(**columns))


def logs_to_copy(session: Session) -> tuple[str, ...]:
    """Return the runs whose log is not copied to its end: of jobs that have not ended, and of those whose copying has begun."""
    is_over = LogExport.is_over.is_(True)
    query = select(Job.run_id).outerjoin(LogExport, LogExport.run_id == Job.run_id)
    wanted = or_(Job.ended_at.is_(None), and_(LogExport.run_id.is_not(None), not_(is_over)))
    return tuple(session.scalars(query.where(wanted).order_by(Job.created_at)))


def log_cursor(session: Session, run_id: str) -> str | None:
    """Return how far a run's log was copied; None: not at all."""
    return session.scalar(select(LogExport.cursor).where(LogExport.run_id == run_id))


def store_log_cursor(session: Session, lease: Lease, run_id: str, *, cursor: str, is_over: bool) -> None:
    """Store how far a run's log was copied.

    Args:
        session: a writing one.
        lease: of the export.
        run_id: the run.
        cursor: as `loop.log_exporter` writes it.
        is_over: nothing will ever follow.

    Raises:
        StaleLease: another replica goes on with it; nothing was written.
    """
    leases.guard(session, lease)
    session.merge(LogExport(run_id=run_id, cursor=cursor, is_over=is_over))
    session.flush()
