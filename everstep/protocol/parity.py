"""Names of the shards that a share of parity contains (docs/adr/0035-parity-in-memory.md).

A share is the XOR of one part of the shard of each other member of a stripe. It is stored in an ordinary slot: the
owner of the slot is `share_owner(rank)` of its holder's rank, and the index of the payload names the shards.

    offset       size           field
    0            share bytes    row after row, each as long as a chunk; the last row may be shorter
    share bytes  index_bytes    msgpack: the list of `Contribution`, in the order of the ranks

Invariant: a share names each other member of its stripe exactly once, and all shards that it names have its content.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from everstep.protocol.codec import Message
from everstep.protocol.errors import MalformedMessage
from everstep.protocol.ids import Generation, Rank, Step

SHARE_BIT = 1 << 31
"""Marks the owner in the header of a slot that contains a share. No rank has a number as high as this."""


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


def share_owner(holder: Rank) -> Rank:
    """Return the owner that slots of the share of `holder` have in headers, inventories and requests."""
    return Rank(holder | SHARE_BIT)


def pack_contributions(contributions: Iterable[Contribution]) -> bytes:
    """Return the index of a share's payload."""
    return msgspec.msgpack.encode(sorted(contributions, key=lambda each: each.rank))


def unpack_contributions(index: bytes | memoryview) -> tuple[Contribution, ...]:
    """Return the shards that the index of a share's payload names.

    Raises:
        MalformedMessage: the bytes are no index of a share.
    """
    try:
        return _decoder.decode(index)
    except msgspec.DecodeError as error:
        raise MalformedMessage(f"the index of a share: {error}") from error


_decoder = msgspec.msgpack.Decoder(tuple[Contribution, ...])
