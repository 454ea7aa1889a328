"""A session's messages leave whole and in order, however much of them the kernel takes at once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from everstep.protocol.ids import Generation, NodeId, Rank, RunId
from everstep.protocol.peer_messages import EndShard, Open, ShardDigests
from worker.errors import PeerLost
from worker.replication.tcp import TcpSession

LARGE = ShardDigests(transfer=1, first=0, chunk_digests=bytes(range(256)) * 4000)
SMALL = EndShard(transfer=1, digest=bytes(16))
OPEN = Open(
    run=RunId("ab" * 16),
    generation=Generation(1),
    node_id=NodeId("i-1"),
    kind="replica",
    owner_rank=Rank(0),
    nonce=bytes(16),
)


@pytest.fixture
def lines() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    one.setblocking(False)
    other.setblocking(False)
    yield one, other
    one.close()
    other.close()


def sessions(lines: tuple[socket.socket, socket.socket]) -> tuple[TcpSession, TcpSession]:
    return TcpSession(lines[0], OPEN, NodeId("i-2")), TcpSession(lines[1], OPEN, NodeId("i-1"))


async def test_what_fits_leaves_without_a_turn_of_the_loop(lines: tuple[socket.socket, socket.socket]) -> None:
    here, there = sessions(lines)
    sending = here.send(SMALL, SMALL)
    with pytest.raises(StopIteration):
        sending.send(None)
    assert [await there.receive(), await there.receive()] == [SMALL, SMALL]


async def test_what_does_not_fit_waits_and_is_whole(lines: tuple[socket.socket, socket.socket]) -> None:
    here, there = sessions(lines)
    sending = [asyncio.create_task(here.send(SMALL, LARGE)), asyncio.create_task(here.send(LARGE, SMALL))]
    assert [await there.receive() for _ in range(4)] == [SMALL, LARGE, LARGE, SMALL]
    await asyncio.gather(*sending)


async def test_a_line_that_is_gone_says_so(lines: tuple[socket.socket, socket.socket]) -> None:
    here, there = sessions(lines)
    there.close()
    with pytest.raises(PeerLost, match="i-2 is lost"):
        await here.send(SMALL)
    with pytest.raises(PeerLost, match="closed"):
        await here.send(SMALL)


async def test_who_is_cancelled_in_the_middle_leaves_a_whole_message_or_none_at_all(lines: tuple[socket.socket, socket.socket]) -> None:
    here, there = sessions(lines)
    sending = asyncio.create_task(here.send(LARGE))
    await asyncio.sleep(0)
    sending.cancel()
    with contextlib.suppress(PeerLost):
        assert await there.receive() == LARGE
    with pytest.raises(asyncio.CancelledError):
        await sending
