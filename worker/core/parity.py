"""Parity in memory: which chunks a share contains, and when a share is complete (docs/adr/0035-parity-in-memory.md).

The ranks with one LOCAL_RANK on the nodes of a group form a *stripe*. Each member's share is the XOR of one part of the
shard of every other member, so that any one lost shard follows from the other members' shards and shares.

    g = 4        A            B            C            D
    row 0   b2⊕c1⊕d0     c2⊕d1⊕a0     d2⊕a1⊕b0     a2⊕b1⊕c0      b2: chunk 2 of B's shard
    row 1   b5⊕c4⊕d3     c5⊕d4⊕a3     d5⊕a4⊕b3     a5⊕b4⊕c3

Invariant: a share is sealed only if it contains exactly one contribution of every other member of its stripe, all of
one content.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from everstep.protocol.ids import Rank
from everstep.protocol.parity import Contribution
from everstep.protocol.slot import SlotState, chunk_bytes
from worker.core.slots import Content, SlotView, being_written, writable


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk of a lost shard, and the bytes from which survivors rebuild it."""

    chunk: int
    """Index of the chunk in the lost shard."""
    holder: Rank
    """The member whose share contains the chunk."""
    row: int
    """Row of this share."""
    others: tuple[tuple[Rank, int], ...]
    """The other chunks in the row, as their owner and their index in the owner's shard."""


@dataclass(frozen=True, slots=True)
class Stripe:
    """The layout of the shares of one stripe. All members cut their shards into chunks of one size."""

    members: tuple[Rank, ...]
    """At least two ranks, in the order of the group's nodes."""
    chunk_bytes: int

    def holder_of(self, rank: Rank, chunk: int) -> Rank:
        """Return the member whose share contains a chunk of the shard of `rank`."""
        place = self.members.index(rank)
        return self.members[(place + 1 + chunk % self._width) % len(self.members)]

    def contributed(self, rank: Rank, holder: Rank, payload_bytes: int) -> range:
        """Return the chunks of the shard of `rank` that belong to the share of another member, row by row.

        Args:
            payload_bytes: size of the shard of `rank`.
        """
        count = -(-payload_bytes // self.chunk_bytes)
        return range(self._first(rank, holder), count, self._width)

    def share_bytes(self, holder: Rank, payload_bytes: Mapping[Rank, int]) -> int:
        """Return the size of the share that `holder` keeps.

        Args:
            payload_bytes: size of each contributor's shard, by the contributor's rank.
        """
        ends = [0]
        for rank, size in payload_bytes.items():
            for row, chunk in enumerate(self.contributed(rank, holder, size)):
                ends.append(row * self.chunk_bytes + min(self.chunk_bytes, size - chunk * self.chunk_bytes))
        return max(ends)

    def pieces(self, lost: Rank, payload_bytes: int) -> tuple[Piece, ...]:
        """Return how survivors rebuild each chunk of a lost shard of `payload_bytes` bytes."""
        found = []
        for chunk in range(-(-payload_bytes // self.chunk_bytes)):
            holder, row = self.holder_of(lost, chunk), chunk // self._width
            others = tuple(
                (rank, row * self._width + self._first(rank, holder))
                for rank in self.members
                if rank not in (lost, holder)
            )
            found.append(Piece(chunk, holder, row, others))
        return tuple(found)

    @property
    def _width(self) -> int:
        """The number of chunks in a row of a share."""
        return len(self.members) - 1

    def _first(self, rank: Rank, holder: Rank) -> int:
        return (self.members.index(holder) - self.members.index(rank) - 1) % len(self.members)


@dataclass(frozen=True, slots=True)
class Share:
    """State of a share between its grant and its seal, kept by the holder's agent.

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
        """Return whether a verified chunk must be combined with the slot's bytes. A repeated chunk must not."""
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


def parity_bytes_per_node(*, members: int, shard_bytes: Collection[int], slot_count: int = 2) -> int:
    """Return the host memory for the slots of one node with parity, in bytes, without the shares' indices.

    The formula assumes that the other nodes of the group own shards of the same sizes.

    Args:
        members: number of nodes in the group.
        shard_bytes: the slot size of each shard that the node owns.
        slot_count: slots per shard and per share, 2 or 3.

    Returns:
        slot_count · Σ (size + size of the share), where a share has whole rows of one chunk each.
    """
    total = 0
    for size in shard_bytes:
        chunk = chunk_bytes(size)
        rows = -(-size // (chunk * (members - 1)))
        total += size + min(rows * chunk, size)
    return slot_count * total
