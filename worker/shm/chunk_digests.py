"""Tracks a payload while a rank or a transfer writes it: the finished part, and the digests of its chunks.

Invariant: the payload is written from its beginning. The chunks with digests are a prefix, whose bytes the writer never
changes again.
"""

from __future__ import annotations

from everstep.protocol.slot import DIGEST_BYTES, SlotHeader, chunk_bytes, chunk_count, shard_digest
from worker.tasks import Signal


class ChunkDigests:
    """Digests of one payload in one slot, from its first captured bytes until the slot is overwritten."""

    def __init__(self, header: SlotHeader) -> None:
        self.header = header
        self.chunk_count = chunk_count(header.payload_bytes)
        self.known = b""
        """Concatenated digests of the first chunks. `shard_digest` combines them into the payload's digest."""
        self.is_complete = False
        """True once the writer has reported that the whole payload is final and is a valid snapshot."""
        self.is_sealed = False
        self.changed = Signal()
        self._final_bytes = 0

    @property
    def known_count(self) -> int:
        """Number of the payload's chunks whose digests are computed."""
        return len(self.known) // DIGEST_BYTES

    @property
    def due_count(self) -> int:
        """Number of chunks, from the payload's beginning, that the writer has finished and that can be digested."""
        return self.chunk_count if self.is_complete else self._final_bytes // chunk_bytes(self.header.payload_bytes)

    @property
    def payload_digest(self) -> bytes:
        """Digest of the whole payload. It may be read only when all chunk digests are known."""
        return shard_digest(self.known, self.header.payload_bytes)

    @property
    def is_decided(self) -> bool:
        """True if the whole payload is written, or the slot is sealed."""
        return self.is_complete or self.is_sealed

    @property
    def is_whole(self) -> bool:
        """True if the payload is complete and every chunk digest is known."""
        return self.is_complete and self.known_count == self.chunk_count

    def grow(self, final_bytes: int) -> None:
        """Record that the first `final_bytes` bytes of the payload are finished. A lower, outdated value is ignored."""
        self._final_bytes = max(self._final_bytes, final_bytes)
        self.changed.notify()

    def complete(self) -> None:
        """Record that the rank or the receiver has written the whole payload, so that the slot can be sealed."""
        self.is_complete = True
        self.changed.notify()

    def add(self, more: bytes) -> None:
        """Append the digests of the payload's next chunks, concatenated in order."""
        self.known += more
        self.changed.notify()

    def seal(self) -> None:
        """Record that the slot with this payload is sealed. Senders may now send `EndShard` to the holders."""
        self.is_sealed = True
        self.changed.notify()
