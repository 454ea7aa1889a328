"""Shapes of the API: uploads of source trees."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from control_plane.api.schemas.common import Hidden, Request, Sha256, Shape


class CreateSourceRequest(Request):
    """An archive that is about to be stored."""

    source_id: Sha256
    """The SHA-256 of the archive, a gzipped tar."""
    bytes: int = Field(ge=0, le=2**40)
    """Its length."""


class SourceUpload(Shape):
    """Where an archive is to be put, without a token: `PUT Url` with these headers and the archive as its body."""

    url: Hidden
    """Whoever has it may put this very archive there, and no other: checksum and length are signed."""
    headers: dict[str, str]
    expiration_time: datetime
    """After it CreateSource gives another address."""


class CreateSourceResponse(Shape):
    """Whether a source is there already, and where it is to be put if not."""

    source_id: Sha256
    is_stored: bool
    """It was checked and stored before: there is nothing to do."""
    upload: SourceUpload | None
    """Put it there, then CompleteSource.

    Absent where it is stored, or where the service's store takes nothing from outside: then PutSource.
    """


class PutSourceResponse(Shape):
    """A source archive that was checked and stored."""

    source_id: Sha256
    bytes: int
    file_count: int
