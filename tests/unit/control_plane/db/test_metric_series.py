"""Values by node and by rank are stored together with a metric's points.

Old points are folded: several points are joined to one point that covers more steps. After a failure, ranks repeat
steps, and the new points replace the earlier points of these steps. The values by node and by rank are folded and
replaced in the same way.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace
from sqlalchemy import select, update

from control_plane.core.breakdowns import encoded
from control_plane.core.metrics import (
    FOLD,
    POINTS_PER_CHUNK,
    Point,
    across,
    chunk_of,
    folded,
    kept_chunks,
    replaced,
    resampled,
)
from control_plane.db import metrics
from control_plane.db.leases import Lease
from control_plane.db.metric_samples import MetricSamples
from control_plane.db.models import MetricChunkRow
from control_plane.db.session import Database
from everstep.protocol.agent_messages import MetricBatch
from everstep.protocol.ids import NodeId
from tests.unit.control_plane.db.test_metrics import RUN, point, start

ROOT = Path(__file__).parents[4]
GPU = "everstep/gpu_percent"
SERIES = {"1": 60.0, "2": 40.0}


@pytest.fixture
def stored(database: Database, lease: Lease) -> Database:
    start(database, lease, 1, base=0)
    return database


def store(
    database: Database,
    number: int,
    step: int,
    measured: Mapping[str, float] = SERIES,
    logged: Mapping[int, float] = {},
    generation: int = 1,
) -> None:
    """Store one point of rank 0: a GPU utilization of 60 and a loss equal to the step."""
    ours = replace(point(step, generation), values={GPU: 60.0, "loss": float(step)})
    batch = MetricBatch(run=RUN, first_number=number, points=(ours,))
    with database.write() as session:
        of_nodes = {NodeId(node): {GPU: value, "loss": 9.0} for node, value in measured.items()}
        of_ranks = {rank: {"loss": value, "unknown": 1.0} for rank, value in logged.items()}
        metrics.store(session, "one", batch, of_nodes, of_ranks)


def read(database: Database, name: str = GPU) -> tuple[Point, ...]:
    with database.read() as session:
        found = metrics.read(session, RUN, name=name, first_step=0, last_step=None, has_breakdowns=True)
    return found.get(name, ())


def series(database: Database, name: str = GPU) -> dict[int, dict[str, float] | None]:
    return {each.step: each.breakdown.values if each.breakdown else None for each in read(database, name)}


def test_nodes_have_series_of_what_they_measure_and_ranks_of_what_they_log(stored: Database) -> None:
    store(stored, 0, 1, logged={1: 3.0, 7: 4.0})
    assert series(stored) == {1: SERIES}
    assert series(stored, "loss") == {1: {"0": 1.0, "1": 3.0, "7": 4.0}}
    with stored.read() as session:
        assert metrics.series_names(session, RUN) == {GPU, "loss"}
        plain = metrics.read(session, RUN, name="loss", first_step=0, last_step=None)["loss"]
    assert [(each.last, each.breakdown) for each in plain] == [(1.0, None)], "the point is still rank 0's value"


def test_only_the_newest_point_of_a_batch_has_series(stored: Database) -> None:
    values = ({GPU: 1.0, "loss": 1.0}, {GPU: 2.0}, {"loss": 3.0})
    points = tuple(replace(point(step), values=each) for step, each in enumerate(values))
    with stored.write() as session:
        of_nodes = {NodeId(node): {GPU: value} for node, value in SERIES.items()}
        batch = MetricBatch(run=RUN, first_number=0, points=points)
        metrics.store(session, "one", batch, of_nodes, {1: {"loss": 5.0}})
    assert (series(stored), series(stored, "loss")) == ({1: SERIES}, {2: {"0": 3.0, "1": 5.0}})


@pytest.mark.parametrize("count", [1, 65])
def test_one_node_and_more_than_64_have_no_series(stored: Database, count: int) -> None:
    store(stored, 0, 1, {f"i-{n}": float(n) for n in range(count)})
    assert series(stored) == {}
    with stored.read() as session:
        assert metrics.series_names(session, RUN) == frozenset()


def test_points_without_series_are_left_out(stored: Database) -> None:
    store(stored, 0, 1)
    store(stored, 1, 2, {})
    assert series(stored) == {1: SERIES}


def test_folded_points_have_the_means_of_each_node(stored: Database) -> None:
    store(stored, 0, 8, {"1": 10.0, "2": 20.0})
    store(stored, 1, 9, {"1": 30.0, "3": 20.0})
    for number in range(1, kept_chunks(1) + 1):
        store(stored, number + 1, POINTS_PER_CHUNK * number)
    first, *_ = read(stored)
    assert (first.step, first.last_step) == (8, 9)
    assert first.breakdown is not None
    assert first.breakdown.values == {"1": 20.0, "2": 20.0, "3": 20.0}


def test_repeated_steps_have_the_series_of_the_repetition(stored: Database, lease: Lease) -> None:
    for step in (1, 2, 3):
        store(stored, step, step)
    start(stored, lease, 2, base=1)
    store(stored, 4, 2, {"1": 1.0, "9": 2.0}, generation=2)
    assert series(stored) == {1: SERIES, 2: {"1": 1.0, "9": 2.0}}


def test_a_server_of_the_version_before_changes_points_without_their_series(stored: Database) -> None:
    """A server of the previous version changes points, but not their values by node and rank.

    The present server drops these outdated values. It stores new values for the points that it adds.
    """
    store(stored, 0, 1)
    with stored.write() as session:
        row = session.scalars(select(MetricChunkRow).where(MetricChunkRow.name == GPU)).one()
        (first,) = metrics.unpack(row.points, 1, row.nodes)
        points, nodes = metrics.pack([first, dataclasses.replace(first, step=2, last_step=2)], 1)
        session.execute(update(MetricChunkRow).where(MetricChunkRow.name == GPU).values(points=points, nodes=nodes))
    assert series(stored) == {}
    store(stored, 1, 5)
    assert series(stored) == {5: SERIES}


def test_a_chunk_of_an_older_schema_has_no_series(stored: Database) -> None:
    store(stored, 0, 1)
    with stored.write() as session:
        session.execute(update(MetricChunkRow).values(breakdowns=None))
    assert series(stored) == {}
    store(stored, 1, 2)
    assert series(stored) == {2: SERIES}


@pytest.mark.parametrize("max_points", [0, 100_000], ids=["nothing is cached", "all is cached"])
def test_cached_series_equal_those_of_a_full_read(stored: Database, max_points: int) -> None:
    samples = MetricSamples(max_points)
    for number in range(60):
        store(stored, number, 20 * number, {"1": float(number), "2": 1.0} if number % 3 else {})
        if number % 20 != 19:
            continue
        with stored.read() as session:
            for limit in (500, 10):
                found = samples.read(session, RUN, name=GPU, limit=limit, has_breakdowns=True)[GPU]
                assert len(found) <= limit
                assert [each for each in found if each.breakdown is None] == []
                assert sum(each.count for each in found) == sum(each.count for each in read(stored))
            whole = samples.read(session, RUN, name=GPU, limit=500, has_breakdowns=True)[GPU]
            plain = samples.read(session, RUN, name=GPU, limit=500)[GPU]
        assert whole == resampled(read(stored), 500)
        assert [each.breakdown for each in plain] == [None] * (number + 1)


def stored_bytes(node_count: int, measurement_count: int) -> tuple[int, int, int]:
    """Return the bytes of a metric's points, the bytes of its series, and the number of points, after all folds."""
    first = across(0, 0.0, {NodeId(f"i-{node:017x}"): float(node) for node in range(node_count)})
    assert first is not None
    held: defaultdict[tuple[int, int], tuple[Point, ...]] = defaultdict(tuple)
    for step in range(measurement_count):
        held[1, chunk_of(step, 1)] += (dataclasses.replace(first, step=step, last_step=step),)
    width = 1
    while surplus := sorted(number for each, number in held if each == width)[: -kept_chunks(width)]:
        for number in surplus:
            wider = width * FOLD, number // FOLD
            held[wider] = replaced(held[wider], folded(held.pop((width, number)), wider[0]))
        width *= FOLD
    packed = [(metrics.pack(points, width), points) for (width, _), points in held.items()]
    extremes = sum(len(data) + len(json.dumps(nodes)) for (data, nodes), _ in packed)
    series = sum(len(encoded([each.breakdown for each in points], data) or b"") for (data, _), points in packed)
    return extremes, series, sum(map(len, held.values()))


@pytest.mark.parametrize("node_count", [8, 64])
def test_the_documented_bytes_of_a_day_are_those_of_the_encoding(node_count: int) -> None:
    extremes, series, count = stored_bytes(node_count, 24 * 3600 // 5)
    text = (ROOT / "docs/reference/metrics.md").read_text()
    assert f"17,280 measurements, thinned to {count:,} points" in text
    assert f"| {node_count} nodes | {extremes / 1000:,.0f} kB | {series / 1000:,.0f} kB |" in text
