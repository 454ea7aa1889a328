"""All slots of a node: their creation, their content, their readers, and grants to writers.

A grant permits a rank or a transfer to overwrite a slot. The names of the files (`held_files`):

    <run>/rank-<r>.slot-<i>      a slot (`slot_file`)
    <run>/rank-<r>.word          a rank's page (`rank_page`)

Invariant: before `grant` returns a slot, it cancels and joins every reader of the slot. No task therefore reads or
digests the old content of a granted slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import TypeVar

from everstep.protocol.agent_messages import EndedRanks, PageCommit
from everstep.protocol.errors import MalformedMessage, ProtocolError
from everstep.protocol.ids import FIRST_STEP, Generation, JobName, Rank, RunId, Step
from everstep.protocol.parity import Contribution, is_share, unpack_contributions
from everstep.protocol.plan import SlotRecord
from everstep.protocol.slot import (
    DIGEST_BYTES,
    SlotHeader,
    SlotState,
    chunk_bytes,
    chunk_range,
    digest,
    state_digest,
)
from worker.core.misplaced_shards import MisplacedShards
from worker.core.slots import Content, SlotView, being_written, find_sealed, writable
from worker.errors import NoRoom
from worker.node.health.memory import memory_facts
from worker.node.priority import work_as_ranks_do, work_at
from worker.shm.chunk_digests import ChunkDigests
from worker.shm.held_files import HeldFiles
from worker.shm.numa import near
from worker.shm.rank_page import RankPage, last_agent_half, last_half
from worker.shm.slot_file import SlotFile
from worker.tasks import Signal, end, ended

log = logging.getLogger(__name__)
INLINE_DIGEST_BYTES = 1024 * 1024
"""Maximum payload digested on the event loop. At 30 GiB/s this takes 0.03 ms, less than the start of a thread."""
BATCH_BYTES = 32 * 1024 * 1024
"""Maximum bytes that a thread digests before it publishes the new digests."""
VERIFY_THREADS = min(8, os.cpu_count() or 1)
"""Threads that verify shards during a restore. Each reads 30 GiB/s, so a few use the whole memory bandwidth."""
_SLOT_NAME = re.compile(r"\w+/rank-(\d+)\.slot-(\d+)")
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Slot:
    """One slot of a shard on this node: its file, its digests, and the tasks that use it."""

    file: SlotFile
    readers: set[asyncio.Task[object]] = field(default_factory=set)
    pins: int = 0
    is_busy: bool = False
    digests: ChunkDigests | None = None
    """Digests of the content that is being written or is sealed, not stored in the file. None if not computed yet."""
    arrived: dict[int, bytes] = field(default_factory=dict)
    """Digests of the chunks that a running transfer into this slot has received and verified, by chunk index."""

    def is_written_with(self, content: Content) -> bool:
        """Return whether the slot is being filled with this content."""
        return self.file.header.state is SlotState.WRITING and self.file.content == content

    @property
    def sealed_content(self) -> Content | None:
        """The content of a sealed slot; None if the slot is not sealed."""
        return self.file.content if self.file.header.state is SlotState.SEALED else None

    @property
    def is_used(self) -> bool:
        """True if a task of this agent verifies the slot, uploads it, or sends it to another node."""
        return bool(self.pins or self.readers)

    @property
    def view(self) -> SlotView:
        """The slot's state, content and use, as input for the pure functions of `worker.core.slots`."""
        return SlotView(self.file.header.state, self.file.content, is_pinned=self.pins > 0, is_busy=self.is_busy)


@dataclass(eq=False, repr=False)
class SlotStore:
    """The slots of one run. The agent owns the store, and calls every method on its event loop.

    `memory_bytes` limits all slots together. `files` hold the slots and pages, also for the node's next agent process.
    """

    files: HeldFiles
    _: KW_ONLY
    memory_bytes: int
    inline_digest_bytes: int = INLINE_DIGEST_BYTES
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.run: RunId | None = None
        self.job = JobName("")
        self.shards: dict[Rank, list[Slot]] = {}
        self.memory_nodes: Mapping[Rank, int] = {}
        """NUMA node for the slots of each rank. For ranks without an entry, the kernel chooses."""
        self.misplaced_shards = MisplacedShards()
        """Facts that decide which misplaced shards the store drops.

        The `Member` replaces this object when they change.
        """
        self.making = Signal()
        """Notified when a task begins to choose or create a slot of any shard (see `is_making`)."""
        self._makers: defaultdict[Rank, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._creating: dict[Rank, int] = {}
        """Size of the file that a thread is creating, by the rank that owns the shard."""
        self._refused_at: dict[Rank, float] = {}
        """Time at which this node first refused a slot, by the rank that still waits for the slot."""

    def open_run(self, job: JobName, run: RunId) -> None:
        """Adopt the slots of `run` and remove the slots of all other runs.

        A slot that was incomplete when the last agent process ended stays busy until the caller calls `settle_copiers`,
        because a process may still write to it.
        """
        if self.run == run:
            return
        self.close()
        self.job, self.run = job, run
        self._forget_files(lambda name: not name.startswith(f"{run}/"))
        found = [match for name in self.files.names() if (match := _SLOT_NAME.fullmatch(name))]
        for rank in sorted({Rank(int(match[1])) for match in found}):
            count = 1 + max(int(match[2]) for match in found if int(match[1]) == rank)
            self.shards[rank] = [self._adopt(rank, self._name(rank, index)) for index in range(count)]

    def _adopt(self, rank: Rank, name: str) -> Slot:
        """Return the slot of this name; an empty slot with the same number if its file is invalid."""
        try:
            file = SlotFile.adopt(name, self.files)
        except (ProtocolError, OSError) as error:
            log.warning("slot %s is treated as empty: %s", name, error)
        else:
            if (file.header.run, file.header.owner_rank) == (self.run, rank):
                return Slot(file, is_busy=file.header.state is SlotState.WRITING)
            log.warning(
                "slot %s is treated as empty: it belongs to run %s rank %d",
                name,
                file.header.run,
                file.header.owner_rank,
            )
            file.close()
        return Slot(SlotFile.void(name, self.files, self._header(rank)), is_busy=True)

    def _name(self, rank: Rank, index: int) -> str:
        return f"{self.run}/rank-{rank}.slot-{index}"

    def _forget_files(self, is_over: Callable[[str], bool] = lambda _: True) -> None:
        for name in filter(is_over, self.files.names()):
            self.files.forget(name)

    def _header(self, rank: Rank) -> SlotHeader:
        return SlotHeader(
            job=self.job,
            run=self.run or RunId(""),
            owner_rank=rank,
            origin_generation=Generation(0),
            step=Step(0),
            state=SlotState.EMPTY,
            capacity_bytes=0,
        )

    def settle_copiers(self, rank: Rank) -> None:
        """Empty the busy slots of a rank, into which no process writes any more, as the caller guarantees."""
        for slot in self.shards.get(rank, []):
            if slot.is_busy:
                slot.is_busy = False
                slot.file.empty()

    async def release(self) -> None:
        """Remove all slots and rank pages, because the run that this node worked for has ended here."""
        for slots in self.shards.values():
            for slot in slots:
                await self._join(slot)
        self.close()
        self._forget_files()

    def close(self) -> None:
        """Unmap all slots. A later agent process adopts their files."""
        for slots in self.shards.values():
            for slot in slots:
                slot.file.close()
        self.shards.clear()
        self.run = None

    def page(self, rank: Rank, generation: int) -> RankPage:
        """Open or create the memory page that the rank shares with the agent."""
        return RankPage(f"{self.run}/rank-{rank}.word", self.files, generation=generation)

    def _pages(self) -> list[str]:
        return [name for name in self.files.names() if name.startswith(f"{self.run}/") and name.endswith(".word")]

    def ended_ranks(self) -> EndedRanks | None:
        """Return the newest generation whose ranks left pages, and their highest step. They must have exited."""
        halves = [half for name in self._pages() if (half := last_half(name, self.files)) is not None]
        newest = max((half.generation for half in halves), default=None)
        if newest is None:
            return None
        return EndedRanks(
            generation=Generation(newest),
            boundary=Step(max(half.boundary for half in halves if half.generation == newest)),
        )

    def page_commits(self) -> tuple[PageCommit, ...]:
        """Return the newest committed step on the pages of each generation, oldest first, once streams are closed."""
        newest: dict[Generation, Step] = {}
        for name in self._pages():
            # The control plane needs only one readable page with the newest committed step, on any node.
            half = last_agent_half(name, self.files)
            if half is None:
                log.warning("the page %s is unreadable, so its committed step is not reported", name)
            elif half.committed >= FIRST_STEP:
                generation = Generation(half.generation)
                newest[generation] = max(newest.get(generation, FIRST_STEP), Step(half.committed))
        return tuple(PageCommit(generation=generation, step=newest[generation]) for generation in sorted(newest))

    def inventory(self) -> tuple[SlotRecord, ...]:
        """Return every sealed slot, by rank and step."""
        found = [
            SlotRecord(
                owner_rank=rank,
                origin_generation=slot.file.header.origin_generation,
                step=slot.file.header.step,
                payload_bytes=slot.file.header.payload_bytes,
                digest=slot.file.header.payload_digest,
                layout_hash=slot.file.header.layout_hash,
                contributions=contributions_of(slot.file) if is_share(rank) else (),
            )
            for rank, slots in self.shards.items()
            for slot in slots
            if slot.file.header.state is SlotState.SEALED
        ]
        return tuple(sorted(found, key=lambda record: (record.owner_rank, record.step, record.origin_generation)))

    def sealed(self, rank: Rank, content: Content) -> Slot | None:
        """Return the slot in which `content` of this shard is sealed, or None."""
        slots = self.shards.get(rank, [])
        index = find_sealed([slot.view for slot in slots], content)
        return None if index is None else slots[index]

    def used_bytes(self) -> int:
        """Return the total capacity of all slots in bytes."""
        return sum(slot.file.header.capacity_bytes for slots in self.shards.values() for slot in slots)

    async def grant(
        self,
        rank: Rank,
        content: Content,
        *,
        keep: Collection[Content],
        capacity_bytes: int,
        layout_hash: bytes,
        slot_count: int,
        free: Callable[[Sequence[SlotView], Collection[Content]], int | None] = writable,
    ) -> int | None:
        """Prepare a slot for writing `content`, mark it as WRITING, and return its index.

        `keep` are contents of this shard that must not be overwritten. A smaller slot is replaced by one of
        `capacity_bytes`. `slot_count` is the maximum of this shard. `free` returns the index of the slot to overwrite,
        given all slots and `keep`.

        Return None if every slot is protected, pinned or busy. Raises NoRoom if the node's memory for slots is
        exhausted.
        """
        async with self._alone(rank):
            slots = self.shards.setdefault(rank, [])
            views = [slot.view for slot in slots]
            index = being_written(views, content)
            if index is None:
                index = free(views, keep) if len(slots) >= slot_count else self._reusable(slots)
            header = SlotHeader(
                job=self.job,
                run=self.run or RunId(""),
                owner_rank=rank,
                origin_generation=content.origin,
                step=content.step,
                state=SlotState.WRITING,
                capacity_bytes=capacity_bytes,
                layout_hash=layout_hash,
            )
            if index is None and len(slots) < slot_count:
                index = len(slots)
                slots.append(Slot(await self._create(rank, index, header)))
                return index
            if index is None:
                return None
            slot = slots[index]
            if not slot.is_written_with(content) or slot.file.header.capacity_bytes < capacity_bytes:
                slot.arrived = {}
            # Empty the slot first, so that it gets no new reader while `_join` waits for its current readers.
            self._void(slot)
            await self._join(slot)
            if slot.file.header.capacity_bytes < capacity_bytes:
                await self._enlarge(slot, rank, index, header)
            else:
                slot.file.write_header(replace(header, capacity_bytes=slot.file.header.capacity_bytes))
            return index

    async def reserve(self, rank: Rank, *, capacity_bytes: int, layout_hash: bytes, slot_count: int) -> None:
        """Create this shard's empty slots before the first capture. Raises NoRoom if the memory is exhausted."""
        async with self._alone(rank):
            slots = self.shards.setdefault(rank, [])
            empty = replace(self._header(rank), capacity_bytes=capacity_bytes, layout_hash=layout_hash)
            for index, slot in enumerate(slots):
                # The slot's file is removed, but the rank may still write into its memory, which is thus not free yet.
                if slot.is_busy and not slot.file.header.capacity_bytes:
                    raise self._full(capacity_bytes)
                if (
                    slot.view.state is SlotState.EMPTY
                    and not slot.is_busy
                    and slot.file.header.capacity_bytes < capacity_bytes
                ):
                    await self._join(slot)
                    await self._enlarge(slot, rank, index, empty)
            while len(slots) < slot_count:
                slots.append(Slot(await self._create(rank, len(slots), empty)))

    @contextlib.asynccontextmanager
    async def _alone(self, rank: Rank) -> AsyncIterator[None]:
        """Hold the lock of a shard while the context is open: one task at a time chooses or creates its slots."""
        async with self._makers[rank]:
            self.making.notify()
            yield

    def is_making(self, rank: Rank) -> bool:
        """Return whether a task now chooses, creates or removes a slot of this shard."""
        return self._makers[rank].locked()

    async def _enlarge(self, slot: Slot, rank: Rank, index: int, header: SlotHeader) -> None:
        slot.file.drop()
        slot.file = await self._create(rank, index, header)

    def _reusable(self, slots: list[Slot]) -> int | None:
        empty = [
            index
            for index, slot in enumerate(slots)
            if slot.view.state is SlotState.EMPTY and not slot.is_busy and not slot.pins
        ]
        return empty[0] if empty else None

    async def _create(self, rank: Rank, index: int, header: SlotHeader) -> SlotFile:
        """Create a slot's file in a thread, because allocation takes up to a second per GiB."""
        self._make_room(rank, header.capacity_bytes)
        if header.capacity_bytes > memory_facts().available_bytes:
            raise self._full(header.capacity_bytes)
        self._creating[rank] = header.capacity_bytes
        made: list[SlotFile] = []

        def make(cancelled: threading.Event) -> None:
            with near(self.memory_nodes.get(rank)):
                made.append(SlotFile.create(self._name(rank, index), self.files, header, cancelled))

        try:
            await in_thread(make, is_pressing=True)
        except OSError as error:
            raise self._full(header.capacity_bytes) from error
        except asyncio.CancelledError:
            for file in made:
                file.close(unlink=True)
            raise
        else:
            self._refused_at.pop(rank, None)
            return made[0]
        finally:
            del self._creating[rank]

    def _make_room(self, rank: Rank, capacity_bytes: int) -> None:
        """Remove slots of misplaced shards that `MisplacedShards.makes_way` permits until a new slot fits, oldest
        content first.

        If they are too small together, none is removed. Raises NoRoom if the slot does not fit beside the slots that it
        must leave to other shards (`MisplacedShards.slots_ahead`).
        """
        misplaced_shards = [
            (owner, slot)
            for owner, slots in self.shards.items()
            if owner not in self.misplaced_shards.placed
            for slot in slots
        ]
        leaving = [each for each in misplaced_shards if self._makes_way(*each)]
        used_bytes = self.used_bytes() + sum(self._creating.values())
        leaving_bytes = sum(slot.file.header.capacity_bytes for _, slot in leaving)
        now = self.now()
        ahead = self.misplaced_shards.slots_ahead(
            rank, self._contents(), waited_seconds=now - self._refused_at.get(rank, now)
        )
        needed_bytes = used_bytes + (1 + ahead) * capacity_bytes
        if needed_bytes - leaving_bytes > self.memory_bytes:
            self._refused_at.setdefault(rank, now)
            raise NoRoom(needed_bytes=needed_bytes, available_bytes=self.memory_bytes)
        lacking_bytes = used_bytes + capacity_bytes - self.memory_bytes
        for owner, slot in sorted(leaving, key=lambda each: (each[1].file.header.step, each[0])):
            if lacking_bytes > 0:
                lacking_bytes -= slot.file.header.capacity_bytes
                slot.file.drop()
                self._forget_if_empty(owner)

    def _contents(self) -> dict[Rank, list[Content | None]]:
        found: dict[Rank, list[Content | None]] = {
            rank: [slot.sealed_content for slot in slots if slot.file.header.capacity_bytes]
            for rank, slots in self.shards.items()
        }
        for rank in self._creating:
            found.setdefault(rank, []).append(None)
        return found

    def _makes_way(self, rank: Rank, slot: Slot) -> bool:
        return not slot.is_used and self.misplaced_shards.makes_way(rank, slot.file.content)

    def _forget_if_empty(self, rank: Rank) -> None:
        """Stop managing a misplaced shard if none of its slots has content."""
        if rank not in self.misplaced_shards.placed and all(
            slot.view.state is SlotState.EMPTY for slot in self.shards[rank]
        ):
            del self.shards[rank]

    def _full(self, needed_bytes: int) -> NoRoom:
        return NoRoom(needed_bytes=needed_bytes, available_bytes=memory_facts().available_bytes, is_passing=True)

    def follow(self, slot: Slot, header: SlotHeader) -> tuple[ChunkDigests, bool]:
        """Return the digests of the content that a writer, which reports `header`, writes into a granted slot.

        The second result is True if this call created the digests. The caller must then run `seal_followed`.
        """
        header = replace(header, state=SlotState.WRITING, capacity_bytes=slot.file.header.capacity_bytes)
        if slot.digests is not None and slot.digests.header == header:
            return slot.digests, False
        slot.file.header = header
        slot.digests = ChunkDigests(header)
        return slot.digests, True

    async def seal_followed(self, slot: Slot, digests: ChunkDigests, *, expected: bytes | None = None) -> bytes | None:
        """Digest each part of the content as soon as the writer has finished it; seal the slot after the last part.

        The caller records the writer's progress in `digests` (`ChunkDigests.grow`). Return the payload's digest. If it
        differs from `expected`, empty the slot and return None. Also return None if the slot was reused meanwhile, or
        the rank abandoned the capture.
        """
        if slot.digests is not digests:
            return None
        if not digests.is_whole and await self.reading(slot, self._digest(slot, digests)) is None:
            return None
        if slot.digests is not digests:
            return None
        if expected is not None and digests.payload_digest != expected:
            self._void(slot)
            return None
        return self._declare(slot, digests)

    async def seal(self, rank: Rank, index: int, header: SlotHeader, *, expected: bytes | None = None) -> bytes | None:
        """Digest the complete content of a slot that is WRITING, seal it, and return the payload's digest.

        None if it differs from `expected`, or if the slot was granted for another step or its capture was abandoned
        meanwhile.
        """
        slot = self.shards[rank][index]
        digests, _ = self.follow(slot, header)
        digests.complete()
        return await self.seal_followed(slot, digests, expected=expected)

    def seal_verified(self, slot: Slot, header: SlotHeader, chunk_digests: bytes) -> bytes:
        """Seal a slot whose chunks were all verified against `chunk_digests`, and return the payload's digest."""
        digests = ChunkDigests(header)
        digests.add(chunk_digests)
        return self._declare(slot, digests)

    @staticmethod
    def _declare(slot: Slot, digests: ChunkDigests) -> bytes:
        capacity, found = slot.file.header.capacity_bytes, digests.payload_digest
        slot.file.write_header(
            replace(digests.header, state=SlotState.SEALED, capacity_bytes=capacity, payload_digest=found)
        )
        slot.digests, slot.arrived = digests, {}
        digests.seal()
        return found

    @staticmethod
    def _void(slot: Slot) -> None:
        slot.digests = None
        slot.file.empty()

    def give_up(self, rank: Rank, content: Content) -> None:
        """Cancel all tasks that read the slot into which the rank copies `content`, because it abandons the copy."""
        for slot in self.shards.get(rank, []):
            if slot.is_written_with(content):
                slot.digests = None
                for task in slot.readers:
                    task.cancel()

    async def verify(self, slot: Slot, *, threads: int = 1, is_pressing: bool = False) -> bool | None:
        """Digest a sealed slot again. A slot that does not match its own digest is emptied.

        If training waits for the result (`is_pressing`), the threads run at the agent's priority. Return whether the
        content matches the header. None if the slot is not sealed, or was reused during the call.
        """
        header = slot.file.header
        if header.state is not SlotState.SEALED:
            return None
        found = ChunkDigests(header)
        found.complete()
        if (
            await self.reading(slot, self._digest_at_once(slot, found, threads, is_pressing)) is None
            or slot.file.header is not header
        ):
            return None
        if found.payload_digest != header.payload_digest:
            self._void(slot)
            return False
        found.seal()
        slot.digests = found
        return True

    async def digests(self, slot: Slot) -> ChunkDigests | None:
        """Return a slot's chunk digests, computed if unknown. None if they do not match or the slot was reused."""
        if slot.digests is None and not await self.verify(slot):
            return None
        return slot.digests

    async def state_digest(self, slot: Slot) -> bytes | None:
        """Return the digest of the tensors in a slot that this store has sealed. None if it was reused meanwhile."""
        if slot.digests is None or not slot.digests.is_sealed:
            return None
        header, known = slot.digests.header, slot.digests.known
        whole_count = header.index_offset // chunk_bytes(header.payload_bytes)
        begin = whole_count * chunk_bytes(header.payload_bytes)

        def work(_cancelled: threading.Event) -> bytes:
            with slot.file.payload(begin, header.index_offset) as rest:
                return state_digest(known[: whole_count * DIGEST_BYTES], rest)

        if header.index_offset - begin <= self.inline_digest_bytes:
            return work(threading.Event())
        return await self.reading(slot, in_thread(work))

    async def reading(self, slot: Slot, work: Coroutine[object, object, T]) -> T | None:
        """Run `work`, which only reads the slot's content, as a task that `grant` cancels if it reuses the slot.

        Return the result of `work` (never None), or None if the slot was reused for another step during the call.
        """
        task = asyncio.create_task(work)
        slot.readers.add(task)
        try:
            await asyncio.wait([task])
        finally:
            await end(task)
            slot.readers.discard(task)
        return None if task.cancelled() else task.result()

    async def _digest_at_once(self, slot: Slot, digests: ChunkDigests, threads: int, is_pressing: bool) -> ChunkDigests:
        size = digests.header.payload_bytes
        if size <= self.inline_digest_bytes:
            digests.add(_digest_chunks(slot.file, size, range(digests.chunk_count), threading.Event()))
            return digests
        each = -(-digests.chunk_count // threads)
        parts = [range(first, min(first + each, digests.chunk_count)) for first in range(0, digests.chunk_count, each)]
        async with asyncio.TaskGroup() as group:
            begun = [
                group.create_task(in_thread(partial(_digest_chunks, slot.file, size, part), is_pressing=is_pressing))
                for part in parts
            ]
        for task in begun:
            digests.add(task.result())
        return digests

    async def _digest(self, slot: Slot, digests: ChunkDigests) -> ChunkDigests:
        size = digests.header.payload_bytes
        at_once = max(1, -(-BATCH_BYTES // chunk_bytes(size)))
        while not digests.is_whole:
            first, due = digests.known_count, digests.due_count
            if first == due:
                await digests.changed.wait(digests.changed.version)
                continue
            work = partial(_digest_chunks, slot.file, size, range(first, min(due, first + at_once)))
            digests.add(work(threading.Event()) if size <= self.inline_digest_bytes else await in_thread(work))
        return digests

    @staticmethod
    async def _join(slot: Slot) -> None:
        readers = list(slot.readers)
        for task in readers:
            task.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    def place(self, misplaced_shards: MisplacedShards) -> None:
        """Set the object that decides which misplaced shards the store drops.

        A `Member` calls this when a generation starts.
        """
        self.misplaced_shards = misplaced_shards
        self._refused_at.clear()

    async def empty_all_but(self, keep: Mapping[Rank, Collection[Content]]) -> None:
        """Empty all slots whose content is not in `keep`, and remove the files of shards that are placed elsewhere."""
        for rank, slots in list(self.shards.items()):
            for slot in slots:
                if slot.view.content not in keep.get(rank, set()):
                    await self._join(slot)
                    if rank in self.misplaced_shards.placed:
                        slot.file.empty()
                    else:
                        slot.file.drop()
            self._forget_if_empty(rank)

    def drop_misplaced_shards(self) -> None:
        """Remove the misplaced shards that no node needs (`MisplacedShards.is_over`) and that no task reads."""
        for rank in [rank for rank in self.shards if self.misplaced_shards.is_over(rank)]:
            if not any(slot.is_used for slot in self.shards[rank]):
                for slot in self.shards.pop(rank):
                    slot.file.drop()


def contributions_of(share: SlotFile) -> tuple[Contribution, ...]:
    """Return the shards that a sealed share contains. Empty if the share's list of them is damaged."""
    begin = share.header.index_offset
    try:
        with share.payload(begin, begin + share.header.index_bytes) as index:
            return unpack_contributions(index)
    except MalformedMessage as error:
        log.warning("the share in %s cannot rebuild a shard: %s", share.name, error)
        return ()


def _digest_chunks(file: SlotFile, size: int, chunks: range, cancelled: threading.Event) -> bytes:
    found = bytearray()
    for chunk in chunks:
        if cancelled.is_set():
            break
        with file.payload(*chunk_range(chunk, size)) as piece:
            found += digest(piece)
    return bytes(found)


async def in_thread(work: Callable[[threading.Event], T], *, is_pressing: bool = False) -> T:
    """Run `work` in a thread. The thread has ended when this returns, even if the caller is cancelled.

    `work` receives an event that is set on cancellation, and must check it between pieces. `is_pressing` runs the
    thread at the agent's priority instead of that of ranks. Raises asyncio.CancelledError if the caller was cancelled.
    """
    cancelled = threading.Event()
    own = os.getpriority(os.PRIO_PROCESS, 0)

    def body() -> T:
        if is_pressing:
            work_at(own)
        else:
            work_as_ranks_do()
        return work(cancelled)

    thread = asyncio.get_running_loop().run_in_executor(None, body)
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        cancelled.set()
        try:
            await ended(thread)
        finally:
            thread.exception()  # Retrieve the error, so that asyncio does not log it.
        raise
