"""Reads the rows from which `core.reports` computes a report: jobs, fleets, incidents and time counters
(`db.ledger_hours`).

The number of rows is bounded: of the hourly rows, only those at the bounds of buckets are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.orm import Session

from control_plane.core.ledger_hours import HOUR, Ledger
from control_plane.core.observed.nodes import Cause
from control_plane.core.reports import FleetTime, IncidentTime, JobTime
from control_plane.db.errors import TooMuch
from control_plane.db.models import FleetHourRow, FleetRow, IncidentRow, JobHourRow, JobRow

MOST_POINTS: Final = 50_000
"""Limit of jobs × bounds of buckets in one report."""
MOST_INCIDENTS: Final = 20_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_JOB: Final = JobRow.__table__.c
_JOB_HOUR: Final = JobHourRow.__table__.c
_FLEET: Final = FleetRow.__table__.c
_FLEET_HOUR: Final = FleetHourRow.__table__.c
_INCIDENT: Final = IncidentRow.__table__.c


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFilter:
    """Conditions that select the jobs and fleets of a report. None is no condition."""

    project: str | None = None
    caller_project: str | None = None
    """Project of the caller's token. A caller who asks for another project gets an empty report."""
    fleet_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRows:
    """The rows for `core.reports.report`."""

    jobs: tuple[JobTime, ...]
    fleets: tuple[FleetTime, ...]
    incidents: tuple[IncidentTime, ...]


def read(session: Session, which: ReportFilter, bounds: Collection[int]) -> ReportRows:
    """Read the jobs whose life overlaps the bounds of `core.reports.bounds`, their incidents, and the matching fleets.

    Raises TooMuch, before any read, if there are too many jobs for this number of buckets, or too many incidents.
    """
    start, end = _moment(min(bounds)), _moment(max(bounds))
    conditions = [_JOB.created_at < end, or_(_JOB.ended_at.is_(None), _JOB.ended_at > start)]
    conditions += _matching(which, _JOB.project, _JOB.fleet_name)
    overlaps = [_INCIDENT.failed_at < end, or_(_INCIDENT.closed_at.is_(None), _INCIDENT.closed_at >= start)]
    of_jobs = IncidentRow.__table__.join(JobRow.__table__, _INCIDENT.run_id == _JOB.run_id)
    job_count = session.scalar(select(func.count()).select_from(JobRow.__table__).where(*conditions)) or 0
    if job_count * len(bounds) > MOST_POINTS:
        raise TooMuch(f"{job_count:,} jobs in {len(bounds) - 1} buckets", "a longer period, a shorter time range")
    found = session.scalar(select(func.count()).select_from(of_jobs).where(*conditions, *overlaps)) or 0
    if found > MOST_INCIDENTS:
        raise TooMuch(f"{found:,} incidents", "a shorter time range")
    incidents = session.execute(
        select(
            _INCIDENT.run_id,
            _INCIDENT.cause,
            _INCIDENT.failed_at,
            _INCIDENT.closed_at,
            _INCIDENT.is_given_up,
            _INCIDENT.lost_steps,
            _INCIDENT.cost_usd,
        )
        .select_from(of_jobs)
        .where(*conditions, *overlaps)
        .order_by(_INCIDENT.opened_at, _INCIDENT.id)
    )
    return ReportRows(
        jobs=_jobs(session, conditions, bounds),
        fleets=_fleets(session, _matching(which, _FLEET.project, _FLEET.name), bounds),
        incidents=tuple(
            IncidentTime(
                run_id=row.run_id,
                cause=Cause(row.cause),
                failed_at=_micro(row.failed_at),
                closed_at=None if row.closed_at is None else _micro(row.closed_at),
                is_given_up=row.is_given_up,
                lost_steps=row.lost_steps or 0,
                cost_micro_usd=_micro_usd(row.cost_usd),
            )
            for row in incidents
        ),
    )


def _jobs(session: Session, conditions: list[ColumnElement[bool]], bounds: Collection[int]) -> tuple[JobTime, ...]:
    hours: defaultdict[str, list[Ledger]] = defaultdict(list)
    query = (
        select(_JOB_HOUR.run_id, _JOB_HOUR.hour, _JOB_HOUR.accounting, _JOB_HOUR.node_microseconds)
        .join(JobRow.__table__, _JOB.run_id == _JOB_HOUR.run_id)
        .where(*conditions, _JOB_HOUR.hour.in_([bound // HOUR for bound in bounds]))
        .order_by(_JOB_HOUR.run_id, _JOB_HOUR.hour)
    )
    for run_id, hour, spent, nodes in session.execute(query):
        hours[run_id].append(Ledger(at=hour * HOUR, spent=spent, node_microseconds=nodes))
    rows = session.execute(
        select(
            _JOB.run_id,
            _JOB.name,
            _JOB.project,
            _JOB.fleet_name,
            JobRow.spec["ranks_per_node"].as_integer().label("ranks_per_node"),
            _JOB.created_at,
            _JOB.accounted_until,
            _JOB.accounting,
            _JOB.node_microseconds,
            _JOB.cost_usd,
        )
        .where(*conditions)
        .order_by(_JOB.created_at, _JOB.run_id)
    )
    return tuple(
        JobTime(
            run_id=row.run_id,
            name=row.name,
            project=row.project,
            fleet_name=row.fleet_name,
            ranks_per_node=row.ranks_per_node,
            points=(
                Ledger(at=_micro(row.created_at), spent={}),
                *hours.get(row.run_id, ()),
                Ledger(
                    at=_micro(row.accounted_until or row.created_at),
                    spent=row.accounting,
                    node_microseconds=row.node_microseconds,
                ),
            ),
            cost_micro_usd=_micro_usd(row.cost_usd),
        )
        for row in rows
    )


def _fleets(session: Session, conditions: list[ColumnElement[bool]], bounds: Collection[int]) -> tuple[FleetTime, ...]:
    hours: defaultdict[str, list[Ledger]] = defaultdict(list)
    query = (
        select(_FLEET_HOUR.fleet_name, _FLEET_HOUR.hour, _FLEET_HOUR.idle_microseconds)
        .join(FleetRow.__table__, _FLEET.name == _FLEET_HOUR.fleet_name)
        .where(*conditions, _FLEET_HOUR.hour.in_([bound // HOUR for bound in bounds]))
        .order_by(_FLEET_HOUR.fleet_name, _FLEET_HOUR.hour)
    )
    for name, hour, spent in session.execute(query):
        hours[name].append(Ledger(at=hour * HOUR, spent=spent))
    rows = session.execute(
        select(_FLEET.name, _FLEET.created_at, _FLEET.idle_microseconds, _FLEET.idle_until, _FLEET.price_usd_per_hour)
        .where(*conditions)
        .order_by(_FLEET.name)
    )
    return tuple(
        FleetTime(
            name=row.name,
            points=(
                Ledger(at=_micro(row.created_at), spent={}),
                *hours.get(row.name, ()),
                Ledger(at=_micro(row.idle_until or row.created_at), spent=row.idle_microseconds),
            ),
            price_micro_usd=_micro_usd(row.price_usd_per_hour),
        )
        for row in rows
    )


def _matching(which: ReportFilter, project: ColumnElement[str], fleet: ColumnElement[str]) -> list[ColumnElement[bool]]:
    found = [project == name for name in (which.project, which.caller_project) if name is not None]
    return found if which.fleet_name is None else [*found, fleet == which.fleet_name]


def _moment(micro: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micro)


def _micro(moment: datetime) -> int:
    passed = moment - _EPOCH
    return (passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds


def _micro_usd(usd: float | None) -> int | None:
    return None if usd is None else round(usd * 1e6)
