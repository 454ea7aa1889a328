"""Tests when an instance that EC2's answers omit counts as ended."""

from __future__ import annotations

import pytest

from control_plane.core.absence import UNJOINED_SECONDS, Omissions, resolve_absence
from control_plane.core.observed.nodes import InstanceCondition
from control_plane.core.timeouts import ladder
from everstep.protocol.ids import NodeId

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
    found = resolve_absence(
        InstanceCondition.ABSENT, is_connected=is_connected, silent_seconds=silent_seconds, timeouts=TIMEOUTS
    )
    assert found is expected


JOINED, NEW = NodeId("i-joined"), NodeId("i-new")


def omissions(*answers: tuple[float, set[NodeId]]) -> Omissions:
    """Return the omissions after answers of EC2. Each answer is its time and the instances that it omits."""
    found = Omissions()
    for at, omitted in answers:
        found = found.with_answer(omitted, at, joined={JOINED})
    return found


def test_two_answers_in_a_row_must_omit_an_instance_whose_agent_has_joined() -> None:
    assert omissions((0.0, {JOINED})).absent == frozenset()
    assert omissions((0.0, {JOINED}), (1.0, set()), (2.0, {JOINED})).absent == frozenset()
    assert omissions((0.0, {JOINED}), (1.0, {JOINED})).absent == {JOINED}
    assert omissions((0.0, {JOINED}), (1.0, {JOINED}), (2.0, set())).absent == frozenset()


def test_answers_must_omit_an_instance_whose_agent_has_not_joined_for_a_long_time() -> None:
    both = {JOINED, NEW}
    assert omissions((0.0, both), (UNJOINED_SECONDS, both)).absent == {JOINED}
    assert omissions((0.0, both), (UNJOINED_SECONDS + 1, both)).absent == both
    # After an answer that lists the instance, its UNJOINED_SECONDS begin again from zero.
    assert omissions((0.0, both), (200.0, set()), (201.0, both), (UNJOINED_SECONDS + 1, both)).absent == {JOINED}


@pytest.mark.parametrize(
    ("is_connected", "silent_seconds", "expected"),
    [
        (False, 0.0, InstanceCondition.ENDED),
        (True, LEASE + 0.1, InstanceCondition.ENDED),
        (True, LEASE, InstanceCondition.UNKNOWN),
        (True, 0.0, InstanceCondition.UNKNOWN),
    ],
)
def test_an_agent_that_answers_contradicts_the_reported_end_of_its_instance(
    is_connected: bool, silent_seconds: float, expected: InstanceCondition
) -> None:
    found = resolve_absence(
        InstanceCondition.ENDED, is_connected=is_connected, silent_seconds=silent_seconds, timeouts=TIMEOUTS
    )
    assert found is expected


@pytest.mark.parametrize("condition", {InstanceCondition.PRESENT, InstanceCondition.UNKNOWN})
def test_every_other_condition_needs_no_agent(condition: InstanceCondition) -> None:
    assert resolve_absence(condition, is_connected=True, silent_seconds=0.0, timeouts=TIMEOUTS) is condition
