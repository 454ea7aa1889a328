"""Tests the computed number of spare nodes that a fleet should have.

The tests compare the formula with sums that are computed by hand and with a simulation. Other tests cover estimates
from few observed failures.
"""

from __future__ import annotations

import random
from dataclasses import replace
from heapq import heappop, heappush
from math import exp, sqrt
from statistics import NormalDist

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from control_plane.core import spares
from control_plane.core.observed.fleets import FleetHistory, FleetSpec
from everstep.protocol.ids import FleetName

SPEC = FleetSpec(name=FleetName("main"), group="group", min_node_count=0, spare_count=2)
DAY = 86_400.0
HISTORIES = st.builds(
    FleetHistory,
    node_seconds=st.floats(0, 1e10),
    lost_node_count=st.integers(0, 300),
    replacement_count=st.just(10),
    replacement_seconds=st.floats(10, 36_000),
)


def wishing(probability: float) -> FleetSpec:
    return replace(SPEC, spare_probability=probability)


def test_a_count_is_a_count() -> None:
    assert spares.spare_count(SPEC, FleetHistory(lost_node_count=50), 1000) == 2


def test_a_spare_is_free_while_fewer_replacements_are_under_way() -> None:
    assert spares.free_probability(0, 0.5) == 0
    assert spares.free_probability(1, 0.5) == pytest.approx(exp(-0.5))
    assert spares.free_probability(3, 2.0) == pytest.approx(exp(-2) * (1 + 2 + 2))


def test_the_bound_on_a_rate_is_the_exact_one() -> None:
    """The bound on a failure rate equals half a quantile from published tables of the chi-squared distribution.

    The distribution has 2 (n + 1) degrees of freedom for n failures.
    """
    assert spares.most_expected(0) == pytest.approx(2.9957, abs=1e-4)
    assert spares.most_expected(1) == pytest.approx(4.7439, abs=1e-4)
    assert spares.most_expected(10) == pytest.approx(16.9622, abs=1e-4)


def test_a_fleet_that_has_seen_nothing_reckons_with_the_prior() -> None:
    assert spares.failures_per_node_second(FleetHistory()) == pytest.approx(4.7439 / (154 * DAY), rel=1e-4)
    assert spares.replacement_seconds(FleetHistory()) == 420
    assert spares.spare_count(wishing(0.99), FleetHistory(), 8) == 1
    assert spares.spare_count(wishing(0.99), FleetHistory(), 1024) == 3


def test_what_is_measured_counts_more_the_more_there_is() -> None:
    seen = FleetHistory(
        node_seconds=100_000 * DAY, lost_node_count=650, replacement_count=650, replacement_seconds=650 * 100.0
    )
    assert spares.failures_per_node_second(seen) == pytest.approx(0.0065 / DAY, rel=0.1)
    assert spares.replacement_seconds(seen) == pytest.approx(100, rel=0.02)
    calm = FleetHistory(node_seconds=100_000 * DAY)
    assert spares.spare_count(wishing(0.99), calm, 1024) == 1
    assert spares.spare_count(wishing(0.99), seen, 16_384) == 2


def test_a_young_fleet_that_fails_all_the_time_is_believed() -> None:
    bad = FleetHistory(node_seconds=5 * DAY, lost_node_count=50)
    assert spares.failures_per_node_second(bad) == pytest.approx(spares.most_expected(50) / (5 * DAY))
    few = FleetHistory(node_seconds=5 * DAY, lost_node_count=4)
    assert spares.failures_per_node_second(few) == pytest.approx(spares.most_expected(5) / (159 * DAY))


@given(HISTORIES, st.integers(1, 4096), st.floats(0.5, 0.9999))
@example(
    FleetHistory(node_seconds=1536.0, lost_node_count=123, replacement_count=10, replacement_seconds=10.0), 66, 0.875
)
def test_worse_never_means_fewer(history: FleetHistory, working: int, probability: float) -> None:
    count = spares.spare_count(wishing(probability), history, working)
    under_way = spares.failures_per_node_second(history) * working * spares.replacement_seconds(history)
    assert spares.free_probability(count, under_way) >= probability or count == spares.MOST_SPARES
    assert count == 0 or spares.free_probability(count - 1, under_way) < probability
    assert (
        spares.spare_count(wishing(probability), replace(history, lost_node_count=history.lost_node_count + 5), working)
        >= count
    )
    assert spares.spare_count(wishing(probability), history, working + 64) >= count
    assert spares.spare_count(wishing(min(0.99999, probability + 0.05)), history, working) >= count


@pytest.mark.parametrize(("seen", "bound"), [(0, 2.9957), (10, 16.9622)])
def test_the_bound_on_what_is_expected_is_the_tables(seen: int, bound: float) -> None:
    """The upper bound on an expected number of failures equals Garwood's exact bound.

    It is half the quantile at 0.95 of the chi-squared distribution with 2 · seen + 2 degrees of freedom.
    """
    assert spares.most_expected(seen) == pytest.approx(bound, abs=1e-4)


@pytest.mark.parametrize("seen", [200, 500, 600, 1_000, 10_000])
def test_the_bound_holds_for_many_failures_too(seen: int) -> None:
    """For 200 failures and more, the bound agrees with the Wilson-Hilferty approximation.

    The relative error of that approximation is at most one part in 100,000.
    """
    part = 2 / (9 * (2 * seen + 2))
    assert spares.most_expected(seen) == pytest.approx(
        (seen + 1) * (1 - part + NormalDist().inv_cdf(0.95) * sqrt(part)) ** 3, rel=1e-5
    )


def test_the_formula_is_what_a_simulated_fleet_does() -> None:
    """The formula predicts how often a simulated fleet with two spares has a free spare at a failure.

    Failures follow a Poisson process. A replacement takes between one and twenty minutes.
    """
    rng = random.Random(7)  # the simulation needs repeatable random numbers, not cryptographic ones
    between, mean, spare_count = 700.0, 420.0, 2
    now, free, under_way = 0.0, 0, list[float]()
    failure_count = 40_000
    for _ in range(failure_count):
        now += rng.expovariate(1 / between)
        while under_way and under_way[0] <= now:
            heappop(under_way)
        free += len(under_way) < spare_count
        heappush(under_way, now + rng.choice([60.0, 300.0, 900.0]))
    assert free / failure_count == pytest.approx(spares.free_probability(spare_count, mean / between), abs=0.01)


def test_bounds_of_spares_and_rates() -> None:
    assert [spares.free_probability(count, 0.0) for count in (0, 1)] == [0.0, 1.0]
    enough = FleetHistory(node_seconds=DAY, lost_node_count=spares.ENOUGH_FAILURES)
    own = spares.most_expected(spares.ENOUGH_FAILURES) / DAY
    assert spares.failures_per_node_second(enough) == own
    fewer = replace(enough, lost_node_count=spares.ENOUGH_FAILURES - 1)
    assert spares.failures_per_node_second(fewer) < own / 2
    unknown = replace(enough, node_seconds=0.5)
    assert spares.failures_per_node_second(unknown) == spares.most_expected(spares.ENOUGH_FAILURES)
