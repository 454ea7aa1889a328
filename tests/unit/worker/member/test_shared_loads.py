"""Several nodes load one shard from S3 together. Each byte is read by only one node, unless a helper fails."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from everstep.protocol.codec import Message
from everstep.protocol.errors import MalformedMessage
from everstep.protocol.ids import NodeId, Rank
from everstep.protocol.peer_messages import (
    CHUNK_HEADER,
    LoadShard,
    ObjectHeader,
    ReadyToLoad,
    ShardRefused,
    ShardWanted,
)
from everstep.protocol.plan import ObjectReference
from tests.fakes.clocks import FastClock
from tests.fakes.storage import MemoryObjectStore
from tests.small_chunks import use_small_chunks
from tests.unit.worker.member.lines import Line
from tests.unit.worker.member.loading_nodes import OWNER, RANK, Nodes
from tests.unit.worker.storage.slots import Tensors
from worker.core import shared_parts
from worker.errors import CorruptCheckpoint, PeerLost, StoreUnavailable
from worker.member.shared_loads import MAX_HELPED_PARTS, HelpedLoad
from worker.replication.streams import ChunkQueue, Streams
from worker.storage.object_store import ObjectReader, Span
from worker.storage.shard_parts import ShardParts

CHUNK_BYTES = 256
HELPER = NodeId("i-1")


class ReadStore(MemoryObjectStore):
    """One node's view of the objects that all nodes share. It records the bytes that the node reads."""

    def __init__(self, objects: dict[str, dict[str, bytes]]) -> None:
        super().__init__()
        self.objects = objects
        self.read: Counter[tuple[str, int]] = Counter()
        """How often each byte of each object was read."""
        self.before_range: Callable[[], None] = lambda: None
        self.is_wrong = False
        """True if reads return other bytes than the object contains."""
        self.is_ready = False
        """True if the first request of a read, which fetches the header, returns the whole object."""

    @contextmanager
    def open(self, reference: ObjectReference, *, etag: str = "") -> Iterator[ObjectReader]:
        with super().open(reference, etag=etag) as reader:
            if self.is_ready:
                cast(Any, reader).ready_bytes = reader.bytes
            yield reader

    def read_range(
        self, reference: ObjectReference, begin: int, target: memoryview, spans: Sequence[Span], **named: Any
    ) -> None:
        self.before_range()
        super().read_range(reference, begin, target, spans, **named)
        size = sum(stop - start for start, stop in spans)
        self.read.update((reference.key, position) for position in range(begin, begin + size))
        if self.is_wrong:
            target[spans[0][0]] ^= 1


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_chunks(monkeypatch, CHUNK_BYTES)
    monkeypatch.setattr("worker.storage.downloads.full_jitter", lambda *_: 0.0)


TENSORS: Tensors = [
    ("weight", "uint8", (4000,), bytes(range(250)) * 16),
    ("bias", "uint8", (3,), b"abc"),
    ("base", "uint8", (2000,), bytes(range(200)) * 10),
]


@pytest.fixture
async def nodes(tmp_path: Path) -> Nodes[ReadStore]:
    objects: dict[str, dict[str, bytes]] = {"bucket": {}}
    found = Nodes(tmp_path, [ReadStore(objects) for _ in range(3)], TENSORS)
    await found.store()
    return found


def reads(nodes: Nodes[ReadStore]) -> Counter[tuple[str, int]]:
    """Return how often all nodes together have read each byte of the data."""
    return sum((store.read for store in nodes.stores), Counter())


def stored(nodes: Nodes[ReadStore]) -> tuple[str, bytes]:
    """Return the key and the content of the shard's object."""
    ((key, data),) = nodes.stores[0].objects["bucket"].items()
    return key, data


def wait_for_helper(monkeypatch: pytest.MonkeyPatch, nodes: Nodes[ReadStore]) -> None:
    """Delay the owner's second part until a helper has begun to read a part."""
    begun = threading.Event()
    claim = HelpedLoad.claim

    def patient(helpers: HelpedLoad, number: int) -> bool:
        if number == 2:
            assert begun.wait(30.0)
        return claim(helpers, number)

    monkeypatch.setattr(HelpedLoad, "claim", patient)

    def note(before: Callable[[], None]) -> None:
        begun.set()
        before()

    for store in nodes.stores[1:]:
        store.before_range = partial(note, store.before_range)


def is_helped(nodes: Nodes[ReadStore]) -> bool:
    return any(store.read for store in nodes.stores[1:])


async def test_several_nodes_read_every_byte_once(nodes: Nodes[ReadStore], monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_helper(monkeypatch, nodes)
    await nodes.load()
    assert [type(error) for error in nodes.ends] == [PeerLost] * len(nodes.ends), nodes.ends
    assert set(reads(nodes).values()) == {1}
    data_bytes = 4000 + 3 + 2000
    assert sum(reads(nodes).values()) == data_bytes
    assert nodes.stores[0].read
    assert is_helped(nodes)


async def test_a_node_that_still_loads_its_own_shards_is_not_waited_for(nodes: Nodes[ReadStore]) -> None:
    for event in nodes.is_loaded:
        event.clear()
    await nodes.load()
    assert set(nodes.asked) == {HELPER, NodeId("i-2")}
    assert not nodes.stores[1].read
    assert set(reads(nodes).values()) == {1}


async def test_a_helpers_wrong_bytes_never_reach_the_shard(
    nodes: Nodes[ReadStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner detects a helper's wrong bytes, and reads the helper's parts again.

    The test disables the helper's own check, as if the bytes were damaged in memory after the check.
    """
    monkeypatch.setattr("worker.member.shared_loads.ShardParts._verify", lambda *_: None)
    for store in nodes.stores[1:]:
        store.is_wrong = True
    wait_for_helper(monkeypatch, nodes)
    await nodes.load()
    assert is_helped(nodes)
    assert max(reads(nodes).values()) == 2, "the owner reads the helper's parts again"


async def test_a_helpers_wrong_bytes_do_not_spoil_bytes_that_the_owner_has_already(
    nodes: Nodes[ReadStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner's first request returns the whole object, and a helper overwrites a part of it with wrong bytes.

    The owner then reads this part again.
    """

    class Unverified(ShardParts):
        def _verify(self, number: int, target: memoryview, begin: int) -> None:
            pass

    monkeypatch.setattr("worker.member.shared_loads.ShardParts", Unverified)
    nodes.stores[0].is_ready = True
    for store in nodes.stores[1:]:
        store.is_wrong = True
    wait_for_helper(monkeypatch, nodes)
    await nodes.load()
    assert is_helped(nodes)


async def test_the_owner_claims_the_part_that_it_has_already_before_it_asks_helpers(
    nodes: Nodes[ReadStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the owner's first request returns all bytes of the first part, no helper reads this part again."""
    calls: list[object] = []
    claim, begin = HelpedLoad.claim, HelpedLoad.begin

    def claimed(helpers: HelpedLoad, number: int) -> bool:
        calls.append(number)
        return claim(helpers, number)

    def begun(helpers: HelpedLoad, check: Callable[[], None]) -> None:
        calls.append("begin")
        begin(helpers, check)

    monkeypatch.setattr(HelpedLoad, "claim", claimed)
    monkeypatch.setattr(HelpedLoad, "begin", begun)
    nodes.stores[0].is_ready = True
    await nodes.load()
    assert calls[:3] == [1, "begin", 2]


async def test_a_helper_whose_s3_fails_is_replaced_by_the_owner(
    nodes: Nodes[ReadStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise StoreUnavailable("503")

    nodes.stores[1].before_range = nodes.stores[2].before_range = fail
    wait_for_helper(monkeypatch, nodes)
    await nodes.load()
    assert not nodes.stores[1].read
    assert set(nodes.stores[0].read.values()) == {1}


@pytest.mark.parametrize("how", ["late", "lost"])
async def test_a_helper_that_does_not_answer_is_replaced_by_the_owner(
    nodes: Nodes[ReadStore], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "late":
        monkeypatch.setattr("worker.member.shared_loads.monotonic", clock := FastClock(1000))
        monkeypatch.setattr("worker.member.part_sharing.monotonic", clock)
    go, begun = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        assert go.wait(30.0)

    settled = asyncio.Event()
    loop = asyncio.get_running_loop()
    exclude = shared_parts.SharedParts.exclude

    def noted(state: shared_parts.SharedParts, helper: NodeId) -> shared_parts.SharedParts:
        loop.call_soon_threadsafe(settled.set)
        return exclude(state, helper)

    monkeypatch.setattr(shared_parts.SharedParts, "exclude", noted)
    nodes.stores[1].before_range = nodes.stores[2].before_range = hang
    wait_for_helper(monkeypatch, nodes)
    loading = asyncio.create_task(nodes.load())
    try:
        assert await loop.run_in_executor(None, begun.wait, 30.0)
        if how == "lost":
            for dialler in nodes.diallers.values():
                for task in dialler.serving:
                    task.cancel()
        else:
            await settled.wait()
        go.set()
        await loading
    finally:
        go.set()
    assert set(nodes.stores[0].read.values()) == {1}


async def test_an_error_of_the_owner_ends_the_help_and_is_tried_again(
    nodes: Nodes[ReadStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [StoreUnavailable("503")]

    def fail_once() -> None:
        if failures:
            raise failures.pop()

    nodes.stores[0].before_range = fail_once
    await nodes.load()
    assert not failures


async def test_a_damaged_object_is_refused_whoever_reads_it(nodes: Nodes[ReadStore]) -> None:
    key, data = stored(nodes)
    nodes.stores[0].objects["bucket"][key] = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(CorruptCheckpoint):
        await nodes.load()


async def test_a_cancelled_load_ends_its_helpers(nodes: Nodes[ReadStore], monkeypatch: pytest.MonkeyPatch) -> None:
    go, begun = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        assert go.wait(30.0)

    nodes.stores[1].before_range = nodes.stores[2].before_range = hang
    wait_for_helper(monkeypatch, nodes)
    loading = asyncio.create_task(nodes.load())
    assert await asyncio.get_running_loop().run_in_executor(None, begun.wait, 30.0)
    loading.cancel()
    asyncio.get_running_loop().call_later(0.0, go.set)
    with pytest.raises(asyncio.CancelledError):
        await loading


class Owner:
    """A scripted owner, which talks to the helper of node 1."""

    def __init__(self, nodes: Nodes[ReadStore]) -> None:
        self.inbox: asyncio.Queue[Message | None] = asyncio.Queue()
        self.outbox: asyncio.Queue[Message | None] = asyncio.Queue()
        self.streams = Streams()
        self.line = Line(HELPER, "load", self.inbox, self.outbox)
        self.serving = asyncio.create_task(
            nodes.helpers[1].serve(Line(OWNER, "load", self.outbox, self.inbox), self.streams)
        )

    async def says(self, *messages: Message) -> None:
        await self.line.send(*messages)

    async def begin(self, nodes: Nodes[ReadStore], *, stream_count: int) -> list[socket.socket]:
        """Begin a load over several streams, and return the owner's ends of the streams."""
        ends = []
        for _ in range(stream_count):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                ends.append(socket.create_connection(listener.getsockname(), timeout=20.0))
                self.streams.add(listener.accept()[0])
        _, data = stored(nodes)
        await self.says(request(nodes))
        assert isinstance(await self.line.receive(), ReadyToLoad)
        await self.says(ObjectHeader(data=data[8 : 8 + header_bytes(data)]))
        return ends

    async def end(self) -> BaseException | None:
        """End the session, and return the error with which the helper ended."""
        self.line.close()
        (error,) = await asyncio.gather(self.serving, return_exceptions=True)
        await self.streams.close()
        return error


def request(nodes: Nodes[ReadStore], **changes: Any) -> LoadShard:
    _, data = stored(nodes)
    length = header_bytes(data)
    fields: dict[str, Any] = {
        "owner_rank": RANK,
        "digest": nodes.source.digest,
        "object": nodes.source.object,
        "object_bytes": len(data),
        "header_bytes": length,
    }
    return LoadShard(**fields | changes)


def header_bytes(data: bytes) -> int:
    return int.from_bytes(data[:8], "little")


@pytest.mark.parametrize(
    "changes",
    [
        {"object": ObjectReference(bucket="bucket", key="jobs/other/secret")},
        {"owner_rank": Rank(1)},
        {"digest": bytes(16)},
    ],
)
async def test_a_helper_reads_only_objects_that_the_plan_names(
    nodes: Nodes[ReadStore], changes: dict[str, Any]
) -> None:
    owner = Owner(nodes)
    await owner.says(request(nodes, **changes))
    assert isinstance(await owner.line.receive(), ShardRefused)
    await owner.serving
    assert not nodes.stores[1].read


@pytest.mark.parametrize(
    "messages",
    [
        [ReadyToLoad()],
        [{"header_bytes": 0}],
        [{"header_bytes": 2**31}],
        [{}, ObjectHeader(data=b"")],
        [{}, ShardWanted(transfer=1, chunks=((0, 2),))],
        [{}, "header", ShardWanted(transfer=2, chunks=((0, 2),))],
        [{}, "header", ShardWanted(transfer=1, chunks=((0, 1),))],
        [{}, "header", ShardWanted(transfer=1, chunks=((1, 2),))],
        [{}, "header", ShardWanted(transfer=1, chunks=((1000, 2),))],
        [{}, "header", ShardWanted(transfer=1, chunks=((0, 2),)), ShardWanted(transfer=1, chunks=((0, 2),))],
        [{"object_bytes": 9000}, "header"],
        [{}, "damaged header"],
    ],
)
async def test_a_helper_rejects_requests_that_make_no_sense(nodes: Nodes[ReadStore], messages: list[Any]) -> None:
    owner = Owner(nodes)
    _, data = stored(nodes)
    length = header_bytes(data)
    for message in messages:
        if isinstance(message, dict):
            await owner.says(request(nodes, **message))
        elif message == "header":
            await owner.says(ObjectHeader(data=data[8 : 8 + length]))
        elif message == "damaged header":
            await owner.says(ObjectHeader(data=bytes(length)))
        else:
            await owner.says(message)
    with pytest.raises(MalformedMessage):
        await owner.serving


async def test_a_helper_sends_over_two_streams_at_the_same_time(
    nodes: Nodes[ReadStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads of two streams send chunks of one part at the same time. The helper still frees each sent part.

    The helper has room for `MAX_HELPED_PARTS` parts. It can only send more parts if it frees the sent ones.
    """
    both_have_one, part_count = threading.Barrier(2), 2 * MAX_HELPED_PARTS
    finish = ChunkQueue.finish

    def together(queue: ChunkQueue) -> None:
        both_have_one.wait(30.0)
        finish(queue)

    monkeypatch.setattr(ChunkQueue, "finish", together)
    owner = Owner(nodes)
    ends = await owner.begin(nodes, stream_count=2)
    for number in range(part_count):
        await owner.says(ShardWanted(transfer=1, chunks=((2 * number, 2),)))

    def receive(line: socket.socket) -> list[int]:
        with line.makefile("rb") as file:
            chunks = []
            for _ in range(part_count):
                _, chunk, size = CHUNK_HEADER.unpack(file.read(CHUNK_HEADER.size))
                assert file.read(size) == nodes.payload[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
                chunks.append(chunk)
            return chunks

    loop = asyncio.get_running_loop()
    found = await asyncio.gather(*(loop.run_in_executor(None, receive, line) for line in ends))
    assert sorted(chunk for chunks in found for chunk in chunks) == list(range(2 * part_count))
    assert isinstance(await owner.end(), PeerLost)
    for line in ends:
        line.close()


async def test_a_new_session_of_an_owner_ends_its_earlier_one(nodes: Nodes[ReadStore]) -> None:
    """An owner has lost its connection and opens a new session. The helper ends the earlier session.

    The helper is still reading parts for the earlier session.
    """
    begun, go = threading.Semaphore(0), threading.Event()

    def hang() -> None:
        begun.release()
        assert go.wait(30.0)

    nodes.stores[1].before_range = hang
    first, second = Owner(nodes), Owner(nodes)
    ends = await first.begin(nodes, stream_count=1)
    for number in range(MAX_HELPED_PARTS):
        await first.says(ShardWanted(transfer=1, chunks=((2 * number, 2),)))
    for _ in range(MAX_HELPED_PARTS):
        assert await asyncio.get_running_loop().run_in_executor(None, begun.acquire, True, 30.0)
    asyncio.get_running_loop().call_later(0.0, go.set)
    ends += await second.begin(nodes, stream_count=1)
    assert first.serving.cancelled()
    await second.says(ShardWanted(transfer=1, chunks=((0, 2),)))
    data = await asyncio.get_running_loop().run_in_executor(None, ends[1].recv, CHUNK_HEADER.size)
    assert CHUNK_HEADER.unpack(data)[1] == 0
    assert isinstance(await second.end(), PeerLost)
    await first.streams.close()
    for line in ends:
        line.close()
