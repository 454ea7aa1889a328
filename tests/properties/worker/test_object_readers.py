"""All nodes agree on which node reads which part of a shared object, and never wait for each other in a circle."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from everstep.protocol.ids import Generation, NodeId, Step
from everstep.protocol.plan import ObjectReference, Relayout, ShardSource
from everstep.protocol.slot import chunk_range
from tests.fakes.storage import MemoryObjectStore
from tests.small_chunks import use_small_chunks
from tests.unit.worker.rank_plans import rank_plan
from worker.core.object_readers import ObjectReaders, patience_seconds, reading_order
from worker.core.shared_parts import LATE_SECONDS, reading_nodes
from worker.storage.object_parts import ObjectParts

KEYS = st.text(st.characters(codec="utf-8"), max_size=20)
COUNTS = st.integers(1, 7)


def nodes_of(count: int) -> tuple[NodeId, ...]:
    return tuple(NodeId(f"i-{index}") for index in range(count))


@given(COUNTS, KEYS, st.integers(1, 1000))
def test_an_order_contains_each_node_once(count: int, key: str, number: int) -> None:
    assert sorted(reading_order(nodes_of(count), key, number)) == sorted(nodes_of(count))


@given(COUNTS, KEYS, st.integers(0, 60))
def test_the_parts_of_an_object_are_divided_evenly(count: int, key: str, part_count: int) -> None:
    readers = ObjectReaders(NodeId("i-0"), nodes_of(count))
    parts = Counter(readers.reader(key, number) for number in range(1, part_count + 1))
    assert max(parts.values(), default=0) - min(parts[node] for node in readers.nodes) <= 1


@given(st.integers(3, 6), KEYS, st.data())
def test_the_parts_of_nodes_that_drop_out_are_divided_evenly(count: int, key: str, data: st.DataObject) -> None:
    """If nodes drop out, the remaining nodes divide the parts of these nodes evenly.

    All other parts keep their readers.
    """
    nodes = nodes_of(count)
    lost = data.draw(st.sets(st.sampled_from(nodes), min_size=1, max_size=2))
    here = data.draw(st.sampled_from(sorted(set(nodes) - lost)))
    whole = less = ObjectReaders(here, nodes)
    for node in lost:
        less = data.draw(st.sampled_from([less.exclude(node), less.lack(node, key)]))
    moved = Counter[NodeId]()
    for number in range(1, count * (count - 1) * (count - 2) + 1):
        before, after = whole.reader(key, number), less.reader(key, number)
        assert after not in lost
        assert before == after or before in lost
        moved[after] += before in lost
    assert len({moved[node] for node in set(nodes) - lost}) == 1


@given(COUNTS, KEYS, st.integers(1, 1000), st.data())
def test_all_nodes_that_use_an_object_agree_on_the_reader(
    count: int, key: str, number: int, data: st.DataObject
) -> None:
    nodes = nodes_of(count)
    users = data.draw(st.sets(st.sampled_from(nodes), min_size=1))
    found = set[NodeId]()
    for here in users:
        readers = ObjectReaders(here, nodes)
        for node in set(nodes) - users:
            readers = readers.lack(node, key).lack(node, "another object")
        found.add(readers.reader(key, number))
    assert len(found) == 1
    assert found <= users


@given(COUNTS, KEYS, st.integers(1, 1000), st.data())
def test_nodes_never_wait_for_each_other_in_a_circle(count: int, key: str, number: int, data: st.DataObject) -> None:
    """From any node, the chain of readers ends at a node that reads the part itself.

    This also holds if every node has excluded different nodes as readers. It also holds for two further nodes that load
    the object although the plan does not name them as readers.
    """
    everyone = nodes_of(count + 2)
    views = {
        here: ObjectReaders(here, everyone[:count]).exclude(*data.draw(st.sets(st.sampled_from(everyone))))
        for here in everyone
    }
    for node in everyone:
        seen = {node}
        while (reader := views[node].reader(key, number)) != node:
            assert reader not in seen
            assert reader not in views[node].excluded
            seen.add(node := reader)


def test_another_object_does_not_matter() -> None:
    readers = ObjectReaders(NodeId("i-0"), nodes_of(2))
    other = readers.lack(NodeId("i-1"), "b")
    assert [other.reader("a", number) for number in (1, 2)] == [readers.reader("a", number) for number in (1, 2)]
    assert {other.reader("b", number) for number in (1, 2)} == {NodeId("i-0")}


def test_objects_of_one_part_have_different_readers() -> None:
    readers = ObjectReaders(NodeId("i-0"), nodes_of(4))
    assert len({readers.reader(f"object {number}", 1) for number in range(30)}) == 4


def test_peers_are_the_other_nodes_that_are_not_excluded() -> None:
    a, b, c = nodes_of(3)
    assert ObjectReaders(a, (a, b, c)).exclude(c).peers == (b,)
    assert ObjectReaders(a, (a,)).peers == ()
    assert ObjectReaders(a, ()).reader("key", 1) == a


@given(st.floats(0, 1e6))
def test_a_node_waits_as_long_as_it_needed_itself(own_seconds: float) -> None:
    assert patience_seconds(own_seconds) >= max(own_seconds, LATE_SECONDS)
    assert patience_seconds(own_seconds) <= own_seconds + LATE_SECONDS


def test_only_nodes_whose_first_source_is_s3_share_reads() -> None:
    plan = rank_plan(addresses=("127.0.0.1",) * 3, ranks_per_node=2)
    local = ShardSource(kind="local", origin_generation=Generation(1), step=Step(1), digest=b"", payload_bytes=1)
    s3 = structs.replace(local, kind="s3")
    sources = [(local, s3), (local,), (local,), (s3, local), (), (s3,)]
    ranks = [structs.replace(rank, sources=each) for rank, each in zip(plan.ranks, sources, strict=True)]
    assert reading_nodes(structs.replace(plan, ranks=tuple(ranks))) == (NodeId("i-1"), NodeId("i-2"))
    relayout = Relayout(world_size=1, shards=((s3,),))
    assert reading_nodes(structs.replace(plan, relayout=relayout)) == ()


@given(st.lists(st.integers(1, 90), min_size=1, max_size=8), st.data())
def test_the_parts_of_an_object_carry_each_byte_once_between_different_layouts(
    lengths: list[int], data: st.DataObject
) -> None:
    """Two slots with different positions of the tensors get the object's bytes, and no byte between the tensors.

    The first slot reads the parts from S3. The second slot receives them as chunks.
    """
    content = data.draw(st.binary(min_size=sum(lengths), max_size=sum(lengths)))
    objects, place = MemoryObjectStore("bucket"), ObjectReference(bucket="bucket", key="shared")
    objects.put_bytes(place, b"header" + content)
    with pytest.MonkeyPatch.context() as patch:
        use_small_chunks(patch, 16)
        first, second = (Memory(lengths, data) for _ in range(2))
        here, there = (ObjectParts(place, 6, each.spans, each) for each in (first, second))  # type: ignore[arg-type]
        assert here.payload_bytes == sum(lengths)
        for number in here.numbers:
            here.read(objects, number, lambda: False)
            begin, end = here.bounds(number)
            part = bytearray(end - begin)
            here.copy(number, memoryview(part))
            assert part == content[begin:end]
            for chunk in there.chunks(number):
                low, high = chunk_range(chunk, there.payload_bytes)
                there.write(chunk, memoryview(part)[low - begin : high - begin])
        for memory in (first, second):
            assert b"".join(bytes(memory.data[begin:end]) for begin, end in memory.spans) == content
            assert sum(memory.data) == sum(content), "bytes outside of the tensors stay zero"


class Memory:
    """The payload of a slot, with tensors of the given sizes and random gaps."""

    def __init__(self, lengths: list[int], data: st.DataObject) -> None:
        gaps = iter(data.draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths))))
        self.spans: list[tuple[int, int]] = []
        position = 0
        for length, gap in zip(lengths, gaps, strict=True):
            self.spans.append((position + gap, position + gap + length))
            position += gap + length
        self.data = bytearray(position)

    def payload(self, start: int = 0, end: int | None = None) -> memoryview:
        return memoryview(self.data)[start:end]
