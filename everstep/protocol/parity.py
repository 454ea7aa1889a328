"""Names of the shards that a share of parity contains (docs/adr/0035-parity-in-memory.md).

A share is the XOR of one part of the shard of each other member of a stripe. Its header names these shards.

Invariant: a share names each other member of its stripe exactly once, and all shards that it names have its content.
"""

from __future__ import annotations

from everstep.protocol.codec import Message
from everstep.protocol.ids import Generation, Rank, Step


class Contribution(Message, frozen=True):
    """The shard that a member contributes to a share."""

    rank: Rank
    payload_bytes: int
    digest: bytes
    """Digest of the whole shard, of which the share contains every chunk that belongs to its holder."""
    layout_hash: bytes
    index_offset: int
    """Start of the index within the shard's payload. A rebuilt slot needs this field for its header."""
    index_bytes: int


class ShareRecord(Message, frozen=True):
    """One sealed share in a node's inventory."""

    holder_rank: Rank
    """The rank of the holder's node whose stripe the share belongs to."""
    origin_generation: Generation
    step: Step
    payload_bytes: int
    digest: bytes
    contributions: tuple[Contribution, ...]
