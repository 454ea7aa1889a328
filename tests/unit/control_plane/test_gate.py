"""Many open connections, some of them very slow and all without a token, do not delay answers to complete requests."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from control_plane import gate
from control_plane.gate import HEADER_BYTES, Gate
from tests.unit.control_plane.api.conftest import Service

pytestmark = pytest.mark.security


@contextmanager
def served(directory: Path, **options: float) -> Iterator[Service]:
    with Service(directory, gate=Gate(**options)) as running:
        yield running


def connect(service: Service, stack: ExitStack, sent: bytes, source: str = "127.0.0.1") -> socket.socket:
    host, port = service.address.split(":")
    opened = stack.enter_context(socket.create_connection((host, int(port)), 10, source_address=(source, 0)))
    opened.sendall(sent)
    return opened


def rest(opened: socket.socket) -> bytes:
    """Return all bytes that arrive until the server closes the connection."""
    received = b""
    with suppress(ConnectionResetError, BrokenPipeError):
        while piece := opened.recv(65_536):
            received += piece
    return received


def is_healthy(service: Service) -> bool:
    return httpx.get(f"http://{service.address}/v1/health", trust_env=False, timeout=10).status_code == 200


SLOW = b"GET /v1/health HTTP/1.1\r\nHost: x\r\nX-Slow: "


@pytest.mark.parametrize("sent", [b"", b"GET", SLOW], ids=["nothing", "a word", "a part of the headers"])
def test_headers_that_do_not_end_end_the_connection(tmp_path: Path, sent: bytes) -> None:
    with served(tmp_path, header_seconds=0.05) as service, ExitStack() as stack:
        assert rest(connect(service, stack, sent)) == b""
        assert is_healthy(service)


def test_the_second_request_of_a_connection_has_the_same_deadline(tmp_path: Path) -> None:
    with served(tmp_path, header_seconds=0.05) as service, ExitStack() as stack:
        opened = connect(service, stack, b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert opened.recv(65_536).startswith(b"HTTP/1.1 200")
        opened.sendall(SLOW)
        rest(opened)


def test_a_connection_has_one_request_and_one_that_waits(tmp_path: Path) -> None:
    """One read of the socket has thousands of requests, without or with a token. The server answers two at most."""
    with served(tmp_path) as service, ExitStack() as stack:
        for headers in ("", f"authorization: Bearer {service.admin_token}\r\n"):
            request = f"GET /v1/nodes HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode()
            received = rest(connect(service, stack, request * 3000))
            assert received.count(b"HTTP/1.1") <= 2, received[:500]
            assert is_healthy(service)


def test_a_body_that_nobody_reads_ends_the_connection_too(tmp_path: Path) -> None:
    with served(tmp_path, header_seconds=0.05) as service, ExitStack() as stack:
        opened = connect(service, stack, b"POST /v1/tokens HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert rest(opened).startswith(b"HTTP/1.1 401")


def test_headers_without_end_end_the_connection(tmp_path: Path) -> None:
    with served(tmp_path) as service, ExitStack() as stack:
        opened = connect(service, stack, SLOW)
        with suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(64):
                opened.sendall(b"a" * HEADER_BYTES)
            assert rest(opened) == b""
        assert is_healthy(service)


def client_address(answer: httpx.Response) -> object:
    """Return the local address and port of the connection that delivered a response."""
    return answer.extensions["network_stream"].get_extra_info("client_addr")


def test_slow_strangers_lock_nobody_out_not_even_at_their_own_address(tmp_path: Path) -> None:
    with served(tmp_path, max_strangers=4) as service, ExitStack() as stack:
        headers = {"authorization": f"Bearer {service.admin_token}"}
        caller = stack.enter_context(
            httpx.Client(base_url=f"http://{service.address}", headers=headers, trust_env=False, timeout=10)
        )
        before = caller.get("/v1/nodes")
        assert before.status_code == 200
        strangers = [connect(service, stack, SLOW) for _ in range(20)]
        assert is_healthy(service)
        after = caller.get("/v1/nodes")
        assert after.status_code == 200
        assert client_address(after) == client_address(before), "a connection that has sent a token is not counted"
        assert [rest(stranger) for stranger in strangers[:16]] == [b""] * 16, "the oldest give way"


def test_the_busiest_address_gives_way(tmp_path: Path) -> None:
    with served(tmp_path, max_strangers=4) as service, ExitStack() as stack:
        quiet = connect(service, stack, b"GET /v1/health HTTP/1.1\r\nHost: x\r\n", source="127.0.0.2")
        for _ in range(20):
            connect(service, stack, SLOW)
        assert is_healthy(service)
        quiet.sendall(b"Connection: close\r\n\r\n")
        assert rest(quiet).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("soft", "hard", "expected", "is_set"),
    [
        (1024, 4096, 4096, True),
        (1024, 2**20, 65_536, True),
        (2**20, 2**20, 2**20, False),
        (1024, resource.RLIM_INFINITY, 65_536, True),
    ],
)
def test_the_server_asks_for_as_many_descriptors_as_it_may_have(
    monkeypatch, soft: int, hard: int, expected: int, is_set: bool
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    assert gate.raise_open_files() == expected
    assert asked == ([(expected, hard)] if is_set else [])
