"""Reports: time, cost and incidents of jobs and fleets over a time range."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated

from fastapi import Query
from pydantic import AwareDatetime

from control_plane.api.alike import shaped
from control_plane.api.auth import Reader
from control_plane.api.deps import ServicesDep
from control_plane.api.errors import invalid
from control_plane.api.router import Router
from control_plane.api.schemas import reports as reports_schemas
from control_plane.core import reports
from control_plane.core.observed.spans import Bucket
from control_plane.core.reports import Figures, IncidentFigures, IncidentKind, ReportPeriod
from control_plane.db import reports as db_reports
from control_plane.db.reports import ReportFilter

router = Router(prefix="/v1/reports", tags=["Reports"])

_DEFAULT_RANGE = timedelta(days=7)
_MOST_BUCKETS = 800
_MICRO = 1_000_000
_wrong = partial(invalid, sentence="{field} {message}.")


@router.get("", operation_id="GetReport")
def get_report(
    caller: Reader,
    services: ServicesDep,
    start_time: Annotated[
        AwareDatetime | None,
        Query(alias="StartTime", description="Begin of the time range. The default is 7 days before EndTime."),
    ] = None,
    end_time: Annotated[
        AwareDatetime | None, Query(alias="EndTime", description="End of the time range. The default is now.")
    ] = None,
    period: Annotated[
        ReportPeriod | None,
        Query(alias="Period", description="Length of a bucket. The default depends on the time range."),
    ] = None,
    project: Annotated[
        str | None, Query(alias="Project", max_length=63, description="Only jobs and fleets of this project.")
    ] = None,
    fleet_name: Annotated[
        str | None, Query(alias="FleetName", max_length=63, description="Only this fleet and its jobs.")
    ] = None,
    max_jobs: Annotated[
        int, Query(alias="MaxJobs", ge=0, le=100, description="Maximum number of jobs with figures of their own.")
    ] = 10,
) -> reports_schemas.Report:
    """Report time, cost and incidents of jobs and fleets over a time range, and their trend.

    A token of one project sees only that project's jobs and fleets. Raises ValidationException if EndTime is not after
    StartTime, or if the range has too many buckets, jobs or incidents for one report.
    """
    now = services.now()
    end = end_time or now
    start = start_time or end - _DEFAULT_RANGE
    if start >= end:
        raise _wrong("EndTime", "must be after StartTime")
    if (end - start) / timedelta(hours=1) > 24 * 7 * _MOST_BUCKETS:
        raise _wrong("StartTime", f"must be at most {7 * _MOST_BUCKETS} days before EndTime")
    bounds = reports.bounds(start, end, period or reports.default_period(start, end))
    if len(bounds) - 1 > _MOST_BUCKETS:
        raise _wrong("Period", f"gives {len(bounds) - 1:,} buckets; at most {_MOST_BUCKETS} are possible")
    which = ReportFilter(project=project, caller_project=caller.project_filter, fleet_name=fleet_name)
    with services.database.read() as session:
        rows = db_reports.read(session, which, bounds)
    found = reports.report(
        bounds,
        jobs=rows.jobs,
        fleets=rows.fleets,
        incidents=rows.incidents,
        now=round(now.timestamp() * _MICRO),
        max_jobs=max_jobs,
    )
    return _shown(found, bounds)


def _shown(found: reports.Report, bounds: tuple[int, ...]) -> reports_schemas.Report:
    return reports_schemas.Report(
        start_time=_moment(bounds[0]),
        end_time=_moment(bounds[-1]),
        total=_figures(found.total),
        buckets=[
            reports_schemas.ReportBucket(
                start_time=_moment(bucket.start), end_time=_moment(bucket.end), figures=_figures(bucket.figures)
            )
            for bucket in found.buckets
        ],
        projects=[
            reports_schemas.ProjectReport(project=project, figures=_figures(figures))
            for project, figures in found.projects
        ],
        fleets=[
            reports_schemas.FleetReport(fleet_name=name, figures=_figures(figures)) for name, figures in found.fleets
        ],
        jobs=[shaped(entry.job, reports_schemas.JobReport, figures=_figures(entry.figures)) for entry in found.jobs],
        other_jobs=_figures(found.other_jobs) if found.job_count > len(found.jobs) else None,
        job_count=found.job_count,
        causes=[
            reports_schemas.CauseReport(cause=cause, kind=reports.kind_of(cause), incidents=_incidents(figures))
            for cause, figures in found.causes
        ],
    )


def _figures(figures: Figures) -> reports_schemas.ReportFigures:
    return reports_schemas.ReportFigures(
        accounting_seconds=_seconds(figures.spent),
        productive_seconds=figures.spent.get(Bucket.TRAIN, 0) / _MICRO,
        ettr_ratio=figures.ettr_ratio,
        ettr_with_queue_ratio=figures.ettr_with_queue_ratio,
        node_seconds=figures.node_microseconds / _MICRO,
        rank_seconds=figures.rank_microseconds / _MICRO,
        unpriced_node_seconds=figures.unpriced_node_microseconds / _MICRO,
        cost_usd=_usd(figures.cost_micro_usd),
        failures=_incidents(figures.incidents[IncidentKind.FAILURE]),
        planned_stops=_incidents(figures.incidents[IncidentKind.PLANNED]),
        drills=_incidents(figures.incidents[IncidentKind.DRILL]),
        mttf_seconds=figures.mttf_seconds,
        mttr_seconds=figures.mttr_seconds,
        idle_node_seconds=_seconds(figures.idle_microseconds),
        spare_cost_usd=_usd(figures.spare_cost_micro_usd),
        other_idle_cost_usd=_usd(figures.other_idle_cost_micro_usd),
    )


def _incidents(figures: IncidentFigures) -> reports_schemas.ReportIncidents:
    return shaped(
        figures,
        reports_schemas.ReportIncidents,
        recovery_seconds=figures.recovery_microseconds / _MICRO,
        cost_usd=_usd(figures.cost_micro_usd),
    )


def _seconds(spent: Mapping[str, int]) -> dict[str, float]:
    return {name: amount / _MICRO for name, amount in spent.items()}


def _usd(micro: int | None) -> float | None:
    return None if micro is None else micro / _MICRO


def _moment(micro: int) -> datetime:
    return datetime.fromtimestamp(micro // _MICRO, UTC)
