"""Builds the safetensors object of a sealed slot from views of the slot's memory.

The owner of a shard and the holders of its replicas build equal objects, so each can send any part of the upload.

Invariant: views point into the slot, so the caller must pin the slot while a view exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from everstep.protocol import safetensors
from everstep.protocol.errors import OversizedMessage, ProtocolError
from everstep.protocol.safetensors import NOTHING_SHARED, SharedGroups
from everstep.protocol.slot import ShardHasher, TensorEntry, unpack_index
from worker.errors import CorruptCheckpoint, StoreRefused
from worker.shm.slot_file import SlotFile


class ShardObject:
    """The safetensors object that a checkpoint contains for one slot. The slot must be sealed and not be reused."""

    def __init__(
        self, slot: SlotFile, chunk_digests: bytes, *, piece_bytes: int, shared: SharedGroups = NOTHING_SHARED
    ) -> None:
        """Read the slot's index, and build the beginning of the object.

        `chunk_digests` are those computed at the seal. Raises StoreRefused if the header would exceed the limit of
        safetensors, and CorruptCheckpoint if the slot's index is damaged.
        """
        self._slot = slot
        self._header = header = slot.header
        self._chunk_digests = chunk_digests
        self._piece_bytes = piece_bytes
        packed = _packed_index(slot)
        self._entries = tensors_of(slot)
        elsewhere = shared.tensors
        self._own = [entry for number, entry in enumerate(self._entries) if number not in elsewhere]
        """The tensors whose data the object contains."""
        self._elsewhere = [number in elsewhere for number in range(len(self._entries))]
        """For each tensor, in order: True if its data is in a shared object."""
        try:
            self._beginning = safetensors.encode_header(header, packed, chunk_digests, shared)
        except OversizedMessage as error:
            raise StoreRefused(str(error)) from error
        except ProtocolError as error:
            raise CorruptCheckpoint(
                f"step {header.step} of rank {header.owner_rank} has changed in memory since it was sealed: {error}"
            ) from error
        self.bytes = len(self._beginning) + sum(entry.bytes for entry in self._own)

    def verified_pieces(self, check: Callable[[], None]) -> Iterator[bytes | memoryview]:
        """Yield the whole safetensors object in pieces, and verify the slot's digests during the iteration.

        `check` is called before each piece, and may raise to end the iteration. Raises CorruptCheckpoint, after the
        last piece, if the slot does not match its digests.
        """
        yield self._beginning
        hasher = ShardHasher(self._header.payload_bytes)
        position = 0
        for entry, is_elsewhere in zip(self._entries, self._elsewhere, strict=True):
            self._digest(hasher, position, entry.offset)
            position = entry.offset + entry.bytes
            for start in range(entry.offset, position, self._piece_bytes):
                check()
                view = self._slot.payload(start, min(position, start + self._piece_bytes))
                hasher.update(view)
                if not is_elsewhere:
                    yield view
        self._digest(hasher, position, self._header.payload_bytes)
        if hasher.digests() != self._chunk_digests:
            raise CorruptCheckpoint(
                f"step {self._header.step} of rank {self._header.owner_rank} in memory no longer matches its digest"
            )

    def pieces(self, begin: int, end: int) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the object from `begin` to `end` (exclusive), without verification."""
        if begin < len(self._beginning):
            yield self._beginning[begin:end]
        position = len(self._beginning)
        for entry in self._own:
            first, last = max(begin, position) - position, min(end, position + entry.bytes) - position
            for start in range(first, last, self._piece_bytes):
                yield self._slot.payload(entry.offset + start, entry.offset + min(last, start + self._piece_bytes))
            position += entry.bytes

    def _digest(self, hasher: ShardHasher, begin: int, end: int) -> None:
        for start in range(begin, end, self._piece_bytes):
            with self._slot.payload(start, min(end, start + self._piece_bytes)) as view:
                hasher.update(view)


def tensors_of(slot: SlotFile) -> list[TensorEntry]:
    """Return a pinned slot's tensors, in the order of their data. Raises CorruptCheckpoint if its index is damaged."""
    header = slot.header
    try:
        return safetensors.tensors_in_order(unpack_index(_packed_index(slot), header.index_offset))
    except ProtocolError as error:
        raise CorruptCheckpoint(
            f"step {header.step} of rank {header.owner_rank} has changed in memory since it was sealed: {error}"
        ) from error


def _packed_index(slot: SlotFile) -> bytes:
    header = slot.header
    with slot.payload(header.index_offset, header.index_offset + header.index_bytes) as view:
        return bytes(view)
