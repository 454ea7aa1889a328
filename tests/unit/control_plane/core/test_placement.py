from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from fractions import Fraction
from math import comb

import pytest

from control_plane.core import placement
from control_plane.core.separation import Group, holders_in, separate
from control_plane.errors import ImpossiblePlacement
from everstep.protocol.ids import NodeId


def nodes(count: int) -> list[NodeId]:
    return [NodeId(f"n{i}") for i in range(count)]


def test_the_example_of_the_paper() -> None:
    planned = placement.plan(nodes(5), 2)
    assert planned.groups == (("n0", "n1"), ("n2", "n3", "n4"))
    assert planned.holders == {
        "n0": ("n0", "n1"),
        "n1": ("n1", "n0"),
        "n2": ("n2", "n3"),
        "n3": ("n3", "n4"),
        "n4": ("n4", "n2"),
    }


@pytest.mark.parametrize(("lost", "expected"), [(1, 1.0), (2, 0.9333), (3, 0.8), (4, 0.6154)])
def test_published_and_corrected_probabilities(lost: int, expected: float) -> None:
    assert placement.recovery_probability(16, 2, lost) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(("count", "expected"), [(32, 0.9677), (64, 0.9841), (128, 0.9921), (1000, 0.9990)])
def test_large_fleets(count: int, expected: float) -> None:
    assert placement.recovery_probability(count, 2, 2) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("count", range(1, 11))
def test_probabilities_against_brute_force(count: int) -> None:
    for copies in range(1, count + 1):
        holders = [
            sum(1 << int(node[1:]) for node in held) for held in placement.plan(nodes(count), copies).holders.values()
        ]
        sets, survived = [0] * (count + 1), [0] * (count + 1)
        for dead in range(1 << count):
            sets[dead.bit_count()] += 1
            survived[dead.bit_count()] += all(dead & held != held for held in holders)
        assert [placement.recovery_probability(count, copies, lost) for lost in range(count + 1)] == [
            ways / every for ways, every in zip(survived, sets, strict=True)
        ]


@pytest.mark.parametrize(("copies", "lost", "fatal"), [(2, 2, 5000), (3, 3, 3332 + 4)])
def test_ten_thousand_nodes(copies: int, lost: int, fatal: int) -> None:
    """The recovery probability is exact for 10,000 nodes that lose as many nodes as each shard has copies.

    Such a loss destroys a shard only if all lost nodes are in one group. With three copies, the last four nodes form a
    ring. A loss of any three of these four nodes destroys a shard.
    """
    assert placement.recovery_probability(10_000, copies, lost) == float(1 - Fraction(fatal, comb(10_000, lost)))


def test_more_losses_are_never_better() -> None:
    odds = [placement.recovery_probability(301, 2, lost) for lost in range(302)]
    assert odds == sorted(odds, reverse=True)
    assert odds[0] == odds[1] == 1.0


def test_a_replacement_takes_over_the_lost_nodes_part() -> None:
    before = placement.plan(nodes(7), 3)
    after = placement.plan([NodeId("new") if node == "n4" else node for node in nodes(7)], 3)

    def renamed(held: tuple[NodeId, ...]) -> tuple[str, ...]:
        return tuple("new" if node == "n4" else node for node in held)

    assert {renamed((owner,))[0]: renamed(held) for owner, held in before.holders.items()} == after.holders


def test_groups_span_domains_where_there_are_enough() -> None:
    domains = {NodeId(f"n{i}"): f"rack{i // 4}" for i in range(8)}
    planned = placement.plan(nodes(8), 2, domains)
    assert all(len({domains[node] for node in group}) == 2 for group in planned.groups)


@pytest.mark.parametrize("copies", [2, 3, 4])
@pytest.mark.parametrize("sizes", [(4, 1, 1, 1, 1), (6, 6, 6, 6), (5, 4, 3, 2, 1, 1), (2, 2, 2, 2, 2)])
def test_every_group_has_as_many_domains_as_copies_if_no_domain_is_too_large(
    sizes: tuple[int, ...], copies: int
) -> None:
    domains = dict(
        zip(nodes(sum(sizes)), [f"rack{rack}" for rack, size in enumerate(sizes) for _ in range(size)], strict=True)
    )
    planned = placement.plan(nodes(sum(sizes)), copies, domains)
    whole = [group for group in planned.groups if len(group) == copies]
    if max(sizes) <= len(planned.groups):
        assert all(len({domains[node] for node in group}) == copies for group in whole)


def domains_of(labels: str) -> dict[NodeId, str]:
    """Return the failure domain of each of the nodes n0, n1, …: one letter of `labels` per node."""
    return dict(zip(nodes(len(labels)), labels, strict=True))


def places(planned: placement.Placement, names: list[NodeId]) -> list[list[int]]:
    return [[names.index(holder) for holder in planned.holders[name]] for name in names]


def test_a_ring_keeps_its_shards_out_of_a_single_domain() -> None:
    """The placement orders a ring so that no three adjacent nodes share a failure domain.

    Otherwise, these three nodes would be the only holders of a shard, and the loss of their domain would destroy it.
    """
    for labels in ("aaabc", "aaaabc", "aabb"):
        domains = domains_of(labels)
        planned = placement.plan(nodes(len(labels)), 3, domains)
        assert all(len({domains[holder] for holder in holders}) > 1 for holders in planned.holders.values()), labels


@pytest.mark.parametrize(("count", "copies"), [(5, 2), (7, 2), (8, 4), (11, 4), (4, 3)])
def test_groups_are_found_again_in_the_holders_of_a_plan(count: int, copies: int) -> None:
    planned = placement.plan(nodes(count), copies, {node: f"d{i % 3}" for i, node in enumerate(nodes(count))})
    found = placement.groups_of(places(planned, nodes(count)))
    again = placement.plan(nodes(count), copies, None, found)
    assert again.holders == planned.holders


@pytest.mark.parametrize(
    "holders", [[], [[0], [1]], [[0, 1], [1, 2], [2, 1]], [[0, 1], [1]], [[0, 1, 3], [1, 2, 0], [2, 0, 1], [3, 0, 1]]]
)
def test_holders_of_another_kind_have_no_groups(holders: list[list[int]]) -> None:
    assert placement.groups_of(holders) == ()


def test_only_the_vacancy_changes_where_the_replacement_lies_in_another_domain() -> None:
    names, domains = nodes(8), domains_of("aabbccdd")
    before = placement.plan(names, 2, domains)
    after = placement.plan(
        [NodeId("new"), *names[1:]], 2, {**domains, NodeId("new"): "d"}, placement.groups_of(places(before, names))
    )
    kept = {owner: holders for owner, holders in before.holders.items() if names[0] not in holders}
    assert len(kept) == 6
    assert kept.items() <= after.holders.items()
    assert set(after.holders["new"]) == {"new", *before.holders[names[0]][1:]}


def test_a_group_that_would_lie_in_one_domain_takes_one_node_of_one_other_group() -> None:
    names, domains = nodes(64), {node: f"d{i // 4}" for i, node in enumerate(nodes(64))}
    before = placement.plan(names, 2, domains)
    partner = before.holders[names[0]][1]
    domains[NodeId("new")] = domains[partner]
    fresh = [NodeId("new"), *names[1:]]
    after = placement.plan(fresh, 2, domains, placement.groups_of(places(before, names)))
    assert all(len({domains[holder] for holder in holders}) == 2 for holders in after.holders.values())
    changed = [a for a, b in zip(places(before, names), places(after, fresh), strict=True) if set(a) != set(b)]
    assert len(changed) == 4, "the shards of two groups"


@pytest.mark.parametrize(("count", "copies"), [(6, 2), (8, 3)])
def test_groups_of_another_size_are_no_guide(count: int, copies: int) -> None:
    groups = placement.groups_of(places(placement.plan(nodes(6), 3), nodes(6)))
    assert placement.plan(nodes(count), copies, None, groups) == placement.plan(nodes(count), copies)


def test_one_domain_is_better_than_no_plan() -> None:
    planned = placement.plan(nodes(5), 2, dict.fromkeys(nodes(5), "rack"))
    assert sorted(map(len, planned.groups)) == [2, 3]


@pytest.mark.parametrize(("count", "copies"), [(3, 4), (3, 0), (0, 1)])
def test_what_does_not_fit_is_refused_with_the_figures(count: int, copies: int) -> None:
    with pytest.raises(ImpossiblePlacement, match=f"{copies} copies"):
        placement.plan(nodes(count), copies)


def test_a_doubled_node_is_refused() -> None:
    with pytest.raises(ImpossiblePlacement, match="twice"):
        placement.plan([NodeId("a"), NodeId("a")], 2)


def test_impossible_losses_are_refused() -> None:
    with pytest.raises(ImpossiblePlacement):
        placement.recovery_probability(4, 2, 5)


@pytest.mark.parametrize(("count", "group_size"), [(4, 2), (5, 2), (8, 4), (11, 4), (3, 3), (20, 8)])
def test_parity_groups_have_the_sizes_of_the_placement(count: int, group_size: int) -> None:
    groups = placement.parity_groups(nodes(count), group_size)
    assert list(map(len, groups)) == list(map(len, placement.plan(nodes(count), group_size).groups))
    assert sorted(place for group in groups for place in group) == list(range(count))
    assert all(list(group) == sorted(group) for group in groups)


def test_new_parity_groups_use_as_many_domains_as_possible() -> None:
    domains = {node: f"rack{i // 4}" for i, node in enumerate(nodes(12))}
    for group in placement.parity_groups(nodes(12), 3, domains):
        assert len({domains[nodes(12)[place]] for place in group}) == 3


def test_parity_groups_stay_where_the_replacement_lies_in_another_domain() -> None:
    before = ((0, 2), (1, 3))
    domains = dict.fromkeys(nodes(4), "rack")
    assert placement.parity_groups(nodes(4), 2, domains, before) == before


@pytest.mark.parametrize("before", [((0, 1, 2),), ((0, 1), (2, 3, 4)), ((0, 1), (1, 2)), ()])
def test_parity_groups_of_another_size_are_no_guide(before: tuple[tuple[int, ...], ...]) -> None:
    assert placement.parity_groups(nodes(4), 2, before=before) == ((0, 1), (2, 3))


@pytest.mark.parametrize(("count", "group_size"), [(3, 4), (4, 1)])
def test_parity_groups_that_do_not_fit_are_refused(count: int, group_size: int) -> None:
    with pytest.raises(ImpossiblePlacement, match=f"groups of {group_size} nodes do not fit {count} nodes"):
        placement.parity_groups(nodes(count), group_size)


def layouts(seed: int, count: int) -> Iterator[tuple[list[Group], int, list[str]]]:
    """Yield random groups, the number of copies, and the failure domain of each node. Half of the nodes share one."""
    rng = random.Random(seed)
    for _ in range(count):
        copies = rng.choice((2, 3))
        order = list(range(rng.randrange(2 * copies, 16)))
        rng.shuffle(order)
        starts = range(0, len(order) // copies * copies, copies)
        groups = [tuple(order[start : start + copies]) for start in starts]
        groups[-1] = tuple(order[starts[-1] :])
        yield groups, copies, [rng.choice("aabc") for _ in order]


def test_an_exchange_counts_the_shards_that_earlier_exchanges_changed() -> None:
    groups = [(4, 0, 3), (1, 7, 10), (2, 6, 5, 9, 8)]
    assert exposed_and_changed([(groups, 3, [*"ccabaaabaac"])]) == (0, 8)


@pytest.mark.parametrize(("seed", "exposed", "changed"), [(0, 23, 158), (1, 16, 120)])
def test_few_shards_move_so_that_few_are_exposed(seed: int, exposed: int, changed: int) -> None:
    """A better search has lower totals."""
    assert exposed_and_changed(layouts(seed, 40)) == (exposed, changed)


def exposed_and_changed(cases: Iterable[tuple[list[Group], int, list[str]]]) -> tuple[int, int]:
    """Return how many shards have all holders in one domain after the search, and how many have other holders."""
    found = [0, 0]
    for groups, copies, domains in cases:
        before, after = (
            {node: {*holders_in(group, place, copies)} for group in each for place, node in enumerate(group)}
            for each in (groups, separate(groups, copies, domains))
        )
        found[0] += sum(len({domains[holder] for holder in held}) == 1 for held in after.values())
        found[1] += sum(after[node] != held for node, held in before.items())
    return found[0], found[1]


def test_no_holders_have_no_groups() -> None:
    assert placement.groups_of([]) == placement.groups_of([[0], [1]]) == ()
    assert placement.groups_of([[0, 1], [1, 0]]) == ((0, 1),)
    assert placement.groups_of([[0, 1], [1, 2], [2, 0], [3, 4], [4, 3]]) == ((3, 4), (0, 1, 2)), "the ring is last"


@pytest.mark.parametrize(("copies", "lost"), [(1, 0), (4, 4), (1, 4)])
def test_the_bounds_of_losses_are_possible(copies: int, lost: int) -> None:
    assert placement.recovery_probability(4, copies, lost) == float(lost == 0)
