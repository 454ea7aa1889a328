"""Simulates nodes whose rank has frozen tensors, for tests of uploads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from everstep.protocol.agent_messages import UploadedShard
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.manifest import MANIFEST_VERSION, CheckpointManifest, ManifestShard
from everstep.protocol.slot import SlotState, payload_chunk_digests
from tests.unit.worker.rank_plans import rank_plan
from tests.unit.worker.storage.slots import JOB, RUN, header_of, payload_of
from worker.core.slots import Content
from worker.shm.held_files import HeldFiles
from worker.shm.slot_file import SlotFile
from worker.shm.store import SlotStore
from worker.storage.checkpoints import Agree, upload_shard
from worker.storage.object_store import ObjectStore
from worker.storage.shared_tensors import SharedTensors

BASES = {f"base{number}": bytes([number]) * 320 for number in range(4)}
"""Frozen tensors of a rank, by name. Two of them fill one group, which is stored as one frozen object."""
GROUP_BYTES, LEAST_BYTES = 640, 100


@dataclass
class Node:
    """A node with the slot of one rank."""

    store: SlotStore
    rank: Rank
    frozen: SharedTensors

    @classmethod
    def of(cls, folder: Path, rank: int = 0) -> Node:
        """Return a node with empty slots."""
        store = SlotStore(HeldFiles(), memory_bytes=1 << 20)
        store.open_run(JOB, RUN)
        return cls(store, Rank(rank), SharedTensors(group_bytes=GROUP_BYTES, least_bytes=LEAST_BYTES))

    async def seal(self, step: int, bases: dict[str, bytes], *, is_frozen: bool = True) -> tuple[SlotFile, bytes]:
        """Seal a step with the tensors in `bases` and with a tensor that differs for each rank and step.

        With `is_frozen`, the tensors in `bases` and the tensor `head` are declared frozen.
        """
        own = bytes([self.rank, step]) * 50
        tensors = [("lora", "uint8", (100,), own), *((name, "uint8", (320,), data) for name, data in bases.items())]
        payload, offset, size = payload_of(
            [*tensors, ("head", "uint8", (3,), b"abc")], frozen=[*bases, "head"] if is_frozen else []
        )
        header = header_of(payload, offset, size, rank=self.rank, step=step)
        index = await self.store.grant(
            self.rank,
            Content(Generation(2), Step(step)),
            keep=(),
            capacity_bytes=len(payload),
            layout_hash=header.layout_hash,
            slot_count=1,
        )
        assert index is not None
        slot = self.store.shards[self.rank][index].file
        with slot.payload(0, len(payload)) as view:
            view[:] = payload
        await self.store.seal(self.rank, index, replace(header, state=SlotState.WRITING))
        return slot, payload

    async def upload(self, objects: ObjectStore, step: int, bases: dict[str, bytes] = BASES) -> UploadedShard:
        """Seal a step and upload it."""
        slot, payload = await self.seal(step, bases)
        return await self.send(objects, slot, payload)

    async def send(
        self,
        objects: ObjectStore,
        slot: SlotFile,
        payload: bytes,
        agree: Agree | None = None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> UploadedShard:
        """Upload a sealed slot."""
        plan = rank_plan(generation=4, addresses=("127.0.0.1", "127.0.0.2"))
        chunks = payload_chunk_digests(payload)
        return await upload_shard(
            objects, slot, chunks, plan, rank=self.rank, shared=self.frozen, agree=agree, pause=pause
        )


def manifest_of(uploaded: Sequence[UploadedShard], step: int) -> CheckpointManifest:
    """Return the manifest of a checkpoint with these shards, in the order of ranks."""
    frozen = {each.sha256: each for shard in uploaded for each in shard.frozen}
    return CheckpointManifest(
        version=MANIFEST_VERSION,
        job=JOB,
        run=RUN,
        generation=Generation(4),
        parent_chain=((Generation(4), Step(0)),),
        step=Step(step),
        shards=tuple(
            ManifestShard(
                rank=shard.rank,
                key=shard.object.key,
                object_bytes=shard.object_bytes,
                etag=shard.etag,
                payload_bytes=shard.payload_bytes,
                payload_digest=shard.payload_digest.hex(),
                layout_hash=shard.layout_hash.hex(),
                origin_generation=shard.origin_generation,
            )
            for shard in uploaded
        ),
        frozen=tuple(frozen[sha256] for sha256 in sorted(frozen)),
    )
