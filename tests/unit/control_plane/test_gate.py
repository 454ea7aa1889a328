"""Many open connections, some of them very slow and all without a token, do not delay answers to complete requests."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

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


@pytest.mark.parametrize("size", [1, gate.TINY_CHUNK_BYTES - 1])
def test_a_body_of_tiny_chunks_ends_its_connection(tmp_path: Path, size: int) -> None:
    """The parser's time is that of the chunks, and the refused request would bring them until its deadline."""
    with served(tmp_path) as service, ExitStack() as stack:
        chunk = f"{size:x}\r\n{'a' * size}\r\n".encode()
        head = b"POST /v1/tokens HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        opened = connect(service, stack, head)
        with suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(1_000):
                opened.sendall(chunk * 1_000)
            pytest.fail("the server has read a million chunks")
        assert is_healthy(service)


def test_a_body_of_larger_chunks_is_read_to_its_end(tmp_path: Path) -> None:
    with served(tmp_path) as service:
        pieces = (b" " * gate.TINY_CHUNK_BYTES for _ in range(20_000))
        answer = httpx.post(f"http://{service.address}/v1/tokens", content=pieces, trust_env=False, timeout=30)
        assert answer.status_code == 401


@pytest.mark.parametrize("size", [gate.TINY_CHUNK_BYTES - 3, gate.TINY_CHUNK_BYTES])
async def test_a_read_may_begin_and_end_within_a_chunk(size: int) -> None:
    chunk = f"{size:x}\r\n{'a' * size}\r\n".encode()
    for cut in range(len(chunk)):
        opened, transport = http_connection()
        opened.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk[:cut])
        for _ in range(2):
            opened.data_received(chunk[cut:] + gate.TINY_CHUNKS * chunk + chunk[:cut])
        assert (b"400 Bad Request" in transport.sent) == (size < gate.TINY_CHUNK_BYTES), cut


class FakeTransport:
    """A transport that records calls. It reads at once."""

    def __init__(self) -> None:
        self.is_reading = True
        self.is_aborted = False
        self.sent = b""
        self.protocol: Any = None

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, _: str) -> None:
        return None

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted

    def write(self, data: bytes) -> None:
        self.sent += data


UPGRADE = (
    b"GET /v1/agents/connect HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
PING, PONG, FRAGMENT = (first + b"\x80\0\0\0\0" for first in (b"\x89", b"\x8a", b"\x00"))
MESSAGE = b"\x82\x81\0\0\0\0a"


async def no_application(scope: Any, receive: Any, send: Any) -> None:
    """Answer nothing."""


def http_connection() -> tuple[gate.GuardedHttp, FakeTransport]:
    config = uvicorn.Config(no_application, interface="asgi3", log_config=None)
    config.load()
    opened, transport = gate.GuardedHttp(config, ServerState(), {}, gate=Gate()), FakeTransport()
    opened.connection_made(transport)  # type: ignore[arg-type]
    return opened, transport


class CountingGate(gate.Gate):
    """A gate that shows which connections it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.strangers: set[object] = set()
        self.trusted: set[str] = set()

    def enter(self, connection: gate.GuardedHttp) -> None:
        self.strangers.add(connection)

    def leave(self, connection: gate.GuardedHttp) -> None:
        self.strangers.discard(connection)

    def trust(self, connection: gate.GuardedHttp, owner: str) -> None:
        super().trust(connection, owner)
        self.trusted.add(owner)

    def forget(self, connection: gate.GuardedHttp) -> None:
        super().forget(connection)
        self.trusted.discard(connection.owner)


class Socket:
    """A `GuardedSocket` whose application waits until the test lets it continue."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self.gate = CountingGate()
        self.steps: asyncio.Queue[str] = asyncio.Queue()
        self.transport = FakeTransport()
        config = uvicorn.Config(self.run, interface="asgi3", ws="websockets-sansio", log_config=None)
        config.load()
        http = gate.GuardedHttp(config, ServerState(), {}, gate=self.gate)
        http.connection_made(self.transport)  # type: ignore[arg-type]
        http.data_received(UPGRADE)
        self.guarded: gate.GuardedSocket = self.transport.protocol

    @property
    def is_stranger(self) -> bool:
        return bool(self.gate.strangers)

    async def run(self, scope: Any, receive: Any, send: Any) -> None:
        self.trust = scope["state"][gate.TRUST]
        while (step := await self.steps.get()) != "end":
            if step == "receive":
                self.received.append((await receive())["type"])
            else:
                await send({"type": step, "bytes": b""} if step == "websocket.send" else {"type": step})
            self.steps.task_done()
        self.steps.task_done()

    async def let(self, *steps: str) -> None:
        for step in steps:
            self.steps.put_nowait(step)
        await self.steps.join()

    async def accepted(self) -> Socket:
        await self.let("receive", "websocket.accept")
        return self


async def test_a_websocket_is_read_only_after_the_route_has_accepted_it() -> None:
    opened = Socket()
    assert not opened.transport.is_reading
    await opened.let("receive")
    assert opened.received == ["websocket.connect"]
    assert (opened.transport.is_reading, opened.is_stranger) == (False, True)
    await opened.let("websocket.accept")
    assert (opened.transport.is_reading, opened.is_stranger) == (True, False)
    assert b"101 Switching Protocols" in opened.transport.sent
    await opened.let("end")


@pytest.mark.parametrize(
    ("first", "frame"),
    [(b"", PING), (b"", PONG), (b"\x02\x80\0\0\0\0", FRAGMENT)],
    ids=["ping", "pong", "fragment"],
)
async def test_a_websocket_with_too_many_frames_besides_messages_is_aborted(first: bytes, frame: bytes) -> None:
    opened = await Socket().accepted()
    opened.guarded.data_received(first)
    opened.guarded.data_received(frame * (gate.EXTRA_FRAMES - 1))
    assert not opened.transport.is_aborted
    opened.guarded.data_received(frame * 100_000)
    assert opened.transport.is_aborted
    await opened.let("end")


async def test_pings_in_the_time_of_an_agent_are_answered() -> None:
    opened = await Socket().accepted()
    now = opened.guarded.loop.time()
    with pytest.MonkeyPatch.context() as patched:
        for number in range(1_000):
            patched.setattr(opened.guarded.loop, "time", lambda at=now + number: at)
            opened.guarded.data_received(PING)
    assert opened.transport.sent.endswith(b"\x8a\x00" * 1_000)
    await opened.let("end")


async def test_a_client_that_does_not_read_pongs_is_aborted() -> None:
    opened = await Socket().accepted()
    opened.guarded.pause_writing()
    opened.guarded.data_received(PING)
    assert opened.transport.is_aborted
    await opened.let("end")


async def test_messages_are_parsed_in_pieces_when_the_route_reads_them() -> None:
    opened = await Socket().accepted()
    in_a_piece = gate.FED_BYTES // len(MESSAGE)
    opened.guarded.data_received(MESSAGE * 3 * in_a_piece)
    assert opened.guarded.queue.qsize() == in_a_piece
    assert not opened.transport.is_reading
    await opened.let(*["receive"] * 3 * in_a_piece)
    assert opened.received[1:] == ["websocket.receive"] * 3 * in_a_piece
    assert opened.transport.is_reading
    await opened.let("end")


async def test_a_websocket_may_send_long_messages_once_the_server_has_sent_one() -> None:
    long = b"\x82\xff" + (gate.FIRST_MESSAGE_BYTES + 1).to_bytes(8, "big") + bytes(4)
    opened = await Socket().accepted()
    opened.guarded.data_received(long)
    assert opened.guarded.conn.close_sent is not None
    admitted = await Socket().accepted()
    await admitted.let("websocket.send")
    admitted.guarded.data_received(long)
    assert admitted.guarded.conn.close_sent is None
    for each in (opened, admitted):
        await each.let("end")


async def test_the_websockets_of_a_session_are_counted_until_they_end() -> None:
    opened = await Socket().accepted()
    opened.trust("session s")
    assert opened.gate.trusted == {"session s"}
    opened.guarded.connection_lost(None)
    assert opened.gate.trusted == set()
    await opened.let("end")


async def test_a_message_of_many_pieces_is_whole() -> None:
    opened = await Socket().accepted()
    await opened.let("websocket.send")
    opened.guarded.data_received(b"\x82\xff" + (200_000).to_bytes(8, "big") + bytes(4) + b"a" * 150_000)
    opened.guarded.data_received(b"a" * 50_000)
    assert opened.guarded.queue.get_nowait() == {"type": "websocket.receive", "bytes": b"a" * 200_000}
    await opened.let("end")


class Reading:
    """A connection with unread bytes, and the timers of its loop."""

    def __init__(self, owner: str, unread_bytes: int) -> None:
        self.owner, self.unread_bytes, self.is_aborted, self.client = owner, unread_bytes, False, None
        self.timers: list[tuple[Any, ...]] = []
        self.loop = self.transport = self

    def call_later(self, seconds: float, *call: Any) -> Reading:
        assert seconds == gate.UNREAD_SECONDS
        self.timers.append(call)
        return self

    def cancel(self) -> None:
        self.timers.clear()

    def abort(self) -> None:
        self.is_aborted = True

    def wait(self) -> None:
        look, *arguments = self.timers.pop()
        look(*arguments)


def test_a_client_that_reads_its_response_slowly_keeps_its_connection_and_one_that_stops_loses_it() -> None:
    held, counted = Reading("a", 3 * gate.LEAST_READ_BYTES), Gate()
    counted.hold(held)  # type: ignore[arg-type]
    for _ in range(2):
        held.unread_bytes -= gate.LEAST_READ_BYTES
        held.wait()
        assert not held.is_aborted
    held.unread_bytes -= gate.LEAST_READ_BYTES - 1
    held.wait()
    assert held.is_aborted
    assert held.timers == []


def test_a_response_that_is_read_is_watched_no_longer() -> None:
    held, counted = Reading("a", 10), Gate()
    counted.hold(held)  # type: ignore[arg-type]
    held.unread_bytes = 0
    held.wait()
    assert (held.is_aborted, held.timers) == (False, [])
    counted.hold(held)  # type: ignore[arg-type]
    assert held.timers == []


def test_the_unread_responses_of_one_token_are_limited_together_and_its_oldest_goes_first() -> None:
    counted, third = Gate(), gate.MAX_UNREAD_BYTES // 3
    of_another, first, second, newest = (Reading(owner, third + 1) for owner in "baaa")
    for connection in (of_another, first, second, newest):
        counted.hold(connection)  # type: ignore[arg-type]
    assert [each.is_aborted for each in (of_another, first, second, newest)] == [False, True, False, False]


def test_the_server_watches_each_complete_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate.GuardedHttp, "unread_bytes", 10)
    with served(tmp_path, unread_seconds=0.05) as service, ExitStack() as stack:
        request = f"GET /v1/nodes HTTP/1.1\r\nHost: x\r\nauthorization: Bearer {service.admin_token}\r\n\r\n"
        assert rest(connect(service, stack, request.encode())).startswith(b"HTTP/1.1 200")


def test_a_token_has_few_connections_and_its_oldest_one_goes_first() -> None:
    counted, own = Gate(), [Reading("", 0) for _ in range(gate.MAX_PER_TOKEN + 1)]
    of_another = Reading("", 0)
    counted.trust(of_another, "b")  # type: ignore[arg-type]
    for connection in own:
        counted.trust(connection, "a")  # type: ignore[arg-type]
        counted.trust(connection, "a")  # type: ignore[arg-type]  # its second request
    assert [each.is_aborted for each in own] == [True] + [False] * gate.MAX_PER_TOKEN
    assert not of_another.is_aborted
    counted.forget(own[1])  # type: ignore[arg-type]
    counted.trust(Reading("", 0), "a")  # type: ignore[arg-type]
    assert not own[2].is_aborted
