"""Tests which objects the log reader reads from the store. `api/test_logs.py` tests the pages that it returns."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from control_plane.loop import log_reader
from control_plane.loop.log_reader import GenerationFacts, LogFilter, LogReader
from everstep.protocol.ids import NO_RANK, NodeId, Rank
from everstep.protocol.log_chunks import ChunkHead, ChunkName, LogLine, TailName, encode_head, encode_lines
from everstep.protocol.plan import ObjectReference
from tests.fakes.cloud import MemoryObjectStore
from tests.unit.control_plane.db.conftest import NOW

MS = int(NOW.timestamp() * 1000)
NODES = [NodeId(f"i-{number}") for number in range(40)]
ALL = LogFilter()


class Counting(MemoryObjectStore):
    """A memory object store that records the key of each read."""

    def __init__(self) -> None:
        super().__init__("b")
        self.read: list[str] = []

    def get(self, reference: ObjectReference, **limits: int) -> bytes:
        self.read.append(reference.key)
        return super().get(reference, **limits)

    def count(self) -> int:
        """Return the number of reads since the last call."""
        found, self.read = len(self.read), []
        return found

    def append(self, node: NodeId, *texts: str, ended: bool = False) -> None:
        lines = [
            LogLine(at_ms=MS + number, rank=Rank(0), stream="stdout", text=text, end=1)
            for number, text in enumerate(texts)
        ]
        end = [LogLine(at_ms=MS + 9, rank=NO_RANK, stream="end", text="", end=0)] if ended else []
        key = f"logs/gen=1/{ChunkName(node, 0, MS).path}"
        self.put(
            ObjectReference(bucket="b", key=key),
            encode_head(ChunkHead(first=0, positions={})) + encode_lines([*lines, *end]),
        )


@pytest.fixture
def store() -> Counting:
    made = Counting()
    for node in NODES:
        made.append(node, "a", "b")
    return made


def reader(store: Counting, *, is_over: bool = False, **options: int) -> LogReader:
    facts = GenerationFacts(number=1, ranks={node: (Rank(0),) for node in NODES}, over_since=NOW if is_over else None)
    place = ObjectReference(bucket="b", key="logs/")
    return LogReader(store, place, [facts], frozenset(NODES), False, lambda: NOW, **options)


@pytest.mark.parametrize("is_over", [False, True])
def test_who_has_read_everything_reads_what_has_changed_alone(store, is_over) -> None:
    follower = reader(store, is_over=is_over, cache_limit_bytes=0)
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


def test_what_is_kept_is_bounded(store) -> None:
    chunk_bytes = len(store.get(next(iter(store.list(ObjectReference(bucket="b", key="")))).reference))
    asker = reader(store, cache_limit_bytes=2 * chunk_bytes)
    store.count()
    end = asker.tail(ALL)
    assert len(asker.backward(end, ALL, 1_000).events) == 2 * len(NODES)
    assert store.count() >= 2 * len(NODES) - 2


def lines_of(first: int, *texts: str) -> bytes:
    lines = [
        LogLine(at_ms=MS + first + number, rank=Rank(0), stream="stdout", text=text, end=1)
        for number, text in enumerate(texts)
    ]
    return encode_head(ChunkHead(first=first, positions={})) + encode_lines(lines)


def one_node(tails: Mapping[str, tuple[int, str]], *, is_alive: bool = False, ended: bool = False) -> LogReader:
    """Return a reader for a node that has uploaded the lines a, b and c.

    Other nodes may have uploaded copies of this node's last lines. For each such node, `tails` contains the number of
    the first copied line and the copied lines, one letter per line.
    """
    store = MemoryObjectStore("b")
    end = encode_lines([LogLine(at_ms=MS + 9, rank=NO_RANK, stream="end", text="", end=0)]) if ended else b""
    store.put(
        ObjectReference(bucket="b", key=f"logs/gen=1/{ChunkName(NODES[0], 0, MS).path}"), lines_of(0, *"abc") + end
    )
    for holder, (first, letters) in tails.items():
        name = TailName(NODES[0], first, MS + first, NodeId(holder))
        store.put(ObjectReference(bucket="b", key=f"logs/gen=1/{name.path}"), lines_of(first, *letters))
    facts = GenerationFacts(number=1, ranks={NODES[0]: (Rank(0),)}, over_since=NOW)
    return LogReader(
        store,
        ObjectReference(bucket="b", key="logs/"),
        [facts],
        frozenset(NODES[:1] if is_alive else ()),
        True,
        lambda: NOW,
    )


@pytest.mark.parametrize(
    ("tails", "expected"),
    [
        ({}, "abc"),
        ({"i-8": (1, "bcde")}, "abcde"),
        ({"i-8": (3, "de")}, "abcde"),
        ({"i-8": (1, "bcde"), "i-9": (2, "cdef")}, "abcdef"),
        ({"i-8": (2, "cdef"), "i-9": (1, "bcd")}, "abcdef"),
        ({"i-8": (0, "ab")}, "abc"),
    ],
)
@pytest.mark.parametrize("limit", [1, 2, 100])
def test_lines_of_a_lost_node_that_its_peers_have_are_read_once_and_in_place(tails, expected, limit) -> None:
    asker = one_node(tails)
    forward, at = [], asker.head(ALL)
    while (page := asker.forward(at, ALL, limit)).events:
        forward, at = [*forward, *page.events], page.last
    assert "".join(event.text for event in forward if event.kind != "gap") == expected
    assert [event.kind for event in forward].count("gap") == 1, "what it printed behind its last committed step"
    assert forward[-1].at_ms == MS + len(expected) - 1
    back, at = [], asker.tail(ALL)
    while (page := asker.backward(at, ALL, limit)).events:
        back, at = [*page.events, *back], page.first
    assert [event for event in back if event.kind != "gap"] == [event for event in forward if event.kind != "gap"]


def test_lines_between_a_lost_node_and_what_its_peers_keep_are_named() -> None:
    asker = one_node({"i-8": (7, "hi")})
    events = asker.forward(asker.head(ALL), ALL, 100).events
    assert [event.text for event in events[:3]] == ["a", "b", "c"]
    assert (events[3].kind, events[3].text) == (
        "gap",
        "4 lines of node i-0 were lost with it: its peers keep only the newest.",
    )
    assert [event.text for event in events[4:6]] == ["h", "i"]
    assert asker.backward(asker.tail(ALL), ALL, 100).events == events


@pytest.mark.parametrize(("is_alive", "ended"), [(True, False), (False, True)])
def test_a_node_that_ships_its_lines_itself_needs_nobodys_word(is_alive, ended) -> None:
    asker = one_node({"i-8": (7, "hi")}, is_alive=is_alive, ended=ended)
    assert [event.text for event in asker.forward(asker.head(ALL), ALL, 100).events] == ["a", "b", "c"]


def test_a_page_of_long_lines_is_short_and_the_next_ones_continue() -> None:
    store, lines = Counting(), [str(number).rjust(4) * 1_000 for number in range(600)]
    store.append(NODES[0], *lines)
    whole, pages = reader(store), []
    cursor = whole.head(ALL)
    while (page := whole.forward(cursor, ALL, 10_000)).events:
        pages.append([event.text for event in page.events])
        cursor = page.last
    most = -(-log_reader.PAGE_CHARACTERS // 4_000)
    assert [len(texts) for texts in pages] == [most, most, 600 - 2 * most]
    assert [text for texts in pages for text in texts] == lines
    newest = whole.backward(whole.tail(ALL), ALL, 10_000)
    assert [event.text for event in newest.events] == lines[-most:]
