"""A holder keeps every log line of each acknowledged step, within its memory limit.

The property holds for every interruption between an owner and its holder.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.core.line_tails import MESSAGE_BYTES, Tail

LIMIT_BYTES = 120
EVENTS = st.one_of(
    st.tuples(st.just("print"), st.lists(st.integers(1, 40), min_size=1, max_size=6)),
    st.tuples(st.sampled_from(["commit", "cancelled", "cut off", "owner restarts", "holder restarts"]), st.just([])),
)


@given(st.lists(EVENTS, max_size=40))
def test_a_holder_has_the_newest_lines_of_every_step_that_it_acknowledged(events: list[tuple[str, list[int]]]) -> None:
    printed: list[bytes] = []
    owner, holder, sent = Tail(), Tail(), 0
    for event, sizes in events:
        if event == "print":
            rows = [b"%d" % (len(printed) + index) + b"." * size + b"\n" for index, size in enumerate(sizes)]
            owner = owner.extended(len(printed), rows, limit_bytes=LIMIT_BYTES)
            printed += rows
        elif event == "holder restarts":
            # a restarted holder reads its lines from its disk and opens new connections
            holder, sent = Tail.of(holder.first, holder.rows), 0
        elif event == "owner restarts":
            # a restarted owner reads its lines from its journal
            owner, sent = Tail.of(0, printed).newest(LIMIT_BYTES), 0
        else:
            lines = owner.since(sent).newest(LIMIT_BYTES)
            parts = list(lines.batches())
            for part in parts[: len(parts) // 2] if event == "cut off" else parts:
                holder = holder.extended(part.first, part.rows, limit_bytes=LIMIT_BYTES)
            if event == "cut off":
                sent = 0
            if event == "commit":
                sent = max(sent, lines.end)
                assert holder.end == len(printed)
                assert list(holder.rows) == printed[holder.first :], "these very lines, without a hole"
                newest = Tail.of(0, printed).newest(LIMIT_BYTES)
                assert holder.first <= newest.first, "the oldest are given up first, and only beyond the limit"
        assert holder.size == sum(map(len, holder.rows)) <= 2 * LIMIT_BYTES + 60


def test_a_message_has_lines_up_to_its_size_and_one_more() -> None:
    half, longer = bytes(MESSAGE_BYTES // 2), bytes(3 * MESSAGE_BYTES)
    tail = Tail.of(7, [half, half, longer, b"i\n"])
    assert [(part.first, part.rows) for part in tail.batches()] == [(7, (half, half)), (9, (longer,)), (10, (b"i\n",))]


def test_a_tail_is_cut_once_it_exceeds_twice_its_limit_and_begins_anew_after_a_gap() -> None:
    rows = [b"a" * 10] * 4
    full = Tail.of(0, rows)
    assert full.extended(4, [b"b" * 10], limit_bytes=25).size == 50, "exactly twice the limit"
    assert full.extended(4, [b"b" * 11], limit_bytes=25).size <= 31
    assert full.extended(2, rows, limit_bytes=25) == Tail.of(0, [b"a" * 10] * 6).newest(25), "two lines are known"
    assert full.extended(4, rows, limit_bytes=100).first == 0, "the new lines follow without a gap"
    assert full.extended(5, rows, limit_bytes=100) == Tail.of(5, rows)
    assert Tail.of(3, rows).extended(3, [*rows, b"c"], limit_bytes=100) == Tail.of(3, [*rows, b"c"])


def tail(first: int, *sizes: int) -> Tail:
    return Tail.of(first, [b"." * (size - 1) + b"\n" for size in sizes])


def test_a_tail_takes_only_the_lines_that_it_lacks() -> None:
    known = tail(5, 10, 10)
    assert known.extended(5, known.rows, limit_bytes=100) is known
    assert known.extended(7, (b"new\n",), limit_bytes=100) == Tail.of(5, (*known.rows, b"new\n"))
    assert known.extended(5, (*known.rows, b"new\n"), limit_bytes=100) == Tail.of(5, (*known.rows, b"new\n"))
    assert known.extended(8, (b"new\n",), limit_bytes=100) == Tail.of(8, (b"new\n",)), "a gap"
    longer = tail(4, 10, 10, 10, 10)
    assert known.extended(4, longer.rows, limit_bytes=100) == longer, "earlier lines, too"


def test_a_tail_drops_lines_only_beyond_twice_its_limit() -> None:
    assert tail(0, 10).extended(1, tail(1, 10).rows, limit_bytes=10) == tail(0, 10, 10)
    assert tail(0, 10, 10).extended(2, tail(2, 1).rows, limit_bytes=10) == tail(2, 1)
    assert tail(0, 10, 10).extended(2, tail(2, 1).rows, limit_bytes=11).first == 0


def test_the_newest_lines_fit_their_limit_or_are_one() -> None:
    assert [tail(3, 10, 10, 10).newest(limit).first for limit in (30, 29, 20, 19, 5)] == [3, 4, 4, 5, 5]


def test_lines_since_a_number_are_those_that_the_tail_still_has() -> None:
    assert [tail(3, 10, 10).since(number).first for number in (0, 3, 4, 5, 9)] == [3, 3, 4, 5, 5]
    assert [tail(3, 10, 10).since(number).size for number in (0, 3, 4, 5, 9)] == [20, 20, 10, 0, 0]


def test_a_batch_ends_with_the_line_that_fills_it() -> None:
    half = MESSAGE_BYTES // 2
    assert [(each.first, len(each.rows)) for each in tail(7, half, half, 1, half, half).batches()] == [
        (7, 2),
        (9, 3),
    ]
    assert [(each.first, len(each.rows)) for each in tail(7, MESSAGE_BYTES, 1).batches()] == [(7, 1), (8, 1)]
    assert [(each.first, len(each.rows)) for each in tail(7, half, half - 1, 1).batches()] == [(7, 3)]
