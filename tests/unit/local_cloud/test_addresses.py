"""Loopback addresses of different clusters do not collide."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import closing
from itertools import islice

import pytest

from infra.local_cloud.addresses import FIRST_HOST, LAST_HOST, AddressPool
from infra.local_cloud.errors import StartFailed


class Same(random.Random):
    """A random generator that always proposes the same blocks of addresses in the same order."""

    def __init__(self) -> None:
        super().__init__(0)
        self.tries = 0

    def randint(self, a: int, b: int) -> int:
        self.tries += 1
        return min(250 + self.tries // 3, b) if b == 254 else self.tries % 3 + 200


def addresses(pool: AddressPool) -> Iterator[str]:
    while True:
        yield pool.take()


def test_two_pools_of_the_same_mind_share_nothing() -> None:
    with closing(AddressPool(Same())) as one, closing(AddressPool(Same())) as other:
        first, second = set(islice(addresses(one), 300)), set(islice(addresses(other), 300))
    assert len(first) == len(second) == 300
    assert not first & second


def test_a_closed_pool_gives_its_block_back() -> None:
    with closing(AddressPool(Same())) as one:
        address = one.take()
    with closing(AddressPool(Same())) as other:
        assert other.take() == address


def test_an_address_can_be_served_on() -> None:
    with closing(AddressPool(random.Random(1))) as pool, socket.socket() as listener:
        listener.bind((pool.take(), 0))
        listener.listen()
        with socket.create_connection(listener.getsockname(), timeout=5):
            pass


def test_the_first_addresses_of_a_block_are_left_alone() -> None:
    with closing(AddressPool(random.Random(1))) as pool:
        hosts = [int(address.rsplit(".", 1)[1]) for address in islice(addresses(pool), LAST_HOST - FIRST_HOST + 1)]
    assert (min(hosts), max(hosts)) == (FIRST_HOST, LAST_HOST)


def test_no_free_block_is_said() -> None:
    class Stubborn(random.Random):
        def randint(self, a: int, b: int) -> int:
            return 254

    with closing(AddressPool(Stubborn())) as one, closing(AddressPool(Stubborn())) as other:
        one.take()
        with pytest.raises(StartFailed, match="no free loopback block"):
            other.take()
