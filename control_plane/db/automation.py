"""The pause of all automatic actions, which an administrator sets and ends.

Invariant: the table has at most one row. The row exists while automation is paused, also across restarts of servers.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from control_plane.db.errors import Conflict
from control_plane.db.models import AutomationPauseRow
from control_plane.db.session import changed_rows, columns_for, record_of, values_of

_SCOPE = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRecord:
    """The pause of all automatic actions: who paused them, when, and why."""

    paused_at: datetime
    paused_by: str
    """Name of the administrator's token."""
    reason: str

    @property
    def words(self) -> str:
        """A clause that states who paused automation, and why.

        The reasons of jobs and fleets contain this clause during the pause.
        """
        return f"{self.paused_by} paused all automatic actions: {self.reason}"


_PRESENT: Final = select(*columns_for(AutomationPauseRow, PauseRecord)).where(
    AutomationPauseRow.__table__.c.scope == _SCOPE
)


def find(session: Session) -> PauseRecord | None:
    """Return the stored pause of automatic actions, or None while automatic actions are active."""
    row = session.execute(_PRESENT).one_or_none()
    return None if row is None else record_of(row, PauseRecord)


def words(session: Session) -> str:
    """Return who paused automation and why, or an empty string while automation is active."""
    found = find(session)
    return "" if found is None else found.words


def pause(session: Session, wanted: PauseRecord) -> bool:
    """Store a pause of Everstep's automatic actions.

    Args:
        session: from `Database.write`.
        wanted: the pause to store. Its reason has at most 256 characters.

    Returns:
        Whether the pause is new. False if automation is already paused for the same reason.

    Raises:
        Conflict: automation is already paused for another reason.
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
    """End the pause of all automatic actions. Return whether they were paused.

    `session` comes from `Database.write`.
    """
    return bool(changed_rows(session.execute(delete(AutomationPauseRow))))
