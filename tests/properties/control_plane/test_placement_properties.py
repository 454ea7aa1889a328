"""On small clusters, the placement of shards is as good as the best one of an exhaustive search.

A shard is exposed if all its holders are in one failure domain. The placement exposes a shard, or changes a group, only
where every other placement would be worse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations_with_replacement, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.core import placement
from everstep.protocol.ids import NodeId

Holders = Mapping[int, frozenset[int]]
SHAPES = [(count, copies) for count in range(2, 8) for copies in (2, 3) if copies <= count]


def names(count: int) -> list[NodeId]:
    return [NodeId(f"n{i}") for i in range(count)]


def planned(
    domains: Sequence[int], copies: int, before: Sequence[Sequence[int]] = ()
) -> tuple[Holders, tuple[tuple[int, ...], ...]]:
    """Place one rank on each node, given the nodes' failure domains.

    Return the holders of each rank, and the groups.
    """
    nodes = names(len(domains))
    found = placement.plan(
        nodes, copies, {node: f"d{domain}" for node, domain in zip(nodes, domains, strict=True)}, before
    )
    place = {node: i for i, node in enumerate(nodes)}
    groups = tuple(tuple(place[node] for node in group) for group in found.groups)
    return {
        place[owner]: frozenset(place[holder] for holder in holders) for owner, holders in found.holders.items()
    }, groups


def exposed(holders: Holders, domains: Sequence[int]) -> int:
    return sum(len({domains[holder] for holder in held}) == 1 for held in holders.values())


@cache
def arrangements(count: int, copies: int) -> list[Holders]:
    """Return every placement that the rules of Everstep allow.

    Each group has `copies` nodes. The last group also contains the remaining nodes and places its copies in a ring.
    """
    found: dict[tuple[frozenset[int], ...], Holders] = {}
    for order in permutations(range(count)):
        holders: dict[int, frozenset[int]] = {}
        first = 0
        while first < count:
            size = copies if first + 2 * copies <= count else count - first
            group = order[first : first + size]
            holders |= {owner: frozenset(group[(i + j) % size] for j in range(copies)) for i, owner in enumerate(group)}
            first += size
        found[tuple(holders[owner] for owner in range(count))] = holders
    return list(found.values())


@pytest.mark.parametrize(("count", "copies"), SHAPES)
def test_a_fresh_placement_exposes_no_shard_that_another_arrangement_keeps_apart(count: int, copies: int) -> None:
    for domains in combinations_with_replacement(range(3), count):
        holders, _ = planned(domains, copies)
        if exposed(holders, domains):
            assert exposed(holders, domains) == min(exposed(other, domains) for other in arrangements(count, copies)), (
                domains
            )


@settings(max_examples=60)
@given(st.sampled_from(SHAPES), st.data())
def test_a_replacement_changes_the_fewest_shards(shape: tuple[int, int], data: st.DataObject) -> None:
    count, copies = shape
    label = st.integers(0, data.draw(st.sampled_from([2, 3])))
    domains = data.draw(st.lists(label, min_size=count, max_size=count))
    before, groups = planned(domains, copies)
    replaced = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=2, unique=True))
    for place in replaced:
        domains[place] = data.draw(label)
    after, _ = planned(domains, copies, groups)
    least = min(exposed(other, domains) for other in arrangements(count, copies))
    assert exposed(after, domains) == least

    def changed(holders: Holders) -> int:
        return sum(holders[owner] != before[owner] for owner in before)

    if exposed(before, domains) == least:
        assert after == before
    elif least == 0 and len(replaced) == 1:
        assert changed(after) == min(
            changed(other) for other in arrangements(count, copies) if exposed(other, domains) == 0
        )


@given(st.integers(1, 40), st.data())
def test_every_placement_spreads_every_shard(count: int, data: st.DataObject) -> None:
    copies = data.draw(st.integers(1, count))
    nodes = [NodeId(f"n{i}") for i in range(count)]
    domains = {node: f"d{data.draw(st.integers(0, 3))}" for node in nodes if data.draw(st.booleans())}
    planned = placement.plan(nodes, copies, domains)
    assert set(planned.holders) == set(nodes)
    assert sorted(node for group in planned.groups for node in group) == sorted(nodes)
    load = dict.fromkeys(nodes, 0)
    for owner, holders in planned.holders.items():
        assert holders[0] == owner
        assert len(holders) == len(set(holders)) == copies
        for holder in holders:
            load[holder] += 1
    assert set(load.values()) == {copies}, "some node holds more than its share"
    assert all(copies <= len(group) < 2 * copies for group in planned.groups)
