"""The audit log: each call of the API that may change something, with its caller, source address and outcome.

Invariant: an entry contains no request body and no secret. After the outcome is stored, the entry never changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from control_plane.db.models import AuditEntryRow
from control_plane.db.session import equal_to, record_of, values_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NewAuditEntry:
    """A call that the API is about to execute."""

    at: datetime
    operation: str
    resource: str
    """Names of the addressed resource, joined by `/`. Empty if the service generates the name."""
    project: str
    """Empty if the token may access every project."""
    token_id: str
    caller: str
    """Description of the caller's token."""
    role: str
    source_address: str
    """Empty if the server does not see the address."""
    request_id: str
    status_code: int | None = None
    """None before the end of the call."""
    error_code: str = ""
    """Empty after a success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord(NewAuditEntry):
    """A row of the audit log."""

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """Conditions that select entries. None is no condition."""

    operation: str | None = None
    token_id: str | None = None
    project: str | None = None
    after: datetime | None = None
    """Only entries at or after this time."""
    before: datetime | None = None
    """Only entries before this time."""
    before_id: int | None = None
    """Only entries with a lower id, to continue a list."""


def begin(session: Session, entry: NewAuditEntry) -> int:
    """Store a call's entry, to which `finish` adds the outcome, and return the entry's id."""
    row = AuditEntryRow(**values_of(entry))
    session.add(row)
    session.flush()
    return row.id


def finish(session: Session, entry_id: int, *, status_code: int, error_code: str, resource: str) -> None:
    """Store the outcome of a call.

    `error_code` is empty after a success. `resource` may be a name that the service generated during the call.
    """
    outcome = {"status_code": status_code, "error_code": error_code, "resource": resource}
    session.execute(update(AuditEntryRow).where(AuditEntryRow.id == entry_id).values(outcome))


def page(session: Session, which: AuditFilter, *, limit: int) -> tuple[AuditRecord, ...]:
    """Return at most `limit` entries, newest first."""
    same = equal_to(AuditEntryRow, operation=which.operation, token_id=which.token_id, project=which.project)
    query = select(AuditEntryRow).where(*same).order_by(AuditEntryRow.id.desc()).limit(limit)
    if which.after is not None:
        query = query.where(AuditEntryRow.at >= which.after)
    if which.before is not None:
        query = query.where(AuditEntryRow.at < which.before)
    if which.before_id is not None:
        query = query.where(AuditEntryRow.id < which.before_id)
    return tuple(record_of(row, AuditRecord) for row in session.scalars(query))
