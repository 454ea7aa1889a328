"""Tests which network cards streams use, and how a session handles a card that cannot reach the peer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from everstep.protocol.ids import NodeId
from worker.errors import PeerLost, PeerRefused
from worker.node.network_cards import NetworkCard
from worker.replication.routes import LEFT_OUT_SECONDS, Address, Ways

PEER = NodeId("i-b")
CARDS = tuple(NetworkCard(f"10.0.0.{number}", f"e{number}") for number in range(4))
ADDRESSES = tuple((f"10.0.1.{number}", 9000) for number in range(4))


class Network:
    """A fake network between two nodes. Cards in `dead` cannot reach the peer."""

    def __init__(self) -> None:
        self.dead: set[str] = set()
        self.tried: list[tuple[str, str]] = []

    async def dial(self, card: NetworkCard, address: Address) -> tuple[str, str]:
        """Open a stream, unless the card is dead."""
        self.tried.append((card.name, address[0][-1]))
        if card.name in self.dead:
            raise PeerLost(f"{address[0]} does not answer")
        return self.tried[-1]

    async def opened(self, ways: Ways, count: int, addresses: Sequence[Address] = ADDRESSES) -> list[str]:
        """Open `count` streams as a session does, and return the names of their cards."""
        return [(await ways.open(PEER, addresses, number, self.dial))[0] for number in range(count)]


@pytest.mark.parametrize(
    ("card_count", "address_count", "expected"),
    [
        (4, 4, [("e0", "0"), ("e1", "1"), ("e2", "2"), ("e3", "3"), ("e0", "0")]),
        (2, 1, [("e0", "0"), ("e1", "0"), ("e0", "0"), ("e1", "0"), ("e0", "0")]),
        (1, 3, [("e0", "0"), ("e0", "1"), ("e0", "2"), ("e0", "0"), ("e0", "1")]),
        (2, 3, [("e0", "0"), ("e1", "1"), ("e0", "2"), ("e1", "0"), ("e0", "1")]),
    ],
)
async def test_streams_take_the_cards_of_both_nodes_in_turn(
    card_count: int, address_count: int, expected: list[tuple[str, str]]
) -> None:
    network = Network()
    await network.opened(Ways(CARDS[:card_count]), 5, ADDRESSES[:address_count])
    assert network.tried == expected


async def test_a_card_that_leads_nowhere_is_tried_once_and_those_behind_it_are_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If one card cannot reach the peer, streams use the cards after it in the list.

    The next session does not try this card, because the wait for its handshake would delay every session.
    """
    network, ways = Network(), Ways(CARDS)
    network.dead = {"e1"}
    assert await network.opened(ways, 4) == ["e0", "e2", "e3", "e0"]
    assert await network.opened(ways, 4) == ["e0", "e2", "e3", "e0"]
    assert [name for name, _ in network.tried].count("e1") == 1
    assert [record.getMessage() for record in caplog.records] == [
        "streams to i-b skip the cards e1 for 60 s: 10.0.1.1 does not answer"
    ]


async def test_it_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    network, ways, loop = Network(), Ways(CARDS), asyncio.get_running_loop()
    network.dead = {"e1", "e3"}
    assert await network.opened(ways, 4) == ["e0", "e2", "e0", "e2"]
    network.dead = set()
    later = loop.time() + LEFT_OUT_SECONDS + 1
    monkeypatch.setattr(loop, "time", lambda: later)
    assert await network.opened(ways, 4) == ["e0", "e1", "e2", "e3"]


async def test_of_a_peer_that_is_gone_nothing_is_learnt_about_cards() -> None:
    network, ways = Network(), Ways(CARDS)
    network.dead = {card.name for card in CARDS}
    with pytest.raises(PeerLost, match=r"10\.0\.1\.0 does not answer"):
        await ways.open(PEER, ADDRESSES, 0, network.dial)
    assert network.tried == [("e0", "0")], "what the session itself goes over"
    with pytest.raises(PeerLost, match=r"10\.0\.1\.0 does not answer"):
        await ways.open(PEER, ADDRESSES, 2, network.dial)
    network.dead = set()
    assert await network.opened(ways, 4) == ["e0", "e1", "e2", "e3"]


async def test_who_answers_and_is_not_the_peer_is_no_matter_of_cards() -> None:
    async def refuse(card: NetworkCard, address: Address) -> None:
        raise PeerRefused("does not hold the key")

    ways = Ways(CARDS)
    with pytest.raises(PeerRefused):
        await ways.open(PEER, ADDRESSES, 1, refuse)
    assert (await Network().opened(ways, 2)) == ["e0", "e1"]
