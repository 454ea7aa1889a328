"""Builds this node's parity shares from parts of other ranks' shards (contributions), and seals the shares.

    contribution of a rank ──begin──▶ Accumulation ──take, per verified chunk──▶ slot ──finish, by all──▶ sealed

A share occupies ordinary slots of the `SlotStore` under the owner `share_owner(rank)`
(docs/adr/0035-parity-in-memory.md).

Invariant: the bytes of a WRITING share are the XOR of exactly the chunks that its `ParityShare` records. Both change
under one lock. A row (the place of one chunk) has undefined bytes until its first chunk is copied there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from everstep.protocol.ids import Rank, Step
from everstep.protocol.parity import MAX_SHARD_BYTES, Contribution, pack_contributions, share_owner, stripe_of
from everstep.protocol.slot import ZERO_DIGEST
from worker.core.parity import ParityShare, Stripe, place
from worker.core.slots import EMPTY, Content
from worker.shm import combining
from worker.shm.store import Slot, SlotStore, contributions_of
from worker.tasks import Background, Signal

log = logging.getLogger(__name__)


class Accumulation:
    """One parity share that is not sealed yet: its slot, and the shards that were combined in it so far."""

    def __init__(self, stripe: Stripe, holder: Rank, content: Content, slot: Slot, share: ParityShare) -> None:
        self.stripe = stripe
        self.holder = holder
        self.content = content
        self.slot = slot
        self.share = share
        self.is_sealed = False
        self.is_over = False
        """True once the slot is sealed, emptied, or granted for another content."""
        self.changed = Signal()
        """Notified when the share is sealed or given up."""
        self._is_sealing = False
        self._lock = threading.Lock()

    def begin(self, contribution: Contribution) -> bool:
        """Record that a rank of the stripe begins to contribute a part of its shard to this share.

        Return False if the rank has contributed a shard with another digest for this step. Its chunks cannot be
        removed, so the caller must begin with a new object.
        """
        with self._lock:
            begun = self.share.begin(contribution)
            if not self.share.announced <= begun.announced:
                return False
            self.share = begun
            return True

    def missing(self, contribution: Contribution) -> frozenset[int]:
        """Return the chunks of a rank's shard that this share's XOR does not contain yet. The holder requests them."""
        chunks = self.stripe.contributed(contribution.rank, self.holder, contribution.payload_bytes)
        return frozenset(chunk for chunk in chunks if self.share.accepts(contribution.rank, self.stripe.row_of(chunk)))

    def take(self, rank: Rank, chunk: int, data: memoryview) -> bool:
        """Combine a verified chunk with the share once. Return False if it accepts no more chunks. Thread-safe."""
        combining.prepare()  # Import numpy before the lock is taken, because the import can take a second.
        row = self.stripe.row_of(chunk)
        begin = row * self.stripe.chunk_bytes
        end = min(begin + self.stripe.chunk_bytes, self.slot.file.header.capacity_bytes)
        with self._lock:
            if self.is_over:
                return False
            if self.share.accepts(rank, row):
                with self.slot.file.payload(begin, end) as target:
                    (combining.combine if self.share.is_begun(row) else combining.replace)(target, data)
                self.share = self.share.apply(rank, row)
            return True

    def finish(self, contribution: Contribution) -> bool:
        """Record the end of a rank's contribution. Return True once, when the caller must seal the complete share."""
        chunks = self.stripe.contributed(contribution.rank, self.holder, contribution.payload_bytes)
        with self._lock:
            self.share = self.share.finish(contribution.rank, map(self.stripe.row_of, chunks))
            if not self.share.is_complete or self.is_over or self._is_sealing:
                return False
            self._is_sealing = True
            return True

    def end(self) -> None:
        """Accept no more chunks for this share. After this call, no thread changes the share's slot."""
        with self._lock:
            self.is_over = True
        self.changed.notify()

    async def decided(self) -> bool:
        """Wait until this node has sealed the share or stopped building it. Return whether the share is sealed."""
        while not self.is_over:
            await self.changed.wait(self.changed.version)
        return self.is_sealed


@dataclass(frozen=True, slots=True)
class Membership:
    """The stripe of a rank on another node, and the share of this node to which this rank contributes."""

    stripe: Stripe
    holder: Rank


class Shares:
    """The parity shares that this node holds in one generation. The agent's loop calls every method."""

    def __init__(
        self,
        store: SlotStore,
        stripes: Mapping[Rank, tuple[Rank, ...]],
        *,
        keep: Callable[[Rank, Step], Collection[Content]],
        slot_count: int,
    ) -> None:
        """Create the object for one generation, with the stripe of each rank of this node; empty without parity.

        `keep` returns which steps of a share or shard must not be overwritten, given the newest committed step that the
        owners report. `slot_count` is the maximum per share.
        """
        self.memberships: dict[Rank, Membership] = {
            contributor: Membership(Stripe(stripe), holder)
            for holder, stripe in stripes.items()
            for contributor in stripe
            if contributor != holder
        }
        """By contributing rank."""
        self._store = store
        self._keep = keep
        self._slot_count = slot_count
        self._accumulations: dict[tuple[Rank, Content], Accumulation] = {}
        self._capacities: defaultdict[Rank, int] = defaultdict(int)
        """By rank that holds the share: bytes of the largest shard that a contributor has announced."""
        self._locks: defaultdict[Rank, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By rank of this node: the lock for choosing, granting and creating a slot of its share."""
        self._sealing = Background()

    def inventory(self, contributor: Rank) -> tuple[tuple[Content, bytes], ...]:
        """Return content and digest of the shards of `contributor` that sealed shares of this node contain."""
        member = self.memberships[contributor]
        return tuple(
            (content, each.digest)
            for slot in self._store.shards.get(share_owner(member.holder), [])
            if (content := slot.sealed_content) is not None and self._is_of(member, slot)
            for each in contributions_of(slot.file)
            if each.rank == contributor
        )

    def has(self, content: Content, contribution: Contribution) -> bool:
        """Return whether a sealed share includes this shard at this step, so that it need not be sent again."""
        member = self.memberships[contribution.rank]
        slot = self._store.sealed(share_owner(member.holder), content)
        return slot is not None and self._is_of(member, slot) and contribution in contributions_of(slot.file)

    def accumulation(self, holder: Rank, content: Content) -> Accumulation | None:
        """Return the unfinished share that rank `holder` keeps, for the step and generation in `content`, or None."""
        return self._accumulations.get((holder, content))

    async def reserve(self, contributor: Rank, shard_bytes: int) -> None:
        """Create the slots of the share before the first contribution, for shards with slots of `shard_bytes` capacity.

        Raises NoRoom if the node's memory for slots is exhausted.
        """
        member = self.memberships[contributor]
        if shard_bytes > MAX_SHARD_BYTES:  # Reserve nothing: this node will later refuse the shard as too large.
            return
        async with self._locks[member.holder]:
            await self._store.reserve(
                share_owner(member.holder),
                capacity_bytes=self._capacity(member, shard_bytes),
                layout_hash=ZERO_DIGEST,
                slot_count=self._slot_count,
            )

    async def begin(
        self,
        content: Content,
        contribution: Contribution,
        *,
        shard_bytes: int,
        committed: Step,
        on_emptied: Callable[[], None] = lambda: None,
    ) -> Accumulation | None:
        """Begin to combine another rank's shard with a share of this node. Call this only if `has` returns False.

        `shard_bytes` is the capacity of the shard's slots on its own node, `committed` the newest committed step of its
        owner. `on_emptied` is called when this call empties a share with other ranks' shards, which all ranks must then
        send again, even if the call then fails.

        Return None if every slot must be kept, or if the shard is outdated. Raises NoRoom if the node's memory for
        slots is exhausted.
        """
        member = self.memberships[contribution.rank]
        owner = share_owner(member.holder)
        async with self._locks[member.holder]:
            capacity = self._capacity(member, max(shard_bytes, contribution.payload_bytes))
            found = self.accumulation(member.holder, content)
            if (
                found is not None
                and found.slot.is_written_with(content)
                and found.slot.file.header.capacity_bytes >= capacity
                and found.begin(contribution)
            ):
                return found
            slots = self._store.shards.get(owner, [])
            keep = self._keep(owner, committed)
            # The sealed share of this step may contain an outdated shard of `contribution.rank`, or belong to another
            # stripe. Its slot is then emptied below.
            stale = self._store.sealed(owner, content)
            views = [EMPTY if slot is stale else slot.view for slot in slots]
            chosen = place(views, content, keep) if len(slots) >= self._slot_count else None
            if chosen is None and len(slots) >= self._slot_count:
                return None
            if stale is not None:
                stale.file.empty()
            if stale is not None or found is not None:
                on_emptied()
            for other in list(self._accumulations.values()):
                if other is found or (chosen is not None and other.slot is slots[chosen]):
                    self._give_up(other)
            index = await self._store.grant(
                owner,
                content,
                keep=keep,
                capacity_bytes=capacity,
                layout_hash=ZERO_DIGEST,
                slot_count=self._slot_count,
                free=lambda views, kept: place(views, content, kept),
            )
            if index is None:
                return None
            share = ParityShare(member.stripe.others(member.holder)).begin(contribution)
            made = Accumulation(member.stripe, member.holder, content, self._store.shards[owner][index], share)
            self._accumulations[member.holder, content] = made
            return made

    def finish(self, accumulation: Accumulation, contribution: Contribution) -> None:
        """Record that a rank's shard (a contribution) is combined with the share; begin to seal a complete share."""
        if accumulation.finish(contribution):
            self._sealing.begin(self._seal(accumulation))

    async def _seal(self, accumulation: Accumulation) -> None:
        # Runs as a separate task, so that the loss of a contributor's connection does not cancel it.
        if accumulation.is_over:  # The node has begun to use the slot for another content.
            return
        stripe, slot, announced = accumulation.stripe, accumulation.slot, accumulation.share.announced
        size = stripe.share_bytes(accumulation.holder, {each.rank: each.payload_bytes for each in announced})
        index = pack_contributions(announced)
        header = replace(slot.file.header, payload_bytes=size + len(index), index_offset=size, index_bytes=len(index))
        owner = share_owner(accumulation.holder)
        try:
            with slot.file.payload(size, size + len(index)) as target:
                target[:] = index
            sealed = await self._store.seal(owner, self._store.shards[owner].index(slot), header)
            accumulation.is_sealed = sealed is not None
        except Exception:
            log.exception("share of rank %d at step %d is not sealed", accumulation.holder, accumulation.content.step)
        finally:
            self._give_up(accumulation)

    async def idle(self) -> None:
        """Wait until this node is not sealing any parity share."""
        await self._sealing.idle()

    async def close(self) -> None:
        """Accept no more chunks for this node's shares. The next generation empties the slots of unsealed shares."""
        for accumulation in list(self._accumulations.values()):
            self._give_up(accumulation)
        await self._sealing.close()

    def _give_up(self, accumulation: Accumulation) -> None:
        accumulation.end()
        key = accumulation.holder, accumulation.content
        if self._accumulations.get(key) is accumulation:
            del self._accumulations[key]

    def _capacity(self, member: Membership, shard_bytes: int) -> int:
        largest = self._capacities[member.holder] = max(self._capacities[member.holder], shard_bytes)
        return member.stripe.capacity_bytes(largest)

    @staticmethod
    def _is_of(member: Membership, slot: Slot) -> bool:
        return stripe_of(member.holder, contributions_of(slot.file)) == member.stripe.members
