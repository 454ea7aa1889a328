"""Which lost shards survivors can rebuild (docs/adr/0035-parity-in-memory.md), as a pure function.

Invariant: a lost shard counts only if all shares name it and the shards that exist.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from everstep.protocol.ids import Rank
from everstep.protocol.parity import Contribution
from worker.core.slots import Content


def rebuildable(
    group: Sequence[Rank],
    shards: Mapping[Rank, Mapping[Content, bytes]],
    shares: Mapping[Rank, Mapping[Content, Collection[Contribution]]],
) -> dict[Content, Contribution]:
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
    found: dict[Content, Contribution] = {}
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
