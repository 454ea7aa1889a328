"""Stores tensors that several shards share in S3 objects that all of these shards use.

    tensors that the script declares frozen ─▶ groups ─▶ SHA-256 ─▶ run=<run>/frozen/<sha256>.safetensors
    tensors that are equal on several ranks ─▶ division ─▶ SHA-256 ─▶ …/step=<step>/replicated/<sha256>.safetensors

A *frozen object* stores a group of about `GROUP_BYTES` for all checkpoints and ranks of a run. The script's declaration
can be wrong, for example for averaged weights, so a group whose content has changed is not treated as frozen.

A *replicated object* contains tensors that are equal on several ranks at one step. Each rank lists the tensors that
other ranks may also hold (its *offer*). `worker.core.upload_division` assigns equal tensors to objects, and each object
to the rank that writes it (the *division*).

Invariant: the name of a shared object contains the SHA-256 of its bytes. No rank overwrites it with other bytes.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import xxhash

from everstep.bulk import crc64
from everstep.protocol.ids import Step
from everstep.protocol.manifest import frozen_key, replicated_key
from everstep.protocol.plan import ObjectReference
from everstep.protocol.safetensors import SharedGroup, SharedGroups, encode_shared_header
from everstep.protocol.slot import DIGEST_BYTES, TensorEntry
from worker.core.upload_division import LEAST_BYTES, MAX_OFFERED, OWN, Division, Item
from worker.errors import CorruptCheckpoint, StoreDenied
from worker.shm.slot_file import SlotFile
from worker.storage.object_store import ObjectStore, OnStored, StoredObject

# Smaller groups would need more requests per upload. With larger groups, ranks would share the work less evenly.
GROUP_BYTES = 256 * 1024 * 1024
"""Size at which a group of frozen tensors is full. No tensor is divided."""
_PIECE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Seen:
    """Digests of one group of frozen tensors, as the last upload computed them."""

    step: Step
    digest: bytes
    sha256: str
    """Empty if the bytes differed from those of the previous upload."""
    crc: int = 0
    """CRC64NVME; valid if `sha256` is not empty."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The tensors of a shard at one step that other ranks may also hold. The coordinator's agent receives this list."""

    items: tuple[Item, ...]
    """First the groups of frozen tensors, then single tensors in the order of the payload."""
    tensors: tuple[tuple[int, ...], ...]
    """For each item, the positions of its tensors in the shard's list of tensors."""
    frozen: tuple[SharedGroup, ...]
    """The groups of frozen tensors, which are the first items in the same order."""
    crcs: tuple[int, ...]
    """CRC64NVME of the S3 object of each group in `frozen`."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One object in S3 that contains tensors of this shard which other ranks or checkpoints also use."""

    group: SharedGroup
    place: ObjectReference
    is_frozen: bool
    is_own: bool
    """True if this rank writes the object, False if another rank does."""
    crc: int


class SharedTensors:
    """Chooses the shared tensors of one shard in one generation. Several uploads may use one object at once."""

    def __init__(
        self, *, group_bytes: int = GROUP_BYTES, least_bytes: int = LEAST_BYTES, max_offered: int = MAX_OFFERED
    ) -> None:
        """Create the object, which has no digests of earlier uploads yet.

        A group is full at `group_bytes`. With fewer than `least_bytes` outside the groups, the offer contains no single
        tensors; a last group with fewer bytes is not formed. The offer contains the `max_offered` largest single
        tensors.
        """
        self._group_bytes = group_bytes
        self._least_bytes = least_bytes
        self._max_offered = max_offered
        self._lock = threading.Lock()
        """Guards the attributes below, which the threads of uploads share."""
        self._seen: dict[tuple[TensorEntry, ...], _Seen] = {}
        self._offers: dict[Step, Offer] = {}
        """The offers of running uploads, by step. Each attempt uses the same offer, until `forget`."""

    def look(self, slot: SlotFile, entries: Sequence[TensorEntry], check: Callable[[], None]) -> Offer:
        """Return the offer for a sealed and pinned slot, with its digests. Blocks. Each attempt returns the same offer.

        `check` raises an error if the upload was cancelled. Raises OversizedMessage if a header would exceed the limit
        of safetensors.
        """
        step = slot.header.step
        with self._lock:
            if step not in self._offers:
                self._offers[step] = self._offer(slot, entries, check)
            return self._offers[step]

    def forget(self, step: Step) -> None:
        """Drop the cached offer of `step` after the last attempt to upload it, on the event loop."""
        self._offers.pop(step, None)

    def _offer(self, slot: SlotFile, entries: Sequence[TensorEntry], check: Callable[[], None]) -> Offer:
        groups: list[SharedGroup] = []
        crcs: list[int] = []
        seen: dict[tuple[TensorEntry, ...], _Seen] = {}
        for numbers in self._divide(entries):
            tensors = tuple(entries[number] for number in numbers)
            seen[tensors] = now = self._look(slot, tensors, check)
            if now.sha256:
                groups.append(_group(entries, numbers, now.sha256))
                crcs.append(now.crc)
        self._seen = seen
        elsewhere = {number for group in groups for number in group.tensors}
        rest = [number for number, entry in enumerate(entries) if entry.bytes and number not in elsewhere]
        if sum(entries[number].bytes for number in rest) < self._least_bytes:
            rest = []
        largest = sorted(rest, key=lambda number: -entries[number].bytes)[: self._max_offered]
        items = [Item(bytes.fromhex(each.sha256)[:DIGEST_BYTES], each.object_bytes, is_frozen=True) for each in groups]
        items += [Item(_digest(slot, entries[each], check), entries[each].bytes) for each in sorted(largest)]
        return Offer(
            tuple(items),
            (*(group.tensors for group in groups), *((number,) for number in sorted(largest))),
            tuple(groups),
            tuple(crcs),
        )

    def plan(
        self,
        slot: SlotFile,
        entries: Sequence[TensorEntry],
        where: ObjectReference,
        offer: Offer,
        division: Division | None,
        check: Callable[[], None],
    ) -> tuple[Planned, ...]:
        """Return the S3 objects with tensors that this shard shares with other ranks or checkpoints. Blocks.

        Without a `division`, the rank writes the object of each group in `offer.frozen`. The shard's own object, at
        `where`, must contain all other tensors. Raises OversizedMessage if a header would exceed the limit of
        safetensors.
        """
        planned: list[Planned] = []
        for number, (group, crc) in enumerate(zip(offer.frozen, offer.crcs, strict=True)):
            place = ObjectReference(bucket=where.bucket, key=frozen_key(where.key, group.sha256))
            is_own = division is None or division.objects[number] in division.writes
            planned.append(Planned(group, place, is_frozen=True, is_own=is_own, crc=crc))
        held: dict[int, list[int]] = {}
        for number in range(len(offer.frozen), len(offer.items) if division is not None else 0):
            assert division is not None
            if division.objects[number] != OWN:
                held.setdefault(division.objects[number], []).extend(offer.tensors[number])
        for number, tensors in held.items():
            sha256, crc = _digests(slot, [entries[each] for each in tensors], check)
            group = _group(entries, tuple(tensors), sha256)
            place = ObjectReference(bucket=where.bucket, key=replicated_key(where.key, group.sha256))
            is_own = division is not None and number in division.writes
            planned.append(Planned(group, place, is_frozen=False, is_own=is_own, crc=crc))
        return tuple(planned)

    def _divide(self, entries: Sequence[TensorEntry]) -> Iterator[tuple[int, ...]]:
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
        """Return the digests of a group of frozen tensors, without SHA-256 if it has changed since the last upload."""
        step, last = slot.header.step, self._seen.get(tensors)
        fast = xxhash.xxh3_128()
        for piece in _pieces(slot, tensors, check):
            fast.update(piece)
        digest = fast.digest()
        if last is not None and last.digest == digest and (last.sha256 or last.step == step):
            return last
        if last is not None and last.digest != digest:
            return _Seen(step, digest, "")
        return _Seen(step, digest, *_digests(slot, tensors, check))


def groups_of(planned: Sequence[Planned]) -> SharedGroups:
    """Return which tensors are stored in which shared S3 object, for the header of the shard's own object."""
    return SharedGroups(
        frozen=tuple(each.group for each in planned if each.is_frozen),
        replicated=tuple(each.group for each in planned if not each.is_frozen),
    )


def missing(objects: ObjectStore, planned: Sequence[Planned]) -> Sequence[Planned]:
    """Return the first of the planned shared objects that S3 lacks, and all planned objects after it. Blocks.

    An object of another size, or with another stored checksum, counts as missing. Raises StorageError if a request
    fails.
    """
    # Stop at the first missing object to save requests, because many ranks wait for the same objects.
    for number, each in enumerate(planned):
        found = _head(objects, each.place)
        if found is None or found.bytes != each.group.object_bytes or found.crc not in (None, each.crc):
            return planned[number:]
    return ()


def write_missing(
    objects: ObjectStore,
    slot: SlotFile,
    entries: Sequence[TensorEntry],
    planned: Sequence[Planned],
    *,
    world_size: int,
    on_begun: Callable[[str, int], None],
    on_stored: OnStored,
    check: Callable[[], None],
) -> None:
    """Upload the planned objects of shared tensors from a sealed and pinned slot, unless S3 has them. Blocks.

    Two ranks that send the same object store the same bytes. Raises StorageError, and CorruptCheckpoint if the slot
    changed during the call.
    """
    # Each rank begins with a different object, so that the ranks share the work even if they could not agree on
    # writers.
    first = slot.header.owner_rank * len(planned) // max(world_size, slot.header.owner_rank + 1)
    for each in (*planned[first:], *planned[:first]):
        if missing(objects, [each]):
            on_begun(f"s3://{each.place.bucket}/{each.place.key}", each.group.object_bytes)
            pieces = _verified(slot, [entries[number] for number in each.group.tensors], each.group.sha256, check)
            objects.put_stream(each.place, pieces, each.group.object_bytes, on_stored=on_stored)


def _head(objects: ObjectStore, place: ObjectReference) -> StoredObject | None:
    """Return the description of a shared object, or None if it does not exist."""
    try:
        return objects.head(place)
    except StoreDenied:
        # S3 also refuses access to a missing object if the role may not list the bucket.
        return None


def _digests(slot: SlotFile, tensors: Sequence[TensorEntry], check: Callable[[], None]) -> tuple[str, int]:
    whole, crc = hashlib.sha256(), 0
    for piece in _pieces(slot, tensors, check):
        whole.update(piece)
        crc = crc64(piece, crc)
    return whole.hexdigest(), crc


def _digest(slot: SlotFile, entry: TensorEntry, check: Callable[[], None]) -> bytes:
    """Return the digest of one tensor: of its name, type and shape, and of its bytes."""
    hasher = xxhash.xxh3_128()
    for piece in _pieces(slot, [entry], check):
        hasher.update(piece)
    return hasher.digest()


def _group(entries: Sequence[TensorEntry], numbers: tuple[int, ...], sha256: str) -> SharedGroup:
    tensors = [entries[number] for number in numbers]
    data_begin = len(encode_shared_header(tensors))
    return SharedGroup(
        sha256=sha256,
        object_bytes=data_begin + sum(entry.bytes for entry in tensors),
        data_begin=data_begin,
        tensors=numbers,
    )


def _pieces(slot: SlotFile, tensors: Sequence[TensorEntry], check: Callable[[], None]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the S3 object that stores a group of tensors: a header, then the tensors."""
    yield encode_shared_header(tensors)
    for entry in tensors:
        end = entry.offset + entry.bytes
        for start in range(entry.offset, end, _PIECE_BYTES):
            check()
            yield slot.payload(start, min(end, start + _PIECE_BYTES))


def _verified(
    slot: SlotFile, tensors: Sequence[TensorEntry], sha256: str, check: Callable[[], None]
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a group's S3 object. At the end, raise CorruptCheckpoint if their SHA-256 is not `sha256`."""
    whole = hashlib.sha256()
    for piece in _pieces(slot, tensors, check):
        whole.update(piece)
        yield piece
    if whole.hexdigest() != sha256:
        raise CorruptCheckpoint(
            f"step {slot.header.step} of rank {slot.header.owner_rank} in memory changed while it was uploaded"
        )
