"""Downsampled points of whole runs equal those of a full read, even if chunks change or the cache is full."""

from __future__ import annotations

import random

import pytest

from control_plane.core.metrics import Point, resampled
from control_plane.db import metric_samples, metrics
from control_plane.db.leases import Lease
from control_plane.db.metric_samples import MetricSamples
from control_plane.db.session import Database
from tests.unit.control_plane.db.test_metrics import RUN, Log, start

LIMIT = 100


@pytest.fixture
def log(database: Database, lease: Lease) -> Log:
    start(database, lease, 1, base=0)
    return Log(database)


def sampled(log: Log, samples: MetricSamples, limit: int = LIMIT) -> tuple[Point, ...]:
    with log.database.read() as session:
        return samples.read(session, RUN, name=None, limit=limit).get("loss", ())


def rounded(points: tuple[Point, ...]) -> list[tuple[object, ...]]:
    return [
        (each.step, each.last_step, each.at, each.count, each.minimum, round(each.mean, 6), each.maximum, each.last)
        for each in points
    ]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_points", [0, 100_000], ids=["nothing is remembered", "all is remembered"])
def test_the_points_equal_those_of_a_full_read(log: Log, lease: Lease, seed: int, max_points: int) -> None:
    rng = random.Random(seed)
    samples = MetricSamples(max_points)
    step, generation = 0, 1
    for _ in range(15):
        count = rng.choice((3, 60, 1_000))
        log.log(range(step + 1, step + count + 1), generation=generation, offset=rng.random())
        step += count
        expected = resampled(log.points(), LIMIT)
        assert rounded(sampled(log, samples)) == rounded(expected)
        if rng.random() < 0.2:
            generation += 1
            step = max(0, step - rng.randrange(500))
            start(log.database, lease, generation, base=step)


def test_a_run_with_few_points_is_returned_as_it_was_logged(log: Log) -> None:
    log.log([3, 5, 300])
    assert [point.step for point in sampled(log, MetricSamples())] == [3, 5, 300]
    assert sampled(log, MetricSamples(), limit=1)[0].count == 3


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the width (steps per point) of each chunk when it is decoded."""
    widths: list[int] = []

    def unpack(packed: bytes, width: int, nodes: tuple[str, ...], breakdowns: bytes | None) -> tuple[Point, ...]:
        widths.append(width)
        return metrics.unpack(packed, width, nodes, breakdowns)

    monkeypatch.setattr(metric_samples, "unpack", unpack)
    return widths


def test_an_unchanged_chunk_is_decoded_once(log: Log, decoded: list[int]) -> None:
    samples = MetricSamples()
    log.log(range(1, 1_000))
    sampled(log, samples)
    assert len(decoded) == 8
    log.log([1_000])
    sampled(log, samples)
    assert len(decoded) == 9


def test_chunks_beyond_the_limit_are_forgotten(log: Log, decoded: list[int]) -> None:
    samples = MetricSamples(max_points=150)
    log.log(range(1, 1_000))
    for _ in range(2):
        sampled(log, samples, limit=1_000)
    assert len(decoded) == 16, "one chunk has 128 points, so no chunk is remembered until it is read again"
