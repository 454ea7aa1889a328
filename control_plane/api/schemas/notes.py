"""API models: notes that people write about jobs and incidents."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field, StringConstraints

from control_plane.api.schemas.common import Request, Shape

NoteText = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class Note(Shape):
    """A note that a person has written about a job or an incident. A note never changes."""

    note_id: int
    author: str
    """The author: description and id of the token that the author used."""
    creation_time: datetime
    text: str


class CreateNoteRequest(Request):
    """Base class of the requests that add a note."""

    text: NoteText
    """The note. The dashboard and the post-mortem show it as plain text."""
    client_request_token: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = Field(
        default=None, json_schema_extra={"x-idempotency-token": True}
    )
    """Identifies the request. A repeated request with the same token returns the existing note.

    The SDK generates a token.
    """


class CreateIncidentNoteRequest(CreateNoteRequest):
    """Adds a note to an incident."""


class CreateTrainingJobNoteRequest(CreateNoteRequest):
    """Adds a note to a training job."""


class ListTrainingJobNotesResponse(Shape):
    """The notes of a job, without the notes of its incidents."""

    notes: list[Note]
    """At most 100 notes, oldest first."""
