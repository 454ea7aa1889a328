"""A restore counts a lost shard as available only if its stripe's survivors determine the shard."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.core import parity, placement, recovery
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.parity import Contribution, ShareRecord
from everstep.protocol.plan import SlotRecord

ORIGIN = Generation(1)


def shard(rank: int, step: int) -> SlotRecord:
    return SlotRecord(
        owner_rank=Rank(rank),
        origin_generation=ORIGIN,
        step=Step(step),
        payload_bytes=100 + rank,
        digest=bytes([rank, step]),
        layout_hash=bytes([rank]),
    )


def share(stripe: tuple[Rank, ...], holder: int, step: int) -> ShareRecord:
    named = tuple(
        Contribution(rank, 100 + rank, bytes([rank, step]), bytes([rank]), 0, 0) for rank in stripe if rank != holder
    )
    return ShareRecord(
        holder_rank=Rank(holder),
        origin_generation=ORIGIN,
        step=Step(step),
        payload_bytes=50,
        digest=b"share",
        contributions=named,
    )


class Cluster:
    """A job with all shards and shares of steps 8 and 9 in memory."""

    def __init__(self, nodes: int, group: int, ranks_per_node: int) -> None:
        self.nodes = [NodeId(f"n{number}") for number in range(nodes)]
        groups = placement.plan(self.nodes, group).groups
        self.groups = [[self.nodes.index(node) for node in each] for each in groups]
        self.stripes = parity.stripes(self.groups, ranks_per_node)
        self.owners = [node for node in self.nodes for _ in range(ranks_per_node)]
        ranks = range(len(self.owners))
        stripe_of = {rank: stripe for stripe in self.stripes for rank in stripe}
        self.shards = {
            node: tuple(shard(rank, step) for rank in ranks if self.owners[rank] == node for step in (8, 9))
            for node in self.nodes
        }
        self.shares = {
            node: tuple(
                share(stripe_of[Rank(rank)], rank, step)
                for rank in ranks
                if self.owners[rank] == node
                for step in (8, 9)
            )
            for node in self.nodes
        }

    def lose(self, node: int) -> None:
        del self.shards[self.nodes[node]], self.shares[self.nodes[node]]

    def choose(self) -> recovery.Restore:
        survey = recovery.Survey(
            owners=self.owners,
            inventories=self.shards,
            path={ORIGIN: recovery.UNBOUNDED},
            worlds={ORIGIN: len(self.owners)},
        )
        return recovery.choose(parity.surveyed(survey, self.stripes, self.shares))


SIZES = st.tuples(st.integers(2, 9), st.integers(2, 4), st.integers(1, 2)).filter(lambda sizes: sizes[0] >= sizes[1])


@given(SIZES, st.data())
def test_one_loss_per_group_keeps_the_newest_step(sizes: tuple[int, int, int], data: st.DataObject) -> None:
    cluster = Cluster(*sizes)
    lost = [data.draw(st.sampled_from(group)) for group in cluster.groups if data.draw(st.booleans())]
    for node in lost:
        cluster.lose(node)
    chosen = cluster.choose()
    assert chosen.base_step == 9
    for rank, sources in enumerate(chosen.sources):
        is_lost = cluster.nodes.index(cluster.owners[rank]) in lost
        assert (sources[0].node_id == parity.REBUILT) == is_lost
        assert (sources[0].digest, sources[0].payload_bytes) == (bytes([rank, 9]), 100 + rank)


@given(SIZES, st.data())
def test_two_losses_in_a_group_leave_no_step(sizes: tuple[int, int, int], data: st.DataObject) -> None:
    cluster = Cluster(*sizes)
    for node in data.draw(st.permutations(data.draw(st.sampled_from(cluster.groups))))[:2]:
        cluster.lose(node)
    assert cluster.choose().base_step == 0


@given(SIZES, st.data())
def test_a_missing_share_of_the_newest_step_falls_back_to_the_step_before(
    sizes: tuple[int, int, int], data: st.DataObject
) -> None:
    cluster = Cluster(*sizes)
    lost, other = data.draw(st.permutations(data.draw(st.sampled_from(cluster.groups))))[:2]
    cluster.lose(lost)
    survivor = cluster.nodes[other]
    cluster.shares[survivor] = tuple(each for each in cluster.shares[survivor] if each.step != 9)
    assert cluster.choose().base_step == 8


@given(SIZES, st.data())
def test_a_share_that_names_another_shard_is_not_used(sizes: tuple[int, int, int], data: st.DataObject) -> None:
    cluster = Cluster(*sizes)
    lost, other = data.draw(st.permutations(data.draw(st.sampled_from(cluster.groups))))[:2]
    cluster.lose(lost)
    survivor = cluster.nodes[other]
    cluster.shares[survivor] = tuple(
        each if each.step != 9 else msgspec.structs.replace(each, contributions=each.contributions[1:])
        for each in cluster.shares[survivor]
    )
    assert cluster.choose().base_step == 8


def test_shares_must_agree_on_existing_shards() -> None:
    cluster = Cluster(3, 3, 1)
    cluster.lose(0)
    cluster.shards[cluster.nodes[1]] = tuple(
        msgspec.structs.replace(each, digest=b"recaptured") if each.step == 9 else each
        for each in cluster.shards[cluster.nodes[1]]
    )
    assert cluster.choose().base_step == 8


def test_a_survey_without_losses_does_not_change() -> None:
    cluster = Cluster(4, 4, 2)
    survey = recovery.Survey(
        owners=cluster.owners, inventories=cluster.shards, path={ORIGIN: Step(9)}, worlds={ORIGIN: 8}
    )
    assert parity.surveyed(survey, cluster.stripes, cluster.shares) == replace(survey)


@given(st.lists(st.integers(2, 4), min_size=1, max_size=3), st.data())
def test_the_probability_of_recovery_is_exact(sizes: list[int], data: st.DataObject) -> None:
    group_of = [group for group, size in enumerate(sizes) for _ in range(size)]
    lost_count = data.draw(st.integers(0, len(group_of)))
    losses = list(combinations(group_of, lost_count))
    survived = sum(len(set(lost)) == len(lost) for lost in losses)
    assert parity.recovery_probability(sizes, lost_count) == pytest.approx(survived / len(losses))
