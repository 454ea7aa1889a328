"""Digests of a metric's points show how many of the first points are unchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.core.metric_changes import BLOCK_POINTS, digests, unchanged_count
from control_plane.core.metrics import Point, folded, logged

POINTS = tuple(logged(step, 1000.0 + step, 3.0 / (step + 1)) for step in range(100))


def common(before: tuple[Point, ...], now: tuple[Point, ...]) -> int:
    assert digests(before) != digests(now)
    return unchanged_count(digests(before), digests(now))


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 15, 16, 99])
def test_appended_points_leave_whole_blocks_unchanged(count: int) -> None:
    assert common(POINTS[:count], POINTS) == count // BLOCK_POINTS * BLOCK_POINTS


def test_a_recovery_that_drops_points_keeps_those_before_its_step() -> None:
    assert common(POINTS, POINTS[:41]) == 40
    assert common(POINTS, (*POINTS[:50], *(replace(each, last=9.0) for each in POINTS[50:]))) == 48


@pytest.mark.parametrize(
    "change",
    [
        {"step": 1},
        {"last_step": 99},
        {"count": 2},
        {"at": 7.0},
        {"minimum": 0.1},
        {"mean": 0.1},
        {"maximum": 0.1},
        {"last": float("nan")},
        {"least_on": "i-1"},
        {"most_on": "i-1"},
    ],
)
def test_every_field_of_a_point_counts(change: dict) -> None:
    assert common(POINTS, (*POINTS[:22], replace(POINTS[22], **change), *POINTS[23:])) == 20


def test_equal_points_have_equal_digests_also_if_means_differ_by_a_rounding_error() -> None:
    assert digests(POINTS) == digests(tuple(POINTS))
    assert digests(folded(folded(POINTS, 8), 32)) == digests(folded(POINTS, 32))
    nan = (logged(1, 1.0, float("nan")),)
    assert digests(nan) == digests((logged(1, 1.0, float("nan")),))


def test_no_points_and_some_points_have_nothing_in_common() -> None:
    assert common((), POINTS) == 0
    assert common(POINTS, ()) == 0
