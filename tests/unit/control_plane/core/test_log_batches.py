"""Batches of log lines respect every limit of PutLogEvents and drop no line."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from control_plane.core import log_batches
from control_plane.core.log_batches import (
    EVENT_BYTES,
    MAX_BYTES,
    MAX_EVENTS,
    MAX_MESSAGE_BYTES,
    MAX_SPAN_MS,
    BatchLine,
    batches,
)

DAY_MS = 24 * 3600 * 1000


def is_within(batch: tuple[BatchLine, ...]) -> bool:
    times = [line.at_ms for line in batch]
    size = sum(len(line.message.encode()) + EVENT_BYTES for line in batch)
    return (
        0 < len(batch) <= MAX_EVENTS and size <= MAX_BYTES and times == sorted(times) and times[-1] - times[0] < DAY_MS
    )


@given(st.lists(st.builds(BatchLine, st.integers(0, 5 * DAY_MS), st.text(min_size=1, max_size=30)), max_size=60))
def test_every_line_is_in_one_batch_within_the_limits(lines: list[BatchLine]) -> None:
    made = list(batches(lines))
    assert all(is_within(batch) for batch in made)
    assert sorted((line.at_ms, line.message) for batch in made for line in batch) == sorted(
        (line.at_ms, line.message) for line in lines
    )


def test_full_batches_are_full() -> None:
    assert [len(batch) for batch in batches(BatchLine(0, "x") for _ in range(MAX_EVENTS + 1))] == [MAX_EVENTS, 1]
    half = "x" * (MAX_BYTES // 8 - EVENT_BYTES)
    assert [len(batch) for batch in batches(BatchLine(n, half) for n in range(9))] == [8, 1]
    assert [
        len(batch)
        for batch in batches([BatchLine(0, "a"), BatchLine(MAX_SPAN_MS, "b"), BatchLine(MAX_SPAN_MS + 1, "c")])
    ] == [
        2,
        1,
    ]


def test_lines_of_one_time_keep_their_order() -> None:
    (batch,) = batches([BatchLine(5, "b"), BatchLine(5, "a"), BatchLine(1, "z")])
    assert [line.message for line in batch] == ["z", "b", "a"]


def test_a_line_that_is_too_long_is_cut_between_two_characters() -> None:
    ((line,),) = batches([BatchLine(0, "ü" * MAX_MESSAGE_BYTES)])
    assert line.message.endswith("ü…")
    assert MAX_MESSAGE_BYTES - 4 <= len(line.message.encode()) <= log_batches.MAX_MESSAGE_BYTES
