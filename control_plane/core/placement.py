"""Decides which nodes keep whose shards: the paper's mixed strategy, aware of failure domains; and how probable recovery from memory is.

    N = 5, m = 2:    [n0 n1]  group: each keeps the other's        [n2 n3 n4]  ring: each keeps its own and its predecessor's

`control_plane.core.separation` keeps every shard out of a single failure domain where that is possible.
`control_plane.core.domain_loss` computes how probable recovery is when whole domains are lost.

Invariant: a node's holders are `copies` different nodes, the node itself first.
Source: GEMINI (SOSP'23), Algorithm 1, with corrected probabilities.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import comb, perm

from control_plane.core.separation import holders_in, separate
from control_plane.errors import ImpossiblePlacement
from everstep.protocol.ids import NodeId


@dataclass(frozen=True, slots=True)
class Placement:
    """Who holds what, by node; a rank's holders are those of its node."""

    groups: tuple[tuple[NodeId, ...], ...]
    """Nodes that keep each other's shards; the last one may be a ring of more than `copies` nodes."""
    holders: Mapping[NodeId, tuple[NodeId, ...]]
    """By owner; the owner first."""


def plan(
    nodes: Sequence[NodeId],
    copies: int,
    domains: Mapping[NodeId, str] | None = None,
    before: Sequence[Sequence[int]] = (),
) -> Placement:
    """Return the placement of a job. Deterministic.

    The job's decide calls it once per generation. Nodes of the previous placement keep their groups, and a replacement
    takes the lost node's part. Groups change only where a shard would have all its holders in one domain although
    another arrangement avoids that.

    Args:
        nodes: the members by GROUP_RANK.
        copies: m, how many nodes hold a shard, the owner's included.
        domains: failure domain (network node) of each node; a node without an entry counts as a domain of its own. A
            fresh placement takes the members of a group from as many domains as it can.
        before: the groups of the previous placement, as GROUP_RANKs (`groups_of`). Empty, or made for another number of
            copies or nodes: the placement is a fresh one.

    Returns:
        Groups and holders.

    Raises:
        ImpossiblePlacement: more copies than nodes, fewer than one copy, or a node that is named twice.
    """
    if not 1 <= copies <= len(nodes):
        raise ImpossiblePlacement(
            f"{copies} copies do not fit {len(nodes)} nodes: between 1 and {len(nodes)} are possible"
        )
    if len(set(nodes)) != len(nodes):
        raise ImpossiblePlacement("a node is named twice")
    domain_of = [(domains or {}).get(node, f"unknown {node}") for node in nodes]
    fresh = _cut(_spread(domain_of, copies) if domains else range(len(nodes)), copies)
    previous = tuple(tuple(group) for group in before)
    is_previous = list(map(len, previous)) == list(map(len, fresh)) and sorted(sum(previous, ())) == list(
        range(len(nodes))
    )
    groups = separate(previous if is_previous else fresh, copies, domain_of)
    named = tuple(tuple(nodes[place] for place in group) for group in groups)
    holders = {node: holders_in(group, i, copies) for group in named for i, node in enumerate(group)}
    return Placement(named, holders)


def groups_of(holders: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the groups that a stored plan's holders were made from.

    Args:
        holders: by GROUP_RANK, the GROUP_RANKs of its shard's holders, the owner first.

    Returns:
        Groups of GROUP_RANKs, the ring last; empty if the holders are not those of such groups.
    """
    copies = len(holders[0]) if holders else 0
    if copies < 2 or any(len(held) != copies for held in holders):
        return ()
    groups: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for first in range(len(holders)):
        group: list[int] = []
        place = first
        while place not in seen:
            seen.add(place)
            group.append(place)
            place = holders[place][1]
        if group:
            groups.append(tuple(group))
    groups.sort(key=lambda group: len(group) > copies)
    is_sound = all(
        tuple(holders[node]) == holders_in(group, i, copies) for group in groups for i, node in enumerate(group)
    )
    return tuple(groups) if is_sound else ()


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
        raise ImpossiblePlacement(
            f"{copies} copies, {lost_count} lost nodes and {node_count} nodes do not fit together"
        )
    # By inclusion and exclusion over the groups that are lost whole; of a ring, all minus what loses a shard. A ring of
    # fewer than 2m nodes has at
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


def _cut(order: Sequence[int], copies: int) -> tuple[tuple[int, ...], ...]:
    """Cut an order of GROUP_RANKs into groups of `copies`; the last one takes the rest, too."""
    count = len(order) // copies
    groups = [tuple(order[i * copies : (i + 1) * copies]) for i in range(count)]
    groups[-1] += tuple(order[count * copies :])
    return tuple(groups)


def _spread(domains: Sequence[str], copies: int) -> list[int]:
    """Order GROUP_RANKs so that each group has different domains as far as there are enough; domains with the most nodes left come first."""
    left: dict[str, deque[int]] = {}
    for place, domain in enumerate(domains):
        left.setdefault(domain, deque()).append(place)
    largest = [(-len(places), places[0], domain) for domain, places in left.items()]
    heapify(largest)
    ordered: list[int] = []
    while largest:
        taken = [heappop(largest)[2] for _ in range(min(copies, len(largest)))]
        for domain in taken:
            ordered.append(left[domain].popleft())
            if left[domain]:
                heappush(largest, (-len(left[domain]), left[domain][0], domain))
    return ordered
