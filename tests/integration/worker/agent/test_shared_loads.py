"""A lost shard is loaded from S3 by real agents: every byte is read once, for the owner and for its holders."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from everstep.protocol.agent_messages import UploadedShard
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.plan import GenerationPlan, ObjectReference, Relayout
from everstep.protocol.slot import SlotIndex, TensorEntry, pack_index
from tests.fakes.storage import MemoryObjectStore
from tests.integration.worker.agent import fleet as agent_fleet
from tests.integration.worker.agent.fleet import Fleet, Node, state, until
from tests.small_chunks import use_small_chunks
from tests.unit.worker.member.loading_nodes import source_of
from worker.core.slots import Content
from worker.core.upload_division import LEAST_BYTES
from worker.errors import PeerLost
from worker.member.earlier_shards import EarlierShards
from worker.member.shared_loads import HelpedLoad
from worker.storage.object_store import Span

pytestmark = pytest.mark.integration


def payload(rank: int, step: int) -> tuple[bytes, int]:
    """Return a payload whose state is one tensor, as S3 stores it."""
    data = state(rank, step)
    entry = TensorEntry("state", "uint8", (len(data),), 0, len(data))
    return data + pack_index(SlotIndex(tensors=(entry,), values=b"")), len(data)


async def stored(fleet: Fleet) -> UploadedShard:
    """Train until a step is committed, and store the shard of rank 0."""
    await fleet.launch()
    await fleet.train(3)
    member = fleet.nodes[0].agent.lifecycle.member
    assert member is not None
    await until("a commit", lambda: member.contents.committed > 0)
    member.uploads.begin(member.contents.committed)
    await member.uploads.idle()
    (uploaded,) = member.uploads.uploaded
    return uploaded


def plan_from_s3(fleet: Fleet, uploaded: UploadedShard) -> GenerationPlan:
    """Return a plan in which rank 0 has no copy in memory."""
    plan = fleet.make_plan()
    assert plan.base_step == uploaded.step
    ranks = (structs.replace(plan.ranks[0], sources=(source_of(uploaded),)), *plan.ranks[1:])
    return structs.replace(plan, ranks=ranks)


def forget(node: Node, rank: Rank) -> None:
    for slot in node.agent.store.shards.get(rank, []):
        slot.file.empty()


async def test_s3_is_read_once_for_the_owner_and_its_holders(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_chunks(monkeypatch, 4096)
    monkeypatch.setattr(agent_fleet, "payload", payload)
    uploaded = await stored(fleet)
    for node in fleet.nodes:
        await node.shim.stop_all()
    await fleet.prepare()
    plan = plan_from_s3(fleet, uploaded)
    for node in fleet.nodes:
        forget(node, Rank(0))

    read = Counter[int]()
    readers = set[str]()
    has_help = threading.Event()
    read_range, claim = MemoryObjectStore.read_range, HelpedLoad.claim

    def counted(
        objects: MemoryObjectStore,
        reference: ObjectReference,
        begin: int,
        target: memoryview,
        spans: Sequence[Span],
        **named: Any,
    ) -> None:
        assert reference == uploaded.object
        size = sum(stop - start for start, stop in spans)
        read.update(range(begin, begin + size))
        is_owner = threading.current_thread().name.startswith("s3-get")
        readers.add("owner" if is_owner else "helper")
        if not is_owner:
            has_help.set()
        read_range(objects, reference, begin, target, spans, **named)

    def patient(helpers: HelpedLoad, number: int) -> bool:
        if number == 2:
            assert has_help.wait(30.0)
        return claim(helpers, number)

    monkeypatch.setattr(MemoryObjectStore, "read_range", counted)
    monkeypatch.setattr(HelpedLoad, "claim", patient)
    await fleet.load(plan)
    await fleet.start()
    await fleet.train(uploaded.step + 2)
    assert readers == {"owner", "helper"}
    assert set(read.values()) == {1}
    assert len(read) == len(state(0, 0))
    member = fleet.nodes[0].agent.lifecycle.member
    assert member is not None
    assert member.base.restored_from == ("s3",)
    assert fleet.ranks[0].restored == payload(0, uploaded.step)[0]
    (holder,) = plan.ranks[0].holders[1:]
    node = next(node for node in fleet.nodes if node.id == holder)
    newest = Content(plan.generation, Step(fleet.ranks[0].word.committed))
    await until("the holder's replica", lambda: node.agent.store.sealed(Rank(0), newest) is not None)


async def all_stored(fleet: Fleet) -> list[UploadedShard]:
    """Train until a step is committed, and store the shards of all ranks."""
    await fleet.launch()
    await fleet.train(4)
    members = [node.agent.lifecycle.member for node in fleet.nodes]
    step = Step(min(rank.word.committed for rank in fleet.ranks))
    uploads = [member.uploads for member in members if member is not None]
    for each in uploads:
        each.begin(step)
    for each in uploads:
        await each.idle()
    return [shard for each in uploads for shard in each.uploaded]


async def test_nodes_that_load_equal_tensors_share_the_reads(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """No node has a shard in memory. Only one node reads each byte of the tensor that is equal on all ranks."""

    def with_equal_tensor(rank: int, step: int) -> tuple[bytes, int]:
        own, equal = state(rank, step), bytes(LEAST_BYTES)
        entries = (
            TensorEntry("state", "uint8", (len(own),), 0, len(own)),
            TensorEntry("equal", "uint8", (len(equal),), len(own), len(equal)),
        )
        return own + equal + pack_index(SlotIndex(tensors=entries, values=b"")), len(own + equal)

    use_small_chunks(monkeypatch, 32 * 1024)
    monkeypatch.setattr(agent_fleet, "payload", with_equal_tensor)
    for node in fleet.nodes:
        node.shim.capacity_bytes = 2 * LEAST_BYTES
    uploaded = await all_stored(fleet)
    (equal,) = {each.key for shard in uploaded for each in shard.replicated}
    for node in fleet.nodes:
        await node.shim.stop_all()
    await fleet.prepare()
    plan = fleet.make_plan()
    ranks = [structs.replace(plan.ranks[each.rank], sources=(source_of(each),)) for each in uploaded]
    plan = structs.replace(plan, base_step=uploaded[0].step, ranks=tuple(ranks))
    for node in fleet.nodes:
        for rank in range(len(uploaded)):
            forget(node, Rank(rank))
    read = Counter[int]()
    read_range = MemoryObjectStore.read_range

    def counted(
        objects: MemoryObjectStore,
        reference: ObjectReference,
        begin: int,
        target: memoryview,
        spans: Sequence[Span],
        **named: Any,
    ) -> None:
        if reference.key == equal:
            read.update(range(begin, begin + sum(stop - start for start, stop in spans)))
        read_range(objects, reference, begin, target, spans, **named)

    monkeypatch.setattr(MemoryObjectStore, "read_range", counted)
    await fleet.load(plan)
    await fleet.start()
    for rank in fleet.ranks:
        assert rank.restored == with_equal_tensor(rank.rank, plan.base_step)[0]
    assert set(read.values()) == {1}
    assert len(read) == LEAST_BYTES


@pytest.mark.parametrize("is_home_broken", [False, True])
async def test_every_earlier_shard_is_read_once_after_a_change_of_the_number_of_ranks(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, is_home_broken: bool
) -> None:
    monkeypatch.setattr(agent_fleet, "payload", payload)
    uploaded = await all_stored(fleet)
    lost = fleet.nodes[-1]
    fleet.nodes = fleet.nodes[:-1]
    await lost.gone()
    for node in fleet.nodes:
        await node.shim.stop_all()
    await fleet.prepare()
    plan = fleet.make_chosen_plan({Generation(1): len(uploaded)})
    sources = tuple((source_of(shard),) for shard in uploaded)
    relayout = Relayout(world_size=len(uploaded), shards=sources)
    nodes = tuple(structs.replace(node, keep=()) for node in plan.nodes)
    plan = structs.replace(plan, relayout=relayout, base_step=uploaded[0].step, nodes=nodes)
    opened = Counter[str]()
    open_object = MemoryObjectStore.open

    def counted(objects: MemoryObjectStore, reference: ObjectReference, **named: Any) -> Any:
        opened[reference.key] += 1
        return open_object(objects, reference, **named)

    monkeypatch.setattr(MemoryObjectStore, "open", counted)
    if is_home_broken:
        asked = []

        async def fail(_: EarlierShards, rank: Rank) -> None:
            asked.append(rank)
            raise PeerLost("the home is lost")

        monkeypatch.setattr(EarlierShards, "supply", fail)
    await fleet.load(plan)
    await fleet.start()
    for rank in fleet.ranks:
        assert rank.earlier == {each: payload(each, plan.base_step)[0] for each in range(len(uploaded))}
    counts = [opened[shard.object.key] for shard in uploaded]
    assert counts == [1] * len(uploaded) or is_home_broken
