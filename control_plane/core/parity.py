"""Shards that survivors can rebuild from parity (docs/adr/0035-parity-in-memory.md).

    inventories ──rebuildable──▶ lost shards ──surveyed──▶ recovery.choose

Invariant: a lost shard counts only if the other members of its stripe have their shards and their shares of the same
content, and all shares name the same lost shard and the shards that exist.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from math import comb
from typing import TypeVar

from control_plane.core.recovery import Survey
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.parity import Contribution, ShareRecord
from everstep.protocol.plan import SlotRecord

REBUILT = NodeId("rebuilt")
"""The node that a survey names for shards that survivors can rebuild. No node of a fleet has this id."""


C = TypeVar("C", bound=Hashable)
Content = tuple[Generation, Step]
"""The state of one stripe: the generation that captured it, and its step."""


def stripes(groups: Sequence[Sequence[int]], ranks_per_node: int) -> tuple[tuple[Rank, ...], ...]:
    """Return the stripes of a job: the ranks with one LOCAL_RANK on the nodes of a group.

    Args:
        groups: groups of GROUP_RANKs, from `placement.plan` with g in the place of the copies.
        ranks_per_node: number of ranks of each node.
    """
    return tuple(
        tuple(Rank(node * ranks_per_node + local) for node in group)
        for group in groups
        for local in range(ranks_per_node)
    )


def recovery_probability(group_sizes: Sequence[int], lost_count: int) -> float:
    """Return the probability that a simultaneous loss of `lost_count` nodes hits no group twice.

    All sets of lost nodes are equally likely.

    Args:
        group_sizes: number of nodes of each group.
        lost_count: k, nodes lost at the same time, from 0 to all nodes.

    Returns:
        Σ over the choices of k groups of Π (size of the group), divided by the number of sets of k nodes.
    """
    ways = [1] + [0] * lost_count
    for size in group_sizes:
        for lost in range(lost_count, 0, -1):
            ways[lost] += size * ways[lost - 1]
    return ways[lost_count] / comb(sum(group_sizes), lost_count)


def surveyed(
    survey: Survey, striped: Sequence[Sequence[Rank]], shares: Mapping[NodeId, Collection[ShareRecord]]
) -> Survey:
    """Return a survey that also contains the shards that survivors can rebuild, on the node `REBUILT`.

    Args:
        survey: the survey of the nodes that have promised.
        striped: the stripes of the generation that made the shards.
        shares: sealed shares in the inventories of these nodes.
    """
    shards: defaultdict[Rank, dict[Content, bytes]] = defaultdict(dict)
    for inventory in survey.inventories.values():
        for slot in inventory:
            shards[slot.owner_rank][slot.origin_generation, slot.step] = slot.digest
    named: defaultdict[Rank, dict[Content, Collection[Contribution]]] = defaultdict(dict)
    for listed in shares.values():
        for share in listed:
            named[share.holder_rank][share.origin_generation, share.step] = share.contributions
    rebuilt = tuple(
        SlotRecord(
            owner_rank=lost.rank,
            origin_generation=origin,
            step=step,
            payload_bytes=lost.payload_bytes,
            digest=lost.digest,
            layout_hash=lost.layout_hash,
        )
        for stripe in striped
        for (origin, step), lost in rebuildable(stripe, shards, named).items()
    )
    return replace(survey, inventories={**survey.inventories, REBUILT: rebuilt}) if rebuilt else survey


def rebuildable(
    group: Sequence[Rank],
    shards: Mapping[Rank, Mapping[C, bytes]],
    shares: Mapping[Rank, Mapping[C, Collection[Contribution]]],
) -> dict[C, Contribution]:
    """Return the lost shard of each content that the rest of a group can rebuild.

    Exactly one member's shard may be missing. The other members' shards and shares must exist, and all shares must name
    the same lost shard and the shards that exist.

    Args:
        group: ranks of the group's members, one per node.
        shards: digest of each shard in memory, by owner and content.
        shares: contributions to each sealed share, by its holder's rank and content.

    Returns:
        By content: owner, size and digest of the shard to rebuild. The rebuilt bytes must match the digest.
    """
    contents = {content for rank in group for content in shards.get(rank, {})}
    found: dict[C, Contribution] = {}
    for content in contents:
        lost = [rank for rank in group if content not in shards.get(rank, {})]
        if len(lost) != 1:
            continue
        left = [rank for rank in group if rank not in lost]
        named = {rank: frozenset(shares.get(rank, {}).get(content, ())) for rank in left}
        lost_shards = {each for listed in named.values() for each in listed if each.rank in lost}
        are_equal = all(
            {each.rank for each in named[holder]} == set(group) - {holder}
            and all(each.rank in lost or each.digest == shards[each.rank][content] for each in named[holder])
            for holder in left
        )
        if are_equal and len(lost_shards) == 1:
            found[content] = next(iter(lost_shards))
    return found
