"""What a reader of a job's log asks of the object store. What it makes of the answers: `api/test_logs.py`."""

from __future__ import annotations

import pytest

from control_plane.cloud.fake import MemoryObjectStore
from control_plane.loop import log_reader
from control_plane.loop.log_reader import GenerationFacts, LogFilter, LogReader
from everstep.protocol.ids import NodeId, Rank
from everstep.protocol.log_chunks import NO_RANK, ChunkHead, ChunkName, LogLine, encode_head, encode_lines
from everstep.protocol.plan import ObjectReference
from tests.unit.control_plane.db.conftest import NOW

MS = int(NOW.timestamp() * 1000)
NODES = [NodeId(f"i-{number}") for number in range(40)]
ALL = LogFilter()


class Counting(MemoryObjectStore):
    """Objects in memory that know how often one was read."""

    def __init__(self) -> None:
        super().__init__("b")
        self.read: list[str] = []

    def get(self, reference: ObjectReference) -> bytes:
        self.read.append(reference.key)
        return super().get(reference)

    def count(self) -> int:
        """Return how many were read since the last count."""
        found, self.read = len(self.read), []
        return found

    def append(self, node: NodeId, *texts: str, ended: bool = False) -> None:
        lines = [LogLine(at_ms=MS + number, rank=Rank(0), stream="stdout", text=text, end=1) for number, text in enumerate(texts)]
        end = [LogLine(at_ms=MS + 9, rank=NO_RANK, stream="end", text="", end=0)] if ended else []
        key = f"logs/gen=1/{ChunkName(node, 0, MS).path}"
        self.put(ObjectReference(bucket="b", key=key), encode_head(ChunkHead(first=0, positions={})) + encode_lines([*lines, *end]))


@pytest.fixture
def store() -> Counting:
    made = Counting()
    for node in NODES:
        made.append(node, "a", "b")
    return made


def reader(store: Counting, *, is_over: bool = False) -> LogReader:
    facts = GenerationFacts(number=1, ranks={node: (Rank(0),) for node in NODES}, over_since=NOW if is_over else None)
    return LogReader(store, ObjectReference(bucket="b", key="logs/"), [facts], frozenset(NODES), False, lambda: NOW)


@pytest.mark.parametrize("is_over", [False, True])
def test_who_has_read_everything_reads_what_has_changed_alone(store, monkeypatch, is_over) -> None:
    monkeypatch.setattr(log_reader, "CACHED_BYTES", 0)
    follower = reader(store, is_over=is_over)
    page = follower.forward(follower.head(ALL), ALL, 1_000)
    assert (len(page.events), store.count()) == (2 * len(NODES), len(NODES))
    assert (follower.forward(page.last, ALL, 1_000).events, store.count()) == ((), 0)
    store.append(NODES[3], "a", "b", "c", ended=True)
    page = follower.forward(page.last, ALL, 1_000)
    assert ([event.text for event in page.events], store.count()) == (["c"], 1)
    assert (follower.forward(page.last, ALL, 1_000).events, store.count()) == ((), 0)


@pytest.mark.parametrize("is_over", [False, True])
def test_the_newest_lines_of_many_nodes_are_read_once(store, is_over) -> None:
    asker = reader(store, is_over=is_over)
    page = asker.backward(asker.tail(ALL), ALL, 10)
    assert (len(page.events), store.count()) == (10, len(NODES))


def test_what_is_kept_is_bounded(store, monkeypatch) -> None:
    monkeypatch.setattr(log_reader, "CACHED_BYTES", 2 * len(store.get(next(iter(store.list(ObjectReference(bucket="b", key="")))).reference)))
    asker = reader(store)
    store.count()
    end = asker.tail(ALL)
    assert len(asker.backward(end, ALL, 1_000).events) == 2 * len(NODES)
    assert store.count() >= 2 * len(NODES) - 2
