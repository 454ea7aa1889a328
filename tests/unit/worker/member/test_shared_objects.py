"""Nodes whose shards share objects in S3 read each byte of these objects once, and survive faulty nodes."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from everstep.protocol.codec import Message
from everstep.protocol.errors import MalformedMessage
from everstep.protocol.ids import NodeId, Rank
from everstep.protocol.peer_messages import LoadObject, ReadyToLoad, ShardRefused, ShardWanted
from everstep.protocol.plan import ObjectReference
from tests.small_chunks import use_small_chunks
from tests.unit.worker.member.lines import Line
from tests.unit.worker.member.sharing_nodes import Cluster
from tests.unit.worker.member.test_shared_loads import ReadStore
from tests.unit.worker.storage.slots import Tensors
from worker.errors import StoreDenied, StoreUnavailable
from worker.member.shared_loads import HelpedLoad
from worker.member.shared_objects import ObjectSupply
from worker.replication.streams import Streams
from worker.storage.node_loads import NodeLoads
from worker.storage.object_parts import ObjectParts
from worker.storage.object_store import ObjectReader

NEVER = 1e9
OWN_BYTES, SHARED_BYTES = (100, 3000, 900, 2000), 9000


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_chunks(monkeypatch, 256)
    monkeypatch.setattr("worker.storage.downloads.full_jitter", lambda *_: 0.0)


def shard(number: int, *shared: int) -> Tensors:
    """Return the tensors of a rank: its own tensor, and per number in `shared` a tensor that is equal on all ranks."""
    own, content = OWN_BYTES[number % len(OWN_BYTES)], SHARED_BYTES // 250
    return [
        ("own", "uint8", (own,), bytes([number + 1]) * own),
        *((f"shared{each}", "uint8", (SHARED_BYTES,), bytes(range(each, each + 250)) * content) for each in shared),
    ]


class Made:
    """Makes clusters, and closes them after the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[Cluster[ReadStore]] = []

    async def __call__(self, shards: list[Tensors], node_count: int, *, ranks_per_node: int = 1) -> Cluster[ReadStore]:
        objects: dict[str, dict[str, bytes]] = {"bucket": {}}
        stores = [ReadStore(objects) for _ in range(node_count)]
        cluster = Cluster(self._folder, stores, shards, ranks_per_node=ranks_per_node, least_bytes=1)
        self._made.append(cluster)
        await cluster.upload()
        cluster.patience = lambda _: NEVER
        return cluster

    async def close(self) -> None:
        for each in self._made:
            await each.close()


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Made]:
    made = Made(tmp_path)
    yield made
    await made.close()


def reads(cluster: Cluster[ReadStore]) -> Counter[tuple[str, int]]:
    """Return how often all nodes together have read each byte of the shared objects."""
    every = sum((store.read for store in cluster.stores), Counter[tuple[str, int]]())
    return Counter({place: count for place, count in every.items() if "/replicated/" in place[0]})


def shared_bytes(store: ReadStore) -> int:
    """Return how many bytes of shared objects a node has read."""
    return sum(count for (key, _), count in store.read.items() if "/replicated/" in key)


@pytest.mark.parametrize("node_count", [2, 3, 4])
async def test_each_shared_byte_is_read_by_one_node(made: Made, node_count: int) -> None:
    cluster = await made([shard(rank, 0) for rank in range(node_count)], node_count)
    await cluster.load()
    assert set(reads(cluster).values()) == {1}
    assert reads(cluster).total() == SHARED_BYTES
    assert all(shared_bytes(store) for store in cluster.stores), "every node reads a share"


async def test_only_nodes_that_use_an_object_read_it(made: Made) -> None:
    """Each pair of nodes reads its shared object once, and no other node reads a part of it.

    Nodes 0 and 1 share an object, nodes 2 and 3 share another object, and node 4 loads nothing from S3.
    """
    cluster = await made([shard(0, 0), shard(1, 0), shard(2, 1), shard(3, 1)], 5)
    await cluster.load()
    assert set(reads(cluster).values()) == {1}
    assert reads(cluster).total() == 2 * SHARED_BYTES
    assert not shared_bytes(cluster.stores[4]), "it may help with the part of a shard that no other node shares"
    for pair in ((0, 1), (2, 3)):
        assert sum(shared_bytes(cluster.stores[index]) for index in pair) == SHARED_BYTES


async def test_a_node_whose_other_rank_uses_the_object_supplies_it(made: Made) -> None:
    """Both nodes together read an object once, although one rank of node 1 does not use the object.

    Ranks 0 and 1 on node 0 and rank 2 on node 1 share the object. Rank 3 on node 1 shares nothing.
    """
    cluster = await made([shard(0, 0), shard(1, 0), shard(2, 0), shard(3)], 2, ranks_per_node=2)
    await cluster.load()
    assert set(reads(cluster).values()) == {1}
    assert reads(cluster).total() == SHARED_BYTES


@pytest.mark.parametrize("fault", ["dead", "silent"])
async def test_the_other_nodes_read_the_parts_of_a_node_that_does_not_answer(made: Made, fault: str) -> None:
    cluster = await made([shard(rank, 0) for rank in range(3)], 3)
    getattr(cluster, fault).add(2)
    cluster.patience = lambda _: 0.0
    await cluster.load([0, 1])
    assert not cluster.stores[2].read
    assert len(reads(cluster)) == SHARED_BYTES
    assert max(reads(cluster).values()) == 2


async def test_a_node_that_begins_late_still_gets_parts_of_the_others(made: Made) -> None:
    cluster = await made([shard(rank, 0) for rank in range(2)], 2)
    cluster.patience = lambda _: 0.0
    await cluster.load_node(0)
    assert shared_bytes(cluster.stores[0]) == SHARED_BYTES, "node 0 waits no longer than its patience"
    cluster.patience = lambda _: NEVER
    await cluster.load_node(1)
    assert 0 < shared_bytes(cluster.stores[1]) < SHARED_BYTES


async def test_wrong_bytes_of_a_node_are_read_again_from_s3(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await made([shard(rank, 0) for rank in range(2)], 2)
    copy, copied = ObjectParts.copy, list[int]()

    def damaged(parts: ObjectParts, number: int, target: memoryview) -> None:
        copy(parts, number, target)
        target[0] ^= 1
        copied.append(number)

    monkeypatch.setattr(ObjectParts, "copy", damaged)
    await cluster.load()
    assert copied
    assert max(reads(cluster).values()) > 1


async def test_a_damaged_object_is_no_fault_of_a_node(made: Made) -> None:
    cluster = await made([shard(rank, 0) for rank in range(2)], 2)
    (key,) = {each.key for each in cluster.uploaded[0].replicated}
    objects = cluster.stores[0].objects["bucket"]
    objects[key] = objects[key][:-1] + bytes([objects[key][-1] ^ 1])
    results = await asyncio.gather(cluster.load_node(0), cluster.load_node(1), return_exceptions=True)
    assert [type(each).__name__ for each in results] == ["CorruptCheckpoint"] * 2


async def test_s3_refuses_one_part_once(made: Made) -> None:
    """The node whose read fails tries again, and gets all other parts from the node that has loaded meanwhile."""
    cluster = await made([shard(rank, 0) for rank in range(2)], 2)
    failures = [StoreUnavailable("503")]

    def fail_once() -> None:
        if failures:
            raise failures.pop()

    cluster.stores[1].before_range = fail_once
    await cluster.load()
    assert not failures


async def test_s3_refuses_all_parts_of_a_node(made: Made) -> None:
    """The load of node 1 fails. Node 1 rejects the requests of node 0, so node 0 reads these parts from S3 itself.

    Node 0 does not wait until its time limit for parts of other nodes has passed.
    """
    cluster = await made([shard(rank, 0) for rank in range(2)], 2)

    def fail() -> None:
        raise StoreDenied("403")

    cluster.stores[1].before_range = fail
    results = await asyncio.gather(*map(cluster.load_node, range(2)), return_exceptions=True)
    assert results[0] is None
    assert isinstance(results[1], StoreDenied)
    assert shared_bytes(cluster.stores[0]) == SHARED_BYTES


async def test_a_lost_connection_is_replaced_by_s3(made: Made) -> None:
    """Node 1 hangs after it has read one of its parts. Its connection to node 0 is lost, and node 0 reads S3 itself."""
    cluster = await made([shard(rank, 0) for rank in range(2)], 2)
    go, begun, calls = threading.Event(), threading.Event(), list[int]()

    def hang() -> None:
        calls.append(1)
        if len(calls) > 1:
            begun.set()
            assert go.wait(30.0)

    cluster.stores[1].before_range = hang
    first, second = (asyncio.create_task(cluster.load_node(index)) for index in range(2))
    try:
        assert await asyncio.get_running_loop().run_in_executor(None, begun.wait, 30.0)
        await cluster.is_asked[1].wait()
        await cluster.cut()
        await first
    finally:
        go.set()
    await second


async def test_a_cancelled_load_ends_its_sessions(made: Made) -> None:
    cluster = await made([shard(rank, 0) for rank in range(2)], 2)
    cluster.silent.add(1)
    loading = asyncio.create_task(cluster.load_node(0))
    await cluster.is_asked[1].wait()
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("objects of")] == []


@pytest.mark.parametrize("is_broken", [False, True])
async def test_a_node_without_a_load_helps_with_parts_of_one_shard_only(
    made: Made, monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    """Node 2, which loads nothing itself, helps only with parts of a shard that have no bytes of the shared object.

    In the test, these are the last parts of each shard.
    """
    cluster = await made([shard(rank, 0)[::-1] for rank in (1, 3)], 3)
    begun, calls, claim = threading.Event(), Counter[int](), HelpedLoad.claim

    def help_or_fail() -> None:
        begun.set()
        if is_broken:
            raise StoreUnavailable("503")

    def patient(helpers: HelpedLoad, number: int) -> bool:
        calls[id(helpers)] += 1
        assert calls[id(helpers)] != 2 or begun.wait(30.0)
        return claim(helpers, number)

    monkeypatch.setattr(HelpedLoad, "claim", patient)
    cluster.stores[2].before_range = help_or_fail
    await cluster.load()
    every = sum((store.read for store in cluster.stores), Counter[tuple[str, int]]())
    assert begun.is_set()
    assert set(every.values()) == {1}
    assert bool(cluster.stores[2].read) != is_broken
    assert not shared_bytes(cluster.stores[2])


async def test_a_part_is_supplied_only_when_all_its_chunks_have_arrived(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await made([shard(rank, 0) for rank in range(2)], 2)
    loop, write, written = asyncio.get_running_loop(), ObjectParts.write, Counter[tuple[int, int]]()

    def noted(parts: ObjectParts, chunk: int, data: memoryview) -> None:
        number = parts.part_of(chunk)
        if written[id(parts), number]:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(30.0)
            assert number not in parts.present
        write(parts, chunk, data)
        written[id(parts), number] += 1

    monkeypatch.setattr(ObjectParts, "write", noted)
    await cluster.load()
    assert max(written.values()) == 2
    assert set(reads(cluster).values()) == {1}


async def test_a_node_supplies_an_object_while_the_objects_of_another_rank_are_unknown(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 0 cannot read the header of rank 1. It still supplies the object of rank 0 to node 1."""
    cluster = await made([shard(0, 0), shard(1), shard(2, 0)], 2, ranks_per_node=2)
    go, opened = threading.Event(), cluster.stores[0].open

    @contextmanager
    def hang(reference: ObjectReference, **named: Any) -> Iterator[ObjectReader]:
        assert "rank=1." not in reference.key or go.wait(30.0)
        with opened(reference, **named) as reader:
            yield reader

    monkeypatch.setattr(cluster.stores[0], "open", hang)
    first = asyncio.create_task(cluster.load_node(0))
    try:
        await cluster.load_node(1)
    finally:
        go.set()
    await first
    assert set(reads(cluster).values()) == {1}


PLACE = ObjectReference(bucket="bucket", key="shared")


class Asking:
    """A scripted node that requests shared objects from a node that has not begun to load any shard."""

    def __init__(self, *, expected: tuple[Rank, ...] = ()) -> None:
        there, back = asyncio.Queue[Message | None](), asyncio.Queue[Message | None]()
        self.line = Line(NodeId("i-1"), "load", back, there)
        self.loads = NodeLoads()
        self.is_loaded = asyncio.Event()
        supply = ObjectSupply(self.loads, asyncio.Semaphore(1), expected=expected, is_loaded=self.is_loaded)
        peer = Line(NodeId("i-0"), "load", there, back)
        self.serving = asyncio.create_task(supply.serve(peer, Streams(), LoadObject(transfer=1, object=PLACE)))


async def test_a_node_refuses_objects_that_its_shards_do_not_use() -> None:
    asking = Asking()
    assert await asking.line.receive() == ShardRefused(transfer=1, reason="no shard here uses the object")
    await asking.line.send(LoadObject(transfer=2, object=PLACE))
    assert await asking.line.receive() == ShardRefused(transfer=2, reason="no shard here uses the object")
    await asking.line.send(ReadyToLoad())
    with pytest.raises(MalformedMessage):
        await asking.serving


async def test_a_node_answers_when_it_knows_the_objects_of_all_its_ranks() -> None:
    asking = Asking(expected=(Rank(0), Rank(1)))
    asking.loads.joined.add(Rank(0))
    asking.loads.changed.notify()
    await asyncio.sleep(0)
    assert not asking.serving.done()
    asking.loads.joined.add(Rank(1))
    asking.loads.changed.notify()
    assert isinstance(await asking.line.receive(), ShardRefused)
    asking.line.close()
    await asyncio.wait([asking.serving])


async def test_a_node_accepts_no_request_before_its_answer() -> None:
    asking = Asking(expected=(Rank(0),))
    await asking.line.send(ShardWanted(transfer=1, chunks=((0, 2),)))
    with pytest.raises(MalformedMessage):
        await asking.serving
