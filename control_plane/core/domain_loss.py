"""The exact probability that the shards of a placement survive the loss of whole failure domains.

An *edge* is a set of domains whose joint loss loses a shard. Sets of edges without a common domain are independent, so
their numbers of survivable losses multiply.

Invariant: a node whose domain is unknown counts as a separate domain. Domains of nodes that hold no shard do not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from math import comb

from control_plane.errors import ImpossiblePlacement, TooManyCases
from everstep.protocol.ids import NodeId

MAX_CASES = 20_000
"""Largest number of intermediate results of `_component`. A placement over at most sixteen domains stays below it."""

Domain = str
Edge = frozenset[Domain]
Losses = Collection[Collection[NodeId]]
"""The smallest sets of nodes whose joint loss loses a shard from memory."""


def fatal_domains(losses: Losses, domains: Mapping[NodeId, str]) -> tuple[str, ...]:
    """Return the failure domains whose loss alone would lose some shard from memory, sorted."""
    alone = {domain for edge in _edges(losses, domains) if len(edge) == 1 for domain in edge}
    return tuple(sorted(alone & set(domains.values())))


def recovery_probability(losses: Losses, domains: Mapping[NodeId, str], lost_count: int) -> float:
    """Return the exact probability that every shard survives the loss of `lost_count` equally likely domains.

    Raises:
        ImpossiblePlacement: more domains are lost than exist.
        TooManyCases: so many domains have shards in common that an exact count takes too long.
    """
    count = domain_count(losses, domains)
    if not 0 <= lost_count <= count:
        raise ImpossiblePlacement(f"{lost_count} lost domains and {count} domains do not fit together")
    edges = _edges(losses, domains)
    if frozenset() in edges:  # A shard without holders never survives.
        return 0.0
    fatal = {domain for edge in edges if len(edge) == 1 for domain in edge}
    return _survivable({edge for edge in edges if not edge & fatal}, count - len(fatal), lost_count) / comb(
        count, lost_count
    )


def domain_count(losses: Losses, domains: Mapping[NodeId, str]) -> int:
    """Return the number of failure domains that contain at least one holder of any shard of the job."""
    return len(frozenset[Domain]().union(*_edges(losses, domains)))


def _own(node: NodeId) -> Domain:
    return f"unknown {node}"


def _edges(losses: Losses, domains: Mapping[NodeId, str]) -> set[Edge]:
    return {frozenset(domains.get(node, _own(node)) for node in loss) for loss in losses}


def _survivable(edges: set[Edge], count: int, lost: int) -> int:
    """Return the number of sets of `lost` domains, out of `count` domains, whose loss every shard survives."""
    fatal = {edge for edge in edges if len(edge) <= lost}
    if all(len(edge) == lost for edge in fatal):
        return comb(count, lost) - len(fatal)
    tied = [_component(each, lost) for each in _components(fatal)]
    free = count - sum(size for size, _ in tied)
    ways = reduce(lambda product, each: _times(product, each[1], lost), tied, [1])
    return sum(survived * comb(free, lost - j) for j, survived in enumerate(ways))


def _components(edges: Iterable[Edge]) -> list[list[Edge]]:
    touching: defaultdict[Domain, list[Edge]] = defaultdict(list)
    for edge in edges:
        for domain in edge:
            touching[domain].append(edge)
    left = set(edges)
    found: list[list[Edge]] = []
    for first in sorted(edges, key=sorted):
        reached = [first] if first in left else []
        left.discard(first)
        # The list `reached` grows during this loop, which is a breadth-first search.
        for edge in reached:
            near = sorted({each for domain in edge for each in touching[domain]} & left, key=sorted)
            left.difference_update(near)
            reached += near
        if reached:
            found.append(reached)
    return found


def _component(edges: Sequence[Edge], most: int) -> tuple[int, list[int]]:
    """Return the number of domains in `edges`, and in how many survivable ways 0, 1, 2 … up to `most` can be lost."""
    order = list(dict.fromkeys(domain for edge in edges for domain in sorted(edge)))
    place = {domain: i for i, domain in enumerate(order)}
    opens, members, closes = ([0] * len(order) for _ in range(3))
    for bit, edge in enumerate(edges):
        places = sorted(place[domain] for domain in edge)
        opens[places[0]] |= 1 << bit
        closes[places[-1]] |= 1 << bit
        for i in places:
            members[i] |= 1 << bit
    cases: dict[tuple[int, int], int] = {(0, 0): 1}
    for i in range(len(order)):
        after: defaultdict[tuple[int, int], int] = defaultdict(int)
        for (open_edges, lost), ways in cases.items():
            after[open_edges & ~members[i], lost] += ways
            now = open_edges | opens[i]
            if lost < most and not now & closes[i]:
                after[now, lost + 1] += ways
        cases = after
        if len(cases) > MAX_CASES:
            raise TooManyCases(f"the shards tie {len(order)} domains together in more ways than can be counted")
    by_lost = [0] * (min(most, len(order)) + 1)
    for (_, lost), ways in cases.items():
        by_lost[lost] += ways
    return len(order), by_lost


def _times(one: Sequence[int], other: Sequence[int], most: int) -> list[int]:
    """Return the product of two polynomials as coefficients, without powers above `most`."""
    product = [0] * min(len(one) + len(other) - 1, most + 1)
    for i, a in enumerate(one):
        for j, b in enumerate(other[: len(product) - i]):
            product[i + j] += a * b
    return product
