"""Notes that people write about jobs and incidents. A note never changes, and is deleted with its job."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from control_plane.db.errors import Conflict
from control_plane.db.models import NoteRow
from control_plane.db.session import record_of, values_of

MAX_NOTES = 100
"""Limit of one incident, and of one job itself, so that lists need no pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewNote:
    """A note without the id and the time that `create` assigns."""

    run_id: str
    incident_id: str | None
    """None for a note about the job itself."""
    author: str
    """Name of the caller."""
    text: str
    request_token: str | None = None
    """Digest of the request. None without a ClientRequestToken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteRecord(NewNote):
    """A row of the table of notes."""

    id: int
    at: datetime


def create(session: Session, note: NewNote, now: datetime) -> tuple[NoteRecord, bool]:
    """Return the stored note of a request, and whether this call stored it.

    Raises Conflict if an earlier request with the same token had another text, or the subject already has `MAX_NOTES`
    notes.
    """
    if note.request_token is not None:
        earlier = session.scalar(select(NoteRow).where(NoteRow.request_token == note.request_token))
        if earlier is not None:
            if earlier.text != note.text:
                raise Conflict("the ClientRequestToken was used for a note with another text; use a new token")
            return record_of(earlier, NoteRecord), False
    subject = _is_about(note.run_id, note.incident_id)
    if (session.scalar(select(func.count()).select_from(NoteRow).where(*subject)) or 0) >= MAX_NOTES:
        about = "the training job" if note.incident_id is None else f"the incident {note.incident_id!r}"
        raise Conflict(f"{about} has {MAX_NOTES} notes already, which is the maximum")
    row = NoteRow(**values_of(note), at=now)
    session.add(row)
    session.flush()
    return record_of(row, NoteRecord), True


def about(session: Session, run_id: str, incident_id: str | None) -> tuple[NoteRecord, ...]:
    """Return the notes about an incident, or about the job itself if `incident_id` is None, oldest first."""
    query = select(NoteRow).where(*_is_about(run_id, incident_id)).order_by(NoteRow.id)
    return tuple(record_of(row, NoteRecord) for row in session.scalars(query))


def _is_about(run_id: str, incident_id: str | None) -> tuple[ColumnElement[bool], ...]:
    return NoteRow.run_id == run_id, NoteRow.incident_id == incident_id
