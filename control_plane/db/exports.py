"""How far what happens has been told to others: one row for each place that it is told to.

Invariant: a position only grows, and only under the lease of its row.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TypedDict, Unpack

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from control_plane.db import events, leases
from control_plane.db.leases import Lease
from control_plane.db.models import Export
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
