"""The progress of exports: how far events were sent to each receiver.

Invariant: the position of an export never decreases. Only the server that has the export's lease writes it.
"""

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
    """Error of the last attempt. Empty if the last attempt succeeded."""


def ensure(session: Session, name: str) -> None:
    """Create the row of an export if it is missing.

    A new export sends only events that are stored after its creation.
    """
    if session.get(ExportRow, name) is None:
        session.add(ExportRow(name=name, position=events.newest_id(session), failure=""))
        session.flush()


def get(session: Session, name: str) -> ExportRecord:
    """Return the stored state of an event export. `ensure` must have created its row."""
    return record_of(session.get_one(ExportRow, name), ExportRecord)


def every(session: Session) -> tuple[ExportRecord, ...]:
    """Return all exports by name, including exports that are no longer configured."""
    return tuple(record_of(row, ExportRecord) for row in session.scalars(select(ExportRow).order_by(ExportRow.name)))


def change(session: Session, lease: Lease, **columns: object) -> None:
    """Update an export.

    Args:
        session: from `Database.write`.
        lease: lease of the export to update.
        **columns: columns to update, by name, with their new values.

    Raises:
        StaleLease: another control-plane server has taken the lease over. Nothing was written.
    """
    leases.guard(session, lease)
    session.execute(update(ExportRow).where(ExportRow.name == lease.key).values(**columns))
