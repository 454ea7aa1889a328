"""Tests how the store of a node grants, seals, verifies, pins and adopts slots.

The store never reads beyond the bounds that a slot's header contains.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from everstep.protocol.agent_messages import EndedRanks, PageCommit
from everstep.protocol.ids import Generation, JobName, Rank, RunId, Step
from everstep.protocol.pages import PIECE_BYTES
from everstep.protocol.rank_messages import RANK_WORD_BYTES, AgentHalf, RankHalf, write_rank_half
from everstep.protocol.slot import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    HEADER_BYTES,
    STATE_DIGEST_BYTES,
    SlotHeader,
    SlotState,
    digest,
    pack_header,
    payload_chunk_digests,
    payload_digest,
    unpack_header,
)
from worker.core.slots import Content, slot_bytes_per_node
from worker.core.strays import Strays
from worker.errors import NoRoom
from worker.shm import store as store_module
from worker.shm.chunk_digests import ChunkDigests
from worker.shm.rank_page import RankPage, last_half
from worker.shm.slot_file import SlotFile
from worker.shm.store import INLINE_DIGEST_BYTES, Slot, SlotStore, in_thread

JOB, RUN, OTHER = JobName("gpt"), RunId("ab" * 16), RunId("cd" * 16)
RANK = Rank(0)
LAYOUT = b"l" * 16
CAPACITY = 8192


def content(step: int, origin: int = 1) -> Content:
    return Content(Generation(origin), Step(step))


def opened(
    tmpfs: Path,
    *,
    memory_bytes: int = 1 << 20,
    inline_digest_bytes: int = INLINE_DIGEST_BYTES,
    now: Callable[[], float] = time.monotonic,
) -> SlotStore:
    store = SlotStore(tmpfs / "node", memory_bytes=memory_bytes, inline_digest_bytes=inline_digest_bytes, now=now)
    store.open_run(JOB, RUN)
    return store


async def grant(
    store: SlotStore,
    step: int,
    *,
    keep: Collection[Content] = (),
    capacity: int = CAPACITY,
    slot_count: int = 2,
    rank: Rank = RANK,
) -> int | None:
    return await store.grant(
        rank, content(step), keep=keep, capacity_bytes=capacity, layout_hash=LAYOUT, slot_count=slot_count
    )


def header(store: SlotStore, step: int, size: int = 1000) -> SlotHeader:
    return SlotHeader(
        job=store.job,
        run=RUN,
        owner_rank=RANK,
        origin_generation=Generation(1),
        step=Step(step),
        state=SlotState.WRITING,
        capacity_bytes=max(CAPACITY, size),
        payload_bytes=size,
        layout_hash=LAYOUT,
    )


def payload(step: int, size: int = 1000) -> bytes:
    return (step.to_bytes(2, "big") * size)[:size]


async def fill(
    store: SlotStore, step: int, *, keep: Collection[Content] = (), rank: Rank = RANK, size: int = 1000
) -> Slot:
    """Write and seal a step, and return its slot."""
    index = await grant(store, step, keep=keep, rank=rank, capacity=max(CAPACITY, size))
    assert index is not None
    slot, data = store.shards[rank][index], payload(step, size)
    with slot.file.payload(0, size) as view:
        view[:] = data
    assert await store.seal(rank, index, replace(header(store, step, size), owner_rank=rank)) == payload_digest(data)
    return slot


def on_disk(slot: Slot) -> SlotHeader:
    return unpack_header(slot.file.path.read_bytes()[:HEADER_BYTES])


async def test_a_slot_is_writing_then_sealed_and_its_header_says_so(tmpfs: Path) -> None:
    store = opened(tmpfs)
    index = await grant(store, 1)
    assert index == 0
    slot = store.shards[RANK][0]
    assert on_disk(slot).state is SlotState.WRITING
    assert store.inventory() == ()
    slot = await fill(store, 2)
    assert on_disk(slot) == slot.file.header
    assert (slot.file.header.state, slot.file.header.payload_digest) == (SlotState.SEALED, payload_digest(payload(2)))
    (record,) = store.inventory()
    assert (record.owner_rank, record.origin_generation, record.step, record.digest, record.payload_bytes) == (
        0,
        1,
        2,
        payload_digest(payload(2)),
        1000,
    )
    store.close()


async def test_new_slots_are_made_until_there_are_enough_then_the_oldest_is_overwritten(tmpfs: Path) -> None:
    store = opened(tmpfs)
    first, second = await fill(store, 1), await fill(store, 2)
    assert first is not second
    assert await fill(store, 3, keep={content(2)}) is first
    assert await grant(store, 4, keep={content(2), content(3)}) is None
    assert store.sealed(RANK, content(2)) is second
    assert store.sealed(RANK, content(1)) is None
    assert store.sealed(RANK, content(2, origin=2)) is None
    store.close()


async def test_granting_cancels_and_joins_who_reads_the_old_content(tmpfs: Path) -> None:
    store = opened(tmpfs)
    slot = await fill(store, 1)
    begun, ended = asyncio.Event(), asyncio.Event()

    async def read() -> bool:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return True

    reading = asyncio.create_task(store.reading(slot, read()))
    await begun.wait()
    await fill(store, 2)
    await grant(store, 3, keep={content(2)})
    assert ended.is_set()
    assert slot.file.header.step == 3
    assert await reading is None
    store.close()


async def test_a_seal_that_is_overtaken_by_a_grant_seals_nothing(tmpfs: Path) -> None:
    """If a slot is granted again while the digest for its seal is being computed, the seal has no effect.

    Otherwise, the slot would appear sealed with the older step, but contain bytes of the newer step.
    """
    store = opened(tmpfs, inline_digest_bytes=0)
    index = await grant(store, 1, slot_count=1)
    assert index == 0
    sealing = asyncio.create_task(store.seal(RANK, 0, header(store, 1)))
    slot = store.shards[RANK][0]
    await asyncio.sleep(0)  # let the seal begin to read
    assert slot.readers
    assert await grant(store, 2, slot_count=1) == 0
    assert await sealing is None
    assert (on_disk(slot).state, on_disk(slot).step) == (SlotState.WRITING, 2)
    store.close()


async def test_a_seal_that_is_overtaken_by_a_grant_at_its_very_end_seals_nothing(tmpfs: Path) -> None:
    """If a slot is granted again after its digest is computed, but before its seal, the seal has no effect."""
    store = opened(tmpfs)
    assert await grant(store, 1, slot_count=1) == 0
    sealing = asyncio.create_task(store.seal(RANK, 0, header(store, 1)))
    slot = store.shards[RANK][0]
    await asyncio.sleep(0)  # the task has begun to read the slot
    await asyncio.sleep(0)  # the task has read the whole slot
    assert all(reader.done() for reader in slot.readers)
    assert not sealing.done()
    assert await grant(store, 2, slot_count=1) == 0
    assert await sealing is None
    assert (on_disk(slot).state, on_disk(slot).step) == (SlotState.WRITING, 2)
    store.close()


async def test_a_slot_that_is_being_written_is_not_verified(tmpfs: Path) -> None:
    """The store does not verify a slot that a rank has just begun to write.

    The bytes of such a slot are still undefined. The rank keeps the slot.
    """
    store = opened(tmpfs)
    index = await grant(store, 1)
    assert index is not None
    slot = store.shards[RANK][index]
    assert await store.digests(slot) is None
    assert (on_disk(slot).state, on_disk(slot).step) == (SlotState.WRITING, 1)
    store.close()


async def test_what_was_verified_is_not_said_of_what_the_slot_was_granted_for_at_its_end(tmpfs: Path) -> None:
    store = opened(tmpfs)
    slot = await fill(store, 1)
    slot.digests = None
    verifying = asyncio.create_task(store.verify(slot))
    await asyncio.sleep(0)  # the task has begun to read the slot
    await asyncio.sleep(0)  # the task has read the whole slot
    assert all(reader.done() for reader in slot.readers)
    assert not verifying.done()
    assert await grant(store, 2, slot_count=1) == 0
    assert not await verifying
    assert slot.digests is None
    assert (on_disk(slot).state, on_disk(slot).step) == (SlotState.WRITING, 2)
    store.close()


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("byte", [0, 2 * CHUNK_BYTES - 1, 2 * CHUNK_BYTES, 4 * CHUNK_BYTES - 25])
async def test_every_thread_finds_what_was_flipped_in_its_part(tmpfs: Path, byte: int, threads: int) -> None:
    """The store detects a flipped byte in each of four chunks, whether fewer, as many or more threads verify them."""
    size = 4 * CHUNK_BYTES - 24
    store = opened(tmpfs, inline_digest_bytes=0, memory_bytes=8 * CHUNK_BYTES)
    slot = await fill(store, 1, size=size)
    assert await store.verify(slot, threads=threads)
    assert slot.digests is not None
    assert slot.digests.known == payload_chunk_digests(payload(1, size))
    with slot.file.payload(byte, byte + 1) as view:
        view[0] ^= 1
    assert not await store.verify(slot, threads=threads)
    assert on_disk(slot).state is SlotState.EMPTY
    store.close()


def test_what_presses_is_verified_before_ranks_that_start_and_all_else_beside_them(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    above = -10 if os.geteuid() == 0 else own
    found: list[int] = []

    def digest_and_look(file: SlotFile, size: int, chunks: range, cancelled: threading.Event) -> bytes:
        found.append(os.getpriority(os.PRIO_PROCESS, 0))
        return digest_chunks(file, size, chunks, cancelled)

    async def verify() -> None:
        # this changes the priority of the event loop's thread, and of no other thread
        os.setpriority(os.PRIO_PROCESS, 0, above)
        store = opened(tmpfs, inline_digest_bytes=0)
        slot = await fill(store, 1)
        found.clear()
        for is_pressing in (True, False, True):
            assert await store.verify(slot, is_pressing=is_pressing)
        store.close()

    digest_chunks = store_module._digest_chunks
    monkeypatch.setattr(store_module, "_digest_chunks", digest_and_look)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, verify()).result()
    assert found == [above, 0 if above < 0 else own, above]


async def test_two_slots_of_a_shard_are_made_at_the_same_time(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, both = os.posix_fallocate, threading.Barrier(2)

    def allocate_both(descriptor: int, begin: int, size: int) -> None:
        both.wait(30)
        allocate(descriptor, begin, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate_both)
    paths = [tmpfs / f"rank-0.slot-{index}" for index in range(2)]
    headers = [replace(header(SlotStore(tmpfs / "node", memory_bytes=0), step), job=JOB) for step in (1, 2)]
    files = await asyncio.gather(
        *(
            asyncio.to_thread(SlotFile.create, path, each, threading.Event())
            for path, each in zip(paths, headers, strict=True)
        )
    )
    assert [unpack_header(path.read_bytes()[:HEADER_BYTES]).step for path in paths] == [1, 2]
    assert sorted(tmpfs.glob("rank-0*")) == paths
    for file in files:
        file.close()


async def test_what_does_not_hash_to_the_expected_digest_is_void(tmpfs: Path) -> None:
    store = opened(tmpfs)
    index = await grant(store, 1)
    assert index is not None
    assert await store.seal(RANK, index, header(store, 1), expected=b"x" * 16) is None
    assert on_disk(store.shards[RANK][index]).state is SlotState.EMPTY
    store.close()


@pytest.mark.parametrize("byte", [0, 500, 999])
async def test_a_flipped_byte_is_found_and_the_slot_is_void(tmpfs: Path, byte: int) -> None:
    store = opened(tmpfs)
    slot = await fill(store, 1)
    assert await store.verify(slot)
    with slot.file.payload(byte, byte + 1) as view:
        view[0] ^= 1
    assert not await store.verify(slot)
    assert on_disk(slot).state is SlotState.EMPTY
    assert store.inventory() == ()
    store.close()


async def test_a_pinned_slot_is_not_granted(tmpfs: Path) -> None:
    store = opened(tmpfs)
    first = await fill(store, 1)
    await fill(store, 2)
    first.pins += 1
    assert await grant(store, 3, keep={content(2)}) is None
    first.pins -= 1
    assert await grant(store, 3, keep={content(2)}) is not None
    store.close()


@pytest.mark.parametrize(
    ("step", "capacity", "is_kept"),
    [(1, CAPACITY, True), (1, 4 * CAPACITY, False), (2, CAPACITY, False)],
    ids=["the same content", "a larger file", "another content"],
)
async def test_chunks_that_arrived_count_only_for_the_same_content_in_the_same_file(
    tmpfs: Path, step: int, capacity: int, is_kept: bool
) -> None:
    """A received chunk counts for the next grant of its slot only if the step and the file are the same.

    A larger slot gets a new file, which contains zeros in place of the chunk.
    """
    store = opened(tmpfs)
    index = await grant(store, 1, slot_count=1)
    assert index is not None
    slot = store.shards[RANK][index]
    slot.arrived[0] = b"d" * DIGEST_BYTES
    assert await grant(store, step, slot_count=1, capacity=capacity) == index
    assert bool(slot.arrived) is is_kept
    store.close()


class TestFollowing:
    """The store computes digests of chunks while the rank still writes the slot."""

    SIZE = 4 * CHUNK_BYTES + 500

    async def begun(self, store: SlotStore, step: int) -> tuple[Slot, ChunkDigests, asyncio.Task[bytes | None]]:
        """Grant a slot, and start to digest it while the test writes it."""
        index = await grant(store, step, slot_count=1, capacity=self.SIZE)
        assert index is not None
        slot = store.shards[RANK][index]
        digests, has_begun = store.follow(slot, header(store, step, self.SIZE))
        assert has_begun
        return slot, digests, asyncio.create_task(store.seal_followed(slot, digests))

    @staticmethod
    def write(slot: Slot, data: bytes, start: int = 0) -> None:
        with slot.file.payload(start, start + len(data)) as view:
            view[:] = data

    @staticmethod
    async def known(digests: ChunkDigests, count: int) -> None:
        """Wait until the store has digested `count` chunks."""
        async with asyncio.timeout(20):
            while digests.known_count < count:
                await digests.changed.wait(digests.changed.version)

    @pytest.mark.parametrize("inline_bytes", [0, 1 << 30], ids=["in a thread", "on the loop"])
    async def test_chunks_are_digested_as_they_become_final_and_sealed_when_all_is_said(
        self, tmpfs: Path, inline_bytes: int
    ) -> None:
        store, data = opened(tmpfs, memory_bytes=3 * self.SIZE, inline_digest_bytes=inline_bytes), payload(1, self.SIZE)
        slot, digests, sealing = await self.begun(store, 1)
        half = 2 * CHUNK_BYTES + 500
        self.write(slot, data[:half])
        digests.grow(half)
        digests.grow(CHUNK_BYTES + 200)  # this message about progress is outdated
        await self.known(digests, 2)
        assert digests.known == payload_chunk_digests(data)[: 2 * DIGEST_BYTES]
        self.write(slot, data[half:], half)
        digests.grow(self.SIZE)
        await self.known(digests, 4)
        # The last chunk is short, and its end is unknown until the capture is complete.
        assert (digests.known_count, digests.is_sealed) == (
            4,
            False,
        )
        assert store.inventory() == ()
        digests.complete()
        assert await sealing == payload_digest(data)
        assert digests.is_sealed
        assert digests.known == payload_chunk_digests(data)
        assert on_disk(slot).payload_digest == payload_digest(data)
        store.close()

    async def test_nothing_is_digested_that_may_still_be_written(self, tmpfs: Path) -> None:
        store, data = opened(tmpfs, memory_bytes=3 * self.SIZE), payload(1, self.SIZE)
        slot, digests, sealing = await self.begun(store, 1)
        digests.grow(CHUNK_BYTES - 1)
        await asyncio.sleep(0)
        assert digests.known_count == 0
        self.write(slot, data)
        digests.complete()
        assert await sealing == payload_digest(data)
        store.close()

    async def test_who_goes_on_following_does_not_begin_again(self, tmpfs: Path) -> None:
        store = opened(tmpfs, memory_bytes=3 * self.SIZE)
        slot, digests, sealing = await self.begun(store, 1)
        assert store.follow(slot, header(store, 1, self.SIZE)) == (digests, False)
        digests.complete()
        await sealing
        assert store.follow(slot, header(store, 1, self.SIZE)) == (digests, False)
        store.close()

    async def test_a_grant_ends_it_and_nothing_of_it_is_left(self, tmpfs: Path) -> None:
        store = opened(tmpfs, memory_bytes=3 * self.SIZE)
        slot, digests, sealing = await self.begun(store, 1)
        self.write(slot, payload(1, self.SIZE))
        digests.grow(self.SIZE)
        await self.known(digests, 4)
        again, fresh, sealing_again = await self.begun(store, 1)  # the rank captures the same step a second time
        assert again is slot
        assert await sealing is None
        assert fresh is not digests
        assert fresh.known_count == 0
        digests.complete()  # this call is about the first capture and must not complete the second one
        self.write(slot, payload(7, self.SIZE))
        fresh.complete()
        assert await sealing_again == payload_digest(payload(7, self.SIZE))
        store.close()

    async def test_a_grant_just_before_the_digests_begin_ends_it_too(self, tmpfs: Path) -> None:
        store = opened(tmpfs, memory_bytes=3 * self.SIZE)
        slot, digests, sealing = await self.begun(store, 1)
        digests.complete()
        assert (
            await grant(store, 2, slot_count=1, capacity=self.SIZE) == 0
        )  # the slot is free, because no thread has begun to read it
        assert await sealing is None
        assert (on_disk(slot).state, on_disk(slot).step) == (SlotState.WRITING, 2)
        store.close()

    async def test_what_is_given_up_is_not_read_any_more_and_never_sealed(self, tmpfs: Path) -> None:
        store = opened(tmpfs, memory_bytes=3 * self.SIZE)
        slot, digests, sealing = await self.begun(store, 1)
        digests.grow(2 * CHUNK_BYTES)
        await self.known(digests, 2)
        store.give_up(RANK, content(2))
        assert slot.digests is digests
        store.give_up(RANK, content(1))
        assert slot.digests is None
        assert await sealing is None
        assert store.inventory() == ()
        store.close()

    async def test_nobody_begins_to_read_a_slot_while_its_readers_are_waited_for(self, tmpfs: Path) -> None:
        store = opened(tmpfs, memory_bytes=3 * self.SIZE)
        slot = await fill(store, 1)
        found: list[object] = []

        async def read() -> bool:
            try:
                await asyncio.Event().wait()
            finally:
                found.append(store.sealed(RANK, content(1)))
            return True

        reading = asyncio.create_task(store.reading(slot, read()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert await grant(store, 2, slot_count=1) == 0
        await reading
        assert found == [None]
        store.close()


def full_to_the_last_page(descriptor: int, offset: int, length: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class TestRoom:
    """Tests in which the node's memory is exhausted."""

    async def test_beyond_the_nodes_share_it_is_refused_with_the_figures(self, tmpfs: Path) -> None:
        store = opened(tmpfs, memory_bytes=CAPACITY + 100)
        await fill(store, 1)
        with pytest.raises(NoRoom) as refused:
            await grant(store, 2, keep={content(1)})
        assert (refused.value.needed_bytes, refused.value.available_bytes) == (2 * CAPACITY, CAPACITY + 100)
        assert "16,384 bytes" in str(refused.value)
        assert store.sealed(RANK, content(1)) is not None
        store.close()

    async def test_a_full_tmpfs_is_an_error_here_and_leaves_nothing_behind(
        self, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = opened(tmpfs)
        real = os.posix_fallocate

        def full(descriptor: int, offset: int, length: int) -> None:
            real(descriptor, offset, 100)
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full)
            with pytest.raises(NoRoom) as refused:
                await grant(store, 1)
        assert refused.value.needed_bytes == CAPACITY
        assert refused.value.available_bytes > 0
        assert list((tmpfs / "node" / RUN).iterdir()) == []
        assert await grant(store, 1) == 0
        store.close()

    async def test_a_slot_that_cannot_grow_is_left_without_room_and_the_others_stay(self, tmpfs: Path) -> None:
        store = opened(tmpfs, memory_bytes=2 * CAPACITY)
        await fill(store, 1)
        kept = await fill(store, 2)
        with pytest.raises(NoRoom):
            await grant(store, 3, keep={content(2)}, capacity=4 * CAPACITY)
        assert store.sealed(RANK, content(2)) is kept
        assert await grant(store, 3, keep={content(2)}) is not None  # the store can create a smaller slot
        store.close()

    async def test_a_slot_that_cannot_grow_on_a_full_tmpfs_is_made_when_there_is_room(
        self, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = opened(tmpfs)
        await store.reserve(RANK, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2)
        larger = {"capacity_bytes": 2 * CAPACITY, "layout_hash": LAYOUT, "slot_count": 2}
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full_to_the_last_page)
            with pytest.raises(NoRoom) as refused:
                await store.reserve(RANK, **larger)
            assert refused.value.is_passing
            assert store.used_bytes() == CAPACITY
            store.close()
            store = opened(tmpfs)  # a new agent starts while the node has no free memory
        with pytest.raises(NoRoom) as refused:
            await store.reserve(RANK, **larger)
        assert refused.value.is_passing, "what is gone from tmpfs its rank may still be writing"
        store.settle_copiers(RANK)
        await store.reserve(RANK, **larger)
        assert [path.stat().st_size for path in sorted((tmpfs / "node" / RUN).iterdir())] == [
            HEADER_BYTES + 2 * CAPACITY
        ] * 2
        store.close()

    async def test_a_larger_layout_makes_the_slot_anew(self, tmpfs: Path) -> None:
        store = opened(tmpfs)
        await fill(store, 1)
        await fill(store, 2)
        index = await grant(store, 3, keep={content(2)}, capacity=2 * CAPACITY)
        assert index is not None
        slot = store.shards[RANK][index]
        assert slot.file.path.stat().st_size == HEADER_BYTES + 2 * CAPACITY
        assert on_disk(slot).capacity_bytes == 2 * CAPACITY
        store.close()

    async def test_reserving_makes_all_slots_and_touches_none_that_holds_something(self, tmpfs: Path) -> None:
        store = opened(tmpfs)
        slot = await fill(store, 1)
        await store.reserve(RANK, capacity_bytes=2 * CAPACITY, layout_hash=LAYOUT, slot_count=2)
        assert len({slot.file.path for slot in store.shards[RANK]}) == 2
        assert store.sealed(RANK, content(1)) is slot
        assert store.shards[RANK][1].file.header.capacity_bytes == 2 * CAPACITY
        store.close()

    async def test_what_admission_counts_is_what_tmpfs_holds(self, tmpfs: Path) -> None:
        """A node's slots use the memory that the control plane calculates at admission.

        Each shard that the node owns or holds has two slots. All pages of these slots are allocated before the first
        step.
        """
        capacity, copies, ranks_per_node = 3_000_000, 2, 2
        store = opened(tmpfs, memory_bytes=1 << 30)
        for rank in range(copies * ranks_per_node):
            await store.reserve(Rank(rank), capacity_bytes=capacity, layout_hash=LAYOUT, slot_count=2)
        admitted = slot_bytes_per_node(copies=copies, shard_bytes=[capacity + HEADER_BYTES] * ranks_per_node)
        used = sum(path.stat().st_blocks * 512 for path in (tmpfs / "node" / RUN).iterdir())
        assert 0.95 * admitted <= used <= 1.05 * admitted
        store.close()

    async def test_a_ranks_slots_are_made_near_its_gpu_and_those_of_others_anywhere(
        self, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = opened(tmpfs)
        store.memory_nodes = {RANK: 1}
        made: list[tuple[int | None, list[str]]] = []

        @contextlib.contextmanager
        def near(node: int | None) -> Iterator[None]:
            before = set(os.listdir(tmpfs / "node" / RUN))
            yield
            made.append((node, sorted(set(os.listdir(tmpfs / "node" / RUN)) - before)))

        monkeypatch.setattr(store_module, "near", near)
        for rank in (RANK, Rank(7)):
            await store.reserve(rank, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=1)
        await grant(store, 1, capacity=2 * CAPACITY)
        assert made == [(1, ["rank-0.slot-0"]), (None, ["rank-7.slot-0"]), (1, ["rank-0.slot-0"])]
        store.close()

    async def test_slots_made_at_the_same_time_share_the_room(self, tmpfs: Path) -> None:
        store = opened(tmpfs, memory_bytes=3 * CAPACITY)
        made = [
            store.reserve(Rank(rank), capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2) for rank in range(2)
        ]
        results = await asyncio.gather(*made, return_exceptions=True)
        assert [isinstance(result, NoRoom) for result in results].count(True) == 1
        assert store.used_bytes() <= 3 * CAPACITY
        store.close()

    @pytest.mark.parametrize("capacity", [CAPACITY, 2 * CAPACITY], ids=["new", "larger"])
    async def test_two_who_make_the_slots_of_one_shard_take_turns(self, tmpfs: Path, capacity: int) -> None:
        store = opened(tmpfs)
        if capacity > CAPACITY:
            await store.reserve(RANK, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2)
        reserving = store.reserve(RANK, capacity_bytes=capacity, layout_hash=LAYOUT, slot_count=2)
        index, _ = await asyncio.gather(grant(store, 1, capacity=capacity), reserving)
        paths = [tmpfs / "node" / RUN / f"rank-0.slot-{number}" for number in range(2)]
        assert [slot.file.path for slot in store.shards[RANK]] == paths
        assert sorted((tmpfs / "node" / RUN).iterdir()) == paths
        assert [on_disk(slot) for slot in store.shards[RANK]] == [slot.file.header for slot in store.shards[RANK]]
        assert index is not None
        assert store.shards[RANK][index].is_written_with(content(1))
        assert store.used_bytes() == 2 * capacity
        store.close()

    async def test_a_slot_whose_making_is_cancelled_leaves_nothing(self, tmpfs: Path) -> None:
        store = opened(tmpfs)
        reserving = asyncio.create_task(store.reserve(RANK, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2))
        await asyncio.sleep(0)
        reserving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reserving
        assert list((tmpfs / "node" / RUN).iterdir()) == []
        assert store.shards[RANK] == []
        assert await grant(store, 1) == 0
        store.close()

    async def test_a_slot_that_nobody_wants_any_more_gets_no_more_pages(
        self, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A cancelled reservation of slots allocates no further pages.

        The agent cancels it when it must join a new generation. If it first had to allocate 16 GiB, it would join too
        late.
        """
        allocate, loop, begun, reserving = (
            os.posix_fallocate,
            asyncio.get_running_loop(),
            asyncio.Event(),
            asyncio.Event(),
        )
        pieces: list[int] = []

        def allocate_a_piece(descriptor: int, begin: int, size: int) -> None:
            pieces.append(size)
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(reserving.wait(), loop).result()
            allocate(descriptor, begin, size)

        monkeypatch.setattr(os, "posix_fallocate", allocate_a_piece)
        store = opened(tmpfs, memory_bytes=4 * PIECE_BYTES)
        asked = asyncio.create_task(store.reserve(RANK, capacity_bytes=PIECE_BYTES, layout_hash=LAYOUT, slot_count=2))
        await begun.wait()
        asked.cancel()
        loop.call_later(0, reserving.set)
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert pieces == [PIECE_BYTES]
        assert list((tmpfs / "node" / RUN).iterdir()) == []
        store.close()

    async def test_a_slot_that_is_ready_when_nobody_wants_it_any_more_goes_again(
        self, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        create, loop, ready = SlotFile.create, asyncio.get_running_loop(), asyncio.Event()

        def create_and_tell(path: Path, header: SlotHeader, cancelled: threading.Event) -> SlotFile:
            file = create(path, header, cancelled)
            loop.call_soon_threadsafe(ready.set)
            assert cancelled.wait(30)
            return file

        monkeypatch.setattr(SlotFile, "create", create_and_tell)
        store = opened(tmpfs)
        asked = asyncio.create_task(store.reserve(RANK, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2))
        await ready.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert list((tmpfs / "node" / RUN).iterdir()) == []
        assert (store.shards[RANK], store.used_bytes()) == ([], 0)
        store.close()


class TestAdoption:
    """A restarted agent adopts its predecessor's slots."""

    async def test_sealed_slots_are_found_again_with_their_bytes(self, tmpfs: Path) -> None:
        store = opened(tmpfs)
        await fill(store, 1)
        await fill(store, 2)
        before = store.inventory()
        store.close()
        again = opened(tmpfs)
        assert again.inventory() == before
        slot = again.sealed(RANK, content(2))
        assert slot is not None
        assert await again.verify(slot)
        again.close()

    async def test_a_slot_that_was_being_written_stays_busy_until_its_writer_is_known_to_have_stopped(
        self, tmpfs: Path
    ) -> None:
        store = opened(tmpfs)
        await fill(store, 1)
        await grant(store, 2, keep={content(1)})
        store.close()
        again = opened(tmpfs)
        assert [record.step for record in again.inventory()] == [1]
        assert await grant(again, 3, keep={content(1)}) is None
        again.settle_copiers(RANK)
        assert on_disk(again.shards[RANK][1]).state is SlotState.EMPTY
        assert await grant(again, 3, keep={content(1)}) == 1
        again.close()

    @pytest.mark.parametrize(
        "damage", ["flipped", "torn", "short", "longer", "missing", "foreign run", "foreign rank", "unknown version"]
    )
    async def test_a_slot_that_cannot_be_believed_is_void_in_its_place(self, tmpfs: Path, damage: str) -> None:
        store = opened(tmpfs)
        await fill(store, 1)
        second = await fill(store, 2)
        path = store.shards[RANK][0].file.path
        store.close()
        data = path.read_bytes()
        sound = unpack_header(data[:HEADER_BYTES])
        match damage:
            case "flipped":
                path.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
            case "torn":
                path.write_bytes(pack_header(replace(sound, step=Step(9)))[:100] + data[100:])
            case "short":
                path.write_bytes(data[: HEADER_BYTES - 1])
            case "longer":
                path.write_bytes(data + b"\0")
            case "missing":
                path.unlink()
            case "foreign run":
                path.write_bytes(pack_header(replace(sound, run=OTHER)) + data[HEADER_BYTES:])
            case "foreign rank":
                path.write_bytes(pack_header(replace(sound, owner_rank=Rank(5))) + data[HEADER_BYTES:])
            case "unknown version":
                fields = data[:8] + b"\x09\x00" + data[10:176]
                path.write_bytes(fields + digest(fields) + data[192:])
        again = opened(tmpfs)
        assert [record.step for record in again.inventory()] == [2]
        assert len(again.shards[RANK]) == 2
        # slots keep their numbers, because the rank's page names them
        assert again.shards[RANK][1].file.path == second.file.path
        again.settle_copiers(RANK)
        slot = await fill(again, 3, keep={content(2)})
        assert slot.file.path == path
        assert {record.step for record in again.inventory()} == {2, 3}
        again.close()

    async def test_a_rank_keeps_its_mapping_of_a_slot_that_was_declared_void(self, tmpfs: Path) -> None:
        store = opened(tmpfs)
        slot = await fill(store, 1)
        store.close()
        with slot.file.path.open("r+b") as file:
            file.seek(20)
            file.write(b"\xff")
        inode = slot.file.path.stat().st_ino
        again = opened(tmpfs)
        assert slot.file.path.stat().st_ino == inode
        assert again.shards[RANK][0].file.header.capacity_bytes == CAPACITY
        again.close()

    async def test_the_slots_of_another_run_go(self, tmpfs: Path) -> None:
        store = opened(tmpfs)
        await fill(store, 1)
        store.close()
        again = SlotStore(tmpfs / "node", memory_bytes=1 << 20)
        again.open_run(JOB, OTHER)
        assert again.inventory() == ()
        assert [path.name for path in (tmpfs / "node").iterdir()] == [OTHER]
        again.close()

    async def test_a_release_leaves_nothing(self, tmpfs: Path) -> None:
        store = opened(tmpfs)
        await fill(store, 1)
        store.page_path(RANK).touch()
        await store.release()
        assert list((tmpfs / "node").iterdir()) == []


async def test_what_is_not_kept_is_void_after_a_load(tmpfs: Path) -> None:
    store = opened(tmpfs)
    await fill(store, 1)
    await fill(store, 2)
    await store.empty_all_but({RANK: {content(1)}})
    assert [record.step for record in store.inventory()] == [1]
    await store.empty_all_but({})
    assert store.inventory() == ()
    store.close()


class TestStrays:
    """Tests strays: slots of shards that the new plan places on other nodes."""

    STRAY = Rank(5)

    async def strayed(
        self, tmpfs: Path, *, memory_bytes: int = 1 << 20, now: Callable[[], float] = time.monotonic
    ) -> SlotStore:
        """Return a store with two sealed slots of this node's shard, and two of a shard that the plan has moved
        away.
        """
        store = opened(tmpfs, memory_bytes=memory_bytes, now=now)
        for rank in (RANK, self.STRAY):
            for step in (1, 2):
                await fill(store, step, rank=rank)
        store.place(self.placing(RANK))
        return store

    @staticmethod
    def placing(*ranks: Rank, base: int = 2) -> Strays:
        """Return the rules for strays under a plan that places only the given shards on this node."""
        return Strays(placed=frozenset(ranks), base=Step(base), needed=frozenset({Step(1)}))

    @staticmethod
    def files(tmpfs: Path) -> list[str]:
        return sorted(path.name for path in (tmpfs / "node" / RUN).iterdir())

    async def test_what_is_not_kept_of_them_gives_its_memory_back_at_load(self, tmpfs: Path) -> None:
        store = await self.strayed(tmpfs)
        gone = store.shards[self.STRAY][0]
        reading = asyncio.create_task(store.reading(gone, asyncio.Event().wait()))
        await asyncio.sleep(0)
        await store.empty_all_but({self.STRAY: {content(2)}})
        assert await reading is None
        assert self.files(tmpfs) == ["rank-0.slot-0", "rank-0.slot-1", "rank-5.slot-1"]
        assert store.used_bytes() == 3 * CAPACITY
        assert store.sealed(self.STRAY, content(2)) is not None
        store.close()
        again = opened(tmpfs)
        assert again.sealed(self.STRAY, content(2)) is not None
        # the next plan places the shard on this node again, which reuses its files
        again.place(self.placing(RANK, self.STRAY))
        again.settle_copiers(self.STRAY)
        await again.reserve(self.STRAY, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2)
        assert self.files(tmpfs) == ["rank-0.slot-0", "rank-0.slot-1", "rank-5.slot-0", "rank-5.slot-1"]
        again.place(self.placing(RANK))
        await again.empty_all_but({})
        assert self.files(tmpfs) == ["rank-0.slot-0", "rank-0.slot-1"]
        assert list(again.shards) == [RANK]
        again.close()

    async def test_they_go_when_nobody_needs_or_reads_them_any_more(self, tmpfs: Path) -> None:
        store = await self.strayed(tmpfs)
        fetched = store.shards[self.STRAY][1]
        fetched.pins += 1
        store.strays = store.strays.loaded().announced(Step(2), [self.STRAY])
        store.drop_strays()
        assert store.sealed(self.STRAY, content(2)) is fetched
        fetched.pins -= 1
        store.drop_strays()
        assert self.files(tmpfs) == ["rank-0.slot-0", "rank-0.slot-1"]
        assert {record.owner_rank for record in store.inventory()} == {RANK}
        store.close()

    async def test_they_stay_until_their_new_holders_have_the_base(self, tmpfs: Path) -> None:
        """The memory has room for exactly two slots of two shards, and a new shard needs slots.

        The store must not give a stray's memory to the new shard before the stray's new holders have the base, the step
        from which training starts.
        """
        store = await self.strayed(tmpfs, memory_bytes=4 * CAPACITY)
        held = Rank(1)
        store.place(self.placing(RANK, held))
        for strays in (store.strays, store.strays.loaded()):
            store.strays = strays
            with pytest.raises(NoRoom):
                await store.reserve(held, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2)
            assert self.steps(store) == [1, 2]
        store.strays = store.strays.announced(Step(-1), [self.STRAY])
        with pytest.raises(NoRoom):
            await store.reserve(held, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2)
        assert self.files(tmpfs) == ["rank-0.slot-0", "rank-0.slot-1", "rank-1.slot-0", "rank-5.slot-0"]
        assert self.steps(store) == [1], "the base is not committed, and nobody else keeps what is older"
        store.strays = store.strays.announced(Step(2), [])
        await store.reserve(held, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2)
        assert self.files(tmpfs) == ["rank-0.slot-0", "rank-0.slot-1", "rank-1.slot-0", "rank-1.slot-1"]
        store.close()

    async def test_one_slot_makes_way_at_a_time(self, tmpfs: Path) -> None:
        store = await self.strayed(tmpfs, memory_bytes=5 * CAPACITY)
        store.strays = replace(store.strays, doubled={(self.STRAY, content(1)): frozenset()}).loaded()
        await store.reserve(RANK, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=3)
        assert self.steps(store) == [1, 2], "there was room"
        store.place(replace(store.strays, placed=frozenset({RANK, Rank(1)})))
        with pytest.raises(NoRoom):
            await store.reserve(Rank(1), capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2)
        assert self.steps(store) == [2], "its owner keeps the older step; the base has no other copy"
        with pytest.raises(NoRoom):
            await store.reserve(Rank(2), capacity_bytes=2 * CAPACITY, layout_hash=LAYOUT, slot_count=1)
        store.strays = store.strays.announced(Step(-1), [self.STRAY])
        with pytest.raises(NoRoom):
            await store.reserve(Rank(2), capacity_bytes=2 * CAPACITY, layout_hash=LAYOUT, slot_count=1)
        assert self.steps(store) == [2], "dropping it would not have been enough"
        store.close()

    LOW, HIGH = Rank(1), Rank(3)

    async def waiting(self, tmpfs: Path, *, slots: int, now: Callable[[], float] = time.monotonic) -> SlotStore:
        """Return a store that has one stray, lacks the shards of two ranks, and has room for `slots` more slots."""
        store = await self.strayed(tmpfs, memory_bytes=(4 + slots) * CAPACITY, now=now)
        placed = frozenset({RANK, self.LOW, self.HIGH})
        store.place(replace(store.strays, placed=placed, expected=placed - {RANK}, patience_seconds=2.0))
        return store

    async def test_the_last_slot_goes_to_the_lowest_rank(self, tmpfs: Path) -> None:
        store = await self.waiting(tmpfs, slots=1)
        with pytest.raises(NoRoom):
            await fill(store, 2, rank=self.HIGH)
        await fill(store, 2, rank=self.LOW)
        with pytest.raises(NoRoom):
            await fill(store, 2, rank=self.HIGH)
        store.strays = store.strays.loaded().announced(Step(-1), [self.STRAY])
        await fill(store, 2, rank=self.HIGH)
        assert self.steps(store) == [1]
        store.close()

    async def test_a_slot_drops_only_as_many_strays_as_it_needs(self, tmpfs: Path) -> None:
        store = await self.waiting(tmpfs, slots=0)
        store.strays = store.strays.loaded().announced(Step(-1), [self.STRAY])
        with pytest.raises(NoRoom):
            await fill(store, 2, rank=self.HIGH)
        assert self.steps(store) == [1, 2]
        store.strays = replace(store.strays, doubled={(self.STRAY, content(1)): frozenset()})
        await fill(store, 2, rank=self.HIGH)
        assert self.steps(store) == [2], "rank 1 can still receive the memory of the other slot"
        store.close()

    async def test_the_last_slot_goes_to_a_higher_rank_once_its_patience_is_over(self, tmpfs: Path) -> None:
        seconds = 5.0
        store = await self.waiting(tmpfs, slots=1, now=lambda: seconds)
        with pytest.raises(NoRoom):
            await fill(store, 2, rank=self.HIGH)
        seconds = 6.9
        with pytest.raises(NoRoom):
            await fill(store, 2, rank=self.HIGH)
        seconds = 7.0
        await fill(store, 2, rank=self.HIGH)
        with pytest.raises(NoRoom):
            await fill(store, 2, rank=self.LOW)
        store.close()

    async def test_the_patience_begins_again_with_every_plan(self, tmpfs: Path) -> None:
        seconds = 0.0
        store = await self.waiting(tmpfs, slots=1, now=lambda: seconds)
        with pytest.raises(NoRoom):
            await fill(store, 2, rank=self.HIGH)
        seconds = 2.0
        store.place(store.strays)
        with pytest.raises(NoRoom):
            await fill(store, 2, rank=self.HIGH)
        store.close()

    async def test_the_second_slot_of_a_shard_leaves_the_last_slot_to_a_shard_without_one(self, tmpfs: Path) -> None:
        store = await self.waiting(tmpfs, slots=2)
        with pytest.raises(NoRoom):
            await store.reserve(self.LOW, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2)
        assert len(store.shards[self.LOW]) == 1
        await fill(store, 2, rank=self.HIGH)
        store.close()

    async def test_the_patience_begins_again_with_the_second_slot(self, tmpfs: Path) -> None:
        seconds = 0.0
        store = await self.waiting(tmpfs, slots=0, now=lambda: seconds)
        with pytest.raises(NoRoom):
            await fill(store, 2, rank=self.LOW)
        seconds = 3.0
        store.memory_bytes += 2 * CAPACITY
        with pytest.raises(NoRoom):
            await store.reserve(self.LOW, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2)
        assert len(store.shards[self.LOW]) == 1
        store.close()

    async def test_a_slot_that_is_being_created_does_not_count_twice(self, tmpfs: Path) -> None:
        store = await self.waiting(tmpfs, slots=2)
        await asyncio.gather(*(fill(store, 2, rank=rank) for rank in (self.LOW, self.HIGH)))
        store.close()

    def steps(self, store: SlotStore) -> list[int]:
        return [record.step for record in store.inventory() if record.owner_rank == self.STRAY]


def tampered(path: Path, how: str) -> None:
    """Do to a file what a rank can do to a file that it may write."""
    match how:
        case "enlarged":
            os.truncate(path, 1 << 36)
        case "enormous":
            os.truncate(path, 1 << 62)
        case "emptied":
            os.truncate(path, 0)
        case "shortened":
            os.truncate(path, 100)
        case "scribbled":
            path.write_bytes(b"\xff" * path.stat().st_size)
        case "linked":
            path.unlink()
            path.symlink_to("/dev/zero")
        case "a pipe":
            path.unlink()
            os.mkfifo(path)
        case "a folder":
            path.unlink()
            path.mkdir()
        case _:
            path.unlink()


TAMPERED = ("enlarged", "enormous", "emptied", "shortened", "scribbled", "linked", "a pipe", "a folder", "removed")


@pytest.mark.security
@pytest.mark.parametrize("how", TAMPERED)
async def test_a_store_opens_whatever_a_rank_did_to_its_slots_and_page(tmpfs: Path, how: str) -> None:
    store = opened(tmpfs)
    slot = await fill(store, 1)
    honest = await fill(store, 1, rank=Rank(1))
    left = store.page_path(RANK)
    page = RankPage(left, generation=1)
    page.write(AgentHalf(1, committed=90))
    page.close()
    store.close()
    tampered(slot.file.path, how)
    tampered(left, how)
    again = opened(tmpfs)
    assert [each.file.content for each in again.shards[Rank(1)]] == [honest.file.content]
    assert all(each.file.content is None for each in again.shards.get(RANK, []))
    assert again.used_bytes() < 1 << 20
    assert again.page_commits() == ()
    assert last_half(left) is None
    assert await grant(again, 2) is not None, "the rank can still keep its steps"
    again.close()


async def test_a_slot_that_an_agent_was_killed_while_making_goes(tmpfs: Path) -> None:
    store = opened(tmpfs)
    slot = await fill(store, 1)
    store.close()
    slot.file.path.with_name("rank-0.slot-1.new").write_bytes(bytes(CAPACITY))
    again = opened(tmpfs)
    assert list((tmpfs / "node" / RUN).iterdir()) == [slot.file.path]
    again.close()


@pytest.mark.parametrize("count", [1, 2])
async def test_a_thread_is_joined_when_its_caller_is_cancelled_however_often(count: int) -> None:
    begun, gate, ended = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def work(cancelled: threading.Event) -> None:
        loop.call_soon_threadsafe(begun.set)
        cancelled.wait()
        gate.wait()
        ended.append(True)

    task = asyncio.create_task(in_thread(work))
    await begun.wait()
    for _ in range(count):
        task.cancel()
        await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


async def test_the_newest_commit_on_the_pages_is_reported_by_generation(tmpfs: Path) -> None:
    store = opened(tmpfs)
    assert store.page_commits() == ()
    for rank, generation, committed in ((0, 1, 90), (1, 2, 95), (2, 2, 96), (3, 3, -1), (4, 2, 2**60)):
        page = RankPage(store.page_path(Rank(rank)), generation=generation)
        page.write(AgentHalf(generation, committed=committed))
        page.close()
    store.page_path(Rank(5)).write_bytes(b"")
    expected = (
        PageCommit(generation=Generation(1), step=Step(90)),
        PageCommit(generation=Generation(2), step=Step(96)),
    )
    assert store.page_commits() == expected
    store.close()
    later = opened(tmpfs)
    assert later.page_commits() == expected, "another agent of the node reads the same pages"
    RankPage(later.page_path(Rank(1)), generation=3).close()
    RankPage(later.page_path(Rank(2)), generation=3).close()
    assert later.page_commits() == expected[:1], "Load clears a page"
    later.close()


async def test_the_newest_ended_ranks_tell_how_far_they_came(tmpfs: Path) -> None:
    store = opened(tmpfs)
    assert store.ended_ranks() is None
    for rank, generation, boundary in ((0, 1, 90), (1, 2, 40), (2, 2, 41)):
        path = store.page_path(Rank(rank))
        RankPage(path, generation=generation).close()
        with path.open("r+b") as file, mmap.mmap(file.fileno(), RANK_WORD_BYTES) as page, memoryview(page) as view:
            write_rank_half(view, RankHalf(generation, boundary))
    assert store.ended_ranks() == EndedRanks(generation=Generation(2), boundary=Step(41)), (
        "not the page of a rank that moved away since"
    )
    store.close()


@pytest.mark.parametrize("inline_bytes", [0, CHUNK_BYTES])
@pytest.mark.parametrize("size", [1000, CHUNK_BYTES, CHUNK_BYTES + 1000])
async def test_the_digest_of_a_state_covers_all_tensors_and_not_the_index(
    tmpfs: Path, size: int, inline_bytes: int
) -> None:
    store = opened(tmpfs, memory_bytes=1 << 26, inline_digest_bytes=inline_bytes)

    async def digest_of(step: int, data: bytes, tensor_bytes: int) -> bytes | None:
        index = await grant(store, step, capacity=2 * size)
        assert index is not None
        slot = store.shards[RANK][index]
        with slot.file.payload(0, len(data)) as view:
            view[:] = data
        of_index = {"index_offset": tensor_bytes, "index_bytes": len(data) - tensor_bytes}
        assert await store.seal(RANK, index, replace(header(store, step, len(data)), **of_index))
        return await store.state_digest(slot)

    tensors = payload(1, size)
    state = await digest_of(1, tensors + b"one", size)
    assert state is not None
    assert len(state) == STATE_DIGEST_BYTES
    assert await digest_of(2, tensors + b"another index", size) == state
    for place in (0, size - 1):
        changed = bytearray(tensors)
        changed[place] ^= 1
        assert await digest_of(3, bytes(changed) + b"one", size) not in (state, None)


async def test_the_state_of_a_slot_that_is_written_has_no_digest(tmpfs: Path) -> None:
    store = opened(tmpfs)
    slot = await fill(store, 1)
    assert await store.state_digest(slot) is not None
    assert await grant(store, 2, slot_count=1) == 0
    assert await store.state_digest(slot) is None
