"""Stores tensors that several shards share in S3 objects that all of these shards use.

    tensors that the script declares frozen ─▶ groups ─▶ SHA-256 ─▶ run=<run>/frozen/<sha256>.safetensors
    tensors that are equal on several ranks ─▶ division ─▶ SHA-256 ─▶ …/step=<step>/replicated/<sha256>.safetensors

A *frozen object* is shared by all checkpoints and ranks of a run. A group is a sequence of tensors with about
`GROUP_BYTES`, which one object stores. The script's declaration can be wrong, for example for averaged weights. A group
whose content has changed since the last upload is therefore not treated as frozen.

A *replicated object* contains tensors that are equal on several ranks at one step. `worker.core.upload_division`
assigns equal tensors to objects, and each object to the rank that writes it (the *division*). For this purpose, each
rank lists the tensors that other ranks may also hold (its *offer*). The rank sends an object only if S3 lacks it.

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

GROUP_BYTES = 256 * 1024 * 1024
"""Size in bytes at which a group of frozen tensors is full. No tensor is divided.

Smaller groups would need more requests per upload. With larger groups, ranks would share the work less evenly.
"""
_PIECE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Seen:
    """Digests of one group of frozen tensors (which training does not change), as the last upload computed them."""

    step: Step
    digest: bytes
    """xxh3-128 digest of the bytes of the group's S3 object."""
    sha256: str
    """SHA-256 of the bytes of the group's S3 object; empty if they differed from the bytes of the previous upload."""
    crc: int = 0
    """CRC64NVME of the bytes of the group's S3 object; valid if `sha256` is not empty."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The tensors of a shard at one step that other ranks may hold, too. The coordinator's agent receives this list."""

    items: tuple[Item, ...]
    """The offered items: first the groups of frozen tensors, then single tensors in the order of the payload."""
    tensors: tuple[tuple[int, ...], ...]
    """For each item, the positions of its tensors in the shard's list of tensors."""
    frozen: tuple[SharedGroup, ...]
    """The groups of frozen tensors (which training does not change). They are the first items, in the same order."""
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
    """CRC64NVME of the object's bytes."""


class SharedTensors:
    """Chooses the tensors of one shard that are stored in shared objects, during one generation.

    Several uploads of the shard, for different steps, may use one object at the same time.
    """

    def __init__(
        self, *, group_bytes: int = GROUP_BYTES, least_bytes: int = LEAST_BYTES, max_offered: int = MAX_OFFERED
    ) -> None:
        """Create the object, which has no digests of earlier uploads yet.

        Before an upload, the rank lists the tensors that other ranks may also hold (its offer). The offer contains
        groups of frozen tensors, which training does not change, and single tensors.

        Args:
            group_bytes: size in bytes at which a group is full. One shared S3 object stores a group. By default
                `GROUP_BYTES`.
            least_bytes: minimum total size in bytes of the tensors outside the groups. With fewer bytes, the offer
                contains no single tensors, and the rank's own S3 object stores them. A last group with fewer bytes is
                not formed. By default `LEAST_BYTES`.
            max_offered: maximum number of single tensors in an offer. If there are more, the offer contains the largest
                tensors.
        """
        self._group_bytes = group_bytes
        self._least_bytes = least_bytes
        self._max_offered = max_offered
        self._lock = threading.Lock()
        """Guards the attributes below, which the threads of uploads share."""
        self._seen: dict[tuple[TensorEntry, ...], _Seen] = {}
        self._offers: dict[Step, Offer] = {}
        """The offers (lists of tensors that other ranks may also hold) of running uploads, by step.

        Each attempt to upload a step uses the same offer, until `forget`.
        """

    def look(self, slot: SlotFile, entries: Sequence[TensorEntry], check: Callable[[], None]) -> Offer:
        """Compute the digests that show which tensors other ranks also hold. Blocks: call it in a thread.

        Args:
            slot: mapped file of the slot, which is sealed and pinned.
            entries: all tensors of the slot, in order.
            check: raises an error if the upload was cancelled.

        Returns:
            The offer: the list of tensors that this node sends to the coordinator's agent. Each attempt to upload a
            step uses the same offer. If the tensors outside the groups of frozen tensors have fewer than `least_bytes`
            together, the offer contains only these groups.

        Raises:
            OversizedMessage: a header would exceed the limit of safetensors.
        """
        step = slot.header.step
        with self._lock:
            if step not in self._offers:
                self._offers[step] = self._offer(slot, entries, check)
            return self._offers[step]

    def forget(self, step: Step) -> None:
        """Drop the cached offer of `step` (this rank's tensors that other ranks may also have).

        Called after the last attempt to upload this step, on the event loop. The call never blocks.
        """
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
        """Return the S3 objects with tensors that this shard shares with other ranks or checkpoints.

        Computes the SHA-256 of objects with tensors that several ranks hold: call it in a thread.

        Args:
            slot: mapped file of the slot, which is sealed and pinned.
            entries: all tensors of the slot, in order.
            where: bucket and key of the shard's own object.
            offer: the result of `look`: the tensors that this rank may share with other ranks, with their digests.
            division: assigns the offered tensors of all ranks to objects, and each object to the rank that writes it.
                None if the ranks could not agree: the rank then writes the object of each group in `offer.frozen`, and
                its own object contains all other tensors.
            check: raises an error if the upload was cancelled.

        Returns:
            The objects. The shard's own object must contain all other tensors.

        Raises:
            OversizedMessage: a header would exceed the limit of safetensors.
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
        """Divide the frozen tensors into one group per S3 object, and yield the indices of each group's tensors."""
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
        """Return the digests (xxh3-128 and SHA-256) of the bytes of a group of frozen tensors.

        The SHA-256 is empty if the bytes have changed since the last upload, so that the group is not shared.
        """
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
    """Return which tensors of a shard are stored in which shared S3 object.

    The upload writes the result into the header of the shard's own S3 object, so that a load finds the shared objects.
    """
    return SharedGroups(
        frozen=tuple(each.group for each in planned if each.is_frozen),
        replicated=tuple(each.group for each in planned if not each.is_frozen),
    )


def missing(objects: ObjectStore, planned: Sequence[Planned]) -> Sequence[Planned]:
    """Return the first of the planned shared objects that S3 lacks, and all planned objects after it.

    S3 lacks an object if the stored object has another size or another checksum. Without a stored checksum, only the
    size counts. The function stops at the first missing object to save requests, because many ranks wait for the same
    objects. Raises StorageError if a request fails. Blocks: call it in a thread.
    """
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
    """Upload the planned objects of tensors that several shards share, unless S3 has them. Blocks: call it in a thread.

    Each rank begins with a different object, so that the ranks share the work even if they could not agree on writers.
    Two ranks that send the same object store the same bytes.

    Args:
        objects: object store that receives the objects.
        slot: mapped file of the slot, which is sealed and pinned.
        entries: all tensors of the slot, in order.
        planned: objects that the shard needs. The call skips objects that S3 already has.
        world_size: number of ranks.
        on_begun: called with the name and the size of each object that is sent.
        on_stored: called with the bytes of each part that S3 has stored.
        check: raises an error if the upload was cancelled.

    Raises:
        StorageError: the subtype shows whether to retry.
        CorruptCheckpoint: the slot changed during the call.
    """
    first = slot.header.owner_rank * len(planned) // max(world_size, slot.header.owner_rank + 1)
    for each in (*planned[first:], *planned[:first]):
        if missing(objects, [each]):
            on_begun(f"s3://{each.place.bucket}/{each.place.key}", each.group.object_bytes)
            pieces = _verified(slot, [entries[number] for number in each.group.tensors], each.group.sha256, check)
            objects.put_stream(each.place, pieces, each.group.object_bytes, on_stored=on_stored)


def _head(objects: ObjectStore, place: ObjectReference) -> StoredObject | None:
    """Return the description of a shared object, or None if it does not exist.

    S3 also refuses access to a missing object if the role may not list the bucket. The result is then None, too.
    """
    try:
        return objects.head(place)
    except StoreDenied:
        return None


def _digests(slot: SlotFile, tensors: Sequence[TensorEntry], check: Callable[[], None]) -> tuple[str, int]:
    """Return SHA-256 and CRC64NVME of the bytes of the S3 object that stores a group of tensors."""
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
    """Yield the bytes of the S3 object that stores a group of tensors.

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
