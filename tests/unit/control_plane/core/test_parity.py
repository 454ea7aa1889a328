from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import pytest

from control_plane.core import domain_loss, parity, placement, slot_memory
from control_plane.core.observed.specs import JobSettings
from control_plane.errors import ImpossiblePlacement
from everstep.protocol.ids import NodeId
from everstep.protocol.slot import CHUNK_BYTES

GIB = 2**30


def nodes(count: int) -> list[NodeId]:
    return [NodeId(f"n{i:02}") for i in range(count)]


def contradicted(group_size: int = 4, **changes: object) -> dict[str, str]:
    settings = {"copies": 1, "node_count": 8, **changes}
    return dict(parity.contradictions(group_size, **settings))  # type: ignore[arg-type]


def test_a_job_of_whole_groups_contradicts_nothing() -> None:
    assert contradicted() == {}
    assert contradicted(node_count=4) == {}
    assert contradicted(min_node_count=4) == {}


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"copies": 2}, "Protection.Copies", "not 2; remove Copies"),
        ({"node_count": 3}, "Protection.ParityGroupSize", "NodeCount is 3. Lower ParityGroupSize"),
        ({"min_node_count": 3}, "ElasticConfig.MinNodeCount", "MinNodeCount is 3. Raise MinNodeCount or lower"),
    ],
)
def test_each_contradiction_names_its_field_and_the_remedy(changes: dict[str, object], field: str, words: str) -> None:
    found = contradicted(**changes)
    assert found.keys() == {field}
    assert words in found[field]


@pytest.mark.parametrize("group_size", range(2, 9))
def test_groups_have_the_sizes_of_the_placement(group_size: int) -> None:
    for count in range(group_size, 4 * group_size):
        groups = placement.plan(nodes(count), group_size).groups
        assert parity.group_sizes(count, group_size) == tuple(map(len, groups))


@pytest.mark.parametrize("group_size", [2, 3, 4, 5])
def test_the_probability_equals_an_enumeration_of_all_losses(group_size: int) -> None:
    for count in range(group_size, 12):
        groups = placement.plan(nodes(count), group_size).groups
        losses = parity.fatal_losses(groups, ())
        for lost in range(count + 1):
            sets = list(combinations(nodes(count), lost))
            survived = sum(all(len(set(group) & set(dead)) < 2 for group in groups) for dead in sets) / len(sets)
            assert parity.recovery_probability(count, group_size, lost) == survived
            assert domain_loss.recovery_probability(losses, {}, lost) == survived


def test_a_probability_needs_a_whole_group() -> None:
    for group_size, lost in ((5, 1), (1, 1), (4, 5)):
        with pytest.raises(ImpossiblePlacement):
            parity.recovery_probability(4, group_size, lost)


def test_a_group_with_an_incomplete_member_survives_no_loss() -> None:
    groups = (nodes(3), nodes(6)[3:])
    losses = parity.fatal_losses(groups, {NodeId("n01")})
    assert losses[:3] == (("n00",), ("n01",), ("n02",))
    assert domain_loss.recovery_probability(losses, {}, 1) == 0.5


def test_a_domain_with_two_members_of_a_group_is_fatal() -> None:
    losses = parity.fatal_losses((nodes(3), nodes(6)[3:]), ())
    domains = {NodeId("n00"): "rack0", NodeId("n01"): "rack1", NodeId("n03"): "rack0"}
    assert domain_loss.fatal_domains(losses, domains) == ()
    assert domain_loss.fatal_domains(losses, {**domains, NodeId("n05"): "rack0"}) == ("rack0",)


SETTINGS = JobSettings(node_count=8, ranks_per_node=2, copies=1)


@pytest.mark.parametrize(
    ("settings", "ratio", "slots"),
    [
        (replace(SETTINGS, copies=2), Fraction(4), 8),
        (replace(SETTINGS, copies=3, third_slot=True), Fraction(9), 18),
        (replace(SETTINGS, parity_group_size=2), Fraction(4), 8),
        (replace(SETTINGS, parity_group_size=4), Fraction(8, 3), 8),
        (replace(SETTINGS, parity_group_size=8, third_slot=True), Fraction(24, 7), 12),
    ],
)
def test_the_memory_of_slots(settings: JobSettings, ratio: Fraction, slots: int) -> None:
    assert slot_memory.memory_ratio(settings) == ratio
    assert slot_memory.slots_per_node(settings) == slots
    assert slot_memory.needed_bytes(settings, 1001) == -(-ratio * 2002 // 1)


@pytest.mark.parametrize("group_size", [None, 2, 4, 8])
def test_the_slots_of_the_largest_shard_fit(group_size: int | None) -> None:
    settings = replace(SETTINGS, parity_group_size=group_size)
    largest = slot_memory.largest_shard_bytes(settings, 64 * GIB)
    shares = 0 if group_size is None else -(-largest // (CHUNK_BYTES * (group_size - 1))) * CHUNK_BYTES
    used = 2 * 2 * (largest + shares)
    assert 64 * GIB - 2 * 2 * 3 * CHUNK_BYTES < used <= 64 * GIB
    assert slot_memory.largest_shard_bytes(replace(SETTINGS, parity_group_size=4), 1000) == 0
