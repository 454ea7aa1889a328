"""Revisions: what was changed of a job after it was created, and when. A job is created with revision 1.

Invariant: revisions are numbered without gaps, and a job carries what its newest one says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from control_plane.db import jobs
from control_plane.db.errors import Conflict
from control_plane.db.jobs import JobRecord, JobSpec
from control_plane.db.models import Job, Revision
from control_plane.db.session import changed_rows
from everstep.protocol.codec import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One field that was changed."""

    field: str
    """Its path in the API's words: `CheckpointConfig.EverySteps`."""
    before: str | None
    after: str | None
    """As text; None where there was or is none."""
    needs_generation: bool
    """A running generation goes on with what it began with: it holds from the next one on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionRecord:
    """A revision as it is stored."""

    number: int
    at: datetime
    changes: tuple[Change, ...]


def revise(
    session: Session,
    job: JobRecord,
    *,
    spec: JobSpec,
    priority: int,
    tags: Mapping[str, str],
    changes: tuple[Change, ...],
    now: datetime,
) -> JobRecord:
    """Make the job's next revision.

    Args:
        session: a writing one.
        job: as it was read in the same transaction.
        spec: the new one.
        priority: the new one.
        tags: the new ones.
        changes: what differs; not empty.
        now: when.

    Returns:
        The job as it is now.

    Raises:
        Conflict: it has ended, or was changed meanwhile.
    """
    if job.ended_at is not None:
        raise Conflict(f"the training job {job.name!r} has ended: {job.reason}")
    number = job.revision + 1
    values: dict[str, Any] = {
        "spec": msgspec.to_builtins(spec),
        "priority": priority,
        "tags": dict(tags),
        "revision": number,
        "modified_at": now,
    }
    if not changed_rows(
        session.execute(update(Job).where(Job.run_id == job.run_id, Job.revision == job.revision).values(**values))
    ):
        raise Conflict(f"the training job {job.name!r} was changed by another request at the same time")
    session.add(
        Revision(run_id=job.run_id, number=number, at=now, changes=[msgspec.to_builtins(change) for change in changes])
    )
    session.flush()
    return jobs.get_run(session, job.run_id)


def page(session: Session, job: JobRecord, *, after: int, limit: int) -> tuple[RevisionRecord, ...]:
    """Return revisions of a job, oldest first; the first is what it was created with.

    Args:
        session: any.
        job: whose.
        after: number of the last one of the page before; 0 for the first page.
        limit: at most this many.

    Returns:
        At most `limit` revisions.
    """
    first = () if after else (RevisionRecord(number=1, at=job.created_at, changes=()),)
    query = (
        select(Revision)
        .where(Revision.run_id == job.run_id, Revision.number > after)
        .order_by(Revision.number)
        .limit(limit - len(first))
    )
    later = (
        RevisionRecord(
            number=row.number, at=row.at, changes=tuple(msgspec.convert(each, Change) for each in row.changes)
        )
        for row in session.scalars(query)
    )
    return (*first, *later)


resolve(Change)
