"""Tests the recorded periods in which each node worked for a job."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from control_plane.core.membership import Launch, Span, spans

START = datetime(2026, 3, 1, tzinfo=UTC)


def at(minutes: int) -> datetime:
    return START + timedelta(minutes=minutes)


def test_a_node_that_stays_has_one_span_and_one_that_is_replaced_ends_where_the_next_begins() -> None:
    found = spans([Launch(at(0), ("a", "b")), Launch(at(5), ("a", "c"))], [], None)
    assert found == (Span("a", at(0), None), Span("b", at(0), at(5)), Span("c", at(5), None))


def test_a_pause_ends_all_spans_and_the_next_launch_begins_new_ones() -> None:
    found = spans([Launch(at(0), ("a",)), Launch(at(9), ("a",))], [at(4)], at(20))
    assert found == (Span("a", at(0), at(4)), Span("a", at(9), at(20)))


def test_a_paused_job_has_no_node_now() -> None:
    assert spans([Launch(at(0), ("a",))], [at(4)], None) == (Span("a", at(0), at(4)),)


def test_having_waited_before_the_first_launch_ends_nothing() -> None:
    assert spans([Launch(at(3), ("a",))], [at(0), at(3)], None) == (Span("a", at(3), None),)
    assert spans([], [at(0)], at(9)) == ()
