"""Incidents: failures and their recoveries.

Invariant: only the server that has the job's lease writes an incident, and a closed incident never changes. Two
exceptions are the acknowledgement and the owner, which users write at any time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from functools import reduce
from operator import add
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, bindparam, case, func, literal, or_, select, tuple_, update
from sqlalchemy.orm import Session

from control_plane.core.observed.facts import Fact
from control_plane.core.observed.incidents import Response
from control_plane.core.observed.nodes import Cause
from control_plane.core.states import JobState
from control_plane.db import leases
from control_plane.db.errors import NotFound
from control_plane.db.leases import Lease
from control_plane.db.models import IncidentRow, JobRow
from control_plane.db.session import changed_rows, columns_of, equal_to, record_of, values_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NewIncident:
    """The columns of an incident that are known when the control plane detects its failure."""

    job_name: str
    project: str
    phase: str
    """Phase of the recovery: detect, replace, restore, rework or closed."""
    cause: str
    evidence: tuple[Fact, ...]
    decision: Response
    reached_step: int | None
    generation_before: int
    instance_ids: tuple[str, ...]
    faulted_instance_ids: tuple[str, ...]
    lost_node_count: int
    failed_at: datetime
    opened_at: datetime
    detect_seconds: float | None
    detail: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedIncident(NewIncident):
    """A row of the table of incidents."""

    id: str
    run_id: str
    restore_source: str | None
    from_step: int | None
    lost_steps: int | None
    generation_after: int | None
    node_count_before: int
    """Number of nodes of the generation that ended. 0 until the next generation has a plan."""
    node_count_after: int
    """Number of nodes of the newest generation of the recovery. 0 until that generation has a plan."""
    replacement_instance_ids: tuple[str, ...]
    replaced_at: datetime | None
    restored_at: datetime | None
    closed_at: datetime | None
    is_given_up: bool
    """Whether the job ended or was paused before training had caught up."""
    replace_seconds: float | None
    restore_seconds: float | None
    rework_seconds: float | None
    cost_usd: float | None
    rank_sources: tuple[tuple[str, int], ...]
    """Restore source of each rank's shard, run-length encoded in order of ranks."""
    acknowledged_at: datetime | None
    acknowledged_by: str
    acknowledgement: str
    owner: str
    """Name of the person who takes care of the incident, as a user entered it. Empty without an owner."""


def open_incident(session: Session, lease: Lease, incident_id: str, incident: NewIncident) -> SavedIncident:
    """Store a new incident of the lease's job. An already stored incident stays unchanged.

    Args:
        session: from `Database.write`.
        lease: lease of the incident's job.
        incident_id: id of the incident. If the id is already stored, this call repeats an earlier call.
        incident: the columns of the new row.

    Returns:
        The stored incident.

    Raises:
        StaleLease: another control-plane server has taken the lease over. Nothing was written.
    """
    leases.guard(session, lease)
    row = session.get(IncidentRow, incident_id)
    if row is None:
        row = IncidentRow(**values_of(incident), id=incident_id, run_id=lease.key)
        session.add(row)
        session.flush()
    return record_of(row, SavedIncident)


def change(session: Session, lease: Lease, incident_id: str, **changes: object) -> None:
    """Update an incident during its recovery.

    Args:
        session: from `Database.write`.
        lease: lease of the incident's job.
        incident_id: id of an incident of the lease's job.
        **changes: columns to update, by name, with their new values.

    Raises:
        StaleLease: another control-plane server has taken the lease over. Nothing was written.
        NotFound: the job has no incident with this id.
    """
    leases.guard(session, lease)
    found = session.execute(
        update(IncidentRow).where(IncidentRow.id == incident_id, IncidentRow.run_id == lease.key).values(**changes)
    )
    if not changed_rows(found):
        raise NotFound("incident", incident_id)


def get(session: Session, incident_id: str) -> SavedIncident:
    """Return one incident.

    Raises NotFound if the incident does not exist. `session` comes from `Database.read` or `Database.write`.
    """
    row = session.get(IncidentRow, incident_id)
    if row is None:
        raise NotFound("incident", incident_id)
    return record_of(row, SavedIncident)


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentTotals:
    """Sums over the incidents of one job, one fleet or all jobs: number, recovery time, losses and cost."""

    count: int
    closed_count: int
    failure_count: int
    """Number of incidents that were failures: neither planned departures, nor failed pauses, nor drills."""
    recovered_count: int
    """Number of failures from which training has recovered."""
    recovery_seconds: float
    """Total recovery time in seconds. The recovery of a failure lasts until training has repeated the lost steps."""
    lost_node_count: int
    """Number of nodes that failed or that AWS reclaimed.

    The number excludes nodes that a person drained or a drill terminated.
    """
    lost_steps: int
    cost_usd: float | None
    """Sum of the incidents' costs. None if no incident has a cost."""

    @property
    def mean_recovery_seconds(self) -> float | None:
        """Mean time from a failure until training has repeated the lost steps.

        None if training has recovered from no failure.
        """
        return self.recovery_seconds / self.recovered_count if self.recovered_count else None


def _totals() -> Select[int, int, int, int, float, int, int, float | None]:
    incident = IncidentRow.__table__.c
    phases = (incident.detect_seconds, incident.replace_seconds, incident.restore_seconds, incident.rework_seconds)
    # Comparisons with OR avoid an IN clause, which SQLAlchemy would expand again for each execution.
    is_failure = or_(*(incident.cause == cause.value for cause in Cause if cause.is_failure))
    is_recovered = and_(is_failure, incident.closed_at.is_not(None), incident.is_given_up.is_(False))
    return select(
        func.count(),
        func.count(incident.closed_at),
        func.count(case((is_failure, 1))),
        func.count(case((is_recovered, 1))),
        func.coalesce(func.sum(case((is_recovered, reduce(add, phases)), else_=0.0)), 0.0),
        func.coalesce(func.sum(incident.lost_node_count), 0),
        func.coalesce(func.sum(incident.lost_steps), 0),
        func.sum(incident.cost_usd),
    ).select_from(IncidentRow.__table__)


# The statements are constants, because their construction takes longer than their execution.
_TOTALS = _totals()
_TOTALS_OF_RUN = _TOTALS.where(IncidentRow.run_id == bindparam("of_run"))
_TOTALS_OF_FLEET = _TOTALS.join(JobRow, JobRow.run_id == IncidentRow.run_id).where(
    JobRow.fleet_name == bindparam("of_fleet"), IncidentRow.cause != Cause.DRILL.value
)


def totals(session: Session, *, run_id: str | None = None, fleet_name: str | None = None) -> IncidentTotals:
    """Return sums over the incidents of one run, of one fleet's jobs, or of all jobs.

    Args:
        session: from `Database.read` or `Database.write`.
        run_id: only incidents of this run. None means no such condition.
        fleet_name: only incidents of this fleet's jobs, without drills. None means no such condition.

    Returns:
        The sums. All are zero without incidents.
    """
    assert run_id is None or fleet_name is None
    query = _TOTALS_OF_RUN if run_id is not None else _TOTALS_OF_FLEET if fleet_name is not None else _TOTALS
    asked = {"of_run": run_id} if run_id is not None else {"of_fleet": fleet_name} if fleet_name is not None else {}
    return totals_of(session.execute(query, asked).one())


def totals_where_run(run_id: ColumnElement[str]) -> Select[int, int, int, int, float, int, int, float | None]:
    """Return the query for the sums over one run's incidents.

    Other modules of this package join this query to their own queries, and decode its columns with `totals_of`.
    """
    return _TOTALS.where(IncidentRow.__table__.c.run_id == run_id)


def totals_of(row: Sequence[Any]) -> IncidentTotals:
    """Convert a row to a record. The row is a result of the query from `totals_where_run`."""
    found = dict(zip((field.name for field in fields(IncidentTotals)), row, strict=True))
    whole = {name: int(found[name]) for name in ("lost_node_count", "lost_steps")}  # PostgreSQL sums are Decimal.
    return IncidentTotals(**{**found, **whole})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recoveries:
    """Counts the completed recoveries of one job with one cause and one restore source, and the steps they lost."""

    job_name: str
    project: str
    cause: str
    source: str | None
    count: int
    lost_steps: int


def recoveries(session: Session, run_ids: Collection[str]) -> tuple[Recoveries, ...]:
    """Count the completed recoveries of runs, and their lost steps, by job, cause and restore source."""
    keys = (IncidentRow.job_name, IncidentRow.project, IncidentRow.cause, IncidentRow.restore_source)
    query = (
        select(*keys, func.count(), func.coalesce(func.sum(IncidentRow.lost_steps), 0)).group_by(*keys).order_by(*keys)
    )
    is_recovered = and_(IncidentRow.closed_at.is_not(None), IncidentRow.is_given_up.is_(False))
    found = session.execute(query.where(is_recovered, IncidentRow.run_id.in_(run_ids)))
    return tuple(
        Recoveries(job_name=job, project=project, cause=cause, source=source, count=count, lost_steps=lost or 0)
        for job, project, cause, source, count, lost in found
    )


def acknowledge(session: Session, incident_id: str, *, who: str, note: str, now: datetime) -> bool:
    """Record that a user has seen an incident.

    Return False, and change nothing, if the incident is already acknowledged. The function needs no lease, because the
    job loop never writes these columns.
    """
    query = update(IncidentRow).where(IncidentRow.id == incident_id, IncidentRow.acknowledged_at.is_(None))
    return bool(
        changed_rows(session.execute(query.values(acknowledged_at=now, acknowledged_by=who, acknowledgement=note)))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOfIncident:
    """The data of a job that descriptions of its incidents need (`accounts.incidents`)."""

    run_id: str
    fleet_name: str
    state: str
    reason: str
    memo: Mapping[str, Any]
    ended_at: datetime | None
    queued_at: tuple[datetime, ...]
    """Times at which the job entered the queue, oldest first."""


def jobs_of(session: Session, run_ids: Collection[str]) -> dict[str, JobOfIncident]:
    """Return the data of several jobs that descriptions of incidents need, by run id, in one query."""
    columns = (JobRow.run_id, JobRow.fleet_name, JobRow.state, JobRow.reason, JobRow.ended_at)
    query = select(*columns, JobRow.memo, JobRow.transitions).where(JobRow.run_id.in_(run_ids))
    return {
        row.run_id: JobOfIncident(
            **columns_of(row, JobOfIncident, leave_out=("queued_at",)),
            queued_at=tuple(
                datetime.fromisoformat(each["at"]) for each in row.transitions if each["state"] == JobState.QUEUED
            ),
        )
        for row in session.execute(query)
    }


def set_owner(session: Session, incident_id: str, owner: str) -> bool:
    """Set the owner of an incident. An empty `owner` removes it.

    Return False, and change nothing, if the incident has this owner already. The function needs no lease, because the
    job loop never writes this column.
    """
    query = update(IncidentRow).where(IncidentRow.id == incident_id, IncidentRow.owner != owner)
    return bool(changed_rows(session.execute(query.values(owner=owner))))


def find(session: Session, incident_id: str) -> SavedIncident | None:
    """Return one incident, or None if the database has no incident with this id.

    The history of a node can contain the id of an incident that does not exist: a fault of a node without a job gets an
    incident id, but no incident.
    """
    row = session.get(IncidentRow, incident_id)
    return None if row is None else record_of(row, SavedIncident)


def counts(session: Session, run_ids: Collection[str]) -> dict[str, tuple[int, int]]:
    """Return for each of several runs the number of its incidents and of its open incidents, in one query.

    Runs without incidents are missing in the result.
    """
    is_open = func.sum(case((IncidentRow.closed_at.is_(None), 1), else_=0))
    query = (
        select(IncidentRow.run_id, func.count(), is_open)
        .where(IncidentRow.run_id.in_(run_ids))
        .group_by(IncidentRow.run_id)
    )
    return {run_id: (count, open_count) for run_id, count, open_count in session.execute(query)}


def closed_of(session: Session, run_ids: Collection[str]) -> tuple[SavedIncident, ...]:
    """Return the closed incidents of several runs, in one query."""
    query = select(IncidentRow).where(IncidentRow.run_id.in_(run_ids), IncidentRow.closed_at.is_not(None))
    return tuple(record_of(row, SavedIncident) for row in session.scalars(query))


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentFilter:
    """Conditions that select incidents. A field with the value None is no condition."""

    run_ids: Collection[str] | None = None
    """Only incidents of these runs."""
    project: str | None = None
    is_open: bool | None = None
    cause: str | None = None


def page(
    session: Session,
    which: IncidentFilter,
    *,
    after: tuple[datetime, str] | None,
    limit: int,
    is_ascending: bool = True,
) -> tuple[SavedIncident, ...]:
    """Return one page of incidents, ordered by opening time.

    Args:
        session: from `Database.read` or `Database.write`.
        which: conditions that every returned row fulfils.
        after: `(opened_at, id)` of the previous page's last incident. None means the first page.
        limit: maximum number of rows, at least 1.
        is_ascending: whether the oldest incident is first. If False, the newest incident is first.

    Returns:
        At most `limit` incidents.
    """
    keys = (IncidentRow.opened_at, IncidentRow.id)
    query = select(IncidentRow).where(*equal_to(IncidentRow, project=which.project, cause=which.cause)).limit(limit)
    query = query.order_by(*(key if is_ascending else key.desc() for key in keys))
    if which.run_ids is not None:
        query = query.where(IncidentRow.run_id.in_(which.run_ids))
    if which.is_open is not None:
        query = query.where(IncidentRow.closed_at.is_(None) if which.is_open else IncidentRow.closed_at.is_not(None))
    if after is not None:
        last = tuple_(literal(after[0], IncidentRow.opened_at.type), literal(after[1]))
        query = query.where(tuple_(*keys) > last if is_ascending else tuple_(*keys) < last)
    return tuple(record_of(row, SavedIncident) for row in session.scalars(query))
