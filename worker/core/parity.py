"""Parity in memory: the chunks that a share contains, and when a share is complete (docs/adr/0035-parity-in-memory.md).

The ranks with one LOCAL_RANK on the nodes of a group form a *stripe*. The ranks are its members. The share of a member
is the XOR of one part of the shard of every other member. In a stripe of g ranks, a part is every (g - 1)-th chunk of a
shard, and is a *contribution* to the share. Any one lost shard can be rebuilt from the other members' shards and
shares.

    g = 4        A            B            C            D
    row 0   b2⊕c1⊕d0     c2⊕d1⊕a0     d2⊕a1⊕b0     a2⊕b1⊕c0      b2: chunk 2 of B's shard
    row 1   b5⊕c4⊕d3     c5⊕d4⊕a3     d5⊕a4⊕b3     a5⊕b4⊕c3

Invariant: a share is sealed only if it contains exactly one contribution of every other member of its stripe. All
contributions have the same origin generation and step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from everstep.protocol.ids import Rank
from everstep.protocol.parity import Contribution
from everstep.protocol.slot import CHUNK_BYTES, SlotState
from worker.core.slots import Content, SlotView, being_written, writable

CONTRIBUTION_BYTES = 320
"""Bytes that a share's slot reserves for the description of each contribution (a packed `Contribution`)."""


@dataclass(frozen=True, slots=True)
class Stripe:
    """A group of ranks that protect each other's shards by parity, and the layout of their parity shares.

    All ranks of the stripe divide their shards into chunks of the same size.
    """

    members: tuple[Rank, ...]
    """The ranks of the stripe: at least two, in ascending order."""
    chunk_bytes: int = CHUNK_BYTES

    def others(self, rank: Rank) -> frozenset[Rank]:
        """Return all ranks of the stripe except `rank`."""
        return frozenset(self.members) - {rank}

    def holder_of(self, rank: Rank, chunk: int) -> Rank:
        """Return the rank whose share contains a chunk of the shard of `rank`."""
        place = self.members.index(rank)
        return self.members[(place + 1 + chunk % self.width) % len(self.members)]

    def row_of(self, chunk: int) -> int:
        """Return the row of a parity share to which a chunk of a shard belongs. It depends only on the chunk's index.

        A row of a share is the XOR of one chunk of each other rank of the stripe.
        """
        return chunk // self.width

    def chunk_of(self, rank: Rank, holder: Rank, row: int) -> int:
        """Return the index of the chunk of the shard of `rank` in row `row` of the share of the rank `holder`.

        `rank` and `holder` are different ranks of the stripe. A row of a share is the XOR of one chunk of the shard of
        each rank except the holder.
        """
        return row * self.width + self._first(rank, holder)

    def contributed(self, rank: Rank, holder: Rank, payload_bytes: int) -> range:
        """Return the chunks of the shard of `rank` that belong to the share of another rank.

        Args:
            rank: the rank that owns the shard.
            holder: the rank whose share it is.
            payload_bytes: size of the shard of `rank`.

        Returns:
            Indices of chunks. The first of these chunks belongs to row 0 of the share (see `row_of`), the second to row
            1, and so on.
        """
        return range(self._first(rank, holder), -(-payload_bytes // self.chunk_bytes), self.width)

    def share_bytes(self, holder: Rank, payload_bytes: Mapping[Rank, int]) -> int:
        """Return the size of the share that `holder` keeps, without its index (the list of contributions).

        Args:
            holder: the rank whose share it is.
            payload_bytes: size of each contributor's shard, by the contributor's rank.

        Returns:
            The number of bytes up to the end of the longest contribution.
        """
        ends = [0]
        for rank, size in payload_bytes.items():
            if chunks := self.contributed(rank, holder, size):
                last = chunks[-1]
                full = max(0, len(chunks) - 1) * self.chunk_bytes
                ends.append(full + min(self.chunk_bytes, size - last * self.chunk_bytes))
        return max(ends)

    def capacity_bytes(self, shard_bytes: int) -> int:
        """Return the maximum bytes of a share and its list of contributions, for shards of up to `shard_bytes`."""
        rows = -(-shard_bytes // (self.chunk_bytes * self.width))
        return min(rows * self.chunk_bytes, shard_bytes) + self.width * CONTRIBUTION_BYTES

    @property
    def width(self) -> int:
        """The number of chunks whose XOR is one row of a parity share: one chunk of each other rank of the stripe."""
        return len(self.members) - 1

    def _first(self, rank: Rank, holder: Rank) -> int:
        return (self.members.index(holder) - self.members.index(rank) - 1) % len(self.members)


@dataclass(frozen=True, slots=True)
class Missing:
    """A lost shard, and the rules that select the surviving chunks from which it is rebuilt."""

    stripe: Stripe
    lost: Contribution

    def wanted(self, rank: Rank, payload_bytes: int, *, is_share: bool) -> frozenset[int]:
        """Select the chunks from which the lost shard is rebuilt, in the shard or the share of a surviving rank.

        Args:
            rank: the surviving rank of the stripe.
            payload_bytes: size of the shard or share.
            is_share: True for the rank's share, False for its shard.

        Returns:
            Indices of chunks of the rank's shard or share.
        """
        count = -(-payload_bytes // self.stripe.chunk_bytes)
        return frozenset(
            chunk
            for chunk in range(count)
            if (is_share or self.stripe.holder_of(rank, chunk) != self.lost.rank)
            and self.chunk_of(rank, chunk, is_share=is_share) < self._count
        )

    def chunk_of(self, rank: Rank, chunk: int, *, is_share: bool) -> int:
        """Return the chunk of the lost shard that a surviving rank's chunk helps to rebuild.

        The two chunks are in the same row of the same share. A row is the XOR of one chunk of each contributing shard.

        Args:
            rank: the surviving rank of the stripe.
            chunk: index of a row of the rank's share, or of a chunk of its shard.
            is_share: True if `chunk` is a row of the rank's share, False if it is a chunk of its shard.

        Returns:
            The index of the lost shard's chunk. It may be beyond the end of the lost shard.
        """
        holder = rank if is_share else self.stripe.holder_of(rank, chunk)
        return self.stripe.chunk_of(self.lost.rank, holder, chunk if is_share else self.stripe.row_of(chunk))

    def range_of(self, chunk: int) -> tuple[int, int]:
        """Return the positions in bytes at which a chunk of the lost shard begins and ends."""
        begin = chunk * self.stripe.chunk_bytes
        return begin, min(begin + self.stripe.chunk_bytes, self.lost.payload_bytes)

    @property
    def _count(self) -> int:
        return -(-self.lost.payload_bytes // self.stripe.chunk_bytes)


@dataclass(frozen=True, slots=True)
class ParityShare:
    """State of a parity share while other ranks contribute to it, kept by the holder's agent.

    The agent combines a chunk with the slot only if `accepts` returns True, and then records it with `apply`, both
    under one lock (`worker.shm.shares`). A restarted agent cannot see which chunks a slot contains. The agent empties
    the slot, and all members contribute again.
    """

    contributors: frozenset[Rank]
    """The other ranks of the stripe, each of which contributes a part of its shard."""
    announced: frozenset[Contribution] = frozenset()
    """The contributions (parts of their shards) that other ranks have announced for this share."""
    applied: frozenset[tuple[Rank, int]] = frozenset()
    """Pairs (contributor's rank, bit mask): the rows of the share that already contain a chunk of this contributor.

    A row of the share is the XOR of one chunk of each contributor. A contributor has at most one pair.
    """
    complete: frozenset[Rank] = frozenset()
    """Ranks whose whole contribution (part of a shard) is combined into this share."""

    def begin(self, contribution: Contribution) -> ParityShare:
        """Record that a member of the stripe has announced the shard that it contributes.

        If the member has announced a shard with another digest before, the share becomes empty. The agent then asks all
        members for their contributions again.
        """
        earlier = {each for each in self.announced if each.rank == contribution.rank}
        share = ParityShare(self.contributors) if earlier - {contribution} else self
        return replace(share, announced=share.announced | {contribution})

    def accepts(self, rank: Rank, row: int) -> bool:
        """Return whether the agent must still combine (XOR) the chunk of `rank` with row `row` of this share.

        False if the row contains the chunk already. A second XOR would remove the chunk.
        """
        return not self._rows(rank) >> row & 1

    def is_begun(self, row: int) -> bool:
        """Return whether a row of the share contains a chunk of at least one rank.

        A row without a chunk has undefined bytes.
        """
        return any(rows >> row & 1 for _, rows in self.applied)

    def apply(self, rank: Rank, row: int) -> ParityShare:
        """Record that row `row` of the share now contains the chunk of `rank`."""
        rows = self._rows(rank)
        return replace(self, applied=self.applied - {(rank, rows)} | {(rank, rows | 1 << row)})

    def finish(self, rank: Rank, rows: Iterable[int]) -> ParityShare:
        """Record that `rank` has sent its last chunk for this share.

        `rows` are the rows to which the rank's shard contributes a chunk; a short shard does not reach all rows. The
        rank counts as complete only if all these rows contain its chunk.
        """
        is_whole = all(self._rows(rank) >> row & 1 for row in rows)
        return replace(self, complete=self.complete | {rank}) if is_whole else self

    def is_progressing(self, connected: Collection[Rank], progressed: Collection[Rank]) -> bool:
        """Return whether this node should send progress messages to the ranks whose contributions are complete.

        The agents of these ranks wait until this node has sealed the share. Without progress messages, they drop this
        node from their view at the holder deadline.

        The result is True while every incomplete contribution may still arrive. Each rank that owes one must be
        connected. If this rank has begun to contribute, it must also have made progress since the method last returned
        True. A connected rank that has not begun may still capture the step.

        Args:
            connected: members (ranks of the stripe) with an open session to this node.
            progressed: members that have made progress, or have delayed their contribution themselves, since the method
                last returned True.

        Returns:
            True if every incomplete contribution may still arrive.
        """
        begun = {each.rank for each in self.announced}
        missing = self.contributors - self.complete
        return all(rank in connected and (rank not in begun or rank in progressed) for rank in missing)

    @property
    def is_complete(self) -> bool:
        """True if the share contains the whole contribution of every other rank, so that its slot may be sealed."""
        return self.complete == self.contributors

    def _rows(self, rank: Rank) -> int:
        return next((rows for owner, rows in self.applied if owner == rank), 0)


def place(
    slots: Sequence[SlotView],
    content: Content,
    keep: Collection[Content],
    free: Callable[[Sequence[SlotView], Collection[Content]], int | None] = writable,
) -> int | None:
    """Return the slot in which a holder builds its parity share at one step, or None if it must refuse.

    All other members of the stripe contribute their shards of one step to one slot. A member that has not received the
    newest proposal may begin to contribute an older step. Its contribution must not displace the share of a newer step,
    to which other members have already contributed.

    Args:
        slots: the slots of the share, in order.
        content: the content that a member begins to contribute.
        keep: contents that must not be overwritten, from `worker.core.slots.kept`.
        free: function that chooses the slot to overwrite, from the slots and the contents to keep.

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


def parity_bytes_per_node(*, stripes: Iterable[tuple[Stripe, int]], header_bytes: int, slot_count: int) -> int:
    """Return the host memory for the slots of one node with parity, in bytes.

    The formula assumes that the other members of each stripe own shards of the same size.

    Args:
        stripes: the stripe and the slot capacity of each shard that the node owns.
        header_bytes: bytes of a slot's file before the payload.
        slot_count: slots per shard and per share.

    Returns:
        slot_count · Σ (shard + share + two headers).
    """
    return slot_count * sum(
        capacity + stripe.capacity_bytes(capacity) + 2 * header_bytes for stripe, capacity in stripes
    )
