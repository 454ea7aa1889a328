"""What is known of a payload that comes into being: how much of it is final, and the digests of its chunks.

Invariant: digests are known from the first chunk on, without gaps, and of bytes that are not written any more.
"""

from __future__ import annotations

from everstep.protocol.slot import DIGEST_BYTES, SlotHeader, chunk_bytes, chunk_count, shard_digest
from worker.tasks import Signal


class ChunkDigests:
    """Of one payload in one slot, from its first bytes until it is overwritten. On the agent's loop alone.

    Args:
        header: the slot's, as it will be sealed: content, sizes, index.
    """

    def __init__(self, header: SlotHeader) -> None:
        self.header = header
        self.chunk_count = chunk_count(header.payload_bytes)
        self.known = b""
        """As `shard_digest` takes them, of the first chunks."""
        self.is_complete = False
        """The writer has said that the whole payload is final, and a snapshot."""
        self.is_sealed = False
        self.changed = Signal()
        self._final_bytes = 0

    @property
    def known_count(self) -> int:
        """How many chunks' digests are known."""
        return len(self.known) // DIGEST_BYTES

    @property
    def due_count(self) -> int:
        """How many chunks can be digested."""
        return self.chunk_count if self.is_complete else self._final_bytes // chunk_bytes(self.header.payload_bytes)

    @property
    def payload_digest(self) -> bytes:
        """The payload's, all of its chunks' being known."""
        return shard_digest(self.known, self.header.payload_bytes)

    @property
    def is_decided(self) -> bool:
        """It is a snapshot, or will be as soon as its digests are known."""
        return self.is_complete or self.is_sealed

    @property
    def is_whole(self) -> bool:
        """The payload is complete, and every digest of it known."""
        return self.is_complete and self.known_count == self.chunk_count

    def grow(self, final_bytes: int) -> None:
        """The payload's first bytes are final; less than before is old news."""
        self._final_bytes = max(self._final_bytes, final_bytes)
        self.changed.notify()

    def complete(self) -> None:
        """The whole payload is final, and worth sealing."""
        self.is_complete = True
        self.changed.notify()

    def add(self, more: bytes) -> None:
        """The next chunks have been digested."""
        self.known += more
        self.changed.notify()

    def seal(self) -> None:
        """The slot is sealed: who sends the shard may say so."""
        self.is_sealed = True
        self.changed.notify()
