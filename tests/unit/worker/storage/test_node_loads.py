"""If the shards of a node's ranks share objects, the node reads each byte of these objects from S3 once."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from everstep.protocol.agent_messages import UploadedShard
from everstep.protocol.ids import Rank
from everstep.protocol.plan import ObjectReference
from tests.unit.worker.member.loading_nodes import source_of
from tests.unit.worker.storage.frozen_nodes import BASES
from tests.unit.worker.storage.slots import JOB, RUN
from tests.unit.worker.storage.test_replicated import Ranks
from tests.unit.worker.storage.test_shared_tensors import Recorder
from worker.core.slots import Content
from worker.errors import CorruptCheckpoint
from worker.shm.held_files import HeldFiles
from worker.shm.store import Slot, SlotStore
from worker.storage.downloads import download_shard
from worker.storage.node_loads import NodeLoad, NodeLoads
from worker.storage.object_store import Span


class Reads(Recorder):
    """A store that counts how often each byte is read, and calls `before` before each read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: Counter[tuple[str, int]] = Counter()
        self.before: Callable[[str], None] = lambda _: None

    def read_range(
        self, reference: ObjectReference, begin: int, target: memoryview, spans: Sequence[Span], **named: Any
    ) -> None:
        self.before(reference.key)
        super().read_range(reference, begin, target, spans, **named)
        size = sum(stop - start for start, stop in spans)
        self.read.update((reference.key, position) for position in range(begin, begin + size))

    def most_reads(self) -> int:
        return max(self.read.values())

    def shared_bytes(self) -> int:
        """Return the number of bytes that were read from shared objects. A byte that was read twice counts twice."""
        return sum(count for (key, _), count in self.read.items() if "/replicated/" in key)


class Loading:
    """A node whose two ranks load the shards that two other nodes have uploaded."""

    def __init__(self, ranks: Ranks, uploaded: Sequence[UploadedShard], objects: Reads, folder: Path) -> None:
        self.ranks = ranks
        self.uploaded = uploaded
        self.objects = objects
        self.loads = NodeLoads()
        self.store = SlotStore(HeldFiles(), memory_bytes=1 << 20)
        self.store.open_run(JOB, RUN)

    async def load(self, rank: int) -> None:
        shard = self.uploaded[rank]
        content = Content(shard.origin_generation, shard.step)
        await download_shard(
            self.objects,
            source_of(shard),
            self.store,
            rank=shard.rank,
            content=content,
            keep=(),
            slot_count=1,
            loads=self.loads,
        )

    def slot(self, rank: int) -> Slot:
        shard = self.uploaded[rank]
        slot = self.store.sealed(Rank(rank), Content(shard.origin_generation, shard.step))
        assert slot is not None
        return slot

    def is_exact(self, rank: int) -> bool:
        with self.slot(rank).file.payload() as view:
            return bytes(view) == self.ranks.slots[rank][1]


@pytest.fixture
async def loading(tmp_path: Path) -> AsyncIterator[Loading]:
    ranks, objects = await Ranks.of(tmp_path, BASES, BASES), Reads()
    ranks.objects = objects
    uploaded = await ranks.send_all()
    made = Loading(ranks, uploaded, objects, tmp_path / "loading")
    yield made
    made.store.close()
    ranks.close()


SHARED_BYTES = 4 * 320 + 3


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_ranks_that_load_at_the_same_time_read_each_shared_byte_once(
    loading: Loading, order: tuple[int, int]
) -> None:
    await asyncio.gather(*(loading.load(rank) for rank in order))
    assert (loading.objects.most_reads(), loading.objects.shared_bytes()) == (1, SHARED_BYTES)
    assert all(loading.is_exact(rank) for rank in order)
    assert [loading.slot(rank).pins for rank in order] == [0, 0]


async def test_a_rank_that_loads_later_copies_from_the_loaded_shard(loading: Loading) -> None:
    await loading.load(0)
    await loading.load(1)
    assert loading.objects.shared_bytes() == SHARED_BYTES
    assert loading.is_exact(1)


async def test_a_rank_whose_source_is_damaged_after_its_load_spoils_no_other_rank(loading: Loading) -> None:
    await loading.load(0)
    with loading.slot(0).file.payload(200, 201) as view:
        view[0] ^= 1
    await loading.load(1)
    assert loading.is_exact(1)
    assert loading.objects.shared_bytes() == 2 * SHARED_BYTES


async def test_a_failed_load_leaves_the_shared_objects_to_the_rank_that_waits(loading: Loading) -> None:
    key = loading.uploaded[0].object.key
    data = loading.objects.objects["bucket"][key]
    loading.objects.objects["bucket"][key] = data[:-1] + bytes([data[-1] ^ 1])
    first, second = await asyncio.gather(loading.load(0), loading.load(1), return_exceptions=True)
    assert isinstance(first, CorruptCheckpoint)
    assert second is None
    assert loading.is_exact(1)


async def test_a_cancelled_load_releases_the_rank_that_waits(loading: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, waits = asyncio.Event(), threading.Event(), asyncio.Event()
    loop, key = asyncio.get_running_loop(), loading.uploaded[0].object.key

    def hang(read: str) -> None:
        if read == key:
            loop.call_soon_threadsafe(begun.set)
            assert go.wait(30.0)

    copy_awaited = NodeLoad.copy_awaited

    async def noted(load: NodeLoad, *given: Any) -> frozenset[ObjectReference]:
        waits.set()
        return await copy_awaited(load, *given)

    monkeypatch.setattr(NodeLoad, "copy_awaited", noted)
    loading.objects.before = hang
    first = asyncio.create_task(loading.load(0))
    await begun.wait()
    second = asyncio.create_task(loading.load(1))
    await waits.wait()
    first.cancel()
    loop.call_soon(go.set)
    await asyncio.wait([first])
    assert first.cancelled()
    await second
    assert loading.is_exact(1)
