"""The rule for instances that EC2's answers omit (docs/design.md#failures).

EC2 is eventually consistent: an answer may omit an instance that runs. An omitted instance counts as ended only if a
second answer omits it too and its agent is silent.

Invariant: the node of a connected agent never counts as ended because EC2's answers omit its instance.
"""

from __future__ import annotations

from control_plane.core.observed.nodes import InstanceCondition
from everstep.protocol.plan import Timeouts


def settled(
    condition: InstanceCondition, *, is_connected: bool, silent_seconds: float, timeouts: Timeouts
) -> InstanceCondition:
    """Decide whether an instance that EC2's answers omit (condition ABSENT) has ended.

    The function returns any other condition unchanged.

    Args:
        condition: the instance's condition according to EC2's answers.
        is_connected: whether the node's agent is connected.
        silent_seconds: how long the agent has been silent, without time in which this control plane could not receive
            messages.
        timeouts: an instance in condition ABSENT has ended if its agent is silent for longer than `lease_seconds`.

    Returns:
        PRESENT, ENDED or UNKNOWN. Never ABSENT.
    """
    if condition is not InstanceCondition.ABSENT:
        return condition
    is_lost = not is_connected and silent_seconds > timeouts.lease_seconds
    return InstanceCondition.ENDED if is_lost else InstanceCondition.UNKNOWN
