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


def test_a_given_port_is_reserved_although_its_number_is_in_use_on_another_address() -> None:
    with socket.create_server(("127.9.9.9", 0)) as other:
        number = other.getsockname()[1]
        with closing(ReservedPort(number, "127.9.9.8")) as port:
            assert port.number == number
