"""The ways between the network cards of two nodes, for streams: each takes the next one that leads somewhere.

    stream 0 ─▶ this node's first card,  the peer's first       the session's own way
    stream 1 ─▶ this node's second card, the peer's second      leads nowhere: the next ways are tried, the own one last
    stream 2 ─▶ ...

Invariant: a way is left out only once another one has led to the same peer meanwhile: from a peer that is gone nothing
is learnt about cards. The session's own is never left out.
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
"""A way that leads nowhere costs who tries it a whole handshake's time."""
Address = tuple[str, int]
Way = tuple[NetworkCard, Address]
T = TypeVar("T")


class Ways:
    """From the cards of this node. One per member of a generation; for its loop.

    Args:
        cards: this node's, the one with its address first.
    """

    def __init__(self, cards: Sequence[NetworkCard]) -> None:
        self._cards = tuple(cards)
        self._left_out: dict[Way, float] = {}
        """Until when, by the loop's clock."""

    async def open(
        self,
        peer: NodeId,
        addresses: Sequence[Address],
        number: int,
        dial: Callable[[NetworkCard, Address], Awaitable[T]],
    ) -> T:
        """Open a stream over the next way that leads to a peer.

        Args:
            peer: whose addresses these are, for the log.
            addresses: of its cards, the one with its own address first.
            number: of the stream; from one to the next the ways are taken in turn.
            dial: opens a stream over a card, to an address.

        Returns:
            What `dial` returned.

        Raises:
            PeerError: no way leads there, or who answers is not the peer.
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
            if now >= self._left_out.get(way, -math.inf):  # else another stream has just told of it
                log.warning(
                    "streams to %s leave out %s for %g s: %s",
                    peer,
                    way[0].name or way[0].address,
                    LEFT_OUT_SECONDS,
                    error,
                )
            self._left_out[way] = now + LEFT_OUT_SECONDS
