"""Pauses of all automatic actions (by an administrator), and of all deletions in S3 (after a restore of the database).

The first pause lasts while its table contains a row. The second lasts while a restore waits for a person
(`DatabaseRestore.accepted_at`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from control_plane.db.errors import Conflict
from control_plane.db.models import AutomationPauseRow, DatabaseRestoreRow
from control_plane.db.session import changed_rows, columns_for, record_of, values_of

_SCOPE = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRecord:
    """The pause of all automatic actions: who paused them, when, and why."""

    paused_at: datetime
    paused_by: str
    """Name of the token."""
    reason: str

    @property
    def words(self) -> str:
        """A clause that states who paused automation, and why, for the reasons of jobs and fleets."""
        return f"{self.paused_by} paused all automatic actions: {self.reason}"


_PRESENT: Final = select(*columns_for(AutomationPauseRow, PauseRecord)).where(
    AutomationPauseRow.__table__.c.scope == _SCOPE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseRestore:
    """A restore of the database from a backup."""

    restored_at: datetime
    first_generation: int
    """Generations that start after the restore have higher numbers."""
    differences: Sequence[Mapping[str, Any]]
    """Each `core.database_restore.Difference` as JSON."""
    accepted_at: datetime | None = None
    """Nothing in S3 is deleted before this time."""


_PENDING: Final = (
    select(*columns_for(DatabaseRestoreRow, DatabaseRestore))
    .where(DatabaseRestoreRow.__table__.c.accepted_at.is_(None))
    .order_by(DatabaseRestoreRow.__table__.c.restored_at)
)


def add_restore(session: Session, restore: DatabaseRestore) -> None:
    """Store a restore. `session` comes from `Database.write` or `Database.migrating`."""
    session.add(DatabaseRestoreRow(**{**values_of(restore), "differences": [*restore.differences]}))
    session.flush()


def pending_restores(session: Session) -> tuple[DatabaseRestore, ...]:
    """Return the restores whose differences no person has accepted, oldest first."""
    return tuple(record_of(row, DatabaseRestore) for row in session.execute(_PENDING))


def accept_restores(session: Session, now: datetime) -> None:
    """Record that a person has accepted the differences of all restores."""
    session.execute(update(DatabaseRestoreRow).where(DatabaseRestoreRow.accepted_at.is_(None)).values(accepted_at=now))


def may_delete(session: Session) -> bool:
    """Return whether the control plane may delete objects in S3 on its own: nothing is paused."""
    return find(session) is None and session.execute(_PENDING).first() is None


def require_accepted_restore(session: Session) -> None:
    """Raise Conflict if a restore waits for a person."""
    if session.execute(_PENDING).first() is not None:
        raise Conflict(
            "the database was restored from a backup, so nothing is deleted from S3 before a person has accepted the "
            "differences. Run everstep db restored on the server's machine, then retry"
        )


def find(session: Session) -> PauseRecord | None:
    """Return the pause of automatic actions, or None while they are active."""
    row = session.execute(_PRESENT).one_or_none()
    return None if row is None else record_of(row, PauseRecord)


def words(session: Session) -> str:
    """Return who paused automation and why, or an empty string while automation is active."""
    found = find(session)
    return "" if found is None else found.words


def pause(session: Session, wanted: PauseRecord) -> bool:
    """Store a pause. Return False if automation is already paused for the same reason.

    The reason has at most 256 characters. Raises Conflict if automation is already paused for another reason.
    """
    present = find(session)
    if present is None:
        session.add(AutomationPauseRow(scope=_SCOPE, **values_of(wanted)))
        session.flush()
        return True
    if present.reason != wanted.reason:
        raise Conflict(f"{present.words}. Resume automation before you pause it for another reason.")
    return False


def resume(session: Session) -> bool:
    """End the pause of all automatic actions. Return whether they were paused."""
    return bool(changed_rows(session.execute(delete(AutomationPauseRow))))
