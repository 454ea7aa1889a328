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
    """A presigned upload to S3: the client sends `PUT Url` with these headers and the archive as body.

    The request needs no token.
    """

    url: Hidden
    """Secret. The URL accepts only this archive, because its checksum and length are signed."""
    headers: dict[str, str]
    expiration_time: datetime
    """When the URL expires. After that, CreateSource returns another URL."""


class CreateSourceResponse(Shape):
    """The state of a source archive, and the upload request if the archive is not stored yet."""

    source_id: Sha256
    is_stored: bool
    """Whether an earlier upload of this archive was checked and stored. If true, no upload is needed."""
    upload: SourceUpload | None
    """Presigned request with which the client uploads the archive before it calls CompleteSource.

    Absent if the source is stored already. Also absent if the service's object store accepts no direct uploads; call
    PutSource in this case.
    """


class PutSourceResponse(Shape):
    """A source archive that was checked and stored."""

    source_id: Sha256
    bytes: int
    file_count: int
