"""Checkpoints in a folder, made of arrays that a test cuts into parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from everstep.protocol import safetensors
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.manifest import CheckpointManifest, ManifestShard, encode_manifest
from everstep.protocol.parts import TensorPart
from everstep.protocol.slot import SlotIndex, TensorEntry, align, pack_index, payload_chunk_digests, payload_digest
from tests.unit.worker.storage.slots import JOB, RUN, header_of

FOLDER = f"run={RUN}/gen=3/step=7/"


@dataclass(frozen=True)
class Stored:
    """A tensor of a slot: its elements, and the boxes that they are."""

    name: str
    data: np.ndarray
    parts: tuple[TensorPart, ...] | None = None


def object_of(rank: int, tensors: Sequence[Stored]) -> tuple[bytes, ManifestShard]:
    """Return the object of a shard with these tensors, and its entry in the manifest."""
    payload, entries = bytearray(), []
    for stored in tensors:
        payload += bytes(align(len(payload)) - len(payload))
        size = stored.data.nbytes
        entries.append(
            TensorEntry(stored.name, str(stored.data.dtype), stored.data.shape, len(payload), size, stored.parts)
        )
        payload += stored.data.tobytes()
    payload += bytes(align(len(payload)) - len(payload))
    packed = pack_index(SlotIndex(tuple(entries), b"values"))
    header = header_of(bytes(payload) + packed, len(payload), len(packed), rank=rank)
    chunks = payload_chunk_digests(bytes(payload) + packed)
    data = safetensors.encode_header(header, packed, chunks) + b"".join(stored.data.tobytes() for stored in tensors)
    shard = ManifestShard(
        rank=Rank(rank),
        key=f"jobs/job/checkpoints/{FOLDER}{rank:016x}/rank={rank}.safetensors",
        object_bytes=len(data),
        etag="",
        payload_bytes=header.payload_bytes,
        payload_digest=payload_digest(bytes(payload) + packed).hex(),
        layout_hash=header.layout_hash.hex(),
        origin_generation=Generation(2),
    )
    return data, shard


def store(folder: Path, ranks: Mapping[int, Sequence[Stored]]) -> Path:
    """Write a checkpoint as the control plane and its agents would, and return the path of its manifest."""
    shards = []
    for rank, tensors in sorted(ranks.items()):
        data, shard = object_of(rank, tensors)
        path = folder / shard.key
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        shards.append(shard)
    manifest = CheckpointManifest(
        version=1,
        job=JOB,
        run=RUN,
        generation=Generation(3),
        parent_chain=((Generation(3), Step(5)),),
        step=Step(7),
        shards=tuple(shards),
    )
    path = folder / f"jobs/job/checkpoints/{FOLDER}manifest.json"
    path.write_bytes(encode_manifest(manifest))
    return path
