"""Defines the layout of a share of parity, and how a share names its shards (docs/adr/0035-parity-in-memory.md).

The ranks with one LOCAL_RANK on the nodes of a group form a *stripe*, and are its members in ascending order. Each
member keeps its own shard and one *share*: the XOR of one part of the shard of every other member.

A share occupies an ordinary slot, whose owner number is `share_owner` of the member that keeps the share.

    offset       size           field
    0            share bytes    row after row, each as long as a chunk; the last row may be shorter
    share bytes  index_bytes    msgpack: the list of `Contribution`, in the order of the ranks

Invariant: a share names each other member of its stripe exactly once. All named shards have the origin generation and
the step of the share.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from everstep.protocol.codec import Message
from everstep.protocol.errors import UNDECODABLE, MalformedMessage
from everstep.protocol.fixed_length import Digest
from everstep.protocol.ids import NodeId, Rank
from everstep.protocol.limits import Count
from everstep.protocol.slot import CHUNK_BYTES, MAX_CHUNKS

SHARE_BIT = 1 << 31
"""Set in the owner number of a slot that contains a share, and never in a rank number."""
# A longer payload would need larger chunks, but all shards and shares of a stripe have chunks of equal size. In a
# stripe of two, a share is one index longer than the other member's shard, so one chunk is left for the index.
MAX_SHARD_BYTES = (MAX_CHUNKS - 1) * CHUNK_BYTES
"""Maximum payload of a shard with parity."""


class Contribution(Message, frozen=True):
    """One of the shards from which a share was computed."""

    rank: Rank
    payload_bytes: Count
    digest: Digest
    """Digest of the whole shard. The share contains only the chunks that are assigned to the share's holder."""
    layout_hash: Digest
    index_offset: Count
    """Start of the index within the shard's payload, for the header of a rebuilt slot."""
    index_bytes: Count


class Survivor(Message, frozen=True):
    """A member of a stripe whose shard and share exist."""

    rank: Rank
    node_id: NodeId
    shard_bytes: int
    shard_digest: Digest
    share_bytes: int
    share_digest: Digest


class Rebuild(Message, frozen=True):
    """A lost shard, and the survivors from which a node rebuilds it, at the `ShardSource`'s generation and step."""

    lost: Contribution
    """The shares of all survivors contain the same facts about the lost shard."""
    survivors: tuple[Survivor, ...]
    """All other members of the stripe, in the order of their ranks."""

    @property
    def stripe(self) -> tuple[Rank, ...]:
        """The members of the stripe, in the order of their ranks."""
        return tuple(sorted([self.lost.rank, *(survivor.rank for survivor in self.survivors)]))


def share_owner(holder: Rank) -> Rank:
    """Return the number that identifies the share of the rank `holder` where a shard has its owner rank."""
    return Rank(holder | SHARE_BIT)


def is_share(owner: Rank) -> bool:
    """Return whether slots with this owner number contain shares, not shards."""
    return bool(owner & SHARE_BIT)


def holder_of(owner: Rank) -> Rank:
    """Return the rank that a slot's owner number contains: the owner of a shard, or the holder of a share."""
    return Rank(owner & ~SHARE_BIT)


def stripe_of(holder: Rank, contributions: Iterable[Contribution]) -> tuple[Rank, ...]:
    """Return a share's stripe in ascending order."""
    return tuple(sorted([holder, *(each.rank for each in contributions)]))


def pack_contributions(contributions: Iterable[Contribution]) -> bytes:
    """Encode the index of a share."""
    return msgspec.msgpack.encode(sorted(contributions, key=lambda each: each.rank))


def unpack_contributions(index: bytes | memoryview) -> tuple[Contribution, ...]:
    """Read the index of a share. Raises MalformedMessage if the bytes are not an index of a share."""
    try:
        return _decoder.decode(index)
    except UNDECODABLE as error:
        raise MalformedMessage(f"the index of a share is malformed: {error}") from error


_decoder = msgspec.msgpack.Decoder(tuple[Contribution, ...])
