"""Which nodes keep whose shards: the paper's mixed strategy, aware of failure domains, and how probable recovery from memory is.

    N = 5, m = 2:    [n0 n1]  group: each keeps the other's        [n2 n3 n4]  ring: each keeps its own and its predecessor's

How probable it is when whole domains are lost is in `control_plane.core.domain_loss`.

Invariant: a node's holders are `copies` different nodes, the node itself first.
Source: GEMINI (SOSP'23), Algorithm 1; reference/gemini.md §2 for the corrected probabilities.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import comb, perm

from control_plane.errors import ImpossiblePlacement
from everstep.protocol.ids import NodeId


@dataclass(frozen=True, slots=True)
class Placement:
    """Who holds what, by node; a rank's holders are those of its node."""

    groups: tuple[tuple[NodeId, ...], ...]
    """Nodes that keep each other's shards; the last one may be a ring of more than `copies` nodes."""
    holders: Mapping[NodeId, tuple[NodeId, ...]]
    """By owner; the owner first."""


def plan(nodes: Sequence[NodeId], copies: int, domains: Mapping[NodeId, str] | None = None) -> Placement:
    """Return the placement of a job. Deterministic: it depends on GROUP_RANKs alone, so a replacement takes over the lost node's part.

    Called by the job's decide, once per generation.

    Args:
        nodes: the members by GROUP_RANK.
        copies: m, how many nodes hold a shard, the owner's included.
        domains: failure domain (network node) of each node; a node that is not named counts as a domain of its own. Members of one
            group are taken from different domains as far as there are enough.

    Returns:
        Groups and holders.

    Raises:
        ImpossiblePlacement: more copies than nodes, fewer than one copy, or a node that is named twice.
    """
    if not 1 <= copies <= len(nodes):
        raise ImpossiblePlacement(f"{copies} copies do not fit {len(nodes)} nodes: between 1 and {len(nodes)} are possible")
    if len(set(nodes)) != len(nodes):
        raise ImpossiblePlacement("a node is named twice")
    ordered = _spread(nodes, copies, domains) if domains else list(nodes)
    group_count = len(ordered) // copies
    groups = [tuple(ordered[i * copies : (i + 1) * copies]) for i in range(group_count)]
    groups[-1] += tuple(ordered[group_count * copies :])
    holders = {node: tuple(group[(i + j) % len(group)] for j in range(copies)) for group in groups for i, node in enumerate(group)}
    return Placement(tuple(groups), holders)


def recovery_probability(node_count: int, copies: int, lost_count: int) -> float:
    """Return the probability that every shard survives the simultaneous loss of `lost_count` nodes, all sets of nodes equally likely.

    Exact for every argument (the paper's Corollary 1 is only a bound from 2m losses on).

    Args:
        node_count: N.
        copies: m.
        lost_count: k.

    Returns:
        A probability: 16, 2, 2 gives 0.9333.

    Raises:
        ImpossiblePlacement: m does not fit N, or more nodes are lost than there are.
    """
    if not (1 <= copies <= node_count and 0 <= lost_count <= node_count):
        raise ImpossiblePlacement(f"{copies} copies, {lost_count} lost nodes and {node_count} nodes do not fit together")
    # By inclusion and exclusion over the groups that are lost whole; of a ring, all minus what loses a shard. A ring of fewer than 2m nodes has at
    # most one run of m or more lost nodes: it begins at one of `ring` places, after a live node, unless all are lost.
    ring = copies + node_count % copies if node_count % copies else 0
    groups = (node_count - ring) // copies
    ways = _without_whole_groups(groups, copies, node_count, lost_count)
    if ring:
        ways -= _without_whole_groups(groups, copies, node_count - ring, lost_count - ring)
        ways -= ring * _without_whole_groups(groups, copies, node_count - copies - 1, lost_count - copies)
    return ways / comb(node_count, lost_count)


def _without_whole_groups(groups: int, size: int, nodes: int, lost: int) -> int:
    """Return how many sets of `lost` nodes contain none of `groups` disjoint groups of `size` of the nodes: Σ (-1)^j C(G, j) C(N - mj, k - mj)."""
    if not 0 <= lost <= nodes:
        return 0
    total, chosen, rest = 0, 1, comb(nodes, lost)
    last = min(groups, lost // size)
    for j in range(last):
        total += -chosen * rest if j % 2 else chosen * rest
        # The next term from this one: a binomial of thousands is dear, its neighbour is not.
        chosen = chosen * (groups - j) // (j + 1)
        rest = rest * perm(lost, size) // perm(nodes, size)
        nodes, lost = nodes - size, lost - size
    return total - chosen * rest if last % 2 else total + chosen * rest


def _spread(nodes: Sequence[NodeId], copies: int, domains: Mapping[NodeId, str]) -> list[NodeId]:
    """Order the nodes so that each group has different domains as far as there are enough: those with the most nodes left come first."""
    left: dict[str, deque[int]] = {}
    for position, node in enumerate(nodes):
        left.setdefault(domains.get(node, f"unknown {node}"), deque()).append(position)
    largest = [(-len(positions), positions[0], domain) for domain, positions in left.items()]
    heapify(largest)
    ordered: list[NodeId] = []
    while largest:
        taken = [heappop(largest)[2] for _ in range(min(copies, len(largest)))]
        for domain in taken:
            ordered.append(nodes[left[domain].popleft()])
            if left[domain]:
                heappush(largest, (-len(left[domain]), left[domain][0], domain))
    return ordered
