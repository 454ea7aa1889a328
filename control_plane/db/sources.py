"""Sources: the users' archives, checked and stored, named by their own digest.

Invariant: a source in this table is complete in S3 and has passed every check.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from control_plane.db.errors import NotFound
from control_plane.db.models import Source, SourceUpload
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
    """Store a source for a project and end its upload; a source that the project has stays as it is."""
    remove_upload(session, source.sha256, source.project)
    row = session.get(Source, (source.sha256, source.project))
    if row is None:
        row = Source(**values_of(source))
        session.add(row)
        session.flush()
    return record_of(row, SourceRecord)


def used_bytes(session: Session, project: str, now: datetime, *, besides: str) -> int:
    """Return what a project's archives take, stored and under way.

    Args:
        session: any.
        project: whose.
        now: uploads that have expired by then are not counted.
        besides: SHA-256 of the archive that is being judged; it is not counted.

    Returns:
        Bytes; an archive that is stored and under way again is counted once.
    """
    stored = select(Source.sha256, Source.archive_bytes).where(Source.project == project, Source.sha256 != besides)
    under_way = select(SourceUpload.sha256, SourceUpload.archive_bytes).where(
        SourceUpload.project == project, SourceUpload.sha256 != besides, SourceUpload.expires_at > now
    )
    both = stored.union(under_way).subquery()
    return int(session.scalar(select(func.coalesce(func.sum(both.c.archive_bytes), 0))) or 0)


def put_upload(
    session: Session, sha256: str, project: str, *, archive_bytes: int, now: datetime, expires_at: datetime
) -> None:
    """Keep room for an archive under way, in place of the room that was kept for it before.

    Expired uploads of all projects are removed.
    """
    session.execute(delete(SourceUpload).where(SourceUpload.expires_at <= now))
    remove_upload(session, sha256, project)
    session.add(SourceUpload(sha256=sha256, project=project, archive_bytes=archive_bytes, expires_at=expires_at))
    session.flush()


def remove_upload(session: Session, sha256: str, project: str) -> None:
    """Keep no room for an archive any longer; there may be none."""
    session.execute(delete(SourceUpload).where(SourceUpload.sha256 == sha256, SourceUpload.project == project))
