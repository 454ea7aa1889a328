"""Tests which chunks of a shard a transfer sends, and over how many streams."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.core.transfers import (
    STREAM_BYTES,
    TRIES,
    WORTHWHILE,
    StreamCount,
    are_within,
    fetch_streams,
    found_elsewhere,
    ranges,
)


@given(st.sets(st.integers(0, 40)))
def test_ranges_name_exactly_the_chunks(chunks: set[int]) -> None:
    found = ranges(chunks)
    assert [index for first, count in found for index in range(first, first + count)] == sorted(chunks)
    assert are_within(found, 41)
    assert all(earlier[0] + earlier[1] < later[0] for earlier, later in itertools.pairwise(found))


@pytest.mark.parametrize("wanted", [((0, 5),), ((-1, 2),), ((0, 0),), ((2, 1), (1, 1)), ((0, 2), (1, 1)), ((4, 1),)])
def test_ranges_that_the_payload_does_not_have(wanted: tuple[tuple[int, int], ...]) -> None:
    assert not are_within(wanted, 4)


def test_what_lies_elsewhere_at_the_same_place_is_found_and_nothing_else() -> None:
    a, b, c = (bytes([number]) * 16 for number in range(3))
    assert list(found_elsewhere(a + b + c, [0, 1, 2], [c + b, a + a + c])) == [(0, 1), (1, 0), (2, 1)]
    assert list(found_elsewhere(a + b + c, [1], [b + a])) == []


def streams(carries: list[float], *, limit: int = 32) -> StreamCount:
    """Return the number of streams that is chosen if 2**n streams carry `carries[n]` bytes per second."""
    count = StreamCount(limit=limit)
    for _ in range(10 * TRIES):
        count = count.measured(carries[count.count.bit_length() - 1])
    assert count.is_settled
    return count


def test_streams_double_while_that_is_worthwhile_and_stay_at_what_was_best() -> None:
    assert streams([625, 1250, 2500, 2600]).count == 4
    assert streams([625, 625 * WORTHWHILE * 0.99]).count == 1
    assert streams([1, 2, 4, 8, 16, 32]).count == 32
    assert streams([1, 2, 4, 8], limit=8).count == 8


def test_a_count_is_judged_by_the_best_of_a_few_transfers() -> None:
    count = StreamCount(limit=32)
    for carried in (300, 625, 300, 600, 610, 1250):  # two transfers are slow, because they overlap with collectives
        count = count.measured(carried)
    assert (count.count, count.is_settled) == (4, False)
    for carried in (620, 1250, 1300):
        assert not count.is_settled
        count = count.measured(carried)
    assert (count.count, count.is_settled) == (2, True)


def test_collectives_that_halve_one_transfer_in_five_hardly_ever_leave_it_at_too_few_streams() -> None:
    """Eight streams carry the most. In one transfer in five, collectives of the training halve the measured rate.

    The sender still chooses enough streams in nearly all runs. If it measured each number of streams once, nearly half
    of the runs would end with 1, 2 or 4.
    """
    ends = []
    for seed in range(300):
        rng, count = random.Random(seed), StreamCount(limit=32)
        while not count.is_settled:
            count = count.measured(625e6 * min(count.count, 8) * (0.5 if rng.random() < 0.2 else 1.0))
        ends.append(count.count)
    assert ends.count(8) > 0.95 * len(ends)


def test_a_settled_count_stays_whatever_comes() -> None:
    settled = streams([625, 650])
    assert settled.measured(1e12) is settled


def test_a_shard_is_fetched_over_more_streams_the_larger_it_is() -> None:
    assert [fetch_streams(size, 16) for size in (1, STREAM_BYTES - 1, STREAM_BYTES, 3 * STREAM_BYTES, 10**12)] == [
        1,
        1,
        2,
        4,
        16,
    ]


def test_a_rate_that_is_just_worthwhile_is_tried_with_more_streams() -> None:
    before = StreamCount(8, count=2, best_count=1, best_rate=10.0, tries=TRIES - 1)
    assert before.measured(10.0 * WORTHWHILE).count == 4
    settled = before.measured(10.0 * WORTHWHILE - 0.1)
    assert (settled.count, settled.is_settled) == (1, True)
