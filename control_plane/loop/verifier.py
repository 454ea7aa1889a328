"""Verifies checkpoints in S3 at a user's request, and stores the verdict.

A shard is intact if its object exists, has Everstep's header, and has a payload with the manifest's digest. The payload
consists of the bytes that a restore reads from the object and from frozen objects. A frozen object is intact if it
hashes to its name.

The loop reads one checkpoint at a time, as a stream in a thread. Requests are rows of the database, so a restarted
server starts the verification again. If two servers verify the same checkpoint, both store the same verdict.

Invariant: this module writes only verdicts. It stores no verdict while S3 is unreachable.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from datetime import datetime
from functools import partial
from operator import itemgetter
from typing import Protocol

from control_plane.cloud.errors import CloudError
from control_plane.cloud.objects import ObjectStore
from control_plane.db import checkpoints
from control_plane.db.checkpoints import CheckpointRecord
from control_plane.db.session import Database
from control_plane.loop.repeating import repeat
from everstep.protocol.errors import CorruptObject, ProtocolError
from everstep.protocol.manifest import ManifestShard, PartsHasher, frozen_key
from everstep.protocol.plan import ObjectReference
from everstep.protocol.safetensors import LENGTH, MAX_HEADER_BYTES, FrozenGroup, Restore, plan_restore
from everstep.protocol.slot import ShardHasher

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
ZEROS = bytes(1024 * 1024)
IDLE_BYTES = 64 * 1024 * 1024
"""Bytes that may be read from other objects while a connection is idle. S3 ends connections that are idle too long."""


class Verifier:
    """The loop that verifies checkpoints."""

    def __init__(self, database: Database, objects: ObjectStore, now: Callable[[], datetime]) -> None:
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
            seconds=LOOK_SECONDS,
            trouble="could not verify a checkpoint",
        )

    def verify_next(self, is_stopped: Callable[[], bool] = lambda: False) -> bool:
        """Verify the checkpoint with the oldest request.

        The method blocks, for hours if the checkpoint is large. Call it in a thread.

        Args:
            is_stopped: function that the verifier calls before each chunk. If the function returns True, the verifier
                aborts and keeps the request.

        Returns:
            Whether a verdict was stored.

        Raises:
            CloudError: S3 failed with a retryable error. The request stays stored.
        """
        with self._database.read() as session:
            asked = checkpoints.to_verify(session)
        if asked is None:
            return False
        run_id, checkpoint = asked
        try:
            verdict = "; ".join(self._faults(checkpoint, is_stopped))
        except _Stopped:
            return False
        with self._database.write() as session:
            checkpoints.store_verdict(session, run_id, checkpoint, verdict=verdict, now=self._now())
        log.info("run %s: the checkpoint of step %d is %s", run_id, checkpoint.step, verdict or "intact")
        return True

    def _faults(self, checkpoint: CheckpointRecord, is_stopped: Callable[[], bool]) -> Iterator[str]:
        try:
            manifest = checkpoint.contents()
        except ProtocolError as error:
            yield f"the stored manifest is invalid: {error}"
            return
        if manifest is None:
            yield "there is no manifest"
            return
        try:
            if (
                self._objects.get(ObjectReference(bucket=checkpoint.bucket, key=checkpoint.manifest_key))
                != checkpoint.manifest
            ):
                yield "the manifest in S3 is not the one that was put"
        except CloudError as error:
            if error.retryable:
                raise
            yield f"the manifest cannot be read: {error.message}"
        for shard in manifest.shards:
            try:
                verify_shard(self._objects, ObjectReference(bucket=checkpoint.bucket, key=shard.key), shard, is_stopped)
            except CorruptObject as error:
                yield f"rank {shard.rank}: {error}"
            except CloudError as error:
                if error.retryable:
                    raise
                yield f"rank {shard.rank}: {error.message}"


class _Stopped(Exception):
    """Raised in the middle of a read, because the server stops."""


def verify_shard(
    objects: ObjectStore, where: ObjectReference, shard: ManifestShard, is_stopped: Callable[[], bool]
) -> None:
    """Read one shard's object completely, and compare the object with the manifest.

    Args:
        objects: S3.
        where: bucket and key of the shard's object.
        shard: entry of the manifest, with the expected size and digest.
        is_stopped: function that the verifier calls before each chunk. If the function returns True, the verifier
            aborts the read.

    Raises:
        _Stopped: the read was aborted.
        CorruptObject: the object differs from the manifest.
        CloudError: the object could not be read.
    """
    size = objects.head(where).size_bytes
    if size != shard.object_bytes:
        raise CorruptObject(f"the object has {size:,} bytes, but the manifest states {shard.object_bytes:,}")
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
        spans = [(begin, end, reader) for begin, end in plan.spans]
        frozen: list[tuple[FrozenGroup, ObjectReference, Hasher]] = []
        for each in plan.frozen:
            place = _frozen_place(where, each.group)
            whole: Hasher = hashlib.sha256()
            if (found_bytes := objects.head(place).size_bytes) != each.group.object_bytes:
                raise CorruptObject(
                    f"{place.key} has {found_bytes:,} bytes; the shard's object says {each.group.object_bytes:,}"
                )
            shared = open_object(place, found_bytes, whole)
            shared.take(each.group.data_begin)
            shared.close()
            spans += [(begin, end, shared) for begin, end in each.spans]
            frozen.append((each.group, place, whole))
        found = _digest(plan, sorted(spans, key=itemgetter(0, 1)))
    for group, place, whole in frozen:
        if whole.hexdigest() != group.sha256:
            raise CorruptObject(f"{place.key} hashes to {whole.hexdigest()}, which is not its name")
    if found != shard.payload_digest:
        raise CorruptObject(f"the object's content hashes to {found}; the manifest says {shard.payload_digest}")
    if hasher is not None and (sha256 := hasher.hexdigest()) != shard.sha256:
        raise CorruptObject(f"the object's SHA-256 is {sha256}; the manifest says {shard.sha256}")


def _frozen_place(where: ObjectReference, group: FrozenGroup) -> ObjectReference:
    try:
        return ObjectReference(bucket=where.bucket, key=frozen_key(where.key, group.sha256))
    except ProtocolError as error:
        raise CorruptObject(str(error)) from error


def _digest(plan: Restore, spans: Sequence[tuple[int, int, _Reader]]) -> str:
    """Return the digest of the payload that a restore would read from the objects.

    Args:
        plan: the source of each byte.
        spans: begin, end and reader of each tensor, in the order of the payload.

    Returns:
        The digest, hexadecimal.
    """
    hasher, position = ShardHasher(plan.payload_bytes), 0
    idle_bytes: dict[_Reader, int] = dict.fromkeys((reader for *_, reader in spans), 0)

    def zeros(end: int) -> None:
        for begin in range(position, end, len(ZEROS)):
            hasher.update(ZEROS[: min(len(ZEROS), end - begin)])

    for begin, end, reader in spans:
        zeros(begin)
        for each in idle_bytes:
            idle_bytes[each] = 0 if each is reader else idle_bytes[each] + end - begin
            if idle_bytes[each] > IDLE_BYTES:
                each.close()
        for piece in reader.pieces(end - begin):
            hasher.update(piece)
        position = max(position, end)
    zeros(plan.index_offset)
    hasher.update(plan.index)
    position = plan.index_offset + len(plan.index)
    zeros(plan.payload_bytes)
    return hasher.digest().hex()


class Hasher(Protocol):
    """A digest over the bytes that a reader returns."""

    def update(self, data: memoryview, /) -> object:
        """Add the next bytes."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes, hexadecimal. The caller adds no more bytes afterwards."""
        ...


class _Reader:
    """Reads an object by byte count.

    Args:
        stream: returns the object's bytes from a position on.
        is_stopped: function that is called before each chunk. The result True aborts the read.
        hasher: receives all bytes that are read.
    """

    def __init__(
        self, stream: Callable[..., Iterator[bytes]], is_stopped: Callable[[], bool], hasher: Hasher | None = None
    ) -> None:
        self._stream = stream
        self._chunks: Iterator[bytes] | None = None
        self._received = 0
        """End of the newest chunk within the object."""
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
                    raise CorruptObject("the object ends too early")
                self._received += len(chunk)
                self._left = memoryview(chunk)
            piece, self._left = self._left[:count], self._left[count:]
            count -= piece.nbytes
            if self._hasher is not None:
                self._hasher.update(piece)
            yield piece

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
