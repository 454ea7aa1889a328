"""Tests which processes may connect to the agent's socket for ranks, and how much each of them may send."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import pytest

from everstep.protocol.codec import Message, frame
from everstep.protocol.ids import Generation, JobName, Rank, RunId, Step
from everstep.protocol.pace import Pace
from everstep.protocol.rank_messages import Boundary, PageChanged, RankHello
from worker.node.unix_socket import connect_private
from worker.ranks.server import (
    BYTES_PER_SECOND,
    CONNECTION_SECONDS,
    MAX_UNPROVEN,
    MESSAGE_SECONDS,
    RankLine,
    RankServer,
)
from worker.shm.held_files import HeldFiles


async def test_a_process_of_another_user_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = RankServer(tmp_path / "ranks.sock", HeldFiles())
    await ranks.start()
    agents_uid = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: agents_uid)
    reader, writer = await asyncio.open_unix_connection(str(ranks.path))
    assert await reader.read() == b""
    writer.close()
    await ranks.close()
    assert ranks.refused_count == 1


Line: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def hello(rank: int) -> bytes:
    return frame(RankHello(job=JobName("job"), run=RunId("ab" * 16), generation=Generation(1), rank=Rank(rank), pid=1))


def boundary(step: int) -> bytes:
    return frame(Boundary(generation=Generation(1), boundary=Step(step)))


class Events:
    """Accepts all ranks, answers each hello, and records messages and lost connections."""

    def __init__(self) -> None:
        self.steps: asyncio.Queue[tuple[Rank, Step]] = asyncio.Queue()
        self.lines: dict[Rank, RankLine] = {}
        self.lost_ranks: asyncio.Queue[Rank] = asyncio.Queue()

    def hello(self, hello: RankHello, line: RankLine) -> bool:
        self.lines[hello.rank] = line
        line.send(PageChanged())
        return True

    def message(self, rank: Rank, message: Message) -> None:
        assert isinstance(message, Boundary)
        self.steps.put_nowait((rank, message.boundary))

    def lost(self, rank: Rank, line: RankLine) -> None:
        self.lost_ranks.put_nowait(rank)


class Meter(Pace):
    """Records payments, and makes each of them wait until the test has released as many as it wants."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.paid: list[float] = []
        self.may_pay = asyncio.Semaphore(0)

    async def pay(self, seconds: float) -> None:
        self.paid.append(seconds)
        await self.may_pay.acquire()


@asynccontextmanager
async def serving(
    folder: Path, *, hello_seconds: float = 1e6, pace: Callable[[], Pace] = lambda: Pace(1e6)
) -> AsyncIterator[tuple[RankServer, Events]]:
    ranks, events = RankServer(folder / "ranks.sock", HeldFiles(), hello_seconds=hello_seconds, pace=pace), Events()
    ranks.admit(events, None)
    await ranks.start()
    try:
        yield ranks, events
    finally:
        await ranks.close()


async def connect(ranks: RankServer, data: bytes = b"") -> Line:
    reader, writer = await asyncio.open_unix_connection(str(ranks.path))
    writer.write(data)
    return reader, writer


async def ended(line: Line) -> None:
    """Wait until the server has closed a connection."""
    await line[0].read()
    disconnect(line)


def disconnect(*lines: Line) -> None:
    for _, writer in lines:
        writer.close()


@pytest.mark.security
async def test_a_new_connection_of_a_rank_closes_the_earlier_one(tmp_path: Path) -> None:
    async with serving(tmp_path) as (ranks, events):
        other = await connect(ranks, hello(1))
        lines = [await connect(ranks, hello(0)) for _ in range(5)]
        for line in lines[:-1]:
            await ended(line)
        lines[-1][1].write(boundary(7))
        assert await events.steps.get() == (0, 7)
        other[1].write(boundary(8))
        assert await events.steps.get() == (1, 8)
        assert [await events.lost_ranks.get() for _ in range(4)] == [0, 0, 0, 0]
        disconnect(other, lines[-1])


@pytest.mark.security
async def test_processes_that_never_send_a_hello_close_each_other_and_no_rank(tmp_path: Path) -> None:
    async with serving(tmp_path) as (ranks, events):
        rank = await connect(ranks, hello(0))
        assert await rank[0].readexactly(4), "the rank has proven itself"
        silent = [await connect(ranks) for _ in range(MAX_UNPROVEN + 7)]
        for line in silent[:7]:
            await ended(line)
        late = await connect(ranks, hello(1))
        assert await late[0].readexactly(4)
        rank[1].write(boundary(1))
        late[1].write(boundary(2))
        assert sorted([await events.steps.get(), await events.steps.get()]) == [(0, 1), (1, 2)]
        disconnect(rank, late, *silent[7:])


async def test_ranks_that_connect_at_once_prove_themselves(tmp_path: Path) -> None:
    async with serving(tmp_path) as (ranks, events):
        waiting = [connect_private(ranks.path) for _ in range(MAX_UNPROVEN + 50)]
        for number, each in enumerate(waiting):
            each.sendall(hello(number) + boundary(number))
        assert [(await events.steps.get())[0] for _ in waiting] == list(range(MAX_UNPROVEN + 50))
        for each in waiting:
            each.close()


@pytest.mark.security
async def test_a_process_that_sends_no_hello_in_time_is_disconnected(tmp_path: Path) -> None:
    async with serving(tmp_path, hello_seconds=0.0) as (ranks, _):
        await ended(await connect(ranks))
        assert ranks.refused_count == 1


@pytest.mark.security
async def test_each_connection_and_each_message_has_its_price(tmp_path: Path) -> None:
    meters: list[Meter] = []

    def meter() -> Pace:
        meters.append(Meter())
        return meters[-1]

    async with serving(tmp_path, pace=meter) as (ranks, events):
        rank = await connect(ranks, hello(0) + boundary(1) + boundary(2))
        other = await connect(ranks, hello(1) + boundary(1))
        await asyncio.sleep(0)
        (accepting,) = meters
        accepting.may_pay.release()
        assert await events.steps.get() == (0, 1)
        accepting.may_pay.release()
        assert await events.steps.get() == (1, 1), "a rank that waits holds up no other rank"
        _, of_rank, of_other = meters
        assert events.steps.empty(), "the first rank has not paid for its first message"
        of_rank.may_pay.release()
        assert await events.steps.get() == (0, 2)
        price = MESSAGE_SECONDS + (len(boundary(1)) - 4) / BYTES_PER_SECOND
        assert (of_rank.paid, of_other.paid) == ([price, price], [price])
        assert accepting.paid == [CONNECTION_SECONDS] * 3
        disconnect(rank, other)


@pytest.mark.security
async def test_a_new_connection_continues_at_the_pace_of_its_rank(tmp_path: Path) -> None:
    meters: list[Meter] = []

    def meter() -> Pace:
        meters.append(Meter())
        meters[-1].may_pay = asyncio.Semaphore(100)
        return meters[-1]

    async with serving(tmp_path, pace=meter) as (ranks, events):
        for step in range(3):
            rank = await connect(ranks, hello(0) + boundary(step))
            assert await events.steps.get() == (0, step)
            disconnect(rank)
            await events.lost_ranks.get()
    assert [len(each.paid) for each in meters[1:]] == [3]


@pytest.mark.security
async def test_a_rank_that_never_pauses_lets_other_tasks_run(tmp_path: Path) -> None:
    async with serving(tmp_path) as (ranks, events):
        rank = await connect(ranks, hello(0) + b"".join(boundary(step) for step in range(100)))
        await events.steps.get()
        await asyncio.sleep(0)
        assert events.steps.qsize() < 90
        disconnect(rank)
