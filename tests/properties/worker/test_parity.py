"""Any one lost shard of a stripe is rebuilt, byte for byte, from the other members' shards and shares.

Contributions arrive chunk by chunk in a random order. Connections break, members send chunks again, and members
announce shards of outdated steps.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.parity import Contribution, pack_contributions
from everstep.protocol.slot import SlotState, digest
from worker.core.parity import CONTRIBUTION_BYTES, Missing, ParityShare, Stripe, parity_bytes_per_node, place
from worker.core.slots import EMPTY, Content, SlotView
from worker.shm import combining

CHUNK = 16
SHARDS = st.lists(st.binary(min_size=1, max_size=200), min_size=2, max_size=6)
GIB = 1 << 30


def contribution(rank: Rank, shard: bytes) -> Contribution:
    return Contribution(
        rank=rank, payload_bytes=len(shard), digest=digest(shard), layout_hash=b"", index_offset=0, index_bytes=0
    )


def chunk_of(shard: bytes, chunk: int) -> bytearray:
    return bytearray(shard[chunk * CHUNK : (chunk + 1) * CHUNK])


def combine(slot: bytearray, row: int, data: bytearray, *, is_begun: bool) -> None:
    with memoryview(slot)[row * CHUNK : (row + 1) * CHUNK] as target, memoryview(data)[: target.nbytes] as source:
        (combining.combine if is_begun else combining.replace)(target, source)


def accumulate(stripe: Stripe, holder: Rank, shards: Mapping[Rank, bytes], rng: random.Random) -> bytearray:
    """Return a holder's share. Every member sends each of its chunks up to three times, in a random order."""
    others = {rank: shard for rank, shard in shards.items() if rank != holder}
    slot = bytearray(rng.randbytes(stripe.share_bytes(holder, {rank: len(shard) for rank, shard in others.items()})))
    share = ParityShare(frozenset(others))
    arrivals = []
    for rank, shard in others.items():
        share = share.begin(contribution(rank, shard))
        for chunk in stripe.contributed(rank, holder, len(shard)):
            arrivals += [(rank, chunk)] * rng.randint(1, 3)
    rng.shuffle(arrivals)
    for rank, chunk in arrivals:
        row = stripe.row_of(chunk)
        if share.accepts(rank, row):
            combine(slot, row, chunk_of(others[rank], chunk), is_begun=share.is_begun(row))
            share = share.apply(rank, row)
    for rank, shard in others.items():
        assert not share.is_complete
        share = share.finish(rank, map(stripe.row_of, stripe.contributed(rank, holder, len(shard))))
    assert share.is_complete
    return slot


@given(SHARDS, st.randoms(use_true_random=False))
def test_any_lost_shard_is_rebuilt_byte_for_byte(payloads: list[bytes], rng: random.Random) -> None:
    shards = {Rank(10 * number): payload for number, payload in enumerate(payloads)}
    stripe = Stripe(tuple(shards), CHUNK)
    shares = {holder: bytes(accumulate(stripe, holder, shards, rng)) for holder in shards}
    for lost, payload in shards.items():
        missing = Missing(stripe, contribution(lost, payload))
        parts = [
            (rank, chunk, is_share)
            for rank in shards
            if rank != lost
            for is_share in (True, False)
            for chunk in missing.wanted(rank, len(shares[rank] if is_share else shards[rank]), is_share=is_share)
        ]
        rng.shuffle(parts)
        rebuilt, begun = bytearray(rng.randbytes(len(payload))), set()
        for rank, chunk, is_share in parts:
            target = missing.chunk_of(rank, chunk, is_share=is_share)
            assert missing.range_of(target)[1] <= len(payload)
            data = chunk_of(shares[rank] if is_share else shards[rank], chunk)
            combine(rebuilt, target, data, is_begun=target in begun)
            begun.add(target)
        assert rebuilt == payload


@given(SHARDS)
def test_each_chunk_is_in_one_share_and_each_row_has_one_chunk_of_a_member(payloads: list[bytes]) -> None:
    shards = {Rank(number): payload for number, payload in enumerate(payloads)}
    stripe = Stripe(tuple(shards), CHUNK)
    for rank, payload in shards.items():
        parts = {holder: stripe.contributed(rank, holder, len(payload)) for holder in shards if holder != rank}
        count = -(-len(payload) // CHUNK)
        assert sorted(chunk for part in parts.values() for chunk in part) == list(range(count))
        for holder, chunks in parts.items():
            assert [stripe.row_of(chunk) for chunk in chunks] == list(range(len(chunks)))
            assert all(stripe.holder_of(rank, chunk) == holder for chunk in chunks)
            assert [stripe.chunk_of(rank, holder, row) for row in range(len(chunks))] == list(chunks)


@given(SHARDS)
def test_a_share_and_its_index_fit_the_reserved_room(payloads: list[bytes]) -> None:
    shards = {Rank(number): payload for number, payload in enumerate(payloads)}
    stripe = Stripe(tuple(shards), CHUNK)
    for holder in shards:
        others = {rank: len(shard) for rank, shard in shards.items() if rank != holder}
        room = stripe.capacity_bytes(max(map(len, payloads))) - CONTRIBUTION_BYTES * stripe.width
        assert stripe.share_bytes(holder, others) <= room


def test_a_packed_contribution_fits_its_room() -> None:
    largest = Contribution(
        rank=Rank((1 << 31) - 1),
        payload_bytes=1 << 62,
        digest=bytes(16),
        layout_hash=bytes(16),
        index_offset=1 << 62,
        index_bytes=1 << 62,
    )
    assert len(pack_contributions([largest] * 2)) <= 2 * CONTRIBUTION_BYTES


@given(st.integers(2, 8), st.integers(1, 40))
def test_shares_of_equal_shards_have_the_documented_size(members: int, rows: int) -> None:
    stripe = Stripe(tuple(map(Rank, range(members))), CHUNK)
    size = rows * (members - 1) * CHUNK
    for holder in stripe.members:
        assert stripe.share_bytes(holder, dict.fromkeys(stripe.others(holder), size)) * (members - 1) == size


@given(st.binary(min_size=1, max_size=50), st.binary(min_size=1, max_size=50))
def test_combine_is_the_xor_of_bytes(one: bytes, other: bytes) -> None:
    target, source = bytearray(one), bytearray(other[: len(one)])
    combining.combine(memoryview(target), memoryview(source))
    assert target == bytes(a ^ b for a, b in zip(one, source, strict=False)) + one[len(source) :]


def test_another_shard_of_a_member_empties_the_share() -> None:
    first, other = contribution(Rank(1), b"first"), contribution(Rank(1), b"other")
    share = ParityShare(frozenset({Rank(1), Rank(2)})).begin(first).begin(contribution(Rank(2), b"2"))
    share = share.apply(Rank(1), 0).finish(Rank(1), [0]).apply(Rank(2), 0)
    assert share.begin(first) == share
    again = share.begin(other)
    assert again.announced == {other}
    assert again.accepts(Rank(2), 0)
    assert not again.is_begun(0)
    assert not again.complete


def test_a_contribution_with_a_missing_chunk_is_not_complete() -> None:
    share = ParityShare(frozenset({Rank(1)})).begin(contribution(Rank(1), b"1")).apply(Rank(1), 0)
    assert not share.finish(Rank(1), [0, 3]).is_complete
    assert share.apply(Rank(1), 3).finish(Rank(1), [0, 3]).is_complete


@pytest.mark.parametrize(
    ("connected", "progressed", "is_progressing"),
    [
        ({1, 2}, set(), True),  # Rank 2 has not begun its contribution, so it may still capture the step.
        ({1}, set(), False),  # Rank 2 is not connected.
        ({1, 2}, {1}, True),
    ],
)
def test_a_complete_member_waits_for_members_that_are_connected(
    connected: set[int], progressed: set[int], is_progressing: bool
) -> None:
    share = ParityShare(frozenset({Rank(1), Rank(2)})).begin(contribution(Rank(1), b"1")).finish(Rank(1), [])
    assert share.is_progressing({*map(Rank, connected)}, {*map(Rank, progressed)}) is is_progressing


def test_a_complete_member_does_not_wait_for_a_contribution_that_has_stopped() -> None:
    share = ParityShare(frozenset({Rank(1), Rank(2)})).begin(contribution(Rank(1), b"1")).finish(Rank(1), [])
    share = share.begin(contribution(Rank(2), b"2"))
    both = {Rank(1), Rank(2)}
    assert not share.is_progressing(both, {Rank(1)})
    assert share.is_progressing(both, {Rank(2)})
    assert share.finish(Rank(2), []).is_progressing(set(), set()), "the holder seals the share"


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
    stripe = Stripe(tuple(map(Rank, range(members))))
    needed = parity_bytes_per_node(stripes=[(stripe, 40 * GIB)], header_bytes=4096, slot_count=2)
    assert needed / (40 * GIB) == pytest.approx(bytes_per_byte, rel=0.001)
