"""Incidents: failures and their recoveries.

Invariant: an incident is written under its job's lease; once closed it is history.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from operator import add
from typing import Any, TypedDict, Unpack

from sqlalchemy import ColumnElement, Select, and_, bindparam, case, func, literal, or_, select, tuple_, update
from sqlalchemy.orm import Session

from control_plane.core.observed.nodes import Cause
from control_plane.db import leases
from control_plane.db.errors import NotFound
from control_plane.db.leases import Lease
from control_plane.db.models import Incident, Job
from control_plane.db.session import changed_rows, record_of, values_of


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentRecord:
    """An incident as it is stored."""

    id: str
    run_id: str
    job_name: str
    project: str
    phase: str
    """Of the recovery: detect, replace, restore, rework, or closed."""
    cause: str
    evidence: tuple[str, ...]
    decision: str
    reason: str
    restore_source: str | None
    from_step: int | None
    reached_step: int | None
    lost_steps: int | None
    generation_before: int
    generation_after: int | None
    instance_ids: tuple[str, ...]
    faulted_instance_ids: tuple[str, ...]
    lost_node_count: int
    replacement_instance_ids: tuple[str, ...]
    failed_at: datetime
    opened_at: datetime
    replaced_at: datetime | None
    restored_at: datetime | None
    closed_at: datetime | None
    detect_seconds: float | None
    replace_seconds: float | None
    restore_seconds: float | None
    rework_seconds: float | None
    cost_usd: float | None
    rank_sources: tuple[tuple[str, int], ...]
    """Where each rank's shard came from, by rank, run-length encoded."""
    acknowledged_at: datetime | None
    acknowledged_by: str
    acknowledgement: str
    detail: Mapping[str, Any]


class IncidentUpdate(TypedDict, total=False):
    """What changes while a recovery goes on; what is left out stays."""

    phase: str
    cause: str
    evidence: tuple[str, ...]
    decision: str
    reason: str
    restore_source: str | None
    from_step: int | None
    reached_step: int | None
    lost_steps: int | None
    generation_after: int | None
    instance_ids: tuple[str, ...]
    faulted_instance_ids: tuple[str, ...]
    lost_node_count: int
    replacement_instance_ids: tuple[str, ...]
    failed_at: datetime
    """Earlier, where a fault that is found later came first."""
    replaced_at: datetime | None
    restored_at: datetime | None
    closed_at: datetime | None
    detect_seconds: float | None
    replace_seconds: float | None
    restore_seconds: float | None
    rework_seconds: float | None
    cost_usd: float | None
    rank_sources: tuple[tuple[str, int], ...]
    detail: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewIncident:
    """What is known when a failure is noticed."""

    job_name: str
    project: str
    phase: str
    cause: str
    evidence: tuple[str, ...]
    decision: str
    reason: str
    reached_step: int | None
    generation_before: int
    instance_ids: tuple[str, ...]
    faulted_instance_ids: tuple[str, ...]
    lost_node_count: int
    failed_at: datetime
    opened_at: datetime
    detect_seconds: float | None
    detail: Mapping[str, Any]


def open_incident(session: Session, lease: Lease, incident_id: str, incident: NewIncident) -> IncidentRecord:
    """Store a new incident of the lease's job. Opening the same id again changes nothing.

    Args:
        session: a writing one.
        lease: of the incident's job.
        incident_id: fresh, or the same to try again.
        incident: what is known so far.

    Returns:
        The incident as stored.

    Raises:
        StaleLease: the lease was taken over; nothing was written.
    """
    leases.guard(session, lease)
    row = session.get(Incident, incident_id)
    if row is None:
        row = Incident(**values_of(incident), id=incident_id, run_id=lease.key)
        session.add(row)
        session.flush()
    return record_of(row, IncidentRecord)


def change(session: Session, lease: Lease, incident_id: str, **changes: Unpack[IncidentUpdate]) -> None:
    """Write how a recovery goes on.

    Args:
        session: a writing one.
        lease: of the incident's job.
        incident_id: which.
        **changes: what changes.

    Raises:
        StaleLease: the lease was taken over; nothing was written.
        NotFound: the job has no such incident.
    """
    leases.guard(session, lease)
    values: dict[str, Any] = dict(changes)
    if "detail" in values:
        values["detail"] = dict(values["detail"])
    found = session.execute(
        update(Incident).where(Incident.id == incident_id, Incident.run_id == lease.key).values(**values)
    )
    if not changed_rows(found):
        raise NotFound("incident", incident_id)


def get(session: Session, incident_id: str) -> IncidentRecord:
    """Return one incident.

    Args:
        session: any.
        incident_id: which.

    Returns:
        The incident as stored.

    Raises:
        NotFound: there is none of this id.
    """
    row = session.get(Incident, incident_id)
    if row is None:
        raise NotFound("incident", incident_id)
    return record_of(row, IncidentRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentTotals:
    """What a job's or a fleet's incidents come to."""

    count: int
    closed_count: int
    failure_count: int
    """Of those that were failures: what was announced, asked for or drilled is none."""
    recovered_count: int
    """Failures whose incidents are closed."""
    recovery_seconds: float
    """Of these, from the failure to the end of the rework."""
    lost_node_count: int
    """Nodes that failed or that AWS took; none that a person drained or a drill struck."""
    lost_steps: int
    cost_usd: float | None
    """None where none has a price."""

    @property
    def mean_recovery_seconds(self) -> float | None:
        """MTTR: from the failure until training is where it was before; None before the first has ended."""
        return self.recovery_seconds / self.recovered_count if self.recovered_count else None


def _totals() -> Select[int, int, int, int, float, int, int, float | None]:
    incident = Incident.__table__.c
    phases = (incident.detect_seconds, incident.replace_seconds, incident.restore_seconds, incident.rework_seconds)
    is_failure = or_(
        *(incident.cause == cause.value for cause in Cause if cause.is_failure)
    )  # SQLAlchemy writes an IN anew for each question
    is_recovered = and_(is_failure, incident.closed_at.is_not(None))
    return select(
        func.count(),
        func.count(incident.closed_at),
        func.count(case((is_failure, 1))),
        func.count(case((is_recovered, 1))),
        func.coalesce(func.sum(case((is_recovered, reduce(add, phases)), else_=0.0)), 0.0),
        func.coalesce(func.sum(incident.lost_node_count), 0),
        func.coalesce(func.sum(incident.lost_steps), 0),
        func.sum(incident.cost_usd),
    ).select_from(Incident.__table__)


# Put together once: that takes longer than asking the database does.
_TOTALS = _totals()
_TOTALS_OF_RUN = _TOTALS.where(Incident.run_id == bindparam("of_run"))
_TOTALS_OF_FLEET = _TOTALS.join(Job, Job.run_id == Incident.run_id).where(
    Job.fleet_name == bindparam("of_fleet"), Incident.cause != Cause.DRILL.value
)


def totals(session: Session, *, run_id: str | None = None, fleet_name: str | None = None) -> IncidentTotals:
    """Return what the incidents of one run, of the jobs of one fleet, or of all come to.

    Args:
        session: any.
        run_id: only of this run, or None.
        fleet_name: only of jobs of this fleet, without what people had done as drills; or None.

    Returns:
        Zeros where there has been none.
    """
    assert run_id is None or fleet_name is None
    query = _TOTALS_OF_RUN if run_id is not None else _TOTALS_OF_FLEET if fleet_name is not None else _TOTALS
    asked = {"of_run": run_id} if run_id is not None else {"of_fleet": fleet_name} if fleet_name is not None else {}
    return totals_of(session.execute(query, asked).one())


def totals_where_run(run_id: ColumnElement[str]) -> Select[int, int, int, int, float, int, int, float | None]:
    """Return the question for one run's totals, one row for `totals_of`; for the modules of this package that ask for more besides."""
    return _TOTALS.where(Incident.__table__.c.run_id == run_id)


def totals_of(row: Sequence[Any]) -> IncidentTotals:
    """Return a row of totals as a record; for the same."""
    count, closed_count, failure_count, recovered_count, recovery_seconds, lost_node_count, lost_steps, cost_usd = row
    return IncidentTotals(
        count=count,
        closed_count=closed_count,
        failure_count=failure_count,
        recovered_count=recovered_count,
        recovery_seconds=recovery_seconds,
        lost_node_count=int(lost_node_count),
        lost_steps=int(lost_steps),
        cost_usd=cost_usd,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recoveries:
    """What a job's recoveries of one cause from one source come to. Of those that are over."""

    job_name: str
    cause: str
    source: str | None
    count: int
    lost_steps: int


def recoveries(session: Session, run_ids: Collection[str]) -> tuple[Recoveries, ...]:
    """Return what the closed incidents of some runs come to, by job, cause and source."""
    keys = (Incident.job_name, Incident.cause, Incident.restore_source)
    query = select(*keys, func.count(), func.coalesce(func.sum(Incident.lost_steps), 0)).group_by(*keys).order_by(*keys)
    found = session.execute(query.where(Incident.closed_at.is_not(None), Incident.run_id.in_(run_ids)))
    return tuple(
        Recoveries(job_name=job, cause=cause, source=source, count=count, lost_steps=lost or 0)
        for job, cause, source, count, lost in found
    )


def acknowledge(session: Session, incident_id: str, *, who: str, note: str, now: datetime) -> bool:
    """Note that a person has seen an incident, and say whether this is the first; the first stays.

    It takes no lease: the loop never writes this.
    """
    query = update(Incident).where(Incident.id == incident_id, Incident.acknowledged_at.is_(None))
    return bool(
        changed_rows(session.execute(query.values(acknowledged_at=now, acknowledged_by=who, acknowledgement=note)))
    )


def find(session: Session, incident_id: str) -> IncidentRecord | None:
    """Return one incident, or None: an implication may name one that no job had."""
    row = session.get(Incident, incident_id)
    return None if row is None else record_of(row, IncidentRecord)


def count_of_run(session: Session, run_id: str) -> int:
    """Return how many incidents a run has had."""
    return session.scalar(select(func.count()).select_from(Incident).where(Incident.run_id == run_id)) or 0


def counts(session: Session, run_ids: Collection[str]) -> dict[str, tuple[int, int]]:
    """Return how many incidents each of several runs has had, and how many are open, in one query; for lists.

    Runs without any are missing.
    """
    is_open = func.sum(case((Incident.closed_at.is_(None), 1), else_=0))
    query = select(Incident.run_id, func.count(), is_open).where(Incident.run_id.in_(run_ids)).group_by(Incident.run_id)
    return {run_id: (count, open_count) for run_id, count, open_count in session.execute(query)}


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentFilter:
    """Which incidents; what is None leaves all."""

    job_name: str | None = None
    project: str | None = None
    is_open: bool | None = None


def page(
    session: Session,
    which: IncidentFilter,
    *,
    after: tuple[datetime, str] | None,
    limit: int,
    is_ascending: bool = True,
) -> tuple[IncidentRecord, ...]:
    """Return incidents in the order they were opened, or the newest first.

    Args:
        session: any.
        which: of them.
        after: `(opened_at, id)` of the last one of the page before, or None for the first page.
        limit: at most this many.
        is_ascending: the oldest first.

    Returns:
        At most `limit` incidents.
    """
    position = tuple_(Incident.opened_at, Incident.id)
    query = select(Incident).limit(limit)
    query = (
        query.order_by(Incident.opened_at, Incident.id)
        if is_ascending
        else query.order_by(Incident.opened_at.desc(), Incident.id.desc())
    )
    if which.job_name is not None:
        query = query.where(Incident.job_name == which.job_name)
    if which.project is not None:
        query = query.where(Incident.project == which.project)
    if which.is_open is not None:
        query = query.where(Incident.closed_at.is_(None) if which.is_open else Incident.closed_at.is_not(None))
    if after is not None:
        last = tuple_(literal(after[0], Incident.opened_at.type), literal(after[1]))
        query = query.where(position > last if is_ascending else position < last)
    return tuple(record_of(row, IncidentRecord) for row in session.scalars(query))
