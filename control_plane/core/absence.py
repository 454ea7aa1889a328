"""The rules for instances that EC2's answers omit, or report as ended (docs/design.md#failures).

Invariant: AWS alone never ends the node of an agent that answers; the condition is then UNKNOWN. EC2 is eventually
consistent, so an omitted instance counts as ended only if

    two answers in a row omit it;
    its agent has joined the fleet, or the omission has lasted longer than `UNJOINED_SECONDS`; and
    its agent is silent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from control_plane.core.observed.nodes import InstanceCondition
from everstep.protocol.ids import NodeId
from everstep.protocol.plan import Timeouts

UNJOINED_SECONDS: Final = 300.0
"""An agent that has not joined may be silent because its instance boots, or because its join is rejected.

AWS says that changes usually become visible within seconds, but can take minutes. Source: Amazon EC2 Developer Guide,
eventual consistency.
"""


@dataclass(frozen=True, slots=True)
class Omissions:
    """The instances of one fleet that EC2's newest answers omit."""

    since: Mapping[NodeId, float] = field(default_factory=dict[NodeId, float])
    """The monotonic second of the first answer in a row that omits each instance."""
    absent: frozenset[NodeId] = frozenset()
    """The instances that count as ended once their agents are silent (`resolve_absence`)."""

    def with_answer(self, omitted: Iterable[NodeId], at: float, joined: Collection[NodeId]) -> Omissions:
        """Return the omissions after a further answer of EC2 at the monotonic second `at`."""
        since = {node_id: self.since.get(node_id, at) for node_id in omitted}
        return Omissions(
            since,
            frozenset(
                node_id
                for node_id, first in since.items()
                if node_id in self.since and (node_id in joined or at - first > UNJOINED_SECONDS)
            ),
        )


def resolve_absence(
    condition: InstanceCondition, *, is_connected: bool, silent_seconds: float, timeouts: Timeouts
) -> InstanceCondition:
    """Return ENDED or UNKNOWN for an instance that AWS omits (ABSENT) or reports as ended.

    Other conditions stay unchanged. `silent_seconds` excludes time in which this control plane could not receive
    messages.
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
