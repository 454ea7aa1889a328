from __future__ import annotations

import random
from itertools import combinations

import pytest

from control_plane.core import domain_loss, placement
from control_plane.errors import ImpossiblePlacement, TooManyCases
from everstep.protocol.ids import NodeId


def nodes(count: int) -> list[NodeId]:
    return [NodeId(f"n{i}") for i in range(count)]


def by_enumeration(planned: placement.Placement, domains: dict[NodeId, str], lost: int) -> float:
    of = {node: domains.get(node, node) for held in planned.holders.values() for node in held}
    sets = list(combinations(sorted(set(of.values())), lost))
    return sum(
        all({of[node] for node in held} - set(dead) for held in planned.holders.values()) for dead in sets
    ) / len(sets)


def test_a_domain_that_has_all_copies_is_fatal() -> None:
    domains = {NodeId(f"n{i}"): f"rack{i // 4}" for i in range(8)}
    spread, blind = placement.plan(nodes(8), 2, domains), placement.plan(nodes(8), 2)
    assert domain_loss.fatal_domains(spread.fatal_losses, domains) == ()
    assert domain_loss.fatal_domains(blind.fatal_losses, domains) == ("rack0", "rack1")
    assert domain_loss.recovery_probability(spread.fatal_losses, domains, 1) == 1.0
    assert domain_loss.recovery_probability(blind.fatal_losses, domains, 1) == 0.0


def test_what_is_not_known_is_not_called_fatal() -> None:
    planned = placement.plan(nodes(4), 1)
    assert domain_loss.fatal_domains(planned.fatal_losses, {NodeId("n0"): "rack"}) == ("rack",)
    assert domain_loss.fatal_domains(planned.fatal_losses, {}) == ()


@pytest.mark.parametrize("seed", range(40))
def test_against_enumeration(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 14)
    copies = rng.randint(1, count)
    racks = rng.randint(1, 9)
    domains = {node: f"rack{rng.randrange(racks)}" for node in nodes(count) if rng.random() < 0.8}
    planned = placement.plan(nodes(count), copies, domains if seed % 2 else None)
    for lost in range(len({domains.get(node, node) for node in nodes(count)}) + 1):
        assert domain_loss.recovery_probability(planned.fatal_losses, domains, lost) == by_enumeration(
            planned, domains, lost
        )


@pytest.mark.parametrize("seed", range(40))
def test_who_is_gone_is_not_lost_again(seed: int) -> None:
    """If some nodes are already lost, the recovery probability describes further losses among the remaining nodes.

    The test compares the probability with an enumeration of all further losses. A shard may already have lost some or
    all of its holders.
    """
    rng = random.Random(seed)
    count = rng.randint(2, 10)
    gone = set(rng.sample(nodes(count), rng.randint(1, min(3, count - 1))))
    planned = placement.plan(nodes(count), rng.randint(1, min(3, count)))
    left = placement.Placement(
        (), {owner: tuple(node for node in held if node not in gone) for owner, held in planned.holders.items()}
    )
    domains = {node: f"rack{rng.randrange(4)}" for node in nodes(count)} if seed % 2 else {}
    there = {domains.get(node, node) for node in nodes(count) if node not in gone}
    assert domain_loss.domain_count(left.fatal_losses, domains) == len(there)
    for lost in range(len(there) + 1):
        assert domain_loss.recovery_probability(left.fatal_losses, domains, lost) == by_enumeration(left, domains, lost)


def test_a_shard_that_nobody_holds_is_lost_already() -> None:
    left = placement.Placement((), {NodeId("n0"): (), NodeId("n1"): (NodeId("n1"), NodeId("n2"))})
    assert [domain_loss.recovery_probability(left.fatal_losses, {}, lost) for lost in (0, 1, 2)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("count", "copies", "lost"), [(16, 2, 2), (16, 2, 4), (17, 2, 5), (11, 3, 6)])
def test_domains_of_one_node_are_nodes(count: int, copies: int, lost: int) -> None:
    planned = placement.plan(nodes(count), copies)
    assert domain_loss.recovery_probability(planned.fatal_losses, {}, lost) == placement.recovery_probability(
        count, copies, lost
    )


def test_a_ring_of_sixteen_recovers_more_often_than_the_paper_says() -> None:
    """For a ring of 16 nodes that loses three, the exact recovery probability is 0.6286.

    Figure 9 of the GEMINI paper shows 0.600. The paper computes a lower bound: it adds the probabilities of all fatal
    losses (union bound), and counts a loss twice if it contains two fatal pairs.
    """
    ring = placement.Placement((), {NodeId(f"n{i}"): (NodeId(f"n{i}"), NodeId(f"n{(i + 1) % 16}")) for i in range(16)})
    assert domain_loss.recovery_probability(ring.fatal_losses, {}, 3) == pytest.approx(0.6286, abs=5e-5)


def test_more_domains_than_there_are_cannot_be_lost() -> None:
    with pytest.raises(ImpossiblePlacement):
        domain_loss.recovery_probability(placement.plan(nodes(4), 2).fatal_losses, {}, 5)


def test_what_takes_too_long_is_refused_and_two_domains_never_do() -> None:
    rng = random.Random(1)
    pairs = [(NodeId(f"n{i}"), NodeId(f"n{rng.randrange(600)}")) for i in range(600)] + [
        (NodeId(f"n{i}x"), NodeId(f"n{i * 7 % 600}")) for i in range(600)
    ]
    tangled = placement.Placement((), {owner: (owner, other) for owner, other in pairs})
    domains = {owner: owner.removesuffix("x") for owner, _ in pairs}
    with pytest.raises(TooManyCases):
        domain_loss.recovery_probability(tangled.fatal_losses, domains, 20)
    assert 0.0 < domain_loss.recovery_probability(tangled.fatal_losses, domains, 2) < 1.0
