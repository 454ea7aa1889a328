"""Tests of the names of shares and of the index of a share's payload."""

from __future__ import annotations

import pytest
from msgspec import structs

from everstep.protocol.errors import MalformedMessage
from everstep.protocol.ids import NodeId, Rank
from everstep.protocol.parity import (
    Contribution,
    Rebuild,
    Survivor,
    holder_of,
    is_share,
    pack_contributions,
    share_owner,
    stripe_of,
    unpack_contributions,
)
from everstep.protocol.plan import RankPlan

ONE = Contribution(
    rank=Rank(1), payload_bytes=9, digest=b"d" * 16, layout_hash=b"l" * 16, index_offset=5, index_bytes=4
)
THREE = structs.replace(ONE, rank=Rank(3))


def test_the_owner_of_a_share_names_its_holder() -> None:
    assert is_share(share_owner(Rank(7)))
    assert not is_share(Rank(7))
    assert holder_of(share_owner(Rank(7))) == holder_of(Rank(7)) == 7


def test_an_index_lists_contributions_in_order_of_rank() -> None:
    assert unpack_contributions(pack_contributions([THREE, ONE])) == (ONE, THREE)


@pytest.mark.parametrize("index", [b"", b"\xc1", b"\x91\x01", pack_contributions([ONE])[:-1], b"\x91\x81\xa1\xff\x01"])
def test_a_damaged_index_is_malformed(index: bytes) -> None:
    with pytest.raises(MalformedMessage, match="index of a share"):
        unpack_contributions(index)


def test_a_stripe_contains_the_holder_in_order_of_rank() -> None:
    assert stripe_of(Rank(2), [THREE, ONE]) == (1, 2, 3)


def test_the_stripe_of_a_rebuild_contains_the_lost_rank() -> None:
    def survivor(rank: int) -> Survivor:
        return Survivor(
            rank=Rank(rank), node_id=NodeId("n"), shard_bytes=1, shard_digest=b"", share_bytes=1, share_digest=b""
        )

    assert Rebuild(lost=ONE, survivors=(survivor(0), survivor(3))).stripe == (0, 1, 3)


def test_only_the_owner_has_a_copy_with_parity() -> None:
    holders = (NodeId("a"), NodeId("b"))
    assert RankPlan(rank=Rank(0), holders=holders).copy_nodes == holders
    assert RankPlan(rank=Rank(0), holders=holders, stripe=(Rank(0), Rank(1))).copy_nodes == holders[:1]
