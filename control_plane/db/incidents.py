"""Incidents: failures and their recoveries.

Invariant: only the holder of the job's lease writes an incident, and a closed incident never changes. Users write the
acknowledgement and the owner at any time.
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
    """The columns of an incident that are known at the detection of its failure."""

    job_name: str
    project: str
    phase: str
    """detect, replace, restore, rework or closed."""
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
    """Nodes of the generation that ended. 0 until the next generation has a plan."""
    node_count_after: int
    """Nodes of the recovery's newest generation. 0 until that generation has a plan."""
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
    """Name as a user entered it. Empty without an owner."""


def open_incident(session: Session, lease: Lease, incident_id: str, incident: NewIncident) -> SavedIncident:
    """Store and return a new incident. An incident with this id stays unchanged. Raises StaleLease."""
    leases.guard(session, lease)
    row = session.get(IncidentRow, incident_id)
    if row is None:
        row = IncidentRow(**values_of(incident), id=incident_id, run_id=lease.key)
        session.add(row)
        session.flush()
    return record_of(row, SavedIncident)


def change(session: Session, lease: Lease, incident_id: str, **changes: object) -> None:
    """Update an incident during its recovery.

    Raises StaleLease, and NotFound if the job has no incident with this id.
    """
    leases.guard(session, lease)
    found = session.execute(
        update(IncidentRow).where(IncidentRow.id == incident_id, IncidentRow.run_id == lease.key).values(**changes)
    )
    if not changed_rows(found):
        raise NotFound("incident", incident_id)


def get(session: Session, incident_id: str) -> SavedIncident:
    """Return one incident, or raise NotFound."""
    row = session.get(IncidentRow, incident_id)
    if row is None:
        raise NotFound("incident", incident_id)
    return record_of(row, SavedIncident)


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentTotals:
    """Sums over the incidents of one job, one fleet or all jobs."""

    count: int
    closed_count: int
    failure_count: int
    """Failures, without planned departures, failed pauses and drills."""
    recovered_count: int
    recovery_seconds: float
    """Summed over recovered failures, from the failure until training has repeated the lost steps."""
    lost_node_count: int
    """Nodes that failed or that AWS reclaimed, without nodes that a person drained or a drill terminated."""
    lost_steps: int
    cost_usd: float | None
    """None if no incident has a cost."""

    @property
    def mean_recovery_seconds(self) -> float | None:
        """Mean recovery time, or None without a recovered failure."""
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
    """Return sums over the incidents of one run, of one fleet's jobs without drills, or of all jobs."""
    assert run_id is None or fleet_name is None
    query = _TOTALS_OF_RUN if run_id is not None else _TOTALS_OF_FLEET if fleet_name is not None else _TOTALS
    asked = {"of_run": run_id} if run_id is not None else {"of_fleet": fleet_name} if fleet_name is not None else {}
    return totals_of(session.execute(query, asked).one())


def totals_where_run(run_id: ColumnElement[str]) -> Select[int, int, int, int, float, int, int, float | None]:
    """Return the query for one run's sums, for joins in this package. `totals_of` decodes its columns."""
    return _TOTALS.where(IncidentRow.__table__.c.run_id == run_id)


def totals_of(row: Sequence[Any]) -> IncidentTotals:
    """Convert a result of `totals_where_run` to a record."""
    found = dict(zip((field.name for field in fields(IncidentTotals)), row, strict=True))
    whole = {name: int(found[name]) for name in ("lost_node_count", "lost_steps")}  # PostgreSQL sums are Decimal.
    return IncidentTotals(**{**found, **whole})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recoveries:
    """Completed recoveries of one job with one cause and one restore source, and the steps they lost."""

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
    """Record that a user has seen an incident. Return False if the incident is already acknowledged."""
    query = update(IncidentRow).where(IncidentRow.id == incident_id, IncidentRow.acknowledged_at.is_(None))
    return bool(
        changed_rows(session.execute(query.values(acknowledged_at=now, acknowledged_by=who, acknowledgement=note)))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOfIncident:
    """Data of a job for descriptions of its incidents (`accounts.incidents`)."""

    run_id: str
    fleet_name: str
    state: str
    reason: str
    memo: Mapping[str, Any]
    ended_at: datetime | None
    queued_at: tuple[datetime, ...]
    """Times at which the job entered the queue, oldest first."""


def jobs_of(session: Session, run_ids: Collection[str]) -> dict[str, JobOfIncident]:
    """Return data of several jobs for descriptions of incidents, by run id."""
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
    """Set the owner of an incident; empty removes it. Return False if the incident has this owner already."""
    query = update(IncidentRow).where(IncidentRow.id == incident_id, IncidentRow.owner != owner)
    return bool(changed_rows(session.execute(query.values(owner=owner))))


def find(session: Session, incident_id: str) -> SavedIncident | None:
    """Return one incident, or None: a fault of a node without a job has an incident id, but no incident."""
    row = session.get(IncidentRow, incident_id)
    return None if row is None else record_of(row, SavedIncident)


def counts(session: Session, run_ids: Collection[str]) -> dict[str, tuple[int, int]]:
    """Return the number of incidents and of open incidents by run. Runs without any are missing."""
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
    """Conditions that select incidents. None is no condition."""

    run_ids: Collection[str] | None = None
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

    `after` is `(opened_at, id)` of the previous page's last incident. None means the first page.
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
