"""Parity in memory: the chunks that a share contains, and when a share is complete (docs/adr/0035-parity-in-memory.md).

In a stripe of g ranks, a *contribution* is every (g - 1)-th chunk of a shard.

    g = 4        A            B            C            D
    row 0   b2⊕c1⊕d0     c2⊕d1⊕a0     d2⊕a1⊕b0     a2⊕b1⊕c0      b2: chunk 2 of B's shard
    row 1   b5⊕c4⊕d3     c5⊕d4⊕a3     d5⊕a4⊕b3     a5⊕b4⊕c3

Invariant: a share is sealed only if it contains exactly one contribution of every other member of its stripe, all of
the same origin generation and step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from everstep.protocol.ids import Rank
from everstep.protocol.parity import Contribution
from everstep.protocol.slot import CHUNK_BYTES, SlotState
from worker.core.slots import Content, SlotView, being_written, writable

CONTRIBUTION_BYTES = 320
"""Bytes that a share's slot reserves for each packed `Contribution`."""


@dataclass(frozen=True, slots=True)
class Stripe:
    """The ranks of a stripe, and the layout of their shares."""

    members: tuple[Rank, ...]
    """At least two ranks, in ascending order."""
    chunk_bytes: int = CHUNK_BYTES

    def others(self, rank: Rank) -> frozenset[Rank]:
        """Return all ranks of the stripe except `rank`."""
        return frozenset(self.members) - {rank}

    def holder_of(self, rank: Rank, chunk: int) -> Rank:
        """Return the rank whose share contains a chunk of the shard of `rank`."""
        place = self.members.index(rank)
        return self.members[(place + 1 + chunk % self.width) % len(self.members)]

    def row_of(self, chunk: int) -> int:
        """Return the row of a share to which a chunk of a shard belongs."""
        return chunk // self.width

    def chunk_of(self, rank: Rank, holder: Rank, row: int) -> int:
        """Return the index of the chunk of the shard of `rank` in row `row` of the share of `holder`, another rank."""
        return row * self.width + self._first(rank, holder)

    def contributed(self, rank: Rank, holder: Rank, payload_bytes: int) -> range:
        """Return the chunks of the shard of `rank` (of `payload_bytes`) in the share of `holder`, from row 0 on."""
        return range(self._first(rank, holder), -(-payload_bytes // self.chunk_bytes), self.width)

    def share_bytes(self, holder: Rank, payload_bytes: Mapping[Rank, int]) -> int:
        """Return the size of the share of `holder`, without its list of contributions, given the shards' sizes."""
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
        """The number of chunks whose XOR is one row of a share."""
        return len(self.members) - 1

    def _first(self, rank: Rank, holder: Rank) -> int:
        return (self.members.index(holder) - self.members.index(rank) - 1) % len(self.members)


@dataclass(frozen=True, slots=True)
class Missing:
    """A lost shard, and the rules that select the surviving chunks from which it is rebuilt."""

    stripe: Stripe
    lost: Contribution

    def wanted(self, rank: Rank, payload_bytes: int, *, is_share: bool) -> frozenset[int]:
        """Return the chunks of a survivor's share (`is_share`) or shard, of `payload_bytes`, that a rebuild needs."""
        count = -(-payload_bytes // self.stripe.chunk_bytes)
        return frozenset(
            chunk
            for chunk in range(count)
            if (is_share or self.stripe.holder_of(rank, chunk) != self.lost.rank)
            and self.chunk_of(rank, chunk, is_share=is_share) < self._count
        )

    def chunk_of(self, rank: Rank, chunk: int, *, is_share: bool) -> int:
        """Return the chunk of the lost shard that a row of a survivor's share, or a chunk of its shard, rebuilds."""
        # The result may be beyond the end of the lost shard.
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
    """State of a share while other ranks contribute to it, kept by the holder's agent.

    The agent combines a chunk with the slot only if `accepts` returns True, and then records it with `apply`, both
    under one lock (`worker.shm.shares`). A restarted agent cannot see which chunks a slot contains, so it empties the
    slot.
    """

    contributors: frozenset[Rank]
    announced: frozenset[Contribution] = frozenset()
    applied: frozenset[tuple[Rank, int]] = frozenset()
    """At most one pair (rank, bit mask of the rows that already contain a chunk of this rank) per contributor."""
    complete: frozenset[Rank] = frozenset()

    def begin(self, contribution: Contribution) -> ParityShare:
        """Record an announced contribution. After an announcement with another digest, the share becomes empty."""
        earlier = {each for each in self.announced if each.rank == contribution.rank}
        share = ParityShare(self.contributors) if earlier - {contribution} else self
        return replace(share, announced=share.announced | {contribution})

    def accepts(self, rank: Rank, row: int) -> bool:
        """Return whether the chunk of `rank` is missing in row `row`. A second XOR would remove it."""
        return not self._rows(rank) >> row & 1

    def is_begun(self, row: int) -> bool:
        """Return whether a row contains a chunk of at least one rank. A row without a chunk has undefined bytes."""
        return any(rows >> row & 1 for _, rows in self.applied)

    def apply(self, rank: Rank, row: int) -> ParityShare:
        """Record that row `row` now contains the chunk of `rank`."""
        rows = self._rows(rank)
        return replace(self, applied=self.applied - {(rank, rows)} | {(rank, rows | 1 << row)})

    def finish(self, rank: Rank, rows: Iterable[int]) -> ParityShare:
        """Record that `rank` sent its last chunk. It is complete if all `rows` that it reaches contain its chunk."""
        is_whole = all(self._rows(rank) >> row & 1 for row in rows)
        return replace(self, complete=self.complete | {rank}) if is_whole else self

    def is_progressing(self, connected: Collection[Rank], progressed: Collection[Rank]) -> bool:
        """Return whether this node should send progress messages to the ranks whose contributions are complete.

        Their agents would otherwise drop this node at the holder deadline. True while every incomplete contribution may
        arrive: `connected` are ranks with an open session, `progressed` those that have sent or delayed data since the
        last True.
        """
        begun = {each.rank for each in self.announced}
        missing = self.contributors - self.complete
        # A connected rank that has not begun may still capture the step.
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
    """Return the index of the slot in which a holder builds its share with `content`, or None if it must refuse.

    `keep` has the protected contents (`kept`). `free` chooses the slot to overwrite, from the slots and `keep`.
    """
    index = being_written(slots, content)
    if index is not None:
        return index
    # A rank that has not received the newest proposal may contribute an older step. It must not displace the share
    # of a newer step.
    newest = max((slot.content.step for slot in slots if slot.content is not None), default=content.step)
    if content not in keep and content.step < newest:
        return None
    guarded = [
        replace(slot, is_pinned=True) if slot.state is SlotState.WRITING and slot.content in keep else slot
        for slot in slots
    ]
    return free(guarded, keep)


def parity_bytes_per_node(*, stripes: Iterable[tuple[Stripe, int]], header_bytes: int, slot_count: int) -> int:
    """Return the bytes of host memory for a node's slots with parity, if all shards of a stripe are equally large.

    `stripes` has the stripe and the slot capacity of each own shard. `header_bytes` is the size before a payload.
    """
    return slot_count * sum(
        capacity + stripe.capacity_bytes(capacity) + 2 * header_bytes for stripe, capacity in stripes
    )
