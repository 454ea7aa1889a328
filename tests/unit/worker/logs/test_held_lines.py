"""Tests the copies of printed lines that a node keeps for other nodes.

The node stores them in S3 when the generation has ended.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from everstep.protocol.errors import MalformedMessage
from everstep.protocol.ids import NodeId, Rank
from everstep.protocol.log_chunks import LogLine, decode_chunk, encode_lines, parse_name, parse_tail
from everstep.protocol.peer_messages import PrintedLines
from everstep.protocol.plan import GenerationPlan, ObjectReference
from tests.fakes.storage import MemoryObjectStore
from tests.unit.worker.logs.test_journal import files_end_at
from tests.unit.worker.rank_plans import rank_plan
from worker.errors import StoreDenied
from worker.logs.held_lines import HeldLines
from worker.storage.object_store import StoredObject

OWNER, HOLDER, STRANGER = NodeId("i-0"), NodeId("i-1"), NodeId("i-2")


@pytest.fixture
def plan() -> GenerationPlan:
    """Return a plan of three nodes in which the second node holds the first node's shard."""
    made = rank_plan(addresses=("127.0.0.1", "127.0.0.2", "127.0.0.3"))
    first, *others = made.ranks
    return msgspec.structs.replace(made, ranks=(msgspec.structs.replace(first, holders=(OWNER, HOLDER)), *others))


def message(first: int, *texts: str) -> PrintedLines:
    lines = [
        LogLine(at_ms=100 + first + number, rank=Rank(0), stream="stdout", text=text, end=1)
        for number, text in enumerate(texts)
    ]
    return PrintedLines(first=first, lines=encode_lines(lines))


def stored(objects: MemoryObjectStore) -> dict[str, list[str]]:
    return {
        key.rpartition("gen=1/")[2]: [line.text for line in decode_chunk(data)[1]]
        for key, data in objects.objects["bucket"].items()
    }


async def test_lines_of_an_owner_are_stored_once_under_its_name(tmp_path: Path, plan: GenerationPlan) -> None:
    held, objects = HeldLines(tmp_path, plan, HOLDER), MemoryObjectStore("bucket")
    assert await held.ship(objects) == ()
    assert stored(objects) == {}
    await held.take(OWNER, message(3, "three", "four"))
    # another rank of the same node sends these lines in its own session
    await held.take(OWNER, message(3, "three", "four", "five"))
    for _ in range(2):
        assert await held.ship(objects) == ()
        assert stored(objects) == {"node=i-0/000000000003-103.i-1.jsonl": ["three", "four", "five"]}
    (path,) = stored(objects)
    assert parse_name(path) is None, "it is no chunk of the owner's"
    assert parse_tail(path) is not None


async def test_a_restarted_agent_has_what_was_acknowledged(tmp_path: Path, plan: GenerationPlan) -> None:
    objects = MemoryObjectStore("bucket")
    held = HeldLines(tmp_path, plan, HOLDER)
    await held.take(OWNER, message(0, "a", "b"))
    await held.take(OWNER, message(2, "c"))
    held = HeldLines(tmp_path, plan, HOLDER)
    await held.take(OWNER, message(1, "b", "c", "d"))
    await HeldLines(tmp_path, plan, HOLDER).ship(objects)
    assert list(stored(objects).values()) == [["a", "b", "c", "d"]]


async def test_lines_that_a_full_disk_does_not_take_are_kept_all_the_same(tmp_path: Path, plan: GenerationPlan) -> None:
    held, objects = HeldLines(tmp_path, plan, HOLDER), MemoryObjectStore("bucket")
    await held.take(OWNER, message(0, "a"))
    with files_end_at(0):
        await held.take(OWNER, message(1, "b"))
    await held.take(OWNER, message(2, "c"))
    await held.ship(objects)
    assert list(stored(objects).values()) == [["a", "b", "c"]]
    await HeldLines(tmp_path, plan, HOLDER).ship(objects)
    assert list(stored(objects).values()) == [["a", "b", "c"]], "the disk has them again"


async def test_what_is_not_stored_is_named(tmp_path: Path, plan: GenerationPlan) -> None:
    class Denying(MemoryObjectStore):
        def put_bytes(self, reference: ObjectReference, data: bytes) -> StoredObject:
            raise StoreDenied("access denied")

    held = HeldLines(tmp_path, plan, HOLDER)
    await held.take(OWNER, message(0, "a"))
    assert await held.ship(Denying("bucket")) == (
        "the last lines of i-0 that this node keeps are not in S3: access denied",
    )


@pytest.mark.security
@pytest.mark.parametrize("peer", [STRANGER, HOLDER])
async def test_lines_are_taken_only_from_the_owner_of_a_shard_that_is_held_here(
    tmp_path: Path, plan: GenerationPlan, peer: NodeId
) -> None:
    held = HeldLines(tmp_path, plan, HOLDER)
    with pytest.raises(MalformedMessage, match=f"{peer} sent lines, but this node holds none of its shards"):
        await held.take(peer, message(0, "forged"))


async def test_what_are_no_lines_closes_the_session(tmp_path: Path, plan: GenerationPlan) -> None:
    with pytest.raises(MalformedMessage, match="lines of i-0 cannot be decoded"):
        await HeldLines(tmp_path, plan, HOLDER).take(OWNER, PrintedLines(first=0, lines=b"{}\n"))
