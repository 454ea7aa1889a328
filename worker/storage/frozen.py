"""Stores the frozen tensors of shards: one object per content, shared by all checkpoints and ranks of a run.

    tensors that the script declares frozen ─▶ groups ─▶ SHA-256 ─▶ run=<run>/frozen/<sha256>.safetensors

A frozen object is sent only if S3 does not have it. A group is a sequence of tensors with about `GROUP_BYTES`, which
one object stores. The script's declaration can be wrong, for example for averaged weights. If the content of a group
has changed since the last upload, the shard's own object contains its tensors.

Invariant: the name of a frozen object contains the SHA-256 of its bytes. No rank overwrites it with other bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import xxhash

from everstep.protocol.ids import Step
from everstep.protocol.manifest import frozen_key
from everstep.protocol.plan import ObjectReference
from everstep.protocol.safetensors import FrozenGroup, encode_frozen_header
from everstep.protocol.slot import TensorEntry
from worker.errors import CorruptCheckpoint, StoreDenied
from worker.shm.slot_file import SlotFile
from worker.storage.object_store import ObjectStore, OnStored, StoredObject

GROUP_BYTES = 256 * 1024 * 1024
"""A group that has at least this number of bytes receives no further tensor. No tensor is divided.

Smaller objects would need more requests per upload. With larger objects, ranks would share the work less evenly.
"""
LEAST_BYTES = 1024 * 1024
"""Minimum bytes of the last group. If fewer bytes of frozen tensors remain, the shard's own object contains them.

For so few bytes, the requests for a separate object would take longer than the transfer of the bytes.
"""
_PIECE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Seen:
    """The digests of one group of frozen tensors, as the last upload computed them."""

    step: Step
    digest: bytes
    """xxh3-128 digest of the bytes that the group's object in S3 would have: a header, then the tensors."""
    sha256: str
    """SHA-256 of the same bytes; empty if they differed from the bytes of the previous upload."""


class FrozenTensors:
    """Stores the frozen tensors of one shard during one generation, and remembers their digests.

    Only one upload at a time may use an instance.
    """

    def __init__(self, *, group_bytes: int = GROUP_BYTES, least_bytes: int = LEAST_BYTES) -> None:
        """Create the object before the shard's first upload.

        Args:
            group_bytes: as `GROUP_BYTES`.
            least_bytes: as `LEAST_BYTES`.
        """
        self._group_bytes = group_bytes
        self._least_bytes = least_bytes
        self._seen: dict[tuple[TensorEntry, ...], _Seen] = {}

    def store(
        self,
        objects: ObjectStore,
        slot: SlotFile,
        entries: Sequence[TensorEntry],
        where: ObjectReference,
        world_size: int,
        *,
        on_begun: Callable[[str, int], None],
        on_stored: OnStored,
        check: Callable[[], None],
    ) -> tuple[FrozenGroup, ...]:
        """Store the shard's frozen tensors that S3 does not have.

        Blocks: call it in a thread. Each rank begins with another object, so that ranks with equal tensors share the
        work. Two ranks that send the same object at the same time store the same bytes.

        Args:
            objects: object store that receives the frozen objects.
            slot: mapped file of the slot, which is sealed and pinned.
            entries: all tensors of the slot, in order.
            where: bucket and key of the shard's own object.
            world_size: number of ranks.
            on_begun: called with the name and the size of each object that is sent.
            on_stored: called with the bytes of each part that S3 has stored.
            check: raises an error if the upload was cancelled.

        Returns:
            The groups whose objects are complete in S3, in the order of their tensors. The shard's own object must
            contain all other tensors.

        Raises:
            StorageError: the subtype shows whether to retry.
            CorruptCheckpoint: the slot changed during the call.
            OversizedMessage: a header would exceed the limit of safetensors.
        """
        groups, seen = [], {}
        for numbers in self._divide(entries):
            tensors = tuple(entries[number] for number in numbers)
            seen[tensors] = now = self._look(slot, tensors, check)
            if now.sha256:
                groups.append(_group(tensors, numbers, now.sha256))
        self._seen = seen
        first = slot.header.owner_rank * len(groups) // max(world_size, slot.header.owner_rank + 1)
        for group in (*groups[first:], *groups[:first]):
            place = ObjectReference(bucket=where.bucket, key=frozen_key(where.key, group.sha256))
            found = _head(objects, place)
            if found is None or found.bytes != group.object_bytes:
                on_begun(f"s3://{place.bucket}/{place.key}", group.object_bytes)
                pieces = _verified(slot, [entries[number] for number in group.tensors], group.sha256, check)
                objects.put_stream(place, pieces, group.object_bytes, on_stored=on_stored)
        return tuple(groups)

    def _divide(self, entries: Sequence[TensorEntry]) -> Iterator[tuple[int, ...]]:
        """Yield the positions of the frozen tensors of each group."""
        numbers: list[int] = []
        size = 0
        for number, entry in enumerate(entries):
            if entry.is_frozen and entry.bytes:
                numbers.append(number)
                size += entry.bytes
            if size >= self._group_bytes:
                yield tuple(numbers)
                numbers, size = [], 0
        if numbers and size >= self._least_bytes:
            yield tuple(numbers)

    def _look(self, slot: SlotFile, tensors: tuple[TensorEntry, ...], check: Callable[[], None]) -> _Seen:
        """Return the digests of a group. The SHA-256 is empty if the group has changed since the last upload."""
        step, last = slot.header.step, self._seen.get(tensors)
        fast = xxhash.xxh3_128()
        for piece in _pieces(slot, tensors, check):
            fast.update(piece)
        digest = fast.digest()
        if last is not None and last.digest == digest and (last.sha256 or last.step == step):
            return last
        if last is not None and last.digest != digest:
            return _Seen(step, digest, "")
        whole = hashlib.sha256()
        for piece in _pieces(slot, tensors, check):
            whole.update(piece)
        return _Seen(step, digest, whole.hexdigest())


def _head(objects: ObjectStore, place: ObjectReference) -> StoredObject | None:
    """Return the description of a frozen object, or None if it does not exist.

    If the role may not list the bucket, S3 answers "access denied" for a missing object. The result is then None, too.
    If the role lacks other permissions, the following upload fails with the same error.
    """
    try:
        return objects.head(place)
    except StoreDenied:
        return None


def _group(tensors: Sequence[TensorEntry], numbers: tuple[int, ...], sha256: str) -> FrozenGroup:
    data_begin = len(encode_frozen_header(tensors))
    return FrozenGroup(
        sha256=sha256,
        object_bytes=data_begin + sum(entry.bytes for entry in tensors),
        data_begin=data_begin,
        tensors=numbers,
    )


def _pieces(slot: SlotFile, tensors: Sequence[TensorEntry], check: Callable[[], None]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a group's object in S3: a header, then the tensors."""
    yield encode_frozen_header(tensors)
    for entry in tensors:
        end = entry.offset + entry.bytes
        for start in range(entry.offset, end, _PIECE_BYTES):
            check()
            yield slot.payload(start, min(end, start + _PIECE_BYTES))


def _verified(
    slot: SlotFile, tensors: Sequence[TensorEntry], sha256: str, check: Callable[[], None]
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a group's object in S3.

    After the last piece, raise CorruptCheckpoint if the SHA-256 of the bytes differs from `sha256`.
    """
    whole = hashlib.sha256()
    for piece in _pieces(slot, tensors, check):
        whole.update(piece)
        yield piece
    if whole.hexdigest() != sha256:
        raise CorruptCheckpoint(
            f"step {slot.header.step} of rank {slot.header.owner_rank} in memory changed while it was uploaded"
        )
