"""Tests how a server repeats its work: when the next call starts, and which errors and signals end the repetition."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta

import pytest

from control_plane.cloud.errors import CloudUnavailable
from control_plane.loop import repeating, runner
from control_plane.loop.repeating import pause, repeat
from tests.sim.world import World

FOREVER = 3_600.0
"""Seconds of a pause that is longer than any test may run."""


class Pauses:
    """Replaces `pause`: returns immediately, and reports a stopping server after `count` pauses."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.seconds: list[float] = []

    async def __call__(self, seconds: float, *, until: asyncio.Event) -> None:
        self.seconds.append(seconds)
        if len(self.seconds) == self.count:
            until.set()


def work_of(*turns: object) -> Callable[[], object]:
    """Return a function that returns or raises the next of the given values at each call.

    A call after the last value fails the test.
    """
    left = iter(turns)

    def work() -> object:
        turn = next(left)
        if isinstance(turn, Exception):
            raise turn
        return turn

    return work


async def test_a_pause_ends_with_its_event_or_its_time() -> None:
    event = asyncio.Event()
    waiting = asyncio.create_task(pause(FOREVER, until=event))
    await pause(0.001, until=event)
    assert not waiting.done()
    event.set()
    await waiting
    await pause(FOREVER, until=event)


async def test_only_what_says_that_there_is_more_is_done_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeating, "pause", pauses := Pauses(6))
    await repeat(
        work_of(True, None, 1, False, CloudUnavailable("no answer"), True), asyncio.Event(), seconds=5.0, trouble=""
    )
    assert pauses.seconds == [0.0, 5.0, 5.0, 5.0, 5.0, 0.0]


async def test_what_a_turn_runs_into_is_told_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(repeating, "pause", Pauses(3))
    with caplog.at_level(logging.INFO):
        await repeat(
            work_of(CloudUnavailable("no answer"), ZeroDivisionError(), None),
            asyncio.Event(),
            seconds=1.0,
            trouble="could not do the work",
        )
    away, broken = caplog.records
    assert (away.getMessage(), away.exc_info) == ("could not do the work; the next attempt follows: no answer", None)
    assert broken.getMessage() == "could not do the work; the next attempt follows"
    assert broken.exc_info


async def test_a_server_that_stops_begins_no_turn() -> None:
    stop = asyncio.Event()
    stop.set()
    await repeat(work_of(), stop, seconds=FOREVER, trouble="")


async def test_what_is_old_goes_in_batches_with_a_second_for_others_in_between(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeating, "pause", pauses := Pauses(3))
    monkeypatch.setattr(world.runner, "prune", work_of(True, False, ZeroDivisionError()))
    await world.runner.prune_repeatedly(asyncio.Event())
    assert pauses.seconds == [runner.SWEEP_SECONDS, runner.PRUNE_SECONDS, runner.PRUNE_SECONDS]


async def test_a_sweep_is_followed_by_a_rest_of_its_own_length(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "pause", pauses := Pauses(3))
    seconds = [20.0, 0.0, 2.0]

    async def sweep() -> None:
        world.registry.hint()  # this hint ends the pause before the next call
        world.now += timedelta(seconds=seconds[len(pauses.seconds)])
        raise ZeroDivisionError

    await world.runner.sweep_repeatedly(asyncio.Event(), sweep, "job")
    assert pauses.seconds == pytest.approx([20.0, runner.PAUSE_SECONDS, 2.0])


async def test_a_server_that_stops_does_not_rest_after_a_long_sweep(world: World) -> None:
    stop = asyncio.Event()

    async def sweep() -> None:
        world.registry.hint()
        world.now += timedelta(seconds=FOREVER)
        stop.set()

    await world.runner.sweep_repeatedly(stop, sweep, "job")
