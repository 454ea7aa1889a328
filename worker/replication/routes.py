"""Chooses the pair of network cards (own and peer's) for each stream between two nodes, and skips pairs that fail.

    stream 0 ─▶ this node's first card,  the peer's first       the session's own pair
    stream 1 ─▶ this node's second card, the peer's second      if it fails: the next pairs, then the session's own

Invariant: a pair is skipped only if another pair reaches the same peer. The session's own pair is never skipped.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from everstep.protocol.ids import NodeId
from worker.errors import PeerLost
from worker.node.network_cards import NetworkCard

log = logging.getLogger(__name__)
LEFT_OUT_SECONDS = 60.0
"""Seconds for which a pair is skipped after a failed connection, which takes a full handshake timeout."""
Address = tuple[str, int]
Way = tuple[NetworkCard, Address]
T = TypeVar("T")


class Ways:
    """Selects the pair of network cards for each stream. `cards` has the card with the node's address first."""

    def __init__(self, cards: Sequence[NetworkCard]) -> None:
        self._cards = tuple(cards)
        self._left_out: dict[Way, float] = {}
        """Time until which each failed pair is skipped, on the loop's clock."""

    async def open(
        self,
        peer: NodeId,
        addresses: Sequence[Address],
        number: int,
        dial: Callable[[NetworkCard, Address], Awaitable[T]],
    ) -> T:
        """Open stream `number` with `dial` over the next pair of network cards; consecutive numbers use different
        pairs.

        `addresses` are those of the peer's cards, the peer's node address first. Raises PeerError if no pair reaches
        the peer, or another node answers.
        """
        now = asyncio.get_running_loop().time()
        count = math.lcm(len(self._cards), len(addresses))
        own, *further = [
            (self._cards[each % len(self._cards)], addresses[each % len(addresses)]) for each in range(count)
        ]
        usable = [own, *(way for way in further if now >= self._left_out.get(way, -math.inf))]
        chosen = number % len(usable)
        lost: dict[Way, PeerLost] = {}
        for way in [*usable[chosen:], own] if chosen else [own]:
            try:
                stream = await dial(*way)
            except PeerLost as error:
                lost[way] = error
            else:
                self._leave_out(peer, lost)
                return stream
        raise lost[own]

    def _leave_out(self, peer: NodeId, lost: Mapping[Way, PeerLost]) -> None:
        now = asyncio.get_running_loop().time()
        for way, error in lost.items():
            if now >= self._left_out.get(way, -math.inf):  # Log once per pair of network cards, not per stream.
                log.warning(
                    "streams to %s skip the cards %s for %g s: %s",
                    peer,
                    way[0].name or way[0].address,
                    LEFT_OUT_SECONDS,
                    error,
                )
            self._left_out[way] = now + LEFT_OUT_SECONDS
