import socket
from contextlib import closing

import pytest

from tests.ports import ReservedPort


def test_who_is_told_can_listen_on_any_address() -> None:
    with closing(ReservedPort()) as port, socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", port.number))
        server.listen()


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", ""])
def test_it_is_taken_for_everybody_else(address: str) -> None:
    with closing(ReservedPort()) as port, socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((address, port.number))
