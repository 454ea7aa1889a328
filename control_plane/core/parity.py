"""Parity of shards in memory: which jobs may use it, and which losses of nodes it survives.

docs/adr/0035-parity-in-memory.md explains the design.

    group of g nodes      each node keeps its own shards, and a share of all other members' shards
    one lost node         the other members rebuild its shards
    two lost nodes        their shards come from S3

Invariant: a group survives the loss of at most one member. It survives no loss while some member does not respond to
another member, because the group's shares are then incomplete.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import combinations
from math import comb

from control_plane.errors import ImpossiblePlacement
from everstep.protocol.ids import NodeId

MIN_GROUP_SIZE = 2
MAX_GROUP_SIZE = 8
"""Largest number of nodes per parity group.

With 8 nodes per group, the slots of a node take 2.29 times the state of its ranks. Every group size takes more than 2
times the state, so groups of more than 8 nodes save little memory. A replacement in a larger group must fetch more
data.
"""


def contradictions(
    group_size: int,
    *,
    copies: int,
    node_count: int,
    min_node_count: int | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield the settings of a job that are not possible together with parity.

    Args:
        group_size: g, the number of nodes per parity group.
        copies: number of nodes that hold each shard, the owner included.
        node_count: number of nodes of the job.
        min_node_count: MinNodeCount of ElasticConfig, or None.

    Yields:
        Name of the API's field and the message, for each setting that must change.
    """
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
    """Return the probability that no group loses two members in a simultaneous loss of `lost_count` nodes.

    All sets of lost nodes are equally likely. The result is exact.

    Args:
        node_count: N.
        group_size: g, number of nodes per group. The last group also has the remainder.
        lost_count: k, nodes lost at the same time.

    Returns:
        The probability. For example, N = 8, g = 4 and k = 2 give 0.5714.

    Raises:
        ImpossiblePlacement: g does not fit N, or more nodes are lost than exist.
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

    Args:
        groups: the members of each group.
        incomplete: members that do not respond to another member of their group, or that get no response from one. The
            group of such a member survives no loss.

    Returns:
        Each pair of members of a group without incomplete members, and each single member of the other groups.
    """
    return tuple(
        loss for group in groups for loss in combinations(group, 1 if any(node in incomplete for node in group) else 2)
    )
