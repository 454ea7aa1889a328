"""The listener accepts sessions of the nodes that belong to its generation.

It refuses and counts all other peers, and keeps listening.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from everstep.protocol.codec import LENGTH, Message, encode, frame
from everstep.protocol.ids import Generation, NodeId, Rank, RunId
from everstep.protocol.peer_messages import (
    CHUNK_HEADER,
    MAX_PEER_MESSAGE_BYTES,
    Accepted,
    Answer,
    Challenge,
    HolderInventory,
    Open,
    PeerMessage,
    Refused,
    session_mac,
)
from everstep.protocol.slot import DIGEST_BYTES
from tests.integration.worker.replication.pair import (
    GENERATION,
    HOLDER,
    HOLDER_ADDRESS,
    JOB,
    KEY,
    OWNER,
    RANK,
    RUN,
    Pair,
    credentials,
)
from tests.newer_release import of_newer_release
from worker.errors import PeerLost, PeerRefused
from worker.node.network_cards import NetworkCard
from worker.replication import tcp
from worker.replication.tcp import ListenerLimits, TcpSession

pytestmark = pytest.mark.integration


async def is_alive(pair: Pair) -> bool:
    """Return whether a node of the generation can still open a session."""
    session = await pair.dial()
    first = await session.receive()
    session.close()
    return isinstance(first, HolderInventory)


async def closed(line: socket.socket) -> bytes:
    """Return the bytes received until the other side closes the connection."""
    loop, said = asyncio.get_running_loop(), b""
    async with asyncio.timeout(10):
        try:
            while data := await loop.sock_recv(line, 65536):
                said += data
        except ConnectionResetError:
            pass
    line.close()
    return said


@pytest.mark.parametrize(
    ("who", "what"),
    [
        (credentials(OWNER, key=b"K" * 32), "does not hold the key"),
        (credentials(OWNER, generation=Generation(2)), "not a member of generation 2"),
        (credentials(OWNER, generation=Generation(4)), "not a member of generation 4"),
        (credentials(OWNER, run=RunId("cd" * 16)), "not a member of generation 3"),
    ],
    ids=["wrong key", "older generation", "newer generation", "another run"],
)
async def test_who_is_no_member_is_refused_by_either_side(pair: Pair, who: tcp.Credentials, what: str) -> None:
    with pytest.raises(PeerRefused, match=what):
        await pair.dial(who)
    assert await is_alive(pair)
    # A dialler with a wrong key rejects the listener's proof and closes the connection first. The listener then refuses
    # nothing.
    assert pair.listener.refused_count == 1 or what == "does not hold the key"


async def test_who_answers_must_be_who_was_called(pair: Pair) -> None:
    with pytest.raises(PeerRefused, match="the node that answers as i-other"):
        await pair.dial(peer=NodeId("i-other"))
    assert await is_alive(pair)


async def test_a_listener_that_does_not_hold_the_key_gets_nothing(pair: Pair) -> None:
    pair.listener.admit(credentials(HOLDER, key=b"K" * 32), pair.serve)
    with pytest.raises(PeerRefused, match="does not hold the key"):
        await pair.dial()


async def test_a_proof_is_worth_nothing_in_another_session(pair: Pair) -> None:
    """The dialler repeats a proof from an earlier session.

    The listener rejects it, because each session has a new nonce.
    """

    async def knock(mac: bytes | None) -> tuple[Message, bytes]:
        line = await pair.line()
        session = TcpSession(line, _open(), HOLDER)
        await session.send(_open())
        challenge = await session.receive()
        assert isinstance(challenge, Challenge)
        good = session_mac(KEY, "dialler", _open(), challenge.nonce, HOLDER, JOB)
        await session.send(Answer(mac=good if mac is None else mac))
        verdict = await session.receive()
        session.close()
        assert isinstance(verdict, Message)
        return verdict, good

    verdict, overheard = await knock(None)
    assert isinstance(verdict, Accepted)
    verdict, _ = await knock(overheard)
    assert isinstance(verdict, Refused)
    assert await is_alive(pair)
    assert pair.listener.refused_count == 1


async def test_an_earlier_agent_that_offers_rdma_is_accepted(pair: Pair) -> None:
    """Earlier agents offer RDMA in a field `nixl` of up to 8 KiB. The listener ignores the offer, as they expect."""
    session = TcpSession(await pair.line(), _open(), HOLDER)
    await session.send(_open())
    challenge = await session.receive()
    assert isinstance(challenge, Challenge)
    answer = encode(Answer(mac=session_mac(KEY, "dialler", _open(), challenge.nonce, HOLDER, JOB)))
    data = of_newer_release(answer, Answer, {"nixl": bytes(32 + 8192)})
    await asyncio.get_running_loop().sock_sendall(session.line, LENGTH.pack(len(data)) + data)
    assert await session.receive() == Accepted(addresses=pair.listener.addresses)
    session.close()


async def test_the_listeners_own_proof_sent_back_is_none(pair: Pair) -> None:
    session = TcpSession(await pair.line(), _open(), HOLDER)
    await session.send(_open())
    challenge = await session.receive()
    assert isinstance(challenge, Challenge)
    await session.send(Answer(mac=challenge.mac))
    assert isinstance(await session.receive(), Refused)
    session.close()


def _open() -> Open:
    return Open(run=RUN, generation=GENERATION, kind="replica", node_id=OWNER, owner_rank=RANK, nonce=b"n" * 32)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" + bytes(64),
        b"\x00\x00\x00\x04\xff\xff\xff\xff",
        (MAX_PEER_MESSAGE_BYTES + 1).to_bytes(4, "big"),
        b"\x00\x00\x00\x00",
        frame(Accepted()),
        frame(Refused(reason="x")),
        len(encode(Accepted())).to_bytes(4, "big") + b"\x00\x09" + encode(Accepted())[2:],
        CHUNK_HEADER.pack(1, 0, 8) + bytes(8),
    ],
    ids=[
        "http",
        "tls",
        "noise",
        "oversized message",
        "empty",
        "out of turn",
        "refusal",
        "unknown version",
        "chunk first",
    ],
)
async def test_what_does_not_begin_as_a_session_is_closed_and_counted(pair: Pair, data: bytes) -> None:
    line = await pair.line()
    await asyncio.get_running_loop().sock_sendall(line, data)
    await closed(line)
    assert pair.listener.refused_count == 1
    assert await is_alive(pair)


def listening(make: Callable[..., Pair], **limits: Any) -> Pair:
    """Return a pair whose holder listens with these limits."""
    pair = make(listener_limits=ListenerLimits(**limits))
    pair.listen()
    return pair


async def test_who_says_nothing_is_not_waited_for(make: Callable[..., Pair]) -> None:
    pair = listening(make, handshake_seconds=0.05)
    assert await closed(await pair.line()) == b""
    assert pair.listener.refused_count == 1


async def test_who_says_half_a_word_is_not_waited_for(make: Callable[..., Pair]) -> None:
    pair = listening(make, handshake_seconds=0.05)
    line = await pair.line()
    await asyncio.get_running_loop().sock_sendall(line, frame(_open())[:20])
    assert await closed(line) == b""
    assert pair.listener.refused_count == 1


async def test_who_hangs_up_at_once_harms_nobody(pair: Pair) -> None:
    (await pair.line()).close()
    assert await is_alive(pair)


async def test_more_sessions_than_a_node_can_have_are_closed_unread(make: Callable[..., Pair]) -> None:
    pair = listening(make, session_count=1, handshake_seconds=3600.0)
    session = await pair.dial()
    assert await closed(await pair.line()) == b""
    assert pair.listener.refused_count == 1
    session.close()


async def test_strangers_who_say_nothing_keep_no_member_out(make: Callable[..., Pair]) -> None:
    pair = listening(make, unproven_count=2)
    strangers = [await pair.line() for _ in range(5)]
    session = await pair.dial()
    for line in strangers[:4]:
        assert await closed(line) == b""
    await asyncio.get_running_loop().sock_sendall(strangers[4], frame(_open()))
    assert await asyncio.get_running_loop().sock_recv(strangers[4], 1), "the handshake of the newest continues"
    strangers[4].close()
    session.close()


@pytest.mark.security
async def test_a_flood_from_one_address_evicts_itself_and_no_member(make: Callable[..., Pair]) -> None:
    """A flood of connections arrives from one address while a node of the generation is in the middle of its handshake.

    The node's handshake is the oldest. The listener keeps it and evicts handshakes of the flood.
    """
    pair = listening(make, unproven_count=4)
    loop = asyncio.get_running_loop()

    async def connect(source: str) -> socket.socket:
        line = socket.socket()
        line.setblocking(False)
        line.bind((source, 0))
        await loop.sock_connect(line, (HOLDER_ADDRESS, pair.listener.port))
        return line

    member = await connect("127.0.0.98")
    flood = [await connect("127.0.0.99") for _ in range(12)]
    assert all([await closed(line) == b"" for line in flood[:8]])
    opened = Open(run=RUN, generation=GENERATION, kind="round", node_id=OWNER, owner_rank=Rank(-1), nonce=b"n" * 32)
    await loop.sock_sendall(member, frame(opened))
    assert await loop.sock_recv(member, 1), "its handshake goes on"
    for line in (member, *flood[8:]):
        line.close()


async def test_who_has_proven_nothing_is_given_no_memory(pair: Pair) -> None:
    line = await pair.line()
    await asyncio.get_running_loop().sock_sendall(line, (tcp.MAX_HANDSHAKE_BYTES + 1).to_bytes(4, "big"))
    assert await closed(line) == b""
    assert pair.listener.refused_count == 1


@pytest.mark.parametrize(
    "data",
    [
        frame(Accepted()),
        (MAX_PEER_MESSAGE_BYTES + DIGEST_BYTES + 1).to_bytes(4, "big"),
        b"\x00\x00\x00\x03\x00\x01\xc1",
    ],
    ids=["another message", "oversized", "noise"],
)
async def test_a_member_that_breaks_the_protocol_loses_its_line_and_nobody_elses(pair: Pair, data: bytes) -> None:
    session = await pair.dial()
    assert isinstance(await session.receive(), HolderInventory)
    await asyncio.get_running_loop().sock_sendall(session.line, data)
    with pytest.raises(PeerLost):
        await session.receive()
    await pair.until(lambda: pair.listener.refused_count == 1)
    assert await is_alive(pair)
    session.close()


async def test_shards_that_the_plan_does_not_place_here_are_refused(pair: Pair) -> None:
    session = await pair.dial(rank=Rank(7))
    with pytest.raises(PeerLost):
        await session.receive()
    assert pair.listener.refused_count == 1
    session.close()


async def test_after_a_promise_nobody_of_the_old_generation_gets_in(pair: Pair) -> None:
    assert await is_alive(pair)
    await pair.listener.revoke()
    with pytest.raises(PeerRefused, match="not a member"):
        await pair.dial()
    pair.listener.admit(credentials(HOLDER, generation=Generation(4)), pair.serve)
    with pytest.raises(PeerRefused, match="not a member of generation 3"):
        await pair.dial()
    session = await pair.dial(credentials(OWNER, generation=Generation(4)))
    session.close()


async def test_a_promise_in_the_middle_of_a_handshake_wins(pair: Pair) -> None:
    session = TcpSession(await pair.line(), _open(), HOLDER)
    await session.send(_open())
    challenge = await session.receive()
    assert isinstance(challenge, Challenge)
    pair.listener.admit(credentials(HOLDER, generation=Generation(4)), pair.serve)
    await session.send(Answer(mac=session_mac(KEY, "dialler", _open(), challenge.nonce, HOLDER, JOB)))
    with pytest.raises(PeerLost):
        await session.receive()
    session.close()


async def test_nobody_at_the_port(pair: Pair) -> None:
    await pair.listener.close()
    with pytest.raises(PeerLost, match="does not answer"):
        await pair.dial()


async def test_an_oversized_answer_is_refused_by_the_dialler() -> None:
    """A listener that is no agent answers with a frame that is longer than any message. The dialler refuses it."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listener.bind(("127.0.0.4", 0))
    listener.listen()
    loop = asyncio.get_running_loop()

    async def answer() -> socket.socket:
        line, _ = await loop.sock_accept(listener)
        await loop.sock_sendall(line, (MAX_PEER_MESSAGE_BYTES + 1).to_bytes(4, "big"))
        return line

    answering = asyncio.create_task(answer())
    with pytest.raises(PeerRefused, match="does not use Everstep's protocol"):
        await tcp.dial(
            credentials(OWNER),
            peer=HOLDER,
            address="127.0.0.4",
            port=listener.getsockname()[1],
            kind="round",
            owner_rank=Rank(-1),
            source=NetworkCard("127.0.0.2"),
        )
    (await answering).close()
    listener.close()


def test_every_message_of_the_line_is_in_its_union() -> None:
    assert Open in PeerMessage.__args__
    assert Challenge in PeerMessage.__args__


def test_credentials_do_not_show_their_key() -> None:
    assert "kkkk" not in repr(credentials(OWNER))


@pytest.mark.parametrize(("promised", "level"), [(RUN, "DEBUG"), (RunId("cd" * 16), "WARNING"), (None, "WARNING")])
async def test_another_generation_of_the_own_run_is_refused_quietly(
    pair: Pair, caplog: pytest.LogCaptureFixture, promised: RunId, level: str
) -> None:
    pair.listener.promised_run = promised
    with caplog.at_level("DEBUG", "worker.replication.tcp"), pytest.raises(PeerRefused, match="not a member"):
        await pair.dial(credentials(OWNER, generation=Generation(2)))
    await pair.listener.revoke()  # end the refused session at the listener too
    (record,) = caplog.records
    assert (record.levelname, pair.listener.refused_count) == (level, 1)


async def test_both_ends_of_a_line_notice_a_peer_that_vanished_without_a_word(pair: Pair) -> None:
    served: asyncio.Queue[TcpSession] = asyncio.Queue()

    async def serve(session: TcpSession) -> None:
        served.put_nowait(session)
        await asyncio.Event().wait()

    pair.listener.admit(credentials(HOLDER), serve)
    dialled = await pair.dial()
    for session in (dialled, await served.get()):
        line = session.line
        assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 3000
        assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    dialled.close()
