"""Assigns a GROUP_RANK to each node of a job's next generation.

Invariant: a node that continues keeps its GROUP_RANK, and a replacement takes that of the replaced node. If the number
of nodes changes, the nodes that continue get the lowest GROUP_RANKs, in their previous order.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.protocol.ids import NodeId, Rank
from everstep.protocol.plan import GenerationPlan


def places(plan: GenerationPlan | None, available: Sequence[NodeId], node_count: int) -> tuple[NodeId | None, ...]:
    """Return the node for each GROUP_RANK of the next generation, or None where no node is available."""
    before: Sequence[NodeId | None] = [node.node_id for node in plan.nodes] if plan is not None else []
    old, there = set(before), set(available)
    newcomers = iter([node for node in available if node not in old])
    if len(before) != node_count:
        staying = [node for node in before if node in there][:node_count]
        before = [*staying, *[None] * (node_count - len(staying))]
    return tuple(node if node is not None and node in there else next(newcomers, None) for node in before)


def ranks_of(place: int, ranks_per_node: int) -> tuple[Rank, ...]:
    """Return the ranks of the node whose GROUP_RANK is `place`."""
    return tuple(Rank(place * ranks_per_node + local) for local in range(ranks_per_node))
