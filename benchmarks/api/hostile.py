"""Measures a well-behaved caller of the API beside hostile callers and agents, and the memory that these cost."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import multiprocessing
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final

from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from benchmarks.api.load import request
from everstep.protocol.agent_messages import AgentReport, Hello
from everstep.protocol.codec import MAX_MESSAGE_BYTES, encode
from everstep.protocol.ids import NodeId

CALLS_PER_SECOND: Final = 50.0
CONNECTIONS: Final = 60
PIECE_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The measured server: its process, its port, and tokens of two projects and of one agent."""

    pid: int
    port: int
    good_token: str
    good_jobs: tuple[str, ...]
    hostile_token: str
    hostile_jobs: tuple[str, ...]
    node: str
    session: str


async def _ask(target: Target, requests: Callable[[], bytes]) -> None:
    """Send requests over one connection, each as soon as a response to the previous one arrives."""
    while True:
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
            try:
                while True:
                    writer.write(requests())
                    head = (await reader.readuntil(b"\r\n\r\n")).lower()
                    length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
                    await reader.readexactly(length)
            finally:
                writer.close()


async def _reads(target: Target) -> None:
    jobs = itertools.cycle(target.hostile_jobs)
    await _many(_ask(target, lambda: _get(target, next(jobs))) for _ in range(CONNECTIONS))


async def _listings(target: Target) -> None:
    jobs = itertools.cycle(target.hostile_jobs)
    await _many(_ask(target, lambda: _get(target, f"{next(jobs)}/outputs")) for _ in range(CONNECTIONS))


async def _wrong_tokens(target: Target) -> None:
    numbers = itertools.count()
    path = f"/v1/training-jobs/{target.good_jobs[0]}"
    await _many(_ask(target, lambda: request(target.port, path, f"wrong-{next(numbers)}")) for _ in range(CONNECTIONS))


async def _uploads(target: Target) -> None:
    numbers = itertools.count()

    async def upload() -> None:
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", target.port)
                head = f"PUT /v1/sources/{next(numbers):064x} HTTP/1.1\r\nhost: x\r\ncontent-length: {1 << 28}\r\n"
                writer.write(f"{head}authorization: Bearer {target.hostile_token}\r\n\r\n".encode())
                for _ in range((1 << 28) // PIECE_BYTES - 1):
                    writer.write(bytes(PIECE_BYTES))
                    await writer.drain()

    await _many(upload() for _ in range(CONNECTIONS))


async def _large_messages(target: Target) -> None:
    report = encode(AgentReport(node_id=NodeId(target.node), sequence=1, member=None))
    # The receiver skips a field that it does not know, as one of a newer release: msgpack's map with one entry more.
    junk_count = MAX_MESSAGE_BYTES - len(report) - 16
    junk = b"\xa4junk\xdd" + junk_count.to_bytes(4, "big") + b"\xc0" * junk_count
    await _send_as_agent(target, report[:2] + bytes([report[2] + 1]) + report[3:] + junk)


async def _many_messages(target: Target) -> None:
    await _send_as_agent(target, encode(AgentReport(node_id=NodeId(target.node), sequence=1, member=None)))


async def _send_as_agent(target: Target, message: bytes) -> None:
    hello = Hello(
        node_id=NodeId(target.node), agent_id="a", address="127.0.0.1", peer_port=1, memory_bytes=1, version="1"
    )
    while True:
        with suppress(OSError, WebSocketException):
            async with connect(
                f"ws://127.0.0.1:{target.port}/v1/agents/connect",
                additional_headers={"Authorization": f"Bearer {target.session}"},
                compression=None,
                ping_interval=None,
                proxy=None,
            ) as line:
                await line.send(encode(hello))
                while True:
                    await line.send(message)


async def _many(each: Any) -> None:
    await asyncio.gather(*each)


def _get(target: Target, path: str) -> bytes:
    return request(target.port, f"/v1/training-jobs/{path}", target.hostile_token)


KINDS: Final[dict[str, Callable[[Target], Coroutine[Any, Any, None]]]] = {
    "60 connections that describe jobs": _reads,
    "60 listings of outputs in a slow S3": _listings,
    "60 uploads that never end": _uploads,
    "60 connections with wrong tokens": _wrong_tokens,
    "an agent that sends messages of 16 MiB": _large_messages,
    "an agent that sends reports without a pause": _many_messages,
}


def _assail(kind: str, target: dict[str, Any], has_begun: Event) -> None:
    has_begun.set()
    asyncio.run(KINDS[kind](Target(**target)))


@contextmanager
def assailed(kind: str, target: Target) -> Iterator[None]:
    """Run one kind of hostile callers in a process of its own while the `with` block runs."""
    context = multiprocessing.get_context("spawn")
    has_begun = context.Event()
    process = context.Process(target=_assail, args=(kind, asdict(target), has_begun))
    process.start()
    try:
        has_begun.wait()
        yield
    finally:
        process.terminate()
        process.join()


def call_seconds(target: Target, seconds: float) -> list[float]:
    """Describe other jobs at `CALLS_PER_SECOND`, and return the seconds until each response."""
    connection = http.client.HTTPConnection("127.0.0.1", target.port)
    found, jobs, begun = list[float](), itertools.cycle(target.good_jobs), time.perf_counter()
    for number in range(round(seconds * CALLS_PER_SECOND)):
        threading.Event().wait(max(0.0, begun + number / CALLS_PER_SECOND - time.perf_counter()))
        sent_at = time.perf_counter()
        connection.request(
            "GET", f"/v1/training-jobs/{next(jobs)}", headers={"authorization": f"Bearer {target.good_token}"}
        )
        response = connection.getresponse()
        response.read()
        assert response.status == 200
        found.append(time.perf_counter() - sent_at)
    connection.close()
    return found


def measure(target: Target, *, seconds: float, say: Callable[[str], object]) -> dict[str, Any]:
    """Measure the well-behaved caller alone and beside each kind of hostile callers."""
    status = Path(f"/proc/{target.pid}/status")
    quiet, beside, memory = list[float](), dict[str, list[float]](), dict[str, float]()
    call_seconds(target, 1.0)  # The first requests are slower.
    for kind in KINDS:
        quiet += call_seconds(target, seconds / 2)
        Path(f"/proc/{target.pid}/clear_refs").write_text("5")  # proc(5): resets VmHWM, the peak
        before = _bytes(status, "VmRSS")
        with assailed(kind, target):
            beside[kind] = call_seconds(target, seconds)
        memory[kind] = _bytes(status, "VmHWM") - before
        say(f"measured a caller beside {kind}")
    return {"quiet_seconds": quiet, "hostile_seconds": beside, "hostile_bytes": memory}


def _bytes(status: Path, field: str) -> float:
    value = next(line for line in status.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(value.split()[1]) * 1024.0
