"""Tests the checkpoint strategies: their defaults, the settings that they refuse, and their descriptions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.core.checkpoints import policy_words
from control_plane.core.strategies import (
    Strategy,
    StrategySchedule,
    StrategySettings,
    completed,
    contradictions,
    strategy_words,
)


def refused(
    strategy: Strategy,
    schedule: StrategySchedule,
    *,
    copies: int = 1,
    third_slot: bool = False,
    on_notice: bool = False,
    is_preemptible: bool = False,
    is_elastic: bool = False,
) -> dict[str, str]:
    settings = StrategySettings(
        copies=copies,
        third_slot=third_slot,
        on_notice=on_notice,
        is_preemptible=is_preemptible,
        may_shrink=is_elastic,
        may_grow=is_elastic,
    )
    return dict(contradictions(strategy, schedule, settings))


@pytest.mark.parametrize(
    ("strategy", "schedule"),
    [
        (Strategy.EVERSTEP, StrategySchedule()),
        (Strategy.NONE, StrategySchedule()),
        (Strategy.STRAWMAN, StrategySchedule(interval_seconds=10_800)),
        (Strategy.HIGH_FREQ, StrategySchedule(every_steps=1)),
        (Strategy.CHECK_FREQ, StrategySchedule(max_overhead=0.05)),
    ],
)
def test_a_strategy_completes_an_empty_schedule(strategy: Strategy, schedule: StrategySchedule) -> None:
    assert completed(strategy, StrategySchedule()) == schedule
    assert refused(strategy, schedule) == {}


@pytest.mark.parametrize(
    ("strategy", "asked"),
    [
        (Strategy.STRAWMAN, StrategySchedule(interval_seconds=60)),
        (Strategy.CHECK_FREQ, StrategySchedule(max_overhead=0.2)),
        (Strategy.CHECK_FREQ, StrategySchedule(max_overhead=0.2, max_bytes_per_second=1000)),
        (Strategy.HIGH_FREQ, StrategySchedule(every_steps=1)),
    ],
)
def test_a_request_may_adjust_the_interval_of_its_strategy(strategy: Strategy, asked: StrategySchedule) -> None:
    assert completed(strategy, asked) == asked
    assert refused(strategy, asked) == {}


@pytest.mark.parametrize(
    ("strategy", "asked", "field", "words"),
    [
        (Strategy.NONE, StrategySchedule(every_steps=5), "EverySteps", "the strategy None does not use it"),
        (Strategy.STRAWMAN, StrategySchedule(every_steps=5), "EverySteps", "the strategy Strawman does not use it"),
        (Strategy.HIGH_FREQ, StrategySchedule(every_steps=5), "EverySteps", "the strategy HighFreq always has 1"),
        (Strategy.HIGH_FREQ, StrategySchedule(max_overhead=0.1), "MaxOverhead", "does not use it"),
        (Strategy.CHECK_FREQ, StrategySchedule(interval_seconds=9), "IntervalInSeconds", "does not use it"),
        (Strategy.STRAWMAN, StrategySchedule(max_bytes_per_second=9), "MaxUploadBytesPerSecond", "does not use it"),
    ],
)
def test_a_setting_that_a_strategy_does_not_use_is_named(
    strategy: Strategy, asked: StrategySchedule, field: str, words: str
) -> None:
    (found,) = refused(strategy, completed(strategy, asked)).items()
    assert found[0] == f"CheckpointConfig.{field}"
    assert words in found[1]


def test_an_update_cannot_remove_the_setting_that_makes_checkpoints_due() -> None:
    assert "needs it" in refused(Strategy.STRAWMAN, StrategySchedule())["CheckpointConfig.IntervalInSeconds"]
    assert "needs it" in refused(Strategy.CHECK_FREQ, StrategySchedule())["CheckpointConfig.MaxOverhead"]
    assert refused(Strategy.HIGH_FREQ, StrategySchedule()) != {}


@given(st.sampled_from(sorted(set(Strategy) - {Strategy.EVERSTEP})))
def test_a_comparison_strategy_refuses_copies_and_a_third_slot(strategy: Strategy) -> None:
    found = refused(strategy, completed(strategy, StrategySchedule()), copies=2, third_slot=True)
    assert sorted(found) == ["CheckpointConfig.ThirdSlot", "Protection.Copies"]


def test_only_a_strategy_without_checkpoints_refuses_them_on_a_notice() -> None:
    assert list(refused(Strategy.NONE, StrategySchedule(), on_notice=True)) == ["CheckpointConfig.OnNotice"]
    assert refused(Strategy.HIGH_FREQ, StrategySchedule(every_steps=1), on_notice=True) == {}


def test_only_a_strategy_without_checkpoints_refuses_other_numbers_of_nodes() -> None:
    found = refused(Strategy.NONE, StrategySchedule(), is_elastic=True)
    assert sorted(found) == ["ElasticConfig.MaxNodeCount", "ElasticConfig.MinNodeCount"]
    assert refused(Strategy.HIGH_FREQ, StrategySchedule(every_steps=1), is_elastic=True) == {}


def test_only_a_strategy_without_checkpoints_refuses_preemption() -> None:
    assert list(refused(Strategy.NONE, StrategySchedule(), is_preemptible=True)) == ["Preemptible"]
    assert refused(Strategy.HIGH_FREQ, StrategySchedule(every_steps=1), is_preemptible=True) == {}


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (Strategy.EVERSTEP, "when the job stops"),
        (Strategy.NONE, "never, because the strategy is None"),
        (Strategy.STRAWMAN, "every 10,800 s and when the job stops, and training waits for each (strategy Strawman)"),
        (Strategy.CHECK_FREQ, "as often as 5.00% overhead permit and when the job stops (strategy CheckFreq)"),
    ],
)
def test_the_policy_names_the_strategy_and_whether_training_waits(strategy: Strategy, words: str) -> None:
    schedule = completed(strategy, StrategySchedule())
    assert (
        policy_words(
            strategy=strategy,
            every_steps=schedule.every_steps,
            interval_seconds=schedule.interval_seconds,
            max_overhead=schedule.max_overhead,
            max_bytes_per_second=None,
            on_notice=False,
        )
        == words
    )


def test_the_protection_of_a_comparison_strategy_says_what_a_failure_costs() -> None:
    assert strategy_words(Strategy.EVERSTEP) == ""
    assert "starts again from its beginning" in strategy_words(Strategy.NONE)
    assert "restores the newest checkpoint" in strategy_words(Strategy.STRAWMAN)
