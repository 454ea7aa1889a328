"""Verifies requested checkpoints in S3, and stores for each whether its objects are intact (the verdict).

A shard is intact if its object exists, has Everstep's header, and has a payload with the manifest's digest. The payload
consists of the bytes that a restore reads from the shard's object and from *shared objects*, which several shards need.
A shared object is intact if its name is the hash of its content. The verifier reads each intact shared object once per
checkpoint, however many shards need it. Only chunks that contain bytes of both a shared object and a shard's own object
are read again for each shard.

The loop reads one checkpoint at a time, as a stream in a thread. Requests are rows of the database, so a restarted
server starts the verification again. If two servers verify the same checkpoint, both store the same verdict.

Invariant: this module stores a verdict only after it could read everything. If it could not, the request stays with
the reason, and is tried again later. Damage counts only if two reads find the same.

The module has more than 500 lines. A verification and its reads share the readers of one checkpoint.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from operator import attrgetter
from typing import Final, Protocol

import xxhash

from control_plane.cloud.errors import CloudError, GarbledAnswer, NotFound
from control_plane.cloud.objects import ObjectInfo, ServiceStore, require_missing
from control_plane.core.verification import CheckpointVerdict, Damage, DamageKind, blocked
from control_plane.db import checkpoints
from control_plane.db.checkpoints import SavedCheckpoint
from control_plane.db.session import Database
from control_plane.loop.repeating import repeat
from everstep.protocol.agent_messages import Obstacle
from everstep.protocol.errors import CorruptObject, ProtocolError, UnknownVersion
from everstep.protocol.manifest import ManifestShard, PartsHasher
from everstep.protocol.plan import ObjectReference
from everstep.protocol.safetensors import LENGTH, MAX_HEADER_BYTES, Restore, SharedSpans, plan_restore
from everstep.protocol.slot import chunk_count, chunk_range, shard_digest

log = logging.getLogger(__name__)

VERIFICATION_POLL_SECONDS = 1.0
ZEROS = bytes(1024 * 1024)
IDLE_BYTES = 64 * 1024 * 1024
"""Limit of bytes that the verifier reads from other objects while its connection to one object stays idle.

At the limit, the verifier closes the idle connection, because S3 ends connections that are idle for too long.
"""


class Verifier:
    """The background loop that verifies checkpoints.

    The verifier closes its connection to an object after it has read `idle_bytes` from other objects (see
    `IDLE_BYTES`). Tests pass a smaller value.
    """

    def __init__(
        self, database: Database, objects: ServiceStore, now: Callable[[], datetime], *, idle_bytes: int = IDLE_BYTES
    ) -> None:
        self._idle_bytes = idle_bytes
        self._database = database
        self._objects = objects
        self._now = now

    async def run(self, stop: asyncio.Event) -> None:
        """Verify requested checkpoints until `stop` is set.

        After a restart, the server repeats an unfinished verification from its start.
        """
        await repeat(
            partial(self.verify_next, stop.is_set),
            stop,
            seconds=VERIFICATION_POLL_SECONDS,
            trouble="could not verify a checkpoint",
        )

    def verify_next(self, is_stopped: Callable[[], bool] = lambda: False) -> bool:
        """Verify the checkpoint with the oldest request.

        The method blocks, for hours if the checkpoint is large. Call it in a thread.

        Args:
            is_stopped: function that the verifier calls before each chunk. If the function returns True, the verifier
                aborts and keeps the request.

        Returns:
            Whether the result of a verification was stored. False if S3 could not be read.
        """
        with self._database.read() as session:
            asked = checkpoints.to_verify(session, self._now())
        if asked is None:
            return False
        run_id, checkpoint = asked
        try:
            verdict = CheckpointVerdict.of(*self._damage(checkpoint, is_stopped))
        except _Stopped:
            return False
        except (CloudError, OSError, UnknownVersion) as error:
            self._wait(run_id, checkpoint, error)
            return False
        with self._database.write() as session:
            checkpoints.store_verdict(session, run_id, checkpoint, verdict=verdict, now=self._now())
        log.info("run %s: the checkpoint of step %d is %s", run_id, checkpoint.step, str(verdict) or "intact")
        return True

    def _wait(self, run_id: str, checkpoint: SavedCheckpoint, error: CloudError | OSError | UnknownVersion) -> None:
        match error:
            case CloudError():
                obstacle = error.obstacle
            case OSError():
                obstacle = Obstacle.NO_ANSWER
            case _:
                obstacle = Obstacle.REFUSED
        why = blocked(checkpoint.blocked, obstacle, str(error), self._now().timestamp())
        with self._database.write() as session:
            checkpoints.store_blocked(session, run_id, checkpoint, why)
        log.warning("run %s: could not verify the checkpoint of step %d: %s", run_id, checkpoint.step, error)

    def _damage(self, checkpoint: SavedCheckpoint, is_stopped: Callable[[], bool]) -> Iterator[Damage]:
        try:
            manifest = checkpoint.contents()
        except UnknownVersion:
            raise  # A newer version of Everstep wrote the manifest. It may be intact.
        except ProtocolError as error:
            yield Damage(kind=DamageKind.RECORD, detail=f"the stored manifest is invalid: {error}")
            return
        if manifest is None:
            yield Damage(kind=DamageKind.RECORD, detail="there is no manifest")
            return
        yield from _agreed(partial(self._manifest_damage, checkpoint))
        known = KnownContents(self._idle_bytes)
        for shard in manifest.shards:
            where = ObjectReference(bucket=checkpoint.bucket, key=shard.key)
            yield from _agreed(partial(shard_damage, self._objects, where, shard, is_stopped, known))

    def _manifest_damage(self, checkpoint: SavedCheckpoint) -> Damage | None:
        where = ObjectReference(bucket=checkpoint.bucket, key=checkpoint.manifest_key)
        expected = checkpoint.manifest or b""
        try:
            info = _existing(self._objects, where)
        except _Missing as error:
            return Damage(kind=DamageKind.MISSING, detail=f"the manifest is missing: {error}")
        body = self._objects.get(where)
        if body == expected:
            return None
        if len(body) != info.size_bytes or info.etag == hashlib.md5(expected, usedforsecurity=False).hexdigest():
            raise GarbledAnswer(f"S3 describes another object than it returns for s3://{where.bucket}/{where.key}")
        return Damage(kind=DamageKind.MANIFEST, detail="the manifest in S3 is not the one that was put")


def _agreed(read: Callable[[], Damage | None]) -> Iterator[Damage]:
    """Yield the damage that a read finds, if a second read of the same objects finds the same damage.

    Raises GarbledAnswer if the reads find different damage. If the second read finds none, the object is intact.
    """
    first = read()
    if first is None or (second := read()) is None:
        return
    if first != second:
        raise GarbledAnswer(f"two reads disagree: {first}; {second}")
    yield first


class _Stopped(Exception):
    """Raised in the middle of a read, because the server stops."""


class _Missing(CorruptObject):
    """The store proves that it lacks an object."""


class _OtherSize(CorruptObject):
    """An object has another size than expected."""


class _OtherContent(CorruptObject):
    """An object has other bytes than expected."""


_KINDS: Final = {
    _Missing: DamageKind.MISSING,
    _OtherSize: DamageKind.SIZE,
    _OtherContent: DamageKind.CONTENT,
}


def _existing(objects: ServiceStore, where: ObjectReference) -> ObjectInfo:
    try:
        return objects.head(where)
    except NotFound as error:
        require_missing(objects, where, where.key[: where.key.rfind("/run=") + 1])
        raise _Missing(f"s3://{where.bucket}/{where.key} does not exist") from error


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
        return Damage(kind=_KINDS.get(type(error), DamageKind.HEADER), rank=shard.rank, detail=str(error))
    return None


class KnownContents:
    """Verified facts about the S3 objects that several shards of one checkpoint share.

    The verification of the remaining shards reuses them.
    """

    def __init__(self, max_idle_bytes: int = IDLE_BYTES) -> None:
        self.max_idle_bytes = max_idle_bytes
        """The verifier closes the connection to an object after it has read this many bytes from other objects."""
        self.intact: set[str] = set()
        """Keys of the shared objects that were read completely and hash to their names.

        The set contains keys instead of names, because two shared objects in different folders can have the same name.
        A shared object holds either parameters that never change, or tensors that are equal on several ranks.
        """
        self._digests: dict[bytes, bytes] = {}

    def digest_of(self, pieces: Sequence[_Piece]) -> bytes | None:
        """Return the digest of a chunk if it is known, or None if the chunk must be read from S3.

        `pieces` are the ranges of S3 objects of which the chunk consists. The digest is known if all these objects are
        verified, and if a chunk of an earlier shard consists of the same ranges.
        """
        if any(piece.source is not None and piece.source.key not in self.intact for piece in pieces):
            return None
        return self._digests.get(_recipe(pieces))

    def store(self, pieces: Sequence[_Piece], digest: bytes) -> None:
        """Record the digest of a chunk whose bytes are all in S3 objects that several shards share.

        Other shards with the same chunk reuse the digest. A chunk with bytes that only one shard has is not recorded.
        """
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

    Args:
        objects: S3.
        where: bucket and key of the shard's object.
        shard: entry of the manifest, with the expected size and digest.
        is_stopped: function that the verifier calls before each chunk. If the function returns True, the verifier
            aborts the read.
        known: results of earlier shards of the same checkpoint. The function adds the results of this shard.

    Raises:
        _Stopped: the read was aborted.
        CorruptObject: the object differs from the manifest.
        CloudError: the object could not be read.
    """
    size = _existing(objects, where).size_bytes
    if size != shard.object_bytes:
        raise _OtherSize(f"the object has {size:,} bytes, but the manifest states {shard.object_bytes:,}")
    hasher = PartsHasher(shard.part_bytes) if shard.sha256 else None
    with ExitStack() as readers:

        def open_object(where: ObjectReference, size: int, hasher: Hasher | None) -> _Reader:
            return readers.enter_context(closing(_Reader(partial(objects.stream, where, end=size), is_stopped, hasher)))

        reader = open_object(where, size, hasher)
        (length,) = LENGTH.unpack(reader.take(LENGTH.size))
        if length > min(MAX_HEADER_BYTES, size):
            raise CorruptObject(f"the object announces a header of {length:,} bytes")
        plan = plan_restore(reader.take(length), size)
        if (plan.payload_bytes, plan.payload_digest.hex()) != (shard.payload_bytes, shard.payload_digest):
            raise CorruptObject("the object's header describes another shard than the manifest")
        spans = _spans(plan.spans, _Source(reader))
        hashed: list[tuple[str, ObjectReference, Hasher]] = []
        for each in plan.shared:
            place, sha256 = _place_of(each, where), each.group.sha256
            whole: Hasher | None = None if place.key in known.intact else hashlib.sha256()
            if (found_bytes := _existing(objects, place).size_bytes) != each.group.object_bytes:
                raise _OtherSize(
                    f"{place.key} has {found_bytes:,} bytes; the shard's object says {each.group.object_bytes:,}"
                )
            shared = open_object(place, found_bytes, whole)
            if whole is None:
                shared.skip(each.group.data_begin)
            else:
                shared.take(each.group.data_begin)
                shared.close()
            spans += _spans(each.spans, _Source(shared, place.key))
            if whole is not None:
                hashed.append((sha256, place, whole))
        found = _digest(plan, sorted(spans, key=attrgetter("begin", "end")), known)
    for sha256, place, whole in hashed:
        if whole.hexdigest() != sha256:
            raise _OtherContent(f"{place.key} hashes to {whole.hexdigest()}, which is not its name")
        known.intact.add(place.key)
    if found != shard.payload_digest:
        raise _OtherContent(f"the object's content hashes to {found}; the manifest says {shard.payload_digest}")
    if hasher is not None and (parts := hasher.hexdigest()) != shard.sha256:
        raise _OtherContent(f"the object's SHA-256 is {parts}; the manifest says {shard.sha256}")


def _place_of(shared: SharedSpans, where: ObjectReference) -> ObjectReference:
    try:
        return ObjectReference(bucket=where.bucket, key=shared.key(where.key))
    except ProtocolError as error:
        raise CorruptObject(str(error)) from error


@dataclass(frozen=True, slots=True)
class _Source:
    """An S3 object that contains bytes of a shard's payload: the shard's own object, or a shared object."""

    reader: _Reader
    key: str = ""
    """Key of the shared object; empty for the shard's own object."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A range of a shard's payload, with the source of its bytes."""

    begin: int
    end: int
    source: _Source | None = None
    """The object that holds the bytes. None for zeros, and for the index (the list of the payload's tensors)."""
    place: int = 0
    """Position of the first byte in the tensor data of `source`. A source is read in rising order of this position."""
    index: bytes = b""
    """The bytes of the payload's index (the list of its tensors), if the range lies in the index."""

    def part(self, begin: int, end: int) -> _Piece:
        """Return this range of the shard's payload, cut to the positions from `begin` to `end` of the payload."""
        first, last = max(begin, self.begin), min(end, self.end)
        index = self.index[first - self.begin : last - self.begin]
        return _Piece(first, last, self.source, self.place + first - self.begin, index)


def _recipe(pieces: Sequence[_Piece]) -> bytes:
    """Return the key under which `KnownContents` stores a chunk's digest, so that other shards can reuse the digest.

    The key is a digest of the objects and positions in S3 from which the chunk's bytes come.
    """
    named = [
        (piece.end - piece.begin, piece.index, piece.source and (piece.source.key, piece.place)) for piece in pieces
    ]
    return hashlib.sha256(repr(named).encode()).digest()


def _spans(spans: Sequence[tuple[int, int]], source: _Source) -> list[_Piece]:
    """Return the ranges of a shard's payload whose bytes one S3 object contains, in the order of the object's data."""
    found: list[_Piece] = []
    place = 0
    for begin, end in spans:
        found.append(_Piece(begin, end, source, place))
        place += end - begin
    return found


def _pieces(plan: Restore, spans: Sequence[_Piece]) -> Iterator[_Piece]:
    """Yield all ranges of the payload in order: tensors, zeros between tensors, and the index (the list of tensors)."""
    position = 0
    index = _Piece(plan.index_offset, plan.index_offset + len(plan.index), index=plan.index)
    for piece in (*spans, index, _Piece(plan.payload_bytes, plan.payload_bytes)):
        if piece.begin > position:
            yield _Piece(position, piece.begin)
        if piece.end > piece.begin:
            yield piece
        position = max(position, piece.end)


def _digest(plan: Restore, spans: Sequence[_Piece], known: KnownContents) -> str:
    """Return the digest of the payload that a restore would read from the objects.

    Args:
        plan: the source of each byte.
        spans: the ranges of the payload with tensors, in the order of the payload.
        known: digests of chunks that need not be read again. The function adds new digests.

    Returns:
        The digest, hexadecimal.
    """
    digests = bytearray()
    idle_bytes: dict[_Reader, int] = dict.fromkeys((span.source.reader for span in spans if span.source), 0)
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
                    piece.source.reader.skip(piece.end - piece.begin)
        digests += found
    return shard_digest(bytes(digests), plan.payload_bytes).hex()


def _read(pieces: Sequence[_Piece], idle_bytes: dict[_Reader, int], max_idle_bytes: int) -> bytes:
    """Read one chunk from S3 and return its digest.

    Each reader has an open connection to one S3 object. `idle_bytes` counts, for each reader, the bytes that other
    readers have read since its last read. If the count of a reader exceeds `max_idle_bytes`, the function closes that
    reader's connection.
    """
    chunk = xxhash.xxh3_128()
    for piece in pieces:
        size = piece.end - piece.begin
        if piece.source is None:
            chunk.update(piece.index)
            for begin in range(0, size - len(piece.index), len(ZEROS)):
                chunk.update(ZEROS[: size - begin])
            continue
        for each in idle_bytes:
            idle_bytes[each] = 0 if each is piece.source.reader else idle_bytes[each] + size
            if idle_bytes[each] > max_idle_bytes:
                each.close()
        for read in piece.source.reader.pieces(size):
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
    """Reads an S3 object from its start to its end. The caller chooses how many bytes each call reads.

    Args:
        stream: returns the object's bytes from a position on.
        is_stopped: function that is called before each piece of bytes is read. The result True aborts the read.
        hasher: receives all bytes that are read.
    """

    def __init__(
        self, stream: Callable[..., Iterator[bytes]], is_stopped: Callable[[], bool], hasher: Hasher | None = None
    ) -> None:
        self._stream = stream
        self._chunks: Iterator[bytes] | None = None
        self._received = 0
        """Position in the object at which the stream continues."""
        self._is_stopped = is_stopped
        self._hasher = hasher
        self._left = memoryview(b"")

    def pieces(self, count: int) -> Iterator[memoryview]:
        """Yield the next `count` bytes in pieces, in the sizes that the stream delivers."""
        while count:
            if self._is_stopped():
                raise _Stopped
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
        """Pass over the next `count` bytes without reading them.

        The reader must have no hasher, because a digest would need these bytes.
        """
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
