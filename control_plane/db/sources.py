"""Sources: verified source archives of users, identified by their SHA-256.

Invariant: the archive of each row is complete in S3 and has passed all checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from control_plane.db.errors import NotFound
from control_plane.db.models import SourceRow, SourceUploadRow
from control_plane.db.session import record_of, values_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    """A stored source archive of one project."""

    sha256: str
    project: str
    bucket: str
    key: str
    archive_bytes: int
    unpacked_bytes: int
    files: tuple[str, ...]
    created_at: datetime


def get(session: Session, sha256: str, project: str | None) -> SourceRecord:
    """Return one source of a project or of any (None). Raises NotFound if the project has not uploaded this archive."""
    found = find(session, sha256, project)
    if found is None:
        raise NotFound("source", sha256)
    return found


def find(session: Session, sha256: str, project: str | None) -> SourceRecord | None:
    """Return one source of a project or of any (None), or None if it does not exist."""
    query = select(SourceRow).where(SourceRow.sha256 == sha256).order_by(SourceRow.project).limit(1)
    row = session.scalar(query if project is None else query.where(SourceRow.project == project))
    return None if row is None else record_of(row, SourceRecord)


def add(session: Session, source: SourceRecord) -> SourceRecord:
    """Store a project's source, unless it exists, and release the quota that was reserved for its upload."""
    remove_upload(session, source.sha256, source.project)
    row = session.get(SourceRow, (source.sha256, source.project))
    if row is None:
        row = SourceRow(**values_of(source))
        session.add(row)
        session.flush()
    return record_of(row, SourceRecord)


def used_bytes(session: Session, project: str, now: datetime, *, besides: str) -> int:
    """Return the bytes of a project's archives and unexpired uploads, each archive once, without `besides`."""
    stored = select(SourceRow.sha256, SourceRow.archive_bytes).where(
        SourceRow.project == project, SourceRow.sha256 != besides
    )
    under_way = select(SourceUploadRow.sha256, SourceUploadRow.archive_bytes).where(
        SourceUploadRow.project == project, SourceUploadRow.sha256 != besides, SourceUploadRow.expires_at > now
    )
    both = stored.union(under_way).subquery()
    return int(session.scalar(select(func.coalesce(func.sum(both.c.archive_bytes), 0))) or 0)


def put_upload(
    session: Session, sha256: str, project: str, *, archive_bytes: int, now: datetime, expires_at: datetime
) -> None:
    """Reserve quota for an upload, in place of an earlier reservation. Deletes expired reservations of all projects."""
    session.execute(delete(SourceUploadRow).where(SourceUploadRow.expires_at <= now))
    remove_upload(session, sha256, project)
    session.add(SourceUploadRow(sha256=sha256, project=project, archive_bytes=archive_bytes, expires_at=expires_at))
    session.flush()


def remove_upload(session: Session, sha256: str, project: str) -> None:
    """Release the quota that was reserved for an upload, if any."""
    session.execute(delete(SourceUploadRow).where(SourceUploadRow.sha256 == sha256, SourceUploadRow.project == project))
