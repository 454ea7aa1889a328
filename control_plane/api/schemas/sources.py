"""API models: uploads of source archives."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from control_plane.api.schemas.common import Hidden, Request, Sha256, Shape


class CreateSourceRequest(Request):
    """Announces the upload of a source archive."""

    source_id: Sha256
    """The SHA-256 of the archive, a gzipped tar."""
    bytes: int = Field(ge=0, le=2**40)
    """Size of the archive."""


class SourceUpload(Shape):
    """A presigned upload: `PUT Url` with these headers and the archive as body. It needs no token."""

    url: Hidden
    """Secret. The URL accepts only this archive, because its checksum and length are signed."""
    headers: dict[str, str]
    expiration_time: datetime
    """When the URL expires. CreateSource then returns a new one."""


class CreateSourceResponse(Shape):
    """Whether a source is stored already, and if not, where to upload it."""

    source_id: Sha256
    is_stored: bool
    """True if an earlier upload was checked and stored. No upload is needed."""
    upload: SourceUpload | None
    """Presigned request with which the client uploads the archive before it calls CompleteSource.

    Absent if the source is stored already, or if the service's store accepts no direct uploads. In the latter case,
    call PutSource.
    """


class PutSourceResponse(Shape):
    """A source archive that was checked and stored."""

    source_id: Sha256
    bytes: int
    file_count: int
