"""Tests how logged metrics are stored in the database.

The number of points is bounded, each point is stored once, and points of a repeated step replace the earlier ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise

import pytest
from msgspec.structs import replace
from sqlalchemy import func, select

from control_plane.core.metrics import POINTS_PER_CHUNK, Point, across, folded, kept_chunks, logged
from control_plane.db import jobs, metrics
from control_plane.db.leases import Lease
from control_plane.db.models import EventRow, MetricChunkRow
from control_plane.db.retention import RowRetention, prune
from control_plane.db.session import Database
from everstep.protocol.agent_messages import MetricBatch, MetricPoint
from everstep.protocol.ids import Generation, NodeId, RunId, Step
from tests.unit.control_plane.db.conftest import NOW
from tests.unit.control_plane.db.test_jobs import plan

RUN = RunId("gpt".ljust(32, "0"))


class Log:
    """Simulates the agent of rank 0's node, which sends numbered metric points."""

    def __init__(self, database: Database, agent_id: str = "one") -> None:
        self.database = database
        self.agent_id = agent_id
        self.next_number = 0

    def send(self, batch: MetricBatch) -> None:
        with self.database.write() as session:
            metrics.store(session, self.agent_id, batch)

    def log(self, steps: Iterable[int], *, generation: int = 1, offset: float = 0.0) -> MetricBatch:
        points = tuple(point(step, generation, offset) for step in steps)
        batch = MetricBatch(run=RUN, first_number=self.next_number, points=points)
        self.next_number += len(points)
        self.send(batch)
        return batch

    def points(self, first: int = 0, last: int | None = None) -> tuple[Point, ...]:
        with self.database.read() as session:
            return metrics.read(session, RUN, name="loss", first_step=first, last_step=last).get("loss", ())

    def values(self) -> dict[int, float]:
        return {point.step: point.last for point in self.points()}


def point(step: int, generation: int = 1, offset: float = 0.0) -> MetricPoint:
    return MetricPoint(
        generation=Generation(generation), step=Step(step), values={"loss": step + offset}, at_seconds=float(step)
    )


@pytest.fixture
def log(database: Database, lease: Lease) -> Log:
    start(database, lease, 1, base=0)
    return Log(database)


def start(database: Database, lease: Lease, number: int, *, base: int) -> None:
    with database.write() as session:
        jobs.add_generation(session, lease, plan(number, base), NOW)
        jobs.mark_generation_started(session, lease, number, NOW)


def test_the_same_batch_twice_is_stored_once_also_by_another_replica(log: Log) -> None:
    batch = log.log(range(1, 4))
    log.send(batch)
    assert log.values() == {1: 1.0, 2: 2.0, 3: 3.0}
    with log.database.read() as session:
        (metric,) = metrics.names(session, RUN)
        assert (metric.last_step, metric.last_value, metrics.dropped_count(session, RUN)) == (3, 3.0, 0)


@pytest.mark.parametrize("engine", ["postgresql"])
def test_a_batch_that_several_replicas_store_at_once_is_stored_once(log: Log) -> None:
    """Several servers store the same points at the same time. Each point is stored once.

    An agent whose connection broke sends its points again to another server. The first server may still be storing
    them.
    """
    first, longer = (
        MetricBatch(run=RUN, first_number=0, points=tuple(point(step) for step in range(count))) for count in (200, 300)
    )
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(log.send, (first, longer, first, longer)))
    assert [(each.step, each.last) for each in log.points()] == [(step, float(step)) for step in range(300)]
    with log.database.read() as session:
        assert metrics.dropped_count(session, RUN) == 0


def test_numbers_that_never_came_are_counted_once(log: Log) -> None:
    log.log([1])
    log.next_number += 7
    batch = log.log([9])
    log.send(batch)
    with log.database.read() as session:
        assert metrics.dropped_count(session, RUN) == 7
    restarted = Log(log.database, "two")
    restarted.next_number = 40  # numbers below 40 belong to points of an earlier job
    restarted.log([10])
    with log.database.read() as session:
        assert metrics.dropped_count(session, RUN) == 7
    assert log.values() == {1: 1.0, 9: 9.0, 10: 10.0}


def test_values_of_one_step_are_put_together(log: Log) -> None:
    both = tuple(
        MetricPoint(generation=Generation(1), step=Step(1), values={name: 2.0}, at_seconds=1.0)
        for name in ("loss", "rate")
    )
    log.send(MetricBatch(run=RUN, first_number=0, points=both))
    with log.database.read() as session:
        assert [each.name for each in metrics.names(session, RUN)] == ["loss", "rate"]


def test_steps_that_are_done_again_replace_the_lost_ones(log: Log, lease: Lease) -> None:
    log.log(range(1, 21))
    start(log.database, lease, 2, base=15)
    assert len(log.values()) == 20
    log.log([18], generation=2, offset=0.5)
    assert log.values() == {**{step: float(step) for step in range(1, 16)}, 18: 18.5}
    late = Log(log.database, "of the lost node")
    late.log([14, 16, 21])  # the late agent still belongs to generation 1
    assert sorted(log.values()) == [*range(1, 16), 18]


@pytest.mark.parametrize(
    ("name", "before", "after", "is_reported"),
    [
        ("loss", 2.5, 2.75, True),
        ("val/Loss", 2.5, float("nan"), True),
        ("loss", 2.5, 2.5, False),
        ("loss", float("nan"), float("nan"), False),
        ("tokens_per_second", 2.5, 2.75, False),
    ],
)
def test_a_repeated_step_with_another_loss_is_reported(
    log: Log, lease: Lease, name: str, before: float, after: float, *, is_reported: bool
) -> None:
    def send(number: int, generation: int, step: int, value: float) -> None:
        made = MetricPoint(generation=Generation(generation), step=Step(step), values={name: value}, at_seconds=1.0)
        log.send(MetricBatch(run=RUN, first_number=number, points=(made,)))

    send(0, 1, 15, before)
    send(1, 1, 16, before)
    start(log.database, lease, 2, base=15)
    send(2, 2, 16, after)
    send(3, 2, 17, after)
    with log.database.read() as session:
        found = [event for event in session.scalars(select(EventRow)) if event.type == "RepeatedStepDiffers"]
    assert [event.message.split(",")[0] for event in found] == [
        "Warning: step 16 was repeated after a recovery"
    ] * is_reported
    assert all(event.job_name == "gpt" and repr(after) in event.message for event in found)


def test_a_job_that_begins_again_from_nothing_has_nothing_of_before(log: Log, lease: Lease) -> None:
    log.log(range(1, 21))
    start(log.database, lease, 2, base=0)
    start(log.database, lease, 3, base=0)
    log.send(
        MetricBatch(
            run=RUN,
            first_number=20,
            points=(MetricPoint(generation=Generation(3), step=Step(1), values={"rate": 1.0}, at_seconds=1.0),),
        )
    )
    assert log.values() == {}
    with log.database.read() as session:
        assert [each.name for each in metrics.names(session, RUN)] == ["rate"]


def test_a_long_run_takes_bounded_room_and_counts_every_step_once(log: Log) -> None:
    for first in range(1, 40_001, 1000):
        log.log(range(first, first + 1000))
    points = log.points()
    assert sum(point.count for point in points) == 40_000
    assert (points[0].step, points[-1].last_step) == (1, 40_000)
    assert all(before.last_step < after.step for before, after in pairwise(points))
    assert all(point.count == 1 for point in points if point.step > 40_000 - 31 * 128)
    with log.database.read() as session:
        by_width = dict(
            session.execute(select(MetricChunkRow.width, func.count()).group_by(MetricChunkRow.width)).all()
        )
    assert by_width == {1: 32, 8: 8, 64: 4}
    middle = next(point for point in points if point.count == 64)
    assert (middle.minimum, middle.mean, middle.maximum) == (middle.step, middle.step + 31.5, middle.last_step)


@pytest.mark.long(keep=1)
def test_a_fall_back_beyond_what_is_fine_doubles_nothing(log: Log, lease: Lease) -> None:
    for first in range(1, 20_001, 1000):
        log.log(range(first, first + 1000))
    start(log.database, lease, 2, base=10_003)
    log.log(range(10_004, 20_001), generation=2, offset=0.5)
    points = log.points()
    again = [point for point in points if point.last_step > 10_003]
    assert sum(point.count for point in again) == 9_997
    assert all(point.last == point.last_step + 0.5 for point in again)
    # The job resumes from step 10,003, so points of later steps are replaced. Older points were downsampled, and one of
    # them may cover steps before and after 10,003. Only this point is lost. It covers at most 64 steps.
    assert 10_003 - 64 <= sum(point.count for point in points) - 9_997 <= 10_003
    assert all(before.last_step < after.step for before, after in pairwise(points))


def test_a_late_value_of_a_step_that_is_folded_has_no_place(log: Log) -> None:
    log.log(range(1, 6000))
    total = sum(point.count for point in log.points())
    log.log([5])
    assert sum(point.count for point in log.points()) == total


def test_a_run_has_a_limited_number_of_names(log: Log) -> None:
    names = [f"name {number:03}" for number in range(metrics.MAX_NAMES)]
    values = {**dict.fromkeys(names, 1.0), "one more": 1.0, "x" * 300: 1.0}
    batch = MetricBatch(
        run=RUN,
        first_number=0,
        points=(MetricPoint(generation=Generation(1), step=Step(1), values=values, at_seconds=1.0),),
    )
    for _ in range(2):
        log.send(batch)
    with log.database.read() as session:
        assert [each.name for each in metrics.names(session, RUN)] == names
        assert metrics.dropped_count(session, RUN) == 2


def test_a_name_that_no_database_keeps_is_dropped_and_counted(log: Log) -> None:
    log.send(
        MetricBatch(
            run=RUN,
            first_number=0,
            points=(MetricPoint(generation=Generation(1), step=Step(0), values={"a\x00": 1.0}, at_seconds=0.0),),
        )
    )
    with log.database.read() as session:
        assert (metrics.names(session, RUN), metrics.dropped_count(session, RUN)) == ((), 1)


def test_points_are_read_as_they_were_packed() -> None:
    fine = (logged(1, 1.5, math.inf), logged(2, 2.5, -0.25), logged(2**40, 3.5, math.nan))
    assert repr(unpacked(fine, 1)) == repr(fine)
    coarse = folded(fine, 8)
    assert repr(unpacked(coarse, 8)) == repr(coarse)
    spread = across(2, 2.0, {NodeId("i-1"): 1.0, NodeId("i-2"): 3.0})
    assert spread is not None
    mixed = (logged(1, 1.0, 5.0), dataclasses.replace(spread, breakdown=None))
    assert unpacked(mixed, 1) == mixed
    assert unpacked(folded(mixed, 8), 8) == folded(mixed, 8)


def unpacked(points: tuple[Point, ...], width: int) -> tuple[Point, ...]:
    packed, nodes = metrics.pack(points, width)
    return metrics.unpack(packed, width, nodes)


def test_beside_the_newest_point_of_ours_stands_what_all_nodes_measured(log: Log) -> None:
    """The newest point of rank 0's node also contains the minimum, the mean and the maximum over all nodes.

    A repeated batch does not change these three values. The service ignores metrics that rank 0's node does not log.
    """
    ours = tuple(replace(point(step), values={"loss": 1.0, "everstep/gpu_percent": 80.0}) for step in (1, 2))
    batch = MetricBatch(run=RUN, first_number=0, points=(*ours, point(3)))
    measured = {
        NodeId(f"i-{n}"): {"everstep/gpu_percent": 10.0 * n, "everstep/flood": 1.0, "loss": 9.0} for n in (1, 2, 9)
    }
    for again in (measured, {NodeId("i-5"): {"everstep/gpu_percent": 1.0}}):
        with log.database.write() as session:
            metrics.store(session, "one", batch, again)
    with log.database.read() as session:
        found = metrics.read(session, RUN, name=None, first_step=0, last_step=None)
    assert found.keys() == {"loss", "everstep/gpu_percent"}
    assert [each.last for each in found["loss"]] == [1.0, 1.0, 3.0]
    alone, spread = found["everstep/gpu_percent"]
    assert alone == logged(1, 1.0, 80.0)
    assert (spread.count, spread.minimum, spread.mean, spread.maximum, spread.least_on, spread.most_on) == (
        3,
        10.0,
        20.0,
        90.0,
        "i-1",
        "i-9",
    )


def test_what_an_older_generation_measured_has_no_spread_of_a_newer_one(log: Log) -> None:
    old = replace(point(1), values={"everstep/gpu_percent": 80.0})
    with log.database.write() as session:
        metrics.store(
            session,
            "one",
            MetricBatch(run=RUN, first_number=0, points=(old, point(2, 2))),
            {NodeId("i-1"): {"everstep/gpu_percent": 1.0}},
        )
        found = metrics.read(session, RUN, name="everstep/gpu_percent", first_step=0, last_step=None)
    assert found["everstep/gpu_percent"] == (logged(1, 1.0, 80.0),)


def test_the_nodes_of_the_extremes_outlive_folding(log: Log) -> None:
    for number, step in enumerate(
        [*range(1, 9), *(POINTS_PER_CHUNK * chunk for chunk in range(1, kept_chunks(1) + 1))]
    ):
        ours = replace(point(step), values={"everstep/gpu_percent": 50.0})
        measured = {
            NodeId("i-1"): {"everstep/gpu_percent": 50.0},
            NodeId("i-2"): {"everstep/gpu_percent": 0.0 if step == 5 else 60.0},
        }
        with log.database.write() as session:
            metrics.store(session, "one", MetricBatch(run=RUN, first_number=number, points=(ours,)), measured)
    with log.database.read() as session:
        first, *_ = metrics.read(session, RUN, name="everstep/gpu_percent", first_step=0, last_step=None)[
            "everstep/gpu_percent"
        ]
    assert (first.step, first.last_step, first.minimum, first.least_on, first.maximum, first.most_on) == (
        1,
        7,
        0.0,
        "i-2",
        60.0,
        "i-2",
    )


def test_steps_narrow_what_is_read(log: Log) -> None:
    log.log(range(1, 1001))
    assert [point.step for point in log.points(127, 129)] == [127, 128, 129]
    assert log.points(1001) == ()


def test_what_a_deleted_or_long_ended_job_logged_goes(log: Log, lease: Lease, database: Database) -> None:
    log.log([1])
    with database.write() as session:
        jobs.change(session, lease, ended_at=NOW)
    with database.write() as session:
        counts = prune(session, RowRetention(metrics=2), NOW + timedelta(days=3))
    assert (counts["metrics"], counts["metric chunks"]) == (1, 1)
    log.log([2])
    with database.write() as session:
        jobs.remove(session, RUN)
    log.log([3])
    assert log.points() == ()
