"""A TLS socket keeps the contract of a plain blocking socket, on which sessions and streams depend."""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.protocol.ids import NodeId
from tests.fakes.identities import identity_of
from worker.replication.streams import send_all
from worker.replication.tls import TlsSocket

Lines = tuple[socket.socket, socket.socket]


def tcp_pair() -> Lines:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


def tls_pair() -> Lines:
    """Return two connected TLS sockets that wait, with small kernel buffers."""
    found: list[ssl.SSLSocket] = []
    for line, node_id, is_server in zip(tcp_pair(), ("i-1", "i-2"), (False, True), strict=True):
        line.setblocking(False)
        context = identity_of(NodeId(node_id)).context(is_server=is_server)
        found.append(context.wrap_socket(line, server_side=is_server, do_handshake_on_connect=False))
    waiting = list(found)
    while waiting:
        for line in list(waiting):
            try:
                line.do_handshake()
                waiting.remove(line)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                select.select(found, [], [], 1)
    for line in found:
        line.setblocking(True)
    return found[0], found[1]


PAIRS = {"tcp": tcp_pair, "tls": tls_pair}


@pytest.fixture(params=PAIRS)
def lines(request: pytest.FixtureRequest) -> Iterator[Lines]:
    one, other = PAIRS[request.param]()
    with one, other:
        yield one, other


def seconds(value: float) -> bytes:
    return struct.pack("ll", int(value), int(1e6 * (value % 1)))


def received(line: socket.socket, size: int) -> bytes:
    """Return the next bytes, received as a stream's thread receives them."""
    data = bytearray(size)
    with memoryview(data) as whole:
        filled = 0
        while filled < size:
            count = line.recv_into(whole[filled:], 0, socket.MSG_WAITALL)
            if not count:
                break
            filled += count
    return bytes(data[:filled])


@pytest.fixture(scope="module", params=PAIRS)
def standing(request: pytest.FixtureRequest) -> Iterator[Lines]:
    one, other = PAIRS[request.param]()
    with one, other:
        yield one, other


@given(header=st.binary(max_size=80), size=st.integers(0, 300_000), fill=st.binary(min_size=1, max_size=7))
@settings(max_examples=40, deadline=None)
def test_a_header_and_its_data_arrive_whole(standing: Lines, header: bytes, size: int, fill: bytes) -> None:
    one, other = standing
    data = (fill * (size // len(fill) + 1))[:size]
    taken: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        arriving = pool.submit(received, other, len(header) + size)
        with memoryview(data) as view:
            send_all(one, header, view, taken.append)
        assert arriving.result(10) == header + data
    assert sum(taken) == size


def test_a_sender_without_a_reader_gets_blocking_io_error_after_its_limit(lines: Lines) -> None:
    one, other = lines
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds(0.02))
    sent = 0
    data = bytes(range(256)) * 1024
    view = memoryview(data)
    with pytest.raises(BlockingIOError):  # noqa: PT012  the kernel's buffers decide which call fails
        while True:
            sent += one.send(view[sent % len(data) :])
    with ThreadPoolExecutor(1) as pool:
        arriving = pool.submit(received, other, sent + len(data))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds(0))
        end = sent + len(data)
        while sent < end:  # The sender repeats the same bytes, as `send_all` does.
            sent += one.send(view[sent % len(data) :][: end - sent])
        found = arriving.result(10)
    assert found == (data * (end // len(data) + 1))[:end]


def test_a_receiver_without_data_gets_blocking_io_error_after_its_limit(lines: Lines) -> None:
    one, other = lines
    other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds(0.02))
    with pytest.raises(BlockingIOError):
        other.recv_into(bytearray(10), 0, socket.MSG_WAITALL)
    one.sendall(b"half")
    select.select([other], [], [], 10)  # a busy machine can deliver the bytes after the receiver's limit
    part = bytearray(10)
    assert other.recv_into(part, 0, socket.MSG_WAITALL) == 4
    assert part[:4] == b"half"


def test_a_shutdown_wakes_both_directions_and_sends_nothing(lines: Lines) -> None:
    one, other = lines
    with ThreadPoolExecutor(1) as pool:
        waits = threading.Event()

        def receive() -> int:
            waits.set()
            return one.recv_into(bytearray(10), 0, socket.MSG_WAITALL)

        receiving = pool.submit(receive)
        waits.wait(10)
        one.shutdown(socket.SHUT_RDWR)
        assert receiving.result(10) == 0
    with pytest.raises(OSError, match=r"(?i)broken pipe|shut ?down|EOF|protocol"):
        one.send(b"secret")
    assert received(other, 6) == b""


def test_a_socket_that_does_not_wait_gets_blocking_io_error_at_once() -> None:
    one, other = tls_pair()
    with one, other:
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv_into(bytearray(1))
        assert isinstance(other, TlsSocket)
        assert other.peer_names() == ("everstep://main/i-1",)
        assert other.version() == "TLSv1.3"
