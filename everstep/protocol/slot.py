"""Defines the layout of a slot: a file in sealed memory with a header page that holds one shard at one step.

A slot file consists of one page of header and `capacity_bytes` of payload.

    offset  size  field               notes
    0       8     magic               b"EVERSLOT"
    8       2     version             2
    10      1     state               0 EMPTY, 1 WRITING, 2 SEALED
    11      1     -                   zero
    12      4     owner_rank
    16      8     step                optimizer steps finished
    24      4     origin_generation   the generation that captured it
    28      4     -                   zero
    32      8     capacity_bytes      space for the payload
    40      8     payload_bytes       size of the payload
    48      8     index_offset        start of the index within the payload
    56      8     index_bytes
    64      16    payload_digest      of payload[0:payload_bytes]: `shard_digest`, big endian
    80      16    layout_hash         xxh3-128 of facts about models and optimizers (`everstep.protocol.slot_values`)
    96      16    run                 the run id's 16 bytes
    112     64    job                 UTF-8, zero padded
    176     16    header_digest       xxh3-128 of bytes 0..176
    192     3904  -                   zero

The payload is a sequence of tensors, then the index (msgpack). Each tensor starts at a multiple of 64, and gaps are
zero. Integers are little endian.

Digests cover chunks, so that chunks can arrive in any order over several streams, and are verified one by one:

    chunk_digests    xxh3-128 of payload[i*n : (i+1)*n] for each i, n = chunk_bytes(payload_bytes);
                     16 bytes each, concatenated
    payload_digest   xxh3-128 of chunk_digests and payload_bytes (8 bytes, big endian)

Invariant: only the agent writes headers. A slot whose header digest is wrong counts as empty.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum

import msgspec
import xxhash

from everstep.protocol.dtypes import ITEM_BYTES
from everstep.protocol.errors import UNDECODABLE, CorruptSlot, UnknownVersion
from everstep.protocol.ids import Generation, JobName, Rank, RunId, Step
from everstep.protocol.parts import MAX_DIMENSIONS, TensorPart, are_disjoint, whole

MAGIC = b"EVERSLOT"
SLOT_VERSION = 2
HEADER_BYTES = 4096
ALIGNMENT = 64
DIGEST_BYTES = 16
CHUNK_BYTES = 4 * 1024 * 1024
"""Chunk size of payloads of up to `MAX_CHUNKS` chunks. A change needs a new slot version."""
MAX_CHUNKS = 32 * 1024
"""Payloads above 128 GiB have larger chunks, so that the digests of all chunks fit into one message."""
MAX_CHUNK_BYTES = 1024 * CHUNK_BYTES
MAX_INDEX_BYTES = 256 * 1024 * 1024
ZERO_DIGEST = bytes(DIGEST_BYTES)
STATE_DIGEST_BYTES = 8

_FIELDS = struct.Struct("<8sHBxIQI4xQQQQ16s16s16s64s")
assert _FIELDS.size == 176


class SlotState(IntEnum):
    """The state of a slot.

    - EMPTY: no content. The agent may grant the slot.
    - WRITING: a rank's copier or a replica stream fills the slot. The agent then sets SEALED or EMPTY.
    - SEALED: complete, with a digest over the whole payload. The agent sets EMPTY or WRITING when it grants the slot
      again.
    """

    EMPTY = 0
    WRITING = 1
    SEALED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHeader:
    """The header of a slot file, in the table of the module's docstring."""

    job: JobName
    run: RunId
    owner_rank: Rank
    origin_generation: Generation
    step: Step
    state: SlotState
    capacity_bytes: int
    payload_bytes: int = 0
    index_offset: int = 0
    index_bytes: int = 0
    payload_digest: bytes = ZERO_DIGEST
    layout_hash: bytes = ZERO_DIGEST


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """Return xxh3-128 of `data`, big endian, 16 bytes. Releases the GIL."""
    return xxhash.xxh3_128_digest(data)


def chunk_bytes(payload_bytes: int) -> int:
    """Return the chunk size of a payload: `CHUNK_BYTES`, doubled until `MAX_CHUNKS` chunks suffice."""
    size = CHUNK_BYTES
    while payload_bytes > MAX_CHUNKS * size:
        size *= 2
    return size


def chunk_count(payload_bytes: int) -> int:
    """Return the number of chunks of a payload. The last chunk may be shorter."""
    return -(-payload_bytes // chunk_bytes(payload_bytes))


def chunk_range(index: int, payload_bytes: int) -> tuple[int, int]:
    """Return begin and end of chunk `index` within a payload of `payload_bytes` bytes."""
    size = chunk_bytes(payload_bytes)
    return index * size, min((index + 1) * size, payload_bytes)


def shard_digest(chunk_digests: bytes, payload_bytes: int) -> bytes:
    """Return the digest of a payload, from the concatenated digests of its chunks in order."""
    return digest(chunk_digests + payload_bytes.to_bytes(8, "big"))


def payload_chunk_digests(payload: bytes | bytearray | memoryview) -> bytes:
    """Return the concatenated digests of a payload's chunks."""
    view = memoryview(payload)
    return b"".join(digest(view[slice(*chunk_range(index, view.nbytes))]) for index in range(chunk_count(view.nbytes)))


def payload_digest(payload: bytes | bytearray | memoryview) -> bytes:
    """Return the digest of a payload that is completely in memory."""
    return shard_digest(payload_chunk_digests(payload), memoryview(payload).nbytes)


def state_digest(chunk_digests: bytes, rest: bytes | bytearray | memoryview) -> bytes:
    """Return the digest of a payload's tensors, which is equal whenever a step is repeated bit-identically. `rest` are
    the bytes between the first chunks and the index, which is excluded: its values may contain times, or sets in the
    order of one process.
    """
    return digest(chunk_digests + digest(rest))[:STATE_DIGEST_BYTES]


class ShardHasher:
    """Computes the digests of a payload of `payload_bytes` bytes that arrives in order, in pieces of any size."""

    def __init__(self, payload_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes(payload_bytes)
        self._chunks = bytearray()
        self._open = xxhash.xxh3_128()
        self._position = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add the next bytes of the payload to the digests."""
        view = memoryview(data)
        while view.nbytes:
            room = self._chunk_bytes - self._position % self._chunk_bytes
            piece, view = view[:room], view[room:]
            self._open.update(piece)
            self._position += piece.nbytes
            if self._position % self._chunk_bytes == 0:
                self._end_chunk()

    def _end_chunk(self) -> None:
        self._chunks += self._open.digest()
        self._open = xxhash.xxh3_128()

    def digests(self) -> bytes:
        """Return the concatenated digests of the payload's chunks. Do not call `update` afterwards."""
        if self._position % self._chunk_bytes:
            self._end_chunk()
        return bytes(self._chunks)

    def digest(self) -> bytes:
        """Return the payload's digest. Do not call `update` afterwards."""
        return shard_digest(self.digests(), self._position)


def align(offset: int) -> int:
    """Return `offset`, rounded up to a multiple of `ALIGNMENT`."""
    return (offset + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def pack_header(header: SlotHeader) -> bytes:
    """Return the header page. Raises ValueError if the job name or run id does not fit."""
    job = header.job.encode()
    run = bytes.fromhex(header.run)
    if len(job) > 64 or len(run) != 16:
        raise ValueError(f"job {header.job!r} and run {header.run!r} do not fit into a slot header")
    fields = _FIELDS.pack(
        MAGIC,
        SLOT_VERSION,
        header.state,
        header.owner_rank,
        header.step,
        header.origin_generation,
        header.capacity_bytes,
        header.payload_bytes,
        header.index_offset,
        header.index_bytes,
        header.payload_digest,
        header.layout_hash,
        run,
        job,
    )
    page = fields + digest(fields)
    return page + bytes(HEADER_BYTES - len(page))


def unpack_header(page: bytes | memoryview) -> SlotHeader:
    """Return the header in a slot's first page. Checks the header's digest and bounds, but not the payload's digest.
    Raises CorruptSlot if the magic, the digest, the state or a bound is invalid. Raises UnknownVersion if only the
    version is unsupported.
    """
    if len(page) < HEADER_BYTES:
        raise CorruptSlot(f"a slot header has {len(page)} bytes")
    fields = bytes(page[: _FIELDS.size])
    if fields[:8] != MAGIC:
        raise CorruptSlot("a slot header does not begin with the magic bytes")
    if digest(fields) != bytes(page[_FIELDS.size : _FIELDS.size + DIGEST_BYTES]):
        raise CorruptSlot("the slot header does not match its digest")
    (
        _,
        version,
        state,
        owner,
        step,
        origin,
        capacity,
        payload,
        index_offset,
        index_bytes,
        payload_digest,
        layout,
        run,
        job,
    ) = _FIELDS.unpack(fields)
    if version != SLOT_VERSION:
        raise UnknownVersion(f"a slot has version {version}; this process supports {SLOT_VERSION}")
    if state not in (0, 1, 2):
        raise CorruptSlot(f"slot state {state}")
    if not (payload <= capacity and index_offset + index_bytes <= payload):
        raise CorruptSlot(f"slot bounds: capacity {capacity}, payload {payload}, index {index_offset}+{index_bytes}")
    return SlotHeader(
        job=JobName(job.rstrip(b"\0").decode(errors="replace")),
        run=RunId(run.hex()),
        owner_rank=Rank(owner),
        origin_generation=Generation(origin),
        step=Step(step),
        state=SlotState(state),
        capacity_bytes=capacity,
        payload_bytes=payload,
        index_offset=index_offset,
        index_bytes=index_bytes,
        payload_digest=payload_digest,
        layout_hash=layout,
    )


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a payload: `data[offset : offset + bytes]` is its contiguous storage in row-major order."""

    name: str
    dtype: str
    """torch's name without `torch.`: float32, bfloat16, int64, uint8, bool …"""
    shape: tuple[int, ...]
    offset: int
    bytes: int
    parts: tuple[TensorPart, ...] | None = None
    """None: the tensor is the whole logical tensor of the same name."""
    is_frozen: bool = False
    """Whether `requires_grad` is False. Readers must not rely on it: averaged weights are often declared so."""

    @property
    def logical_parts(self) -> tuple[TensorPart, ...]:
        """The boxes of logical tensors that this tensor contains."""
        return (whole(self.name, self.shape),) if self.parts is None else self.parts


class SlotIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a payload: its tensors, and the values of the same step that are not tensors."""

    tensors: tuple[TensorEntry, ...]
    values: bytes
    """msgpack, which only `everstep.training.state_tree` writes and reads."""
    version: int = 1


_index_encoder = msgspec.msgpack.Encoder()
_index_decoder = msgspec.msgpack.Decoder(SlotIndex)


def pack_index(index: SlotIndex) -> bytes:
    """Return an index as the bytes that end the payload."""
    return _index_encoder.encode(index)


class IndexWriter:
    """Packs the indexes of many snapshots with the same tensors: the tensors once, and the values for each step."""

    def __init__(self, tensors: tuple[TensorEntry, ...]) -> None:
        empty = pack_index(SlotIndex(tensors, b""))
        end = _index_end(b"")
        assert empty.endswith(end), "values and version are the last two fields"
        self.prefix = empty[: -len(end)]
        """The beginning of every packed index."""

    def suffix(self, values: bytes) -> bytes:
        """Return the end of a packed index, which the caller writes after `prefix`."""
        return _index_end(values)

    def size(self, values: bytes) -> int:
        """Return the size in bytes of the packed index of a snapshot with these values."""
        return len(self.prefix) + len(_index_end(values))


def _index_end(values: bytes) -> bytes:
    return b"".join(_index_encoder.encode(item) for item in (values, "version", SlotIndex((), b"").version))


def unpack_index(data: bytes | memoryview, tensor_bytes: int) -> SlotIndex:
    """Return the index of a payload whose tensors occupy its first `tensor_bytes` bytes. Raises CorruptSlot if it does
    not decode, or a tensor's alignment, bounds, overlap or size is invalid. Raises UnknownVersion if the index has an
    unknown version.
    """
    if len(data) > MAX_INDEX_BYTES:
        raise CorruptSlot(f"a slot index has {len(data)} bytes")
    try:
        index = _index_decoder.decode(data)
    except UNDECODABLE as error:
        raise CorruptSlot(f"the slot index cannot be decoded: {error}") from error
    if index.version != 1:
        raise UnknownVersion(f"a slot index has the unsupported version {index.version}")
    end = 0
    for entry in sorted(index.tensors, key=lambda entry: entry.offset):
        if (
            entry.offset < end
            or entry.offset % ALIGNMENT
            or entry.bytes < 0
            or entry.offset + entry.bytes > tensor_bytes
        ):
            raise CorruptSlot(
                f"tensor {entry.name!r} at {entry.offset}+{entry.bytes} does not fit {tensor_bytes} bytes or "
                "overlaps another"
            )
        if not _is_sized(entry):
            raise CorruptSlot(
                f"tensor {entry.name!r}: {entry.bytes} bytes do not match "
                f"{entry.dtype}{list(entry.shape[:MAX_DIMENSIONS])}"
            )
        if not are_disjoint(entry.parts or (), entry.bytes // ITEM_BYTES[entry.dtype]):
            raise CorruptSlot(
                f"tensor {entry.name!r} cannot contain its {len(entry.parts or ())} boxes of logical tensors"
            )
        end = entry.offset + entry.bytes
    return index


def _is_sized(entry: TensorEntry) -> bool:
    item_bytes = ITEM_BYTES.get(entry.dtype)
    if item_bytes is None or len(entry.shape) > MAX_DIMENSIONS or any(size < 0 for size in entry.shape):
        return False
    is_addressable = math.prod(size for size in entry.shape if size) * item_bytes < 2**63
    return is_addressable and math.prod(entry.shape) * item_bytes == entry.bytes
