"""BatchGetLossCurves returns the loss of several jobs, with a few points for each job."""

from __future__ import annotations

import random
from contextlib import closing

import pytest

from control_plane.db import metrics
from control_plane.db.tokens import Role
from everstep.protocol.agent_messages import MetricBatch, MetricPoint
from everstep.protocol.ids import Generation, RunId, Step
from tests.unit.control_plane.api.conftest import refused


@pytest.fixture
def log(service):
    """Return a function that logs values of one metric of a run by step, in one batch."""
    numbers = iter(range(10_000))

    def log(run: str, name: str, values: dict[int, float]) -> None:
        points = tuple(
            MetricPoint(generation=Generation(1), step=Step(step), values={name: value}, at_seconds=1000.0 + step)
            for step, value in values.items()
        )
        with service.database.write() as session:
            number = next(numbers) * 100_000
            metrics.store(session, "agent", MetricBatch(run=RunId(run), first_number=number, points=points))

    return log


@pytest.fixture
def submit(client, source, fleet):
    """Return a function that submits a job and returns its run id."""

    def submit(name: str) -> str:
        made = client.create_training_job(TrainingJobName=name, Source=source, EntryPoint="train.py", NodeCount=1)
        return str(made["RunId"])

    return submit


@pytest.mark.covers("BatchGetLossCurves.RunIds", "BatchGetLossCurves.MaxPoints")
def test_the_curves_of_several_jobs_come_in_one_response(client, submit, log):
    long, short, silent = submit("long"), submit("short"), submit("silent")
    log(long, "loss", {step: 1000.0 - step for step in range(1, 1001)})
    log(long, "lr", {1: 0.1})
    log(short, "eval/loss", {4: float("nan"), 6: 2.5})
    curves = client.batch_get_loss_curves(RunIds=f"{short},{silent},{long},{'0' * 32}", MaxPoints=10)["LossCurves"]
    assert [(each["RunId"], each["MetricName"]) for each in curves] == [(short, "eval/loss"), (long, "loss")]
    assert (curves[0]["Steps"], repr(curves[0]["Values"])) == ([4, 6], "[nan, 2.5]")
    assert curves[1]["Steps"] == [1, 112, 223, 334, 445, 556, 667, 778, 889, 1000]
    assert curves[1]["Values"] == [1000.0 - step for step in curves[1]["Steps"]]


def test_a_curve_of_a_long_run_has_its_first_and_newest_value(client, submit, log):
    """The curve covers all steps of a run, although the service stores older steps in points that cover many steps."""
    run = submit("gpt")
    rng = random.Random(5)
    steps = sorted(rng.sample(range(20_000), 9_000))
    for begin in range(0, len(steps), 1000):
        log(run, "loss", {step: float(step) for step in steps[begin : begin + 1000]})
    (curve,) = client.batch_get_loss_curves(RunIds=run)["LossCurves"]
    assert curve["Steps"] == sorted(set(curve["Steps"]))
    assert len(curve["Steps"]) in range(35, 41)
    assert curve["Values"] == [float(step) for step in curve["Steps"]]
    assert curve["Steps"][0] < 100
    assert curve["Steps"][-1] == steps[-1]


def test_a_caller_with_a_project_sees_only_its_jobs(service, client, submit, log):
    run = submit("gpt")
    log(run, "loss", {1: 1.0})
    assert len(client.batch_get_loss_curves(RunIds=run)["LossCurves"]) == 1
    for project, expected in (("default", 1), ("speech", 0)):
        with closing(service.client(service.token(Role.VIEWER, project))) as reader:
            assert len(reader.batch_get_loss_curves(RunIds=run)["LossCurves"]) == expected


def test_run_ids_are_checked(client):
    for run_ids in ("gpt", "", ",".join(["0" * 32] * 51)):
        with refused("ValidationException"):
            client.batch_get_loss_curves(RunIds=run_ids)
    assert client.batch_get_loss_curves(RunIds=",".join(["0" * 32] * 50))["LossCurves"] == []
