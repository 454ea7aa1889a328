"""Quotas: limits of a project, and the AWS resources that its submitters may use.

A quota never stops a running job. It applies only to new and waiting jobs.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from control_plane.db.errors import NotFound
from control_plane.db.models import JobRow, QuotaRow
from control_plane.db.session import changed_rows, equal_to, record_of, values_of


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRecord:
    """A row of the table of project quotas."""

    project: str
    max_node_count: int | None
    """Limit per fleet, for all jobs of the project. None means no limit."""
    max_job_count: int | None
    """Limit of unfinished jobs in all fleets. None means no limit."""
    max_source_bytes: int | None = None
    """Limit of the bytes of all source archives, including uploads in progress. None means no limit."""
    max_priority: int = 0
    """Highest priority that submitters may set."""
    allowed_role_arns: tuple[str, ...] = ()
    """A trailing `*` matches any suffix."""
    allowed_secrets: tuple[str, ...] = ()
    allowed_data: tuple[str, ...] = ()
    """S3 URIs and directories on nodes."""


def put(session: Session, quota: QuotaRecord) -> None:
    """Store a project's quota in place of an existing one."""
    session.execute(delete(QuotaRow).where(QuotaRow.project == quota.project))
    session.add(QuotaRow(**values_of(quota)))
    session.flush()


def find(session: Session, project: str) -> QuotaRecord | None:
    """Return a project's quota, or None if it has none."""
    row = session.get(QuotaRow, project)
    return None if row is None else record_of(row, QuotaRecord)


def page(session: Session, *, only_project: str | None, after: str | None, limit: int) -> tuple[QuotaRecord, ...]:
    """Return quotas by project, after a project (None: from the start)."""
    query = select(QuotaRow).where(*equal_to(QuotaRow, project=only_project)).order_by(QuotaRow.project).limit(limit)
    if after is not None:
        query = query.where(QuotaRow.project > after)
    return tuple(record_of(row, QuotaRecord) for row in session.scalars(query))


def remove(session: Session, project: str) -> None:
    """Delete a project's quota. Raises NotFound if it has none."""
    if not changed_rows(session.execute(delete(QuotaRow).where(QuotaRow.project == project))):
        raise NotFound("quota of the project", project)


def live_job_count(session: Session, project: str) -> int:
    """Return the number of a project's unfinished jobs."""
    query = select(func.count()).select_from(JobRow)
    return session.scalar(query.where(JobRow.project == project, JobRow.ended_at.is_(None))) or 0
