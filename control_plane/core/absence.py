"""The rules for instances that EC2's answers omit, or report as ended (docs/design.md#failures).

An agent that still answers contradicts AWS: its instance has not ended. The condition is then UNKNOWN.

EC2 is eventually consistent: an answer may omit an instance that runs. An omitted instance counts as ended only if

    a second answer in a row omits it too;
    its agent has joined the fleet, or EC2's answers have omitted it for longer than `UNJOINED_SECONDS`; and
    its agent is silent.

The agent of a new instance cannot report yet: the instance still boots, or the control plane rejects the agent's join
because EC2 does not list the instance. The silence of such an agent therefore proves nothing.

Invariants: no answer of AWS ends the node of an agent that answers. An instance whose agent has not joined ends by
omission only after EC2's answers have omitted it for longer than `UNJOINED_SECONDS`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from control_plane.core.observed.nodes import InstanceCondition
from everstep.protocol.ids import NodeId
from everstep.protocol.plan import Timeouts

UNJOINED_SECONDS: Final = 300.0
"""How long EC2's answers may omit an instance whose agent has not joined.

AWS says that changes usually become visible within seconds, but can take minutes. Source: Amazon EC2 Developer Guide,
eventual consistency.
"""


@dataclass(frozen=True, slots=True)
class Omissions:
    """The instances of one fleet that EC2's newest answers omit."""

    since: Mapping[NodeId, float] = field(default_factory=dict[NodeId, float])
    """Instances that the newest answer omits. The value is the time of the first such answer in a row, in seconds."""
    absent: frozenset[NodeId] = frozenset()
    """The omitted instances that count as ended once their agents are silent (`settled`)."""

    def with_answer(self, omitted: Iterable[NodeId], at: float, joined: Collection[NodeId]) -> Omissions:
        """Return the omissions after a further answer of EC2.

        Args:
            omitted: instances of the fleet that the answer does not list.
            at: time of the answer in monotonic seconds, at or after that of the previous answer.
            joined: nodes whose agents have joined the fleet.

        Returns:
            The new omissions. An instance that the answer lists is not part of them.
        """
        since = {node_id: self.since.get(node_id, at) for node_id in omitted}
        return Omissions(
            since,
            frozenset(
                node_id
                for node_id, first in since.items()
                if node_id in self.since and (node_id in joined or at - first > UNJOINED_SECONDS)
            ),
        )


def settled(
    condition: InstanceCondition, *, is_connected: bool, silent_seconds: float, timeouts: Timeouts
) -> InstanceCondition:
    """Decide whether an instance has ended that AWS omits (condition ABSENT) or reports as ended.

    The function returns any other condition unchanged.

    Args:
        condition: the instance's condition according to EC2's answers.
        is_connected: whether the node's agent is connected.
        silent_seconds: how long the agent has been silent, without time in which this control plane could not receive
            messages.
        timeouts: an agent is silent if its last message is older than `lease_seconds`.

    Returns:
        PRESENT, ENDED or UNKNOWN. Never ABSENT.
    """
    is_silent = silent_seconds > timeouts.lease_seconds
    match condition:
        case InstanceCondition.ABSENT:
            is_lost = not is_connected and is_silent
        case InstanceCondition.ENDED:
            is_lost = not is_connected or is_silent  # A broken connection confirms AWS's report at once.
        case _:
            return condition
    return InstanceCondition.ENDED if is_lost else InstanceCondition.UNKNOWN
