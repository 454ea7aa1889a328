"""Streams between two nodes use both network cards of each node, in both directions."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.integration.worker.replication.own_network import (
    ADDRESSES,
    CARDS,
    may_have_one,
    on_two_nodes,
    readdress,
    sent_bytes,
)
from tests.integration.worker.replication.pair import HOLDER, OWNER, RANK, credentials
from worker.node.network_cards import NetworkCard, card_of, network_cards
from worker.replication.tcp import PeerListener, TcpSession, dial

pytestmark = pytest.mark.integration
SIZE = 1 << 20
SECONDS = 30


@pytest.fixture
def class_net(tmp_path: Path) -> Path:
    """Write the files by which the kernel would list the cards, and return their folder."""
    for name in CARDS:
        (tmp_path / name / "device").mkdir(parents=True)
        (tmp_path / name / "operstate").write_text("up\n")
    return tmp_path


def received(line: socket.socket, size: int) -> int:
    count = 0
    while count < size and (data := line.recv(1 << 16)):
        count += len(data)
    return count


@pytest.mark.allow_hosts(["10.77.0.0/24"])
def test_streams_go_over_all_cards_both_ways(class_net: Path) -> None:
    """Packets of streams on the second card leave through the second card.

    In a VPC, packets that leave through another card would be dropped.
    """
    if not may_have_one():
        pytest.skip("no right to a network namespace")
    listening, dialled = Future[int](), Future[None]()
    sent: dict[int, dict[str, int]] = {}

    async def holder() -> None:
        def swap(line: socket.socket) -> None:
            with line:
                line.settimeout(SECONDS)
                assert received(line, SIZE) == SIZE
                line.sendall(bytes(SIZE))

        async def serve(session: TcpSession) -> None:
            await asyncio.to_thread(swap, session.detach())

        listener = PeerListener(HOLDER)
        try:
            own, *more = network_cards(ADDRESSES[1][0], class_net)
            listener.start(own.address, more_cards=more)
            listener.admit(credentials(HOLDER), serve)
            listening.set_result(listener.port)
            await asyncio.to_thread(dialled.result, SECONDS)
            sent[1] = sent_bytes()
        except BaseException as error:
            if not listening.done():
                listening.set_exception(error)
            raise
        finally:
            await listener.close()

    async def owner() -> None:
        try:
            port = await asyncio.to_thread(listening.result, SECONDS)
            cards = network_cards(ADDRESSES[0][0], class_net)
            assert cards == tuple(NetworkCard(address, name) for address, name in zip(ADDRESSES[0], CARDS, strict=True))
            for card, address in zip(cards, ADDRESSES[1], strict=True):
                stream = await dial(
                    credentials(OWNER),
                    peer=HOLDER,
                    address=address,
                    port=port,
                    kind="stream",
                    owner_rank=RANK,
                    source=card,
                )
                with stream.detach() as line:
                    line.settimeout(SECONDS)
                    line.sendall(bytes(SIZE))
                    assert received(line, SIZE) == SIZE
            sent[0] = sent_bytes()
        finally:
            dialled.set_result(None)

    on_two_nodes(owner, holder)
    for node in sent.values():
        assert all(SIZE < count < 1.5 * SIZE for count in node.values()), sent


def test_a_card_that_is_down_one_without_an_address_and_one_of_another_network_are_not_used(class_net: Path) -> None:
    if not may_have_one():
        pytest.skip("no right to a network namespace")
    alone = (NetworkCard(ADDRESSES[0][0]),)

    async def node() -> None:
        assert [card_of(address) for address in (*ADDRESSES[0], ADDRESSES[1][0], "127.0.0.9")] == ["e0", "e1", "", "lo"]
        (class_net / "e1" / "operstate").write_text("down\n")
        assert network_cards(ADDRESSES[0][0], class_net) == alone
        (class_net / "e1" / "operstate").write_text("up\n")
        assert len(network_cards(ADDRESSES[0][0], class_net)) == 2
        for none_or_far in ("", "10.78.0.11"):
            readdress("e1", none_or_far)
            assert network_cards(ADDRESSES[0][0], class_net) == alone
        readdress("e1", "127.77.0.11")
        assert card_of("127.77.0.11") == "e1", "as in a local cloud's namespaces, where loopback leads to no other node"

    async def elsewhere() -> None:
        for address in ("10.77.0.99", "127.0.0.1"):  # an address that belongs to no card, and the loopback address
            assert network_cards(address, class_net) == (NetworkCard(address),)

    on_two_nodes(node, elsewhere)
