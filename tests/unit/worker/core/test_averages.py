"""Tests averages that ignore outliers, and their computed uncertainty."""

from __future__ import annotations

import random
import statistics

import pytest

from worker.core.averages import trimmed_error, trimmed_mean


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([5.0], 5.0),
        ([1.0, 2.0], 1.5),
        ([1.0, 2.0, 60.0], 2.0),
        ([*range(1, 10), 1000], 5.5),
        ([0.0] * 18 + [-1e6, 1e6], 0.0),
        ([0.0] * 12 + [0.5] * 8, 6 * 0.5 / 16),
    ],
    ids=["alone", "two", "a misplaced shard among three", "a misplaced shard", "one at either end", "two in five"],
)
def test_the_ends_are_cut_off(values: list[float], mean: float) -> None:
    assert trimmed_mean(values) == pytest.approx(mean)
    assert trimmed_mean(values[::-1]) == pytest.approx(mean)


def test_its_error_is_how_much_it_differs_from_draw_to_draw() -> None:
    rng = random.Random(7)
    draws = [[rng.gauss(1.0, 0.2) for _ in range(50)] for _ in range(400)]
    assert statistics.fmean(map(trimmed_error, draws)) == pytest.approx(
        statistics.stdev(map(trimmed_mean, draws)), rel=0.1
    )


def test_its_error_counts_the_nearest_values_in_place_of_the_ignored_ones() -> None:
    values = [-50.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0, 900.0]
    winsorized = [1.0, *values[1:-1], 34.0]
    assert trimmed_error(values) == pytest.approx(statistics.stdev(winsorized) * 10**0.5 / 8)


def test_a_stray_does_not_make_it_less_known() -> None:
    values = [1.0, 1.1] * 20
    assert trimmed_error([*values, 60.0]) == pytest.approx(trimmed_error(values), rel=0.1)


def test_one_value_says_nothing_of_its_error() -> None:
    assert trimmed_error([3.0]) == trimmed_error([1.0, 2.0, 9.0]) == 0.0
    assert trimmed_error([1.0, 2.0]) == pytest.approx(0.5), "of two values"
