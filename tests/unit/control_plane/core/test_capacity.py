"""Tests the wait for capacity that a job's stored reason describes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.core.capacity import (
    LONG_WAIT_SECONDS,
    LONGEST_RETRY_SECONDS,
    CapacityWait,
    pause_seconds,
    retry_at,
    wait_of,
    waiting_words,
)
from control_plane.core.observed.fleets import GroupObserved

MESSAGE = "We do not have sufficient capacity: try later. Launching EC2 instance failed"
SUSPENDED = "its group's Launch process is suspended (Administrative): AWS suspended it after failures"


def group(failing_since: float, failed_at: float) -> GroupObserved:
    return GroupObserved(
        desired_count=3,
        min_size=0,
        max_size=8,
        members=(),
        termination_hooks=(),
        drift=(),
        launch_failure=MESSAGE,
        failed_at=failed_at,
        failing_since=failing_since,
    )


@given(
    since=st.integers(1_700_000_000, 1_900_000_000),
    length=st.integers(0, 100_000),
    passed=st.floats(0.0, 40_000.0),
    count=st.integers(1, 64),
)
def test_the_wait_has_the_attempt_that_the_control_plane_plans(
    since: int, length: int, passed: float, count: int
) -> None:
    """A reader gets the planned time back, at every moment from the failure until long after the attempt."""
    seen = group(since, since + length)
    planned = retry_at(seen)
    assert planned is not None
    assert planned - (since + length) <= LONGEST_RETRY_SECONDS
    nodes = "node" if count == 1 else "nodes"
    now = since + length + passed
    found = wait_of(f"waits for {count} {nodes}: {waiting_words(seen)}", now)
    is_long = planned - now >= LONG_WAIT_SECONDS
    assert found == CapacityWait(count, MESSAGE, planned, is_long=is_long, failed_count=scheduled(length))


def scheduled(length: float) -> int:
    """Return how many launches are scheduled from a first failure until `length` seconds later."""
    at, count = 0.0, 0
    while at <= length:
        count += 1
        at += pause_seconds(count)
    return count


def test_a_reason_of_an_older_version_has_no_count_of_failures() -> None:
    found = wait_of("waits for 1 node: no capacity; Everstep retries at 00:00:30 UTC", 0.0)
    assert found == CapacityWait(1, "no capacity", 30.0)


def test_a_suspension_by_aws_has_a_next_attempt_and_one_by_a_user_has_none() -> None:
    suspended = replace(group(1e9, 1e9), launch_suspension="Administrative", is_suspension_administrative=True)
    assert wait_of(f"waits for 1 node: {waiting_words(suspended)}", 1e9) == CapacityWait(
        1, SUSPENDED, 1e9 + 30, failed_count=1
    )
    by_user = replace(suspended, is_suspension_administrative=False)
    assert wait_of(f"waits for 1 node: {waiting_words(by_user)}", 1e9) is None


@pytest.mark.parametrize("reason", ["", "waits for 1 node", "trains from step 3", "waits for i-1 to prepare"])
def test_other_reasons_are_no_wait_for_capacity(reason: str) -> None:
    assert wait_of(reason, 1e9) is None
