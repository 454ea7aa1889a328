"""Metrics of a job: values by name, logged by the script or measured on the nodes.

The API returns values at the stored resolution or at a coarser one.
"""

from __future__ import annotations

import math
from typing import Annotated, Final

from fastapi import Query
from pydantic import AwareDatetime

from control_plane.api.alike import shaped
from control_plane.api.auth import Reader
from control_plane.api.changes import compared
from control_plane.api.deps import ChangesSince, ServicesDep, TrainingJobNamePath
from control_plane.api.errors import invalid
from control_plane.api.router import Router
from control_plane.api.routes.jobs import find_job
from control_plane.api.schemas import common as common_schemas
from control_plane.api.schemas import metrics as metrics_schemas
from control_plane.core.breakdowns import newest_keys
from control_plane.core.metric_changes import digests, unchanged_count
from control_plane.core.metrics import Point, resampled
from control_plane.db import loss_curves, metrics
from control_plane.db.jobs import SavedJob
from control_plane.db.metrics import SeriesKind, kind_of
from everstep.protocol.agent_messages import MAX_SERIES
from everstep.protocol.rank_messages import MAX_METRIC_NAME_LENGTH, OWN_METRICS

router = Router(prefix="/v1", tags=["TrainingJobs"])
MAX_RUNS: Final = 50
MAX_CURVE_POINTS: Final = 100


@router.get("/training-jobs/{TrainingJobName}/metrics", operation_id="ListMetrics")
def list_metrics(
    training_job_name: TrainingJobNamePath, caller: Reader, services: ServicesDep
) -> metrics_schemas.ListMetricsResponse:
    """List the metrics of a job, with the last value of each."""
    with services.database.read() as session:
        job = find_job(session, training_job_name, caller)
        found, dropped = metrics.names(session, job.run_id), metrics.dropped_count(session, job.run_id)
    return metrics_schemas.ListMetricsResponse(
        metrics=[shaped(each, metrics_schemas.Metric) for each in found], dropped_count=dropped
    )


@router.get("/training-jobs/{TrainingJobName}/metric-data", operation_id="GetMetricData")
def get_metric_data(
    training_job_name: TrainingJobNamePath,
    caller: Reader,
    services: ServicesDep,
    metric_name: Annotated[
        str | None, Query(alias="MetricName", min_length=1, max_length=MAX_METRIC_NAME_LENGTH)
    ] = None,
    first_step: Annotated[int, Query(alias="FirstStep", ge=0, le=common_schemas.MAX_WHOLE_NUMBER)] = 0,
    last_step: Annotated[int | None, Query(alias="LastStep", ge=0, le=common_schemas.MAX_WHOLE_NUMBER)] = None,
    start_time: Annotated[AwareDatetime | None, Query(alias="StartTime")] = None,
    end_time: Annotated[AwareDatetime | None, Query(alias="EndTime")] = None,
    resolution_in_steps: Annotated[
        int | None, Query(alias="ResolutionInSteps", ge=1, le=common_schemas.MAX_WHOLE_NUMBER)
    ] = None,
    resolution_in_seconds: Annotated[
        int | None, Query(alias="ResolutionInSeconds", ge=1, le=common_schemas.MAX_WHOLE_NUMBER)
    ] = None,
    max_points: Annotated[int, Query(alias="MaxPoints", ge=1, le=5000)] = 500,
    series: Annotated[
        SeriesKind | None,
        Query(
            alias="Series",
            description="Adds the values of each node (for metrics named everstep/…) or rank (for other metrics).",
        ),
    ] = None,
    changes_since: ChangesSince = None,
) -> metrics_schemas.GetMetricDataResponse:
    """Get the values that a job's rank 0 logged and that Everstep measured on the job's nodes.

    If a step was repeated after a failure, the value of the last repetition is returned. The newest 4,096 steps have
    one point each, older steps one point per 8, 64, 512 … steps. If MaxPoints or a resolution requests fewer points,
    the service merges neighbouring points. If a resolution would return more than MaxPoints points, the service doubles
    the number of steps per point until the limit is met. With ChangesSince, the response contains only the points that
    changed: new points, and all points after a step to which a recovery returned. Raises ValidationException if a
    request sets both ResolutionInSteps and ResolutionInSeconds.

    With Series and MetricName, the response contains only the points for which the service has stored the value of each
    node or rank. It contains these values, too. The service stores them every few seconds, and only for jobs of 2 to 64
    nodes or ranks. Raises ValidationException for Series without MetricName, and for a metric without such values.
    """
    if resolution_in_steps is not None and resolution_in_seconds is not None:
        raise invalid("ResolutionInSeconds", "is not allowed without ResolutionInSteps: points span steps or time")
    if series is not None and metric_name is None:
        raise invalid("Series", "is not allowed without MetricName: a response has the series of one metric")
    resolution = resolution_in_steps, resolution_in_seconds
    is_whole = not first_step and {last_step, start_time, end_time, *resolution} == {None}
    with services.database.read() as session:
        job = find_job(session, training_job_name, caller)
        with_series = metrics.series_names(session, job.run_id)
        if series is not None and metric_name is not None:
            _require_series(series, metric_name, job, with_series)
        if is_whole:
            found = services.metric_samples.read(
                session, job.run_id, name=metric_name, limit=max_points, has_breakdowns=series is not None
            )
        else:
            found = metrics.read(
                session,
                job.run_id,
                name=metric_name,
                first_step=first_step,
                last_step=last_step,
                has_breakdowns=series is not None,
            )
    start = start_time.timestamp() if start_time is not None else float("-inf")
    end = end_time.timestamp() if end_time is not None else float("inf")
    chosen = {name: tuple(point for point in points if start <= point.at <= end) for name, points in found.items()}
    sampled = (
        found
        if is_whole
        else {
            name: resampled(points, max_points, steps=resolution_in_steps, seconds=resolution_in_seconds)
            for name, points in chosen.items()
            if points
        }
    )

    def result(name: str, kept: int | None = None) -> metrics_schemas.MetricDataResult:
        kind = kind_of(name) if name in with_series else None
        return _result(name, sampled[name], kind, kept, has_series=series is not None)

    if changes_since is None:
        return metrics_schemas.GetMetricDataResponse(metric_data_results=[result(name) for name in sampled])
    span = first_step, last_step, start, end, *resolution
    question = caller.token.id, job.run_id, metric_name, span, max_points, series
    before = services.snapshots.find(question, changes_since)
    # Digests omit the values by node or rank, because these change only together with other values of their point.
    contents = {name: digests(points) for name, points in sampled.items()}
    return metrics_schemas.GetMetricDataResponse(
        metric_data_results=[
            result(name, unchanged_count(held, contents[name]) if held is not None else None)
            for name in sampled
            if (held := (before or {}).get(name)) != contents[name]
        ],
        changes=compared(before, contents, services.snapshots.keep(question, contents)),
    )


def _require_series(kind: SeriesKind, name: str, job: SavedJob, with_series: frozenset[str]) -> None:
    """Raise InvalidRequest if a metric cannot have, or does not have, values by node or by rank."""
    if kind is not kind_of(name):
        source = "is measured on nodes" if kind is SeriesKind.RANK else "is logged by ranks"
        raise invalid("Series", f"{name} {source}: use Series={kind_of(name)}")
    if name in with_series:
        return
    nodes, ranks = job.spec.node_count, job.spec.node_count * job.spec.ranks_per_node
    count, noun = (nodes, "nodes") if kind is SeriesKind.NODE else (ranks, "ranks")
    if count > MAX_SERIES:
        raise invalid(
            "Series",
            f"job {job.name} has {count} {noun}, and values of single {noun} are stored for at most {MAX_SERIES}. "
            "Read the metric without Series: its points have the extremes",
        )
    raise invalid("Series", f"job {job.name} has no values of {name} by {kind.lower()}")


def _result(
    name: str, points: tuple[Point, ...], kind: SeriesKind | None, kept: int | None, *, has_series: bool
) -> metrics_schemas.MetricDataResult:
    points = points[kept or 0 :]
    return metrics_schemas.MetricDataResult(
        metric_name=name,
        steps=[point.step for point in points],
        last_steps=[point.last_step for point in points],
        times=[point.at for point in points],
        counts=[point.count for point in points],
        minimums=[point.minimum for point in points],
        means=[point.mean for point in points],
        maximums=[point.maximum for point in points],
        last_values=[point.last for point in points],
        minimum_node_ids=[point.least_on for point in points] if name.startswith(OWN_METRICS) else [],
        maximum_node_ids=[point.most_on for point in points] if name.startswith(OWN_METRICS) else [],
        series_kind=kind,
        series=_series(points, kind_of(name)) if has_series else None,
        kept_point_count=kept,
    )


def _series(points: tuple[Point, ...], kind: SeriesKind) -> list[metrics_schemas.MetricSeries]:
    """Return the values of each node or rank, in the order of node ids or rank numbers."""
    rows = [point.breakdown.values if point.breakdown is not None else {} for point in points]
    columns = {key: [_short(row.get(key, math.nan)) for row in rows] for key in newest_keys(rows)}
    if kind is SeriesKind.NODE:
        return [metrics_schemas.MetricSeries(node_id=key, values=columns[key]) for key in sorted(columns)]
    return [metrics_schemas.MetricSeries(rank=int(key), values=columns[key]) for key in sorted(columns, key=int)]


def _short(value: float) -> float:
    """Round a float32 value to 7 digits, because JSON would otherwise contain up to 17 digits."""
    return float(f"{value:.7g}")


@router.get("/loss-curves", operation_id="BatchGetLossCurves")
def batch_get_loss_curves(
    caller: Reader,
    services: ServicesDep,
    run_ids: Annotated[str, Query(alias="RunIds", pattern=rf"^[0-9a-f]{{32}}(,[0-9a-f]{{32}}){{0,{MAX_RUNS - 1}}}$")],
    max_points: Annotated[int, Query(alias="MaxPoints", ge=2, le=MAX_CURVE_POINTS)] = 40,
) -> metrics_schemas.BatchGetLossCurvesResponse:
    """Get the training loss of up to 50 jobs in a few points each.

    RunIds contains run ids, separated by commas. The loss of a job is its metric `loss`, `train/loss` or `train_loss`,
    or else the metric with the shortest name that contains `loss`. Jobs without such a metric, and jobs that the caller
    may not see, are absent. Points have equal distances in steps, and the last point is the newest value.
    """
    with services.database.read() as session:
        found = loss_curves.read(session, run_ids.split(","), caller.project_filter, max_points)
    return metrics_schemas.BatchGetLossCurvesResponse(
        loss_curves=[shaped(each, metrics_schemas.LossCurve) for each in found]
    )
