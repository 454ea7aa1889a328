"""The duties about which events informed people, so that no event repeats one.

Invariant: a row exists exactly while the last event about its job or fleet said that it needs a person.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from control_plane.db.models import DutyRow
from control_plane.db.session import record_of, values_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldDuty:
    """A row of the table of duties."""

    subject: str
    """`job/` and the run id, or `fleet/` and the name."""
    kind: str
    urgency: str


def every(session: Session) -> Mapping[str, ToldDuty]:
    """Return all stored duties, by subject."""
    return {row.subject: record_of(row, ToldDuty) for row in session.scalars(select(DutyRow))}


def store(session: Session, duty: ToldDuty) -> None:
    """Store the duty of a subject in place of an earlier one."""
    session.merge(DutyRow(**values_of(duty)))


def remove(session: Session, subject: str) -> None:
    """Remove the duty of a subject. Nothing happens if there is none."""
    session.execute(delete(DutyRow).where(DutyRow.subject == subject))
