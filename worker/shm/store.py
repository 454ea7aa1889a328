"""All slots of a node, on tmpfs below one folder: which exist, what they hold, who reads them, and who may write next.

    <root>/<run>/rank-<r>.slot-<i>      a slot (`slot_file`)
    <root>/<run>/rank-<r>.word          a rank's page (`rank_page`)

`worker.core.strays` decides how long the slots of a shard stay that the plan places on other nodes now.

Invariant: a slot's old content is read and digested by nobody from the moment it is granted: `grant` cancels and joins
every reader first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from everstep.protocol.agent_messages import EndedRanks, PageCommit
from everstep.protocol.errors import ProtocolError
from everstep.protocol.ids import FIRST_STEP, Generation, JobName, Rank, RunId, Step
from everstep.protocol.plan import SlotRecord
from everstep.protocol.slot import SlotHeader, SlotState, chunk_bytes, chunk_range, digest
from worker.core.slots import Content, SlotView, being_written, find_sealed, writable
from worker.core.strays import Strays
from worker.errors import NoRoom
from worker.node.priority import work_as_ranks_do, work_at
from worker.node.rank_user import RankUser, make_way, share
from worker.shm.chunk_digests import ChunkDigests
from worker.shm.numa import near
from worker.shm.rank_page import last_agent_half, last_half
from worker.shm.slot_file import SlotFile
from worker.tasks import Signal, end, ended

log = logging.getLogger(__name__)
INLINE_DIGEST_BYTES = 1024 * 1024
"""Digested on the loop: 0.03 ms at 30 GiB/s, less than a thread takes to begin."""
BATCH_BYTES = 32 * 1024 * 1024
"""Digested at once at most: then others hear of it."""
VERIFY_THREADS = min(8, os.cpu_count() or 1)
"""Of a node that verifies what its ranks restore: each reads 30 GiB/s, and memory has no more for many."""
_SLOT_NAME = re.compile(r"rank-(\d+)\.slot-(\d+)")
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Slot:
    """One slot of a shard and who uses it."""

    file: SlotFile
    readers: set[asyncio.Task[object]] = field(default_factory=set)
    pins: int = 0
    is_busy: bool = False
    digests: ChunkDigests | None = None
    """Of what its rank writes into it, or of what it holds sealed, where they are known: they are not kept on tmpfs."""
    arrived: dict[int, bytes] = field(default_factory=dict)
    """Of a WRITING slot that a stream fills: the chunks that have come, and the digests that they were verified against."""

    def is_written_with(self, content: Content) -> bool:
        """Say whether it is being filled with `content`."""
        return self.file.header.state is SlotState.WRITING and self.file.content == content

    @property
    def is_used(self) -> bool:
        """Whether it is read, uploaded or fetched from just now."""
        return bool(self.pins or self.readers)

    @property
    def view(self) -> SlotView:
        """What the pure core sees of it."""
        return SlotView(self.file.header.state, self.file.content, is_pinned=self.pins > 0, is_busy=self.is_busy)


class SlotStore:
    """The slots of one run at a time. One owner: the agent. Not for threads: every method runs on the agent's loop."""

    def __init__(self, root: Path, *, memory_bytes: int, user: RankUser | None = None) -> None:
        """Take the folder.

        Args:
            root: on tmpfs, this node's alone; made here.
            memory_bytes: what all slots together may take.
            user: that ranks run as; None: this process's.
        """
        self.root = root
        self._user = user
        self.memory_bytes = memory_bytes
        self.run: RunId | None = None
        self.job = JobName("")
        self.shards: dict[Rank, list[Slot]] = {}
        self.memory_nodes: Mapping[Rank, int] = {}
        """The NUMA node near which a rank's slots are made; a rank that has none leaves it to the kernel."""
        self.strays = Strays()
        """The `Member` replaces it: for every generation, once all nodes have loaded, and with every announcement."""
        self.making = Signal()
        """Somebody begins to choose or make a slot (see `is_making`)."""
        self._makers: defaultdict[Rank, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._creating_bytes = 0
        """Of files that threads are making."""
        make_way(root, user)

    # -- the run

    def open_run(self, job: JobName, run: RunId) -> None:
        """Make `run` the one whose slots these are: those of any other run are removed, those of this one adopted.

        A slot that was being written when the last agent died stays busy until `settle_copiers` knows that its rank's
        copier has stopped.
        """
        if self.run == run:
            return
        self.close()
        self.job, self.run = job, run
        for other in self._runs():
            if other.name != run:
                shutil.rmtree(other)
        folder = self.root / run
        make_way(folder, self._user)
        for unfinished in folder.glob("rank-*.slot-*.new"):
            unfinished.unlink()
        found = [match for path in folder.iterdir() if (match := _SLOT_NAME.fullmatch(path.name))]
        for rank in sorted({Rank(int(match[1])) for match in found}):
            count = 1 + max(int(match[2]) for match in found if int(match[1]) == rank)
            self.shards[rank] = [self._adopt(rank, self._path(rank, index)) for index in range(count)]

    def _adopt(self, rank: Rank, path: Path) -> Slot:
        """Take what lies at `path`; a file that is not what it should be is an empty slot, in its place: slots are known by their number."""
        try:
            file = SlotFile.adopt(path)
        except (ProtocolError, OSError) as error:
            log.warning("slot %s is void: %s", path.name, error)
        else:
            if (file.header.run, file.header.owner_rank) == (self.run, rank):
                return Slot(file, is_busy=file.header.state is SlotState.WRITING)
            log.warning(
                "slot %s is void: it belongs to run %s rank %d", path.name, file.header.run, file.header.owner_rank
            )
            file.close()
        return Slot(SlotFile.void(path, self._header(rank)), is_busy=True)

    def _path(self, rank: Rank, index: int) -> Path:
        return self.root / str(self.run) / f"rank-{rank}.slot-{index}"

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
        """Nobody writes into the rank's slots any more: its copier has stopped, it is gone, or it lives elsewhere and its stream has ended."""
        for slot in self.shards.get(rank, []):
            if slot.is_busy:
                slot.is_busy = False
                slot.file.empty()

    async def release(self) -> None:
        """The run is over here: every slot, page and folder of it goes."""
        for slots in self.shards.values():
            for slot in slots:
                await self._join(slot)
        self.close()
        for folder in self._runs():
            shutil.rmtree(folder)

    def _runs(self) -> list[Path]:
        return [path for path in self.root.iterdir() if path.is_dir()]

    def close(self) -> None:
        """Unmap everything and leave the files: a later agent adopts them."""
        for slots in self.shards.values():
            for slot in slots:
                slot.file.close()
        self.shards.clear()
        self.run = None

    def open_to_rank(self, path: Path) -> str:
        """Return a file's path to tell a rank of this node, which may read and write that file from now on; others may not, nor other files."""
        share(path, self._user)
        return str(path)

    def page_path(self, rank: Rank) -> Path:
        """Where the rank's page lies."""
        return self.root / str(self.run) / f"rank-{rank}.word"

    def ended_ranks(self) -> EndedRanks | None:
        """Return how far the ranks of the newest generation came that have a page here; they are known to be gone."""
        halves = [
            half for path in (self.root / str(self.run)).glob("rank-*.word") if (half := last_half(path)) is not None
        ]
        newest = max((half.generation for half in halves), default=None)
        if newest is None:
            return None
        return EndedRanks(
            generation=Generation(newest),
            boundary=Step(max(half.boundary for half in halves if half.generation == newest)),
        )

    def page_commits(self) -> tuple[PageCommit, ...]:
        """Return the newest committed step on the rank pages of each generation, oldest generation first.

        The agent calls this at the promise, after all streams are closed. It skips an unreadable page: one readable
        page of any node that holds the newest step is enough for the control plane.
        """
        newest: dict[Generation, Step] = {}
        for path in sorted((self.root / str(self.run)).glob("rank-*.word")):
            half = last_agent_half(path)
            if half is None:
                log.warning("the page %s is unreadable: the committed step on it is not reported", path.name)
            elif half.committed >= FIRST_STEP:
                generation = Generation(half.generation)
                newest[generation] = max(newest.get(generation, FIRST_STEP), Step(half.committed))
        return tuple(PageCommit(generation=generation, step=newest[generation]) for generation in sorted(newest))

    # -- what is there

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
            )
            for rank, slots in self.shards.items()
            for slot in slots
            if slot.file.header.state is SlotState.SEALED
        ]
        return tuple(sorted(found, key=lambda record: (record.owner_rank, record.step, record.origin_generation)))

    def sealed(self, rank: Rank, content: Content) -> Slot | None:
        """Return the slot that holds `content` of this shard complete, or None."""
        slots = self.shards.get(rank, [])
        index = find_sealed([slot.view for slot in slots], content)
        return None if index is None else slots[index]

    def used_bytes(self) -> int:
        """What all slots take."""
        return sum(slot.file.header.capacity_bytes for slots in self.shards.values() for slot in slots)

    # -- writing

    async def grant(
        self,
        rank: Rank,
        content: Content,
        *,
        keep: Collection[Content],
        capacity_bytes: int,
        layout_hash: bytes,
        slot_count: int,
    ) -> int | None:
        """Make a slot ready to be written with `content`, its header WRITING.

        Args:
            rank: the shard's owner.
            content: what is going to be written.
            keep: contents of this shard that must survive.
            capacity_bytes: what the payload may take; a smaller slot is made anew.
            layout_hash: the owner's layout, 16 bytes.
            slot_count: slots that this shard may have on this node.

        Returns:
            The slot's index, or None when every slot is kept, pinned or busy: nothing may be written now.

        Raises:
            NoRoom: the node's memory for slots is used up; says the figures.
        """
        async with self._alone(rank):
            slots = self.shards.setdefault(rank, [])
            views = [slot.view for slot in slots]
            index = being_written(views, content)
            if index is None:
                index = writable(views, keep) if len(slots) >= slot_count else self._reusable(slots)
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
            self._void(slot)  # nobody begins to read it while those who do are waited for
            await self._join(slot)
            if slot.file.header.capacity_bytes < capacity_bytes:
                await self._enlarge(slot, rank, index, header)
            else:
                slot.file.write_header(replace(header, capacity_bytes=slot.file.header.capacity_bytes))
            return index

    async def reserve(self, rank: Rank, *, capacity_bytes: int, layout_hash: bytes, slot_count: int) -> None:
        """Make this shard's slots before they are needed, pages allocated; those that hold something stay as they are until they are granted.

        Args:
            rank: the shard's owner.
            capacity_bytes: room for one payload.
            layout_hash: uint8[16], of what will be captured.
            slot_count: 2, or 3 where the job asked for it.

        Raises:
            NoRoom: the node's memory for slots is used up; says the figures.
        """
        async with self._alone(rank):
            slots = self.shards.setdefault(rank, [])
            empty = replace(self._header(rank), capacity_bytes=capacity_bytes, layout_hash=layout_hash)
            for index, slot in enumerate(slots):
                if (
                    slot.is_busy and not slot.file.header.capacity_bytes
                ):  # its file is gone, and its rank may still write it
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
        """Choose or make slots of a shard: one at a time does."""
        async with self._makers[rank]:
            self.making.notify()
            yield

    def is_making(self, rank: Rank) -> bool:
        """Say whether a slot of this shard is being chosen or made just now, or a made one removed because nobody waits for it any more."""
        return self._makers[rank].locked()

    async def _enlarge(self, slot: Slot, rank: Rank, index: int, header: SlotHeader) -> None:
        """Make the file anew with more room; where there is none, the slot is left behind without a file."""
        slot.file.drop()
        slot.file = await self._create(rank, index, header)

    def _reusable(self, slots: list[Slot]) -> int | None:
        """While there may be more slots, only what holds nothing is reused."""
        empty = [
            index
            for index, slot in enumerate(slots)
            if slot.view.state is SlotState.EMPTY and not slot.is_busy and not slot.pins
        ]
        return empty[0] if empty else None

    async def _create(self, rank: Rank, index: int, header: SlotHeader) -> SlotFile:
        """Make a slot's file, in a thread: its pages take up to a second per GiB, and the agent has deadlines to keep."""
        self._make_room(header.capacity_bytes)
        needed = self.used_bytes() + self._creating_bytes + header.capacity_bytes
        if needed > self.memory_bytes:
            raise NoRoom(needed_bytes=needed, available_bytes=self.memory_bytes)
        self._creating_bytes += header.capacity_bytes
        made: list[SlotFile] = []

        def make(cancelled: threading.Event) -> None:
            with near(self.memory_nodes.get(rank)):
                made.append(SlotFile.create(self._path(rank, index), header, cancelled))

        try:
            await in_thread(make, is_pressing=True)
        except OSError as error:
            raise self._full(header.capacity_bytes) from error
        except asyncio.CancelledError:
            for file in made:  # it was ready in the same moment
                file.close(unlink=True)
            raise
        else:
            return made[0]
        finally:
            self._creating_bytes -= header.capacity_bytes

    def _make_room(self, needed_bytes: int) -> None:
        """Drop slots of strays that may make way, oldest content first, until a new slot fits; nothing if it would not fit without all of them."""
        needed_bytes += self._creating_bytes + self.used_bytes() - self.memory_bytes
        strays = [
            (rank, slot) for rank, slots in self.shards.items() if rank not in self.strays.placed for slot in slots
        ]
        leaving = [each for each in strays if self._makes_way(*each)]
        if needed_bytes > sum(slot.file.header.capacity_bytes for _, slot in leaving):
            return
        for rank, slot in sorted(leaving, key=lambda each: (each[1].file.header.step, each[0])):
            if needed_bytes > 0:
                needed_bytes -= slot.file.header.capacity_bytes
                slot.file.drop()
                self._forget_if_empty(rank)

    def _makes_way(self, rank: Rank, slot: Slot) -> bool:
        return not slot.is_used and self.strays.makes_way(rank, slot.file.content)

    def _forget_if_empty(self, rank: Rank) -> None:
        """Forget a stray without any content."""
        if rank not in self.strays.placed and all(slot.view.state is SlotState.EMPTY for slot in self.shards[rank]):
            del self.shards[rank]

    def _full(self, needed_bytes: int) -> NoRoom:
        free = os.statvfs(self.root)
        return NoRoom(needed_bytes=needed_bytes, available_bytes=free.f_bavail * free.f_frsize, is_passing=True)

    def follow(self, slot: Slot, header: SlotHeader) -> tuple[ChunkDigests, bool]:
        """Begin to follow what is written into a slot, or go on.

        Args:
            slot: granted for this content.
            header: sizes and index position as the writer reports them.

        Returns:
            What is known of it, and whether that has only begun: the caller then runs `seal_followed`.
        """
        header = replace(header, state=SlotState.WRITING, capacity_bytes=slot.file.header.capacity_bytes)
        if slot.digests is not None and slot.digests.header == header:
            return slot.digests, False
        slot.file.header = header
        slot.digests = ChunkDigests(header)
        return slot.digests, True

    async def seal_followed(self, slot: Slot, digests: ChunkDigests, *, expected: bytes | None = None) -> bytes | None:
        """Digest what is written as it becomes final, and declare it complete once it is said to be.

        Args:
            slot: whose digests these are.
            digests: as `follow` has returned them; its caller says how they grow.
            expected: the owner's digest, for a restored shard; anything else is not sealed.

        Returns:
            The digest, or None when it is not the expected one (the slot is empty then), or the slot was granted anew
            or given up meanwhile.
        """
        if slot.digests is not digests:
            return None
        if not digests.is_whole and await self.reading(slot, self._digest(slot, digests)) is None:
            return None
        if slot.digests is not digests:  # granted anew when it had been read and nobody had heard of it yet
            return None
        if expected is not None and digests.payload_digest != expected:
            self._void(slot)
            return None
        return self._declare(slot, digests)

    async def seal(self, rank: Rank, index: int, header: SlotHeader, *, expected: bytes | None = None) -> bytes | None:
        """Digest what was written and declare it complete.

        Args:
            rank: the shard's owner.
            index: the slot, WRITING with the step of `header`.
            header: sizes and index position as the writer reported them.
            expected: as in `seal_followed`.

        Returns:
            As `seal_followed`.
        """
        slot = self.shards[rank][index]
        digests, _ = self.follow(slot, header)
        digests.complete()
        return await self.seal_followed(slot, digests, expected=expected)

    def seal_verified(self, slot: Slot, header: SlotHeader, chunk_digests: bytes) -> bytes:
        """Declare a slot complete whose every chunk was seen to hash to these digests; return the payload's.

        Args:
            slot: WRITING.
            header: sizes and index position as the owner reported them.
            chunk_digests: of the payload, in order.

        Returns:
            uint8[DIGEST_BYTES].
        """
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
        """The rank has given up what it was capturing: nobody goes on reading it."""
        for slot in self.shards.get(rank, []):
            if slot.is_written_with(content):
                slot.digests = None
                for task in slot.readers:
                    task.cancel()

    async def verify(self, slot: Slot, *, threads: int = 1, is_pressing: bool = False) -> bool | None:
        """Digest a sealed slot again; one that no longer hashes to its own digest becomes empty.

        No other slot is touched.

        Args:
            slot: the slot.
            threads: that each digest a part of it.
            is_pressing: nothing trains here before it is done, so it goes before ranks that are starting.

        Returns:
            Whether it holds what its header says; None: it is not sealed, or was granted anew in the meantime.
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
        """Return the chunk digests of a slot, computed where they are not known of a sealed one; None when it is not what it was, or granted anew."""
        if slot.digests is None and not await self.verify(slot):
            return None
        return slot.digests

    async def reading(self, slot: Slot, work: Coroutine[object, object, T]) -> T | None:
        """Run `work` on the slot's content as a task that `grant` can cancel.

        Args:
            slot: whose content is read; it stays mapped until `work` has ended.
            work: reads only, and returns soon when cancelled.

        Returns:
            What `work` returned (never None), or None when the slot was granted anew in the meantime.
        """
        task = asyncio.create_task(work)
        slot.readers.add(task)
        try:
            await asyncio.wait([task])
        finally:
            await end(task)
            slot.readers.discard(task)
        return None if task.cancelled() else task.result()

    @staticmethod
    async def _digest_at_once(slot: Slot, digests: ChunkDigests, threads: int, is_pressing: bool) -> ChunkDigests:
        """Digest a payload that is whole; nobody hears of a part, and ranks wait for all of it."""
        size = digests.header.payload_bytes
        if size <= INLINE_DIGEST_BYTES:
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

    @staticmethod
    async def _digest(slot: Slot, digests: ChunkDigests) -> ChunkDigests:
        """Digest chunks as they become final, until the payload is whole."""
        size = digests.header.payload_bytes
        at_once = max(1, -(-BATCH_BYTES // chunk_bytes(size)))
        while not digests.is_whole:
            first, due = digests.known_count, digests.due_count
            if first == due:
                await digests.changed.wait(digests.changed.version)
                continue
            work = partial(_digest_chunks, slot.file, size, range(first, min(due, first + at_once)))
            digests.add(work(threading.Event()) if size <= INLINE_DIGEST_BYTES else await in_thread(work))
        return digests

    @staticmethod
    async def _join(slot: Slot) -> None:
        readers = list(slot.readers)
        for task in readers:
            task.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    # -- keeping

    def place(self, strays: Strays) -> None:
        """Take what a new generation places here; the `Member` calls it once per generation, before Load."""
        self.strays = strays

    async def empty_all_but(self, keep: Mapping[Rank, Collection[Content]]) -> None:
        """Declare void whatever is not kept, and remove that of strays: called once, at Load, with the plan's keep list."""
        for rank, slots in list(self.shards.items()):
            for slot in slots:
                if slot.view.content not in keep.get(rank, set()):
                    await self._join(slot)
                    if rank in self.strays.placed:
                        slot.file.empty()
                    else:
                        slot.file.drop()
            self._forget_if_empty(rank)

    def drop_strays(self) -> None:
        """Remove the strays that are of no use any more and that nobody reads just now; idempotent.

        Every announcement calls it.
        """
        for rank in [rank for rank in self.shards if self.strays.is_over(rank)]:
            if not any(slot.is_used for slot in self.shards[rank]):
                for slot in self.shards.pop(rank):
                    slot.file.drop()


def _digest_chunks(file: SlotFile, size: int, chunks: range, cancelled: threading.Event) -> bytes:
    found = bytearray()
    for chunk in chunks:
        if cancelled.is_set():
            break
        with file.payload(*chunk_range(chunk, size)) as piece:
            found += digest(piece)
    return bytes(found)


async def in_thread(work: Callable[[threading.Event], T], *, is_pressing: bool = False) -> T:
    """Run `work` in a thread, which has always ended when this returns, also when the caller is cancelled.

    Args:
        work: given an event that is set on cancellation; it looks at it between pieces, and returns early then.
        is_pressing: it has the loop's priority; else that of the ranks.

    Returns:
        What `work` returned.

    Raises:
        asyncio.CancelledError: cancelled, and the thread has returned.
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
            thread.exception()  # nobody is there to hear of it
        raise
