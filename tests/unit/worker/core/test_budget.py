"""Tests the interval between snapshots in a simulated training that snapshots slow down."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.core.budget import ENOUGH, ENOUGH_QUIET, GROWTH, LEAST, MAX_INTERVAL, REST_EVERY, Budget, Load


def train(
    budget: Budget,
    iterations: int,
    *,
    extra: float = 0.0,
    blocked: float = 0.0,
    lasts: int = 1,
    noise: float = 0.0,
    seed: int = 1,
    cost_at: Callable[[int], float] | None = None,
) -> tuple[Budget, list[float], int]:
    """Simulate iterations of 1 s, each of which takes longer while a snapshot is sent.

    Return the budget (which chooses the interval of snapshots), the durations of all iterations and the number of
    snapshots.
    """
    rng = random.Random(seed)
    seconds: list[float] = []
    snapshots, due, left = 0, 0, 0
    for number in range(iterations):
        begins = number >= due and left == 0
        if begins:
            snapshots, left = snapshots + 1, lasts
            due = number + budget.distance
        is_loaded = left > 0
        more = extra if cost_at is None else cost_at(number)
        took = 1.0 + rng.gauss(0, noise) + (more if is_loaded else 0.0)
        seconds.append(took)
        budget = budget.iteration(
            took, blocked_seconds=blocked if is_loaded else 0.0, is_loaded=is_loaded, has_begun=begins
        )
        left -= is_loaded
        due = max(due, number + 1)
    return budget, seconds, snapshots


def test_free_snapshots_are_taken_at_every_step_but_for_the_rests() -> None:
    budget, _, snapshots = train(Budget(0.01), 1000)
    assert budget.interval == 1
    assert snapshots / 1000 >= 0.97


def test_what_costs_too_much_comes_less_often_until_it_fits() -> None:
    budget, seconds, _ = train(Budget(0.01), 2500, extra=0.1)
    assert budget.interval == 10
    late = seconds[-500:]
    assert sum(late) / len(late) - 1 <= 0.0101
    assert budget.slowdown == pytest.approx(0.01)


def test_snapshots_that_last_for_several_iterations_cost_that_much_more() -> None:
    budget, seconds, _ = train(Budget(0.01), 2500, extra=0.05, lasts=3)
    assert budget.interval == pytest.approx(15, abs=1)
    late = seconds[-500:]
    assert sum(late) / len(late) - 1 <= 0.0105


@pytest.mark.parametrize("blocked", [0.0, 0.2])
def test_a_snapshot_costs_what_all_its_iterations_took_longer_together(blocked: float) -> None:
    """A snapshot lasts for three iterations and delays one of them. The snapshot's cost is the sum of the delays.

    The median of the three delays would be zero.
    """
    budget = Budget(0.01)
    for _ in range(ENOUGH_QUIET):
        budget = budget.iteration(1.0, blocked_seconds=0.0, is_loaded=False, has_begun=False)
    for number in range(ENOUGH + LEAST):
        begins = number % 3 == 0
        budget = budget.iteration(
            1.3 if begins else 1.0, blocked_seconds=blocked * begins, is_loaded=True, has_begun=begins
        )
        if number == 3 * LEAST:
            assert budget.slowdown == pytest.approx(0.3 / budget.iterations_per_snapshot), "that often one is taken"
    assert budget.interval == GROWTH * 3, "they are three apart as it is"


@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 10_000), lasts=st.integers(1, 3))
def test_what_two_snapshots_in_five_cost_is_paid_for(seed: int, lasts: int) -> None:
    rng = random.Random(seed)
    _, seconds, _ = train(Budget(0.02), 4000, lasts=lasts, cost_at=lambda _: 0.5 * (rng.random() < 0.4))
    late = seconds[-2000:]
    assert sum(late) / len(late) - 1 <= 0.04, "without a budget 0.2"


def test_it_comes_back_by_no_more_than_it_grows_before_it_is_measured_anew() -> None:
    budget, intervals = train(Budget(0.01), 2500, extra=0.1)[0], []
    for _ in range(1500):
        budget = train(budget, 1)[0]
        intervals.append(budget.interval)
    assert intervals[0] == 10
    assert intervals[-1] == 1
    assert all(after >= before // GROWTH for before, after in itertools.pairwise(intervals))


def test_what_is_sent_before_a_first_snapshot_is_none() -> None:
    budget = Budget(0.01).iteration(9.0, blocked_seconds=1.0, is_loaded=True, has_begun=False)
    assert (budget.newest, budget.snapshots, budget.quiet) == (None, (), ())


def test_time_that_the_rank_was_held_counts_before_there_is_anything_to_compare_with() -> None:
    budget, _, _ = train(Budget(0.01), ENOUGH + 1, blocked=0.05)
    assert budget.slowdown is None
    assert budget.interval == GROWTH
    assert train(budget, 500, blocked=0.05)[0].interval == 5


def test_an_audit_now_and_then_is_no_usual_cost() -> None:
    budget = Budget(0.01)
    for number in range(3 * ENOUGH):
        budget = budget.iteration(1.0, blocked_seconds=0.5 if number < 3 else 0.001, is_loaded=True, has_begun=True)
    assert budget.interval == 1


def test_it_grows_step_by_step_each_time_by_what_is_measured_then() -> None:
    budget, intervals = Budget(0.001), []
    for _ in range(2500):
        budget = train(budget, 1, extra=0.1)[0]
        intervals.append(budget.interval)
    assert all(after <= GROWTH * before for before, after in itertools.pairwise(intervals))


def test_it_comes_more_often_again_when_there_is_room() -> None:
    budget, _, _ = train(Budget(0.01), 2500, extra=0.1)
    assert budget.interval == 10
    budget, _, snapshots = train(budget, 1500, extra=0.0)
    assert budget.interval == 1
    assert snapshots > 500


def test_a_budget_allows_what_it_says() -> None:
    found = {allowed: train(Budget(allowed), 4000, extra=0.1)[0].interval for allowed in (0.001, 0.01, 0.05, 0.2)}
    assert found == {0.001: 100, 0.01: 10, 0.05: 2, 0.2: 1}


def test_an_interval_has_an_end() -> None:
    budget = Budget(1e-6)
    for _ in range(300):
        budget = budget.iteration(1.0, blocked_seconds=0.5, is_loaded=True, has_begun=True)
    assert budget.interval == MAX_INTERVAL


@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 10_000))
def test_noise_alone_hardly_changes_anything(seed: int) -> None:
    _, _, snapshots = train(Budget(0.01), 1500, noise=0.02, seed=seed)
    assert snapshots / 1500 > 0.9


@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 10_000), extra=st.floats(0.05, 0.5))
def test_the_slowdown_is_kept_in_noise_too(seed: int, extra: float) -> None:
    _, seconds, _ = train(Budget(0.02), 2500, extra=extra, noise=0.01, seed=seed)
    late = seconds[-800:]
    assert sum(late) / len(late) - 1 <= 0.03


def test_a_rest_is_taken_where_every_iteration_is_loaded() -> None:
    budget = Budget(0.01)
    for _ in range(REST_EVERY):
        assert budget.distance == 1
        budget = budget.iteration(1.0, blocked_seconds=0.0, is_loaded=True, has_begun=True)
    assert budget.distance == 2
    assert budget.iteration(1.0, blocked_seconds=0.0, is_loaded=False, has_begun=False).distance == 1


def test_a_stray_long_iteration_is_no_cost() -> None:
    budget, _, _ = train(Budget(0.01), 900, cost_at=lambda number: 60.0 if number % 200 == 7 else 0.0)
    assert budget.interval == 1


def test_a_snapshot_that_now_and_then_lasts_longer_costs_one_proposal_at_a_rest() -> None:
    budget = Budget(1.0)
    for number in range(REST_EVERY):
        budget = budget.iteration(1.0, blocked_seconds=0.0, is_loaded=True, has_begun=number % 8 != 7)
    assert 1.0 < budget.iterations_per_snapshot < 1.5
    assert budget.distance == 2
    # No snapshot starts any more, but the last one still overlaps the next iteration.
    budget = budget.iteration(1.0, blocked_seconds=0.0, is_loaded=True, has_begun=False)
    assert budget.distance == 2, "nothing quiet was seen: it rests again"


def test_each_iteration_adds_to_the_cost_of_a_snapshot() -> None:
    assert Load(2, 1.0, 0.5).and_also(2.0, 0.25) == Load(3, 3.0, 0.75)


def measured(quiet_seconds: float, load: Load, **changes: float) -> Budget:
    """Return a budget with enough equal measurements: quiet iterations, and snapshots of one iteration each."""
    made = Budget(0.1, quiet=(quiet_seconds,) * ENOUGH_QUIET, snapshots=(load,) * ENOUGH)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_the_slowdown_is_the_cost_of_a_snapshot_per_mean_iteration() -> None:
    assert measured(2.0, Load(1, 3.0, 0.25), interval=2).slowdown == 0.25
    assert measured(2.0, Load(1, 3.0, 0.25), interval=2, iterations_per_snapshot=4.0).slowdown == 0.125
    assert measured(2.0, Load(1, 3.0, 0.25), quiet=(2.0,) * (ENOUGH_QUIET - 1)).slowdown is None
    assert measured(2.0, Load(1, 3.0, 0.25), snapshots=(Load(1, 3.0, 0.25),) * (LEAST - 1)).slowdown is None
    varied = measured(2.0, Load(1, 3.0, 0.0), quiet=(1.5, 2.5) * ENOUGH_QUIET)
    assert varied.slowdown == pytest.approx(0.5)


def after_rest(budget: Budget) -> Budget:
    return budget.iteration(budget.quiet[-1], blocked_seconds=0.0, is_loaded=False, has_begun=False)


@pytest.mark.parametrize(
    ("budget", "interval"),
    [
        pytest.param(measured(1.0, Load(1, 1.1, 0.0)), 1, id="10 % of each iteration is allowed"),
        pytest.param(measured(1.0, Load(1, 1.2, 0.0)), 2, id="20 % needs every second step"),
        pytest.param(measured(1.0, Load(1, 2.0, 0.0)), 2, id="one decision at most doubles the interval"),
        pytest.param(measured(1.0, Load(1, 2.0, 0.0), iterations_per_snapshot=3.0), 6, id="of the time of a transfer"),
        pytest.param(measured(1.0, Load(1, 1.2, 0.0), iterations_per_snapshot=2.0), 1, id="a transfer takes two steps"),
        pytest.param(measured(1.0, Load(1, 1.3, 0.0), interval=5), 3, id="a shorter interval suffices"),
        pytest.param(measured(1.0, Load(1, 1.1, 0.0), interval=8), 4, id="one decision at most halves the interval"),
        pytest.param(measured(1.0, Load(1, 1.0, 0.0), interval=1), 1, id="every step"),
        pytest.param(measured(1.0, Load(1, 2.0, 0.0), snapshots=(Load(1, 2.0, 0.0),) * (ENOUGH - 1)), 1, id="too few"),
        pytest.param(measured(1.0, Load(4, 8.0, 0.0), snapshots=(Load(4, 8.0, 0.0),) * LEAST), 2, id="just enough"),
        pytest.param(
            measured(1.0, Load(9, 18.0, 0.0), snapshots=(Load(9, 18.0, 0.0),) * (LEAST - 1)), 1, id="too few 2"
        ),
        pytest.param(measured(1.0, Load(1, 1.0, 0.2)), 2, id="blocked time counts whatever the iterations took"),
    ],
)
def test_the_interval_follows_from_the_cost_of_a_snapshot(budget: Budget, interval: int) -> None:
    assert after_rest(budget).interval == interval


def test_without_quiet_iterations_only_the_blocked_time_counts() -> None:
    budget = replace(measured(1.0, Load(2, 4.0, 0.5)), quiet=())
    again = budget.iteration(1.0, blocked_seconds=0.0, is_loaded=False, has_begun=False)
    assert again.interval == 2, "0.5 s per snapshot, 1.0 s per iteration"
    begun = replace(budget, newest=Load(2, 4.0, 0.5)).iteration(
        2.0, blocked_seconds=0.5, is_loaded=True, has_begun=True
    )
    assert begun.interval == 2, "0.5 s per snapshot, 2.0 s per iteration"


def test_a_quiet_iteration_ends_the_delay_of_a_proposal() -> None:
    tired = Budget(0.1, since_rest=REST_EVERY, iterations_per_snapshot=2.6)
    assert tired.distance == 4
    assert replace(tired, since_rest=REST_EVERY - 1).distance == 1
    rested = tired.iteration(1.0, blocked_seconds=0.0, is_loaded=False, has_begun=False)
    assert (rested.since_rest, rested.distance) == (0, 1)
