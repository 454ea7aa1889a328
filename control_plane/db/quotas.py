"""Quotas: what the jobs of a project may have, all together, and what of AWS its submitters may name.

Invariant: a quota stops nothing that runs; it holds for what is created and for what waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from control_plane.db.errors import NotFound
from control_plane.db.models import Job, Quota
from control_plane.db.session import changed_rows, record_of, values_of


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRecord:
    """A quota as it is stored."""

    project: str
    max_node_count: int | None
    """In each fleet; None: any."""
    max_job_count: int | None
    """That have not ended; None: any."""
    max_source_bytes: int | None = None
    """Of all uploaded archives together, those under way included; None: any."""
    max_priority: int = 0
    """The highest that its submitters may set."""
    allowed_role_arns: tuple[str, ...] = ()
    """What its submitters may name; an entry that ends with `*` allows all that begins like it."""
    allowed_secrets: tuple[str, ...] = ()
    allowed_data: tuple[str, ...] = ()
    """S3 URIs and directories on nodes."""


def put(session: Session, quota: QuotaRecord) -> None:
    """Store a project's quota in place of the one that it had."""
    session.execute(delete(Quota).where(Quota.project == quota.project))
    session.add(Quota(**values_of(quota)))
    session.flush()


def find(session: Session, project: str) -> QuotaRecord | None:
    """Return a project's quota, or None where it may have anything."""
    row = session.get(Quota, project)
    return None if row is None else record_of(row, QuotaRecord)


def page(session: Session, *, only_project: str | None, after: str | None, limit: int) -> tuple[QuotaRecord, ...]:
    """Return quotas by project.

    Args:
        session: any.
        only_project: that one's alone; None: all.
        after: project of the last one of the page before, or None for the first page.
        limit: at most this many.

    Returns:
        At most `limit` quotas.
    """
    query = select(Quota).order_by(Quota.project).limit(limit)
    if only_project is not None:
        query = query.where(Quota.project == only_project)
    if after is not None:
        query = query.where(Quota.project > after)
    return tuple(record_of(row, QuotaRecord) for row in session.scalars(query))


def remove(session: Session, project: str) -> None:
    """Lift a project's quota.

    Args:
        session: a writing one.
        project: whose.

    Raises:
        NotFound: it has none.
    """
    if not changed_rows(session.execute(delete(Quota).where(Quota.project == project))):
        raise NotFound("quota of the project", project)


def live_job_count(session: Session, project: str) -> int:
    """Return how many jobs of a project have not ended."""
    return (
        session.scalar(select(func.count()).select_from(Job).where(Job.project == project, Job.ended_at.is_(None))) or 0
    )
