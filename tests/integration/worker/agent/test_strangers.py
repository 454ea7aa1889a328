"""The agent refuses connections and messages that do not belong to its job. It counts them and keeps running."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from everstep.protocol.codec import LENGTH, frame
from everstep.protocol.ids import Generation, Rank, RunId
from everstep.protocol.rank_messages import RankHello
from tests.integration.worker.agent.fleet import JOB, RUN, Fleet, until

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    "data", [b"\xff" * 64, LENGTH.pack(3) + b"abc", LENGTH.pack(2**31 - 1), b"GET / HTTP/1.1\r\n\r\n"]
)
async def test_noise_at_the_peer_port(fleet: Fleet, data: bytes) -> None:
    await fleet.launch()
    reader, writer = await asyncio.open_connection("127.0.0.1", fleet.nodes[0].agent.listener.port)
    await refused(reader, writer, data)
    await fleet.train(3)


@pytest.mark.parametrize("data", [b"\xff" * 64, LENGTH.pack(3) + b"abc", LENGTH.pack(2**31 - 1)])
async def test_noise_at_the_rank_socket(fleet: Fleet, data: bytes) -> None:
    await fleet.launch()
    server = fleet.nodes[0].agent.ranks
    reader, writer = await asyncio.open_unix_connection(server.path)
    await refused(reader, writer, data)
    await until("the count", lambda: server.refused_count == 1)
    await until("the count with its node", lambda: fleet.control.reports[fleet.nodes[0].id].refused_count == 1)
    await fleet.train(3)


@pytest.mark.parametrize(
    "hello",
    [
        RankHello(job=JOB, run=RUN, generation=Generation(7), rank=Rank(0), pid=1),
        RankHello(job=JOB, run=RunId("cd" * 16), generation=Generation(1), rank=Rank(0), pid=1),
        RankHello(job=JOB, run=RUN, generation=Generation(1), rank=Rank(1), pid=1),
    ],
    ids=["another generation", "another run", "another node's rank"],
)
async def test_a_rank_that_is_not_ours(fleet: Fleet, hello: RankHello) -> None:
    await fleet.launch()
    server = fleet.nodes[0].agent.ranks
    reader, writer = await asyncio.open_unix_connection(server.path)
    await refused(reader, writer, frame(hello))
    await until("the count", lambda: server.refused_count == 1)
    await fleet.train(3)


async def refused(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send data. Check that the agent closes the connection and sends nothing about its state."""
    writer.write(data)
    with contextlib.suppress(ConnectionError):
        await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
        async with asyncio.timeout(20):
            assert len(await reader.read()) < 512
    writer.close()
