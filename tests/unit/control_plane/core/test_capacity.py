"""Tests failed launches: their number, the next attempt, and whether AWS lacks capacity."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.accounts.reasons import sentence
from control_plane.cloud.operator import LaunchFailure
from control_plane.core.capacity import (
    LONG_WAIT_SECONDS,
    LONGEST_RETRY_SECONDS,
    failed_launches,
    failure,
    is_long,
    pause_seconds,
    retry_at,
)
from control_plane.core.observed.fleets import GroupObserved
from control_plane.core.observed.jobs import CapacityWait, FailedLaunches

MESSAGE = "We do not have sufficient capacity: try later. Launching EC2 instance failed"


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


@given(since=st.integers(1_700_000_000, 1_900_000_000), length=st.integers(0, 100_000))
def test_failed_launches_have_their_number_and_the_attempt_that_everstep_plans(since: int, length: int) -> None:
    seen = group(since, since + length)
    planned = retry_at(seen)
    assert planned is not None
    assert 0 < planned - (since + length) <= LONGEST_RETRY_SECONDS
    assert failed_launches(seen) == FailedLaunches(
        message=MESSAGE, failed_count=scheduled(length), next_attempt_at=planned
    )


def scheduled(length: float) -> int:
    """Return how many launches are scheduled from a first failure until `length` seconds later."""
    at, count = 0.0, 0
    while at <= length:
        count += 1
        at += pause_seconds(count)
    return count


def test_everstep_retries_launches_that_aws_suspended_and_none_that_a_person_suspended() -> None:
    suspended = replace(group(1e9, 1e9), launch_suspension="Administrative", is_suspension_administrative=True)
    assert failed_launches(suspended) == FailedLaunches(message=MESSAGE, failed_count=1, next_attempt_at=1e9 + 30)
    found = failure(suspended)
    assert found is not None
    assert sentence(found).endswith("Everstep resumes it and retries at 01:47:10 UTC")
    assert failed_launches(replace(suspended, is_suspension_administrative=False)) is None
    assert failed_launches(replace(suspended, launch_failure="", failed_at=None, failing_since=None)) is None


def test_launches_fail_while_aws_names_a_failure_or_suspends_them() -> None:
    failed = group(1e9, 1e9)
    assert failure(failed) is not None
    fine = replace(failed, launch_failure="", failed_at=None, failing_since=None)
    assert failure(fine) is None
    assert failure(replace(fine, launch_suspension="Administrative")) is not None


@pytest.mark.parametrize("unknown", ["failing_since", "failed_at"])
def test_without_a_time_of_a_failure_no_retry_is_planned(unknown: str) -> None:
    assert retry_at(replace(group(1e9, 1e9), **{unknown: None})) is None


@pytest.mark.parametrize(
    ("count", "seconds"), [(0, 30), (1, 30), (2, 60), (3, 120), (5, 480), (6, 900), (7, 900), (5_000, 900)]
)
def test_each_pause_is_twice_as_long_up_to_15_minutes(count: int, seconds: float) -> None:
    assert pause_seconds(count) == seconds


@pytest.mark.parametrize(
    ("message", "is_short"),
    [
        ("We currently do not have sufficient p5.48xlarge capacity in the Availability Zone you requested", True),
        ("InsufficientInstanceCapacity", True),
        ("The image id 'ami-1' does not exist", False),
    ],
)
def test_a_shortage_is_known_by_the_message_of_aws(message: str, is_short: bool) -> None:
    assert LaunchFailure(at=datetime.now(UTC), message=message).is_shortage is is_short


def test_a_wait_is_long_if_a_person_has_time_to_decide() -> None:
    wait = CapacityWait(missing_count=1, message=MESSAGE, failed_count=1, next_attempt_at=1000.0)
    assert is_long(wait, 1000.0 - LONG_WAIT_SECONDS)
    assert not is_long(wait, 1001.0 - LONG_WAIT_SECONDS)
