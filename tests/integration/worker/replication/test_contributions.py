"""A member of a stripe contributes to the share of one holder over real sessions. Tests play the third member."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from everstep.protocol.codec import Message
from everstep.protocol.ids import Rank, Step
from everstep.protocol.parity import MAX_SHARD_BYTES, Contribution
from everstep.protocol.peer_messages import (
    BeginShard,
    EndShard,
    PreparingShard,
    ShardDigests,
    ShardRefused,
    ShardSealed,
    ShardWanted,
)
from everstep.protocol.rank_messages import Vote
from everstep.protocol.slot import SlotHeader, payload_chunk_digests, payload_digest
from tests.integration.worker.replication.pair import GENERATION, HOLDER, LAYOUT, RANK, Pair, content
from worker.core.parity import ParityShare
from worker.core.rounds import NONE
from worker.replication import streams
from worker.replication.receiver import ReplicaReceiver
from worker.replication.tcp import TcpSession
from worker.shm.held_files import HeldFiles
from worker.shm.shares import Shares
from worker.shm.slot_file import SlotFile

pytestmark = pytest.mark.integration

HOLDING, THIRD = Rank(1), Rank(2)


class Stripe(Pair):
    """A stripe of three ranks: rank 0 contributes to the parity share that rank 1 holds. The test plays rank 2."""

    def __init__(self, tmpfs: Path) -> None:
        super().__init__(tmpfs, has_parity=True)
        self.shares = Shares(self.holder_store, {HOLDING: (RANK, HOLDING, THIRD)}, keep=self._keep, slot_count=2)
        self.receiver = ReplicaReceiver(
            self.holder_store, held_ranks=[], keep=self._keep, slot_count=2, shares=self.shares
        )

    def share(self, step: int) -> ParityShare:
        """Return the holder's unsealed share of a step."""
        found = self.shares.accumulation(HOLDING, content(step))
        return ParityShare(frozenset()) if found is None else found.share

    async def contribute(self, step: int, digest: bytes = b"d" * 16) -> None:
        """Add the contribution of rank 2 to the share of rank 1: a description of its shard, without bytes.

        The shard of rank 2 has only one chunk, which belongs to the share of rank 0.
        """
        shard = Contribution(
            rank=THIRD, payload_bytes=100, digest=digest, layout_hash=LAYOUT, index_offset=0, index_bytes=0
        )
        begun = await self.shares.begin(content(step), shard, shard_bytes=self.payload_bytes, committed=NONE)
        assert begun is not None
        self.shares.finish(begun, shard)

    async def offer(self, data: bytes, *, capacity_bytes: int) -> TcpSession:
        """Announce (`BeginShard`) a shard of rank 2 for step 1 over a real session."""
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
    stripe.apply_announcement(-1, 1)
    await stripe.capture(1)
    await stripe.until(lambda: RANK in stripe.share(1).complete)
    assert stripe.shard.core.vote is Vote.NONE
    await stripe.contribute(1)
    await stripe.until(lambda: stripe.shard.core.vote is Vote.ACKED)


async def test_a_member_cancels_the_contribution_of_an_abandoned_step(stripe: Stripe) -> None:
    stripe.send()
    stripe.apply_announcement(-1, 1)
    await stripe.capture(1)
    await stripe.until(lambda: RANK in stripe.share(1).complete)
    stripe.apply_announcement(-1, 2)
    await stripe.capture(2)
    await stripe.until(lambda: RANK in stripe.share(2).complete)
    await stripe.contribute(2)
    await stripe.until(lambda: stripe.shard.core.vote is Vote.ACKED)


async def test_a_member_contributes_again_if_another_member_offers_another_shard(stripe: Stripe) -> None:
    stripe.send()
    stripe.apply_announcement(-1, 1)
    await stripe.capture(1)
    await stripe.contribute(1)
    await stripe.until(lambda: (HOLDER, 1) in stripe.shard.core.held)
    data = b"recaptured"
    other = await stripe.offer(data, capacity_bytes=stripe.payload_bytes)
    await stripe.until(lambda: (HOLDER, 1) not in stripe.shard.core.held)
    await stripe.until(lambda: (HOLDER, 1) in stripe.shard.core.held)
    async with asyncio.timeout(20):
        while isinstance(answer := await other.receive(), ShardWanted):
            pass
    other.close()
    assert dict(stripe.shares.inventory(THIRD)) == {content(1): payload_digest(data)}
    assert type(answer).__name__ in ("PreparingShard", "ShardSealed")


async def test_a_member_drops_a_holder_whose_share_lacks_a_member_that_is_not_connected(stripe: Stripe) -> None:
    stripe.send(deadline_seconds=0.3)
    stripe.apply_announcement(-1, 1)
    await stripe.capture(1)
    await stripe.until(lambda: stripe.shard.core.vote is Vote.ACKED)
    assert stripe.shard.core.view == frozenset()
    await stripe.contribute(1)
    await stripe.until(lambda: (HOLDER, 1) in stripe.shard.core.held)


async def test_a_member_does_not_wait_for_a_member_whose_shard_is_refused(stripe: Stripe) -> None:
    other = await stripe.offer(b"too large", capacity_bytes=MAX_SHARD_BYTES + 1)
    refused = await other.receive()
    assert isinstance(refused, ShardRefused)
    assert refused.reason.startswith("parity protects shards of at most 137,434,759,168 bytes")
    stripe.send(deadline_seconds=0.3)
    stripe.apply_announcement(-1, 1)
    await stripe.capture(1)
    await stripe.until(lambda: stripe.shard.core.vote is Vote.ACKED)
    assert stripe.shard.core.view == frozenset()
    other.close()


async def test_a_member_waits_for_a_holder_that_creates_the_slots_of_its_share(
    stripe: Stripe, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_free, create = threading.Event(), SlotFile.create

    def slowly(name: str, files: HeldFiles, header: SlotHeader, cancelled: threading.Event) -> SlotFile:
        assert is_free.wait(20)
        return create(name, files, header, cancelled)

    stripe.receiver.preparing_seconds = 0.02
    monkeypatch.setattr(SlotFile, "create", slowly)
    stripe.send(deadline_seconds=0.2)
    stripe.shard.reserve(stripe.payload_bytes, LAYOUT)
    ready = asyncio.create_task(stripe.shard.holders_ready())
    await asyncio.wait([ready], timeout=1.0)  # one second is several times the holder's deadline
    assert not ready.done()
    assert stripe.shard.core.view == {HOLDER}
    is_free.set()
    assert await ready


async def test_a_chunk_on_a_slow_link_counts_as_progress_of_its_member(
    stripe: Stripe, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_all = streams.send_all

    def slowly(line: socket.socket, header: bytes, data: memoryview, taken: Callable[[int], None]) -> None:
        for begin in range(0, data.nbytes, 1000):
            threading.Event().wait(0.1)
            send_all(line, b"" if begin else header, data[begin : begin + 1000], taken)

    monkeypatch.setattr(streams, "send_all", slowly)
    stripe.send()
    stripe.apply_announcement(-1, 1)
    await stripe.capture(1)
    await stripe.until(lambda: bool(stripe.share(1).announced))
    other = await stripe.offer(b"complete", capacity_bytes=stripe.payload_bytes)
    received: list[Message] = []
    async with asyncio.timeout(20):
        while not received or not isinstance(received[-1], ShardSealed):
            received.append(await other.receive())
    other.close()
    assert [type(each) for each in received].count(PreparingShard) >= 3
