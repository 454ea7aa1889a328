"""Shares on tmpfs: filled by threads of several members, sealed, listed, and used to rebuild a lost shard."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from everstep.protocol.errors import MalformedMessage
from everstep.protocol.ids import Generation, JobName, Rank, RunId, Step
from everstep.protocol.parity import Contribution, pack_contributions, share_owner, unpack_contributions
from everstep.protocol.slot import SlotState, payload_digest
from worker.core.parity import Stripe
from worker.core.slots import Content
from worker.shm.shares import Accumulation, Shares, contributions_of, rebuild
from worker.shm.store import Slot, SlotStore

CHUNK = 64 * 1024
LAYOUT = b"l" * 16
GENERATION = Generation(1)


def content(step: int) -> Content:
    return Content(GENERATION, Step(step))


@dataclass
class Node:
    """The store of one member, and its shares."""

    store: SlotStore
    shares: Shares
    shards: dict[int, Contribution] = field(default_factory=dict)
    """The member's shard by step."""

    @classmethod
    def opened(cls, path: Path) -> Node:
        store = SlotStore(path, memory_bytes=1 << 26)
        store.open_run(JobName("gpt"), RunId("ab" * 16))
        return cls(store, Shares(store, slot_count=2))

    async def capture(self, rank: Rank, step: int, payload: bytes, *, keep: Collection[Content] = ()) -> None:
        if (earlier := self.store.sealed(rank, content(step))) is not None:
            earlier.file.empty()
        index = await self.store.grant(
            rank, content(step), keep=keep, capacity_bytes=CHUNK * 32, layout_hash=LAYOUT, slot_count=2
        )
        assert index is not None
        slot = self.store.shards[rank][index]
        with slot.file.payload(0, len(payload)) as target:
            target[:] = payload
        header = slot.file.header.__class__(
            **{
                name: getattr(slot.file.header, name)
                for name in ("job", "run", "owner_rank", "origin_generation", "step", "state", "capacity_bytes")
            },
            payload_bytes=len(payload),
            index_offset=3,
            index_bytes=5,
            layout_hash=LAYOUT,
        )
        assert await self.store.seal(rank, index, header) == payload_digest(payload)
        self.shards[step] = Contribution(rank, len(payload), payload_digest(payload), LAYOUT, 3, 5)

    def slot(self, owner: Rank, step: int) -> Slot:
        slot = self.store.sealed(owner, content(step))
        assert slot is not None
        return slot


class Group:
    """The members of one stripe, all in this process."""

    def __init__(self, tmpfs: Path, members: int) -> None:
        self.tmpfs = tmpfs
        self.stripe = Stripe(tuple(map(Rank, range(members))), CHUNK)
        self.nodes = {rank: Node.opened(tmpfs / f"node-{rank}") for rank in self.stripe.members}

    async def capture(self, step: int, payloads: Mapping[Rank, bytes], *, keep: Collection[Content] = ()) -> None:
        for rank, payload in payloads.items():
            await self.nodes[rank].capture(rank, step, payload, keep=keep)

    async def begin(
        self, rank: Rank, holder: Rank, step: int, *, keep: Collection[Content] = ()
    ) -> Accumulation | None:
        return await self.nodes[holder].shares.begin(
            self.stripe, holder, content(step), self.nodes[rank].shards[step], keep=keep, capacity_bytes=CHUNK * 32
        )

    async def contribute(self, rank: Rank, holder: Rank, step: int, *, keep: Collection[Content] = ()) -> bytes | None:
        """Send the missing chunks of a contribution, each twice, over four threads."""
        accumulation = await self.begin(rank, holder, step, keep=keep)
        assert accumulation is not None
        shard = self.nodes[rank].shards[step]
        slot = self.nodes[rank].slot(rank, step)
        version = accumulation.version

        def send(chunk: int) -> None:
            end = min((chunk + 1) * CHUNK, shard.payload_bytes)
            with slot.file.payload(chunk * CHUNK, end) as data:
                assert accumulation.take(rank, chunk, data, version=version)

        with ThreadPoolExecutor(4) as threads:
            loop = asyncio.get_running_loop()
            await asyncio.gather(
                *(loop.run_in_executor(threads, send, chunk) for chunk in accumulation.missing(shard) * 2)
            )
        return await self.nodes[holder].shares.finish(accumulation, shard)

    async def protect(self, step: int, *, keep: Collection[Content] = ()) -> None:
        """Let all members contribute to each share at the same time."""
        for holder in self.stripe.members:
            others = [rank for rank in self.stripe.members if rank != holder]
            sealed = await asyncio.gather(*(self.contribute(rank, holder, step, keep=keep) for rank in others))
            assert sum(each is not None for each in sealed) == 1

    async def restore(self, lost: Rank, step: int, *, is_right: bool = True) -> Slot | None:
        """Replace a node, and rebuild its shard from the inventories of the others."""
        survivors = {rank: node for rank, node in self.nodes.items() if rank != lost}
        named = {
            each
            for rank, node in survivors.items()
            for share in node.shares.inventory(rank)
            if share.step == step
            for each in share.contributions
            if each.rank == lost
        }
        assert len(named) == 1
        fresh = Node.opened(self.tmpfs / f"replacement-{lost}")

        def read(owner: Rank, begin: int, end: int) -> memoryview:
            holder = owner if owner in survivors else next(rank for rank in survivors if share_owner(rank) == owner)
            file = survivors[holder].slot(owner, step).file
            size = file.header.payload_bytes
            return file.payload(min(begin, size), min(end, size))

        is_sealed = await rebuild(
            fresh.store, self.stripe, named.pop(), content(step), read=read, keep=(), slot_count=2
        )
        assert is_sealed == is_right
        return fresh.slot(lost, step) if is_sealed else None


def payloads(members: int, seed: int) -> dict[Rank, bytes]:
    rng = random.Random(seed)
    return {Rank(rank): rng.randbytes(rng.randint(1, 12 * CHUNK)) for rank in range(members)}


@pytest.mark.parametrize("members", [2, 3, 4, 6])
async def test_each_lost_shard_is_rebuilt_bit_identical(tmpfs: Path, members: int) -> None:
    group, state = Group(tmpfs, members), payloads(members, members)
    await group.capture(7, state)
    await group.protect(7)
    for lost, payload in state.items():
        slot = await group.restore(lost, 7)
        assert slot is not None
        with slot.file.payload() as rebuilt:
            assert bytes(rebuilt) == payload
        original = group.nodes[lost].slot(lost, 7).file.header
        found = slot.file.header
        assert (found.payload_digest, found.layout_hash) == (original.payload_digest, original.layout_hash)
        assert (found.index_offset, found.index_bytes) == (original.index_offset, original.index_bytes)


async def test_a_damaged_share_rebuilds_nothing(tmpfs: Path) -> None:
    group = Group(tmpfs, 3)
    await group.capture(7, {Rank(rank): bytes(CHUNK * 4) for rank in range(3)})
    await group.protect(7)
    with group.nodes[Rank(1)].slot(share_owner(Rank(1)), 7).file.payload(5, 6) as byte:
        byte[0] ^= 1
    assert await group.restore(Rank(0), 7, is_right=False) is None
    assert await group.restore(Rank(2), 7, is_right=False) is None


async def test_the_share_of_the_committed_step_stays_while_the_next_one_accumulates(tmpfs: Path) -> None:
    group, keep = Group(tmpfs, 3), [content(7)]
    states = {step: payloads(3, step) for step in (6, 7, 8)}
    for step in (6, 7):
        await group.capture(step, states[step])
        await group.protect(step)
    await group.capture(8, states[8], keep=keep)
    assert await group.contribute(Rank(1), Rank(0), 8, keep=keep) is None
    slot = await group.restore(Rank(2), 7)
    assert slot is not None
    with slot.file.payload() as rebuilt:
        assert bytes(rebuilt) == states[7][Rank(2)]
    assert await group.begin(Rank(2), Rank(0), 6, keep=keep) is None
    assert await group.contribute(Rank(2), Rank(0), 8, keep=keep) is not None


async def test_another_shard_of_the_same_step_empties_the_share(tmpfs: Path) -> None:
    group = Group(tmpfs, 3)
    await group.capture(7, payloads(3, 1))
    assert await group.contribute(Rank(1), Rank(0), 7) is None
    earlier = await group.begin(Rank(1), Rank(0), 7)
    assert earlier is not None
    version = earlier.version
    await group.nodes[Rank(1)].capture(Rank(1), 7, b"recaptured" * 20_000)
    assert await group.begin(Rank(1), Rank(0), 7) is earlier
    with memoryview(b"of the first capture") as late:
        assert not earlier.take(Rank(2), 1, late, version=version)
    assert await group.contribute(Rank(2), Rank(0), 7) is None
    assert await group.contribute(Rank(1), Rank(0), 7) is not None
    for rank, holder in ((0, 1), (2, 1), (0, 2), (1, 2)):
        await group.contribute(Rank(rank), Rank(holder), 7)
    slot = await group.restore(Rank(1), 7)
    assert slot is not None
    with slot.file.payload() as rebuilt:
        assert bytes(rebuilt) == b"recaptured" * 20_000


async def test_a_share_of_an_earlier_agent_counts_if_it_is_sealed_and_is_filled_again_if_not(tmpfs: Path) -> None:
    group = Group(tmpfs, 3)
    await group.capture(7, payloads(3, 1))
    await group.protect(7)
    await group.capture(8, payloads(3, 2), keep=[content(7)])
    assert await group.contribute(Rank(1), Rank(0), 8, keep=[content(7)]) is None
    first = group.nodes[Rank(0)]
    first.store.close()
    group.nodes[Rank(0)] = again = Node.opened(tmpfs / "node-0")
    again.shards = first.shards
    assert again.shares.has(Rank(0), content(7), group.nodes[Rank(1)].shards[7])
    assert not again.shares.has(Rank(0), content(7), group.nodes[Rank(1)].shards[8])
    accumulation = await group.begin(Rank(2), Rank(0), 8, keep=[content(7)])
    assert accumulation is not None
    assert len(accumulation.missing(group.nodes[Rank(1)].shards[8])) > 0
    assert await group.contribute(Rank(2), Rank(0), 8, keep=[content(7)]) is None
    assert await group.contribute(Rank(1), Rank(0), 8, keep=[content(7)]) is not None


async def test_an_index_names_the_contributions_in_order(tmpfs: Path) -> None:
    group = Group(tmpfs, 3)
    await group.capture(7, payloads(3, 1))
    await group.protect(7)
    slot = group.nodes[Rank(1)].slot(share_owner(Rank(1)), 7)
    assert slot.view.state is SlotState.SEALED
    assert contributions_of(slot.file) == (group.nodes[Rank(0)].shards[7], group.nodes[Rank(2)].shards[7])


def test_bytes_that_are_no_index_are_refused() -> None:
    one = Contribution(Rank(1), 1, b"d" * 16, LAYOUT, 0, 0)
    assert unpack_contributions(pack_contributions([one])) == (one,)
    with pytest.raises(MalformedMessage, match="index of a share"):
        unpack_contributions(pack_contributions([one])[:-1])
