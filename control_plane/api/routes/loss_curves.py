"""The loss of several jobs in a few points each, for lists of jobs."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Query

from control_plane.api.alike import shaped
from control_plane.api.auth import Reader
from control_plane.api.deps import ServicesDep
from control_plane.api.router import Router
from control_plane.api.schemas import metrics as metrics_schemas
from control_plane.db import loss_curves

router = Router(prefix="/v1/loss-curves", tags=["TrainingJobs"])

MAX_RUNS: Final = 50
MAX_POINTS: Final = 100


@router.get("", operation_id="BatchGetLossCurves")
def batch_get_loss_curves(
    caller: Reader,
    services: ServicesDep,
    run_ids: Annotated[str, Query(alias="RunIds", pattern=rf"^[0-9a-f]{{32}}(,[0-9a-f]{{32}}){{0,{MAX_RUNS - 1}}}$")],
    max_points: Annotated[int, Query(alias="MaxPoints", ge=2, le=MAX_POINTS)] = 40,
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
