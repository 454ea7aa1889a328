"""Tests how often the control plane polls AWS."""

from __future__ import annotations

import pytest

from control_plane.core.polling import (
    AWS_POLL_SECONDS,
    EVENT_POLL_SECONDS,
    EVENTS_TRUSTED_SECONDS,
    LONGEST_BACKOFF_SECONDS,
    backoff_seconds,
    interval_seconds,
)


@pytest.mark.parametrize(
    ("since_event", "expected"),
    [
        (None, AWS_POLL_SECONDS),
        (0.0, EVENT_POLL_SECONDS),
        (EVENTS_TRUSTED_SECONDS - 0.1, EVENT_POLL_SECONDS),
        (EVENTS_TRUSTED_SECONDS, AWS_POLL_SECONDS),
    ],
)
def test_polls_are_rarer_only_while_events_arrive(since_event: float | None, expected: float) -> None:
    assert interval_seconds(since_event) == expected


def test_the_backoff_is_a_random_part_of_a_limit_that_doubles() -> None:
    assert [backoff_seconds(count, 0.5) for count in (1, 2, 3, 4, 5, 6, 99)] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert backoff_seconds(8, 0.0) == AWS_POLL_SECONDS
    assert backoff_seconds(10_000, 0.999) < LONGEST_BACKOFF_SECONDS
