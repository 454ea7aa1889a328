"""Revisions: the changes that users made to a job's configuration. The configuration at creation is revision 1.

Invariant: revisions are numbered without gaps, and the job's row contains the newest one.
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
from control_plane.db.jobs import SavedJob, SavedJobSpec
from control_plane.db.models import JobRow, RevisionRow
from control_plane.db.session import changed_rows
from everstep.protocol.codec import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One changed field, with its old and new value."""

    field: str
    """Path in the API's names, for example `CheckpointConfig.EverySteps`."""
    before: str | None
    after: str | None
    """Text. None in `before` or `after` means that the field was not set."""
    needs_generation: bool
    """Whether the change takes effect only with the next generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionRecord:
    """A row of the table of job revisions."""

    number: int
    at: datetime
    changes: tuple[Change, ...]


def revise(
    session: Session,
    job: SavedJob,
    *,
    spec: SavedJobSpec,
    priority: int,
    tags: Mapping[str, str],
    changes: tuple[Change, ...],
    now: datetime,
) -> SavedJob:
    """Store the next revision of a job that the same transaction has read. Return the changed job.

    `spec` and `tags` are complete, `changes` is not empty. Raises Conflict if the job has ended, or a
    concurrent request changed it.
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
        session.execute(
            update(JobRow).where(JobRow.run_id == job.run_id, JobRow.revision == job.revision).values(**values)
        )
    ):
        raise Conflict(f"the training job {job.name!r} was changed by another request at the same time")
    session.add(
        RevisionRow(
            run_id=job.run_id, number=number, at=now, changes=[msgspec.to_builtins(change) for change in changes]
        )
    )
    session.flush()
    return jobs.get_run(session, job.run_id)


def page(session: Session, job: SavedJob, *, after: int, limit: int) -> tuple[RevisionRecord, ...]:
    """Return revisions of a job after a number (0: from its creation), oldest first."""
    first = () if after else (RevisionRecord(number=1, at=job.created_at, changes=()),)
    query = (
        select(RevisionRow)
        .where(RevisionRow.run_id == job.run_id, RevisionRow.number > after)
        .order_by(RevisionRow.number)
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
