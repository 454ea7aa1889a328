"""The placement of shards on nodes, by GEMINI's mixed strategy, extended by failure domains.

    N = 5, m = 2:    [n0 n1]      group: each node holds its own shard and the other node's shard
                         [n2 n3 n4]   ring: each node holds its own shard and its predecessor's shard

`control_plane.core.separation` keeps the copies of a shard in different failure domains, where possible.
`control_plane.core.domain_loss` computes the probability of recovery after a loss of whole domains.

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
    """Nodes that hold each other's shards.

    The last group may have more than `copies` nodes. In such a ring, a node holds the shards of its predecessors.
    """
    holders: Mapping[NodeId, tuple[NodeId, ...]]
    """The holders of each node's shards, by the owner's id. The owner is the first holder of its own shards."""

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
    """Return the placement of a job. Deterministic.

    Nodes of the previous placement keep their groups, and a replacement takes the lost node's position. Groups change
    only if all holders of a shard would share one domain.

    Args:
        nodes: the members by GROUP_RANK.
        copies: m, the number of nodes that hold a shard, the owner included.
        domains: the failure domain (network node) of each node. A node without an entry counts as a separate domain. A
            new placement uses as many domains per group as possible.
        before: the groups of the previous placement, as GROUP_RANKs (`groups_of`). If `before` is empty, or its number
            of copies or nodes differs from that of the job, the placement is new.

    Returns:
        The groups, and the holders of each node's shards.

    Raises:
        ImpossiblePlacement: the job has more copies than nodes, fewer than one copy, or a duplicate node.
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

    A replacement takes the lost node's position.

    Args:
        nodes: the members by GROUP_RANK.
        group_size: g, the number of nodes per group. The last group also has the remainder.
        domains: the failure domain of each node. A node without an entry counts as a separate domain. New groups use as
            many domains as possible, because the loss of two members loses their shards.
        before: the groups of the previous generation. If `before` is empty or has other sizes, the groups are new.

    Returns:
        The groups.

    Raises:
        ImpossiblePlacement: a group has fewer than two nodes, or more nodes than the job.
    """
    if not 2 <= group_size <= len(nodes):
        raise ImpossiblePlacement(f"parity groups of {group_size} nodes do not fit {len(nodes)} nodes")
    domain_of = [(domains or {}).get(node, f"unknown {node}") for node in nodes]
    fresh = _cut(_spread(domain_of, group_size) if domains else range(len(nodes)), group_size)
    groups = before if _is_partition(before, fresh) else fresh
    return tuple(tuple(sorted(group)) for group in groups)


def groups_of(holders: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Compute the placement groups (nodes that hold each other's shards) from the holders in a stored plan.

    Args:
        holders: for each GROUP_RANK, the GROUP_RANKs of its shard's holders, the owner first.

    Returns:
        Groups of GROUP_RANKs. A group with more nodes than a shard has holders (the ring) is last. Empty if the holders
        do not form such groups.
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
    """Return the probability that every shard survives a simultaneous loss of `lost_count` nodes.

    All sets of lost nodes are equally likely. The result is exact for all arguments. GEMINI's Corollary 1 is only a
    bound if 2m or more nodes are lost.

    Args:
        node_count: N.
        copies: m, nodes that hold each shard, the owner included.
        lost_count: k, nodes lost at the same time.

    Returns:
        The probability. For example, N = 16, m = 2 and k = 2 give 0.9333.

    Raises:
        ImpossiblePlacement: m does not fit N, or more nodes are lost than exist.
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
    """Return how many sets of `lost` nodes contain no whole group.

    The groups are disjoint. The result is Σ (-1)^j C(G, j) C(N - mj, k - mj), with G = `groups`, m = `size`,
    N = `nodes` and k = `lost` (inclusion-exclusion).
    """
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
    """Return whether `groups` contain every GROUP_RANK once, in groups of the same sizes as those of `fresh`."""
    places = sorted(place for group in groups for place in group)
    return list(map(len, groups)) == list(map(len, fresh)) and places == list(range(sum(map(len, fresh))))


def _cut(order: Sequence[int], copies: int) -> tuple[tuple[int, ...], ...]:
    """Return the GROUP_RANKs in `order`, split into groups of `copies` nodes.

    The last group also contains the nodes that do not fill a group.
    """
    count = len(order) // copies
    groups = [tuple(order[i * copies : (i + 1) * copies]) for i in range(count)]
    groups[-1] += tuple(order[count * copies :])
    return tuple(groups)


def _spread(domains: Sequence[str], copies: int) -> list[int]:
    """Return the GROUP_RANKs in an order in which successive nodes are in different failure domains, if possible.

    The function repeatedly picks a node of the domain with the most nodes left.
    """
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
