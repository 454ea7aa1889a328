"""Tests in which idle span of the network each chunk of a snapshot is sent.

The tests cover cases of the GEMINI paper (Wang et al., SOSP '23), four defects of the paper's Algorithm 2, which places
chunks in idle spans, and uniform pacing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.protocol.rank_messages import IdleSpan
from worker.core.chunks import (
    CHUNKS_PER_SPAN,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    UNIFORM_SHARE,
    Link,
    ScheduledChunk,
    chunk_bytes_for,
    opening,
    partition,
    uniform,
    usable,
)

GBIT = 1e9 / 8
MIB = 1024 * 1024
BUFFERS = {"buffer_bytes": 128 * MIB, "buffers": 4}
"""Total size R and number p of a machine's buffers in section 7.1 of the GEMINI paper."""


def spans(*seconds: float, gap: float = 1.0) -> list[IdleSpan]:
    """Return idle spans of these lengths, each preceded by `gap` seconds of traffic."""
    begins = itertools.accumulate(seconds, lambda begin, length: begin + length + gap, initial=gap)
    return [IdleSpan(begin, length) for begin, length in zip(begins, seconds, strict=False)]


def sent(chunks: Sequence[ScheduledChunk]) -> int:
    return sum(chunk.bytes_count for chunk in chunks)


# -- cases of the GEMINI paper


def test_p4d_gpt2_100b_fits_into_a_fraction_of_its_iteration() -> None:
    """A snapshot of 75.2 GB per machine takes 1.5 s at 400 Gbit/s.

    The idle time in an iteration of 62 s is many times longer (sections 5.2 and 7.2).
    """
    shard = int(75.2e9)
    chunks = partition(
        spans(*[0.5] * 8), shard, 1, **BUFFERS, bandwidth_bytes_per_second=400 * GBIT, alpha_seconds=1e-4, mu=0.8
    )
    assert sent(chunks) == shard
    # With start-up times, the snapshot takes 1.73 s, which needs five spans of 0.4 s.
    assert {chunk.span for chunk in chunks} == {0, 1, 2, 3, 4}
    assert max(chunk.bytes_count for chunk in chunks) == 32 * MIB
    busy = sum(Link(400 * GBIT, 1e-4).seconds(chunk.bytes_count) for chunk in chunks)
    assert 1.5 < busy < 1.8


def test_p3dn_gpt2_40b_needs_partitions() -> None:
    """A snapshot of 30 GB per machine is divided among several idle spans and into chunks of at most 32 MiB.

    At 100 Gbit/s, the snapshot takes 2.4 s. In Figure 16 of the GEMINI paper, the longest idle span of the network
    lasts 1.6 s, so the snapshot does not fit into one span. A single transfer that fills this span would also need a
    receive buffer of 20 GB per machine, or 2.5 GB per GPU. Chunks need only four buffers of 32 MiB.
    """
    shard = int(30e9)
    link = Link(100 * GBIT)
    assert link.bytes_within(1.6) / 8 > 2e9
    chunks = partition(
        spans(1.6, 0.8, 0.8, 0.5), shard, 1, **BUFFERS, bandwidth_bytes_per_second=100 * GBIT, alpha_seconds=0, mu=0.8
    )
    assert sent(chunks) == shard
    # the first three spans offer 1.28 + 0.64 + 0.64 s, and the snapshot needs 2.4 s
    assert max(chunk.span for chunk in chunks) == 2
    assert all(chunk.bytes_count <= 32 * MIB for chunk in chunks)


def test_three_copies_send_two() -> None:
    chunks = partition(
        spans(10.0), 100, 2, buffer_bytes=40, buffers=4, bandwidth_bytes_per_second=100, alpha_seconds=0, mu=1
    )
    assert [sum(chunk.bytes_count for chunk in chunks if chunk.copy == copy) for copy in (0, 1)] == [100, 100]


def test_what_does_not_fit_follows_the_last_span() -> None:
    chunks = partition(
        spans(1.0, 1.0), 350, 1, buffer_bytes=100, buffers=1, bandwidth_bytes_per_second=100, alpha_seconds=0, mu=1
    )
    assert [(chunk.span, chunk.bytes_count, chunk.begin_seconds) for chunk in chunks] == [
        (0, 100, 1.0),
        (1, 100, 3.0),
        (2, 100, 4.0),
        (2, 50, 5.0),
    ]


# -- Algorithm 2 as the GEMINI paper prints it, line by line


class Endless(Exception):
    """Raised if Algorithm 2, as the GEMINI paper prints it, loops without progress."""


@dataclass(frozen=True)
class Printed:
    """Selects lines of GEMINI's Algorithm 2: True for the line as printed, False for the product's correction."""

    cost_of_the_rest: bool = False
    one_copy_too_many: bool = False
    no_end_of_short_spans: bool = False
    last_span_replaced: bool = False


def printed(
    lengths: Sequence[float], checkpoint_bytes: float, m: int, *, buffer: float, link: Link, mu: float, lines: Printed
) -> list[tuple[int, float]]:
    """Return the span and the size of each chunk according to Algorithm 2 of the GEMINI paper.

    `lines` selects which lines are used as printed and which are corrected.
    """
    lengths = [*lengths[:-1], math.inf] if lines.last_span_replaced else [*lengths, math.inf]
    last_copy = m - 1 if lines.one_copy_too_many else m - 2
    parts: list[tuple[int, float]] = []
    copy, left = 0, checkpoint_bytes
    for index, length in enumerate(lengths):
        span = mu * length
        idle_rounds = 0
        while span > 0:
            fits = span >= link.seconds(int(buffer))
            size = min(
                left, buffer if fits else max(0.0, (span - link.alpha_seconds) * link.bandwidth_bytes_per_second)
            )
            if size > 0:
                left -= size
                span -= link.seconds(int(left if lines.cost_of_the_rest else size))
                parts.append((index, size))
            elif not lines.no_end_of_short_spans:
                break
            else:
                idle_rounds += 1
                if idle_rounds > 1000:
                    raise Endless
            if left == 0:
                if copy >= last_copy:
                    return parts
                copy, left = copy + 1, checkpoint_bytes
    return parts


LINK = Link(100.0, 0.01)


def corrected(lengths: Sequence[float], checkpoint_bytes: int, m: int) -> list[tuple[int, int]]:
    chunks = partition(
        spans(*lengths),
        checkpoint_bytes,
        m - 1,
        buffer_bytes=50,
        buffers=1,
        bandwidth_bytes_per_second=100,
        alpha_seconds=0.01,
        mu=0.8,
    )
    return [(chunk.span, chunk.bytes_count) for chunk in chunks]


def as_printed(lengths: Sequence[float], checkpoint_bytes: int, m: int, lines: Printed) -> list[tuple[int, float]]:
    return printed(lengths, checkpoint_bytes, m, buffer=50, link=LINK, mu=0.8, lines=lines)


def test_with_all_four_lines_corrected_the_printed_algorithm_is_ours() -> None:
    lengths, size, m = (1.3, 0.6, 2.0, 0.7), 190, 3
    theirs = as_printed(lengths, size, m, Printed())
    ours = corrected(lengths, size, m)
    assert [span for span, _ in ours] == [span for span, _ in theirs]
    # the sizes differ by up to 3 bytes, because the product sends whole bytes
    assert [size for _, size in ours] == pytest.approx([size for _, size in theirs], abs=3)


def test_defect_1_a_chunk_is_charged_for_what_is_left() -> None:
    """Defect 1: line 17 subtracts the time of all remaining bytes, f(remaining bytes), instead of the chunk's own time.

    The first of many chunks therefore fills a span that has room for five chunks, and the last chunk takes no time.
    """
    theirs = as_printed((3.0, 3.0), 400, 2, Printed(cost_of_the_rest=True))
    ours = corrected((3.0, 3.0), 400, 2)
    assert [size for span, size in theirs if span == 0] == [50]
    assert [size for span, size in ours if span == 0] == [50, 50, 50, 50, 35]
    assert as_printed((0.65,), 50, 2, Printed(cost_of_the_rest=True)) == [(0, 50)]


def test_defect_2_one_copy_too_many_is_sent() -> None:
    assert sum(size for _, size in as_printed((5.0,), 100, 2, Printed(one_copy_too_many=True))) == 200
    assert sum(size for _, size in corrected((5.0,), 100, 2)) == 100


def test_defect_3_a_span_shorter_than_alpha_never_ends() -> None:
    with pytest.raises(Endless):
        as_printed((0.005, 5.0), 100, 2, Printed(no_end_of_short_spans=True))
    assert corrected((0.005, 5.0), 100, 2) == [(1, 50), (1, 50)]


def test_defect_4_the_last_profiled_span_is_taken_for_endless() -> None:
    """Defect 4: the printed algorithm treats the last profiled span as endless.

    In the test, the algorithm puts a whole snapshot into a last span that has room for a tenth of it.
    """
    theirs = as_printed((0.5, 0.5), 500, 2, Printed(last_span_replaced=True))
    ours = corrected((0.5, 0.5), 500, 2)
    assert [span for span, _ in theirs] == [0] + [1] * (len(theirs) - 1)
    assert [(span, size) for span, size in ours if span < 2] == [(0, 39), (1, 39)]
    assert sum(size for _, size in theirs) == sum(size for _, size in ours) == 500


# -- properties that hold for any spans and chunks

lengths_lists = st.lists(st.floats(0.0, 3.0, allow_nan=False), max_size=6)


@given(
    lengths=lengths_lists,
    size=st.integers(0, 2000),
    copies=st.integers(0, 3),
    buffer=st.integers(4, 400),
    alpha=st.floats(0, 0.1),
    mu=st.floats(0.05, 1.0),
)
def test_every_byte_is_scheduled_once_within_its_window(
    lengths: list[float], size: int, copies: int, buffer: int, alpha: float, mu: float
) -> None:
    profiled = spans(*lengths)
    chunks = partition(
        profiled,
        size,
        copies,
        buffer_bytes=buffer,
        buffers=4,
        bandwidth_bytes_per_second=100,
        alpha_seconds=alpha,
        mu=mu,
    )
    link = Link(100, alpha)
    assert_each_byte_once(chunks, size, copies)
    assert all(0 < chunk.bytes_count <= buffer // 4 for chunk in chunks)
    end = 0.0
    for chunk in chunks:
        assert chunk.begin_seconds >= end - 1e-9
        end = chunk.begin_seconds + link.seconds(chunk.bytes_count)
        if chunk.span < len(profiled):
            window = usable(profiled[chunk.span], mu)
            assert window.begin_seconds <= chunk.begin_seconds
            assert end <= window.begin_seconds + window.seconds + 1e-9
    assert [chunk.span for chunk in chunks] == sorted(chunk.span for chunk in chunks)


@given(size=st.integers(0, 5000), copies=st.integers(0, 3), chunk=st.integers(1, 700), iteration=st.floats(0.1, 10))
def test_uniform_pacing_is_even_and_done_in_time(size: int, copies: int, chunk: int, iteration: float) -> None:
    chunks = uniform(size, copies, chunk_bytes=chunk, iteration_seconds=iteration)
    assert_each_byte_once(chunks, size, copies)
    sent_before = 0
    for each in chunks:
        assert each.begin_seconds == pytest.approx(UNIFORM_SHARE * iteration * sent_before / (size * copies))
        assert each.bytes_count <= chunk
        sent_before += each.bytes_count
    assert all(each.begin_seconds < UNIFORM_SHARE * iteration for each in chunks)


def assert_each_byte_once(chunks: Sequence[ScheduledChunk], size: int, copies: int) -> None:
    position = 0
    for chunk in chunks:
        assert chunk.copy * size + chunk.offset == position
        assert chunk.offset + chunk.bytes_count <= size
        position += chunk.bytes_count
    assert position == size * copies


@given(lengths=lengths_lists, chunk=st.integers(1, 300))
def test_chunk_by_chunk_the_pacer_finds_what_partition_plans(lengths: list[float], chunk: int) -> None:
    """The pacer, which decides about one chunk at a time, fills each span in the same way as Algorithm 2."""
    link, profiled = Link(100.0), spans(*lengths)
    windows = [usable(span, 0.8) for span in profiled]
    at, found = 0.0, 0
    while (begin := opening(windows, at, link.seconds(chunk))) is not None and (
        link.seconds(chunk) <= max(w.seconds for w in windows)
    ):
        assert begin >= at
        at, found = begin + link.seconds(chunk), found + 1
    fits = [window.seconds / link.seconds(chunk) for window in windows]
    # The last chunk of a span may or may not fit, depending on rounding.
    assert sum(math.floor(each - 1e-9) for each in fits) <= found <= sum(math.floor(each + 1e-9) for each in fits)


# -- tests of helper functions


def test_an_opening_is_in_a_window_or_not_at_all() -> None:
    windows = [IdleSpan(1.0, 1.0), IdleSpan(5.0, 2.0)]
    assert opening(windows, 0.0, 0.5) == 1.0
    assert opening(windows, 1.4, 0.5) == 1.4
    assert opening(windows, 1.6, 0.5) == 5.0
    assert opening(windows, 0.0, 1.5) == 5.0
    assert opening(windows, 6.8, 0.5) is None
    assert opening(windows, 6.5, 0.5) == 6.5, "it fits exactly"
    assert opening([], 0.0, 0.5) is None


def test_a_chunk_longer_than_every_window_goes_at_the_beginning_of_the_longest() -> None:
    windows = [IdleSpan(1.0, 1.0), IdleSpan(5.0, 2.0)]
    assert opening(windows, 0.0, 3.0) == opening(windows, 5.0, 3.0) == 5.0
    assert opening(windows, 5.1, 3.0) is None


def test_windows_lie_in_the_middle_of_their_spans() -> None:
    assert usable(IdleSpan(2.0, 1.0), 0.8) == IdleSpan(pytest.approx(2.1), pytest.approx(0.8))


def test_what_moves_is_used_less() -> None:
    assert usable(IdleSpan(2.0, 1.0, 0.01)) == usable(IdleSpan(2.0, 1.0))
    assert usable(IdleSpan(2.0, 1.0, 0.3)) == IdleSpan(pytest.approx(2.3), pytest.approx(0.4))
    assert usable(IdleSpan(2.0, 1.0, 0.7)).seconds == 0.0
    moving = [IdleSpan(1.0, 1.0, 0.6), IdleSpan(4.0, 1.0, 0.0)]
    chunks = partition(
        moving, 50, 1, buffer_bytes=50, buffers=1, bandwidth_bytes_per_second=100, alpha_seconds=0, mu=0.8
    )
    assert [(chunk.span, chunk.begin_seconds) for chunk in chunks] == [(1, pytest.approx(4.1))]


def test_chunks_are_small_beside_the_windows_that_carry_most() -> None:
    link = Link(100 * MIB)
    size = chunk_bytes_for([IdleSpan(0, 0.001)] * 5 + [IdleSpan(1, 0.16)] * 3, link)
    assert size == pytest.approx(link.bytes_within(0.16 / CHUNKS_PER_SPAN), rel=0.01)
    assert chunk_bytes_for([IdleSpan(0, 100.0)], link) == MAX_CHUNK_BYTES
    assert chunk_bytes_for([IdleSpan(0, 0.0001)], link) == MIN_CHUNK_BYTES
    assert chunk_bytes_for([], link) == MIN_CHUNK_BYTES


@pytest.mark.parametrize(
    "wrong",
    [
        {"buffers": 0},
        {"buffer_bytes": 3},
        {"mu": 0.0},
        {"mu": 1.1},
        {"bandwidth_bytes_per_second": 0.0},
        {"alpha_seconds": -1.0},
    ],
)
def test_what_describes_no_link_is_refused(wrong: dict[str, float]) -> None:
    good = {"buffer_bytes": 40, "buffers": 4, "bandwidth_bytes_per_second": 100.0, "alpha_seconds": 0.0, "mu": 0.8}
    with pytest.raises(ValueError, match="needs"):
        partition(spans(1.0), 10, 1, **{**good, **wrong})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no bytes"):
        uniform(10, 1, chunk_bytes=0, iteration_seconds=1)


EXACT = Link(8 * 4096.0)
"""A link on which a chunk of 4,096 bytes takes an eighth of a second, `CHUNKS_PER_SPAN` of them a second."""


@pytest.mark.parametrize(
    ("seconds", "blocks"),
    [((8.0,), 8), ((9.1,), 9), ((8.0, 8.0, 16.0), 8), ((8.0, 12.0), 12), ((12.0, 36.0), 36)],
)
def test_a_chunk_has_full_blocks_for_half_of_the_window_time(seconds: tuple[float, ...], blocks: int) -> None:
    assert chunk_bytes_for(spans(*seconds), EXACT) == blocks * 4096


def test_chunks_have_their_limits_and_no_window_has_the_least() -> None:
    assert chunk_bytes_for([], EXACT) == chunk_bytes_for(spans(0.1), EXACT) == MIN_CHUNK_BYTES
    assert chunk_bytes_for(spans(1e6), EXACT) == MAX_CHUNK_BYTES


def test_a_chunk_that_just_fits_is_sent_whole() -> None:
    link = {"bandwidth_bytes_per_second": 4096.0, "alpha_seconds": 0.5, "mu": 1.0}
    (first, second) = partition(spans(1.5, 1.5), 4096 + 1, 1, buffer_bytes=4096, buffers=1, **link)
    assert (first.bytes_count, second.bytes_count, first.span, second.span) == (4096, 1, 0, 1)
    assert partition(spans(1.5), 0, 1, buffer_bytes=4096, buffers=1, **link) == ()
    (alone,) = partition([], 4096, 1, buffer_bytes=4096, buffers=1, **link)
    assert alone.begin_seconds == 0.0
    for buffers in (0, 4097):
        with pytest.raises(ValueError, match="buffers of at least a byte"):
            partition([], 4096, 1, buffer_bytes=4096, buffers=buffers, **link)
