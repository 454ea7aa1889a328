"""Rules of parity protection (docs/adr/0035-parity-in-memory.md), as pure functions and values.

    members of a group ──contributions──▶ Share of each other member ──sealed──▶ votes of all members
    inventories of the survivors ──rebuildable──▶ shards that the survivors' shards and shares determine

The model `tests.model.parity` runs these rules together with the production classes of the rounds. The product does not
implement parity yet.

Invariant: a share is sealed only if it contains exactly one contribution of every other member of its group, all of one
content.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from everstep.protocol.ids import Rank
from everstep.protocol.slot import SlotState
from worker.core.slots import Content, SlotView, being_written, writable


@dataclass(frozen=True, slots=True, order=True)
class Contribution:
    """A member's shard as one input of a share. The header of the share names it in this form."""

    rank: Rank
    payload_bytes: int
    digest: bytes
    """Digest of the whole shard.

    The share contains only those chunks of the shard that belong to the share's holder.
    """


@dataclass(frozen=True, slots=True)
class Share:
    """The share that a holder's agent is accumulating: its slot is granted and not sealed yet.

    The agent changes the bytes of the slot only for a chunk that `accepts` admits, and records the chunk with `apply`
    in the same call. A restarted agent does not know which chunks a slot contains. It empties the slot, and every
    member contributes again.
    """

    contributors: frozenset[Rank]
    """Ranks of the other members of the group, one per node."""
    announced: frozenset[Contribution] = frozenset()
    """Contributions that have begun."""
    applied: frozenset[tuple[Rank, int]] = frozenset()
    """Chunks that the share contains, as the contributor's rank and the index of the chunk."""
    complete: frozenset[Rank] = frozenset()
    """Contributors whose chunks are all applied."""

    def begin(self, contribution: Contribution) -> Share:
        """Record that a member begins its contribution.

        If the member contributed another shard before, the share becomes empty. The caller then clears the slot and
        asks all members for their contributions again.
        """
        earlier = {each for each in self.announced if each.rank == contribution.rank}
        share = Share(self.contributors) if earlier - {contribution} else self
        return replace(share, announced=share.announced | {contribution})

    def accepts(self, rank: Rank, chunk: int) -> bool:
        """Return whether the agent must combine a verified chunk with the slot's bytes.

        A chunk must be combined only once.
        """
        return (rank, chunk) not in self.applied

    def apply(self, rank: Rank, chunk: int) -> Share:
        """Record that the slot now contains a chunk."""
        return replace(self, applied=self.applied | {(rank, chunk)})

    def finish(self, rank: Rank, chunks: Collection[int]) -> Share:
        """Record that a member has sent its last chunk. `chunks` are all chunks that belong to this share.

        The contribution becomes complete only if all of these chunks are applied.
        """
        is_whole = all((rank, chunk) in self.applied for chunk in chunks)
        return replace(self, complete=self.complete | {rank}) if is_whole else self

    @property
    def is_complete(self) -> bool:
        """True if the share contains every contribution, so that the agent may seal the slot."""
        return self.complete == self.contributors


def place(
    slots: Sequence[SlotView],
    content: Content,
    keep: Collection[Content],
    free: Callable[[Sequence[SlotView], Collection[Content]], int | None] = writable,
) -> int | None:
    """Return the slot in which a holder accumulates its share of `content`, or None if the holder must refuse.

    All members of a group contribute to one slot. A member that has not heard of the newest proposal may offer an older
    step. Such an offer must not displace the share of a newer step, which other members have contributed to.

    Args:
        slots: the slots of the share, in order.
        content: the content that a member offers.
        keep: contents that must survive, from `worker.core.slots.kept`.
        free: the rule that chooses the slot to overwrite.

    Returns:
        An index into `slots`. The slot is either WRITING with `content`, or may be overwritten with it.
    """
    index = being_written(slots, content)
    if index is not None:
        return index
    newest = max((slot.content.step for slot in slots if slot.content is not None), default=content.step)
    if content not in keep and content.step < newest:
        return None
    guarded = [
        replace(slot, is_pinned=True) if slot.state is SlotState.WRITING and slot.content in keep else slot
        for slot in slots
    ]
    return free(guarded, keep)


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
