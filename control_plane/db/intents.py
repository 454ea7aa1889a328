"""Intents: every effect on the world is written down before it is tried.

A pass that dies between the two leaves an open intent; the next pass finds it, sees from the world whether it took
effect, and finishes it.

Invariant: an intent is opened under a lease, and a finished one is never opened again: its key is spent.
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
from control_plane.db.models import Intent
from control_plane.db.session import columns_of


class IntentState(StrEnum):
    """How far an effect has come.

    OPEN: written, perhaps tried; left when its outcome is known. DONE: it took effect. FAILED: it was refused; what
    follows is another intent.
    """

    OPEN = "open"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class IntentRecord:
    """An intent as it is stored."""

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
    """Write down what is about to be tried, or count another attempt of it.

    Args:
        session: a writing one; it must be committed before the effect is tried.
        lease: of the job or fleet that wants it.
        key: the same for the same effect.
        action: a word for it.
        detail: its arguments; no secrets.
        now: when.

    Returns:
        The intent. One whose state is not OPEN is finished: do not try it again.

    Raises:
        StaleLease: the lease was taken over; nothing was written.
    """
    leases.guard(session, lease)
    row = session.get(Intent, key)
    if row is None:
        row = Intent(
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
    """Write down how it went.

    Args:
        session: a writing one.
        lease: of the job or fleet that wanted it.
        key: the intent's.
        state: DONE or FAILED.
        outcome: how it went, in a sentence.
        now: when.

    Raises:
        StaleLease: the lease was taken over; the new owner finds out for itself.
    """
    leases.guard(session, lease)
    session.execute(update(Intent).where(Intent.key == key).values(state=state, outcome=outcome, finished_at=now))


def done_at(session: Session, keys: Collection[str]) -> dict[str, datetime]:
    """Return of effects when it was known that they had taken effect, by key; those of which it is not known are missing."""
    query = select(Intent.key, Intent.finished_at).where(Intent.key.in_(keys), Intent.state == IntentState.DONE)
    return {key: at for key, at in session.execute(query) if at is not None}


def unfinished(session: Session, lease: Lease) -> tuple[IntentRecord, ...]:
    """Return the open intents of a job or fleet, oldest first."""
    query = (
        select(Intent)
        .where(Intent.subject == subject_of(lease), Intent.state == IntentState.OPEN)
        .order_by(Intent.created_at, Intent.key)
    )
    return tuple(map(_record_of, session.scalars(query)))


def _record_of(row: Intent) -> IntentRecord:
    return IntentRecord(**columns_of(row, IntentRecord, leave_out=("state",)), state=IntentState(row.state))


def subject_of(lease: Lease) -> str:
    """Return what an intent of this lease is about."""
    return f"{lease.kind}/{lease.key}"
