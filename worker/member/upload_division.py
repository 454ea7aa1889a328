"""Lets the ranks of a generation agree on which rank writes tensors that several ranks hold: the *division*.

    owner's agent ──OfferTensors──▶ coordinator's agent, which waits for every rank's list of tensors (its offer)
                  ◀─TensorsDivided─ and calls `divide` (`worker.core.upload_division`) once per step

A rank without an answer uploads all of its tensors. Invariant: the coordinator's agent divides each step at most once
while it runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from everstep.protocol.errors import MalformedMessage, ProtocolError
from everstep.protocol.ids import NodeId, Rank, Step
from everstep.protocol.peer_messages import OfferTensors, TensorsDivided
from everstep.protocol.plan import GenerationPlan
from worker.core.upload_division import MAX_OFFERED, OWN, Division, Item, divide
from worker.errors import PeerError
from worker.replication.transport import Session
from worker.shm.store import in_thread
from worker.tasks import Background, first_of

log = logging.getLogger(__name__)

GATHER_SECONDS = 10.0
"""Maximum seconds from the first offer for a step until its tensors are divided. A later rank uploads all tensors."""
KEPT_STEPS: Final = 4

Items = tuple[Item, ...]


@dataclass(slots=True)
class _Gathering:
    offers: dict[Rank, Items] | None = field(default_factory=dict[Rank, Items])
    """None once the tensors are divided, because many lists occupy several hundred megabytes."""
    hashes: dict[Rank, int] = field(default_factory=dict[Rank, int])
    """Hash of each rank's list. A rank that later sends another list receives no result."""
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the tensors are divided. If this failed, `divisions` is empty."""
    divisions: dict[Rank, Division] = field(default_factory=dict[Rank, Division])


@dataclass(eq=False, repr=False)
class UploadDivision:
    """Lets the ranks of one generation agree on which rank uploads each tensor that several ranks hold."""

    plan: GenerationPlan
    node_id: NodeId
    dial: Callable[[NodeId], Awaitable[Session]]
    _: KW_ONLY
    pause: Callable[[float], Coroutine[object, object, object]] = asyncio.sleep

    def __post_init__(self) -> None:
        self._gatherings: dict[Step, _Gathering] = {}
        self._background = Background()

    async def agree(self, rank: Rank, step: Step, items: Sequence[Item]) -> Division | None:
        """Send a local rank's offer to the coordinator's node, and return which tensors the rank writes to S3.

        `items` are first frozen groups, then single tensors. None for an empty list, which does not wait for other
        ranks, and if the ranks could not agree in time.
        """
        if self.plan.world_size == 1:
            return None
        if self.plan.coordinator == self.node_id:
            if items:
                return await self._divide(rank, step, tuple(items))
            self._offer(step, rank, ())
            return None
        try:
            async with asyncio.timeout(2 * GATHER_SECONDS):
                return await self._ask(rank, step, items)
        except (PeerError, ProtocolError, TimeoutError) as error:
            log.info("rank %d uploads all tensors of step %d: %s", rank, step, error or "no answer in time")
            return None

    async def serve(self, session: Session) -> None:
        """Receive another node's offer, and answer which tensors its rank writes to S3. Raises MalformedMessage."""
        offer = await session.receive()
        if not isinstance(offer, OfferTensors) or offer.owner_rank not in self.plan.node(session.peer).ranks:
            raise MalformedMessage(f"{type(offer).__name__} received, expected the offer of a rank of {session.peer}")
        items = _items_of(offer)
        if not items:
            self._offer(offer.step, offer.owner_rank, ())
            return
        division = await self._divide(offer.owner_rank, offer.step, items)
        if division is None:
            await session.send(TensorsDivided())
        else:
            await session.send(TensorsDivided(objects=division.objects, writes=tuple(sorted(division.writes))))

    async def close(self) -> None:
        """End unfinished divisions without a result: each rank that waits for one then uploads all of its tensors."""
        await self._background.close()

    async def _ask(self, rank: Rank, step: Step, items: Sequence[Item]) -> Division | None:
        session = await self.dial(self.plan.coordinator)
        try:
            await session.send(
                OfferTensors(
                    owner_rank=rank,
                    step=step,
                    digests=tuple(item.digest for item in items),
                    sizes=tuple(item.bytes for item in items),
                    frozen_count=sum(item.is_frozen for item in items),
                )
            )
            if not items:
                return None
            answer = await session.receive()
        finally:
            session.close()
        if not isinstance(answer, TensorsDivided):
            raise MalformedMessage(f"{type(answer).__name__} received, expected TensorsDivided")
        if not answer.objects:
            return None
        pairs = zip(items, answer.objects, strict=False)
        if len(answer.objects) != len(items) or any(item.is_frozen and number == OWN for item, number in pairs):
            raise MalformedMessage("the received division does not match the offered tensors")
        return Division(answer.objects, frozenset(answer.writes))

    def _offer(self, step: Step, rank: Rank, items: Items) -> None:
        gathering = self._gatherings.get(step)
        if gathering is None:
            gathering = self._gatherings[step] = _Gathering()
            for old in sorted(self._gatherings)[:-KEPT_STEPS]:
                del self._gatherings[old]
            self._background.begin(self._settle(gathering), f"division of step {step}")
        if gathering.offers is not None and rank not in gathering.offers:
            gathering.offers[rank], gathering.hashes[rank] = items, hash(items)
            if len(gathering.offers) == self.plan.world_size:
                gathering.complete.set()

    async def _divide(self, rank: Rank, step: Step, items: Items) -> Division | None:
        """Record a rank's offer, wait for all offers, and return what it writes; None for a late or different offer."""
        self._offer(step, rank, items)
        gathering = self._gatherings.get(step)
        if gathering is None:
            return None
        await gathering.settled.wait()
        return gathering.divisions.get(rank) if gathering.hashes.get(rank) == hash(items) else None

    async def _settle(self, gathering: _Gathering) -> None:
        try:
            await first_of(gathering.complete.wait(), self.pause(GATHER_SECONDS))
            if not gathering.complete.is_set():
                log.info("%d of %d ranks offered tensors in time", len(gathering.hashes), self.plan.world_size)
            offers, gathering.offers = gathering.offers or {}, None
            gathering.divisions = await in_thread(lambda _: divide(offers))
        finally:
            gathering.settled.set()


def _items_of(offer: OfferTensors) -> Items:
    """Return the tensors that a rank listed. Raise MalformedMessage if the list is inconsistent or exceeds limits."""
    is_sound = (
        len(offer.digests) == len(offer.sizes) <= 2 * MAX_OFFERED
        and 0 <= offer.frozen_count <= len(offer.digests)
        and all(0 < size < 2**63 for size in offer.sizes)
    )
    if not is_sound:
        raise MalformedMessage(f"rank {offer.owner_rank} offered tensors with wrong sizes or digests")
    pairs = enumerate(zip(offer.digests, offer.sizes, strict=True))
    return tuple(Item(digest, size, is_frozen=number < offer.frozen_count) for number, (digest, size) in pairs)
