"""Divides the stored objects of one shard into parts that several nodes can read and verify separately.

    part     consecutive chunks of the shard's payload, together about 8 MiB
    source   for each part: at most one range of the shard's own S3 object, and at most one of each shared object

Invariant: `read` returns only if every chunk of the part has the digest that the object's header names.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from everstep.protocol import safetensors
from everstep.protocol.errors import CorruptObject, ProtocolError
from everstep.protocol.plan import ObjectReference
from everstep.protocol.safetensors import Restore
from everstep.protocol.slot import DIGEST_BYTES, chunk_bytes, chunk_count, chunk_range, digest
from worker.errors import CorruptCheckpoint
from worker.storage.object_store import ObjectStore, Span

PART_CHUNKS = 2
"""Number of chunks of 4 MiB per part. A part of larger chunks has fewer chunks, but at least one."""


@dataclass(frozen=True, slots=True)
class _Source:
    """One S3 object of a shard, and the ranges (spans) of the shard's payload that the object contains."""

    reference: ObjectReference
    spans: tuple[Span, ...]
    begins: tuple[int, ...]
    """Position of the first byte of each span within the payload."""
    places: tuple[int, ...]
    """Position of the first byte of each span within the S3 object."""

    @classmethod
    def of(cls, reference: ObjectReference, spans: Sequence[Span], data_begin: int) -> _Source:
        filled = [span for span in spans if span[0] < span[1]]
        places = []
        for begin, end in filled:
            places.append(data_begin)
            data_begin += end - begin
        return cls(reference, tuple(filled), tuple(begin for begin, _ in filled), tuple(places))

    def within(self, begin: int, end: int, after: int) -> tuple[int, list[Span]]:
        """Return the first byte in the object that belongs to `begin` to `end` of the payload, and the ranges to fill.

        Bytes of the object before position `after` are left out.
        """
        found: list[Span] = []
        place = 0
        for number in range(max(0, bisect_right(self.begins, begin) - 1), len(self.spans)):
            first, last = self.spans[number]
            if first >= end:
                break
            low = max(first, begin, first + after - self.places[number])
            high = min(last, end)
            if low < high:
                place = place if found else self.places[number] + low - first
                found.append((low, high))
        return place, found


class Parts:
    """Divides a payload into parts that can be read separately: whole chunks, numbered from 1. Immutable."""

    def __init__(self, payload_bytes: int) -> None:
        self.payload_bytes = payload_bytes
        self._chunks_per_part = max(1, PART_CHUNKS * chunk_bytes(0) // chunk_bytes(payload_bytes))
        self.count = -(-chunk_count(payload_bytes) // self._chunks_per_part)

    @property
    def numbers(self) -> range:
        """The numbers of all parts, from 1."""
        return range(1, self.count + 1)

    def chunks(self, number: int) -> range:
        """Return the indices of the payload's chunks that part `number` consists of."""
        first = (number - 1) * self._chunks_per_part
        return range(first, min(first + self._chunks_per_part, chunk_count(self.payload_bytes)))

    def part_of(self, chunk: int) -> int:
        """Return the number of the part that contains the chunk with this index."""
        return chunk // self._chunks_per_part + 1

    def bounds(self, number: int) -> Span:
        """Return the positions in bytes at which part `number` begins and ends in the payload."""
        chunks = self.chunks(number)
        return chunk_range(chunks[0], self.payload_bytes)[0], chunk_range(chunks[-1], self.payload_bytes)[1]


class ShardParts(Parts):
    """Divides one shard into parts of whole chunks, numbered from 1, and reads parts from S3. Thread-safe."""

    def __init__(self, where: ObjectReference, header: bytes, object_bytes: int) -> None:
        """Decode the safetensors header, without its length field. Raises CorruptCheckpoint if it is damaged."""
        self.where = where
        self.header = header
        self.object_bytes = object_bytes
        name = f"s3://{where.bucket}/{where.key}"
        try:
            self.plan: Restore = safetensors.plan_restore(header, object_bytes)
            groups = [
                (ObjectReference(bucket=where.bucket, key=each.key(where.key)), each) for each in self.plan.shared
            ]
        except (CorruptObject, ProtocolError) as error:
            raise CorruptCheckpoint(f"{name}: {error}") from error
        self.data_begin = safetensors.LENGTH.size + len(header)
        """Position of the first byte of data in the object."""
        self.shared = {place: each.group.object_bytes for place, each in groups}
        """Size of each shared object that the shard needs."""
        self.data_begins = {place: each.group.data_begin for place, each in groups}
        """Position of the first byte of data in each shared object."""
        self._sources = [
            _Source.of(where, self.plan.spans, self.data_begin),
            *(_Source.of(place, each.spans, each.group.data_begin) for place, each in groups),
        ]
        super().__init__(self.plan.payload_bytes)

    def spans_of(self, place: ObjectReference) -> tuple[Span, ...]:
        """Return the non-empty ranges of the payload that an S3 object fills, in the order of the object's data."""
        return next(source.spans for source in self._sources if source.reference == place)

    def parts_with(self, place: ObjectReference) -> frozenset[int]:
        """Return the numbers of the shard's parts that contain bytes of the S3 object `place`."""
        width = chunk_bytes(self.plan.payload_bytes)
        return frozenset(
            number
            for begin, end in self.spans_of(place)
            for number in range(self.part_of(begin // width), self.part_of((end - 1) // width) + 1)
        )

    def read(
        self,
        objects: ObjectStore,
        number: int,
        target: memoryview,
        *,
        after: int = 0,
        present: Collection[ObjectReference] = (),
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Read one part (numbered from 1) into `target`, and verify its chunks. Blocks.

        `target` already contains the data before position `after` of the shard's object, and that of the shared objects
        in `present`. After a cancellation, its content is undefined. Raises CorruptCheckpoint if a chunk does not match
        its digest or an object ends too early, ObjectMissing, or another StorageError.
        """
        begin, end = self.bounds(number)
        filled: list[Span] = []
        for position, source in enumerate(self._sources):
            place, spans = source.within(begin, end, 0 if position else after)
            if spans and source.reference not in present and not is_cancelled():
                own = [(low - begin, high - begin) for low, high in spans]
                objects.read_range(source.reference, place, target, own, is_cancelled=is_cancelled)
            filled += source.within(begin, end, 0)[1]
        if is_cancelled():
            return
        self._fill_rest(target, begin, end, filled)
        self._verify(number, target, begin)

    def _fill_rest(self, target: memoryview, begin: int, end: int, filled: list[Span]) -> None:
        """Write the payload's index and the zeros between tensors, which S3 does not store as tensor data."""
        plan = self.plan
        first, last = max(begin, plan.index_offset), min(end, plan.index_offset + len(plan.index))
        if first < last:
            target[first - begin : last - begin] = plan.index[first - plan.index_offset : last - plan.index_offset]
            filled.append((first, last))
        position = begin
        for low, high in (*sorted(filled), (end, end)):
            if position < low:
                target[position - begin : low - begin] = bytes(low - position)
            position = max(position, high)

    def _verify(self, number: int, target: memoryview, begin: int) -> None:
        for chunk in self.chunks(number):
            first, last = chunk_range(chunk, self.plan.payload_bytes)
            with target[first - begin : last - begin] as piece:
                if digest(piece) != self.plan.chunk_digests[DIGEST_BYTES * chunk : DIGEST_BYTES * (chunk + 1)]:
                    raise CorruptCheckpoint(
                        f"s3://{self.where.bucket}/{self.where.key}: chunk {chunk} of the shard does not match its "
                        "digest"
                    )


def read_length(prefix: bytes | bytearray, object_bytes: int, name: str) -> int:
    """Return the size of the header that follows `prefix`. Raises CorruptCheckpoint if the object is too short."""
    try:
        (length,) = safetensors.LENGTH.unpack(prefix)
    except struct.error as error:
        raise CorruptCheckpoint(f"{name} has {object_bytes} bytes, too few for a shard") from error
    if length > min(safetensors.MAX_HEADER_BYTES, object_bytes - len(prefix)):
        raise CorruptCheckpoint(f"{name} claims a header of {length} bytes, more than it can contain")
    return int(length)
