"""A tensor that is equal on several ranks at one step is uploaded once. Each rank still restores its own state."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from safetensors.numpy import load

from everstep.bulk import crc64
from everstep.protocol.agent_messages import UploadedShard
from everstep.protocol.ids import Rank
from everstep.protocol.plan import ObjectReference
from everstep.protocol.safetensors import SharedGroup
from everstep.protocol.slot import payload_chunk_digests
from tests.unit.worker.rank_plans import rank_plan
from tests.unit.worker.storage.frozen_nodes import BASES, GROUP_BYTES, LEAST_BYTES, Node
from tests.unit.worker.storage.slots import RUN
from tests.unit.worker.storage.test_shared_tensors import Recorder, restored
from worker.core.upload_division import Division, Item, divide
from worker.errors import CorruptCheckpoint, StoreDenied, StoreUnavailable
from worker.shm.slot_file import SlotFile
from worker.storage import checkpoints
from worker.storage.checkpoints import upload_shard
from worker.storage.object_store import StoredObject
from worker.storage.shard_object import tensors_of
from worker.storage.shared_tensors import Offer, Planned, SharedTensors, missing

FOLDER = f"jobs/job/checkpoints/run={RUN}/gen=4/step=1/replicated/"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "full_jitter", lambda *_: 0.0)
    monkeypatch.setattr("worker.storage.downloads.full_jitter", lambda *_: 0.0)


@dataclass
class Ranks:
    """Two nodes with one rank each, which divide equal tensors."""

    nodes: list[Node]
    slots: list[tuple[SlotFile, bytes]]
    objects: Recorder = field(default_factory=Recorder)
    offers: dict[Rank, Sequence[Item]] = field(default_factory=dict[Rank, Sequence[Item]])
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    pauses: int = 0
    paused: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a rank waits for the object of another rank."""

    @classmethod
    async def of(cls, folder: Path, *tensors: dict[str, bytes]) -> Ranks:
        """Seal step 1 of each rank with these tensors, which are not declared frozen."""
        nodes = [Node.of(folder / f"node{rank}", rank) for rank in range(len(tensors))]
        slots = [await node.seal(1, each, is_frozen=False) for node, each in zip(nodes, tensors, strict=True)]
        return cls(nodes, slots)

    def look(self, rank: int, shared: SharedTensors | None = None) -> Offer:
        """Return the offer of a rank: its list of tensors that other ranks may also hold."""
        slot, _ = self.slots[rank]
        return (shared or self.nodes[rank].frozen).look(slot, tensors_of(slot), lambda: None)

    async def agree(self, rank: int, items: Sequence[Item]) -> Division:
        self.offers[Rank(rank)] = items
        if len(self.offers) == len(self.nodes):
            self.complete.set()
        await self.complete.wait()
        return divide(self.offers, least_bytes=1)[Rank(rank)]

    async def send(self, rank: int) -> UploadedShard:
        async def pause(_: float) -> None:
            self.pauses += 1
            self.paused.set()
            await asyncio.sleep(0)

        return await self.nodes[rank].send(
            self.objects, *self.slots[rank], lambda items: self.agree(rank, items), pause
        )

    async def send_all(self) -> list[UploadedShard]:
        return [*await asyncio.gather(*(self.send(rank) for rank in range(len(self.nodes))))]

    async def check(self, folder: Path, uploaded: Sequence[UploadedShard]) -> None:
        """Check that each rank restores its own payload."""
        for each in uploaded:
            payload = self.slots[each.rank][1]
            assert await restored(self.objects, each, folder / f"restored{each.rank}") == payload

    def close(self) -> None:
        for node in self.nodes:
            node.store.close()

    def sent(self) -> list[str]:
        """Return the names of the objects for equal tensors that were uploaded since the last call."""
        sent, self.objects.sent = self.objects.sent, []
        return [key.removeprefix(FOLDER) for key in sent if key.startswith(FOLDER)]


async def test_equal_tensors_are_sent_once_and_each_rank_sends_half(tmp_path: Path) -> None:
    ranks = await Ranks.of(tmp_path, BASES, BASES)
    uploaded = await ranks.send_all()
    names = ranks.sent()
    assert len(names) == len(set(names)) == 2
    assert uploaded[0].replicated == uploaded[1].replicated
    stored = [load(ranks.objects.get_bytes(ObjectReference(bucket="bucket", key=f"{FOLDER}{name}"))) for name in names]
    assert sorted(name for tensors in stored for name in tensors) == ["base0", "base1", "base2", "base3", "head"]
    assert [sum(tensor.nbytes for tensor in tensors.values()) for tensors in stored] in ([643, 640], [640, 643])
    own = [load(ranks.objects.get_bytes(each.object)) for each in uploaded]
    assert [sorted(tensors) for tensors in own] == [["lora"], ["lora"]], "this tensor differs between the ranks"
    await ranks.check(tmp_path, uploaded)
    ranks.close()


async def test_a_tensor_that_differs_in_one_byte_is_sent_by_both_ranks(tmp_path: Path) -> None:
    ranks = await Ranks.of(tmp_path, BASES, BASES | {"base2": bytes([2]) * 319 + b"x"})
    uploaded = await ranks.send_all()
    for each in uploaded:
        assert "base2" in load(ranks.objects.get_bytes(each.object))
        assert "base1" not in load(ranks.objects.get_bytes(each.object))
    await ranks.check(tmp_path, uploaded)
    ranks.close()


async def test_ranks_that_cannot_agree_send_all_of_their_tensors(tmp_path: Path) -> None:
    ranks = await Ranks.of(tmp_path, BASES)

    async def fail(items: Sequence[Item]) -> Division | None:
        return None

    uploaded = await ranks.nodes[0].send(ranks.objects, *ranks.slots[0], fail)
    assert (uploaded.replicated, ranks.sent()) == ((), [])
    await ranks.check(tmp_path, [uploaded])
    ranks.close()


async def test_a_rank_is_uploaded_only_when_the_objects_of_the_other_rank_are_there(tmp_path: Path) -> None:
    ranks = await Ranks.of(tmp_path, BASES, BASES)
    # rank 1 has sent its offer, and waits for longer than rank 0 needs
    held = asyncio.create_task(ranks.agree(1, ranks.look(1).items))
    first = asyncio.create_task(ranks.send(0))
    await ranks.paused.wait()
    assert not first.done()
    await held
    await ranks.send(1)
    await first
    assert len(ranks.sent()) == 2
    ranks.close()


def test_a_rank_that_waits_for_many_objects_sends_one_request_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = Recorder()
    places = [ObjectReference(bucket="bucket", key=f"{FOLDER}{number}.safetensors") for number in range(5)]
    planned = [
        Planned(
            SharedGroup(sha256=f"{number}", object_bytes=3, data_begin=1, tensors=(0,)),
            place,
            is_frozen=False,
            is_own=False,
            crc=crc64(b"abc"),
        )
        for number, place in enumerate(places)
    ]
    asked: list[ObjectReference] = []
    head = objects.head

    def noted(place: ObjectReference) -> StoredObject | None:
        asked.append(place)
        return head(place)

    monkeypatch.setattr(objects, "head", noted)
    assert missing(objects, planned) == planned
    for place in (places[0], places[1], places[3]):
        objects.put_bytes(place, b"abc")
    assert missing(objects, planned) == planned[2:]
    assert asked == [places[0], *places[:3]]


async def test_a_rank_that_waits_while_s3_fails_does_not_send_its_own_object_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = await Ranks.of(tmp_path, BASES, BASES)
    held = asyncio.create_task(ranks.agree(1, ranks.look(1).items))
    first = asyncio.create_task(ranks.send(0))
    await ranks.paused.wait()
    head, failed = ranks.objects.head, asyncio.Event()
    loop = asyncio.get_running_loop()

    def fail(_: ObjectReference) -> None:
        loop.call_soon_threadsafe(failed.set)
        raise StoreUnavailable("503")

    monkeypatch.setattr(ranks.objects, "head", fail)
    await failed.wait()
    monkeypatch.setattr(ranks.objects, "head", head)
    await held
    await ranks.send(1)
    await first
    own = [key for key in ranks.objects.sent if key.endswith("rank=0.safetensors")]
    assert len(own) == 1
    ranks.close()


async def test_a_rank_sends_the_objects_of_a_rank_that_stays_away(tmp_path: Path) -> None:
    """Rank 1 offers its tensors, then its agent dies. Rank 0 waits for a limited time, then writes all objects."""
    ranks = await Ranks.of(tmp_path, BASES, BASES)
    held = asyncio.create_task(ranks.agree(1, ranks.look(1).items))
    uploaded = await ranks.send(0)
    await held
    assert ranks.pauses == 1 + checkpoints.LEAST_PATIENCE_SECONDS / checkpoints.OBJECT_POLL_SECONDS
    assert len(ranks.sent()) == 2
    await ranks.check(tmp_path, [uploaded])
    ranks.close()


@pytest.mark.parametrize("killed_at", [0, 1])
async def test_a_writer_that_is_killed_at_any_object_leaves_no_shard_that_names_a_missing_object(
    tmp_path: Path, killed_at: int
) -> None:
    """Rank 1 fails before it uploads its object for equal tensors, or before its shard's own object.

    The shard of rank 0 never names an object that is missing in S3.
    """
    ranks = await Ranks.of(tmp_path, BASES, BASES)
    held = asyncio.create_task(ranks.agree(0, ranks.look(0).items))
    ranks.objects.error, ranks.objects.error_at = StoreDenied("killed"), killed_at
    with pytest.raises(StoreDenied):
        await ranks.send(1)
    await held
    ranks.objects.error = None
    uploaded = await ranks.send(0)
    keys = {*ranks.objects.objects["bucket"]}
    assert {each.key for each in uploaded.replicated} <= keys
    await ranks.check(tmp_path, [uploaded])
    ranks.close()


async def test_a_second_attempt_sends_no_object_again(tmp_path: Path) -> None:
    ranks = await Ranks.of(tmp_path, BASES, BASES)
    await ranks.send_all()
    ranks.sent()
    ranks.nodes[0].frozen = SharedTensors(group_bytes=GROUP_BYTES, least_bytes=LEAST_BYTES)
    await ranks.send(0)
    assert ranks.sent() == []
    ranks.close()


async def test_a_rank_with_few_bytes_of_tensors_offers_none_of_them(tmp_path: Path) -> None:
    ranks = await Ranks.of(tmp_path, {"base0": bytes(320)})
    shared = SharedTensors(least_bytes=10_000)
    assert ranks.look(0, shared).items == ()
    ranks.close()


async def test_a_rank_with_many_tensors_offers_the_largest_ones(tmp_path: Path) -> None:
    ranks = await Ranks.of(tmp_path, {"base0": bytes(320)})
    offer = ranks.look(0, SharedTensors(least_bytes=1, max_offered=2))
    assert [item.bytes for item in offer.items] == [100, 320]
    assert ranks.look(0, SharedTensors(least_bytes=1, max_offered=0)).items == ()
    ranks.close()


async def test_a_damaged_replicated_object_is_never_sealed(tmp_path: Path) -> None:
    """The test flips every seventh byte in turn. It also cuts the object at each of these bytes.

    The restore must either refuse the shard or seal the original payload.
    """
    ranks = await Ranks.of(tmp_path, BASES, BASES)
    uploaded = (await ranks.send_all())[0]
    ranks.close()
    place = ObjectReference(bucket="bucket", key=uploaded.replicated[0].key)
    whole, refused = ranks.objects.get_bytes(place), 0
    for position in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[position] ^= 0x10
        for damaged in (bytes(changed), whole[:position]):
            ranks.objects.put_bytes(place, damaged)
            try:
                await ranks.check(tmp_path, [uploaded])
            except CorruptCheckpoint:
                refused += 1
    assert refused >= len(range(0, len(whole), 7)) + 640 // 7


async def test_an_upload_notes_each_digested_tensor_before_it_sends_its_object(tmp_path: Path) -> None:
    """An upload reports each tensor's digest as progress before it sends the tensor's object.

    The digests of large tensors take minutes, and an upload without progress counts as stalled.
    """
    ranks = await Ranks.of(tmp_path, BASES, BASES)
    node, (slot, payload), digested = ranks.nodes[0], ranks.slots[0], []
    held = asyncio.create_task(ranks.agree(1, ranks.look(1).items))

    async def agree(items: Sequence[Item]) -> Division:
        digested.append("offered")
        return await ranks.agree(0, items)

    await upload_shard(
        ranks.objects,
        slot,
        payload_chunk_digests(payload),
        rank_plan(generation=4, addresses=("127.0.0.1", "127.0.0.2")),
        rank=node.rank,
        shared=node.frozen,
        agree=agree,
        on_begun=lambda *_: digested.append("begun"),
        on_digested=lambda: digested.append("digested"),
        pause=lambda _: asyncio.sleep(0),
    )
    await held
    offered, begun = digested.index("offered"), digested.index("begun")
    assert digested[:offered].count("digested") == 6, "all tensors of the rank"
    assert digested[offered:begun].count("digested") == 5, "the tensors that both ranks hold"
    ranks.close()
