"""Tests how the store of a node grants, seals, verifies, pins and adopts slots.

The store never reads beyond the bounds that a slot's header contains.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
import subprocess
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
from worker.core.misplaced_shards import MisplacedShards
from worker.core.slots import Content, slot_bytes_per_node
from worker.errors import NoRoom
from worker.shm import slot_file
from worker.shm import store as store_module
from worker.shm.chunk_digests import ChunkDigests
from worker.shm.held_files import HeldFiles, create_file
from worker.shm.rank_page import last_half
from worker.shm.slot_file import SlotFile
from worker.shm.store import INLINE_DIGEST_BYTES, Slot, SlotStore, in_thread

JOB, RUN, OTHER = JobName("gpt"), RunId("ab" * 16), RunId("cd" * 16)
RANK = Rank(0)
LAYOUT = b"l" * 16
CAPACITY = 8192


def content(step: int, origin: int = 1) -> Content:
    return Content(Generation(origin), Step(step))


def opened(
    files: HeldFiles,
    *,
    memory_bytes: int = 1 << 20,
    inline_digest_bytes: int = INLINE_DIGEST_BYTES,
    now: Callable[[], float] = time.monotonic,
) -> SlotStore:
    store = SlotStore(files, memory_bytes=memory_bytes, inline_digest_bytes=inline_digest_bytes, now=now)
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


async def test_a_slot_is_writing_then_sealed_and_its_header_says_so(files: HeldFiles) -> None:
    store = opened(files)
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


async def test_new_slots_are_made_until_there_are_enough_then_the_oldest_is_overwritten(files: HeldFiles) -> None:
    store = opened(files)
    first, second = await fill(store, 1), await fill(store, 2)
    assert first is not second
    assert await fill(store, 3, keep={content(2)}) is first
    assert await grant(store, 4, keep={content(2), content(3)}) is None
    assert store.sealed(RANK, content(2)) is second
    assert store.sealed(RANK, content(1)) is None
    assert store.sealed(RANK, content(2, origin=2)) is None
    store.close()


async def test_granting_cancels_and_joins_who_reads_the_old_content(files: HeldFiles) -> None:
    store = opened(files)
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


async def test_a_seal_that_is_overtaken_by_a_grant_seals_nothing(files: HeldFiles) -> None:
    """If a slot is granted again while the digest for its seal is being computed, the seal has no effect.

    Otherwise, the slot would appear sealed with the older step, but contain bytes of the newer step.
    """
    store = opened(files, inline_digest_bytes=0)
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


async def test_a_seal_that_is_overtaken_by_a_grant_at_its_very_end_seals_nothing(files: HeldFiles) -> None:
    """If a slot is granted again after its digest is computed, but before its seal, the seal has no effect."""
    store = opened(files)
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


async def test_a_slot_that_is_being_written_is_not_verified(files: HeldFiles) -> None:
    """The store does not verify a slot that a rank has just begun to write.

    The bytes of such a slot are still undefined. The rank keeps the slot.
    """
    store = opened(files)
    index = await grant(store, 1)
    assert index is not None
    slot = store.shards[RANK][index]
    assert await store.digests(slot) is None
    assert (on_disk(slot).state, on_disk(slot).step) == (SlotState.WRITING, 1)
    store.close()


async def test_what_was_verified_is_not_said_of_what_the_slot_was_granted_for_at_its_end(files: HeldFiles) -> None:
    store = opened(files)
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
async def test_every_thread_finds_what_was_flipped_in_its_part(files: HeldFiles, byte: int, threads: int) -> None:
    """The store detects a flipped byte in each of four chunks, whether fewer, as many or more threads verify them."""
    size = 4 * CHUNK_BYTES - 24
    store = opened(files, inline_digest_bytes=0, memory_bytes=8 * CHUNK_BYTES)
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
    files: HeldFiles, monkeypatch: pytest.MonkeyPatch
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
        store = opened(files, inline_digest_bytes=0)
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


async def test_two_slots_of_a_shard_are_made_at_the_same_time(
    files: HeldFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate, both = slot_file.populate, threading.Barrier(2)

    def allocate_both(address: int, size: int, *, is_written: bool) -> bool:
        both.wait(30)
        return allocate(address, size, is_written=is_written)

    monkeypatch.setattr(slot_file, "populate", allocate_both)
    names = [f"rank-0.slot-{index}" for index in range(2)]
    headers = [replace(header(SlotStore(files, memory_bytes=0), step), job=JOB) for step in (1, 2)]
    made = await asyncio.gather(
        *(
            asyncio.to_thread(SlotFile.create, name, files, each, threading.Event())
            for name, each in zip(names, headers, strict=True)
        )
    )
    assert [unpack_header(file.path.read_bytes()[:HEADER_BYTES]).step for file in made] == [1, 2]
    assert files.names() == names
    for file in made:
        file.close()


async def test_what_does_not_hash_to_the_expected_digest_is_void(files: HeldFiles) -> None:
    store = opened(files)
    index = await grant(store, 1)
    assert index is not None
    assert await store.seal(RANK, index, header(store, 1), expected=b"x" * 16) is None
    assert on_disk(store.shards[RANK][index]).state is SlotState.EMPTY
    store.close()


@pytest.mark.parametrize("byte", [0, 500, 999])
async def test_a_flipped_byte_is_found_and_the_slot_is_void(files: HeldFiles, byte: int) -> None:
    store = opened(files)
    slot = await fill(store, 1)
    assert await store.verify(slot)
    with slot.file.payload(byte, byte + 1) as view:
        view[0] ^= 1
    assert not await store.verify(slot)
    assert on_disk(slot).state is SlotState.EMPTY
    assert store.inventory() == ()
    store.close()


async def test_a_pinned_slot_is_not_granted(files: HeldFiles) -> None:
    store = opened(files)
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
    files: HeldFiles, step: int, capacity: int, is_kept: bool
) -> None:
    """A received chunk counts for the next grant of its slot only if the step and the file are the same.

    A larger slot gets a new file, which contains zeros in place of the chunk.
    """
    store = opened(files)
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
        self, files: HeldFiles, inline_bytes: int
    ) -> None:
        store, data = opened(files, memory_bytes=3 * self.SIZE, inline_digest_bytes=inline_bytes), payload(1, self.SIZE)
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

    async def test_nothing_is_digested_that_may_still_be_written(self, files: HeldFiles) -> None:
        store, data = opened(files, memory_bytes=3 * self.SIZE), payload(1, self.SIZE)
        slot, digests, sealing = await self.begun(store, 1)
        digests.grow(CHUNK_BYTES - 1)
        await asyncio.sleep(0)
        assert digests.known_count == 0
        self.write(slot, data)
        digests.complete()
        assert await sealing == payload_digest(data)
        store.close()

    async def test_who_goes_on_following_does_not_begin_again(self, files: HeldFiles) -> None:
        store = opened(files, memory_bytes=3 * self.SIZE)
        slot, digests, sealing = await self.begun(store, 1)
        assert store.follow(slot, header(store, 1, self.SIZE)) == (digests, False)
        digests.complete()
        await sealing
        assert store.follow(slot, header(store, 1, self.SIZE)) == (digests, False)
        store.close()

    async def test_a_grant_ends_it_and_nothing_of_it_is_left(self, files: HeldFiles) -> None:
        store = opened(files, memory_bytes=3 * self.SIZE)
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

    async def test_a_grant_just_before_the_digests_begin_ends_it_too(self, files: HeldFiles) -> None:
        store = opened(files, memory_bytes=3 * self.SIZE)
        slot, digests, sealing = await self.begun(store, 1)
        digests.complete()
        assert (
            await grant(store, 2, slot_count=1, capacity=self.SIZE) == 0
        )  # the slot is free, because no thread has begun to read it
        assert await sealing is None
        assert (on_disk(slot).state, on_disk(slot).step) == (SlotState.WRITING, 2)
        store.close()

    async def test_what_is_given_up_is_not_read_any_more_and_never_sealed(self, files: HeldFiles) -> None:
        store = opened(files, memory_bytes=3 * self.SIZE)
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

    async def test_nobody_begins_to_read_a_slot_while_its_readers_are_waited_for(self, files: HeldFiles) -> None:
        store = opened(files, memory_bytes=3 * self.SIZE)
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


def refuse_memory(patched: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    patched.setattr(slot_file, "populate", lambda *_, is_written: False)
    patched.setattr(os, "posix_fallocate", refuse)


class TestRoom:
    """Tests in which the node's memory is exhausted."""

    async def test_beyond_the_nodes_share_it_is_refused_with_the_figures(self, files: HeldFiles) -> None:
        store = opened(files, memory_bytes=CAPACITY + 100)
        await fill(store, 1)
        with pytest.raises(NoRoom) as refused:
            await grant(store, 2, keep={content(1)})
        assert (refused.value.needed_bytes, refused.value.available_bytes) == (2 * CAPACITY, CAPACITY + 100)
        assert "16,384 bytes" in str(refused.value)
        assert store.sealed(RANK, content(1)) is not None
        store.close()

    async def test_without_memory_a_slot_is_refused_and_leaves_nothing_behind(
        self, files: HeldFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = opened(files)
        with monkeypatch.context() as patched:
            refuse_memory(patched)
            with pytest.raises(NoRoom) as refused:
                await grant(store, 1)
        assert refused.value.needed_bytes == CAPACITY
        assert refused.value.available_bytes > 0
        assert files.names() == []
        assert await grant(store, 1) == 0
        store.close()

    async def test_a_slot_that_cannot_grow_is_left_without_room_and_the_others_stay(self, files: HeldFiles) -> None:
        store = opened(files, memory_bytes=2 * CAPACITY)
        await fill(store, 1)
        kept = await fill(store, 2)
        with pytest.raises(NoRoom):
            await grant(store, 3, keep={content(2)}, capacity=4 * CAPACITY)
        assert store.sealed(RANK, content(2)) is kept
        assert await grant(store, 3, keep={content(2)}) is not None  # the store can create a smaller slot
        store.close()

    async def test_a_slot_that_cannot_grow_without_memory_is_made_when_there_is_room(
        self, files: HeldFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = opened(files)
        await store.reserve(RANK, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2)
        larger = {"capacity_bytes": 2 * CAPACITY, "layout_hash": LAYOUT, "slot_count": 2}
        with monkeypatch.context() as patched:
            refuse_memory(patched)
            with pytest.raises(NoRoom) as refused:
                await store.reserve(RANK, **larger)
            assert refused.value.is_passing
            assert store.used_bytes() == CAPACITY
            store.close()
            store = opened(files)  # a new agent starts while the node has no free memory
        with pytest.raises(NoRoom) as refused:
            await store.reserve(RANK, **larger)
        assert refused.value.is_passing, "a rank may still write into forgotten memory"
        store.settle_copiers(RANK)
        await store.reserve(RANK, **larger)
        assert [os.fstat(files.descriptor(name)).st_size for name in files.names()] == [HEADER_BYTES + 2 * CAPACITY] * 2
        store.close()

    async def test_a_larger_layout_makes_the_slot_anew(self, files: HeldFiles) -> None:
        store = opened(files)
        await fill(store, 1)
        await fill(store, 2)
        index = await grant(store, 3, keep={content(2)}, capacity=2 * CAPACITY)
        assert index is not None
        slot = store.shards[RANK][index]
        assert slot.file.path.stat().st_size == HEADER_BYTES + 2 * CAPACITY
        assert on_disk(slot).capacity_bytes == 2 * CAPACITY
        store.close()

    async def test_reserving_makes_all_slots_and_touches_none_that_holds_something(self, files: HeldFiles) -> None:
        store = opened(files)
        slot = await fill(store, 1)
        await store.reserve(RANK, capacity_bytes=2 * CAPACITY, layout_hash=LAYOUT, slot_count=2)
        assert len({slot.file.path for slot in store.shards[RANK]}) == 2
        assert store.sealed(RANK, content(1)) is slot
        assert store.shards[RANK][1].file.header.capacity_bytes == 2 * CAPACITY
        store.close()

    async def test_slots_use_the_memory_that_admission_counts(self, files: HeldFiles) -> None:
        """A node's slots use the memory that the control plane calculates at admission.

        Each shard that the node owns or holds has two slots. All pages of these slots are allocated before the first
        step.
        """
        capacity, copies, ranks_per_node = 3_000_000, 2, 2
        store = opened(files, memory_bytes=1 << 30)
        for rank in range(copies * ranks_per_node):
            await store.reserve(Rank(rank), capacity_bytes=capacity, layout_hash=LAYOUT, slot_count=2)
        admitted = slot_bytes_per_node(copies=copies, shard_bytes=[capacity + HEADER_BYTES] * ranks_per_node)
        used = sum(os.fstat(files.descriptor(name)).st_blocks * 512 for name in files.names())
        assert 0.95 * admitted <= used <= 1.05 * admitted
        store.close()

    async def test_a_ranks_slots_are_made_near_its_gpu_and_those_of_others_anywhere(
        self, files: HeldFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = opened(files)
        store.memory_nodes = {RANK: 1}
        made: list[tuple[int | None, list[str]]] = []

        @contextlib.contextmanager
        def near(node: int | None) -> Iterator[None]:
            before = set(files.names())
            yield
            made.append((node, sorted(set(files.names()) - before)))

        monkeypatch.setattr(store_module, "near", near)
        for rank in (RANK, Rank(7)):
            await store.reserve(rank, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=1)
        await grant(store, 1, capacity=2 * CAPACITY)
        assert made == [(1, [f"{RUN}/rank-0.slot-0"]), (None, [f"{RUN}/rank-7.slot-0"]), (1, [f"{RUN}/rank-0.slot-0"])]
        store.close()

    async def test_slots_made_at_the_same_time_share_the_room(self, files: HeldFiles) -> None:
        store = opened(files, memory_bytes=3 * CAPACITY)
        made = [
            store.reserve(Rank(rank), capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2) for rank in range(2)
        ]
        results = await asyncio.gather(*made, return_exceptions=True)
        assert [isinstance(result, NoRoom) for result in results].count(True) == 1
        assert store.used_bytes() <= 3 * CAPACITY
        store.close()

    @pytest.mark.parametrize("capacity", [CAPACITY, 2 * CAPACITY], ids=["new", "larger"])
    async def test_two_who_make_the_slots_of_one_shard_take_turns(self, files: HeldFiles, capacity: int) -> None:
        store = opened(files)
        if capacity > CAPACITY:
            await store.reserve(RANK, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2)
        reserving = store.reserve(RANK, capacity_bytes=capacity, layout_hash=LAYOUT, slot_count=2)
        index, _ = await asyncio.gather(grant(store, 1, capacity=capacity), reserving)
        names = [f"{RUN}/rank-0.slot-{number}" for number in range(2)]
        assert [slot.file.name for slot in store.shards[RANK]] == files.names() == names
        assert [on_disk(slot) for slot in store.shards[RANK]] == [slot.file.header for slot in store.shards[RANK]]
        assert index is not None
        assert store.shards[RANK][index].is_written_with(content(1))
        assert store.used_bytes() == 2 * capacity
        store.close()

    async def test_a_slot_whose_making_is_cancelled_leaves_nothing(self, files: HeldFiles) -> None:
        store = opened(files)
        reserving = asyncio.create_task(store.reserve(RANK, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2))
        await asyncio.sleep(0)
        reserving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reserving
        assert files.names() == []
        assert store.shards[RANK] == []
        assert await grant(store, 1) == 0
        store.close()

    async def test_a_slot_that_nobody_wants_any_more_gets_no_more_pages(
        self, files: HeldFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A cancelled reservation of slots allocates no further pages.

        The agent cancels it when it must join a new generation. If it first had to allocate 16 GiB, it would join too
        late.
        """
        allocate, loop, begun, reserving = (
            slot_file.populate,
            asyncio.get_running_loop(),
            asyncio.Event(),
            asyncio.Event(),
        )
        pieces: list[int] = []

        def allocate_a_piece(address: int, size: int, *, is_written: bool) -> bool:
            pieces.append(size)
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(reserving.wait(), loop).result()
            return allocate(address, size, is_written=is_written)

        monkeypatch.setattr(slot_file, "populate", allocate_a_piece)
        store = opened(files, memory_bytes=4 * PIECE_BYTES)
        asked = asyncio.create_task(store.reserve(RANK, capacity_bytes=PIECE_BYTES, layout_hash=LAYOUT, slot_count=2))
        await begun.wait()
        asked.cancel()
        loop.call_later(0, reserving.set)
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert pieces == [PIECE_BYTES]
        assert files.names() == []
        store.close()

    async def test_a_slot_that_is_ready_when_nobody_wants_it_any_more_goes_again(
        self, files: HeldFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        create, loop, ready = SlotFile.create, asyncio.get_running_loop(), asyncio.Event()

        def create_and_tell(name: str, files: HeldFiles, header: SlotHeader, cancelled: threading.Event) -> SlotFile:
            file = create(name, files, header, cancelled)
            loop.call_soon_threadsafe(ready.set)
            assert cancelled.wait(30)
            return file

        monkeypatch.setattr(SlotFile, "create", create_and_tell)
        store = opened(files)
        asked = asyncio.create_task(store.reserve(RANK, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2))
        await ready.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert files.names() == []
        assert (store.shards[RANK], store.used_bytes()) == ([], 0)
        store.close()


class TestAdoption:
    """A restarted agent adopts its predecessor's slots."""

    async def test_sealed_slots_are_found_again_with_their_bytes(self, files: HeldFiles) -> None:
        store = opened(files)
        await fill(store, 1)
        await fill(store, 2)
        before = store.inventory()
        store.close()
        again = opened(files)
        assert again.inventory() == before
        slot = again.sealed(RANK, content(2))
        assert slot is not None
        assert await again.verify(slot)
        again.close()

    async def test_a_slot_that_was_being_written_stays_busy_until_its_writer_is_known_to_have_stopped(
        self, files: HeldFiles
    ) -> None:
        store = opened(files)
        await fill(store, 1)
        await grant(store, 2, keep={content(1)})
        store.close()
        again = opened(files)
        assert [record.step for record in again.inventory()] == [1]
        assert await grant(again, 3, keep={content(1)}) is None
        again.settle_copiers(RANK)
        assert on_disk(again.shards[RANK][1]).state is SlotState.EMPTY
        assert await grant(again, 3, keep={content(1)}) == 1
        again.close()

    @pytest.mark.parametrize(
        "damage", ["flipped", "torn", "not sealed", "missing", "foreign run", "foreign rank", "unknown version"]
    )
    async def test_a_slot_that_cannot_be_believed_is_void_in_its_place(self, files: HeldFiles, damage: str) -> None:
        store = opened(files)
        await fill(store, 1)
        second = await fill(store, 2)
        name, path = store.shards[RANK][0].file.name, store.shards[RANK][0].file.path
        store.close()
        data = path.read_bytes()
        sound = unpack_header(data[:HEADER_BYTES])

        def write(changed: bytes) -> None:
            with path.open("r+b") as file:
                file.write(changed)

        match damage:
            case "flipped":
                write(data[:20] + bytes([data[20] ^ 1]))
            case "torn":
                write(pack_header(replace(sound, step=Step(9)))[:100])
            case "not sealed":
                descriptor = create_file(name, len(data))
                os.pwrite(descriptor, data, 0)
                files.hold(name, descriptor)
                os.close(descriptor)
            case "missing":
                files.forget(name)
            case "foreign run":
                write(pack_header(replace(sound, run=OTHER)))
            case "foreign rank":
                write(pack_header(replace(sound, owner_rank=Rank(5))))
            case "unknown version":
                fields = data[:8] + b"\x09\x00" + data[10:176]
                write(fields + digest(fields))
        again = opened(files)
        assert [record.step for record in again.inventory()] == [2]
        assert len(again.shards[RANK]) == 2
        # slots keep their numbers, because the rank's page names them
        assert again.shards[RANK][1].file.name == second.file.name
        again.settle_copiers(RANK)
        slot = await fill(again, 3, keep={content(2)})
        assert slot.file.name == name
        assert {record.step for record in again.inventory()} == {2, 3}
        again.close()

    async def test_a_rank_keeps_its_mapping_of_a_slot_that_was_declared_void(self, files: HeldFiles) -> None:
        store = opened(files)
        slot = await fill(store, 1)
        store.close()
        with slot.file.path.open("r+b") as file:
            file.seek(20)
            file.write(b"\xff")
        inode = slot.file.path.stat().st_ino
        again = opened(files)
        assert slot.file.path.stat().st_ino == inode
        assert again.shards[RANK][0].file.header.capacity_bytes == CAPACITY
        again.close()

    async def test_the_slots_of_another_run_go(self, files: HeldFiles) -> None:
        store = opened(files)
        await fill(store, 1)
        store.close()
        again = SlotStore(files, memory_bytes=1 << 20)
        again.open_run(JOB, OTHER)
        assert again.inventory() == ()
        assert files.names() == []
        again.close()

    async def test_a_release_leaves_nothing(self, files: HeldFiles) -> None:
        store = opened(files)
        await fill(store, 1)
        store.page(RANK, 1).close()
        await store.release()
        assert files.names() == []


async def test_what_is_not_kept_is_void_after_a_load(files: HeldFiles) -> None:
    store = opened(files)
    await fill(store, 1)
    await fill(store, 2)
    await store.empty_all_but({RANK: {content(1)}})
    assert [record.step for record in store.inventory()] == [1]
    await store.empty_all_but({})
    assert store.inventory() == ()
    store.close()


class TestStrays:
    """Tests misplaced shards: slots of shards that the new plan places on other nodes."""

    STRAY = Rank(5)

    async def misplaced_ranks(
        self, files: HeldFiles, *, memory_bytes: int = 1 << 20, now: Callable[[], float] = time.monotonic
    ) -> SlotStore:
        """Return a store with two sealed slots of this node's shard, and two of a shard that the plan has moved
        away.
        """
        store = opened(files, memory_bytes=memory_bytes, now=now)
        for rank in (RANK, self.STRAY):
            for step in (1, 2):
                await fill(store, step, rank=rank)
        store.place(self.placing(RANK))
        return store

    @staticmethod
    def placing(*ranks: Rank, base: int = 2) -> MisplacedShards:
        """Return the rules for misplaced shards under a plan that places only the given shards on this node."""
        return MisplacedShards(placed=frozenset(ranks), base=Step(base), needed=frozenset({Step(1)}))

    @staticmethod
    def names(files: HeldFiles) -> list[str]:
        return [name.partition("/")[2] for name in files.names()]

    async def test_what_is_not_kept_of_them_gives_its_memory_back_at_load(self, files: HeldFiles) -> None:
        store = await self.misplaced_ranks(files)
        gone = store.shards[self.STRAY][0]
        reading = asyncio.create_task(store.reading(gone, asyncio.Event().wait()))
        await asyncio.sleep(0)
        await store.empty_all_but({self.STRAY: {content(2)}})
        assert await reading is None
        assert self.names(files) == ["rank-0.slot-0", "rank-0.slot-1", "rank-5.slot-1"]
        assert store.used_bytes() == 3 * CAPACITY
        assert store.sealed(self.STRAY, content(2)) is not None
        store.close()
        again = opened(files)
        assert again.sealed(self.STRAY, content(2)) is not None
        # the next plan places the shard on this node again, which reuses its files
        again.place(self.placing(RANK, self.STRAY))
        again.settle_copiers(self.STRAY)
        await again.reserve(self.STRAY, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2)
        assert self.names(files) == ["rank-0.slot-0", "rank-0.slot-1", "rank-5.slot-0", "rank-5.slot-1"]
        again.place(self.placing(RANK))
        await again.empty_all_but({})
        assert self.names(files) == ["rank-0.slot-0", "rank-0.slot-1"]
        assert list(again.shards) == [RANK]
        again.close()

    async def test_they_go_when_nobody_needs_or_reads_them_any_more(self, files: HeldFiles) -> None:
        store = await self.misplaced_ranks(files)
        fetched = store.shards[self.STRAY][1]
        fetched.pins += 1
        store.misplaced_shards = store.misplaced_shards.loaded().announced(Step(2), [self.STRAY])
        store.drop_misplaced_shards()
        assert store.sealed(self.STRAY, content(2)) is fetched
        fetched.pins -= 1
        store.drop_misplaced_shards()
        assert self.names(files) == ["rank-0.slot-0", "rank-0.slot-1"]
        assert {record.owner_rank for record in store.inventory()} == {RANK}
        store.close()

    async def test_they_stay_until_their_new_holders_have_the_base(self, files: HeldFiles) -> None:
        """The memory has room for exactly two slots of two shards, and a new shard needs slots.

        The store must not give a misplaced shard's memory to the new shard before the misplaced shard's new holders have the base, the step
        from which training starts.
        """
        store = await self.misplaced_ranks(files, memory_bytes=4 * CAPACITY)
        held = Rank(1)
        store.place(self.placing(RANK, held))
        for misplaced_shards in (store.misplaced_shards, store.misplaced_shards.loaded()):
            store.misplaced_shards = misplaced_shards
            with pytest.raises(NoRoom):
                await store.reserve(held, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2)
            assert self.steps(store) == [1, 2]
        store.misplaced_shards = store.misplaced_shards.announced(Step(-1), [self.STRAY])
        with pytest.raises(NoRoom):
            await store.reserve(held, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2)
        assert self.names(files) == ["rank-0.slot-0", "rank-0.slot-1", "rank-1.slot-0", "rank-5.slot-0"]
        assert self.steps(store) == [1], "the base is not committed, and nobody else keeps what is older"
        store.misplaced_shards = store.misplaced_shards.announced(Step(2), [])
        await store.reserve(held, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2)
        assert self.names(files) == ["rank-0.slot-0", "rank-0.slot-1", "rank-1.slot-0", "rank-1.slot-1"]
        store.close()

    async def test_one_slot_makes_way_at_a_time(self, files: HeldFiles) -> None:
        store = await self.misplaced_ranks(files, memory_bytes=5 * CAPACITY)
        store.misplaced_shards = replace(
            store.misplaced_shards, doubled={(self.STRAY, content(1)): frozenset()}
        ).loaded()
        await store.reserve(RANK, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=3)
        assert self.steps(store) == [1, 2], "there was room"
        store.place(replace(store.misplaced_shards, placed=frozenset({RANK, Rank(1)})))
        with pytest.raises(NoRoom):
            await store.reserve(Rank(1), capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2)
        assert self.steps(store) == [2], "its owner keeps the older step; the base has no other copy"
        with pytest.raises(NoRoom):
            await store.reserve(Rank(2), capacity_bytes=2 * CAPACITY, layout_hash=LAYOUT, slot_count=1)
        store.misplaced_shards = store.misplaced_shards.announced(Step(-1), [self.STRAY])
        with pytest.raises(NoRoom):
            await store.reserve(Rank(2), capacity_bytes=2 * CAPACITY, layout_hash=LAYOUT, slot_count=1)
        assert self.steps(store) == [2], "dropping it would not have been enough"
        store.close()

    LOW, HIGH = Rank(1), Rank(3)

    async def waiting(self, files: HeldFiles, *, slots: int, now: Callable[[], float] = time.monotonic) -> SlotStore:
        """Return a store that has one stray, lacks the shards of two ranks, and has room for `slots` more slots."""
        store = await self.misplaced_ranks(files, memory_bytes=(4 + slots) * CAPACITY, now=now)
        placed = frozenset({RANK, self.LOW, self.HIGH})
        store.place(replace(store.misplaced_shards, placed=placed, expected=placed - {RANK}, patience_seconds=2.0))
        return store

    async def test_the_last_slot_goes_to_the_lowest_rank(self, files: HeldFiles) -> None:
        store = await self.waiting(files, slots=1)
        with pytest.raises(NoRoom):
            await fill(store, 2, rank=self.HIGH)
        await fill(store, 2, rank=self.LOW)
        with pytest.raises(NoRoom):
            await fill(store, 2, rank=self.HIGH)
        store.misplaced_shards = store.misplaced_shards.loaded().announced(Step(-1), [self.STRAY])
        await fill(store, 2, rank=self.HIGH)
        assert self.steps(store) == [1]
        store.close()

    async def test_a_slot_drops_only_as_many_strays_as_it_needs(self, files: HeldFiles) -> None:
        store = await self.waiting(files, slots=0)
        store.misplaced_shards = store.misplaced_shards.loaded().announced(Step(-1), [self.STRAY])
        with pytest.raises(NoRoom):
            await fill(store, 2, rank=self.HIGH)
        assert self.steps(store) == [1, 2]
        store.misplaced_shards = replace(store.misplaced_shards, doubled={(self.STRAY, content(1)): frozenset()})
        await fill(store, 2, rank=self.HIGH)
        assert self.steps(store) == [2], "rank 1 can still receive the memory of the other slot"
        store.close()

    async def test_the_last_slot_goes_to_a_higher_rank_once_its_patience_is_over(self, files: HeldFiles) -> None:
        seconds = 5.0
        store = await self.waiting(files, slots=1, now=lambda: seconds)
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

    async def test_the_patience_begins_again_with_every_plan(self, files: HeldFiles) -> None:
        seconds = 0.0
        store = await self.waiting(files, slots=1, now=lambda: seconds)
        with pytest.raises(NoRoom):
            await fill(store, 2, rank=self.HIGH)
        seconds = 2.0
        store.place(store.misplaced_shards)
        with pytest.raises(NoRoom):
            await fill(store, 2, rank=self.HIGH)
        store.close()

    async def test_the_second_slot_of_a_shard_leaves_the_last_slot_to_a_shard_without_one(
        self, files: HeldFiles
    ) -> None:
        store = await self.waiting(files, slots=2)
        with pytest.raises(NoRoom):
            await store.reserve(self.LOW, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2)
        assert len(store.shards[self.LOW]) == 1
        await fill(store, 2, rank=self.HIGH)
        store.close()

    async def test_the_patience_begins_again_with_the_second_slot(self, files: HeldFiles) -> None:
        seconds = 0.0
        store = await self.waiting(files, slots=0, now=lambda: seconds)
        with pytest.raises(NoRoom):
            await fill(store, 2, rank=self.LOW)
        seconds = 3.0
        store.memory_bytes += 2 * CAPACITY
        with pytest.raises(NoRoom):
            await store.reserve(self.LOW, capacity_bytes=CAPACITY, layout_hash=LAYOUT, slot_count=2)
        assert len(store.shards[self.LOW]) == 1
        store.close()

    async def test_a_slot_that_is_being_created_does_not_count_twice(self, files: HeldFiles) -> None:
        store = await self.waiting(files, slots=2)
        await asyncio.gather(*(fill(store, 2, rank=rank) for rank in (self.LOW, self.HIGH)))
        store.close()

    def steps(self, store: SlotStore) -> list[int]:
        return [record.step for record in store.inventory() if record.owner_rank == self.STRAY]


def tampered(path: Path, how: str) -> None:
    """Do to a file what a rank can do to a file that it may write."""
    if how in SIZES:
        with pytest.raises(OSError, match=r"not permitted|too large"):
            os.truncate(path, SIZES[how])
    with path.open("r+b") as file:
        if how in ("extended", "scribbled"):
            file.write(b"\xff" * path.stat().st_size)
        if how == "extended":
            with contextlib.suppress(PermissionError):
                file.write(b"\xff" * (1 << 20))
                file.flush()
        if how == "punched":
            subprocess.run(
                ["fallocate", "--punch-hole", "-l", "4096", f"/proc/{os.getpid()}/fd/{file.fileno()}"], check=True
            )


SIZES = {"enlarged": 1 << 36, "enormous": 1 << 62, "emptied": 0, "shortened": 100}
TAMPERED = (*SIZES, "extended", "scribbled", "punched")


@pytest.mark.security
@pytest.mark.parametrize("how", TAMPERED)
async def test_a_store_opens_whatever_a_rank_did_to_its_slots_and_page(files: HeldFiles, how: str) -> None:
    store = opened(files)
    slot = await fill(store, 1)
    honest = await fill(store, 1, rank=Rank(1))
    page = store.page(RANK, 1)
    page.write(AgentHalf(1, committed=90))
    page.close()
    store.close()
    for name in (slot.file.name, page.name):
        tampered(Path(f"/proc/self/fd/{files.descriptor(name)}"), how)
    again = opened(files)
    assert [each.file.content for each in again.shards[Rank(1)]] == [honest.file.content]
    is_intact = how in SIZES
    assert [each.file.content for each in again.shards[RANK]] == [slot.file.content if is_intact else None]
    assert again.used_bytes() < 1 << 20
    assert len(again.page_commits()) == is_intact
    assert last_half(page.name, files) is None
    assert await grant(again, 2) is not None, "the rank can still keep its steps"
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


async def test_the_newest_commit_on_the_pages_is_reported_by_generation(files: HeldFiles) -> None:
    store = opened(files)
    assert store.page_commits() == ()
    for rank, generation, committed in ((0, 1, 90), (1, 2, 95), (2, 2, 96), (3, 3, -1), (4, 2, 2**60)):
        page = store.page(Rank(rank), generation)
        page.write(AgentHalf(generation, committed=committed))
        page.close()
    empty = create_file("a page", 0)
    files.hold(f"{RUN}/rank-5.word", empty)
    os.close(empty)
    expected = (
        PageCommit(generation=Generation(1), step=Step(90)),
        PageCommit(generation=Generation(2), step=Step(96)),
    )
    assert store.page_commits() == expected
    store.close()
    later = opened(files)
    assert later.page_commits() == expected, "another agent of the node reads the same pages"
    later.page(Rank(1), 3).close()
    later.page(Rank(2), 3).close()
    assert later.page_commits() == expected[:1], "Load clears a page"
    later.close()


async def test_the_newest_ended_ranks_tell_how_far_they_came(files: HeldFiles) -> None:
    store = opened(files)
    assert store.ended_ranks() is None
    for rank, generation, boundary in ((0, 1, 90), (1, 2, 40), (2, 2, 41)):
        name = store.page(Rank(rank), generation).name
        with mmap.mmap(files.descriptor(name), RANK_WORD_BYTES) as page, memoryview(page) as view:
            write_rank_half(view, RankHalf(generation, boundary))
    assert store.ended_ranks() == EndedRanks(generation=Generation(2), boundary=Step(41)), (
        "not the page of a rank that moved away since"
    )
    store.close()


@pytest.mark.parametrize("inline_bytes", [0, CHUNK_BYTES])
@pytest.mark.parametrize("size", [1000, CHUNK_BYTES, CHUNK_BYTES + 1000])
async def test_the_digest_of_a_state_covers_all_tensors_and_not_the_index(
    files: HeldFiles, size: int, inline_bytes: int
) -> None:
    store = opened(files, memory_bytes=1 << 26, inline_digest_bytes=inline_bytes)

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


async def test_the_state_of_a_slot_that_is_written_has_no_digest(files: HeldFiles) -> None:
    store = opened(files)
    slot = await fill(store, 1)
    assert await store.state_digest(slot) is not None
    assert await grant(store, 2, slot_count=1) == 0
    assert await store.state_digest(slot) is None
