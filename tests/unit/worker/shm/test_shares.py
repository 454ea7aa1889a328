"""Threads fill shares on tmpfs with contributions of several members.

A share is emptied if a member announces other content of its shard for the same step.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from msgspec import structs

from everstep.protocol.ids import FIRST_STEP, Generation, JobName, Rank, RunId, Step
from everstep.protocol.parity import Contribution, share_owner
from everstep.protocol.slot import SlotState, digest, payload_digest
from worker.core.parity import Stripe
from worker.core.slots import Content
from worker.errors import NoRoom
from worker.shm import combining
from worker.shm.held_files import HeldFiles
from worker.shm.shares import Accumulation, Membership, Shares
from worker.shm.store import SlotStore

CHUNK = 64 * 1024
MEMBERS = (Rank(0), Rank(1), Rank(2))
STRIPE = Stripe(MEMBERS, CHUNK)
LARGEST = 12 * CHUNK


def content(step: int) -> Content:
    return Content(Generation(1), Step(step))


def contribution(rank: int, data: bytes) -> Contribution:
    return Contribution(
        rank=Rank(rank),
        payload_bytes=len(data),
        digest=payload_digest(data),
        layout_hash=b"l" * 16,
        index_offset=3,
        index_bytes=5,
    )


@dataclass
class Holder:
    """The node of rank 0, which holds a share of ranks 1 and 2."""

    store: SlotStore
    shares: Shares
    kept: set[Content]
    emptied_count: int = 0
    """Number of announcements that have emptied a share, with the contributions of other members in it."""

    @classmethod
    def opened(cls, files: HeldFiles, stripe: Stripe = STRIPE, *, inline_digest_bytes: int = 1 << 20) -> Holder:
        store = SlotStore(files, memory_bytes=1 << 26, inline_digest_bytes=inline_digest_bytes)
        kept = set[Content]()
        store.open_run(JobName("gpt"), RunId("ab" * 16))
        store.settle_copiers(share_owner(Rank(0)))
        shares = Shares(store, {Rank(0): stripe.members}, keep=lambda owner, committed: kept, slot_count=2)
        shares.memberships = dict.fromkeys(shares.memberships, Membership(stripe, Rank(0)))
        return cls(store, shares, kept)

    async def begin(self, rank: int, data: bytes, step: int, *, shard_bytes: int = LARGEST) -> Accumulation | None:
        return await self.shares.begin(
            content(step),
            contribution(rank, data),
            shard_bytes=shard_bytes,
            committed=FIRST_STEP,
            on_emptied=self._count_emptied,
        )

    def _count_emptied(self) -> None:
        self.emptied_count += 1

    async def fill(self, rank: int, data: bytes, step: int) -> Accumulation:
        """Write the missing chunks of a contribution, each twice, from four threads."""
        accumulation = await self.begin(rank, data, step)
        assert accumulation is not None
        mine = contribution(rank, data)

        def send(chunk: int) -> None:
            with memoryview(bytearray(data[chunk * CHUNK : (chunk + 1) * CHUNK])) as piece:
                assert accumulation.take(Rank(rank), chunk, piece)

        with ThreadPoolExecutor(4) as threads:
            loop = asyncio.get_running_loop()
            await asyncio.gather(
                *(loop.run_in_executor(threads, send, chunk) for chunk in [*accumulation.missing(mine)] * 2)
            )
        self.shares.finish(accumulation, mine)
        return accumulation

    async def protect(self, shards: Mapping[int, bytes], step: int) -> None:
        for rank, data in shards.items():
            accumulation = await self.fill(rank, data, step)
        assert await accumulation.decided()

    def share(self, step: int) -> bytes:
        slot = self.store.sealed(share_owner(Rank(0)), content(step))
        assert slot is not None
        with slot.file.payload(0, slot.file.header.index_offset) as rows:
            return bytes(rows)

    def steps(self, rank: int) -> Collection[Step]:
        return [each.step for each, _ in self.shares.inventory(Rank(rank))]


def shards(seed: int) -> dict[int, bytes]:
    rng = random.Random(seed)
    return {rank: rng.randbytes(rng.randint(3 * CHUNK, LARGEST)) for rank in (1, 2)}


def expected(data: Mapping[int, bytes]) -> bytes:
    """Return the share of rank 0, computed byte by byte."""
    share = bytearray(STRIPE.share_bytes(Rank(0), {Rank(rank): len(each) for rank, each in data.items()}))
    for rank, each in data.items():
        for row, chunk in enumerate(STRIPE.contributed(Rank(rank), Rank(0), len(each))):
            for place, byte in enumerate(each[chunk * CHUNK : (chunk + 1) * CHUNK], row * CHUNK):
                share[place] ^= byte
    return bytes(share)


async def test_a_share_is_sealed_when_it_contains_every_contribution(files: HeldFiles) -> None:
    holder, state = Holder.opened(files), shards(1)
    first = await holder.fill(1, state[1], 7)
    assert not first.is_over
    assert holder.steps(1) == []
    await holder.protect({2: state[2]}, 7)
    assert first.is_sealed
    assert holder.share(7) == expected(state)
    (record,) = holder.store.inventory()
    assert record.owner_rank == share_owner(Rank(0))
    assert record.contributions == (contribution(1, state[1]), contribution(2, state[2]))
    assert holder.shares.inventory(Rank(1)) == ((content(7), payload_digest(state[1])),)


async def test_the_share_of_the_committed_step_stays_while_the_next_one_accumulates(files: HeldFiles) -> None:
    holder = Holder.opened(files)
    for step in (6, 7):
        await holder.protect(shards(step), step)
    holder.kept.add(content(7))
    await holder.fill(1, shards(8)[1], 8)
    assert holder.share(7) == expected(shards(7))
    assert await holder.begin(2, shards(6)[2], 6) is None, "an outdated offer does not displace a newer step"
    await holder.protect({2: shards(8)[2]}, 8)
    assert holder.share(8) == expected(shards(8))


async def test_a_newer_step_ends_the_accumulation_of_an_abandoned_one(files: HeldFiles) -> None:
    holder = Holder.opened(files)
    await holder.protect(shards(6), 6)
    holder.kept.add(content(6))
    abandoned = await holder.fill(1, shards(7)[1], 7)
    await holder.protect(shards(8), 8)
    assert not await abandoned.decided()
    with memoryview(bytearray(CHUNK)) as late:
        assert not abandoned.take(Rank(2), 1, late)
    assert holder.share(8) == expected(shards(8))


async def test_another_shard_of_the_same_step_empties_the_share(files: HeldFiles) -> None:
    holder, state = Holder.opened(files), shards(1)
    early = await holder.fill(1, state[1], 7)
    again = {1: shards(2)[1], 2: state[2]}
    assert await holder.begin(1, again[1], 7) is not None
    assert holder.emptied_count == 1, "the other members must contribute again"
    assert early.is_over
    await holder.protect(again, 7)
    assert holder.share(7) == expected(again)
    assert await holder.begin(2, shards(3)[2], 7) is not None
    assert holder.emptied_count == 2, "a sealed share is emptied too"
    assert holder.steps(1) == []


async def test_an_outdated_offer_of_another_shard_leaves_the_sealed_share(files: HeldFiles) -> None:
    holder = Holder.opened(files)
    for step in (6, 7):
        await holder.protect(shards(step), step)
    holder.kept.add(content(7))
    assert await holder.begin(1, shards(8)[1], 6) is None
    assert holder.emptied_count == 0
    assert holder.steps(2) == [6, 7]


async def test_members_contribute_again_if_the_emptied_share_has_no_room(files: HeldFiles) -> None:
    holder = Holder.opened(files)
    await holder.protect(shards(7), 7)
    with pytest.raises(NoRoom):
        await holder.begin(1, shards(8)[1], 7, shard_bytes=1 << 30)
    assert holder.emptied_count == 1
    assert holder.steps(2) == []


async def test_a_member_that_contributes_again_during_the_seal_begins_no_second_seal(files: HeldFiles) -> None:
    holder, state = Holder.opened(files, inline_digest_bytes=0), shards(1)
    await holder.fill(1, state[1], 7)
    accumulation = await holder.fill(2, state[2], 7)
    assert await holder.begin(2, state[2], 7) is accumulation
    holder.shares.finish(accumulation, contribution(2, state[2]))
    async with asyncio.timeout(10):
        assert await accumulation.decided()
    slot = holder.store.sealed(share_owner(Rank(0)), content(7))
    assert slot is not None
    assert await holder.store.verify(slot)
    assert holder.share(7) == expected(state)


async def test_a_complete_share_that_gave_way_to_another_step_is_not_sealed(files: HeldFiles) -> None:
    holder = Holder.opened(files)
    await holder.protect(shards(6), 6)
    holder.kept.add(content(6))
    await holder.fill(1, shards(7)[1], 7)
    abandoned = await holder.fill(2, shards(7)[2], 7)  # the seal begins only when the event loop runs again
    newer = await holder.begin(1, shards(8)[1], 8)
    assert newer is not None
    await holder.shares.idle()
    assert not abandoned.is_sealed
    assert newer.slot.is_written_with(content(8))
    await holder.protect(shards(8), 8)
    assert holder.share(8) == expected(shards(8))


async def test_a_larger_shard_gets_a_larger_share(files: HeldFiles) -> None:
    holder, state = Holder.opened(files), shards(1)
    await holder.shares.reserve(Rank(1), CHUNK)
    await holder.protect(state, 7)
    assert holder.share(7) == expected(state)


async def test_an_earlier_agents_share_counts_if_it_is_sealed_and_is_filled_again_if_not(files: HeldFiles) -> None:
    first = Holder.opened(files)
    await first.protect(shards(7), 7)
    first.kept.add(content(7))
    await first.fill(1, shards(8)[1], 8)
    first.store.close()
    again = Holder.opened(files)
    again.kept.add(content(7))
    assert again.steps(1) == again.steps(2) == [7]
    assert again.shares.has(content(7), contribution(1, shards(7)[1]))
    assert not again.shares.has(content(7), contribution(1, shards(8)[1]))
    await again.protect(shards(8), 8)
    assert again.share(8) == expected(shards(8))


async def test_a_share_of_another_stripe_does_not_count(files: HeldFiles) -> None:
    first = Holder.opened(files)
    await first.protect(shards(7), 7)
    first.store.close()
    larger = Holder.opened(files, Stripe((*MEMBERS, Rank(3)), CHUNK))
    assert larger.steps(1) == []
    assert not larger.shares.has(content(7), contribution(1, shards(7)[1]))


async def test_a_damaged_index_rebuilds_nothing(files: HeldFiles) -> None:
    holder = Holder.opened(files)
    await holder.protect(shards(7), 7)
    slot = holder.store.sealed(share_owner(Rank(0)), content(7))
    assert slot is not None
    with slot.file.payload(slot.file.header.index_offset, slot.file.header.index_offset + 1) as first:
        first[0] = 0xC1
    (record,) = holder.store.inventory()
    assert record.contributions == ()
    assert holder.steps(1) == []
    assert record.digest == slot.file.header.payload_digest != digest(b"")
    assert slot.view.state is SlotState.SEALED


async def test_no_call_waits_for_the_import_of_numpy(files: HeldFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, state = Holder.opened(files), shards(7)
    accumulation = await holder.begin(1, state[1], 7)
    assert accumulation is not None
    chunk = min(accumulation.missing(contribution(1, state[1])))
    is_importing, has_begun = threading.Event(), threading.Event()

    def prepare() -> None:
        is_importing.set()
        assert has_begun.wait(10)

    monkeypatch.setattr(combining, "prepare", prepare)
    data = memoryview(bytearray(state[1][chunk * CHUNK : (chunk + 1) * CHUNK]))
    taking = asyncio.create_task(asyncio.to_thread(accumulation.take, Rank(1), chunk, data))
    await asyncio.to_thread(is_importing.wait)
    assert await holder.begin(2, state[2], 7) is accumulation
    has_begun.set()
    assert await taking


async def test_a_share_whose_index_does_not_fit_is_given_up(files: HeldFiles) -> None:
    holder, state = Holder.opened(files), shards(7)
    await holder.fill(1, state[1], 7)
    named = structs.replace(contribution(2, state[2]), payload_bytes=CHUNK, layout_hash=b"l" * LARGEST)
    accumulation = await holder.shares.begin(content(7), named, shard_bytes=LARGEST, committed=FIRST_STEP)
    assert accumulation is not None
    for chunk in accumulation.missing(named):
        assert accumulation.take(Rank(2), chunk, memoryview(bytearray(CHUNK)))
    holder.shares.finish(accumulation, named)
    async with asyncio.timeout(10):
        assert not await accumulation.decided()


async def test_close_ends_unsealed_shares(files: HeldFiles) -> None:
    holder = Holder.opened(files)
    accumulation = await holder.fill(1, shards(7)[1], 7)
    await holder.shares.close()
    assert not await accumulation.decided()
