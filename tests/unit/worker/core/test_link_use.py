"""Tests the measured time of a link's use, also with simultaneous transfers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.core.link_use import STANDSTILL_SECONDS, LinkUse

TICK = 1 / 64
"""Seconds of one tick, an exact binary fraction."""


def ticks(*counts: float) -> tuple[float, ...]:
    """Convert numbers of ticks to seconds."""
    return tuple(count * TICK for count in counts)


def test_time_in_which_nobody_sends_does_not_pass() -> None:
    use = LinkUse().joined(10 * TICK).left(12 * TICK).until(50.0).joined(60.0)
    later = use.until(60.0 + TICK)
    assert (later.busy_seconds, later.part_seconds) == ticks(3, 3)


def test_time_in_which_the_process_stood_still_is_not_counted() -> None:
    """An agent is stopped for 30 s during a transfer. The link's time of use does not include these 30 s."""
    sending = LinkUse().joined(10.0).joined(10.0).until(10.5)
    stopped = sending.until(40.5)
    assert (stopped.busy_seconds, stopped.part_seconds, stopped.sender_count) == (0.5, 0.25, 2)
    assert stopped.until(41.0).busy_seconds == 1.0
    for begun in (sending.joined(40.5), sending.left(40.5)):
        assert begun.busy_seconds == 0.5
    assert sending.until(10.5 + STANDSTILL_SECONDS).busy_seconds == 0.5 + STANDSTILL_SECONDS


def test_a_clock_that_another_thread_has_read_earlier_takes_nothing_back() -> None:
    use = LinkUse().joined(10 * TICK).joined(9 * TICK).left(12 * TICK).left(11 * TICK)
    assert (use.busy_seconds, use.part_seconds) == ticks(2, 1)


def test_the_last_bytes_way_is_counted_once_and_only_where_nobody_else_sends() -> None:
    idle = LinkUse().joined(0.0).left(0.4)
    assert idle.drained(0.4, 0.5).busy_seconds == pytest.approx(0.5)
    assert idle.drained(0.4, 0.5).drained(0.35, 0.6).busy_seconds == pytest.approx(0.6), "two at the same time"
    assert idle.drained(2.0, 2.1).busy_seconds == pytest.approx(0.5), "the time before belongs to nobody"
    assert idle.joined(0.45).drained(0.4, 0.6).busy_seconds == pytest.approx(0.55), "somebody else sends"


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6))
def test_seconds_are_those_in_which_anybody_sent_and_the_parts_make_up_as_many(counts: list[tuple[int, int]]) -> None:
    spans = [(TICK * begin, TICK * length) for begin, length in counts]
    events = sorted((at, by) for begin, length in spans for at, by in ((begin, 1), (begin + length, -1)))
    use, parts = LinkUse(), 0.0
    for at, by in sorted(events, key=lambda event: (event[0], -event[1])):
        before = use.until(at)
        parts += use.sender_count * (before.part_seconds - use.part_seconds)
        use = before.joined(at) if by > 0 else before.left(at)
    covered = {tick for begin, length in counts for tick in range(begin, begin + length)}
    assert use.sender_count == 0
    assert abs(use.busy_seconds - TICK * len(covered)) < 1e-9
    assert abs(parts - TICK * len(covered)) < 1e-9
