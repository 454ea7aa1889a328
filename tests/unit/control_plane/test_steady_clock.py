"""Tests the clock for ages. Setting the wall clock does not change an age."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.steady_clock import SLEW, SteadyClock


class Clocks:
    """The clock under test, with a wall clock and a monotonic clock that tests set."""

    def __init__(self) -> None:
        self.wall, self.elapsed = 1_000_000.0, 50.0
        self.clock = SteadyClock(lambda: self.wall, lambda: self.elapsed)

    def read(self) -> float:
        return self.clock().timestamp()

    def wait(self, seconds: float) -> None:
        self.wall += seconds
        self.elapsed += seconds


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0.0, 1000.0)), max_size=20))
def test_ages_are_right_whatever_the_wall_clock_does(story: list[tuple[float, float]]) -> None:
    clocks = Clocks()
    for step, seconds in story:
        before = clocks.read()
        clocks.wall += step
        clocks.wait(seconds)
        assert clocks.read() - before == pytest.approx(seconds, rel=SLEW * 1.01, abs=1e-3)


@pytest.mark.parametrize("step", [65.0, -65.0])
def test_it_follows_the_wall_clock_slowly(step: float) -> None:
    clocks = Clocks()
    clocks.wall += step
    assert clocks.read() == pytest.approx(clocks.wall - step)
    for _ in range(2000):
        clocks.wait(1.0)
        clocks.read()
    assert clocks.read() == pytest.approx(clocks.wall)
