"""Lists of jobs: filtered, sorted, a page at a time.

A page begins after a position, which is the last job's value of the sorted column and its run: an index leads straight
there, however many jobs come before. A job that is deleted between two pages leaves no hole.

Invariant: the columns that can be sorted by are indexed, each with the run as its last column, so that no page is ever
sorted.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, and_, literal_column, or_, select, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Session

from control_plane.core.states import JobState, TrainingJobStatus
from control_plane.db.jobs import JobRecord, record_of_row
from control_plane.db.models import Job


class SortBy(StrEnum):
    """What a list of jobs is sorted by."""

    CREATION_TIME = "CreationTime"
    LAST_MODIFIED_TIME = "LastModifiedTime"
    NAME = "Name"


_COLUMNS: dict[SortBy, InstrumentedAttribute[Any]] = {
    SortBy.CREATION_TIME: Job.created_at,
    SortBy.LAST_MODIFIED_TIME: Job.modified_at,
    SortBy.NAME: Job.name,
}
Position = tuple[datetime | str, str]
"""The sorted column's value and the run of the last job of a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Which jobs to list; None means any."""

    status: TrainingJobStatus | None = None
    name_contains: str | None = None
    fleet_name: str | None = None
    project: str | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None
    modified_after: datetime | None = None
    modified_before: datetime | None = None
    tag_key: str | None = None
    tag_value: str | None = None
    """Of that tag; None: any."""


def page(
    session: Session,
    which: JobFilter,
    *,
    after: Position | None = None,
    limit: int,
    sort_by: SortBy = SortBy.CREATION_TIME,
    is_ascending: bool = False,
) -> tuple[JobRecord, ...]:
    """Return jobs in order.

    Args:
        session: any.
        which: the filter.
        after: of the last job of the page before, or None for the first page.
        limit: at most this many.
        sort_by: what they are sorted by; of equal ones by their run.
        is_ascending: the smallest first; else the greatest.

    Returns:
        At most `limit` jobs.
    """
    column = _COLUMNS[sort_by]
    keys = (column, Job.run_id)
    query = (
        select(Job)
        .where(*_conditions(which, sort_by))
        .order_by(*(key.asc() if is_ascending else key.desc() for key in keys))
        .limit(limit)
    )
    if after is not None:
        there = tuple_(*keys)
        query = query.where(there > tuple_(*after) if is_ascending else there < tuple_(*after))
    return tuple(record_of_row(row) for row in session.scalars(query))


def position_of(job: JobRecord, sort_by: SortBy) -> Position:
    """Return where a job stands in a list that is sorted so."""
    value: datetime | str = getattr(job, _COLUMNS[sort_by].key)
    return value, job.run_id


def _conditions(which: JobFilter, sort_by: SortBy) -> list[ColumnElement[bool]]:
    is_indexed = sort_by is SortBy.CREATION_TIME
    found: list[ColumnElement[bool]] = []
    if which.status is not None:
        found += _of_status(which.status, _column(Job.state, is_indexed=is_indexed))
    if which.name_contains is not None:
        found.append(Job.name.contains(which.name_contains, autoescape=True))
    if which.fleet_name is not None:
        found.append(_column(Job.fleet_name, is_indexed=is_indexed) == which.fleet_name)
    if which.project is not None:
        found.append(Job.project == which.project)
    bounds = (
        (Job.created_at, which.created_after, which.created_before),
        (Job.modified_at, which.modified_after, which.modified_before),
    )
    for column, after, before in bounds:
        found += [column > after] if after is not None else []
        found += [column < before] if before is not None else []
    if which.tag_key is not None:
        tag = Job.tags[which.tag_key].as_string()
        found.append(tag.is_not(None) if which.tag_value is None else tag == which.tag_value)
    return found


def _column(column: InstrumentedAttribute[str], *, is_indexed: bool) -> ColumnElement[str]:
    """Return a column, or an expression of the same value: an index that narrows and does not sort would have every match sorted for each page."""
    return column.expression if is_indexed else column + literal_column("''")


def _of_status(status: TrainingJobStatus, state: ColumnElement[str]) -> list[ColumnElement[bool]]:
    """A stop that was asked for shows at once, whatever the state; see `states.training_job_status`."""
    is_stopping = or_(Job.stop_requested_at.is_not(None), Job.state == JobState.STOPPING)
    if status is TrainingJobStatus.STOPPING:
        return [Job.ended_at.is_(None), is_stopping]
    if status is TrainingJobStatus.IN_PROGRESS:
        return [Job.ended_at.is_(None), and_(Job.stop_requested_at.is_(None), Job.state != JobState.STOPPING)]
    return [state == status.value.lower()]
