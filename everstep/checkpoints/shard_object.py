"""Reads the stored object of one shard and verifies every chunk by its digest.

    payload range ─▶ chunks of 4 MiB ─▶ one ranged read each ─▶ digest compared with the header ─▶ bytes

Tensors that several shards share are stored in separate objects. A chunk with such tensors needs one ranged read per
object.

The header of the object holds the digest of each chunk of the payload (`everstep.protocol.safetensors`), and the
manifest holds the digest of all chunk digests.

Invariant: `read_into` returns only bytes that hash to the manifest's digest. `ShardObject` verifies the payload's
index, the list of the tensors and their positions, when it opens the object.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Final

from everstep.checkpoints.errors import CorruptCheckpoint
from everstep.checkpoints.stores import StoredObject
from everstep.protocol.errors import CorruptObject, ProtocolError
from everstep.protocol.manifest import CheckpointManifest, ManifestShard
from everstep.protocol.safetensors import LENGTH, MAX_HEADER_BYTES, Restore, SharedGroup, plan_restore
from everstep.protocol.slot import DIGEST_BYTES, SlotIndex, chunk_bytes, chunk_range, digest, unpack_index

CACHED_CHUNKS: Final = 6
"""Number of chunks in the cache of a checkpoint.

The cached chunks use 24 MiB, or more if a shard exceeds 128 GiB, because its chunks are then larger. In each rank's
shard, many small tensors share one chunk. The cache avoids a new read of this chunk for each tensor.
"""


class ChunkCache:
    """Cache of the most recently read chunks of all shards of a checkpoint. Safe from any thread."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[tuple[int, int], bytearray] = OrderedDict()
        self._lock = threading.Lock()
        self.mixing = threading.Lock()
        """Lock that a thread holds during `_read_mixed`, which needs memory for a second chunk.

        With the lock, all threads together need memory for only one such chunk.
        """

    def get(self, key: tuple[int, int]) -> bytearray | None:
        """Return the cached chunk of a rank's shard, or None. The caller must not change the chunk."""
        with self._lock:
            if (chunk := self._chunks.get(key)) is not None:
                self._chunks.move_to_end(key)
            return chunk

    def put(self, key: tuple[int, int], chunk: bytearray) -> None:
        """Add a chunk to the cache. A full cache drops its least recently used chunk."""
        with self._lock:
            self._chunks[key] = chunk
            while len(self._chunks) > CACHED_CHUNKS:
                self._chunks.popitem(last=False)


class ShardObject:
    """One shard of a checkpoint, read from its safetensors object.

    Args:
        stored: the safetensors object of the shard, opened for reading.
        manifest: the manifest of the checkpoint.
        expected: the entry of the shard in the manifest.
        cache: the cache that all shards of the checkpoint share.
        shared: the shared objects of the manifest by SHA-256, opened for reading.

    Raises:
        CorruptCheckpoint: the object's header is damaged, belongs to a different shard, or names a shared object that
            the manifest does not name.
        StoreFailure: the object cannot be read.
    """

    def __init__(
        self,
        stored: StoredObject,
        manifest: CheckpointManifest,
        expected: ManifestShard,
        cache: ChunkCache,
        shared: Mapping[str, StoredObject],
    ) -> None:
        self._stored = stored
        self._cache = cache
        self.rank = int(expected.rank)
        self._plan, data_begin = _read_header(stored, manifest, expected)
        spans = list(_spans_of(stored, data_begin, self._plan.spans))
        for each in self._plan.shared:
            spans += _spans_of(_shared_object(each.group, shared, stored), each.group.data_begin, each.spans)
        self._spans = sorted(spans, key=lambda span: (span.begin, span.end))
        self._begins = [span.begin for span in self._spans]
        size, index_end = chunk_bytes(self._plan.payload_bytes), self._plan.index_offset + len(self._plan.index)
        for number in range(self._plan.index_offset // size, -(-index_end // size)):
            self._chunk(number)  # Verify the index before its use, because it gives the position of every tensor.
        self.index: SlotIndex = unpack_index(self._plan.index, self._plan.index_offset)

    def read_into(self, begin: int, target: memoryview, pool: ThreadPoolExecutor) -> None:
        """Read a range of the payload into `target`.

        Args:
            begin: first byte, within the payload.
            target: uint8 memory that receives the bytes. Its length is the length of the range.
            pool: its threads read the chunks in parallel.

        Raises:
            CorruptCheckpoint: a chunk does not hash to its digest.
            StoreFailure: the object cannot be read.
        """
        end = begin + target.nbytes
        size = chunk_bytes(self._plan.payload_bytes)

        def take(number: int) -> None:
            first, last = chunk_range(number, self._plan.payload_bytes)
            chunk = self._chunk(number)
            low, high = max(begin, first), min(end, last)
            target[low - begin : high - begin] = chunk[low - first : high - first]

        numbers = range(begin // size, -(-end // size)) if target.nbytes else range(0)
        if len(numbers) < 2:
            for number in numbers:
                take(number)
        else:
            for _ in pool.map(take, numbers):
                pass

    def chunks_of(self, begin: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Divide a range of the payload at the chunks' boundaries.

        Args:
            begin: first byte, within the payload.
            size: length of the range in bytes.

        Yields:
            Number of the chunk, and begin and end of the range's bytes within the chunk.
        """
        chunk, end = chunk_bytes(self._plan.payload_bytes), begin + size
        while begin < end:
            number, first = divmod(begin, chunk)
            last = min(chunk, first + end - begin)
            yield number, first, last
            begin += last - first

    def chunk(self, number: int) -> bytearray:
        """Return a verified chunk of the payload. The caller must not change it.

        Args:
            number: index of the chunk within the payload.

        Returns:
            uint8[size of the chunk].

        Raises:
            CorruptCheckpoint: the chunk does not hash to its digest.
            StoreFailure: the object cannot be read.
        """
        return self._chunk(number)

    def _chunk(self, number: int) -> bytearray:
        if (known := self._cache.get((self.rank, number))) is not None:
            return known
        begin, end = chunk_range(number, self._plan.payload_bytes)
        chunk = bytearray(end - begin)
        by_object: dict[int, list[_Span]] = {}
        for span in self._pieces(begin, end):
            by_object.setdefault(id(span.stored), []).append(span)
        for pieces in by_object.values():
            if len(by_object) == 1:
                _read_alone(pieces, begin, chunk)
            else:
                with self._cache.mixing:
                    _read_mixed(pieces, begin, chunk)
        index_begin, index = self._plan.index_offset, self._plan.index
        low, high = max(begin, index_begin), min(end, index_begin + len(index))
        if low < high:
            chunk[low - begin : high - begin] = index[low - index_begin : high - index_begin]
        expected = self._plan.chunk_digests[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)]
        if digest(chunk) != expected:
            raise CorruptCheckpoint(
                f"{self._stored.name}: bytes {begin:,} to {end:,} of the shard do not hash to their digest; use "
                "another checkpoint"
            )
        self._cache.put((self.rank, number), chunk)
        return chunk

    def _pieces(self, begin: int, end: int) -> Iterator[_Span]:
        """Yield where a payload range's tensor bytes are stored: in the shard's own object or in shared objects."""
        number = max(0, bisect_right(self._begins, begin) - 1)
        for span in islice(self._spans, number, None):
            if span.begin >= end:
                return
            first, last = max(span.begin, begin), min(span.end, end)
            if first < last:
                yield _Span(first, last, span.stored, span.place + first - span.begin)


@dataclass(frozen=True, slots=True)
class _Span:
    """A range of a shard's payload, and the stored object that contains its bytes."""

    begin: int
    end: int
    stored: StoredObject
    place: int
    """Position of the range's first byte within the stored object."""


def _read_alone(pieces: Sequence[_Span], begin: int, chunk: bytearray) -> None:
    """Read a chunk whose pieces are all in one object, without memory for a second chunk.

    The payload has padding between tensors, and the object has none. The function therefore reads all pieces, without
    gaps, into the end of the chunk's memory. It then moves each piece, in order, to its position in the chunk. A move
    never overwrites a piece that is not moved yet: those pieces fill the end of the memory without gaps, and in the
    chunk they need at least as much space behind the moved piece. This requires that no tensors overlap, which
    `plan_restore` has checked.

    Args:
        pieces: the pieces of the chunk in order, all in one object.
        begin: position of the chunk's first byte in the payload.
        chunk: receives the pieces; the function sets the padding to zero.
    """
    with memoryview(chunk) as target:
        place = pieces[0].place
        free = len(target) - (pieces[-1].place + pieces[-1].end - pieces[-1].begin - place)
        pieces[0].stored.read_into(place, target[free:])
        moved = 0
        for piece in pieces:
            first, last = piece.begin - begin, piece.end - begin
            source = free + piece.place - place
            target[first:last] = target[source : source + last - first]
            target[moved:first] = bytes(first - moved)
            moved = last
        target[moved:] = bytes(len(target) - moved)


def _read_mixed(pieces: Sequence[_Span], begin: int, chunk: bytearray) -> None:
    """Read one object's pieces of a chunk whose pieces are in several objects. Called once per object.

    The function first reads the pieces into memory of its own, and then copies each piece to its position in the chunk.
    It cannot read them into the chunk's free memory, because that memory may already contain pieces of other objects.

    Args:
        pieces: the pieces of the chunk in order, all in one object.
        begin: position of the chunk's first byte in the payload.
        chunk: receives the pieces; all other bytes stay unchanged.
    """
    place, stop = pieces[0].place, pieces[-1].place + pieces[-1].end - pieces[-1].begin
    with memoryview(pieces[0].stored.read(place, stop)) as data:
        for piece in pieces:
            at, count = piece.place - place, piece.end - piece.begin
            chunk[piece.begin - begin : piece.end - begin] = data[at : at + count]


def _spans_of(stored: StoredObject, data_begin: int, spans: Sequence[tuple[int, int]]) -> Iterator[_Span]:
    for begin, end in spans:
        yield _Span(begin, end, stored, data_begin)
        data_begin += end - begin


def _shared_object(group: SharedGroup, shared: Mapping[str, StoredObject], stored: StoredObject) -> StoredObject:
    """Return the opened S3 object that contains a group of tensors that several shards share.

    Raise CorruptCheckpoint if the manifest lacks this object, or if its size differs from `group.object_bytes`.
    """
    if (found := shared.get(group.sha256)) is None:
        raise CorruptCheckpoint(f"{stored.name} needs the shared object {group.sha256}, which the manifest lacks")
    if found.size != group.object_bytes:
        raise CorruptCheckpoint(f"{found.name} has {found.size:,} bytes; {stored.name} says {group.object_bytes:,}")
    return found


def _read_header(stored: StoredObject, manifest: CheckpointManifest, expected: ManifestShard) -> tuple[Restore, int]:
    """Read and check a shard object's header. Return the shard's layout, and the tensor data's offset in bytes."""
    if stored.size != expected.object_bytes:
        raise CorruptCheckpoint(f"{stored.name} has {stored.size:,} bytes; the manifest says {expected.object_bytes:,}")
    (length,) = LENGTH.unpack(stored.read(0, LENGTH.size))
    if length > min(MAX_HEADER_BYTES, stored.size - LENGTH.size):
        raise CorruptCheckpoint(f"{stored.name} announces a header of {length:,} bytes")
    try:
        plan = plan_restore(bytes(stored.read(LENGTH.size, LENGTH.size + length)), stored.size)
    except (CorruptObject, ProtocolError) as error:
        raise CorruptCheckpoint(f"{stored.name}: {error}") from error
    if (plan.payload_bytes, plan.payload_digest.hex()) != (expected.payload_bytes, expected.payload_digest):
        raise CorruptCheckpoint(f"{stored.name} holds another shard than the manifest names")
    stated = (plan.job, plan.run, plan.rank, plan.step, plan.origin_generation, plan.layout_hash.hex())
    named = (manifest.job, manifest.run, expected.rank, manifest.step, expected.origin_generation, expected.layout_hash)
    if stated != tuple(map(str, named)):
        raise CorruptCheckpoint(f"{stored.name} is a shard of {stated}; the manifest names {named}")
    return plan, LENGTH.size + length
