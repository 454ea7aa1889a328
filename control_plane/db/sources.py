"""Sources: the users' archives, checked and stored, named by their own digest.

Invariant: a source in this table is complete in S3 and has passed every check.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
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


def get(session: Session, sha256: str, project: str | None) -> SourceRecord:
    """Return one source.

    Args:
        session: any.
        sha256: the source's id.
        project: that uploaded it; None: any.

    Returns:
        The source as stored.

    Raises:
        NotFound: the project uploaded nothing with this digest.
    """
    found = find(session, sha256, project)
    if found is None:
        raise NotFound("source", sha256)
    return found


def find(session: Session, sha256: str, project: str | None) -> SourceRecord | None:
    """Return one source, or None where the project uploaded nothing with this digest; a project of None is any."""
    query = select(Source).where(Source.sha256 == sha256).order_by(Source.project).limit(1)
    row = session.scalar(query if project is None else query.where(Source.project == project))
    return None if row is None else record_of(row, SourceRecord)


def add(session: Session, source: SourceRecord) -> SourceRecord:
    """Store a source for a project; one that the project has stays as it is."""
    row = session.get(Source, (source.sha256, source.project))
    if row is None:
        row = Source(**values_of(source))
        session.add(row)
        session.flush()
    return record_of(row, SourceRecord)
