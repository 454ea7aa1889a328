"""Metrics that scripts log, as the API returns them."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import insert

from control_plane.db import metrics
from control_plane.db.models import Generation as GenerationRow
from everstep.protocol.agent_messages import MetricBatch, MetricPoint
from everstep.protocol.ids import Generation, NodeId, RunId, Step
from tests.unit.control_plane.api.conftest import refused


@pytest.fixture
def log(service, client, source, fleet):
    """Return a function that logs values of one metric by step, one second apart."""
    run = RunId(
        client.create_training_job(TrainingJobName="gpt", Source=source, EntryPoint="train.py", NodeCount=2)["RunId"]
    )
    numbers = iter(range(10_000))

    def log(name: str, values: dict[int, float]) -> None:
        points = tuple(
            MetricPoint(generation=Generation(1), step=Step(step), values={name: value}, at_seconds=1000.0 + step)
            for step, value in values.items()
        )
        with service.database.write() as session:
            metrics.store(session, "agent", MetricBatch(run=run, first_number=next(numbers) * 1000, points=points))

    return log


def test_what_is_no_number_any_more_is_told_all_the_same(client, log):
    """NaN and infinity reach the caller as numbers.

    JSON has no form for them, so the service sends them as text, as AWS does, and the client converts the text.
    """
    log("loss", {3: float("nan"), 4: float("inf"), 5: 0.5})
    (result,) = client.get_metric_data(TrainingJobName="gpt")["MetricDataResults"]
    assert (result["MetricName"], result["Steps"], result["LastSteps"], result["Times"], result["Counts"]) == (
        "loss",
        [3, 4, 5],
        [3, 4, 5],
        [1003, 1004, 1005],
        [1, 1, 1],
    )
    assert repr(result["LastValues"]) == "[nan, inf, 0.5]"
    assert repr(result["Means"]) == repr(result["Minimums"]) == repr(result["Maximums"]) == "[nan, nan, 0.5]"


@pytest.mark.covers("ListMetrics.TrainingJobName")
def test_metrics_are_listed_by_name_with_what_came_last(client, log):
    log("loss", {1: 3.0, 2: 2.0})
    log("norm", {2: float("nan")})
    found = client.list_metrics(TrainingJobName="gpt")
    assert found["Metrics"][0] == {
        "MetricName": "loss",
        "LastStep": 2,
        "LastTime": datetime.fromtimestamp(1002, UTC),
        "LastValue": 2.0,
    }
    assert [metric["MetricName"] for metric in found["Metrics"]] == ["loss", "norm"]
    assert found["DroppedCount"] == 998  # the agent numbered these points, but the service never received them


@pytest.mark.covers(
    "GetMetricData.TrainingJobName",
    "GetMetricData.MetricName",
    "GetMetricData.FirstStep",
    "GetMetricData.LastStep",
    "GetMetricData.StartTime",
    "GetMetricData.EndTime",
    "GetMetricData.ResolutionInSteps",
    "GetMetricData.ResolutionInSeconds",
    "GetMetricData.MaxPoints",
)
def test_data_is_narrowed_by_name_steps_and_time_and_made_coarser(client, log):
    log("loss", {step: float(step) for step in range(1, 101)})
    log("norm", {1: 1.0})

    def steps(**how: object) -> list[int]:
        (result,) = client.get_metric_data(TrainingJobName="gpt", MetricName="loss", **how)["MetricDataResults"]
        return result["Steps"]

    assert steps() == list(range(1, 101))
    assert steps(FirstStep=10, LastStep=12) == [10, 11, 12]
    assert steps(StartTime=datetime.fromtimestamp(1098, UTC), EndTime=datetime.fromtimestamp(1099, UTC)) == [98, 99]
    assert steps(ResolutionInSteps=50) == [1, 50, 100]
    assert steps(ResolutionInSeconds=500) == [1]
    assert len(steps(MaxPoints=10)) <= 10
    assert len(steps(MaxPoints=10, ResolutionInSteps=1)) <= 10
    assert client.get_metric_data(TrainingJobName="gpt", FirstStep=500)["MetricDataResults"] == []
    with refused("ValidationException"):
        client.get_metric_data(TrainingJobName="gpt", ResolutionInSteps=1, ResolutionInSeconds=1)


def test_of_what_nodes_measured_it_is_told_whose_the_extremes_are(client, log, service):
    log("everstep/gpu_percent", {1: 50.0})
    log("loss", {1: 3.0})
    with service.database.write() as session:
        run = RunId(client.describe_training_job(TrainingJobName="gpt")["RunId"])
        ours = MetricPoint(
            generation=Generation(1), step=Step(2), values={"everstep/gpu_percent": 50.0}, at_seconds=1002.0
        )
        measured = {NodeId(f"i-{n}"): {"everstep/gpu_percent": 20.0 * n} for n in (1, 2, 4)}
        metrics.store(session, "agent", MetricBatch(run=run, first_number=5000, points=(ours,)), measured)
    own, loss = client.get_metric_data(TrainingJobName="gpt")["MetricDataResults"]
    assert (own["MinimumNodeIds"], own["MaximumNodeIds"], own["Counts"]) == (["", "i-1"], ["", "i-4"], [1, 3])
    assert (own["Minimums"], own["Means"], own["Maximums"], own["LastValues"]) == (
        [50.0, 20.0],
        [50.0, 40.0],
        [50.0, 80.0],
        [50.0, 40.0],
    )
    assert (loss["MinimumNodeIds"], loss["MaximumNodeIds"]) == ([], [])


@pytest.mark.covers("GetMetricData.ChangesSince")
def test_a_poll_receives_only_the_points_that_changed(client, log) -> None:
    log("loss", {step: float(step) for step in range(1, 100)})
    log("norm", {1: 1.0})
    first = client.get_metric_data(TrainingJobName="gpt", ChangesSince="Start")
    assert first["Changes"]["IsIncremental"] is False
    assert first["MetricDataResults"] == client.get_metric_data(TrainingJobName="gpt")["MetricDataResults"]
    same = client.get_metric_data(TrainingJobName="gpt", ChangesSince=first["Changes"]["ChangeToken"])
    assert same["MetricDataResults"] == []
    assert same["Changes"] == {**first["Changes"], "IsIncremental": True}
    log("loss", {100: 7.0})
    later = client.get_metric_data(TrainingJobName="gpt", ChangesSince=same["Changes"]["ChangeToken"])
    (result,) = later["MetricDataResults"]
    assert (result["MetricName"], result["KeptPointCount"], result["Steps"][-1]) == ("loss", 96, 100)
    assert len(result["Steps"]) == 4
    other = client.get_metric_data(TrainingJobName="gpt", ChangesSince=later["Changes"]["ChangeToken"], FirstStep=50)
    assert other["Changes"]["IsIncremental"] is False


Columns = dict[str, dict[str, list[Any]]]


def merged(held: Columns, answer: dict[str, Any]) -> Columns:
    """Apply a response to the points that a client holds, as the dashboard does."""
    found = dict(held) if answer["Changes"]["IsIncremental"] else {}
    for name in answer["Changes"]["Removed"]:
        del found[name]
    for result in answer["MetricDataResults"]:
        kept = result.get("KeptPointCount", 0)
        before = found.get(result["MetricName"], {})
        found[result["MetricName"]] = {
            column: [*before.get(column, [])[:kept], *values]
            for column, values in result.items()
            if isinstance(values, list)
        }
    return found


@pytest.mark.parametrize("seed", range(3))
def test_changes_of_a_random_history_add_up_to_what_a_full_response_contains(service, client, log, seed) -> None:
    """Histories grow, are downsampled, and fall back to earlier steps after recoveries."""
    rng = random.Random(seed)
    run = client.describe_training_job(TrainingJobName="gpt")["RunId"]
    numbers = iter(range(10**6))
    generation = step = 0
    held: Columns = {}
    token, sent, fetched = "Start", 0, 0

    def recover(base: int) -> None:
        with service.database.write() as session:
            now = service.clock.now
            row = {"run_id": run, "number": generation, "parent": generation - 1, "base_step": base}
            made = {"world_size": 1, "plan": b"", "node_ids": (), "created_at": now, "started_at": now}
            session.execute(insert(GenerationRow).values(**row, **made))

    for _ in range(45):
        if not generation or rng.random() < 0.15:
            generation += 1
            step = rng.choice((0, max(0, step - rng.randrange(1, 40)), max(0, step - rng.randrange(1, 3000))))
            recover(step)
        count = rng.choice((1, 3, 40, 500))
        values = [
            MetricPoint(
                generation=Generation(generation),
                step=Step(step + each),
                values={"loss": rng.gauss(2, 1)} | ({"eval": rng.random()} if (step + each) % 50 == 0 else {}),
                at_seconds=1000.0 + step + each,
            )
            for each in range(1, count + 1)
        ]
        step += count
        first = next(numbers) * 1000
        with service.database.write() as session:
            metrics.store(session, "agent", MetricBatch(run=RunId(run), first_number=first, points=tuple(values)))
        if rng.random() < 0.5:
            continue
        asked: dict[str, Any] = {"TrainingJobName": "gpt", "MaxPoints": 100}
        answer = client.get_metric_data(**asked, ChangesSince=token)
        token = answer["Changes"]["ChangeToken"] if rng.random() < 0.95 else "Start"
        held = merged(held, answer)
        full = client.get_metric_data(**asked)["MetricDataResults"]
        assert sorted(held) == [each["MetricName"] for each in full]
        for each in full:
            for column, expected in each.items():
                if isinstance(expected, list):
                    assert held[each["MetricName"]][column] == pytest.approx(expected, rel=1e-12), (seed, column)
            fetched += len(each["Steps"])
        sent += sum(len(each["Steps"]) for each in answer["MetricDataResults"])
    assert 0 < sent < fetched, "changes are fewer than all points"
