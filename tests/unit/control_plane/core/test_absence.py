"""Tests when an instance that EC2's answers omit counts as ended."""

from __future__ import annotations

import pytest

from control_plane.core.absence import settled
from control_plane.core.observed.nodes import InstanceCondition
from control_plane.core.timeouts import ladder

TIMEOUTS = ladder(3.0)
LEASE = TIMEOUTS.lease_seconds


@pytest.mark.parametrize(
    ("is_connected", "silent_seconds", "expected"),
    [
        (False, LEASE + 0.1, InstanceCondition.ENDED),
        (False, LEASE, InstanceCondition.UNKNOWN),
        (True, LEASE + 0.1, InstanceCondition.UNKNOWN),
        (True, 0.0, InstanceCondition.UNKNOWN),
    ],
)
def test_an_omitted_instance_has_ended_only_without_a_connection_and_after_a_lease_of_silence(
    is_connected: bool, silent_seconds: float, expected: InstanceCondition
) -> None:
    found = settled(
        InstanceCondition.ABSENT, is_connected=is_connected, silent_seconds=silent_seconds, timeouts=TIMEOUTS
    )
    assert found is expected


@pytest.mark.parametrize("condition", set(InstanceCondition) - {InstanceCondition.ABSENT})
def test_every_other_condition_needs_no_agent(condition: InstanceCondition) -> None:
    assert settled(condition, is_connected=True, silent_seconds=0.0, timeouts=TIMEOUTS) is condition
