"""Tests how the API returns the metrics that scripts log."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import insert

from control_plane.db import metrics
from control_plane.db.models import GenerationRow
from everstep.protocol.agent_messages import MetricBatch, MetricPoint
from everstep.protocol.ids import Generation, NodeId, RunId, Step
from tests.unit.control_plane.api.conftest import refused

GPU = "everstep/gpu_percent"


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


@pytest.fixture
def measure(service, client, log):
    """Return a function that stores one step: a GPU utilization by node, and a loss by rank."""
    run = RunId(client.describe_training_job(TrainingJobName="gpt")["RunId"])
    numbers = iter(range(1_000, 10_000))

    def measure(step: int, of_nodes: dict[str, float], of_ranks: dict[int, float]) -> None:
        ours = MetricPoint(
            generation=Generation(1), step=Step(step), values={GPU: 50.0, "loss": 3.0}, at_seconds=1000.0 + step
        )
        measured = {NodeId(node): {GPU: value} for node, value in of_nodes.items()}
        logged = {rank: {"loss": value} for rank, value in of_ranks.items()}
        with service.database.write() as session:
            batch = MetricBatch(run=run, first_number=next(numbers), points=(ours,))
            metrics.store(session, "agent", batch, measured, logged)

    return measure


@pytest.mark.covers("GetMetricData.Series")
def test_a_metric_has_a_series_for_each_node_or_rank(client, log, measure) -> None:
    log("norm", {1: 1.0})
    measure(1, {"i-2": 1 / 3, "i-1": 90.5}, {10: 5.0, 9: 4.5})
    measure(2, {}, {})
    measure(3, {"i-1": 91.0, "i-3": 20.0}, {9: 4.25})

    def result(name: str, **asked: object) -> dict[str, Any]:
        (found,) = client.get_metric_data(TrainingJobName="gpt", MetricName=name, **asked)["MetricDataResults"]
        return found

    of_nodes, of_ranks = result(GPU, Series="Node"), result("loss", Series="Rank")
    assert (of_nodes["Steps"], of_nodes["SeriesKind"]) == ([1, 3], "Node")
    assert repr(of_nodes["Series"]) == repr(
        [
            {"NodeId": "i-1", "Values": [90.5, 91.0]},
            {"NodeId": "i-2", "Values": [0.3333333, math.nan]},
            {"NodeId": "i-3", "Values": [math.nan, 20.0]},
        ]
    )
    assert [each["Rank"] for each in of_ranks["Series"]] == [0, 9, 10]
    assert [each["Values"][0] for each in of_ranks["Series"]] == [3.0, 4.5, 5.0]
    assert (result("loss")["Steps"], result("loss")["SeriesKind"]) == ([1, 2, 3], "Rank")
    assert "Series" not in result("loss")
    assert "SeriesKind" not in result("norm")
    coarse = result(GPU, Series="Node", ResolutionInSteps=8)
    assert (coarse["Steps"], coarse["LastSteps"]) == ([1], [3])
    assert [each["Values"] for each in coarse["Series"]] == [[90.75], [0.3333333], [20.0]]
    assert result(GPU, Series="Node", FirstStep=2)["Steps"] == [3]


def test_a_poll_of_series_receives_only_new_points(client, log, measure) -> None:
    def ask(token: str, **asked: object) -> dict[str, Any]:
        return client.get_metric_data(TrainingJobName="gpt", MetricName=GPU, ChangesSince=token, **asked)

    for step in range(9):
        measure(step, {"i-1": float(step), "i-2": 0.0}, {})
    first = ask("Start", Series="Node")
    token = first["Changes"]["ChangeToken"]
    assert ask(token, Series="Node")["MetricDataResults"] == []
    measure(9, {"i-2": 1.0, "i-3": 2.0}, {})
    (result,) = ask(token, Series="Node")["MetricDataResults"]
    assert (result["KeptPointCount"], result["Steps"]) == (8, [8, 9])
    assert repr({each["NodeId"]: each["Values"] for each in result["Series"]}) == repr(
        {"i-1": [8.0, math.nan], "i-2": [0.0, 1.0], "i-3": [math.nan, 2.0]}
    )
    assert ask(token)["Changes"]["IsIncremental"] is False, (
        "a token of a request with Series is valid for such requests"
    )


def test_series_that_cannot_be_read_are_refused_with_the_reason(client, log, measure, source) -> None:
    measure(1, {"i-1": 1.0, "i-2": 2.0}, {})
    wide = {"TrainingJobName": "wide", "NodeCount": 5, "RanksPerNode": 13}
    client.create_training_job(**wide, Source=source, EntryPoint="train.py")
    for name, asked, reason in (
        ("gpt", {"MetricName": GPU, "Series": "Host"}, "Series: must be one of Node, Rank, not 'Host'"),
        ("gpt", {"Series": "Node"}, "Series: is not allowed without MetricName"),
        ("gpt", {"MetricName": GPU, "Series": "Rank"}, f"{GPU} is measured on nodes: use Series=Node"),
        ("gpt", {"MetricName": "loss", "Series": "Node"}, "loss is logged by ranks: use Series=Rank"),
        ("gpt", {"MetricName": "loss", "Series": "Rank"}, "job gpt has no values of loss by rank"),
        ("wide", {"MetricName": "loss", "Series": "Rank"}, "job wide has 65 ranks, .* for at most 64"),
        ("wide", {"MetricName": GPU, "Series": "Node"}, f"job wide has no values of {GPU} by node"),
    ):
        with refused("ValidationException", reason):
            client.get_metric_data(TrainingJobName=name, **asked)


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
    """A client that applies all changes has the same points as a client that reads the full response.

    In the test, histories grow, are downsampled, and continue from earlier steps after recoveries.
    """
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
