"""The owner of a shard and the holders of its replicas upload the parts of one object together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from everstep.bulk import Part, StoredPart, put_parts
from everstep.protocol.codec import Message
from everstep.protocol.errors import MalformedMessage
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.peer_messages import Open, PartStored, ShardRefused, UploadPart
from everstep.protocol.plan import ObjectReference
from everstep.protocol.rounds import Announcement
from everstep.protocol.slot import SlotState, payload_chunk_digests
from tests.fakes.clocks import FastClock
from tests.fakes.storage import MemoryObjectStore
from tests.unit.worker.rank_plans import rank_plan
from tests.unit.worker.storage.slots import JOB, RUN, header_of, payload_of
from worker.core.slots import Content
from worker.errors import PeerLost, StoreUnavailable
from worker.member.shared_uploads import MAX_HELPED_PARTS, HelpedUpload, UploadHelper
from worker.replication.transport import Session
from worker.shm.held_files import HeldFiles
from worker.shm.store import Slot, SlotStore, in_thread
from worker.storage.checkpoints import upload_shard
from worker.storage.object_store import StoredObject
from worker.storage.shard_object import ShardObject

RANK = Rank(0)
PAYLOAD, OFFSET, SIZE = payload_of([("weight", "uint8", (4000,), bytes(range(250)) * 16)])
CHUNKS = payload_chunk_digests(PAYLOAD)
PART_BYTES = 100
UPLOAD = "upload-0"
FOLDER = f"jobs/job/checkpoints/run={RUN}/gen=1/step=7"


class ScriptedSession:
    """A fake session in which the test is the owner: it puts requests into `requests` and reads the answers."""

    def __init__(self) -> None:
        self.peer = NodeId("i-owner")
        self.opened = Open(
            run=RUN, generation=Generation(1), kind="upload", node_id=self.peer, owner_rank=RANK, nonce=b""
        )
        self.addresses: tuple[tuple[str, int], ...] = ()
        self.requests = asyncio.Queue[Message | None]()
        """Messages of the owner, in order; None when the owner closes the connection."""
        self.answers = asyncio.Queue[Message]()
        self.closed = asyncio.Event()

    async def send(self, *messages: Message) -> None:
        for message in messages:
            self.answers.put_nowait(message)

    async def receive(self) -> Message:
        message = await self.requests.get()
        if message is None:
            raise PeerLost("the owner closed the connection")
        return message

    def close(self) -> None:
        self.closed.set()


class BlockedStore(MemoryObjectStore):
    """An object store in which every part of a helper waits until the test sets `go`."""

    def __init__(self) -> None:
        super().__init__("bucket")
        self.parts[UPLOAD] = {}
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        """Released once for each part that has begun to wait."""
        self.places: list[ObjectReference] = []

    def put_part(self, reference: ObjectReference, *given: Any, **named: Any) -> StoredPart:
        self.places.append(reference)
        self.begun.release()
        assert self.go.wait(30.0)
        return super().put_part(reference, *given, **named)


class Holder:
    """A node that holds the sealed replica of one shard, and helps its owner."""

    def __init__(self, store: SlotStore, slot: Slot, objects: BlockedStore) -> None:
        self.store = store
        self.slot = slot
        self.objects = objects
        self.helper = UploadHelper(rank_plan(), store, objects, held_ranks=[RANK])
        self._object_bytes = ShardObject(slot.file, CHUNKS, piece_bytes=PART_BYTES).bytes

    def request(self, number: int = 1, **changes: Any) -> UploadPart:
        """Return a request of the owner; `changes` replaces fields."""
        header = self.slot.file.header
        fields: dict[str, Any] = {
            "owner_rank": RANK,
            "origin_generation": header.origin_generation,
            "step": header.step,
            "digest": header.payload_digest,
            "object": ObjectReference(bucket="bucket", key=f"{FOLDER}/ab12/rank=0.safetensors"),
            "object_bytes": self._object_bytes,
            "upload_id": UPLOAD,
            "part_bytes": PART_BYTES,
            "number": number,
        }
        return UploadPart(**fields | changes)

    async def until_begun(self, count: int = 1) -> None:
        """Wait until the store has received `count` parts since the last call."""
        for _ in range(count):
            assert await asyncio.get_running_loop().run_in_executor(None, self.objects.begun.acquire, True, 30.0)


@pytest.fixture
async def holder(tmp_path: Path) -> AsyncIterator[Holder]:
    store, content = SlotStore(HeldFiles(), memory_bytes=1 << 20), Content(Generation(1), Step(7))
    store.open_run(JOB, RUN)
    index = await store.grant(
        RANK, content, keep=(), capacity_bytes=len(PAYLOAD), layout_hash=bytes(range(16)), slot_count=2
    )
    assert index is not None
    slot = store.shards[RANK][index]
    with slot.file.payload(0, len(PAYLOAD)) as view:
        view[:] = PAYLOAD
    header = header_of(PAYLOAD, OFFSET, SIZE, step=content.step, origin=content.origin)
    await store.seal(RANK, index, replace(header, state=SlotState.WRITING))
    objects = BlockedStore()
    yield Holder(store, slot, objects)
    objects.go.set()
    store.close()


async def test_a_slot_is_free_after_a_session_that_ended_twice(holder: Holder) -> None:
    """The owner closes a session while a thread sends a part. Then the holder's generation also ends the session.

    After that, the slot is free.
    """
    session = ScriptedSession()
    serving = asyncio.create_task(holder.helper.serve(session))
    session.requests.put_nowait(holder.request())
    await holder.until_begun()
    session.requests.put_nowait(None)
    await session.closed.wait()
    assert holder.slot.pins == 1, "the thread still reads the slot"
    serving.cancel()
    await asyncio.sleep(0)
    holder.objects.go.set()
    await asyncio.gather(serving, return_exceptions=True)
    assert holder.slot.pins == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"object": ObjectReference(bucket="other", key=f"{FOLDER}/ab12/rank=0.safetensors")},
        {"object": ObjectReference(bucket="bucket", key="jobs/victim/model")},
        {"object": ObjectReference(bucket="bucket", key=f"{FOLDER}/cd34/rank=0.safetensors")},
        {"upload_id": "upload-1"},
        {"part_bytes": PART_BYTES + 1},
        {"digest": bytes(16)},
    ],
)
async def test_a_request_for_another_upload_ends_the_session(holder: Holder, changes: dict[str, Any]) -> None:
    holder.objects.go.set()
    session = ScriptedSession()
    session.requests.put_nowait(holder.request(2))
    session.requests.put_nowait(holder.request(3, **changes))
    with pytest.raises(MalformedMessage):
        await holder.helper.serve(session)
    assert {place.key for place in holder.objects.places} <= {holder.request().object.key}
    assert (session.closed.is_set(), holder.slot.pins) == (True, 0)


@pytest.mark.parametrize(
    "place",
    [
        ObjectReference(bucket="other", key=f"{FOLDER}/ab12/rank=0.safetensors"),
        ObjectReference(bucket="bucket", key=f"jobs/job/checkpoints/run={RUN}/gen=2/step=7/ab12/rank=0.safetensors"),
        ObjectReference(bucket="bucket", key=f"{FOLDER}/ab12/rank=1.safetensors"),
        ObjectReference(bucket="bucket", key=f"{FOLDER}/manifest.json"),
    ],
)
async def test_a_holder_writes_only_to_the_key_of_the_owners_shard(holder: Holder, place: ObjectReference) -> None:
    holder.objects.go.set()
    session = ScriptedSession()
    session.requests.put_nowait(holder.request(object=place))
    serving = asyncio.create_task(holder.helper.serve(session))
    assert isinstance(await session.answers.get(), ShardRefused)
    session.requests.put_nowait(None)
    with pytest.raises(PeerLost):
        await serving
    assert holder.objects.places == []


async def test_a_holder_stops_helping_for_the_final_step_only_before_the_committed_step(holder: Holder) -> None:
    session = ScriptedSession()
    serving = asyncio.create_task(holder.helper.serve(session))
    session.requests.put_nowait(holder.request())
    await holder.until_begun()
    announcement = partial(Announcement, generation=Generation(1), term=1, sequence=1)
    holder.helper.apply_announcement(announcement(committed=Step(7), proposed=Step(8), persist_step=Step(8)))
    assert not serving.cancelling(), "the holder keeps the slot of the committed step 7"
    holder.helper.apply_announcement(announcement(committed=Step(8), proposed=Step(9), persist_step=Step(9)))
    assert serving.cancelling()
    holder.objects.go.set()
    await asyncio.gather(serving, return_exceptions=True)
    assert holder.slot.pins == 0


async def test_helping_many_owners_leaves_threads_for_other_work(holder: Holder) -> None:
    """Forty pending requests leave threads for other work.

    Ten owners request four parts each, and S3 does not answer.
    """
    sessions = [ScriptedSession() for _ in range(10)]
    serving = [asyncio.create_task(holder.helper.serve(session)) for session in sessions]
    for session in sessions:
        for number in range(1, 5):
            session.requests.put_nowait(holder.request(number))
    await holder.until_begun(MAX_HELPED_PARTS)
    async with asyncio.timeout(10.0):
        await in_thread(lambda _: None)
    holder.objects.go.set()
    for session in sessions:
        answers = [await session.answers.get() for _ in range(4)]
        assert sorted(answer.number for answer in answers if isinstance(answer, PartStored)) == [1, 2, 3, 4]
        session.requests.put_nowait(None)
    await asyncio.gather(*serving, return_exceptions=True)
    assert holder.slot.pins == 0


async def silent_holder(_: NodeId) -> Session:
    """Dial a holder that never answers."""
    await asyncio.Event().wait()
    raise AssertionError


async def test_an_upload_whose_own_part_fails_does_not_wait_for_its_helpers(holder: Holder) -> None:
    """The owner's first of two parts fails, and its helper never answers. The upload fails without waiting for the
    helper.
    """
    is_waiting, polls = threading.Event(), []

    class FailingSink:
        def put(self, _number: int, _part: Part) -> StoredPart:
            assert is_waiting.wait(30.0)
            raise StoreUnavailable("S3 does not answer")

    def check() -> None:
        is_waiting.set()
        polls.append(1)
        if len(polls) > 50:
            raise AssertionError("the upload waits for ever")

    helpers = HelpedUpload(holder.slot.file.header, [NodeId("i-1")], silent_holder, on_stored=lambda _: None)
    share = helpers.of(holder.request().object, 2 * PART_BYTES, (), check)

    def upload(_: threading.Event) -> None:
        share.begin(UPLOAD, PART_BYTES, 2)
        try:
            put_parts(FailingSink(), [bytes(2 * PART_BYTES)], 2 * PART_BYTES, part_bytes=PART_BYTES, helpers=share)
        finally:
            share.end()

    with pytest.raises(StoreUnavailable):
        await in_thread(upload)
    assert len(polls) <= 50


class FailingStore(MemoryObjectStore):
    """An object store that cannot complete an upload with helpers."""

    def __init__(self, session: ScriptedSession) -> None:
        super().__init__("bucket", part_bytes=PART_BYTES)
        self.was_closed: list[bool] = []
        """For each upload without helpers: True if the session with the helper was closed before the upload began."""
        self._session = session

    def put_shared(self, *given: Any, **named: Any) -> StoredObject:
        super().put_shared(*given, **named)
        raise StoreUnavailable("S3 does not complete the upload")

    def put_stream(self, *given: Any, **named: Any) -> StoredObject:
        self.was_closed.append(self._session.closed.is_set())
        return super().put_stream(*given, **named)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_helpers_end_with_the_attempt_that_they_help(
    holder: Holder, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    """A helper never answers. The owner's first attempt fails for another reason, or the upload is cancelled.

    In both cases, the session with the helper ends before another attempt begins.
    """
    asked = threading.Event()

    class AskedSession(ScriptedSession):
        async def send(self, *messages: Message) -> None:
            await super().send(*messages)
            asked.set()

    def on_stored(_: int) -> None:
        assert asked.wait(30.0)

    session = AskedSession()

    async def dial(_: NodeId) -> Session:
        return session

    if not is_cancelled:
        monkeypatch.setattr("worker.member.shared_uploads.monotonic", clock := FastClock(1000))
        monkeypatch.setattr("worker.member.part_sharing.monotonic", clock)
    objects = FailingStore(session)
    helpers = HelpedUpload(holder.slot.file.header, [NodeId("i-1")], dial, on_stored=lambda _: None)
    upload = asyncio.create_task(
        upload_shard(
            objects,
            holder.slot.file,
            CHUNKS,
            rank_plan(),
            rank=RANK,
            on_stored=on_stored,
            share=helpers,
            draw=lambda: 0.0,
        )
    )
    assert isinstance(await session.answers.get(), UploadPart)
    if is_cancelled:
        upload.cancel()
    await asyncio.gather(upload, return_exceptions=True)
    assert (upload.cancelled(), objects.was_closed) == ((True, []) if is_cancelled else (False, [True]))
    assert session.closed.is_set()
