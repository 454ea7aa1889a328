"""The owner of a shard and the holder of its replica upload the shard together, each a part of it.

The agents are real.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from safetensors.numpy import load

import worker.member.checkpoint_uploads
from everstep.bulk import StoredPart
from everstep.protocol.ids import Rank, Step
from everstep.protocol.manifest import PartsHasher
from everstep.protocol.plan import ObjectReference
from everstep.protocol.rounds import Announcement
from everstep.protocol.safetensors import encode_header
from everstep.protocol.slot import SlotIndex, TensorEntry, pack_index, payload_chunk_digests
from tests.fakes.clocks import FastClock
from tests.fakes.storage import MemoryObjectStore
from tests.integration.worker.agent import fleet as agent_fleet
from tests.integration.worker.agent.fleet import Fleet, Node, payload, until
from worker.core.slots import Content
from worker.errors import StoreDenied
from worker.member.member import Member
from worker.member.shared_uploads import HelpedUpload
from worker.storage.object_store import Piece
from worker.storage.shared_tensors import SharedTensors

pytestmark = pytest.mark.integration


class PatientUpload:
    """An upload of rank 0's shard. After its first part, the owner waits until a holder begins to send a part."""

    def __init__(self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, put_part: Callable[..., StoredPart]) -> None:
        self.fleet = fleet
        self.helped: list[int] = []
        """Numbers of the upload parts that holders have begun to send."""
        self.pins: list[int] = []
        """For each part that a holder sends: how many readers had pinned the holder's slot at that time."""
        self.step = Step(-1)
        """The step that `begin` uploads."""
        self._begun = threading.Event()
        self._put_part = put_part
        fleet.objects.part_bytes = 50
        monkeypatch.setattr(fleet.objects, "put_part", self.put_part)
        claim = HelpedUpload.claim

        def patient(helpers: HelpedUpload, number: int) -> bool:
            if number == 2:
                assert self._begun.wait(30.0)
            return claim(helpers, number)

        monkeypatch.setattr(HelpedUpload, "claim", patient)

    @property
    def owner(self) -> Member:
        member = self.fleet.nodes[0].agent.lifecycle.member
        assert member is not None
        return member

    @property
    def holder(self) -> Node:
        (holder,) = self.owner.plan.ranks[0].holders[1:]
        return next(node for node in self.fleet.nodes if node.id == holder)

    def holder_pins(self) -> int:
        return sum(slot.pins for slot in self.holder.agent.store.shards[Rank(0)])

    def put_part(
        self, reference: ObjectReference, upload_id: str, number: int, *given: Any, **named: Any
    ) -> StoredPart:
        self.helped.append(number)
        self.pins.append(self.holder_pins())
        self._begun.set()
        return self._put_part(self.fleet.objects, reference, upload_id, number, *given, **named)

    async def begin(self) -> None:
        """Train until a step is committed, and begin its upload."""
        await self.fleet.launch()
        await self.fleet.train(3)
        await until("a commit", lambda: self.owner.contents.committed > 0)
        self.step = self.owner.contents.committed
        self.owner.uploads.begin(self.step)

    async def check(self) -> None:
        """Check that the upload stored the whole shard, and wait until the holder's slot is free."""
        await self.owner.uploads.idle()
        (uploaded,) = self.owner.uploads.uploaded
        assert self.owner.status.faults(asyncio.get_running_loop().time()) == ()
        (key,) = [key for key in self.fleet.objects.objects[uploaded.object.bucket] if key.endswith(".safetensors")]
        assert key == uploaded.object.key
        data = self.fleet.objects.get_bytes(uploaded.object)
        hasher = PartsHasher(uploaded.part_bytes)
        hasher.update(data)
        assert (uploaded.object_bytes, uploaded.sha256) == (len(data), hasher.hexdigest())
        slot = self.fleet.nodes[0].agent.store.sealed(Rank(0), Content(uploaded.origin_generation, uploaded.step))
        assert slot is not None
        sealed, offset = payload(0, uploaded.step)
        assert data == encode_header(slot.file.header, sealed[offset:], payload_chunk_digests(sealed))
        await until("the holder's slot to be free", lambda: self.holder_pins() == 0)


async def test_a_holder_sends_parts_of_the_owners_upload(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = PatientUpload(fleet, monkeypatch, MemoryObjectStore.put_part)
    await upload.begin()
    await upload.check()
    assert upload.helped
    assert len(set(upload.helped)) == len(upload.helped)
    assert 1 not in upload.helped
    assert upload.pins == [1] * len(upload.helped)


async def test_a_holder_builds_the_same_object_without_the_frozen_tensors(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the owner looks for frozen objects. Its requests name the tensors that the shard's object must omit."""

    def partly_frozen(rank: int, step: int) -> tuple[bytes, int]:
        data = agent_fleet.state(rank, step)
        edge = len(data) - 2048
        entries = (
            TensorEntry("base", "uint8", (edge,), 0, edge, is_frozen=True),
            TensorEntry("own", "uint8", (2048,), edge, 2048),
        )
        return data + pack_index(SlotIndex(tensors=entries, values=b"")), len(data)

    monkeypatch.setattr(worker.member.checkpoint_uploads, "SharedTensors", partial(SharedTensors, least_bytes=1))
    monkeypatch.setattr(agent_fleet, "payload", partly_frozen)
    upload = PatientUpload(fleet, monkeypatch, MemoryObjectStore.put_part)
    await upload.begin()
    for node in fleet.nodes[1:]:
        member = node.agent.lifecycle.member
        assert member is not None
        for rank in member.shards:  # These ranks upload nothing, so they offer no tensors to share.
            await member.division.agree(rank, upload.step, ())
    await upload.owner.uploads.idle()
    (uploaded,) = upload.owner.uploads.uploaded
    assert upload.helped
    own = load(fleet.objects.get_bytes(uploaded.object))
    assert {name: tensor.tobytes() for name, tensor in own.items()} == {
        "own": agent_fleet.state(0, uploaded.step)[-2048:]
    }
    (frozen,) = uploaded.frozen
    shared = load(fleet.objects.get_bytes(ObjectReference(bucket=uploaded.object.bucket, key=frozen.key)))
    assert shared["base"].tobytes() == agent_fleet.state(0, uploaded.step)[:-2048]


def refused_part(*_: object, **__: object) -> StoredPart:
    raise StoreDenied("access denied")


def wrong_part(
    objects: MemoryObjectStore,
    reference: ObjectReference,
    upload_id: str,
    number: int,
    pieces: Iterable[Piece],
    **named: Any,
) -> StoredPart:
    size = sum(len(piece) for piece in pieces)
    return MemoryObjectStore.put_part(objects, reference, upload_id, number, [bytes(size)], **named)


def with_sha256(sha256: bytes, *given: Any, **named: Any) -> StoredPart:
    """Store the right part, and report this digest instead of the part's digest."""
    return replace(MemoryObjectStore.put_part(*given, **named), sha256=sha256)


@pytest.mark.parametrize(
    "put_part",
    [refused_part, wrong_part, partial(with_sha256, bytes(32)), partial(with_sha256, b"")],
    ids=["refused", "wrong bytes", "wrong SHA-256", "no SHA-256"],
)
async def test_the_owner_sends_the_parts_that_a_holder_cannot_send(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, put_part: Callable[..., StoredPart]
) -> None:
    upload = PatientUpload(fleet, monkeypatch, put_part)
    await upload.begin()
    await upload.check()
    assert upload.helped


@pytest.mark.parametrize("how", ["late", "superseded", "lost"])
async def test_the_owner_sends_the_parts_of_a_holder_that_does_not_answer(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The holder answers late, grants its slot to the final step, or is lost. The owner uploads all parts by itself."""
    go = threading.Event()

    def hang(objects: MemoryObjectStore, *given: Any, is_cancelled: Callable[[], bool] = lambda: False) -> StoredPart:
        assert go.wait(300.0)
        return MemoryObjectStore.put_part(objects, *given, is_cancelled=is_cancelled)

    if how == "late":
        monkeypatch.setattr("worker.member.shared_uploads.monotonic", clock := FastClock(1000))
        monkeypatch.setattr("worker.member.part_sharing.monotonic", clock)
    upload = PatientUpload(fleet, monkeypatch, hang)
    try:
        await upload.begin()
        await until("the holder to begin", lambda: upload.helped)
        if how == "superseded":
            member = upload.holder.agent.lifecycle.member
            assert member is not None
            final = Step(upload.step + 2)
            member.upload_helper.apply_announcement(
                Announcement(
                    generation=fleet.generation,
                    term=1,
                    sequence=1,
                    committed=Step(upload.step + 1),
                    proposed=final,
                    persist_step=final,
                )
            )
        if how == "lost":
            revoked = asyncio.create_task(upload.holder.agent.listener.revoke())
            await asyncio.sleep(0)
            go.set()
            await revoked
        await upload.owner.uploads.idle()
    finally:
        go.set()
    await upload.check()
