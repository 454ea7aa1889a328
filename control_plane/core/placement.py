"""Which nodes keep whose shards: the paper's mixed strategy, aware of failure domains, and how probable recovery from memory is.

    N = 5, m = 2:    [n0 n1]  group: each keeps the other's        [n2 n3 n4]  ring: each keeps its own and its predecessor's

Invariant: a node's holders are `copies` different nodes, the node itself first.
Source: GEMINI (SOSP'23), Algorithm 1; reference/gemini.md §2 for the corrected probabilities.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb

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
    ordered = _spread(nodes, domains) if domains else list(nodes)
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
    group_count = node_count // copies
    ways = [1]
    """ways[j]: how many sets of j lost nodes leave every shard of the groups so far alive; the product of the groups' polynomials."""
    for size in [copies] * (group_count - 1) + [copies + node_count % copies]:
        group = _survivable(size, copies)
        ways = [sum(ways[i] * group[j - i] for i in range(len(ways)) if 0 <= j - i < len(group)) for j in range(len(ways) + len(group) - 1)]
    return (ways[lost_count] if lost_count < len(ways) else 0) / comb(node_count, lost_count)


def domain_loss(placement: Placement, domains: Mapping[NodeId, str]) -> tuple[str, ...]:
    """Return the failure domains whose loss alone would take all copies of some shard.

    Args:
        placement: of the job.
        domains: failure domain of each node; nodes not named are left out.

    Returns:
        Their names, sorted; empty when every shard has a copy elsewhere, or where that is not known.
    """
    fatal = set()
    for holders in placement.holders.values():
        named = {domains.get(node) for node in holders}
        if len(named) == 1 and (domain := named.pop()) is not None:
            fatal.add(domain)
    return tuple(sorted(fatal))


def _spread(nodes: Sequence[NodeId], domains: Mapping[NodeId, str]) -> list[NodeId]:
    """Order the nodes so that neighbours differ in domain where possible: always one of the largest remaining domain, never the last one twice."""
    remaining: dict[str, deque[NodeId]] = {}
    for node in nodes:
        remaining.setdefault(domains.get(node, f"unknown {node}"), deque()).append(node)
    position = {node: i for i, node in enumerate(nodes)}
    ordered: list[NodeId] = []
    last = ""
    while len(ordered) < len(nodes):
        sizes = Counter({domain: len(left) for domain, left in remaining.items() if left})
        candidates = [domain for domain in sizes if domain != last] or list(sizes)
        last = min(candidates, key=lambda domain: (-sizes[domain], position[remaining[domain][0]]))
        ordered.append(remaining[last].popleft())
    return ordered


def _survivable(size: int, copies: int) -> list[int]:
    """Return, by number of lost nodes, how many sets of them a ring of `size` with `copies` holders survives.

    A ring loses a shard exactly when `copies` neighbours in a row are lost. A group is a ring of `copies` nodes: only losing all is fatal.
    """
    if size == copies:
        return [comb(size, j) for j in range(size)]
    survivable = [0] * (size + 1)
    for first_run in range(copies):  # how many nodes are lost in a row at the start, before the first live one
        for (lost, run), count in _rows(size - first_run - 1, copies).items():
            if first_run + run < copies:  # the end and the start of the row are neighbours
                survivable[first_run + lost] += count
    return survivable


def _rows(length: int, copies: int) -> Counter[tuple[int, int]]:
    """Count rows of live and lost nodes without `copies` lost ones in a row, by (number lost, length of the lost run at the end)."""
    rows: Counter[tuple[int, int]] = Counter({(0, 0): 1})
    for _ in range(length):
        longer: Counter[tuple[int, int]] = Counter()
        for (lost, run), count in rows.items():
            longer[lost, 0] += count
            if run + 1 < copies:
                longer[lost + 1, run + 1] += count
        rows = longer
    return rows
