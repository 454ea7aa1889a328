"""Tests how stored metric values are merged, downsampled, replaced and deleted."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.core import metrics
from control_plane.core.breakdowns import broken_down
from control_plane.core.metrics import Point, across, folded, joined, logged, resampled, until
from everstep.protocol.ids import NodeId

steps = st.lists(st.integers(0, 10_000), min_size=1, max_size=200, unique=True).map(sorted)


def ramp(found: list[int]) -> list[Point]:
    return [logged(step, float(step), float(step)) for step in found]


def test_a_joined_point_tells_of_finite_values_and_of_the_last_one() -> None:
    point = joined([logged(1, 10.0, 4.0), logged(2, 20.0, math.inf), logged(3, 30.0, 1.0), logged(5, 50.0, math.nan)])
    assert (point.step, point.last_step, point.at, point.count, point.finite_count) == (1, 5, 50.0, 4, 2)
    assert (point.minimum, point.mean, point.maximum) == (1.0, 2.5, 4.0)
    assert math.isnan(point.last)
    nothing = joined([logged(1, 1.0, math.nan)])
    assert nothing.finite_count == 0
    assert math.isnan(nothing.mean)


def test_the_value_of_rank_0_is_in_the_breakdown_of_all_ranks() -> None:
    assert logged(1, 1.0, 5.0, {1: 7.0}).breakdown == broken_down({"0": 5.0, "1": 7.0})
    assert logged(1, 1.0, 5.0).breakdown is None


def test_a_mean_of_means_is_weighted() -> None:
    assert joined([joined(ramp([0, 3])), logged(6, 6.0, 6.0)]).mean == 3.0


def test_means_of_huge_values_do_not_overflow() -> None:
    assert joined([logged(0, 0.0, 1.7e308), logged(1, 1.0, 1.7e308)]).mean == 1.7e308


@given(steps, st.sampled_from([8, 64, 512]))
def test_folding_counts_every_step_once_and_crosses_no_border(found: list[int], width: int) -> None:
    points = folded(ramp(found), width)
    assert sum(point.count for point in points) == len(found)
    assert all(point.step // width == point.last_step // width for point in points)
    assert [(p.step, p.last_step, p.count) for p in folded(folded(ramp(found), 8), 64)] == [
        (p.step, p.last_step, p.count) for p in folded(ramp(found), 64)
    ]


@given(steps, st.integers(1, 50))
def test_resampling_keeps_the_limit_and_every_value(found: list[int], limit: int) -> None:
    for points in (
        resampled(ramp(found), limit),
        resampled(ramp(found), limit, steps=7),
        resampled(ramp(found), limit, seconds=3.0),
    ):
        assert len(points) <= limit
        assert sum(point.count for point in points) == len(found)
        assert points[-1].last == found[-1]


def test_what_spans_a_step_that_is_done_again_goes() -> None:
    points = folded(ramp([0, 1, 8, 9, 16]), 8)
    assert [point.last_step for point in until(points, 8)] == [1]
    assert [point.last_step for point in until(points, 9)] == [1, 9]


def test_fresh_points_replace_those_of_the_same_step() -> None:
    assert [point.last for point in metrics.replaced(ramp([1, 2]), [logged(2, 0.0, 7.0), logged(3, 0.0, 8.0)])] == [
        1.0,
        7.0,
        8.0,
    ]


def test_what_nodes_measured_is_their_median_between_the_extremes_with_their_names() -> None:
    values = {NodeId("b"): 90.0, NodeId("a"): 90.0, NodeId("idle"): 3.0, NodeId("c"): 94.0, NodeId("broken"): math.nan}
    point = across(7, 70.0, values)
    assert point is not None
    assert (point.step, point.last_step, point.at, point.count, point.finite_count) == (7, 7, 70.0, 4, 4)
    assert (point.minimum, point.least_on, point.mean, point.last, point.maximum, point.most_on) == (
        3.0,
        "idle",
        90.0,
        90.0,
        94.0,
        "c",
    )
    assert across(7, 70.0, {NodeId("broken"): math.inf}) is None
    assert across(7, 70.0, {}) is None


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abcdef").map(NodeId), st.floats(0, 100), min_size=1), min_size=1, max_size=20
    )
)
def test_who_was_the_least_and_the_most_is_known_of_points_that_are_joined(rounds: list[dict[NodeId, float]]) -> None:
    point = joined(
        [made for step, values in enumerate(rounds) if (made := across(step, float(step), values)) is not None]
    )
    assert any(
        values.get(NodeId(point.least_on)) == point.minimum == min(min(each.values()) for each in rounds)
        for values in rounds
    )
    assert any(
        values.get(NodeId(point.most_on)) == point.maximum == max(max(each.values()) for each in rounds)
        for values in rounds
    )


@pytest.mark.parametrize(("width", "chunks"), [(1, 32), (2, 8), (8, 8)])
def test_a_metric_keeps_4096_single_steps_and_1024_points_of_several(width: int, chunks: int) -> None:
    assert metrics.kept_chunks(width) == chunks
    assert metrics.kept_chunks(width) * metrics.POINTS_PER_CHUNK == (4_096 if width == 1 else 1_024)


def test_a_chunk_has_its_steps() -> None:
    steps = 4 * metrics.POINTS_PER_CHUNK
    assert [metrics.chunk_of(step, 4) for step in (0, steps - 1, steps, 2 * steps)] == [0, 0, 1, 2]
    assert [metrics.first_step(chunk, 4) for chunk in (0, 1, 3)] == [0, steps, 3 * steps]


@pytest.mark.parametrize(
    ("last", "limit", "span"), [(5, 10, 1), (9, 10, 1), (10, 10, 2), (29, 10, 4), (40, 10, 8), (79, 10, 8)]
)
def test_a_span_is_the_power_of_two_for_about_the_limit(last: int, limit: int, span: int) -> None:
    assert metrics.span_of(0, last, limit) == metrics.span_of(100, 100 + last, limit) == span


def test_points_within_the_limit_stay_as_they_are() -> None:
    assert resampled(ramp([0, 1, 100]), 3) == tuple(ramp([0, 1, 100]))
    assert len(resampled(ramp([0, 1, 100]), 3, steps=2)) == 2


def test_a_span_is_that_of_all_points_and_doubles_until_the_points_fit() -> None:
    def last_steps(points: tuple[Point, ...]) -> list[int]:
        return [point.last_step for point in points]

    assert last_steps(resampled(ramp([0, 90, 91, 100]), 3)) == [0, 100]
    assert last_steps(resampled(ramp(list(range(9))), 2, steps=3)) == [5, 8]
    assert last_steps(resampled(ramp(list(range(8))), 2, seconds=1.0)) == [3, 7]
