"""Tests the pacing trial, in which an agent compares iterations with paced and unpaced transfers of snapshots.

A paced transfer is sent only in idle network time. The trial ends with a verdict: whether pacing saves training time.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.protocol.ids import Step
from worker.core.pacing_trial import (
    ENOUGH,
    LEAST,
    LEAST_TO_PACE,
    MOST_LOST,
    RUN_STEPS,
    PacingTrial,
    PacingTries,
    is_tried_paced,
)


def tried(
    *, paced: float, at_once: float, noise: float = 0.0, seed: int = 1, late: tuple[float, float] = (0.0, 0.0)
) -> tuple[PacingTrial, int]:
    """Simulate iterations until the trial has decided (`verdict`). Return the trial and the number of iterations.

    `late` contains two probabilities of a late transfer: in an unpaced iteration, and in a paced iteration.
    """
    rng, trial = random.Random(seed), PacingTrial()
    for step in range(100_000):
        is_paced = is_tried_paced(Step(step))
        if trial.verdict is not None:
            return trial, step
        seconds, is_late = (paced if is_paced else at_once) * (1 + rng.gauss(0, noise)), rng.random() < late[is_paced]
        trial = trial.iteration(seconds, is_paced=is_paced, lost_count=int(is_late))
    raise AssertionError("no verdict")


@pytest.mark.parametrize(
    ("paced", "at_once", "pays", "least"), [(1.0, 1.2, True, LEAST_TO_PACE), (1.1, 1.0, False, LEAST)]
)
def test_a_clear_difference_is_known_after_a_few_iterations(
    paced: float, at_once: float, pays: bool, least: int
) -> None:
    trial, iterations = tried(paced=paced, at_once=at_once)
    assert trial.verdict is pays
    assert 2 * least <= iterations <= 2 * (least + RUN_STEPS)


@pytest.mark.parametrize("seed", range(20))
def test_noise_ends_no_trial_early_on_the_wrong_side(seed: int) -> None:
    """Iterations vary by 10 %, and paced iterations are 8 % shorter. The trial decides for pacing."""
    trial, iterations = tried(paced=0.92, at_once=1.0, noise=0.1, seed=seed)
    assert trial.verdict is True
    assert iterations <= 2 * (ENOUGH + RUN_STEPS)


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_where_nothing_is_gained_to_speak_of_nothing_is_paced(noise: float) -> None:
    trial, _ = tried(paced=1.0, at_once=1.0, noise=noise)
    assert trial.verdict is False
    assert tried(paced=1.0, at_once=1.005, noise=noise)[0].verdict is False
    assert tried(paced=1.0, at_once=1.03, noise=noise)[0].verdict is True


def test_that_nothing_is_gained_needs_no_longer_than_that_something_is() -> None:
    assert tried(paced=1.0, at_once=1.0)[1] <= 2 * (LEAST + RUN_STEPS)


@pytest.mark.parametrize("seed", range(20))
def test_what_waits_for_so_long_that_steps_are_not_kept_does_not_pay(seed: int) -> None:
    """Paced iterations are 8 % shorter, but transfers that are late because of pacing cost some steps their snapshots.

    The trial decides against pacing.
    """
    trial, iterations = tried(paced=0.92, at_once=1.0, noise=0.1, seed=seed, late=(0.0, 1.0))
    assert trial.verdict is False
    assert iterations <= 2 * (LEAST + RUN_STEPS)
    for ratio in (0.3, 0.6):
        assert tried(paced=0.92, at_once=1.0, noise=0.1, seed=seed, late=(0.0, ratio))[0].verdict is False


def test_a_snapshot_that_costs_two_steps_is_told_from_one_that_costs_one() -> None:
    """With pacing, each snapshot prevents the commits of two steps. Without pacing, it prevents the commit of one.

    The trial decides against pacing, although paced iterations are 5 % shorter.
    """
    trial = PacingTrial()
    for _ in range(LEAST):
        trial = trial.iteration(0.95, is_paced=True, lost_count=2).iteration(1.0, is_paced=False, lost_count=1)
    assert trial.verdict is False


def test_a_holder_that_is_gone_for_long_decides_nothing() -> None:
    trial = PacingTrial()
    for number in range(LEAST_TO_PACE):
        trial = trial.iteration(1.0, is_paced=False).iteration(0.8, is_paced=True, lost_count=10_000 * (number == 0))
    assert trial.verdict is not False
    assert trial.paced.lost[0] == MOST_LOST


@pytest.mark.parametrize("late", [(1.0, 1.0), (1.0, 0.0), (0.02, 0.02)])
def test_steps_that_are_not_kept_either_way_and_a_few_decide_nothing(late: tuple[float, float]) -> None:
    assert tried(paced=0.92, at_once=1.0, noise=0.01, late=late)[0].verdict is True


def test_one_that_is_late_may_be_so_by_luck() -> None:
    trial = PacingTrial()
    for number in range(LEAST):
        trial = trial.iteration(0.95, is_paced=True, lost_count=int(number == 0)).iteration(1.0, is_paced=False)
    assert trial.paced.kept_seconds > trial.at_once.kept_seconds
    assert trial.verdict is None


def test_a_verdict_stays() -> None:
    trial, _ = tried(paced=1.0, at_once=1.2)
    for _ in range(10 * ENOUGH):
        assert trial.iteration(9.0, is_paced=True) is trial


@given(first=st.integers(0, 1_000_000), distance=st.integers(1, 64))
def test_steps_at_any_distance_are_tried_both_ways_equally_often(first: int, distance: int) -> None:
    ways = [is_tried_paced(Step(first + distance * number)) for number in range(256)]
    assert 0.25 < sum(ways) / len(ways) < 0.75


def test_a_captured_step_takes_the_iterations_that_it_prevents() -> None:
    tries = PacingTries((1.0, 2.0, 2.0, 3.0), (0, 1, 0, 1))
    assert tries.kept_seconds == 3.0
    assert PacingTries((2.0,) * 4, (0, 1, 0, 1)).error == 2.0 * (4 * 0.25) ** 0.5 / 4
    steady = PacingTries((1.0, 2.0, 2.0, 3.0), (1, 1, 1, 1))
    assert steady.error == pytest.approx(2 * PacingTries((1.0, 2.0, 2.0, 3.0), (0, 0, 0, 0)).error)


def judged(paced: float, at_once: float, count: int) -> bool | None:
    """Return the verdict after `count` iterations of each mode."""
    trial = PacingTrial()
    for _ in range(count):
        trial = trial.iteration(at_once, is_paced=False).iteration(paced, is_paced=True)
    return trial.verdict


@pytest.mark.parametrize(
    ("paced", "at_once", "count", "verdict"),
    [
        pytest.param(1.25, 1.0, LEAST - 1, None, id="too few iterations"),
        pytest.param(1.25, 1.0, LEAST, False, id="clearly slower"),
        pytest.param(0.75, 1.0, LEAST_TO_PACE - 1, None, id="too few iterations to pace"),
        pytest.param(0.75, 1.0, LEAST_TO_PACE, True, id="clearly faster"),
        pytest.param(99.0, 100.0, ENOUGH, False, id="exactly what is worth it"),
        pytest.param(98.5, 100.0, ENOUGH, True, id="more than what is worth it"),
    ],
)
def test_a_verdict_needs_enough_iterations(paced: float, at_once: float, count: int, verdict: bool | None) -> None:
    assert judged(paced, at_once, count) is verdict


def test_the_paced_groups_stay_the_same() -> None:
    """All nodes choose the same groups, also nodes of another release."""
    groups = [is_tried_paced(Step(RUN_STEPS * number)) for number in range(24)]
    assert "".join("p" if each else "." for each in groups) == ".pp.p.p..p.p.p.p.pp..pp."
    assert all(one is not other for one, other in zip(groups[::2], groups[1::2], strict=True))
