"""The time of a link that several transfers share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.core.link_use import LinkUse


def test_time_in_which_nobody_sends_does_not_pass() -> None:
    use = LinkUse().joined(10.0).left(12.0).until(50.0).joined(60.0)
    assert (use.until(61.0).busy_seconds, use.until(61.0).part_seconds) == (3.0, 3.0)


def test_a_clock_that_another_thread_has_read_earlier_takes_nothing_back() -> None:
    use = LinkUse().joined(10.0).joined(9.0).left(12.0).left(11.0)
    assert (use.busy_seconds, use.part_seconds) == (2.0, 1.0)


def test_the_last_bytes_way_is_counted_once_and_only_where_nobody_else_sends() -> None:
    idle = LinkUse().joined(0.0).left(4.0)
    assert idle.drained(4.0, 5.0).busy_seconds == 5.0
    assert idle.drained(4.0, 5.0).drained(3.5, 6.0).busy_seconds == 6.0, "two at the same time"
    assert idle.drained(20.0, 21.0).busy_seconds == 5.0, "the time before belongs to nobody"
    assert idle.joined(4.5).drained(4.0, 6.0).busy_seconds == 5.5, "somebody else sends"


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6))
def test_seconds_are_those_in_which_anybody_sent_and_the_parts_make_up_as_many(spans: list[tuple[int, int]]) -> None:
    events = sorted((at, by) for begin, length in spans for at, by in ((begin, 1), (begin + length, -1)))
    use, parts, began = LinkUse(), 0.0, {}
    for begin, length in spans:
        began[begin, begin + length] = 0.0
    for at, by in sorted(events, key=lambda event: (event[0], -event[1])):
        before = use.until(at)
        parts += use.sender_count * (before.part_seconds - use.part_seconds)
        use = before.joined(at) if by > 0 else before.left(at)
    covered = {second for begin, length in spans for second in range(begin, begin + length)}
    assert use.sender_count == 0
    assert abs(use.busy_seconds - len(covered)) < 1e-9
    assert abs(parts - len(covered)) < 1e-9
