"""Metrics of a job: values by name, logged by the script or measured on the nodes.

The API returns values at the stored resolution or at a coarser one.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from pydantic import AwareDatetime

from control_plane.api.auth import Reader
from control_plane.api.changes import compared
from control_plane.api.deps import ChangesSince, Router, ServicesDep, TrainingJobNamePath
from control_plane.api.errors import InvalidRequest
from control_plane.api.routes.jobs import find_job
from control_plane.api.schemas import common as common_schemas
from control_plane.api.schemas import metrics as metrics_schemas
from control_plane.api.schemas.common import FieldError
from control_plane.core.metric_changes import digests, unchanged_count
from control_plane.core.metrics import Point, resampled
from control_plane.db import metrics
from everstep.protocol.rank_messages import OWN_METRICS

router = Router(prefix="/v1/training-jobs/{TrainingJobName}", tags=["TrainingJobs"])


@router.get("/metrics", operation_id="ListMetrics")
def list_metrics(
    training_job_name: TrainingJobNamePath, caller: Reader, services: ServicesDep
) -> metrics_schemas.ListMetricsResponse:
    """List the metrics of a job, with the last value of each."""
    with services.database.read() as session:
        job = find_job(session, training_job_name, caller)
        found, dropped = metrics.names(session, job.run_id), metrics.dropped_count(session, job.run_id)
    return metrics_schemas.ListMetricsResponse(
        metrics=[
            metrics_schemas.Metric(
                metric_name=each.name, last_step=each.last_step, last_time=each.last_at, last_value=each.last_value
            )
            for each in found
        ],
        dropped_count=dropped,
    )


@router.get("/metric-data", operation_id="GetMetricData")
def get_metric_data(
    training_job_name: TrainingJobNamePath,
    caller: Reader,
    services: ServicesDep,
    metric_name: Annotated[
        str | None, Query(alias="MetricName", min_length=1, max_length=metrics.MAX_NAME_LENGTH)
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
    changes_since: ChangesSince = None,
) -> metrics_schemas.GetMetricDataResponse:
    """Get the values that a job's rank 0 logged and that Everstep measured on the job's nodes.

    If a step was repeated after a failure, the value of the last repetition is returned. The newest 4,096 steps have
    one point each, older steps one point per 8, 64, 512 … steps. If MaxPoints or a resolution requests fewer points,
    the service merges neighbouring points. If a resolution would return more than MaxPoints points, the service doubles
    the number of steps per point until the limit is met. With ChangesSince, the response contains only the points that
    changed: new points, and all points after a step to which a recovery returned. Raises ValidationException if a
    request sets both ResolutionInSteps and ResolutionInSeconds.
    """
    if resolution_in_steps is not None and resolution_in_seconds is not None:
        message = "is not allowed without ResolutionInSteps: points span steps or time"
        raise InvalidRequest(
            f"The request is not valid: ResolutionInSeconds: {message}",
            fields=[FieldError(field="ResolutionInSeconds", message=message)],
        )
    resolution = resolution_in_steps, resolution_in_seconds
    is_whole = not first_step and {last_step, start_time, end_time, *resolution} == {None}
    with services.database.read() as session:
        job = find_job(session, training_job_name, caller)
        if is_whole:
            found = services.metric_samples.read(session, job.run_id, name=metric_name, limit=max_points)
        else:
            found = metrics.read(session, job.run_id, name=metric_name, first_step=first_step, last_step=last_step)
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
    if changes_since is None:
        return metrics_schemas.GetMetricDataResponse(
            metric_data_results=[_result(name, points) for name, points in sampled.items()]
        )
    span = first_step, last_step, start, end, *resolution
    question = caller.token.id, job.run_id, metric_name, span, max_points
    before = services.snapshots.find(question, changes_since)
    contents = {name: digests(points) for name, points in sampled.items()}
    return metrics_schemas.GetMetricDataResponse(
        metric_data_results=[
            _result(name, points, unchanged_count(held, contents[name]) if held is not None else None)
            for name, points in sampled.items()
            if (held := (before or {}).get(name)) != contents[name]
        ],
        changes=compared(before, contents, services.snapshots.keep(question, contents)),
    )


def _result(name: str, points: tuple[Point, ...], kept: int | None = None) -> metrics_schemas.MetricDataResult:
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
        kept_point_count=kept,
    )
