"""Builds checkpoints in a folder from arrays that a test divides among ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from everstep.protocol import safetensors
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.manifest import CheckpointManifest, FrozenObject, ManifestShard, encode_manifest, frozen_key
from everstep.protocol.parts import TensorPart
from everstep.protocol.slot import SlotIndex, TensorEntry, align, pack_index, payload_chunk_digests, unpack_index
from tests.unit.worker.storage.slots import JOB, RUN, header_of

FOLDER = f"run={RUN}/gen=3/step=7/"


@dataclass(frozen=True)
class Stored:
    """A tensor of a slot: its elements, and which parts (boxes) of logical tensors they form."""

    name: str
    data: np.ndarray
    parts: tuple[TensorPart, ...] | None = None
    is_frozen: bool = False


def payload_of(tensors: Sequence[Stored]) -> tuple[bytes, int]:
    """Return the payload of a slot with these tensors, and the start of its index."""
    payload, entries = bytearray(), []
    for stored in tensors:
        payload += bytes(align(len(payload)) - len(payload))
        dtype, size = str(stored.data.dtype), stored.data.nbytes
        shape = stored.data.shape
        entries.append(TensorEntry(stored.name, dtype, shape, len(payload), size, stored.parts, stored.is_frozen))
        payload += stored.data.tobytes()
    payload += bytes(align(len(payload)) - len(payload))
    return bytes(payload) + pack_index(SlotIndex(tuple(entries), b"values")), len(payload)


def object_of(rank: int, payload: bytes, index_offset: int) -> tuple[bytes, ManifestShard, bytes]:
    """Return the object of a shard with this payload, its entry in the manifest, and its frozen object.

    The frozen object is empty if no tensor is frozen.
    """
    header = header_of(payload, index_offset, len(payload) - index_offset, rank=rank)
    packed = payload[index_offset:]
    entries = safetensors.tensors_in_order(unpack_index(packed, index_offset))

    def data_of(some: Sequence[TensorEntry]) -> bytes:
        return b"".join(payload[entry.offset : entry.offset + entry.bytes] for entry in some)

    frozen, groups = b"", []
    if shared := [entry for entry in entries if entry.is_frozen]:
        beginning = safetensors.encode_frozen_header(shared)
        frozen = beginning + data_of(shared)
        groups.append(
            safetensors.FrozenGroup(
                sha256=hashlib.sha256(frozen).hexdigest(),
                object_bytes=len(frozen),
                data_begin=len(beginning),
                tensors=tuple(number for number, entry in enumerate(entries) if entry.is_frozen),
            )
        )
    data = safetensors.encode_header(header, packed, payload_chunk_digests(payload), groups)
    data += data_of([entry for entry in entries if not entry.is_frozen])
    shard = ManifestShard(
        rank=Rank(rank),
        key=f"jobs/job/checkpoints/{FOLDER}{rank:016x}/rank={rank}.safetensors",
        object_bytes=len(data),
        etag="",
        payload_bytes=header.payload_bytes,
        payload_digest=header.payload_digest.hex(),
        layout_hash=header.layout_hash.hex(),
        origin_generation=Generation(2),
    )
    return data, shard, frozen


def store(folder: Path, ranks: Mapping[int, Sequence[Stored]]) -> Path:
    """Write a checkpoint of these tensors, and return the path of its manifest."""
    return store_payloads(folder, [payload_of(tensors) for _, tensors in sorted(ranks.items())])


def store_payloads(folder: Path, payloads: Sequence[tuple[bytes, int]]) -> Path:
    """Write a checkpoint as the control plane and its agents would, and return the path of its manifest.

    Args:
        folder: directory that replaces the bucket.
        payloads: payload and start of its index, for each rank.
    """
    shards: list[ManifestShard] = []
    shared: dict[str, FrozenObject] = {}
    for rank, (payload, index_offset) in enumerate(payloads):
        data, shard, frozen = object_of(rank, payload, index_offset)
        if frozen:
            sha256 = hashlib.sha256(frozen).hexdigest()
            place = folder / (key := frozen_key(shard.key, sha256))
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(frozen)
            shared[sha256] = FrozenObject(key=key, object_bytes=len(frozen), sha256=sha256)
        path = folder / shard.key
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        shards.append(shard)
    manifest = CheckpointManifest(
        version=2 if shared else 1,
        job=JOB,
        run=RUN,
        generation=Generation(3),
        parent_chain=((Generation(3), Step(5)),),
        step=Step(7),
        shards=tuple(shards),
        frozen=tuple(shared[sha256] for sha256 in sorted(shared)),
    )
    path = folder / f"jobs/job/checkpoints/{FOLDER}manifest.json"
    path.write_bytes(encode_manifest(manifest))
    return path
