"""Builds checkpoints in a folder from arrays that a test divides among ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from everstep.protocol import safetensors
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.manifest import (
    MANIFEST_VERSION,
    CheckpointManifest,
    ManifestShard,
    SharedObject,
    encode_manifest,
    frozen_key,
    replicated_key,
)
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
    is_replicated: bool = False
    """True if the tensor is equal on all ranks, and a "replicated object" in S3 stores it once for all of them."""


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


def object_of(
    rank: int, payload: bytes, index_offset: int, replicated: Collection[str] = ()
) -> tuple[bytes, ManifestShard, bytes, bytes]:
    """Return a shard's object, its entry in the manifest, its frozen object and its replicated object.

    The frozen object contains the frozen tensors. The replicated object contains the tensors whose names are in
    `replicated`. Either is empty if it contains no tensor.
    """
    header = header_of(payload, index_offset, len(payload) - index_offset, rank=rank)
    packed = payload[index_offset:]
    entries = safetensors.tensors_in_order(unpack_index(packed, index_offset))

    def data_of(some: Sequence[TensorEntry]) -> bytes:
        return b"".join(payload[entry.offset : entry.offset + entry.bytes] for entry in some)

    def shared(numbers: Sequence[int]) -> tuple[bytes, tuple[safetensors.SharedGroup, ...]]:
        if not numbers:
            return b"", ()
        some = [entries[number] for number in numbers]
        beginning = safetensors.encode_shared_header(some)
        whole = beginning + data_of(some)
        group = safetensors.SharedGroup(
            sha256=hashlib.sha256(whole).hexdigest(),
            object_bytes=len(whole),
            data_begin=len(beginning),
            tensors=tuple(numbers),
        )
        return whole, (group,)

    frozen, frozen_groups = shared([number for number, entry in enumerate(entries) if entry.is_frozen])
    equal, equal_groups = shared([number for number, entry in enumerate(entries) if entry.name in replicated])
    groups = safetensors.SharedGroups(frozen=frozen_groups, replicated=equal_groups)
    data = safetensors.encode_header(header, packed, payload_chunk_digests(payload), groups)
    data += data_of([entry for number, entry in enumerate(entries) if number not in groups.tensors])
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
    return data, shard, frozen, equal


def store(folder: Path, ranks: Mapping[int, Sequence[Stored]]) -> Path:
    """Write a checkpoint of these tensors, and return the path of its manifest."""
    replicated = {stored.name for tensors in ranks.values() for stored in tensors if stored.is_replicated}
    return store_payloads(folder, [payload_of(tensors) for _, tensors in sorted(ranks.items())], replicated)


def store_payloads(folder: Path, payloads: Sequence[tuple[bytes, int]], replicated: Collection[str] = ()) -> Path:
    """Write a checkpoint as the control plane and its agents would, and return the path of its manifest.

    Args:
        folder: directory that replaces the bucket.
        payloads: payload and start of its index, for each rank.
        replicated: names of the tensors that are equal on all ranks and are stored once.
    """
    shards: list[ManifestShard] = []
    frozen: dict[str, SharedObject] = {}
    equal: dict[str, SharedObject] = {}
    for rank, (payload, index_offset) in enumerate(payloads):
        data, shard, *shared = object_of(rank, payload, index_offset, replicated)
        for whole, key_of, named in zip(shared, (frozen_key, replicated_key), (frozen, equal), strict=True):
            if whole:
                sha256 = hashlib.sha256(whole).hexdigest()
                place = folder / (key := key_of(shard.key, sha256))
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(whole)
                named[sha256] = SharedObject(key=key, object_bytes=len(whole), sha256=sha256)
        path = folder / shard.key
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        shards.append(shard)
    manifest = CheckpointManifest(
        version=MANIFEST_VERSION,
        job=JOB,
        run=RUN,
        generation=Generation(3),
        parent_chain=((Generation(3), Step(5)),),
        step=Step(7),
        shards=tuple(shards),
        frozen=tuple(frozen[sha256] for sha256 in sorted(frozen)),
        replicated=tuple(equal[sha256] for sha256 in sorted(equal)),
    )
    path = folder / f"jobs/job/checkpoints/{FOLDER}manifest.json"
    path.write_bytes(encode_manifest(manifest))
    return path


def with_text(manifest: bytes, old: str, new: str) -> bytes:
    """Return a manifest in which `new` replaces the text `old`, with the digest of the result.

    A reader can refuse the result only for what it says.
    """
    assert old in manifest.decode()
    fields = msgspec.json.decode(manifest.decode().replace(old, new))
    del fields["sha256"]
    return encode_manifest(msgspec.convert(fields, CheckpointManifest))
