"""Any one lost shard of a stripe follows, byte for byte, from the other members' shards and shares.

Contributions arrive chunk by chunk in a random order. Lines break and repeat chunks, and members offer outdated steps.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.parity import Contribution
from everstep.protocol.slot import SlotState, digest
from worker.core.parity import Share, Stripe, parity_bytes_per_node, place
from worker.core.slots import EMPTY, Content, SlotView
from worker.shm.combining import combine

CHUNK = 16
SHARDS = st.lists(st.binary(min_size=1, max_size=200), min_size=2, max_size=6)


def contribution(rank: Rank, shard: bytes) -> Contribution:
    return Contribution(rank, len(shard), digest(shard), b"", 0, 0)


def accumulate(stripe: Stripe, holder: Rank, shards: Mapping[Rank, bytes], rng: random.Random) -> bytearray:
    """Return a holder's share. Every member sends each of its chunks up to three times, in a random order."""
    others = {rank: shard for rank, shard in shards.items() if rank != holder}
    slot = bytearray(stripe.share_bytes(holder, {rank: len(shard) for rank, shard in others.items()}))
    share = Share(frozenset(others))
    arrivals = []
    for rank, shard in others.items():
        share = share.begin(contribution(rank, shard))
        for row, chunk in enumerate(stripe.contributed(rank, holder, len(shard))):
            arrivals += [(rank, row, chunk)] * rng.randint(1, 3)
    rng.shuffle(arrivals)
    for rank, row, chunk in arrivals:
        if share.accepts(rank, chunk):
            with memoryview(slot) as target:
                combine(target[row * CHUNK :], others[rank][chunk * CHUNK : (chunk + 1) * CHUNK])
            share = share.apply(rank, chunk)
    for rank, shard in others.items():
        assert not share.is_complete
        share = share.finish(rank, stripe.contributed(rank, holder, len(shard)))
    assert share.is_complete
    return slot


@given(SHARDS, st.randoms(use_true_random=False))
def test_any_lost_shard_is_rebuilt_byte_for_byte(payloads: list[bytes], rng: random.Random) -> None:
    shards = {Rank(10 * number): payload for number, payload in enumerate(payloads)}
    stripe = Stripe(tuple(shards), CHUNK)
    shares = {holder: accumulate(stripe, holder, shards, rng) for holder in shards}
    for lost, payload in shards.items():
        rebuilt = bytearray(len(payload))
        for piece in stripe.pieces(lost, len(payload)):
            begin, end = piece.chunk * CHUNK, min((piece.chunk + 1) * CHUNK, len(payload))
            assert piece.holder != lost
            with memoryview(rebuilt) as target:
                combine(target[begin:end], shares[piece.holder][piece.row * CHUNK :][: end - begin])
                for rank, chunk in piece.others:
                    combine(target[begin:end], shards[rank][chunk * CHUNK : (chunk + 1) * CHUNK][: end - begin])
        assert digest(rebuilt) == digest(payload)


@given(SHARDS)
def test_each_chunk_is_in_one_share_and_each_row_has_one_chunk_of_a_member(payloads: list[bytes]) -> None:
    shards = {Rank(number): payload for number, payload in enumerate(payloads)}
    stripe = Stripe(tuple(shards), CHUNK)
    for rank, payload in shards.items():
        parts = [set(stripe.contributed(rank, holder, len(payload))) for holder in shards if holder != rank]
        count = -(-len(payload) // CHUNK)
        assert sorted(chunk for part in parts for chunk in part) == list(range(count))
        assert all(
            chunk in stripe.contributed(rank, stripe.holder_of(rank, chunk), len(payload)) for chunk in range(count)
        )


@given(st.integers(2, 8), st.integers(1, 40))
def test_shares_of_equal_shards_take_the_documented_memory(members: int, rows: int) -> None:
    stripe = Stripe(tuple(map(Rank, range(members))), CHUNK)
    size = rows * (members - 1) * CHUNK
    for holder in stripe.members:
        others = {rank: size for rank in stripe.members if rank != holder}
        assert stripe.share_bytes(holder, others) * (members - 1) == size


def test_another_shard_of_a_member_empties_the_share() -> None:
    first, other = contribution(Rank(1), b"first"), contribution(Rank(1), b"other")
    share = Share(frozenset({Rank(1), Rank(2)})).begin(first).begin(contribution(Rank(2), b"2"))
    share = share.apply(Rank(1), 0).finish(Rank(1), [0]).apply(Rank(2), 0)
    assert share.begin(first) == share
    again = share.begin(other)
    assert again.announced == {other}
    assert again.accepts(Rank(2), 0)
    assert not again.complete


def test_a_contribution_with_a_missing_chunk_is_not_complete() -> None:
    share = Share(frozenset({Rank(1)})).begin(contribution(Rank(1), b"1")).apply(Rank(1), 0)
    assert not share.finish(Rank(1), [0, 3]).is_complete
    assert share.apply(Rank(1), 3).finish(Rank(1), [0, 3]).is_complete


def content(step: int) -> Content:
    return Content(Generation(1), Step(step))


def view(state: SlotState, step: int) -> SlotView:
    return SlotView(state, content(step))


def test_members_share_one_slot_and_an_outdated_offer_is_refused() -> None:
    committed, accumulating = view(SlotState.SEALED, 5), view(SlotState.WRITING, 7)
    keep = {content(5)}
    assert place([committed, accumulating], content(7), keep) == 1
    assert place([committed, accumulating], content(6), keep) is None
    assert place([committed, accumulating], content(8), keep) == 1
    assert place([committed, EMPTY], content(6), keep) == 1


def test_an_accumulation_that_must_be_kept_is_not_overwritten() -> None:
    slots = [view(SlotState.WRITING, 5), view(SlotState.SEALED, 4)]
    assert place(slots, content(6), {content(5)}) == 1
    assert place(slots, content(6), {content(5), content(4)}) is None


@pytest.mark.parametrize(("members", "bytes_per_byte"), [(2, 4.0), (3, 3.0), (4, 2.667), (8, 2.286)])
def test_the_memory_of_a_node_has_the_factor_of_its_group(members: int, bytes_per_byte: float) -> None:
    size = 40 << 30
    assert parity_bytes_per_node(members=members, shard_bytes=[size]) / size == pytest.approx(bytes_per_byte, rel=0.001)
