"""Lists of jobs: filtered, sorted and paged.

A page starts after the sort value and run id of the previous page's last job, which an index finds directly. Invariant:
each sortable column has an index whose last column is the run id, so that no page needs a sort.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, and_, literal_column, or_, select, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Session

from control_plane.core.states import JobState, TrainingJobStatus
from control_plane.db.jobs import SavedJob, record_of_row
from control_plane.db.models import JobRow


class SortBy(StrEnum):
    """Sort order of a list of jobs."""

    CREATION_TIME = "CreationTime"
    LAST_MODIFIED_TIME = "LastModifiedTime"
    NAME = "Name"


_COLUMNS: dict[SortBy, InstrumentedAttribute[Any]] = {
    SortBy.CREATION_TIME: JobRow.created_at,
    SortBy.LAST_MODIFIED_TIME: JobRow.modified_at,
    SortBy.NAME: JobRow.name,
}
Position = tuple[datetime | str, str]
"""Sort value and run id of the previous page's last job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Conditions that select jobs. None is no condition."""

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
    """Value of the tag `tag_key`. None means any value."""


def page(
    session: Session,
    which: JobFilter,
    *,
    after: Position | None = None,
    limit: int,
    sort_by: SortBy = SortBy.CREATION_TIME,
    is_ascending: bool = False,
) -> tuple[SavedJob, ...]:
    """Return the page of jobs after a position (None: the first). Equal values are sorted by run id."""
    column = _COLUMNS[sort_by]
    keys = (column, JobRow.run_id)
    query = (
        select(JobRow)
        .where(*_conditions(which, sort_by))
        .order_by(*(key.asc() if is_ascending else key.desc() for key in keys))
        .limit(limit)
    )
    if after is not None:
        there = tuple_(*keys)
        query = query.where(there > tuple_(*after) if is_ascending else there < tuple_(*after))
    return tuple(record_of_row(row) for row in session.scalars(query))


def position_of(job: SavedJob, sort_by: SortBy) -> Position:
    """Return a job's position in a list."""
    value: datetime | str = getattr(job, _COLUMNS[sort_by].key)
    return value, job.run_id


def _conditions(which: JobFilter, sort_by: SortBy) -> list[ColumnElement[bool]]:
    is_indexed = sort_by is SortBy.CREATION_TIME
    found: list[ColumnElement[bool]] = []
    if which.status is not None:
        found += _of_status(which.status, _column(JobRow.state, is_indexed=is_indexed))
    if which.name_contains is not None:
        found.append(JobRow.name.contains(which.name_contains, autoescape=True))
    if which.fleet_name is not None:
        found.append(_column(JobRow.fleet_name, is_indexed=is_indexed) == which.fleet_name)
    if which.project is not None:
        found.append(JobRow.project == which.project)
    bounds = (
        (JobRow.created_at, which.created_after, which.created_before),
        (JobRow.modified_at, which.modified_after, which.modified_before),
    )
    for column, after, before in bounds:
        found += [column > after] if after is not None else []
        found += [column < before] if before is not None else []
    if which.tag_key is not None:
        tag = JobRow.tags[which.tag_key].as_string()
        found.append(tag.is_not(None) if which.tag_value is None else tag == which.tag_value)
    return found


def _column(column: InstrumentedAttribute[str], *, is_indexed: bool) -> ColumnElement[str]:
    # The expression keeps the planner from an index that finds the jobs in another order, which each page would
    # sort.
    return column.expression if is_indexed else column + literal_column("''")


def _of_status(status: TrainingJobStatus, state: ColumnElement[str]) -> list[ColumnElement[bool]]:
    """Return the conditions of a status.

    A job with a requested stop is Stopping until its end (`states.training_job_status`).
    """
    is_stopping = or_(JobRow.stop_requested_at.is_not(None), JobRow.state == JobState.STOPPING)
    if status is TrainingJobStatus.STOPPING:
        return [JobRow.ended_at.is_(None), is_stopping]
    if status is TrainingJobStatus.IN_PROGRESS:
        return [JobRow.ended_at.is_(None), and_(JobRow.stop_requested_at.is_(None), JobRow.state != JobState.STOPPING)]
    return [state == status.value.lower()]
