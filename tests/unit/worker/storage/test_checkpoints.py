"""Tests uploads of slots to an object store, and restores from it.

A restored slot has the bytes of the uploaded slot. A restore never seals damaged bytes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everstep.protocol.agent_messages import UploadedShard
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.plan import ObjectReference, ShardSource
from everstep.protocol.slot import SlotState, payload_chunk_digests
from tests.fakes.storage import MemoryObjectStore
from tests.unit.worker.rank_plans import rank_plan
from tests.unit.worker.storage.slots import JOB, RUN, header_of, payload_of
from worker.core.slots import Content
from worker.errors import CorruptCheckpoint, NoRoom, ObjectMissing, StoreRefused, StoreUnavailable
from worker.shm.held_files import HeldFiles
from worker.shm.slot_file import SlotFile
from worker.shm.store import SlotStore
from worker.storage import checkpoints
from worker.storage.checkpoints import is_abandoned, upload_shard
from worker.storage.downloads import download_shard
from worker.storage.object_store import ObjectReader, OnStored, Piece, Span, StoredObject
from worker.storage.shard_object import ShardObject

CONTENT = Content(Generation(2), Step(7))
RANK = Rank(0)
PAYLOAD, OFFSET, SIZE = payload_of(
    [("weight", "float32", (100,), bytes(range(200)) * 2), ("bias", "int64", (1,), bytes(8))], b"position", 64
)
CHUNKS = payload_chunk_digests(PAYLOAD)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "full_jitter", lambda *_: 0.0)
    monkeypatch.setattr("worker.storage.downloads.full_jitter", lambda *_: 0.0)


@pytest.fixture
def objects() -> MemoryObjectStore:
    return MemoryObjectStore("bucket")


def node(folder: Path) -> SlotStore:
    store = SlotStore(HeldFiles(), memory_bytes=1 << 20)
    store.open_run(JOB, RUN)
    return store


async def sealed(folder: Path) -> tuple[SlotStore, SlotFile]:
    store = node(folder)
    index = await store.grant(
        RANK, CONTENT, keep=(), capacity_bytes=len(PAYLOAD) + 500, layout_hash=bytes(range(16)), slot_count=2
    )
    assert index is not None
    slot = store.shards[RANK][index].file
    with slot.payload(0, len(PAYLOAD)) as view:
        view[:] = PAYLOAD
    await store.seal(RANK, index, replace(header_of(PAYLOAD, OFFSET, SIZE), state=SlotState.WRITING))
    return store, slot


def source_of(uploaded: UploadedShard) -> ShardSource:
    return ShardSource(
        kind="s3",
        origin_generation=uploaded.origin_generation,
        step=uploaded.step,
        digest=uploaded.payload_digest,
        payload_bytes=uploaded.payload_bytes,
        object=uploaded.object,
    )


async def fetch(
    objects: MemoryObjectStore, source: ShardSource, store: SlotStore, keep: frozenset[Content] = frozenset()
) -> None:
    await download_shard(objects, source, store, rank=RANK, content=CONTENT, keep=keep, slot_count=2)


async def test_a_shard_comes_back_as_it_was_sealed(objects: MemoryObjectStore, tmp_path: Path) -> None:
    first, slot = await sealed(tmp_path / "a")
    uploaded = await upload_shard(objects, slot, CHUNKS, rank_plan(generation=4), rank=RANK)
    assert uploaded.object.key.startswith(f"jobs/job/checkpoints/run={RUN}/gen=4/step=7/")
    assert uploaded.object.key.endswith("/rank=0.safetensors")
    assert (uploaded.payload_digest, uploaded.origin_generation) == (slot.header.payload_digest, 2)
    assert uploaded.object_bytes == len(objects.get_bytes(uploaded.object))
    second = node(tmp_path / "b")
    dirty = await second.grant(
        RANK, Content(Generation(1), Step(1)), keep=(), capacity_bytes=2000, layout_hash=bytes(16), slot_count=2
    )
    assert dirty is not None
    with second.shards[RANK][dirty].file.payload(0, 2000) as view:
        view[:] = b"\xaa" * 2000
    second.shards[RANK][dirty].file.empty()
    await fetch(objects, source_of(uploaded), second)
    found = second.sealed(RANK, CONTENT)
    assert found is not None
    assert found.file is second.shards[RANK][dirty].file, (
        "the slot that had been written in before is the one that is used"
    )
    with found.file.payload() as view:
        assert bytes(view) == PAYLOAD
    assert found.file.header == replace(slot.header, capacity_bytes=found.file.header.capacity_bytes)
    for store in (first, second):
        store.close()


async def test_two_uploads_never_share_a_key(objects: MemoryObjectStore, tmp_path: Path) -> None:
    store, slot = await sealed(tmp_path / "a")
    keys = {(await upload_shard(objects, slot, CHUNKS, rank_plan(), rank=RANK)).object.key for _ in range(2)}
    assert len(keys) == 2
    store.close()


async def test_a_slot_that_is_not_what_was_sealed_is_not_stored(objects: MemoryObjectStore, tmp_path: Path) -> None:
    for position in (0, OFFSET - 10, OFFSET + 3):
        store, slot = await sealed(tmp_path / str(position))
        with slot.payload(position, position + 1) as view:
            view[0] ^= 1
        with pytest.raises(CorruptCheckpoint):
            await upload_shard(objects, slot, CHUNKS, rank_plan(), rank=RANK)
        store.close()
    assert objects.objects["bucket"] == {}


async def test_only_sealed_slots_are_stored(objects: MemoryObjectStore, tmp_path: Path) -> None:
    store, slot = await sealed(tmp_path / "a")
    slot.empty()
    with pytest.raises(StoreRefused):
        await upload_shard(objects, slot, CHUNKS, rank_plan(), rank=RANK)
    store.close()


async def test_a_damaged_object_is_never_sealed(objects: MemoryObjectStore, tmp_path: Path) -> None:
    """The test damages every seventh byte in turn, and also cuts the object there.

    The restore must either refuse the object or seal the original bytes.
    """
    first, slot = await sealed(tmp_path / "a")
    uploaded = await upload_shard(objects, slot, CHUNKS, rank_plan(), rank=RANK)
    first.close()
    whole = objects.get_bytes(uploaded.object)
    store = node(tmp_path / "b")
    for position in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[position] ^= 0x10
        for damaged in (bytes(changed), whole[:position]):
            objects.put_bytes(uploaded.object, damaged)
            try:
                await fetch(objects, source_of(uploaded), store)
            except CorruptCheckpoint:
                assert all(slot.file.header.state is SlotState.EMPTY for slot in store.shards.get(RANK, ()))
                continue
            found = store.sealed(RANK, CONTENT)
            assert found is not None
            with found.file.payload() as view:
                assert bytes(view) == PAYLOAD
            found.file.empty()
    store.close()


class BreakingStore(MemoryObjectStore):
    """A store whose connection breaks `breaks` times in the middle of a part."""

    def __init__(self) -> None:
        super().__init__("bucket")
        self.breaks = 0

    def read_range(
        self, reference: ObjectReference, begin: int, target: memoryview, spans: Sequence[Span], **named: Any
    ) -> None:
        super().read_range(reference, begin, target, spans[:1], **named)
        if self.breaks:
            self.breaks -= 1
            raise StoreUnavailable("reset by peer")
        super().read_range(reference, begin, target, spans, **named)


async def test_a_line_that_breaks_in_the_middle_leaves_an_empty_slot(tmp_path: Path) -> None:
    first, slot = await sealed(tmp_path / "a")
    objects = BreakingStore()
    uploaded = await upload_shard(objects, slot, CHUNKS, rank_plan(), rank=RANK)
    first.close()
    store = node(tmp_path / "b")
    objects.breaks = 99
    with pytest.raises(StoreUnavailable):
        await fetch(objects, source_of(uploaded), store)
    assert {found.file.header.state for found in store.shards[RANK]} == {SlotState.EMPTY}
    objects.breaks = 1
    await fetch(objects, source_of(uploaded), store)
    assert store.sealed(RANK, CONTENT) is not None
    store.close()


async def test_another_shard_than_the_plans_is_refused_before_a_slot_is_touched(
    objects: MemoryObjectStore, tmp_path: Path
) -> None:
    first, slot = await sealed(tmp_path / "a")
    uploaded = await upload_shard(objects, slot, CHUNKS, rank_plan(), rank=RANK)
    first.close()
    source = source_of(uploaded)
    store = node(tmp_path / "b")
    for wrong in (
        ShardSource(
            kind="s3",
            origin_generation=source.origin_generation,
            step=source.step,
            digest=bytes(16),
            payload_bytes=1,
            object=source.object,
        ),
        ShardSource(
            kind="s3",
            origin_generation=source.origin_generation,
            step=source.step,
            digest=source.digest,
            payload_bytes=1,
        ),
    ):
        with pytest.raises(CorruptCheckpoint):
            await fetch(objects, wrong, store)
    assert not store.shards.get(RANK)
    store.close()


async def test_what_must_be_kept_is_not_overwritten(objects: MemoryObjectStore, tmp_path: Path) -> None:
    store, slot = await sealed(tmp_path / "a")
    uploaded = await upload_shard(objects, slot, CHUNKS, rank_plan(), rank=RANK)
    other = Content(Generation(2), Step(6))
    index = await store.grant(
        RANK, other, keep=[CONTENT], capacity_bytes=len(PAYLOAD), layout_hash=bytes(16), slot_count=2
    )
    assert index is not None
    await store.seal(RANK, index, replace(header_of(PAYLOAD, OFFSET, SIZE, step=6), state=SlotState.WRITING))
    with pytest.raises(NoRoom):
        await fetch(objects, source_of(uploaded), store, keep=frozenset({CONTENT, other}))
    assert store.sealed(RANK, CONTENT) is not None
    assert store.sealed(RANK, other) is not None
    store.close()


class FlakyStore(MemoryObjectStore):
    """A store that fails `failures` times with errors of S3."""

    def __init__(self, failures: int) -> None:
        super().__init__("bucket")
        self.failures = failures
        self.calls = 0

    def _fail(self) -> None:
        self.calls += 1
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("503")

    def put_stream(
        self, reference: ObjectReference, pieces: Iterable[Piece], size: int, *, on_stored: OnStored = lambda _: None
    ) -> StoredObject:
        self._fail()
        return super().put_stream(reference, pieces, size, on_stored=on_stored)

    def open(self, reference: ObjectReference, *, etag: str = "") -> AbstractContextManager[ObjectReader]:
        self._fail()
        return super().open(reference, etag=etag)


async def test_what_may_be_tried_again_is(tmp_path: Path) -> None:
    store, slot = await sealed(tmp_path / "a")
    objects = FlakyStore(failures=2)
    uploaded = await upload_shard(objects, slot, CHUNKS, rank_plan(), rank=RANK)
    assert objects.calls == 3
    objects.failures = 2
    slot.empty()
    await fetch(objects, source_of(uploaded), store)
    assert store.sealed(RANK, CONTENT) is not None
    objects.failures = 99
    with pytest.raises(StoreUnavailable):
        await fetch(objects, source_of(uploaded), store)
    del objects.objects["bucket"][uploaded.object.key]
    objects.objects["bucket"][f"jobs/job/checkpoints/run={RUN}/issued=1"] = b""
    objects.failures, objects.calls = 0, 0
    with pytest.raises(ObjectMissing):
        await fetch(objects, source_of(uploaded), store)
    assert objects.calls == 1, "a missing object is not asked for twice"
    store.close()


class SlowStore(MemoryObjectStore):
    """A store whose reads pause after the first piece until the test continues them."""

    def __init__(self) -> None:
        super().__init__("bucket")
        self.begun, self.go = threading.Event(), threading.Event()

    def put_stream(
        self, reference: ObjectReference, pieces: Iterable[Piece], size: int, *, on_stored: OnStored = lambda _: None
    ) -> StoredObject:
        def slowly() -> Iterable[Piece]:
            for piece in pieces:
                yield piece
                self.begun.set()
                self.go.wait()

        return super().put_stream(reference, slowly(), size)


async def test_a_cancelled_upload_no_longer_reads_the_slot(tmp_path: Path) -> None:
    store, slot = await sealed(tmp_path / "a")
    objects = SlowStore()
    task = asyncio.create_task(upload_shard(objects, slot, CHUNKS, rank_plan(), rank=RANK))
    await asyncio.to_thread(objects.begun.wait)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done(), "the thread still reads"
    objects.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert objects.objects["bucket"] == {}
    store.close()


async def test_an_upload_reports_its_name_and_what_s3_has_stored(objects: MemoryObjectStore, tmp_path: Path) -> None:
    store, slot = await sealed(tmp_path)
    begun, stored = list[tuple[str, int]](), list[int]()
    uploaded = await upload_shard(
        objects,
        slot,
        CHUNKS,
        rank_plan(),
        rank=RANK,
        on_begun=lambda name, size: begun.append((name, size)),
        on_stored=stored.append,
    )
    assert begun == [(f"s3://bucket/{uploaded.object.key}", uploaded.object_bytes)]
    assert sum(stored) == uploaded.object_bytes
    store.close()


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("jobs/job/checkpoints/run=RUN/gen=2/step=7/ab/rank=0.safetensors", True),
        ("jobs/job/checkpoints/run=RUN/gen=3/step=7/ab/rank=0.safetensors", True),
        ("jobs/job/checkpoints/run=RUN/gen=4/step=7/ab/rank=0.safetensors", False),
        ("jobs/job/checkpoints/run=RUN/gen=2/step=7/ab/rank=1.safetensors", False),
        ("jobs/job/checkpoints/run=RUN/gen=2/step=7/ab/rank=2.safetensors", True),
        ("jobs/job/checkpoints/run=RUN/gen=2/step=7/ab/other", False),
        ("jobs/job/checkpoints/run=RUN/gen=2/step=7/replicated/ab.safetensors", True),
        ("jobs/job/checkpoints/run=RUN/gen=3/step=7/replicated/ab.safetensors", False),
        ("jobs/other/checkpoints/run=RUN/gen=2/step=7/ab/rank=0.safetensors", False),
    ],
)
def test_only_uploads_of_ended_agents_are_abandoned(key: str, expected: bool) -> None:
    plan = rank_plan(generation=3, addresses=("127.0.0.1", "127.0.0.2"))
    assert is_abandoned(key.replace("RUN", RUN), plan, [Rank(0)]) is expected


def test_the_node_of_rank_0_removes_unfinished_replicated_objects() -> None:
    plan = rank_plan(generation=3, addresses=("127.0.0.1", "127.0.0.2"))
    key = f"jobs/job/checkpoints/run={RUN}/gen=2/step=7/replicated/ab.safetensors"
    assert not is_abandoned(key, plan, [Rank(1)])


async def test_any_range_of_a_shards_object_is_made_from_its_slot(objects: MemoryObjectStore, tmp_path: Path) -> None:
    store, slot = await sealed(tmp_path)
    uploaded = await upload_shard(objects, slot, CHUNKS, rank_plan(), rank=RANK)
    data = objects.get_bytes(uploaded.object)
    content = ShardObject(slot, CHUNKS, piece_bytes=100)
    assert content.bytes == len(data)
    for begin in range(0, len(data), 7):
        for end in range(begin, len(data) + 1, 11):
            assert b"".join(content.pieces(begin, end)) == data[begin:end]
    first, *views = content.verified_pieces(lambda: None)
    assert b"".join([first, *views]) == data
    assert [len(view) for view in views] == [100, 100, 100, 100, 8]
    store.close()
