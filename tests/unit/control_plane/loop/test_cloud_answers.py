"""Tests the translation of AWS's answers about a fleet into the input of the core."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.cloud.operator import Ec2State, InstanceState
from control_plane.core.observed.nodes import InstanceCondition
from control_plane.loop.cloud_answers import conditions_of
from everstep.protocol.ids import NodeId
from tests.unit.control_plane.cloud.test_contract import FITS, MEMBER

NODE = NodeId("i-0123456789abcdef0")


@pytest.mark.parametrize(
    ("lifecycle_state", "condition"),
    [
        ("Pending", InstanceCondition.UNKNOWN),
        ("Pending:Wait", InstanceCondition.UNKNOWN),
        ("InService", InstanceCondition.ABSENT),
    ],
)
def test_an_instance_that_two_answers_omit_is_absent_unless_its_group_launches_it(
    lifecycle_state: str, condition: InstanceCondition
) -> None:
    group = replace(FITS, members=(replace(MEMBER, instance_id=NODE, lifecycle_state=lifecycle_state),))
    omitted = {NODE: InstanceState(instance_id=NODE, state=Ec2State.ABSENT)}
    (found,) = conditions_of(group, omitted, frozenset({NODE})).values()
    assert found[0] is condition
