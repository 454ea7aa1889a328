"""Generates load for the API server: requests over persistent connections, and agent reports over websockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import websockets
from websockets.asyncio.client import connect

from benchmarks.errors import BenchmarkFailed
from everstep.protocol.agent_messages import AgentReport, Hello, MemberPhase, MemberReport, RankStatus, ShardProtection
from everstep.protocol.codec import encode
from everstep.protocol.ids import Generation, JobName, NodeId, Rank, RunId, Step

CONNECTIONS = 16
"""Each has one request in progress."""


class _Requester(asyncio.Protocol):
    """A connection that sends its next request as soon as the previous response is complete."""

    def __init__(self, requests: Iterator[bytes], seconds: list[float], done: asyncio.Future[None]) -> None:
        self._requests = requests
        self._seconds = seconds
        self._done = done
        self._buffer = b""
        self._sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._next()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        if not head.startswith(b"HTTP/1.1 200"):
            self._fail(
                BenchmarkFailed(f"answered {head.splitlines()[0].decode()}: {body[:200].decode(errors='replace')}")
            )
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(body) == length:
            self._buffer = b""
            self._seconds.append(time.perf_counter() - self._sent_at)
            self._next()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(BenchmarkFailed(f"the server closed a connection: {error}"))

    def _next(self) -> None:
        request = next(self._requests, None)
        if request is None:
            if not self._done.done():
                self._done.set_result(None)
            self._transport.close()
            return
        self._sent_at = time.perf_counter()
        self._transport.write(request)

    def _fail(self, error: BenchmarkFailed) -> None:
        if not self._done.done():
            self._done.set_exception(error)
        self._transport.close()


def request(port: int, path: str, token: str | None = None) -> bytes:
    """Return the bytes of an HTTP GET request, with a token if one is given."""
    authorization = f"authorization: Bearer {token}\r\n" if token is not None else ""
    return f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n{authorization}accept: application/json\r\n\r\n".encode()


def for_seconds(what: bytes, seconds: float) -> Iterator[bytes]:
    """Yield the bytes of the same request again and again, until `seconds` have passed."""
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        yield what


def answer_seconds(port: int, requests: Iterator[bytes], connections: int = CONNECTIONS) -> tuple[list[float], float]:
    """Send all requests; return the duration of each response and of the whole run.

    Raises BenchmarkFailed if the server did not answer with 200.
    """

    async def run() -> tuple[list[float], float]:
        loop, seconds = asyncio.get_running_loop(), list[float]()
        begun = time.perf_counter()
        done = [loop.create_future() for _ in range(connections)]
        for each in done:
            await loop.create_connection(
                lambda each=each: _Requester(requests, seconds, each),  # type: ignore[misc]
                "127.0.0.1",
                port,
            )
        await asyncio.gather(*done)
        return seconds, time.perf_counter() - begun

    return asyncio.run(run())


@dataclass(frozen=True, slots=True)
class Heard:
    """Number and size of sent reports, and the seconds until the server had processed them."""

    reports: int
    wall_seconds: float
    bytes_per_report: int


def heartbeats(port: int, sessions: dict[str, str], reports_each: int, ranks: int = 8) -> Heard:
    """Send reports from many agents without pauses, and wait until the server has processed all.

    Raises BenchmarkFailed if the server closed a connection before the invalid message that ends each agent's reports.
    """
    length = len(encode(_report(NodeId("i-" + "0" * 17), 1, ranks)))

    async def agent(node: str, token: str, ready: asyncio.Event, go: asyncio.Event) -> None:
        url = f"ws://127.0.0.1:{port}/v1/agents/connect"
        headers = {"Authorization": f"Bearer {token}"}
        async with connect(
            url, additional_headers=headers, compression=None, ping_interval=None, proxy=None, max_queue=None
        ) as line:
            await line.send(
                encode(
                    Hello(
                        node_id=NodeId(node),
                        agent_id="a",
                        address="127.0.0.1",
                        peer_port=1,
                        memory_bytes=1,
                        version="1",
                    )
                )
            )
            await line.recv()
            data = [encode(_report(NodeId(node), number, ranks)) for number in range(reports_each)]
            ready.set()
            await go.wait()
            for each in data:
                await line.send(each)
            # The server processes messages in order and closes the connection at an invalid message. The end of the
            # connection therefore shows that the server has processed all reports.
            await line.send(data[0][:2])  # the version without a message
            try:
                while True:
                    await line.recv()
            except websockets.ConnectionClosed as closed:
                if closed.rcvd is None or closed.rcvd.code != 4400:
                    raise BenchmarkFailed(f"the connection of {node} ended: {closed}") from closed

    async def run() -> float:
        go = asyncio.Event()
        ready = [asyncio.Event() for _ in sessions]
        async with asyncio.TaskGroup() as group:
            for (node, token), each in zip(sessions.items(), ready, strict=True):
                group.create_task(agent(node, token, each, go))
            for each in ready:
                await each.wait()
            begun = time.perf_counter()
            go.set()
        return time.perf_counter() - begun

    return Heard(reports_each * len(sessions), asyncio.run(run()), length)


def _report(node: NodeId, number: int, ranks: int) -> AgentReport:
    """Return the report of a node with `ranks` ranks, each shard on two nodes. Reports differ only in the step."""
    of_node: Sequence[int] = range(ranks)
    member = MemberReport(
        job=JobName("gpt"),
        run=RunId("a" * 32),
        generation=Generation(1),
        phase=MemberPhase.RUNNING,
        ranks=tuple(RankStatus(rank=Rank(rank), boundary=Step(number)) for rank in of_node),
        protection=tuple(
            ShardProtection(
                rank=Rank(rank),
                committed=Step(number),
                holders=(node, NodeId("i-other")),
                in_view=(node, NodeId("i-other")),
                payload_bytes=2**30,
            )
            for rank in of_node
        ),
    )
    return msgspec.structs.replace(AgentReport(node_id=node, sequence=number + 1, member=member))
