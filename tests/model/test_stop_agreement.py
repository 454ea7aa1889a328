"""Every rank stops after the same step, everybody leaves, and nobody waits for ever: under every interleaving that fits, and long random ones."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.model.explore import Found, walk
from tests.model.stop_agreement import BUGS, Model, Options, explore, main

pytestmark = pytest.mark.timeout(600)
RARELY = {"ask": 0.1, "restart": 0.03, "give up": 0.01, "end final round": 0.01, "uploaded": 0.3}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(Options(2, 1), id="stop"),
        pytest.param(Options(2, 1, restarts=1, may_stop=False), id="end, coordinator restarts"),
        pytest.param(Options(2, 2, may_stop=False), id="end"),
        pytest.param(Options(2, 2, every_steps=1, may_stop=False), id="uploads pin slots"),
        pytest.param(Options(2, 2, every_steps=1, slot_count=3, may_stop=False), id="uploads, a third slot"),
        pytest.param(Options(2, 1, may_stop=False, may_hurry=True), id="given up"),
    ],
)
def test_every_interleaving(options: Options) -> None:
    assert explore(options).states > 300


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(Options(2, 2), id="stop"),
        pytest.param(Options(2, 1, restarts=1), id="stop, coordinator restarts"),
        pytest.param(Options(2, 1, every_steps=1), id="stop, uploads"),
        pytest.param(Options(2, 1, may_hurry=True), id="stop, given up"),
        pytest.param(Options(2, 1, may_stop=False, is_fine=True), id="messages travel"),
        pytest.param(Options(3, 1, may_stop=False), id="three ranks"),
    ],
)
def test_every_interleaving_of_more(options: Options) -> None:
    explore(options)


def follow(options: Options, seeds: range) -> None:
    for seed in seeds:
        model = Model(options)
        world, seen = walk(model, random.Random(seed), 4000, weights=RARELY)
        assert model.is_done(world), f"seed {seed}: after {seen.states} events somebody is still there: {world}"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("every", [0, 2])
def test_random_walks_with_messages_on_their_way(ranks: int, every: int) -> None:
    follow(Options(ranks, 6, restarts=2, every_steps=every, is_fine=True), range(40))
    follow(Options(ranks, 6, restarts=1, every_steps=every, may_hurry=True, is_fine=True), range(15))


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_many_random_walks(ranks: int) -> None:
    follow(Options(ranks, 10, restarts=4, every_steps=3, may_hurry=True, is_fine=True), range(1000, 2000))
    follow(Options(ranks, 10, restarts=4, every_steps=3, slot_count=3, is_fine=True), range(2000, 3000))


@pytest.mark.parametrize("bug", sorted(set(BUGS) - {"forgets-confirmed"}))
def test_planted_bugs_are_found(bug: str) -> None:
    with pytest.raises(Found):
        explore(replace(Options(2, 2), **BUGS[bug]))  # type: ignore[arg-type]


def test_a_coordinator_that_forgets_a_confirmed_stop_is_found() -> None:
    with pytest.raises(Found):
        follow(replace(Options(2, 6, is_fine=True), **BUGS["forgets-confirmed"]), range(500))  # type: ignore[arg-type]


def test_stopping_in_one_phase_deadlocks() -> None:
    with pytest.raises(Found) as found:
        explore(replace(Options(2, 2), **BUGS["one-phase"]))  # type: ignore[arg-type]
    assert "confirmed" in found.value.what or "can happen" in found.value.what


def test_runs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["2", "1", "0", "--no-stop"]) == 0
    assert main(["2", "2", "0", "--bug", "rank-alone"]) == 1
    assert "stop" in capsys.readouterr().out
