"""The scheduler calls a function for each of many keys.

The tests cover the number of simultaneous calls, their order, and the effect of a wake-up, a failure or a stop.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from itertools import pairwise

import pytest

from control_plane.loop.scheduler import FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS, Scheduler

LIMIT = 3


class Work:
    """The function that the scheduler calls for each key. It blocks for the keys in `gates`, and records its calls."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.now = 0.0
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.running: set[str] = set()
        self.most_running = 0
        self.gates: dict[str, asyncio.Event] = {}
        self.errors: dict[str, BaseException] = {}
        self.began: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.scheduler = Scheduler(self, limit, lambda: self.now)

    async def __call__(self, key: str) -> None:
        assert key not in self.running, "one key never runs twice at once"
        self.running.add(key)
        self.most_running = max(self.most_running, len(self.running))
        self.begun.append(key)
        self.began[key].set()
        try:
            await asyncio.sleep(0)
            if key in self.gates:
                await self.gates[key].wait()
            if key in self.errors:
                raise self.errors[key]
        finally:
            self.running.discard(key)
        self.ended.append(key)

    def block(self, *keys: str) -> None:
        for key in keys:
            self.gates[key] = asyncio.Event()


async def test_a_key_that_waits_does_not_hold_up_another() -> None:
    work = Work()
    work.block("slow")
    await work.scheduler.sweep(["slow", *"abcdefgh"], patience_seconds=0.0)
    await work.scheduler.sweep([*"abcdefgh"], patience_seconds=60.0)
    assert work.ended == [*"abcdefgh", *"abcdefgh"]
    assert work.running == {"slow"}
    work.gates["slow"].set()
    await work.scheduler.idle()
    assert work.ended[-1] == "slow"


async def test_a_sweep_does_not_wait_for_a_key_that_an_earlier_sweep_began() -> None:
    work = Work()
    work.block("slow")
    await work.scheduler.sweep(["slow"], patience_seconds=0.0)
    async with asyncio.timeout(10):  # without this limit, a failing test would run for 600 s
        await work.scheduler.sweep(["slow", "a"], patience_seconds=600.0)
    assert work.ended == ["a"]
    work.gates["slow"].set()
    await work.scheduler.idle()


async def test_at_most_the_limit_runs_at_once_and_every_place_is_used() -> None:
    work = Work()
    work.block(*"abcdef")
    for key in "abcdef":
        work.scheduler.wake(key)
    for key in "abcdef":
        await work.began[key].wait()
        work.gates[key].set()
    await work.scheduler.idle()
    assert work.most_running == LIMIT
    assert work.begun == [*"abcdef"]


async def test_wake_ups_of_a_key_that_is_due_or_runs_never_make_it_run_twice_at_once() -> None:
    work = Work()
    work.block("a")
    for _ in range(3):
        work.scheduler.wake("a")
    await work.began["a"].wait()
    for _ in range(3):
        assert work.scheduler.wake("a") is None
    work.gates["a"].set()
    await work.scheduler.idle()
    assert work.begun == ["a", "a"], "three wake-ups before the run, and three during it"


async def test_a_wake_up_during_the_run_is_not_lost() -> None:
    work = Work()
    work.block("a")
    work.scheduler.wake("a")
    await work.began["a"].wait()
    work.scheduler.wake("a")
    assert work.begun == ["a"]
    work.gates["a"].set()
    await work.scheduler.idle()
    assert work.ended == ["a", "a"]


async def test_a_key_that_is_woken_all_the_time_gives_the_others_their_turn() -> None:
    work = Work(limit=1)
    work.block("greedy")
    work.scheduler.wake("greedy")
    await work.began["greedy"].wait()
    for key in ("a", "b", "greedy"):
        work.scheduler.wake(key)
    work.gates["greedy"].set()
    await work.scheduler.idle()
    assert work.begun == ["greedy", "a", "b", "greedy"]


async def test_a_failure_does_not_stop_the_others_and_frees_its_place() -> None:
    work = Work(limit=1)
    work.errors["bad"] = ValueError("a row cannot be read")
    await work.scheduler.sweep(["bad", "a"], patience_seconds=60.0)
    assert work.begun == ["bad", "a"]
    assert work.ended == ["a"]
    await work.scheduler.sweep(["bad", "a"], patience_seconds=60.0)
    assert work.begun == ["bad", "a", "bad", "a"], "the first failure has no back-off"


async def test_the_back_off_of_a_key_doubles_and_ends_with_a_success() -> None:
    work = Work()
    work.errors["bad"] = ValueError("a row cannot be read")
    begun_at: list[float] = []
    while work.now < 60.0:
        before = len(work.begun)
        await work.scheduler.sweep(["bad"], patience_seconds=60.0)
        begun_at += [work.now] * (len(work.begun) - before)
        work.now += 0.25
    gaps = [later - earlier for earlier, later in pairwise(begun_at)]
    assert gaps[:3] == [0.25, FIRST_BACKOFF_SECONDS, 1.0]
    assert set(gaps[3:]) == {MAX_BACKOFF_SECONDS}
    work.errors.clear()
    work.now += MAX_BACKOFF_SECONDS
    await work.scheduler.sweep(["bad"], patience_seconds=60.0)
    assert work.ended == ["bad"]
    await work.scheduler.sweep(["bad"], patience_seconds=60.0)
    assert work.ended == ["bad", "bad"]


async def test_a_key_that_failed_while_it_was_woken_waits_for_its_back_off() -> None:
    work = Work()
    work.errors["bad"] = ValueError("a row cannot be read")
    await work.scheduler.sweep(["bad"], patience_seconds=60.0)
    work.block("bad")
    work.began["bad"].clear()
    work.scheduler.wake("bad")
    await work.began["bad"].wait()
    work.scheduler.wake("bad")
    work.gates["bad"].set()
    await work.scheduler.idle()
    assert work.begun == ["bad", "bad"]
    work.now += FIRST_BACKOFF_SECONDS
    await work.scheduler.sweep(["bad"], patience_seconds=60.0)
    assert work.begun == ["bad", "bad", "bad"]


async def test_failures_of_keys_that_no_longer_exist_are_dropped() -> None:
    work = Work()
    work.errors["bad"] = ValueError("a row cannot be read")
    for _ in range(2):
        await work.scheduler.sweep(["bad"], patience_seconds=60.0)
    work.scheduler.retain(frozenset({"bad"}))
    assert work.scheduler.wake("bad") is None
    work.scheduler.retain(frozenset())
    assert work.scheduler.wake("bad") is not None
    await work.scheduler.idle()


async def test_close_waits_for_what_runs_and_begins_nothing() -> None:
    work = Work()
    work.block(*"abcd")
    for key in "abcd":
        work.scheduler.wake(key)
    for key in "abc":
        await work.began[key].wait()
    work.scheduler.wake("a")
    closing = asyncio.create_task(work.scheduler.close())
    await asyncio.sleep(0)
    assert not closing.done()
    assert work.scheduler.wake("e") is None
    for gate in work.gates.values():
        gate.set()
    await closing
    assert (work.begun, work.ended) == ([*"abc"], [*"abc"])


async def test_a_sweep_that_waits_for_a_place_ends_with_close() -> None:
    work = Work(limit=1)
    work.block("slow")
    sweep = asyncio.create_task(work.scheduler.sweep(["slow", "a"], patience_seconds=60.0))
    await work.began["slow"].wait()
    closing = asyncio.create_task(work.scheduler.close())
    await asyncio.sleep(0)
    work.gates["slow"].set()
    await asyncio.gather(closing, sweep)
    assert work.begun == ["slow"]


async def test_cancel_ends_what_runs() -> None:
    work = Work()
    work.block("a", "b")
    work.scheduler.wake("a")
    await work.began["a"].wait()
    work.scheduler.wake("a")
    work.scheduler.cancel()
    await work.scheduler.idle()
    assert (work.begun, work.ended) == (["a"], [])


async def test_cancel_ends_what_has_not_begun() -> None:
    work = Work(limit=1)
    first, second = work.scheduler.wake("a"), work.scheduler.wake("b")
    work.scheduler.cancel()
    await work.scheduler.idle()
    assert first is not None
    assert first.done()
    assert second is not None
    assert second.cancelled()
    assert work.begun == []


@pytest.mark.parametrize("limit", [1, 2, 8])
async def test_every_woken_key_runs_once_per_sweep(limit: int) -> None:
    work, keys = Work(limit), [f"job-{number}" for number in range(50)]
    for _ in range(3):
        await work.scheduler.sweep(keys, patience_seconds=60.0)
    assert work.ended == keys * 3
    assert work.most_running == limit
