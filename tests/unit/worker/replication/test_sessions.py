"""A session sends and receives whole messages in order, even if the kernel accepts only parts of them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import select
import socket
from collections.abc import Iterator

import pytest

from everstep.protocol.codec import Message, frame
from everstep.protocol.errors import MalformedMessage
from everstep.protocol.ids import Generation, JobName, NodeId, Rank, RunId
from everstep.protocol.peer_messages import EndShard, Open, ShardDigests
from worker.errors import PeerLost
from worker.node.network_cards import NetworkCard
from worker.replication.tcp import PeerListener, TcpSession, dial
from worker.replication.transport import PeerCredentials

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
    here.read_ahead()  # the handshake is over: both nodes have proved that they know the key
    there.read_ahead()
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


async def test_who_is_cancelled_in_the_middle_leaves_a_whole_message_or_none_at_all(
    lines: tuple[socket.socket, socket.socket],
) -> None:
    here, there = sessions(lines)
    here.read_ahead()  # the handshake is over: both nodes have proved that they know the key
    there.read_ahead()
    sending = asyncio.create_task(here.send(LARGE))
    await asyncio.sleep(0)
    sending.cancel()
    with contextlib.suppress(PeerLost):
        assert await there.receive() == LARGE
    with pytest.raises(asyncio.CancelledError):
        await sending


async def test_words_that_come_together_or_in_pieces_are_taken_one_by_one(
    lines: tuple[socket.socket, socket.socket],
) -> None:
    _, there = sessions(lines)
    there.read_ahead()
    words = [SMALL, SMALL, LARGE, SMALL, LARGE]
    data = await _bytes_of(*words)

    async def say() -> None:
        for at in range(0, len(data), 5003):
            await asyncio.get_running_loop().sock_sendall(lines[0], data[at : at + 5003])

    saying = asyncio.create_task(say())
    assert [await there.receive() for _ in words] == words
    await saying


async def test_who_is_cancelled_while_half_a_word_has_come_loses_nothing_of_it(
    lines: tuple[socket.socket, socket.socket],
) -> None:
    _, there = sessions(lines)
    there.read_ahead()
    data = await _bytes_of(SMALL)
    lines[0].send(data[:7])
    receiving = asyncio.create_task(there.receive())
    await asyncio.sleep(0)  # let the receiver read the available bytes and wait for more
    assert select.select([lines[1]], [], [], 0)[0] == [], "the receiver has read the first bytes"
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    lines[0].send(data[7:])
    assert await there.receive() == SMALL


async def test_a_message_with_a_flipped_bit_ends_the_session() -> None:
    """The test flips each bit behind the length of a message in turn, in a new session each. The session must end."""
    for position in range(4 * 8, 8 * len(await _bytes_of(SMALL))):
        data = bytearray(await _bytes_of(SMALL))
        data[position // 8] ^= 1 << position % 8
        one, other = socket.socketpair()
        with one, other:
            other.setblocking(False)
            session = TcpSession(other, OPEN, NodeId("i-1"))
            session.read_ahead()
            one.send(data)
            with pytest.raises(MalformedMessage, match="does not match its digest"):
                await session.receive()


async def test_a_message_that_is_lost_repeated_or_out_of_order_ends_the_session() -> None:
    length = len(await _bytes_of(SMALL))
    whole = await _bytes_of(SMALL, SMALL, SMALL)
    frames = [whole[at : at + length] for at in range(0, len(whole), length)]
    for changed in ([frames[1]], [frames[0], frames[0]], [frames[0], frames[2]]):
        one, other = socket.socketpair()
        with one, other:
            other.setblocking(False)
            session = TcpSession(other, OPEN, NodeId("i-1"))
            session.read_ahead()
            one.send(b"".join(changed))
            for _ in changed[1:]:
                assert await session.receive() == SMALL
            with pytest.raises(MalformedMessage, match="does not match its digest"):
                await session.receive()


async def _bytes_of(*messages: Message) -> bytes:
    """Return the bytes of messages after the handshake."""
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        other.setblocking(False)
        session = TcpSession(one, OPEN, NodeId("i-2"))
        session.read_ahead()

        async def send() -> None:
            await session.send(*messages)
            session.close()

        sending = asyncio.create_task(send())
        data = b""
        while part := await asyncio.get_running_loop().sock_recv(other, 1 << 20):
            data += part
        await sending
        return data


async def test_who_is_cancelled_twice_leaves_nothing_that_others_would_speak_into(
    lines: tuple[socket.socket, socket.socket],
) -> None:
    here, _ = sessions(lines)
    sending = asyncio.create_task(here.send(LARGE))
    for _ in range(2):
        await asyncio.sleep(0)
        sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    with pytest.raises(PeerLost, match="closed"):
        await here.send(SMALL)


async def test_who_waits_on_a_line_that_somebody_closes_hears_it(lines: tuple[socket.socket, socket.socket]) -> None:
    here, _ = sessions(lines)
    receiving = asyncio.create_task(here.receive())
    await asyncio.sleep(0)
    here.close()
    with pytest.raises(PeerLost, match="closed"):
        await receiving


async def test_a_line_that_cannot_be_watched_is_lost(
    lines: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, there = sessions(lines)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # epoll raises this error

    monkeypatch.setattr(asyncio.get_running_loop(), "add_reader", refuse)
    with pytest.raises(PeerLost, match="No space"):
        await there.receive()
    with pytest.raises(PeerLost, match="closed"):
        await there.receive()


async def test_a_handshake_takes_its_own_words_alone(lines: tuple[socket.socket, socket.socket]) -> None:
    """A handshake reads only its own messages, because the stream's thread must read the bytes that follow."""
    _, there = sessions(lines)
    lines[0].send(frame(SMALL) + b"chunk")
    assert await there.receive() == SMALL
    with there.detach() as line:
        assert line.recv(64) == b"chunk"


async def test_a_line_for_which_this_node_has_no_descriptor_is_lost_like_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node without a free file descriptor treats the connection as lost and dials again."""
    credentials = PeerCredentials(
        JobName("gpt"), OPEN.run, OPEN.generation, OPEN.node_id, bytes(32), silence_seconds=3.0
    )

    def refused(*_arguments: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", refused)
        dialling = dial(
            credentials,
            peer=NodeId("i-2"),
            address="127.0.0.1",
            port=1,
            kind="replica",
            owner_rank=Rank(0),
            source=NetworkCard("127.0.0.1"),
        )
        with pytest.raises(PeerLost, match="Too many open files"):
            await dialling


async def test_all_cards_listen_at_the_same_port_and_one_that_cannot_is_left_out() -> None:
    """All network cards listen at one port, so that one rule of a security group admits all connections.

    A card whose address cannot be used is omitted.
    """
    listener = PeerListener(NodeId("i-1"))
    listener.start("127.83.0.1", more_cards=(NetworkCard("127.83.0.2"), NetworkCard("192.0.2.1")))
    try:
        assert listener.addresses == (("127.83.0.1", listener.port), ("127.83.0.2", listener.port))
    finally:
        await listener.close()
