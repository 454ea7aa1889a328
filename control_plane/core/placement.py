"""The placement of shards on nodes, by GEMINI's mixed strategy, extended by failure domains (`core.separation`).

    N = 5, m = 2:    [n0 n1]      group: each node holds its own shard and the other node's shard
                         [n2 n3 n4]   ring: each node holds its own shard and its predecessor's shard

Invariant: each node's shards have `copies` different holders, and the node itself is the first holder. Source: GEMINI
(SOSP'23), Algorithm 1, with corrected probabilities.
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
    """The holders of each node's shards. All ranks of a node have the same holders."""

    groups: tuple[tuple[NodeId, ...], ...]
    """Nodes that hold each other's shards. The last may be a ring, where a node holds its predecessors' shards."""
    holders: Mapping[NodeId, tuple[NodeId, ...]]
    """The holders by owner, which is the first holder of its own shards."""

    @property
    def fatal_losses(self) -> tuple[tuple[NodeId, ...], ...]:
        """The smallest sets of nodes whose joint loss loses a shard: the holders of each shard."""
        return tuple(self.holders.values())


def plan(
    nodes: Sequence[NodeId],
    copies: int,
    domains: Mapping[NodeId, str] | None = None,
    before: Sequence[Sequence[int]] = (),
) -> Placement:
    """Return the placement of a job, whose nodes are ordered by GROUP_RANK. Deterministic.

    Groups of `before` (`groups_of`) stay if their sizes fit, unless all holders of a shard would share one domain.
    Raises ImpossiblePlacement if the job has more copies than nodes, fewer than one copy, or a duplicate node.
    """
    if not 1 <= copies <= len(nodes):
        raise ImpossiblePlacement(
            f"{copies} copies do not fit {len(nodes)} nodes: Copies must be between 1 and {len(nodes)}"
        )
    if len(set(nodes)) != len(nodes):
        raise ImpossiblePlacement("a node is listed twice")
    domain_of = [(domains or {}).get(node, f"unknown {node}") for node in nodes]
    fresh = _cut(_spread(domain_of, copies) if domains else range(len(nodes)), copies)
    previous = tuple(tuple(group) for group in before)
    groups = separate(previous if _is_partition(previous, fresh) else fresh, copies, domain_of)
    named = tuple(tuple(nodes[place] for place in group) for group in groups)
    holders = {node: holders_in(group, i, copies) for group in named for i, node in enumerate(group)}
    return Placement(named, holders)


def parity_groups(
    nodes: Sequence[NodeId],
    group_size: int,
    domains: Mapping[NodeId, str] | None = None,
    before: Sequence[Sequence[int]] = (),
) -> tuple[tuple[int, ...], ...]:
    """Return the parity groups of a job, as GROUP_RANKs in ascending order. Deterministic.

    Groups of `before` stay if their sizes fit. Raises ImpossiblePlacement if a group has fewer than two nodes, or more
    nodes than the job.
    """
    if not 2 <= group_size <= len(nodes):
        raise ImpossiblePlacement(f"parity groups of {group_size} nodes do not fit {len(nodes)} nodes")
    domain_of = [(domains or {}).get(node, f"unknown {node}") for node in nodes]
    fresh = _cut(_spread(domain_of, group_size) if domains else range(len(nodes)), group_size)
    groups = before if _is_partition(before, fresh) else fresh
    return tuple(tuple(sorted(group)) for group in groups)


def groups_of(holders: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the placement groups, the ring last, from each GROUP_RANK's holders, or nothing if they form no groups."""
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
    """Return the exact probability that every shard survives equally likely losses of `lost_count` nodes.

    GEMINI's Corollary 1 is only a bound for 2m or more lost nodes. Raises ImpossiblePlacement if m does not fit N, or
    more nodes are lost than exist.
    """
    if not (1 <= copies <= node_count and 0 <= lost_count <= node_count):
        raise ImpossiblePlacement(
            f"{copies} copies, {lost_count} lost nodes and {node_count} nodes do not fit together"
        )
    # The last group may be a ring of more than m nodes, in which m successive nodes hold each shard. First count the
    # sets of k = `lost_count` nodes that contain no whole group of m nodes. Then subtract the sets in which m or more
    # successive nodes of the ring are lost. The ring has fewer than 2m nodes, so such a set contains the whole ring, or
    # exactly one sequence of m or more nodes, which begins at one of `ring` positions.
    ring = copies + node_count % copies if node_count % copies else 0
    groups = (node_count - ring) // copies
    ways = _without_whole_groups(groups, copies, node_count, lost_count)
    if ring:
        ways -= _without_whole_groups(groups, copies, node_count - ring, lost_count - ring)
        ways -= ring * _without_whole_groups(groups, copies, node_count - copies - 1, lost_count - copies)
    return ways / comb(node_count, lost_count)


def _without_whole_groups(groups: int, size: int, nodes: int, lost: int) -> int:
    """Return how many sets of `lost` nodes contain no whole group: Σ (-1)^j C(G, j) C(N - mj, k - mj)."""
    if not 0 <= lost <= nodes:
        return 0
    total, chosen, rest = 0, 1, comb(nodes, lost)
    last = min(groups, lost // size)
    for j in range(last):
        total += -chosen * rest if j % 2 else chosen * rest
        # Derive the binomials of term j + 1 from those of term j, because a new large binomial is expensive.
        chosen = chosen * (groups - j) // (j + 1)
        rest = rest * perm(lost, size) // perm(nodes, size)
        nodes, lost = nodes - size, lost - size
    return total - chosen * rest if last % 2 else total + chosen * rest


def _is_partition(groups: Sequence[Sequence[int]], fresh: Sequence[Sequence[int]]) -> bool:
    places = sorted(place for group in groups for place in group)
    return list(map(len, groups)) == list(map(len, fresh)) and places == list(range(sum(map(len, fresh))))


def _cut(order: Sequence[int], copies: int) -> tuple[tuple[int, ...], ...]:
    """Return the GROUP_RANKs in `order`, in groups of `copies` nodes. The last group has the remainder."""
    count = len(order) // copies
    groups = [tuple(order[i * copies : (i + 1) * copies]) for i in range(count)]
    groups[-1] += tuple(order[count * copies :])
    return tuple(groups)


def _spread(domains: Sequence[str], copies: int) -> list[int]:
    """Return the GROUP_RANKs with successive nodes in different domains, if possible."""
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
