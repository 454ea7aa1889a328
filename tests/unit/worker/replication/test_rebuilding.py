"""Before a rebuild writes any byte, it checks what the plan says about the shard, and the size of the target slot."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from everstep.protocol.errors import MalformedMessage
from everstep.protocol.ids import Generation, JobName, NodeId, Rank, RunId, Step
from everstep.protocol.parity import MAX_SHARD_BYTES, Contribution, Rebuild, Survivor
from everstep.protocol.plan import ShardSource
from everstep.protocol.slot import SlotHeader, SlotState
from worker.errors import NoRoom
from worker.replication.rebuilding import Rebuilding, rebuild_shard
from worker.replication.transport import Dialler
from worker.shm import combining
from worker.shm.held_files import HeldFiles
from worker.shm.slot_file import SlotFile
from worker.shm.store import SlotStore

LOST = Contribution(
    rank=Rank(1), payload_bytes=8192, digest=b"d" * 16, layout_hash=b"l" * 16, index_offset=8000, index_bytes=192
)
SURVIVOR = Survivor(
    rank=Rank(0),
    node_id=NodeId("a"),
    shard_bytes=8192,
    shard_digest=b"s" * 16,
    share_bytes=8300,
    share_digest=b"h" * 16,
)


def source_of(**changes: Any) -> ShardSource:
    """Return a source whose fields agree with each other.

    `changes` replaces fields of the lost shard.
    """
    return ShardSource(
        kind="parity",
        origin_generation=Generation(1),
        step=Step(7),
        digest=LOST.digest,
        payload_bytes=changes.get("payload_bytes", LOST.payload_bytes),
        rebuild=Rebuild(lost=structs.replace(LOST, **changes), survivors=(SURVIVOR,)),
    )


def slot_file(capacity_bytes: int) -> SlotFile:
    header = SlotHeader(
        job=JobName("gpt"),
        run=RunId("ab" * 16),
        owner_rank=Rank(1),
        origin_generation=Generation(1),
        step=Step(7),
        state=SlotState.WRITING,
        capacity_bytes=capacity_bytes,
    )
    return SlotFile.create("slot", HeldFiles(), header, threading.Event())


def test_a_slot_that_is_too_small_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    rebuild = source_of().rebuild
    assert rebuild is not None
    file = slot_file(LOST.payload_bytes - 1)
    with pytest.raises(NoRoom) as refused:
        Rebuilding(file, rebuild)
    assert (refused.value.needed_bytes, refused.value.available_bytes) == (8192, 8191)
    with file.payload(0, LOST.payload_bytes - 1) as view:
        assert not any(view)
    file.close()


def never(node_id: NodeId) -> Dialler:
    raise AssertionError("a refused source must not be fetched")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (structs.replace(source_of(), rebuild=None), "names no survivors"),
        (structs.replace(source_of(), rebuild=Rebuild(lost=LOST, survivors=())), "names no survivors"),
        (structs.replace(source_of(), payload_bytes=8191), "names another shard of rank 1"),
        (structs.replace(source_of(), digest=b"e" * 16), "names another shard of rank 1"),
        (source_of(payload_bytes=0, index_offset=0, index_bytes=0), "has 0 bytes"),
        (source_of(payload_bytes=MAX_SHARD_BYTES + 1), f"has {MAX_SHARD_BYTES + 1} bytes"),
        (source_of(index_offset=-1), "an index of 192 bytes at -1"),
        (source_of(index_offset=8001), "an index of 192 bytes at 8001"),
        (source_of(index_bytes=-1), "an index of -1 bytes"),
    ],
)
async def test_a_source_that_contradicts_itself_is_refused(tmp_path: Path, source: ShardSource, words: str) -> None:
    store = SlotStore(HeldFiles(), memory_bytes=1 << 20)
    store.open_run(JobName("gpt"), RunId("ab" * 16))
    with pytest.raises(MalformedMessage, match=words):
        await rebuild_shard(
            never,
            source,
            store,
            keep=(),
            slot_count=2,
            answer_seconds=1.0,
            silence_seconds=1.0,
            stream_limit=1,
        )
    assert store.used_bytes() == 0
    await store.release()


@pytest.mark.parametrize("write", [combining.combine, combining.replace])
def test_a_source_that_is_longer_than_its_target_changes_no_byte(write: Any) -> None:
    buffer = bytearray(24)
    with memoryview(buffer)[8:16] as target, pytest.raises(ValueError, match="9 bytes do not fit into 8 bytes"):
        write(target, memoryview(bytearray(b"x" * 9)))
    assert not any(buffer)
