"""Intents: records of external calls with side effects, each stored before the attempt.

After a crash, an intent stays open, and the background loop repeats the call under the same key. A finished intent
stays finished, so no later call can use its key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from control_plane.db import leases
from control_plane.db.leases import Lease
from control_plane.db.models import IntentRow
from control_plane.db.session import columns_of


class IntentState(StrEnum):
    """Progress of an intent.

    OPEN: the call may have been attempted. FAILED: AWS rejected it; a new attempt needs another key.
    """

    OPEN = "open"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class IntentRecord:
    """A row of the table of intents (external calls that the control plane records before it makes them)."""

    key: str
    subject: str
    action: str
    detail: Mapping[str, Any]
    state: IntentState
    outcome: str
    attempt_count: int
    created_at: datetime
    finished_at: datetime | None


def begin(
    session: Session, lease: Lease, *, key: str, action: str, detail: Mapping[str, Any], now: datetime
) -> IntentRecord:
    """Record an external call before its attempt, or another attempt of a call without an outcome. Raises StaleLease.

    The caller commits `session` before the call, and attempts the call only if the returned state is OPEN. Equal calls
    have equal keys. `detail` contains no secrets.
    """
    leases.guard(session, lease)
    row = session.get(IntentRow, key)
    if row is None:
        row = IntentRow(
            key=key,
            subject=subject_of(lease),
            action=action,
            detail=dict(detail),
            state=IntentState.OPEN,
            attempt_count=0,
            created_at=now,
        )
        session.add(row)
    if row.state == IntentState.OPEN:
        row.lease_owner = lease.owner
        row.lease_counter = lease.counter
        row.attempt_count = (row.attempt_count or 0) + 1
    session.flush()
    return _record_of(row)


def finish(session: Session, lease: Lease, *, key: str, state: IntentState, outcome: str, now: datetime) -> None:
    """Record the outcome of a call, DONE or FAILED, with a sentence for operators.

    Raises StaleLease if another server has taken the lease over, which then determines the outcome itself.
    """
    leases.guard(session, lease)
    session.execute(update(IntentRow).where(IntentRow.key == key).values(state=state, outcome=outcome, finished_at=now))


def done_at(session: Session, keys: Collection[str]) -> dict[str, datetime]:
    """Return when calls succeeded (DONE), by key. Other calls are missing."""
    query = select(IntentRow.key, IntentRow.finished_at).where(
        IntentRow.key.in_(keys), IntentRow.state == IntentState.DONE
    )
    return {key: at for key, at in session.execute(query) if at is not None}


def newest(session: Session, subject: str, action: str) -> IntentRecord | None:
    """Return the newest intent of an action for a job or fleet (`subject_of`), or None."""
    query = (
        select(IntentRow)
        .where(IntentRow.subject == subject, IntentRow.action == action)
        .order_by(IntentRow.created_at.desc())
        .limit(1)
    )
    return next(map(_record_of, session.scalars(query)), None)


def unfinished(session: Session, lease: Lease) -> tuple[IntentRecord, ...]:
    """Return the open intents of a job or fleet, oldest first."""
    query = (
        select(IntentRow)
        .where(IntentRow.subject == subject_of(lease), IntentRow.state == IntentState.OPEN)
        .order_by(IntentRow.created_at, IntentRow.key)
    )
    return tuple(map(_record_of, session.scalars(query)))


def _record_of(row: IntentRow) -> IntentRecord:
    return IntentRecord(**columns_of(row, IntentRecord, leave_out=("state",)), state=IntentState(row.state))


def subject_of(lease: Lease) -> str:
    """Return `job/<run id>` or `fleet/<name>`."""
    return f"{lease.kind}/{lease.key}"
