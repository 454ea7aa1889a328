"""Tests statistics of the benchmarks: medians, spreads, lower bounds that change during a run, pairs of launches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.measures import Floor, Summary, bootstrap_interval, is_busy, moved_ratio, paired_ratios, percentile

POSITIVE = st.floats(min_value=1e-6, max_value=1e6)


def summary(median: float) -> Summary:
    return Summary(1, median, median, median, median)


def test_p99_of_few_is_the_worst_and_of_many_is_not() -> None:
    assert Summary.of(list(range(1, 100))).p99 == 99
    assert Summary.of(list(range(1, 201))).p99 == 198


def test_summary_names_count_and_ends() -> None:
    assert Summary.of([3.0, 1.0, 2.0, 10.0]) == Summary(count=4, minimum=1.0, median=2.5, p99=10.0, maximum=10.0)


def test_nothing_measured_is_no_summary() -> None:
    with pytest.raises(ValueError, match="empty"):
        Summary.of([])
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


@given(st.lists(POSITIVE, min_size=1), st.floats(min_value=0.01, max_value=1.0))
def test_percentile_is_the_least_value_that_enough_do_not_exceed(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert sum(value <= found for value in values) >= math.ceil(share * len(values))
    assert sum(value < found for value in values) < math.ceil(share * len(values))


@given(POSITIVE, POSITIVE)
def test_movement_has_no_direction(one: float, other: float) -> None:
    assert moved_ratio(one, other) == moved_ratio(other, one) >= 0


@pytest.mark.parametrize(
    ("after", "stood_still"), [(1.0, True), (1.19, True), (1.21, False), (0.84, True), (0.8, False)]
)
def test_a_floor_that_moved_by_more_than_a_fifth_says_so(after: float, stood_still: bool) -> None:
    assert Floor(summary(1.0), summary(after)).stood_still is stood_still


def test_a_floor_of_nothing_proves_nothing() -> None:
    assert not Floor(summary(0.0), summary(1.0)).stood_still


def test_busy_is_relative_to_cores() -> None:
    assert is_busy(1.5, 2)
    assert not is_busy(1.5, 16)


def test_pairs_cancel_a_drift_that_favours_one_side() -> None:
    # Without drift, B takes 1.0 and A takes 1.1. With each launch, the machine gets slower by 10 % of B's time.
    drift = [1.0, 1.1, 1.2, 1.3]
    ratios = paired_ratios("ABBA", [cost * slower for cost, slower in zip([1.1, 1.0, 1.0, 1.1], drift, strict=True)])
    assert ratios[0] < 0.1 < ratios[1]
    assert sum(ratios) / 2 == pytest.approx(0.1, abs=0.02)


def test_a_pair_of_the_same_is_refused() -> None:
    with pytest.raises(ValueError, match="no pair"):
        paired_ratios("AABB", [1.0] * 4)


def test_a_bootstrap_holds_the_statistic_and_narrows_with_more_values() -> None:
    few, many = [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0] * 20
    low, high = bootstrap_interval(lambda samples: statistics.median(samples[0]), few)
    narrow_low, narrow_high = bootstrap_interval(lambda samples: statistics.median(samples[0]), many)
    assert low <= 3.0 <= high
    assert low < narrow_low <= 3.0 <= narrow_high < high


def test_a_bootstrap_draws_its_samples_apart_and_is_repeatable() -> None:
    def ratio(samples: Sequence[Sequence[float]]) -> float:
        return statistics.median(samples[0]) / statistics.median(samples[1])

    assert bootstrap_interval(ratio, [2.0, 2.0], [1.0]) == (2.0, 2.0)
    noisy = [1.0, 5.0, 9.0, 2.0]
    assert bootstrap_interval(ratio, noisy, noisy) == bootstrap_interval(ratio, noisy, noisy)
    low, high = bootstrap_interval(ratio, noisy, noisy)
    assert low < 1.0 < high
    with pytest.raises(ValueError, match="no values"):
        bootstrap_interval(ratio, noisy, [])
