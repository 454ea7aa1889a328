"""The progress of exports: how far events were sent to each receiver. A position never decreases."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from control_plane.db import events, leases
from control_plane.db.leases import Lease
from control_plane.db.models import ExportRow
from control_plane.db.session import record_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord:
    """Position and last error of one export of events."""

    name: str
    position: int
    """Id of the last event that the receiver accepted."""
    failing_since: datetime | None
    failure: str
    """Error of the last attempt. Empty after a success."""


def ensure(session: Session, name: str) -> None:
    """Create the row of an export if it is missing. A new export sends only later events."""
    if session.get(ExportRow, name) is None:
        session.add(ExportRow(name=name, position=events.newest_id(session), failure=""))
        session.flush()


def get(session: Session, name: str) -> ExportRecord:
    """Return the state of an export whose row `ensure` has created."""
    return record_of(session.get_one(ExportRow, name), ExportRecord)


def every(session: Session) -> tuple[ExportRecord, ...]:
    """Return all exports by name, also those that are no longer configured."""
    return tuple(record_of(row, ExportRecord) for row in session.scalars(select(ExportRow).order_by(ExportRow.name)))


def change(session: Session, lease: Lease, **columns: object) -> None:
    """Update an export. Raises StaleLease."""
    leases.guard(session, lease)
    session.execute(update(ExportRow).where(ExportRow.name == lease.key).values(**columns))
