"""Sources: the users' archives, checked and stored, named by their own digest.

Invariant: a source in this table is complete in S3 and has passed every check.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.orm import Session

from control_plane.db.errors import NotFound
from control_plane.db.models import Source
from control_plane.db.session import record_of, values_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    """A source archive."""

    sha256: str
    project: str
    bucket: str
    key: str
    archive_bytes: int
    unpacked_bytes: int
    files: tuple[str, ...]
    created_at: datetime


def get(session: Session, sha256: str) -> SourceRecord:
    """Return one source.

    Args:
        session: any.
        sha256: the source's id.

    Returns:
        The source as stored.

    Raises:
        NotFound: nothing was uploaded under this digest.
    """
    found = find(session, sha256)
    if found is None:
        raise NotFound("source", sha256)
    return found


def find(session: Session, sha256: str) -> SourceRecord | None:
    """Return one source, or None where nothing was stored under this digest."""
    row = session.get(Source, sha256)
    return None if row is None else record_of(row, SourceRecord)


def add(session: Session, source: SourceRecord) -> SourceRecord:
    """Store a source; one that is known stays as it is."""
    row = session.get(Source, source.sha256)
    if row is None:
        row = Source(**values_of(source))
        session.add(row)
        session.flush()
    return record_of(row, SourceRecord)
