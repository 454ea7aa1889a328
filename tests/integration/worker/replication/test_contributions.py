"""A member of a stripe contributes to the share of one holder over real sessions. Tests play the third member."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everstep.protocol.ids import Rank, Step
from everstep.protocol.parity import MAX_SHARD_BYTES, Contribution
from everstep.protocol.peer_messages import BeginShard, EndShard, ShardDigests, ShardRefused, ShardWanted
from everstep.protocol.rank_messages import Vote
from everstep.protocol.slot import payload_chunk_digests, payload_digest
from tests.integration.worker.replication.pair import GENERATION, HOLDER, LAYOUT, RANK, Pair, content
from worker.core.parity import Share
from worker.core.rounds import NONE
from worker.replication.receiver import ReplicaReceiver
from worker.replication.tcp import TcpSession
from worker.shm.shares import Shares

pytestmark = pytest.mark.integration

HOLDING, THIRD = Rank(1), Rank(2)


class Stripe(Pair):
    """Rank 0 contributes to the share that rank 1 holds. The test plays rank 2."""

    def __init__(self, tmpfs: Path) -> None:
        super().__init__(tmpfs, has_parity=True)
        self.shares = Shares(self.holder_store, {HOLDING: (RANK, HOLDING, THIRD)}, keep=self._keep, slot_count=2)
        self.receiver = ReplicaReceiver(
            self.holder_store, held_ranks=[], keep=self._keep, slot_count=2, shares=self.shares
        )

    def share(self, step: int) -> Share:
        """Return the holder's unsealed share of a step."""
        found = self.shares.accumulation(HOLDING, content(step))
        return Share(frozenset()) if found is None else found.share

    async def contribute(self, step: int, digest: bytes = b"d" * 16) -> None:
        """Add the contribution of rank 2, whose only chunk belongs to the share of rank 0."""
        shard = Contribution(
            rank=THIRD, payload_bytes=100, digest=digest, layout_hash=LAYOUT, index_offset=0, index_bytes=0
        )
        begun = await self.shares.begin(content(step), shard, shard_bytes=self.payload_bytes, committed=NONE)
        assert begun is not None
        self.shares.finish(begun[0], shard)

    async def offer(self, data: bytes, *, capacity_bytes: int) -> TcpSession:
        """Offer a shard of rank 2 for step 1 over a real session."""
        session = await self.dial(rank=THIRD)
        await session.receive()
        begin = BeginShard(
            transfer=1,
            owner_rank=THIRD,
            origin_generation=GENERATION,
            step=Step(1),
            payload_bytes=len(data),
            capacity_bytes=capacity_bytes,
            index_offset=0,
            index_bytes=0,
            layout_hash=LAYOUT,
            committed=NONE,
        )
        await session.send(
            begin,
            ShardDigests(transfer=1, first=0, chunk_digests=payload_chunk_digests(data)),
            EndShard(transfer=1, digest=payload_digest(data)),
        )
        return session


@pytest.fixture
async def stripe(tmpfs: Path) -> AsyncIterator[Stripe]:
    stripe = Stripe(tmpfs)
    stripe.listen()
    yield stripe
    await stripe.shares.close()
    await stripe.close()


async def test_a_member_votes_when_the_share_contains_every_contribution(stripe: Stripe) -> None:
    stripe.send()
    stripe.hear(-1, 1)
    await stripe.capture(1)
    await stripe.until(lambda: RANK in stripe.share(1).complete)
    assert stripe.shard.vote is Vote.NONE
    await stripe.contribute(1)
    await stripe.until(lambda: stripe.shard.vote is Vote.ACKED)


async def test_a_member_cancels_the_contribution_of_an_abandoned_step(stripe: Stripe) -> None:
    stripe.send()
    stripe.hear(-1, 1)
    await stripe.capture(1)
    await stripe.until(lambda: RANK in stripe.share(1).complete)
    stripe.hear(-1, 2)
    await stripe.capture(2)
    await stripe.until(lambda: RANK in stripe.share(2).complete)
    await stripe.contribute(2)
    await stripe.until(lambda: stripe.shard.vote is Vote.ACKED)


async def test_a_member_contributes_again_if_another_member_offers_another_shard(stripe: Stripe) -> None:
    stripe.send()
    stripe.hear(-1, 1)
    await stripe.capture(1)
    await stripe.contribute(1)
    await stripe.until(lambda: (HOLDER, 1) in stripe.shard.held)
    data = b"recaptured"
    other = await stripe.offer(data, capacity_bytes=stripe.payload_bytes)
    await stripe.until(lambda: (HOLDER, 1) not in stripe.shard.held)
    await stripe.until(lambda: (HOLDER, 1) in stripe.shard.held)
    async with asyncio.timeout(20):
        while isinstance(answer := await other.receive(), ShardWanted):
            pass
    other.close()
    assert dict(stripe.shares.inventory(THIRD)) == {content(1): payload_digest(data)}
    assert type(answer).__name__ in ("PreparingShard", "ShardSealed")


async def test_a_member_drops_a_holder_whose_share_lacks_a_member_that_is_not_connected(stripe: Stripe) -> None:
    stripe.send(deadline_seconds=0.3)
    stripe.hear(-1, 1)
    await stripe.capture(1)
    await stripe.until(lambda: stripe.shard.vote is Vote.ACKED)
    assert stripe.shard.view == frozenset()
    await stripe.contribute(1)
    await stripe.until(lambda: (HOLDER, 1) in stripe.shard.held)


async def test_a_member_does_not_wait_for_a_member_whose_shard_is_refused(stripe: Stripe) -> None:
    other = await stripe.offer(b"too large", capacity_bytes=MAX_SHARD_BYTES + 1)
    refused = await other.receive()
    assert isinstance(refused, ShardRefused)
    assert refused.reason.startswith("parity protects shards of at most 137,438,953,472 bytes")
    stripe.send(deadline_seconds=0.3)
    stripe.hear(-1, 1)
    await stripe.capture(1)
    await stripe.until(lambda: stripe.shard.vote is Vote.ACKED)
    assert stripe.shard.view == frozenset()
    other.close()
