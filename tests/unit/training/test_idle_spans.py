"""Tests how idle spans of the network are computed from recorded events."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.protocol.rank_messages import IdleSpan
from everstep.training.idle_spans import idle_spans


def test_what_collectives_leave_free_is_idle() -> None:
    busy = [(0.2, 0.5), (0.6, 1.0), (1.2, 1.5), (1.6, 2.0)]
    spans = idle_spans(busy, [0.0, 1.0, 2.0])
    assert [(round(span.begin_seconds, 9), round(span.seconds, 9)) for span in spans] == [(0.0, 0.2), (0.5, 0.1)]
    assert all(span.deviation_seconds < 1e-9 for span in spans)


def test_overlapping_nested_and_unordered_ranges_are_one_use() -> None:
    """Overlapping, nested and unordered busy ranges of the network are merged into one.

    The ranges, in milliseconds, are from a recording of two ranks on loopback, on which DDP used two gloo threads.
    """
    recorded = [
        (6.83, 0.89),
        (7.80, 4.21),
        (8.42, 3.40),
        (11.84, 0.83),
        (40.71, 2.49),
        (41.07, 6.12),
        (43.21, 4.43),
        (47.20, 1.11),
    ]
    busy = [(begin, begin + length) for begin, length in reversed(recorded)]
    spans = idle_spans(busy, [0.0, 34.0, 66.0])
    assert [(round(span.begin_seconds, 2), round(span.seconds, 2)) for span in spans] == [(0.0, 6.77), (13.49, 19.51)]


def test_a_collective_across_the_boundary_is_busy_on_both_sides() -> None:
    spans = idle_spans([(0.5, 1.5), (2.5, 3.5)], [0.0, 2.0, 4.0])
    assert [(span.begin_seconds, span.seconds) for span in spans] == [(0.0, 0.5), (1.5, 0.5)]
    (span,) = idle_spans([(0.75, 1.25), (1.75, 2.25), (2.75, 3.25)], [1.0, 2.0, 3.0])
    assert (span.begin_seconds, span.seconds) == (0.25, 0.5)


def test_spans_say_how_far_their_ends_move() -> None:
    busy = [(0.4, 1.0), (1.6, 2.0)]
    assert idle_spans(busy, [0.0, 1.0, 2.0]) == (IdleSpan(0.0, pytest.approx(0.5), pytest.approx(0.1483, abs=1e-3)),)
    wandering = [(0.0, 0.2), (0.6, 1.0), (1.0, 1.4), (1.8, 2.0)]  # this profile has two idle spans of 0.4 s each
    assert idle_spans(wandering, [0.0, 1.0, 2.0]) == (
        IdleSpan(pytest.approx(0.3), pytest.approx(0.4), pytest.approx(0.1483, abs=1e-3)),
    )


def test_one_iteration_that_was_held_up_changes_nothing() -> None:
    lengths = [1.0] * 9 + [5.0] + [1.0] * 10
    boundaries = list(itertools.accumulate(lengths, initial=0.0))
    busy = [(end - 0.6, end) for end in boundaries[1:]]
    assert idle_spans(busy, boundaries) == (IdleSpan(pytest.approx(0.0), pytest.approx(0.4), pytest.approx(0.0)),)


def test_gaps_too_short_for_anything_are_busy() -> None:
    assert len(idle_spans([(0.2, 0.5), (0.505, 1.0)], [0.0, 1.0])) == 1


def test_an_iteration_with_another_pattern_is_left_out_and_no_pattern_is_no_spans() -> None:
    usual = [(0.5, 1.0), (1.5, 2.0), (2.5, 3.0)]
    spans = idle_spans([*usual, (3.1, 3.2), (3.5, 4.0)], [0.0, 1.0, 2.0, 3.0, 4.0])
    assert [(span.begin_seconds, span.seconds) for span in spans] == [(0.0, 0.5)]
    rng = random.Random(5)
    chaos = [(at, at + 0.05) for at in (rng.uniform(0, 20) for _ in range(100))]
    assert idle_spans(chaos, [float(second) for second in range(21)]) == ()


def test_a_network_never_used_and_iterations_never_seen_are_no_spans() -> None:
    assert idle_spans([], [0.0, 1.0, 2.0]) == ()
    assert idle_spans([(0.1, 0.2)], [0.0]) == ()
    assert idle_spans([(0.1, 0.2)], []) == ()


intervals = st.lists(
    st.tuples(st.floats(0, 9), st.floats(0, 2)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=12
)


@given(busy=intervals)
def test_idle_and_busy_never_overlap_and_fill_the_iteration(busy: list[tuple[float, float]]) -> None:
    spans = idle_spans(busy, [1.0, 6.0])
    end = 0.0
    for span in spans:
        begin = span.begin_seconds
        assert end - 1e-9 <= begin <= begin + span.seconds <= 5.0 + 1e-9
        assert all(other <= begin + 1 + 1e-9 or one >= begin + 1 + span.seconds - 1e-9 for one, other in busy)
        end = begin + span.seconds
