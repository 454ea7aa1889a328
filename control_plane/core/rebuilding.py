"""Finds the shards that the rest of a stripe can rebuild by parity (docs/adr/0035-parity-in-memory.md).

    stripe A B C, C is lost:   A's shard and share, B's shard and share ──▶ C's shard

Invariant: a shard has a rebuild only if all other members of its stripe have their shards and shares, of the same
*content*: origin generation and step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.parity import Contribution, Rebuild, Survivor, holder_of, is_share, stripe_of
from everstep.protocol.plan import SlotRecord

Content = tuple[Generation, Step]
Stripe = tuple[Rank, ...]
Held = Mapping[NodeId, SlotRecord]
"""The slots that hold one shard, or one share, of one origin generation and step, by node."""


def rebuilds(
    slots: Iterable[tuple[NodeId, SlotRecord]],
    worlds: Mapping[Generation, int],
    *,
    existing: Collection[Content] = (),
) -> list[tuple[Content, Rebuild]]:
    """Return the shards that can be rebuilt, with the shards and shares that determine them. Deterministic.

    For contents in `existing`, the result also contains rebuilds of shards that still exist, in case their slots are
    damaged.
    """
    shards: defaultdict[Content, defaultdict[Rank, dict[NodeId, SlotRecord]]] = defaultdict(lambda: defaultdict(dict))
    shares: defaultdict[tuple[Content, Stripe], defaultdict[Rank, dict[NodeId, SlotRecord]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for node, slot in slots:
        content = (slot.origin_generation, slot.step)
        if not is_share(slot.owner_rank):
            shards[content][slot.owner_rank][node] = slot
        elif (stripe := _stripe(slot, worlds)) is not None:
            shares[content, stripe][holder_of(slot.owner_rank)][node] = slot
    found: list[tuple[Content, Rebuild]] = []
    for (content, stripe), held in sorted(shares.items(), key=lambda item: item[0]):
        missing = [rank for rank in stripe if rank not in shards[content]]
        if len(missing) > 1:
            continue
        for rank in missing or (stripe if content in existing else ()):
            rebuild = _rebuild(stripe, rank, shards[content], held)
            present = {slot.digest for slot in shards[content].get(rank, {}).values()}
            if rebuild is not None and (not present or rebuild.lost.digest in present):
                found.append((content, rebuild))
    return found


def _stripe(share: SlotRecord, worlds: Mapping[Generation, int]) -> Stripe | None:
    """Return the stripe that a share's record names, or None if the record is damaged."""
    stripe = stripe_of(holder_of(share.owner_rank), share.contributions)
    if len({*stripe}) < max(len(stripe), 2):
        return None
    return stripe if min(stripe) >= 0 and max(stripe) < worlds.get(share.origin_generation, 0) else None


def _rebuild(
    stripe: Stripe, lost_rank: Rank, shards: Mapping[Rank, Held], shares: Mapping[Rank, Held]
) -> Rebuild | None:
    # Each other rank needs a node with both its shard and its share, whose records name the same shards.
    members = [rank for rank in stripe if rank != lost_rank]
    candidates = {
        rank: [
            (node, shards[rank][node], share)
            for node, share in sorted(shares.get(rank, {}).items())
            if node in shards[rank]
        ]
        for rank in members
    }
    lost_shards = {_named(share, lost_rank) for listed in candidates.values() for _, _, share in listed}
    for lost in sorted(lost_shards, key=lambda each: (each.digest, each.payload_bytes, each.layout_hash)):
        chosen = {
            rank: next((each for each in candidates[rank] if _named(each[2], lost_rank) == lost), None)
            for rank in members
        }
        survivors = [(rank, *each) for rank, each in chosen.items() if each is not None]
        if len(survivors) == len(members) and _agree(survivors):
            return Rebuild(
                lost=lost,
                survivors=tuple(
                    Survivor(
                        rank=rank,
                        node_id=node,
                        shard_bytes=shard.payload_bytes,
                        shard_digest=shard.digest,
                        share_bytes=share.payload_bytes,
                        share_digest=share.digest,
                    )
                    for rank, node, shard, share in survivors
                ),
            )
    return None


def _named(share: SlotRecord, rank: Rank) -> Contribution:
    return next(each for each in share.contributions if each.rank == rank)


def _agree(survivors: Sequence[tuple[Rank, NodeId, SlotRecord, SlotRecord]]) -> bool:
    """Return whether each survivor's share lists the digests of the other survivors' shards."""
    present = {rank: (shard.digest, shard.payload_bytes) for rank, _, shard, _ in survivors}
    return all(
        (named.digest, named.payload_bytes) == present[named.rank]
        for _, _, _, share in survivors
        for named in share.contributions
        if named.rank in present
    )
