"""A frozen tensor is stored once per run for all ranks and steps. If it changes, the change is never lost.

`test_replicated.py` tests tensors that several ranks share at one step.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from safetensors.numpy import load

from everstep.protocol.agent_messages import UploadedShard
from everstep.protocol.ids import Step
from everstep.protocol.plan import ObjectReference, ShardSource
from everstep.protocol.slot import SlotState
from tests.fakes.storage import MemoryObjectStore
from tests.unit.worker.storage.frozen_nodes import BASES, GROUP_BYTES, LEAST_BYTES, Node
from tests.unit.worker.storage.slots import JOB, RUN
from worker.core.slots import Content
from worker.errors import CorruptCheckpoint, ObjectMissing, StoreDenied, StoreUnavailable
from worker.shm.held_files import HeldFiles
from worker.shm.slot_file import SlotFile
from worker.shm.store import SlotStore
from worker.storage import checkpoints
from worker.storage.downloads import download_shard
from worker.storage.object_store import OnStored, Piece, StoredObject
from worker.storage.shard_object import tensors_of
from worker.storage.shared_tensors import Offer, SharedTensors

FOLDER = f"jobs/job/checkpoints/run={RUN}/"
FROZEN_FOLDER = f"{FOLDER}frozen/"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "full_jitter", lambda *_: 0.0)
    monkeypatch.setattr("worker.storage.downloads.full_jitter", lambda *_: 0.0)


class Recorder(MemoryObjectStore):
    """A store that records the key of each sent object. It fails before or inside a put if the test demands it."""

    def __init__(self) -> None:
        super().__init__("bucket")
        self.sent: list[str] = []
        self.error: Exception | None = None
        self.error_at = 0
        """Number of the put that raises `error` after its first piece, counted from 0."""
        self.is_listing_denied = False

    def put_stream(
        self, reference: ObjectReference, pieces: Iterable[Piece], size: int, *, on_stored: OnStored = lambda _: None
    ) -> StoredObject:
        self.sent.append(reference.key)
        if self.error is not None and len(self.sent) - 1 == self.error_at:
            next(iter(pieces))
            raise self.error
        return super().put_stream(reference, pieces, size, on_stored=on_stored)

    def head(self, reference: ObjectReference) -> StoredObject | None:
        found = super().head(reference)
        if found is None and self.is_listing_denied:
            raise StoreDenied("403")
        return found

    @property
    def frozen(self) -> dict[str, bytes]:
        """Return the frozen objects in the store, by name."""
        return {
            key.removeprefix(FROZEN_FOLDER): data
            for key, data in self.objects["bucket"].items()
            if key.startswith(FROZEN_FOLDER)
        }

    def sent_frozen(self) -> list[str]:
        """Return the names of the frozen objects that were sent since the last call."""
        sent, self.sent = self.sent, []
        return [key.removeprefix(FROZEN_FOLDER) for key in sent if key.startswith(FROZEN_FOLDER)]


async def restored(objects: Recorder, uploaded: UploadedShard, folder: Path) -> bytes:
    """Return the payload that another node restores."""
    store = SlotStore(HeldFiles(), memory_bytes=1 << 20)
    store.open_run(JOB, RUN)
    content = Content(uploaded.origin_generation, uploaded.step)
    source = ShardSource(
        kind="s3",
        origin_generation=uploaded.origin_generation,
        step=uploaded.step,
        digest=uploaded.payload_digest,
        payload_bytes=uploaded.payload_bytes,
        object=uploaded.object,
    )
    try:
        await download_shard(objects, source, store, rank=uploaded.rank, content=content, keep=(), slot_count=1)
        slot = store.sealed(uploaded.rank, content)
        assert slot is not None
        with slot.file.payload() as view:
            return bytes(view)
    finally:
        for slot in store.shards.get(uploaded.rank, ()):
            assert slot.file.header.state in (SlotState.SEALED, SlotState.EMPTY)
        store.close()


async def test_the_second_checkpoint_sends_no_frozen_tensor_and_restores_the_same_slot(tmp_path: Path) -> None:
    objects, node = Recorder(), Node.of(tmp_path / "node")
    first = await node.upload(objects, 1)
    assert len(objects.sent_frozen()) == 2
    slot, payload = await node.seal(2, BASES)
    second = await node.send(objects, slot, payload)
    assert objects.sent_frozen() == []
    assert first.frozen == second.frozen
    assert second.object_bytes == len(objects.get_bytes(second.object))
    assert all(data not in objects.get_bytes(second.object) for data in BASES.values())
    assert await restored(objects, second, tmp_path / "other") == payload
    node.store.close()


async def test_a_frozen_object_has_its_digest_as_name_and_is_a_safetensors_file(tmp_path: Path) -> None:
    objects, node = Recorder(), Node.of(tmp_path / "node")
    uploaded = await node.upload(objects, 1)
    assert {f"{hashlib.sha256(data).hexdigest()}.safetensors" for data in objects.frozen.values()} == {*objects.frozen}
    assert {each.key.removeprefix(FROZEN_FOLDER): each.object_bytes for each in uploaded.frozen} == {
        name: len(data) for name, data in objects.frozen.items()
    }
    found = {name: tensor.tobytes() for data in objects.frozen.values() for name, tensor in load(data).items()}
    assert found == BASES
    own = {name: tensor.tobytes() for name, tensor in load(objects.get_bytes(uploaded.object)).items()}
    assert own == {"lora": bytes([0, 1]) * 50, "head": b"abc"}, "the small rest is not worth an object"
    node.store.close()


async def test_ranks_with_equal_frozen_tensors_send_each_object_once_and_share_the_work(tmp_path: Path) -> None:
    """Two ranks with the same frozen objects begin with different ones, so that each sends only some of them.

    The test stops rank 0 after its first object. Rank 1 then sends the other object only.
    """
    objects, nodes = Recorder(), [Node.of(tmp_path / str(rank), rank) for rank in range(2)]
    slots = [await node.seal(1, BASES) for node in nodes]
    # stop rank 0 before its second object, which rank 1 would have sent by then if both ran at the same time
    objects.error, objects.error_at = StoreDenied("stop"), 1
    with pytest.raises(StoreDenied):
        await nodes[0].send(objects, *slots[0])
    (first, _) = objects.sent_frozen()
    objects.error = None
    uploaded = [await nodes[1].send(objects, *slots[1])]
    (second,) = objects.sent_frozen()
    assert first != second, "rank 1 begins with another object than rank 0"
    uploaded.append(await nodes[0].send(objects, *slots[0]))
    assert objects.sent_frozen() == []
    assert uploaded[0].frozen == uploaded[1].frozen
    for node in nodes:
        node.store.close()


async def test_a_difference_between_ranks_is_kept(tmp_path: Path) -> None:
    objects = Recorder()
    for rank in range(2):
        node = Node.of(tmp_path / f"node{rank}", rank)
        slot, payload = await node.seal(1, BASES | {"base3": bytes([77 + rank]) * 320})
        uploaded = await node.send(objects, slot, payload)
        assert await restored(objects, uploaded, tmp_path / f"other{rank}") == payload
        node.store.close()
    assert len(objects.frozen) == 3, "the first group is equal, the second one is not"


async def test_tensors_that_change_in_spite_of_their_declaration_go_into_the_shard(tmp_path: Path) -> None:
    """A tensor that was declared frozen but changes at each step is uploaded in the shard.

    Averaged weights, which need no gradient, are an example. If the tensor is the same in two consecutive uploads, it
    is uploaded as frozen again.
    """
    objects, node = Recorder(), Node.of(tmp_path / "node")
    await node.upload(objects, 1)
    objects.sent_frozen()
    for step in (2, 3, 4):
        changed = BASES | {"base0": bytes([step + 40]) * 320}
        slot, payload = await node.seal(step, changed)
        uploaded = await node.send(objects, slot, payload)
        assert objects.sent_frozen() == []
        assert len(uploaded.frozen) == 1
        assert load(objects.get_bytes(uploaded.object))["base0"].tobytes() == changed["base0"]
        assert await restored(objects, uploaded, tmp_path / f"other{step}") == payload
    await node.upload(objects, 5, changed)
    assert len(objects.sent_frozen()) == 1, "the tensors have rested for one upload, so they are frozen now"
    node.store.close()


async def test_a_changed_tensor_stays_in_the_shard_when_its_upload_is_tried_again(tmp_path: Path) -> None:
    objects, node = Recorder(), Node.of(tmp_path / "node")
    await node.upload(objects, 1)
    objects.sent_frozen()
    objects.error = StoreUnavailable("503")
    uploaded = await node.upload(objects, 2, BASES | {"base0": bytes([9]) * 320})
    assert len(objects.sent) == 2, "the second attempt succeeds"
    assert objects.sent_frozen() == []
    assert len(uploaded.frozen) == 1
    node.store.close()


@pytest.mark.parametrize("killed_at", [0, 1, 2])
async def test_an_upload_that_is_killed_at_any_object_leaves_nothing_that_harms_the_next_one(
    tmp_path: Path, killed_at: int
) -> None:
    """The agent dies while it sends the first or the second frozen object, or the shard's own object.

    The next agent sends only the frozen objects that are still missing, and the upload can be restored.
    """
    objects, node = Recorder(), Node.of(tmp_path / "node")
    objects.error, objects.error_at = StoreDenied("killed"), killed_at
    slot, payload = await node.seal(1, BASES)
    with pytest.raises(StoreDenied):
        await node.send(objects, slot, payload)
    assert len(objects.frozen) == killed_at
    objects.error = None
    objects.sent_frozen()
    # a restarted agent has no digests of earlier uploads
    node.frozen = SharedTensors(group_bytes=GROUP_BYTES, least_bytes=LEAST_BYTES)
    uploaded = await node.send(objects, slot, payload)
    assert len(objects.sent_frozen()) == 2 - killed_at
    assert await restored(objects, uploaded, tmp_path / "other") == payload
    node.store.close()


async def test_a_frozen_object_with_other_bytes_of_its_size_is_sent_again(tmp_path: Path) -> None:
    """Other bytes of the same size under an object's key have another checksum, so the next upload replaces them."""
    objects, node = Recorder(), Node.of(tmp_path / "node")
    await node.upload(objects, 1)
    first, *others = objects.sent_frozen()
    stored, right = objects.objects["bucket"], objects.frozen
    stored[f"{FROZEN_FOLDER}{first}"] = bytes(len(right[first]))
    await node.upload(objects, 2)
    assert objects.sent_frozen() == [first]
    assert objects.frozen == right
    assert others
    node.store.close()


class Slow(Recorder):
    """A store that pauses after the first piece of a put until the test continues it."""

    def __init__(self) -> None:
        super().__init__()
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


async def test_a_cancelled_upload_of_a_frozen_object_no_longer_reads_the_slot(tmp_path: Path) -> None:
    objects, node = Slow(), Node.of(tmp_path / "node")
    slot, payload = await node.seal(1, BASES)
    task = asyncio.create_task(node.send(objects, slot, payload))
    await asyncio.to_thread(objects.begun.wait)
    task.cancel()
    asyncio.get_running_loop().call_soon(objects.go.set)  # the loop runs the cancelled task before this call
    with pytest.raises(asyncio.CancelledError):
        await task
    assert objects.objects["bucket"] == {}
    node.store.close()


async def test_a_slot_that_changes_during_the_upload_gives_no_frozen_object(tmp_path: Path) -> None:
    objects, node = Slow(), Node.of(tmp_path / "node")
    slot, payload = await node.seal(1, BASES)
    task = asyncio.create_task(node.send(objects, slot, payload))
    await asyncio.to_thread(objects.begun.wait)
    with slot.payload(128, 129) as view:  # a byte of base0, which is sent after the pause
        view[0] ^= 1
    objects.go.set()
    with pytest.raises(CorruptCheckpoint):
        await task
    assert objects.objects["bucket"] == {}
    node.store.close()


async def test_a_damaged_slot_is_never_named_by_a_shard(tmp_path: Path) -> None:
    """If a slot is damaged before its upload, the upload fails and stores no shard.

    It may have stored frozen objects. Their names contain the digest of the damaged content, so no shard ever names
    them.
    """
    objects, node = Recorder(), Node.of(tmp_path / "node")
    slot, payload = await node.seal(1, BASES)
    with slot.payload(128, 129) as view:
        view[0] ^= 1
    with pytest.raises(CorruptCheckpoint):
        await node.send(objects, slot, payload)
    assert {*objects.objects["bucket"]} == {f"{FROZEN_FOLDER}{name}" for name in objects.frozen}
    node.store.close()


async def test_a_frozen_object_that_was_deleted_is_stored_again(tmp_path: Path) -> None:
    objects, node = Recorder(), Node.of(tmp_path / "node")
    first = await node.upload(objects, 1)
    objects.sent_frozen()
    del objects.objects["bucket"][first.frozen[0].key]
    with pytest.raises(ObjectMissing):
        await restored(objects, first, tmp_path / "other")
    await node.upload(objects, 2)
    assert objects.sent_frozen() == [first.frozen[0].key.removeprefix(FROZEN_FOLDER)]
    node.store.close()


async def test_a_role_that_may_not_list_the_bucket_can_upload(tmp_path: Path) -> None:
    """A role that may not list the bucket can upload, although S3 answers 403, not 404, for a missing object."""
    objects, node = Recorder(), Node.of(tmp_path / "node")
    objects.is_listing_denied = True
    await node.upload(objects, 1)
    assert len(objects.sent_frozen()) == 2
    node.store.close()


async def test_a_damaged_frozen_object_is_never_sealed(tmp_path: Path) -> None:
    """The test flips every seventh byte in turn, and also cuts the object there.

    The restore must either refuse the shard or seal the original payload.
    """
    objects, node = Recorder(), Node.of(tmp_path / "node")
    slot, payload = await node.seal(1, BASES)
    uploaded = await node.send(objects, slot, payload)
    node.store.close()
    place = ObjectReference(bucket="bucket", key=uploaded.frozen[1].key)
    whole, refused = objects.get_bytes(place), 0
    for position in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[position] ^= 0x10
        for damaged in (bytes(changed), whole[:position]):
            objects.put_bytes(place, damaged)
            try:
                assert await restored(objects, uploaded, tmp_path / "other") == payload
            except CorruptCheckpoint:
                refused += 1
    assert refused >= len(range(0, len(whole), 7)) + GROUP_BYTES // 7


async def test_a_shard_under_a_foreign_key_is_refused(tmp_path: Path) -> None:
    objects, node = Recorder(), Node.of(tmp_path / "node")
    uploaded = await node.upload(objects, 1)
    node.store.close()
    elsewhere = ObjectReference(bucket="bucket", key="elsewhere")
    objects.put_bytes(elsewhere, objects.get_bytes(uploaded.object))
    with pytest.raises(CorruptCheckpoint, match="elsewhere is not the key of a shard"):
        await restored(objects, msgspec.structs.replace(uploaded, object=elsewhere), tmp_path / "other")


async def test_a_later_upload_of_the_shard_does_not_change_the_offer_of_an_earlier_one(tmp_path: Path) -> None:
    """A later upload of a shard does not change the list of tensors (offer) of an earlier upload.

    The coordinator's agent receives this list to choose which rank writes a tensor. In the test, the earlier upload is
    retried after the later one has begun.
    """
    nodes = [Node.of(tmp_path / name) for name in ("first", "second")]
    earlier, _ = await nodes[0].seal(1, BASES)
    later, _ = await nodes[1].seal(2, BASES | {"base0": bytes([9]) * 320})
    shared = nodes[0].frozen

    def look(slot: SlotFile) -> Offer:
        return shared.look(slot, tensors_of(slot), lambda: None)

    first = look(earlier)
    assert [item.is_frozen for item in look(later).items] != [item.is_frozen for item in first.items]
    assert look(earlier) == first
    for step in range(3, 13):
        look((await nodes[1].seal(step, BASES | {"base0": bytes([step]) * 320}))[0])
    assert look(earlier) == first, "however many steps are uploaded meanwhile"
    shared.forget(Step(1))
    assert look(earlier) != first
    for node in nodes:
        node.store.close()
