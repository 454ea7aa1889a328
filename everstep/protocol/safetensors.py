"""Converts between a slot's payload and a safetensors file. Pure, and without copies of tensor data.

    offset  size  field
    0       8     length of the header, little endian
    8       …     JSON: tensor names → dtype, shape, data_offsets; `__metadata__`; padded with blanks to a multiple of 8
    …       …     the tensors' data, contiguous, in the order of their offsets in the slot

`__metadata__` holds the information that safetensors has no fields for:

- the slot's index, which contains the plain values of the step
- the payload's size, index offset, digest and the digests of its chunks
- the rank, the step and the generation of the shard
- the shared groups: sets of tensors whose data is in another object, which several shards or checkpoints refer to

Any safetensors reader can read the tensors. Only Everstep can restore training from the file. Source: the format's
description, https://github.com/huggingface/safetensors#format

Invariant: `plan_restore` accepts only a header that `encode_header` could have written. The caller must check the
payload's digest.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from everstep.protocol.errors import UNDECODABLE, CorruptObject, OversizedMessage, ProtocolError
from everstep.protocol.limits import Count, HexDigest, Items
from everstep.protocol.manifest import frozen_key, replicated_key
from everstep.protocol.slot import (
    ALIGNMENT,
    DIGEST_BYTES,
    SlotHeader,
    SlotIndex,
    TensorEntry,
    chunk_count,
    shard_digest,
    unpack_index,
)

LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
# The limit prevents a damaged header from naming a huge payload of zeros.
MAX_EXTRA_GAPS = 4
"""Gaps of `ALIGNMENT` bytes that a payload may have in addition to one per tensor."""
MAX_SHARED_TENSORS = 1 << 20
_FORMAT = "everstep-2"
_FORMAT_WITH_FROZEN = "everstep-3"
_FORMAT_WITH_REPLICATED = "everstep-4"
_METADATA = "__metadata__"
DTYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Safetensors' name of each torch dtype. Other dtypes are stored as U8, and the index keeps their dtype."""


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class SharedGroup(msgspec.Struct, frozen=True):
    """Tensors of a shard whose data is in one S3 object, which other shards also use."""

    sha256: HexDigest
    """SHA-256 of the whole shared object, which its key contains."""
    object_bytes: Count
    data_begin: Count
    """Position of the first tensor's data in the shared object. The other tensors follow without gaps."""
    tensors: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_SHARED_TENSORS)]
    """Indices in the result of `tensors_in_order`, increasing."""


class SharedGroups(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tensors of one shard in shared S3 objects. No tensor belongs to two groups."""

    frozen: Annotated[tuple[SharedGroup, ...], Items] = ()
    """Tensors that training does not change, stored once per run."""
    replicated: Annotated[tuple[SharedGroup, ...], Items] = ()
    """Tensors that are equal on several ranks, stored once per checkpoint."""

    @property
    def tensors(self) -> frozenset[int]:
        """Indices, in the result of `tensors_in_order`, of all shared tensors."""
        return frozenset(number for group in (*self.frozen, *self.replicated) for number in group.tensors)


NOTHING_SHARED = SharedGroups()


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The `__metadata__` object. All values must be strings."""

    everstep: str
    job: str
    run: str
    rank: str
    step: str
    origin_generation: str
    payload_bytes: str
    index_offset: str
    payload_digest: str
    chunk_digests: str
    """Base64 of the digests of the payload's chunks."""
    layout_hash: str
    index: str
    """Base64 of the index as packed in the slot."""
    frozen: str = ""
    """JSON of `SharedGroups.frozen`; absent if empty."""
    replicated: str = ""
    """JSON of `SharedGroups.replicated`; absent if empty."""


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_HEADER_METADATA = msgspec.json.Decoder(_Metadata)
_HEADER_TENSOR = msgspec.json.Decoder(_Tensor)
_GROUPS = msgspec.json.Decoder(tuple[SharedGroup, ...])
_SHA256 = re.compile("[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class SharedSpans:
    """A shared S3 object, and the ranges of one shard's payload whose bytes it contains."""

    group: SharedGroup
    is_frozen: bool
    """Whether the object is frozen; otherwise replicated."""
    spans: tuple[tuple[int, int], ...]
    """Begin and end of each tensor within the payload, in the order of the shared object's data."""

    def key(self, shard_key: str) -> str:
        """Return the key of the shared object. Raise MalformedMessage if `shard_key` is not the key of a shard."""
        return (frozen_key if self.is_frozen else replicated_key)(shard_key, self.group.sha256)


@dataclass(frozen=True, slots=True)
class Restore:
    """The source of each byte of a payload: the shard's own object, shared objects, zeros, or the index."""

    payload_bytes: int
    index_offset: int
    index: bytes
    layout_hash: bytes
    payload_digest: bytes
    job: str
    run: str
    rank: str
    step: str
    origin_generation: str
    """No digest covers this field, `job`, `run`, `rank` and `step`. A reader must compare them with expected values."""
    chunk_digests: bytes
    """Digests of the chunks. They hash to `payload_digest`, so a reader can verify single chunks."""
    spans: tuple[tuple[int, int], ...]
    """Begin and end of each tensor within the payload, in the order of the object's data."""
    shared: tuple[SharedSpans, ...] = ()

    @property
    def data_bytes(self) -> int:
        """Bytes of tensor data in the shard's own object."""
        return sum(end - begin for begin, end in self.spans)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield begin and end of each gap between tensors. The bytes of a gap must be zero."""
        end = 0
        for begin, next_end in (
            *sorted([*self.spans, *(span for each in self.shared for span in each.spans)]),
            (self.index_offset, self.index_offset + len(self.index)),
            (self.payload_bytes, self.payload_bytes),
        ):
            if begin > end:
                yield end, begin
            end = max(end, next_end)


def tensors_in_order(index: SlotIndex) -> list[TensorEntry]:
    """Return the tensors in the order of their data in a slot and its checkpoint object."""
    return sorted(index.tensors, key=lambda entry: (entry.offset, entry.bytes))


def encode_header(
    header: SlotHeader, packed_index: bytes, chunk_digests: bytes, shared: SharedGroups = NOTHING_SHARED
) -> bytes:
    """Return the length field and the JSON header of a shard's object. Raises CorruptSlot if the index is invalid, and
    OversizedMessage if the header would exceed the limit of safetensors.
    """
    metadata = _Metadata(
        everstep=_format_of(shared),
        job=header.job,
        run=header.run,
        rank=str(header.owner_rank),
        step=str(header.step),
        origin_generation=str(header.origin_generation),
        payload_bytes=str(header.payload_bytes),
        index_offset=str(header.index_offset),
        payload_digest=header.payload_digest.hex(),
        chunk_digests=base64.b64encode(chunk_digests).decode(),
        layout_hash=header.layout_hash.hex(),
        index=base64.b64encode(packed_index).decode(),
        frozen=msgspec.json.encode(shared.frozen).decode() if shared.frozen else "",
        replicated=msgspec.json.encode(shared.replicated).decode() if shared.replicated else "",
    )
    elsewhere = shared.tensors
    entries = tensors_in_order(unpack_index(packed_index, header.index_offset))
    return _header([entry for number, entry in enumerate(entries) if number not in elsewhere], metadata)


def encode_shared_header(entries: Sequence[TensorEntry]) -> bytes:
    """Return a shared object's header, equal for equal tensors. Raises OversizedMessage for too many of them."""
    return _header(entries, None)


def _header(entries: Sequence[TensorEntry], metadata: _Metadata | None) -> bytes:
    described: dict[str, _Tensor | _Metadata] = {} if metadata is None else {_METADATA: metadata}
    position = 0
    for entry in entries:
        name = entry.name
        # Tensors of a shard may have equal names, or the name "__metadata__", which the format reserves. Make the
        # names in the header unique.
        while name in described or name == _METADATA:
            name += "'"
        offsets = (position, position + entry.bytes)
        described[name] = (
            _Tensor(DTYPE_NAMES[entry.dtype], entry.shape, offsets)
            if entry.dtype in DTYPE_NAMES
            else _Tensor("U8", (entry.bytes,), offsets)
        )
        position += entry.bytes
    text = msgspec.json.encode(described)
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise OversizedMessage(
            f"the header of this shard would have {len(text):,} bytes; safetensors allows {MAX_HEADER_BYTES:,}"
        )
    return LENGTH.pack(len(text)) + text


def plan_restore(header: bytes, object_bytes: int) -> Restore:
    """Return the source of each byte of the payload. Raises CorruptObject for a foreign or contradictory header."""
    try:
        described = _HEADER.decode(header)
        metadata = _HEADER_METADATA.decode(described.pop(_METADATA))
        shared = SharedGroups(
            frozen=_GROUPS.decode(metadata.frozen) if metadata.frozen else (),
            replicated=_GROUPS.decode(metadata.replicated) if metadata.replicated else (),
        )
        if metadata.everstep != _format_of(shared):
            raise CorruptObject(f"a checkpoint has the unsupported format {metadata.everstep!r}")
        payload_bytes, index_offset = int(metadata.payload_bytes), int(metadata.index_offset)
        if not 0 <= index_offset <= payload_bytes < 2**63:
            raise CorruptObject(f"a payload of {payload_bytes} bytes cannot have an index at offset {index_offset}")
        packed = base64.b64decode(metadata.index, validate=True)
        digests = bytes.fromhex(metadata.layout_hash), bytes.fromhex(metadata.payload_digest)
        chunk_digests = base64.b64decode(metadata.chunk_digests, validate=True)
        entries = tensors_in_order(unpack_index(packed, index_offset))
        tensors = sorted(_HEADER_TENSOR.decode(raw).data_offsets for raw in described.values())
    except (KeyError, ValueError, binascii.Error, ProtocolError, *UNDECODABLE) as error:
        raise CorruptObject(f"the object's header is not a checkpoint header: {error}") from error
    spans = tuple(
        _shared_spans(group, entries, is_frozen=is_frozen)
        for is_frozen, groups in ((True, shared.frozen), (False, shared.replicated))
        for group in groups
    )
    elsewhere = shared.tensors
    if len(elsewhere) != sum(len(each.group.tensors) for each in spans):
        raise CorruptObject("two shared groups of the object have the same tensor")
    own = [entry for number, entry in enumerate(entries) if number not in elsewhere]
    found = Restore(
        payload_bytes,
        index_offset,
        packed,
        *digests,
        metadata.job,
        metadata.run,
        metadata.rank,
        metadata.step,
        metadata.origin_generation,
        chunk_digests,
        tuple((entry.offset, entry.offset + entry.bytes) for entry in own),
        spans,
    )
    gaps = payload_bytes - sum(entry.bytes for entry in entries) - len(packed)
    if gaps > ALIGNMENT * (len(entries) + MAX_EXTRA_GAPS):
        raise CorruptObject(f"a payload of {payload_bytes} bytes contains {gaps} bytes of zeros between tensors")
    position = 0
    expected: list[tuple[int, int]] = []
    for entry in own:
        expected.append((position, position + entry.bytes))
        position += entry.bytes
    if tensors != sorted(expected) or any(len(value) != DIGEST_BYTES for value in digests):
        raise CorruptObject("the object's tensors differ from its index")
    if (
        len(chunk_digests) != DIGEST_BYTES * chunk_count(payload_bytes)
        or shard_digest(chunk_digests, payload_bytes) != found.payload_digest
    ):
        raise CorruptObject("the digests of the object's chunks do not match the digest of its payload")
    if not 0 <= index_offset <= index_offset + len(packed) <= payload_bytes:
        raise CorruptObject(
            f"the object's index is outside of its payload: {index_offset}+{len(packed)} of {payload_bytes}"
        )
    if object_bytes != LENGTH.size + len(header) + found.data_bytes:
        raise CorruptObject(
            f"the object has {object_bytes} bytes; its header says {LENGTH.size + len(header) + found.data_bytes}"
        )
    return found


def _format_of(shared: SharedGroups) -> str:
    """Return the oldest version of the header's format that can list these shared objects."""
    if shared.replicated:
        return _FORMAT_WITH_REPLICATED
    return _FORMAT_WITH_FROZEN if shared.frozen else _FORMAT


def _shared_spans(group: SharedGroup, entries: Sequence[TensorEntry], *, is_frozen: bool) -> SharedSpans:
    """Raise CorruptObject if the group names tensors that do not exist, or contradicts the size of its object."""
    numbers = group.tensors
    is_ordered = all(first < second for first, second in itertools.pairwise(numbers))
    if not numbers or not is_ordered or numbers[0] < 0 or numbers[-1] >= len(entries):
        raise CorruptObject("a shared group of the object names tensors that the index does not have")
    spans = tuple((entries[number].offset, entries[number].offset + entries[number].bytes) for number in numbers)
    data_bytes = sum(end - begin for begin, end in spans)
    is_sized = LENGTH.size < group.data_begin and group.object_bytes == group.data_begin + data_bytes
    if not is_sized or _SHA256.fullmatch(group.sha256) is None:
        raise CorruptObject("a shared group of the object contradicts the size or the digest of its object")
    return SharedSpans(group, is_frozen, spans)
