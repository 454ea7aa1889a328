"""Reads all bytes of a shard from S3 that a restore needs, and compares them with the manifest of the checkpoint.

A shard is intact if its object exists, has Everstep's header, and has a payload with the manifest's digest. The payload
comes from the shard's object and from *shared objects*, which several shards need. A shared object is intact if its
name is the hash of its content. It is read once per checkpoint, except chunks that also contain bytes of a shard's own
object.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Protocol

import xxhash

from control_plane.cloud.errors import GarbledAnswer, NotFound
from control_plane.cloud.objects import ObjectInfo, ServiceStore, require_missing
from control_plane.core.verification import Damage, DamageKind
from everstep.protocol.errors import CorruptObject, ProtocolError
from everstep.protocol.manifest import ManifestShard, PartsHasher
from everstep.protocol.plan import ObjectReference
from everstep.protocol.safetensors import LENGTH, MAX_HEADER_BYTES, Restore, SharedSpans, plan_restore
from everstep.protocol.slot import chunk_count, chunk_range, shard_digest

ZEROS = bytes(1024 * 1024)
# S3 ends connections that are idle for too long.
IDLE_BYTES = 64 * 1024 * 1024
"""Limit of bytes that the verifier reads from other objects while its connection to one object stays idle."""


class Stopped(Exception):
    """Raised in the middle of a read, because the server stops."""


class Mismatch(CorruptObject):
    """An object differs from what the manifest, or another object, says about it."""

    def __init__(self, kind: DamageKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def existing(objects: ServiceStore, where: ObjectReference) -> ObjectInfo:
    """Return the description of an object. Raises Mismatch if the store proves that it lacks the object."""
    try:
        return objects.head(where)
    except NotFound as error:
        require_missing(objects, where, where.key[: where.key.rfind("/run=") + 1])
        raise Mismatch(DamageKind.MISSING, f"s3://{where.bucket}/{where.key} does not exist") from error


def shard_damage(
    objects: ServiceStore,
    where: ObjectReference,
    shard: ManifestShard,
    is_stopped: Callable[[], bool],
    known: KnownContents,
) -> Damage | None:
    """Return what is wrong with one shard, or None. The arguments are those of `verify_shard`."""
    try:
        verify_shard(objects, where, shard, is_stopped, known)
    except CorruptObject as error:
        kind = error.kind if isinstance(error, Mismatch) else DamageKind.HEADER
        return Damage(kind=kind, rank=shard.rank, detail=str(error))
    return None


class KnownContents:
    """Verified facts about the S3 objects that several shards of one checkpoint share."""

    def __init__(self, max_idle_bytes: int = IDLE_BYTES) -> None:
        self.max_idle_bytes = max_idle_bytes
        # Keys instead of names, because two shared objects in different folders can have the same name.
        self.intact: set[str] = set()
        """Keys of the shared objects that were read completely and hash to their names."""
        self._digests: dict[bytes, bytes] = {}

    def digest_of(self, pieces: Sequence[_Piece]) -> bytes | None:
        """Return the digest of a chunk that consists of `pieces`, or None if the chunk must be read from S3.

        The digest is known if all objects are verified, and a chunk of an earlier shard consists of the same ranges.
        """
        if any(piece.source is not None and piece.source.key not in self.intact for piece in pieces):
            return None
        return self._digests.get(_recipe(pieces))

    def store(self, pieces: Sequence[_Piece], digest: bytes) -> None:
        """Record the digest of a chunk for other shards, unless it has bytes that only one shard has."""
        if all(piece.source is None or piece.source.key for piece in pieces):
            self._digests[_recipe(pieces)] = digest


def verify_shard(
    objects: ServiceStore,
    where: ObjectReference,
    shard: ManifestShard,
    is_stopped: Callable[[], bool],
    known: KnownContents,
) -> None:
    """Read one shard's object completely, and compare the object with the manifest.

    The verifier calls `is_stopped` before each chunk, and aborts if it returns True. `known` receives the results of
    this shard.

    Raises:
        Stopped: the read was aborted.
        CorruptObject: the object differs from the manifest.
        CloudError: the object could not be read.
    """
    size = existing(objects, where).size_bytes
    if size != shard.object_bytes:
        raise Mismatch(
            DamageKind.SIZE, f"the object has {size:,} bytes, but the manifest states {shard.object_bytes:,}"
        )
    hasher = PartsHasher(shard.part_bytes) if shard.sha256 else None
    with ExitStack() as readers:

        def open_object(where: ObjectReference, size: int, hasher: Hasher | None, key: str = "") -> _Reader:
            stream = partial(objects.stream, where, end=size)
            return readers.enter_context(closing(_Reader(stream, is_stopped, hasher, key)))

        reader = open_object(where, size, hasher)
        (length,) = LENGTH.unpack(reader.take(LENGTH.size))
        if length > min(MAX_HEADER_BYTES, size):
            raise CorruptObject(f"the object announces a header of {length:,} bytes")
        plan = plan_restore(reader.take(length), size)
        if (plan.payload_bytes, plan.payload_digest.hex()) != (shard.payload_bytes, shard.payload_digest):
            raise CorruptObject("the object's header describes another shard than the manifest")
        spans = _spans(plan.spans, reader)
        hashed: list[tuple[str, ObjectReference, Hasher]] = []
        for each in plan.shared:
            place, sha256 = _place_of(each, where), each.group.sha256
            whole: Hasher | None = None if place.key in known.intact else hashlib.sha256()
            if (found_bytes := existing(objects, place).size_bytes) != each.group.object_bytes:
                raise Mismatch(
                    DamageKind.SIZE,
                    f"{place.key} has {found_bytes:,} bytes; the shard's object says {each.group.object_bytes:,}",
                )
            shared = open_object(place, found_bytes, whole, place.key)
            if whole is None:
                shared.skip(each.group.data_begin)
            else:
                shared.take(each.group.data_begin)
                shared.close()
            spans += _spans(each.spans, shared)
            if whole is not None:
                hashed.append((sha256, place, whole))
        found = _digest(plan, sorted(spans, key=attrgetter("begin", "end")), known)
    for sha256, place, whole in hashed:
        if whole.hexdigest() != sha256:
            raise Mismatch(DamageKind.CONTENT, f"{place.key} hashes to {whole.hexdigest()}, which is not its name")
        known.intact.add(place.key)
    if found != shard.payload_digest:
        raise Mismatch(
            DamageKind.CONTENT, f"the object's content hashes to {found}; the manifest says {shard.payload_digest}"
        )
    if hasher is not None and (parts := hasher.hexdigest()) != shard.sha256:
        raise Mismatch(DamageKind.CONTENT, f"the object's SHA-256 is {parts}; the manifest says {shard.sha256}")


def _place_of(shared: SharedSpans, where: ObjectReference) -> ObjectReference:
    try:
        return ObjectReference(bucket=where.bucket, key=shared.key(where.key))
    except ProtocolError as error:
        raise CorruptObject(str(error)) from error


@dataclass(frozen=True, slots=True)
class _Piece:
    """A range of a shard's payload, with the source of its bytes."""

    begin: int
    end: int
    source: _Reader | None = None
    """The reader of the object that holds the bytes. None for zeros, and for the index."""
    place: int = 0
    """Position of the first byte in the tensor data of `source`, which is read in rising order."""
    index: bytes = b""
    """The bytes of the payload's index, if the range lies in the index."""

    def part(self, begin: int, end: int) -> _Piece:
        """Return this range, cut to the positions from `begin` to `end` of the payload."""
        first, last = max(begin, self.begin), min(end, self.end)
        index = self.index[first - self.begin : last - self.begin]
        return _Piece(first, last, self.source, self.place + first - self.begin, index)


def _recipe(pieces: Sequence[_Piece]) -> bytes:
    """Return the key under which `KnownContents` stores a chunk's digest: a digest of the origins of its bytes."""
    named = [
        (piece.end - piece.begin, piece.index, piece.source and (piece.source.key, piece.place)) for piece in pieces
    ]
    return hashlib.sha256(repr(named).encode()).digest()


def _spans(spans: Sequence[tuple[int, int]], source: _Reader) -> list[_Piece]:
    """Return the ranges of a shard's payload that one S3 object contains, in the order of the object's data."""
    found: list[_Piece] = []
    place = 0
    for begin, end in spans:
        found.append(_Piece(begin, end, source, place))
        place += end - begin
    return found


def _pieces(plan: Restore, spans: Sequence[_Piece]) -> Iterator[_Piece]:
    """Yield all ranges of the payload in order: tensors, zeros between tensors, and the index."""
    position = 0
    index = _Piece(plan.index_offset, plan.index_offset + len(plan.index), index=plan.index)
    for piece in (*spans, index, _Piece(plan.payload_bytes, plan.payload_bytes)):
        if piece.begin > position:
            yield _Piece(position, piece.begin)
        if piece.end > piece.begin:
            yield piece
        position = max(position, piece.end)


def _digest(plan: Restore, spans: Sequence[_Piece], known: KnownContents) -> str:
    """Return the hexadecimal digest of the payload that a restore would read from the objects."""
    digests = bytearray()
    idle_bytes: dict[_Reader, int] = dict.fromkeys((span.source for span in spans if span.source), 0)
    left = deque(_pieces(plan, spans))
    for number in range(chunk_count(plan.payload_bytes)):
        begin, end = chunk_range(number, plan.payload_bytes)
        pieces: list[_Piece] = []
        while left and left[0].begin < end:
            pieces.append(left[0].part(begin, end))
            if left[0].end > end:
                break
            left.popleft()
        found = known.digest_of(pieces)
        if found is None:
            found = _read(pieces, idle_bytes, known.max_idle_bytes)
            known.store(pieces, found)
        else:
            for piece in pieces:
                if piece.source is not None:
                    piece.source.skip(piece.end - piece.begin)
        digests += found
    return shard_digest(bytes(digests), plan.payload_bytes).hex()


def _read(pieces: Sequence[_Piece], idle_bytes: dict[_Reader, int], max_idle_bytes: int) -> bytes:
    """Read one chunk from S3 and return its digest. Close connections that are idle for `max_idle_bytes`."""
    chunk = xxhash.xxh3_128()
    for piece in pieces:
        size = piece.end - piece.begin
        if piece.source is None:
            chunk.update(piece.index)
            for begin in range(0, size - len(piece.index), len(ZEROS)):
                chunk.update(ZEROS[: size - begin])
            continue
        for each in idle_bytes:
            idle_bytes[each] = 0 if each is piece.source else idle_bytes[each] + size
            if idle_bytes[each] > max_idle_bytes:
                each.close()
        for read in piece.source.pieces(size):
            chunk.update(read)
    found: bytes = chunk.digest()
    return found


class Hasher(Protocol):
    """An object that computes a digest of all bytes that a `_Reader` reads."""

    def update(self, data: memoryview, /) -> object:
        """Add the next bytes of the object to the digest."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes, hexadecimal. The caller adds no more bytes afterwards."""
        ...


class _Reader:
    """Reads an S3 object from its start to its end.

    `stream` returns the object's bytes from a position on. `key` is empty for a shard's own object.
    """

    def __init__(
        self, stream: Callable[..., Iterator[bytes]], is_stopped: Callable[[], bool], hasher: Hasher | None, key: str
    ) -> None:
        self.key = key
        self._stream = stream
        self._chunks: Iterator[bytes] | None = None
        self._received = 0
        self._is_stopped = is_stopped
        self._hasher = hasher
        self._left = memoryview(b"")

    def pieces(self, count: int) -> Iterator[memoryview]:
        """Yield the next `count` bytes in pieces, in the sizes that the stream delivers."""
        while count:
            if self._is_stopped():
                raise Stopped
            if not self._left.nbytes:
                if self._chunks is None:
                    self._chunks = self._stream(begin=self._received)
                chunk = next(self._chunks, b"")
                if not chunk:
                    raise GarbledAnswer("the connection ended before the end of the object")
                self._received += len(chunk)
                self._left = memoryview(chunk)
            piece, self._left = self._left[:count], self._left[count:]
            count -= piece.nbytes
            if self._hasher is not None:
                self._hasher.update(piece)
            yield piece

    def skip(self, count: int) -> None:
        """Pass over the next `count` bytes without reading them. The reader must have no hasher."""
        if count > self._left.nbytes:
            self.close()
            self._received += count
        else:
            self._left = self._left[count:]

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes as one object. Use `pieces` for large counts."""
        return b"".join(self.pieces(count))

    def close(self) -> None:
        """Close the stream's connection. A later read opens another one."""
        close = getattr(self._chunks, "close", None)
        if close is not None:
            close()
        self._received -= self._left.nbytes
        self._chunks, self._left = None, memoryview(b"")
