"""Parity of shards in memory: which jobs may use it, and which losses of nodes it survives (ADR 0035).

    group of g nodes      each node keeps its own shards, and a share of all other members' shards
    one lost node         the other members rebuild its shards
    two lost nodes        their shards come from S3

Invariant: a group survives the loss of at most one member, and of none while some member does not respond to another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import combinations
from math import comb

from control_plane.errors import ImpossiblePlacement
from everstep.protocol.ids import NodeId

MIN_GROUP_SIZE = 2
MAX_GROUP_SIZE = 8
"""Slots of a node take 2.29 times its ranks' state at g = 8, and more than 2 times at any g."""


def contradictions(
    group_size: int,
    *,
    copies: int,
    node_count: int,
    min_node_count: int | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield the settings of a job that are not possible with parity, as names of API fields with messages."""
    if copies != 1:
        yield "Protection.Copies", f"parity keeps 1 copy of each shard, not {copies}; remove Copies or ParityGroupSize"
    if group_size > node_count:
        yield (
            "Protection.ParityGroupSize",
            f"groups of {group_size} nodes need {group_size} nodes; NodeCount is {node_count}. Lower ParityGroupSize "
            "or raise NodeCount",
        )
    if min_node_count is not None and min_node_count < group_size <= node_count:
        yield (
            "ElasticConfig.MinNodeCount",
            f"groups of {group_size} nodes need {group_size} nodes; MinNodeCount is {min_node_count}. Raise "
            "MinNodeCount or lower ParityGroupSize",
        )


def group_sizes(node_count: int, group_size: int) -> tuple[int, ...]:
    """Return the number of nodes in each parity group. The last group also has the remaining nodes."""
    count = node_count // group_size
    return (*[group_size] * (count - 1), group_size + node_count % group_size)


def recovery_probability(node_count: int, group_size: int, lost_count: int) -> float:
    """Return the exact probability that no group loses two members, for equally likely losses of `lost_count` nodes.

    Raises ImpossiblePlacement if g does not fit N, or more nodes are lost than exist.
    """
    if not (MIN_GROUP_SIZE <= group_size <= node_count and 0 <= lost_count <= node_count):
        raise ImpossiblePlacement(
            f"groups of {group_size}, {lost_count} lost nodes and {node_count} nodes do not fit together"
        )
    *whole, last = group_sizes(node_count, group_size)
    # Count the cases in which all lost nodes are in different groups: choose the groups, then one member of each.
    ways: int = comb(len(whole), lost_count) * group_size**lost_count
    if lost_count:
        ways += last * comb(len(whole), lost_count - 1) * group_size ** (lost_count - 1)
    return ways / comb(node_count, lost_count)


def fatal_losses(groups: Sequence[Sequence[NodeId]], incomplete: Collection[NodeId]) -> tuple[tuple[NodeId, ...], ...]:
    """Return the smallest sets of nodes whose joint loss loses a shard from memory.

    A group with `incomplete` members, which get no response from another member or give none, survives no loss.
    """
    return tuple(
        loss for group in groups for loss in combinations(group, 1 if any(node in incomplete for node in group) else 2)
    )
