"""The shares of parity on this node: filled by contributions, sealed, and read to rebuild a lost shard.

    contribution of a member ──begin──▶ Accumulation ──take, per verified chunk──▶ slot ──finish, by all──▶ sealed

A share occupies ordinary slots of the `SlotStore` under the owner `share_owner(rank)`. Inventories, keep lists,
verification and fetches therefore treat a share like a shard (docs/adr/0035-parity-in-memory.md).

Invariant: the bytes of a WRITING share are the XOR of exactly the chunks that its `Share` records. Both change under
one lock, because the threads of several streams deliver chunks of one row.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from everstep.protocol.ids import Rank
from everstep.protocol.parity import (
    SHARE_BIT,
    Contribution,
    ShareRecord,
    pack_contributions,
    share_owner,
    unpack_contributions,
)
from everstep.protocol.slot import ZERO_DIGEST, SlotState
from worker.core.parity import Share, Stripe, place
from worker.core.slots import Content
from worker.shm.combining import combine
from worker.shm.slot_file import SlotFile
from worker.shm.store import Slot, SlotStore, in_thread


class Accumulation:
    """One share while contributions arrive. `Shares` creates it; threads of streams call `take`."""

    def __init__(self, stripe: Stripe, holder: Rank, content: Content, slot: Slot, index: int) -> None:
        self.stripe = stripe
        self.holder = holder
        self.content = content
        self.slot = slot
        self.index = index
        """Index of the slot among the slots of the share."""
        self.share = Share(frozenset(stripe.members) - {holder})
        self.version = 0
        """Grows when the share becomes empty again. A chunk of an earlier version is not combined."""
        self.is_over = False
        """True once the slot is sealed or was granted for another step."""
        self._lock = threading.Lock()

    def begin(self, contribution: Contribution) -> None:
        """Record that a member begins to contribute. Another shard than the member's earlier one empties the share."""
        with self._lock:
            begun = self.share.begin(contribution)
            if self.share.applied and not begun.applied:
                self.version += 1
                with self.slot.file.payload(0, self.slot.file.header.capacity_bytes) as payload:
                    _clear(payload, threading.Event())
            self.share = begun

    def missing(self, contribution: Contribution) -> tuple[int, ...]:
        """Return the chunks of a contribution that the share does not contain yet. The holder requests them."""
        chunks = self.stripe.contributed(contribution.rank, self.holder, contribution.payload_bytes)
        return tuple(chunk for chunk in chunks if self.share.accepts(contribution.rank, chunk))

    def take(self, rank: Rank, chunk: int, data: memoryview, *, version: int) -> bool:
        """Combine a chunk with the share, unless the share contains the chunk already.

        Args:
            rank: the member that owns the chunk.
            chunk: index of the chunk in the member's shard.
            data: the bytes of the chunk, which the caller has compared with the chunk's digest.
            version: the accumulation's version when the chunk was requested.

        Returns:
            True if the share contains the chunk now. False if the share was given up or emptied meanwhile.
        """
        with self._lock:
            if self.is_over or version != self.version:
                return False
            if self.share.accepts(rank, chunk):
                begin = chunk // (len(self.stripe.members) - 1) * self.stripe.chunk_bytes
                with self.slot.file.payload(begin, begin + len(data)) as target:
                    combine(target, data)
                self.share = self.share.apply(rank, chunk)
            return True

    def finish(self, contribution: Contribution) -> bool:
        """Record that a member has sent its last chunk. Return whether the share contains every contribution."""
        chunks = self.stripe.contributed(contribution.rank, self.holder, contribution.payload_bytes)
        with self._lock:
            self.share = self.share.finish(contribution.rank, chunks)
            return self.share.is_complete and not self.is_over and self.slot.is_written_with(self.content)

    def end(self) -> None:
        """Accept no more chunks. When the call returns, no thread changes the slot any more."""
        with self._lock:
            self.is_over = True


class Shares:
    """The shares that this node holds. The agent's loop calls every method."""

    def __init__(self, store: SlotStore, *, slot_count: int) -> None:
        """Create the object for one generation.

        A share that an earlier agent did not seal is empty from now on. No rank writes into slots of shares.

        Args:
            store: this node's slots of the run.
            slot_count: maximum number of slots per share.
        """
        self._store = store
        self._slot_count = slot_count
        self._accumulations: dict[tuple[Rank, Content], Accumulation] = {}
        self._locks: defaultdict[Rank, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By holder: held while a slot of the share is granted, cleared or sealed."""
        for owner in store.shards:
            if owner & SHARE_BIT:
                store.settle_copiers(owner)

    def has(self, holder: Rank, content: Content, contribution: Contribution) -> bool:
        """Return whether a sealed share of `content` contains the contribution. The member then need not send it."""
        slot = self._store.sealed(share_owner(holder), content)
        return slot is not None and contribution in contributions_of(slot.file)

    async def begin(
        self,
        stripe: Stripe,
        holder: Rank,
        content: Content,
        contribution: Contribution,
        *,
        keep: Collection[Content],
        capacity_bytes: int,
    ) -> Accumulation | None:
        """Accept a member's contribution to a share of this node, unless the node `has` it already.

        Args:
            holder: this node's rank in the stripe.
            content: the content that the member offers.
            keep: contents of the share that must survive.
            capacity_bytes: room for the share of the largest shards of the stripe, and for its index.

        Returns:
            The share's accumulation. None if every slot must be kept, or if the offer is outdated.

        Raises:
            NoRoom: the node's memory for slots is exhausted.
        """
        async with self._locks[holder]:
            found = self._accumulations.get((holder, content))
            if found is None or not found.slot.is_written_with(content):
                found = await self._place(stripe, holder, content, keep, capacity_bytes)
            if found is not None:
                found.begin(contribution)
            return found

    async def _place(
        self, stripe: Stripe, holder: Rank, content: Content, keep: Collection[Content], capacity_bytes: int
    ) -> Accumulation | None:
        """Grant and clear a slot for a share. An accumulation that used the slot ends first."""
        owner = share_owner(holder)
        stale = self._store.sealed(owner, content)
        if stale is not None:  # The share contains another shard of the same content.
            stale.file.empty()
        slots = self._store.shards.get(owner, [])
        if len(slots) >= self._slot_count:
            index = place([slot.view for slot in slots], content, keep)
            if index is None:
                return None
            for other in list(self._accumulations.values()):
                if other.slot is slots[index]:
                    self._give_up(other)
        index = await self._store.grant(
            owner,
            content,
            keep=keep,
            capacity_bytes=capacity_bytes,
            layout_hash=ZERO_DIGEST,
            slot_count=self._slot_count,
            free=lambda views, keep: place(views, content, keep),
        )
        if index is None:
            return None
        slot = self._store.shards[owner][index]
        await in_thread(partial(_clear_payload, slot.file))
        found = self._accumulations[holder, content] = Accumulation(stripe, holder, content, slot, index)
        return found

    async def finish(self, accumulation: Accumulation, contribution: Contribution) -> bytes | None:
        """Record the end of a contribution. Seal the share if this was the last one.

        Returns:
            The digest of the sealed share. None if contributions are missing, or if the share was given up.
        """
        async with self._locks[accumulation.holder]:
            if not accumulation.finish(contribution):
                return None
            self._give_up(accumulation)
            stripe, slot = accumulation.stripe, accumulation.slot
            announced = accumulation.share.announced
            size = stripe.share_bytes(accumulation.holder, {each.rank: each.payload_bytes for each in announced})
            index = pack_contributions(announced)
            with slot.file.payload(size, size + len(index)) as target:
                target[:] = index
            header = replace(
                slot.file.header, payload_bytes=size + len(index), index_offset=size, index_bytes=len(index)
            )
            return await self._store.seal(share_owner(accumulation.holder), accumulation.index, header)

    def inventory(self, holder: Rank) -> tuple[ShareRecord, ...]:
        """Return the sealed shares of one stripe, with the shards that their indices name."""
        return tuple(
            ShareRecord(
                holder_rank=holder,
                origin_generation=slot.file.header.origin_generation,
                step=slot.file.header.step,
                payload_bytes=slot.file.header.payload_bytes,
                digest=slot.file.header.payload_digest,
                contributions=contributions_of(slot.file),
            )
            for slot in self._store.shards.get(share_owner(holder), [])
            if slot.file.header.state is SlotState.SEALED
        )

    def _give_up(self, accumulation: Accumulation) -> None:
        accumulation.end()
        self._accumulations.pop((accumulation.holder, accumulation.content), None)


def contributions_of(share: SlotFile) -> tuple[Contribution, ...]:
    """Return the shards that a sealed share contains."""
    begin = share.header.index_offset
    with share.payload(begin, begin + share.header.index_bytes) as index:
        return unpack_contributions(bytes(index))


async def rebuild(
    store: SlotStore,
    stripe: Stripe,
    lost: Contribution,
    content: Content,
    *,
    read: Callable[[Rank, int, int], memoryview],
    keep: Collection[Content],
    slot_count: int,
) -> bool:
    """Rebuild a lost shard in a slot of this node, and seal the slot if the shard matches its owner's digest.

    Args:
        store: slots of the node that receives the shard.
        lost: the shard, as all shares of the other members name it.
        content: content of the shard and of everything that is read.
        read: returns bytes `begin` to `end` of the payload of a survivor's slot: (owner, begin, end). The owner is a
            rank, or a `share_owner`. A range behind the end of a payload is cut off.
        keep: contents of the shard that must survive.
        slot_count: maximum slots of the shard on this node.

    Returns:
        True if the slot is sealed. False if no slot is free, or if the rebuilt bytes do not match the digest.

    Raises:
        NoRoom: the node's memory for slots is exhausted.
    """
    index = await store.grant(
        lost.rank,
        content,
        keep=keep,
        capacity_bytes=lost.payload_bytes,
        layout_hash=lost.layout_hash,
        slot_count=slot_count,
    )
    if index is None:
        return False
    slot = store.shards[lost.rank][index]
    await in_thread(partial(_combine_pieces, slot.file, stripe, lost, read))
    header = replace(
        slot.file.header,
        payload_bytes=lost.payload_bytes,
        index_offset=lost.index_offset,
        index_bytes=lost.index_bytes,
    )
    return await store.seal(lost.rank, index, header, expected=lost.digest) is not None


def _combine_pieces(
    target: SlotFile,
    stripe: Stripe,
    lost: Contribution,
    read: Callable[[Rank, int, int], memoryview],
    cancelled: threading.Event,
) -> None:
    size = stripe.chunk_bytes
    for piece in stripe.pieces(lost.rank, lost.payload_bytes):
        if cancelled.is_set():
            return
        begin, end = piece.chunk * size, min((piece.chunk + 1) * size, lost.payload_bytes)
        sources = [(share_owner(piece.holder), piece.row), *piece.others]
        with target.payload(begin, end) as chunk:
            _clear(chunk, cancelled)
            for owner, place_in_payload in sources:
                at = place_in_payload * size
                with read(owner, at, at + end - begin) as source:
                    combine(chunk, source)


def _clear_payload(file: SlotFile, cancelled: threading.Event) -> None:
    with file.payload(0, file.header.capacity_bytes) as payload:
        _clear(payload, cancelled)


def _clear(payload: memoryview, cancelled: threading.Event) -> None:
    """Fill a payload with zeros, piece by piece."""
    zeros = bytes(1 << 20)
    for begin in range(0, len(payload), len(zeros)):
        if cancelled.is_set():
            return
        with payload[begin : begin + len(zeros)] as piece:
            piece[:] = zeros[: len(piece)]
