"""Copies of shards on another node, through every message of their sessions: from the announcement to the
acknowledgement.

The tests also fetch such copies back.
"""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.interleave.uniform import UniformPacer
from everstep.protocol.errors import MalformedMessage
from everstep.protocol.ids import Generation, NodeId, Rank, Step
from everstep.protocol.peer_messages import (
    CHUNK_HEADER,
    BeginShard,
    CancelShard,
    EndShard,
    FetchShard,
    HolderInventory,
    PreparingShard,
    ReserveShard,
    ShardDigests,
    ShardRefused,
    ShardReserved,
    ShardSealed,
    ShardWanted,
)
from everstep.protocol.plan import ShardSource
from everstep.protocol.rank_messages import Vote
from everstep.protocol.slot import SlotHeader, SlotState, payload_chunk_digests, payload_digest
from tests.integration.worker.replication.pair import (
    GENERATION,
    HOLDER,
    LAYOUT,
    RANK,
    Pair,
    content,
    credentials,
    payload,
)
from tests.small_chunks import use_small_chunks
from worker.core.broken_line import CUTS, BrokenLine
from worker.core.transfers import TRIES, StreamCount
from worker.errors import PeerLost
from worker.replication import fetching, receiver, transfers
from worker.replication import sender as sending
from worker.replication.fetching import fetch_shard
from worker.replication.pacing import ENOUGH_TRANSFERS, MEASURED_PERIOD_BYTES, Pacer, Unpaced
from worker.replication.sender import LOOKS_PER_DEADLINE, ReplicaSender
from worker.replication.streams import ChunkQueue, Streams, send_chunks
from worker.replication.tcp import TcpSession
from worker.replication.transfers import Arrived, ShardRejected, announcement
from worker.replication.transport import Session
from worker.shm.chunk_digests import ChunkDigests
from worker.shm.slot_file import SlotFile
from worker.shm.store import Slot, SlotStore
from worker.tasks import finish

pytestmark = pytest.mark.integration
CHUNK = 1000
RARELY_SECONDS = 36_000.0
"""A deadline for holders that is longer than any test, so that the sender never checks for silence by itself.

Tests call the check themselves.
"""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_chunks(monkeypatch, CHUNK)


class ByHand:
    """The owner's end of a replica session. The test sends each message itself."""

    def __init__(self, session: TcpSession, line: socket.socket) -> None:
        self.session = session
        self.line = line
        self.transfer = 0

    async def begin(self, step: int, data: bytes, *, committed: int = -1, **other: object) -> None:
        """Announce a complete shard."""
        await self.open(step, data, committed=committed, **other)
        await self.name(data, 0, -(-len(data) // CHUNK))
        await self.finish(data)

    async def name(self, data: bytes, first: int, count: int, **other: object) -> None:
        """Send the digests of a range of chunks to the holder."""
        digests = payload_chunk_digests(data)[16 * max(0, first) : 16 * (max(0, first) + count)]
        await self.session.send(
            ShardDigests(**{"transfer": self.transfer, "first": first, "chunk_digests": digests, **other})
        )  # type: ignore[arg-type]

    async def finish(self, data: bytes) -> None:
        """Tell the holder that the shard is complete."""
        await self.session.send(EndShard(transfer=self.transfer, digest=payload_digest(data)))

    async def open(self, step: int, data: bytes, *, committed: int = -1, **other: object) -> None:
        """Announce a shard, without the digests of its chunks."""
        self.transfer += 1
        fields: dict[str, object] = {
            "transfer": self.transfer,
            "owner_rank": RANK,
            "origin_generation": GENERATION,
            "step": Step(step),
            "payload_bytes": len(data),
            "capacity_bytes": len(data),
            "index_offset": 0,
            "index_bytes": 0,
            "layout_hash": LAYOUT,
            "committed": Step(committed),
        }
        await self.session.send(BeginShard(**{**fields, **other}))  # type: ignore[arg-type]

    async def wanted(self) -> list[int]:
        """Return the chunks that the holder requests."""
        message = await self.session.receive()
        assert isinstance(message, ShardWanted)
        assert message.transfer == self.transfer
        return [index for first, count in message.chunks for index in range(first, first + count)]

    def chunks(self, data: bytes, indexes: Iterable[int], *, transfer: int | None = None) -> None:
        """Send chunks, which are small enough for the kernel's buffers."""
        for index in indexes:
            piece = data[index * CHUNK : (index + 1) * CHUNK]
            self.line.sendall(bytearray(CHUNK_HEADER.pack(transfer or self.transfer, index, len(piece)) + piece))

    async def whole(self, step: int, data: bytes, *, committed: int = -1) -> ShardSealed | ShardRefused:
        """Send a shard as an owner does, and return the holder's answer."""
        await self.begin(step, data, committed=committed)
        answer = await self.session.receive()
        while isinstance(answer, ShardWanted):
            self.chunks(data, [index for first, count in answer.chunks for index in range(first, first + count)])
            answer = await self.session.receive()
        assert isinstance(answer, ShardSealed | ShardRefused)
        return answer

    async def closed(self) -> None:
        """Wait until the holder has ended the session."""
        try:
            while True:
                await self.session.receive()
        except PeerLost:
            return

    def close(self) -> None:
        """Close the session and its stream."""
        self.session.close()
        self.line.close()


async def ask_for_all(session: TcpSession) -> int:
    """Request every chunk of a small sealed shard after its announcement, and return their number."""
    named = await session.receive()
    assert isinstance(named, ShardDigests)
    count = len(named.chunk_digests) // 16
    await session.send(ShardWanted(transfer=named.transfer, chunks=((0, count),)))
    return count


async def landed(pair: Pair, count: int) -> None:
    """Wait until `count` chunks have arrived in the holder's only session."""
    (owner,) = pair.receiver.open_sessions
    assert owner.receiver is not None
    incoming = owner.receiver.current
    assert incoming is not None
    await pair.until(lambda: incoming.landed_count == count)


@asynccontextmanager
async def by_hand(pair: Pair) -> AsyncIterator[ByHand]:
    """Open a replica session and read the holder's inventory."""
    session = await pair.dial()
    assert isinstance(await session.receive(), HolderInventory)
    hand = ByHand(session, await pair.stream(session))
    try:
        yield hand
    finally:
        hand.close()


class Recorded:
    """A dialler that opens real sessions of a `Pair`, and keeps them so that the test can break them."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.sessions: list[TcpSession] = []
        self.lines: list[socket.socket] = []
        self.is_there = asyncio.Event()
        self.is_there.set()

    async def session(self) -> TcpSession:
        """Implement `Dialler.session`."""
        if not self.is_there.is_set():
            raise PeerLost("nobody answers")
        self.sessions.append(await self.pair.session())
        return self.sessions[-1]

    async def stream(self, session: Session, number: int) -> socket.socket:
        """Implement `Dialler.stream`."""
        self.lines.append(await self.pair.stream(session, number))
        return self.lines[-1]


async def test_steps_are_replicated_verified_and_acknowledged(pair: Pair) -> None:
    pair.send()
    for step in range(1, 6):
        pair.apply_announcement(step - 1 or -1, step)
        await pair.capture(step)
        await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert pair.held() == {step: payload(step, pair.payload_bytes) for step in (4, 5)}
    assert pair.receiver.rejected_count == 0
    assert pair.shard.page.agent.vote_step == 5


async def test_the_page_says_nothing_of_a_vote_that_was_not_given(pair: Pair) -> None:
    pair.apply_announcement(-1, 1)
    assert (pair.shard.page.agent.proposed, pair.shard.page.agent.vote_step) == (1, -1)
    await pair.capture(1)
    assert pair.shard.page.agent.vote_step == -1
    pair.send()
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert pair.shard.page.agent.vote_step == 1


async def test_a_holder_keeps_c_although_it_has_not_heard_of_it(pair: Pair) -> None:
    pair.send()
    for step in (1, 2, 3):
        pair.apply_announcement(step - 1 or -1, step)
        await pair.capture(step)
        await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    pair.apply_announcement(2, 4)  # step 3 was abandoned on another rank, so that step 2 stays committed
    await pair.capture(4)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert set(pair.held()) == {2, 4}


@pytest.mark.parametrize("sent", range(4))
async def test_a_stream_that_breaks_at_any_chunk_goes_on_where_it_stood(pair: Pair, sent: int) -> None:
    data = payload(1, 4000)
    async with by_hand(pair) as first:
        await first.begin(1, data)
        assert await first.wanted() == [0, 1, 2, 3]
        first.chunks(data, range(sent))
        await landed(pair, sent)
        first.line.sendall(CHUNK_HEADER.pack(1, sent, CHUNK) + data[:300])  # send a header and a part of the next chunk
    async with by_hand(pair) as again:  # The holder ends the broken session because a new session has begun.
        assert pair.held() == {}
        await again.begin(1, data)
        wanted = await again.wanted()
        assert wanted == list(range(sent, 4))
        again.chunks(data, wanted)
        assert isinstance(await again.session.receive(), ShardSealed)
    assert pair.held() == {1: data}


async def test_what_has_come_is_kept_when_the_next_session_begins_while_a_stream_still_stands_in_mid_chunk(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = payload(1, 4000)
    async with by_hand(pair) as first:
        await first.begin(1, data)
        await first.wanted()
        first.line.sendall(CHUNK_HEADER.pack(1, 0, CHUNK) + data[:CHUNK] + CHUNK_HEADER.pack(1, 1, CHUNK) + data[:300])
        await landed(pair, 1)
        (owner,) = pair.receiver.open_sessions
        assert owner.receiver is not None
        first.session.close()
        # the holder has begun to end the session, and waits for the rest of the chunk
        await pair.until(lambda: owner.receiver.current is None)
        async with by_hand(pair) as again:  # the holder ends the first session because a new session has begun
            await again.begin(1, data)
            assert await again.wanted() == [1, 2, 3]


async def test_what_a_broken_stream_left_is_not_taken_for_another_content(pair: Pair) -> None:
    async with by_hand(pair) as first:
        await first.begin(1, payload(1, 4000))
        await first.wanted()
        first.chunks(payload(1, 4000), [0, 1])
    async with by_hand(pair) as again:
        await again.begin(1, payload(7, 4000))
        assert await again.wanted() == [0, 1, 2, 3]


async def test_chunks_come_in_any_order_over_any_stream_and_twice(pair: Pair) -> None:
    data = payload(1, 4500)
    async with by_hand(pair) as hand:
        await hand.begin(1, data)
        assert await hand.wanted() == [0, 1, 2, 3, 4]
        other = await pair.stream(hand.session)
        first = hand.line
        hand.chunks(data, [4, 2, 2])
        hand.line = other
        hand.chunks(data, [0, 3, 1])
        assert isinstance(await hand.session.receive(), ShardSealed)
        hand.chunks(data, [1], transfer=1)  # a chunk arrives after its transfer has ended
        assert isinstance(await hand.whole(2, payload(2, 4500)), ShardSealed)
        first.close()
    assert pair.held() == {1: data, 2: payload(2, 4500)}


async def test_what_did_not_change_is_not_sent_again(pair: Pair) -> None:
    frozen = bytes(2000)
    async with by_hand(pair) as hand:
        assert isinstance(await hand.whole(1, frozen + payload(1, 2000)), ShardSealed)
        await hand.begin(2, frozen + payload(2, 2000), committed=1)
        assert await hand.wanted() == [2, 3]
        hand.chunks(frozen + payload(2, 2000), [2, 3])
        assert isinstance(await hand.session.receive(), ShardSealed)
        await hand.begin(3, frozen + payload(2, 2000), committed=2)
        assert await hand.wanted() == []  # the holder requests no chunk, because it has every chunk
        assert isinstance(await hand.session.receive(), ShardSealed)
    assert pair.held() == {2: frozen + payload(2, 2000), 3: frozen + payload(2, 2000)}


async def test_what_did_not_change_and_has_rotted_here_is_sent_again(pair: Pair) -> None:
    data = payload(1, 4000)
    async with by_hand(pair) as hand:
        assert isinstance(await hand.whole(1, data), ShardSealed)
        held = pair.holder_store.sealed(RANK, content(1))
        assert held is not None
        with held.file.payload(2000, 2001) as view:
            view[0] ^= 1
        await hand.begin(2, data, committed=1)
        assert await hand.wanted() == [2]
        hand.chunks(data, [2])
        assert isinstance(await hand.session.receive(), ShardSealed)
        with pair.holder_store.sealed(RANK, content(2)).file.payload() as view:  # type: ignore[union-attr]
            assert bytes(view) == data


@pytest.mark.parametrize("byte", [0, 1999, 3999])
async def test_a_damaged_chunk_is_wanted_again_and_alone(pair: Pair, byte: int) -> None:
    data = payload(1, 4000)
    damaged = bytearray(data)
    damaged[byte] ^= 1
    async with by_hand(pair) as hand:
        await hand.begin(1, data)
        hand.chunks(bytes(damaged), await hand.wanted())
        assert await hand.wanted() == [byte // CHUNK]
        hand.chunks(data, [byte // CHUNK])
        assert isinstance(await hand.session.receive(), ShardSealed)
    assert pair.held() == {1: data}


async def test_a_chunk_that_is_always_damaged_is_refused_and_counted_and_the_session_lives_on(pair: Pair) -> None:
    data = payload(1, 4000)
    async with by_hand(pair) as hand:
        await hand.begin(1, data)
        for _ in range(4):
            hand.chunks(payload(9, 4000), await hand.wanted())
        answer = await hand.session.receive()
        assert isinstance(answer, ShardRefused)
        assert "do not match" in answer.reason
        assert pair.receiver.rejected_count == 1
        assert pair.held() == {}
        assert isinstance(await hand.whole(1, data), ShardSealed)


async def test_a_sender_repeats_what_its_holder_refused(pair: Pair) -> None:
    """A holder without a free slot refuses a step, and the sender sends it again later.

    The holder has no free slot, because an upload reads one slot and the other slot holds the committed step.
    """
    pair.send()
    for step in (1, 2):
        pair.apply_announcement(step - 1 or -1, step)
        await pair.capture(step)
        await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    slot = pair.holder_store.sealed(RANK, content(1))
    assert slot is not None
    slot.pins += 1
    pair.apply_announcement(2, 3)
    await pair.capture(3)
    await pair.until(lambda: pair.receiver.rejected_count > 0)
    assert pair.shard.core.vote is Vote.NONE
    slot.pins -= 1
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert set(pair.held()) == {2, 3}


@pytest.mark.parametrize(
    "contradiction",
    [
        {"capacity_bytes": 3999},
        {"payload_bytes": 0},
        {"payload_bytes": -1},
        {"index_offset": -8, "index_bytes": 8},
        {"index_offset": 3999, "index_bytes": 2},
        {"owner_rank": Rank(5)},
        {"transfer": 0},
    ],
    ids=str,
)
async def test_an_announcement_that_contradicts_itself_ends_the_session_and_is_counted(
    pair: Pair, contradiction: dict[str, object]
) -> None:
    async with by_hand(pair) as hand:
        await hand.begin(1, payload(1, 4000), **contradiction)
        await hand.closed()
    await pair.until(lambda: pair.listener.refused_count == 1)
    assert pair.held() == {}
    async with by_hand(pair) as again:
        assert isinstance(await again.whole(1, payload(1, 4000)), ShardSealed)


@pytest.mark.parametrize(("index", "size"), [(4, CHUNK), (0, CHUNK - 1), (0, CHUNK + 1), (0, 0), (0, 1 << 31)], ids=str)
async def test_a_chunk_that_the_payload_does_not_have_ends_the_session_and_is_counted(
    pair: Pair, index: int, size: int
) -> None:
    async with by_hand(pair) as hand:
        await hand.begin(1, payload(1, 4000))
        await hand.wanted()
        hand.line.sendall(CHUNK_HEADER.pack(1, index, size))
        await hand.closed()
    await pair.until(lambda: pair.listener.refused_count == 1)
    assert pair.held() == {}


async def test_a_stream_of_no_session_or_of_somebody_elses_is_refused(pair: Pair) -> None:
    async with by_hand(pair) as hand:
        lines = [await pair.dial(kind="stream", of=b"?" * 32)]
        stranger = credentials(NodeId("i-third"))
        lines.append(await pair.dial(stranger, kind="stream", of=hand.session.opened.nonce))
        for line in lines:
            with pytest.raises(PeerLost):
                await line.receive()
            line.close()
        assert pair.listener.refused_count == 2
        assert isinstance(await hand.whole(1, payload(1, 4000)), ShardSealed)


async def test_a_stream_that_its_sender_has_closed_makes_room_for_the_next(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, ended = pair.receiver.stream, asyncio.Queue[socket.socket]()

    async def noted(session: TcpSession) -> None:
        await take(session)
        ended.put_nowait(session.line)

    monkeypatch.setattr(pair.receiver, "stream", noted)
    async with by_hand(pair) as hand:
        (owner,) = pair.receiver.open_sessions
        for _ in range(receiver.MAX_STREAMS):
            hand.line.close()
            assert (await ended.get()).fileno() == -1
            assert (owner.streams.lines, owner.streams._threads) == ([], {})
            hand.line = await pair.stream(hand.session)
        assert isinstance(await hand.whole(1, payload(1, 4000)), ShardSealed)
        assert len(owner.streams.lines) == 1
    assert pair.held() == {1: payload(1, 4000)}


async def test_a_cancelled_shard_is_no_snapshot_and_the_next_one_comes_through(pair: Pair) -> None:
    async with by_hand(pair) as hand:
        await hand.begin(1, payload(1, 4000))
        await hand.wanted()
        hand.chunks(payload(1, 4000), [0, 1])
        await hand.session.send(CancelShard(transfer=1))
        await hand.session.send(CancelShard(transfer=1))  # a cancellation arrives after its transfer has ended
        assert isinstance(await hand.whole(2, payload(2, 4000)), ShardSealed)
    assert pair.held() == {2: payload(2, 4000)}


async def test_a_slot_granted_anew_while_it_is_being_sent(make: Callable[..., Pair]) -> None:
    """The owner's streams of step 1 are blocked by a full socket when its slot is granted again for step 2.

    The holder seals step 2, and never seals step 1.
    """
    pair = make(payload_bytes=8 << 20, memory_bytes=1 << 26, holder_memory_bytes=1 << 26)
    pair.listen()
    gate, begun = asyncio.Event(), asyncio.Event()
    receive = pair.receiver.replica

    async def deaf(session: TcpSession) -> None:
        if gate.is_set():
            await receive(session)
            return
        await session.send(HolderInventory(owner_rank=RANK, sealed=()))
        assert isinstance(await session.receive(), BeginShard)
        await ask_for_all(session)
        begun.set()
        await gate.wait()
        session.close()

    async def unread(session: TcpSession) -> None:
        if gate.is_set():
            await stream(session)
        else:
            await gate.wait()

    stream = pair.receiver.stream
    pair.receiver.replica, pair.receiver.stream = deaf, unread  # type: ignore[method-assign]
    pair.send()
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    await begun.wait()
    pair.apply_announcement(-1, 2)
    slot = pair.owner_store.sealed(RANK, content(1))
    assert slot is not None
    other = await pair.owner_store.grant(
        RANK, content(2), keep=set(), capacity_bytes=8 << 20, layout_hash=LAYOUT, slot_count=1
    )
    assert other is not None
    assert pair.owner_store.shards[RANK][other] is slot
    assert all(reader.done() for reader in slot.readers)
    pair.shard.forget(Step(1))
    gate.set()
    await pair.capture(2)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert set(pair.held()) == {2}


class Slow(Recorded):
    """A dialler whose streams wait until the test opens the gate."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair)
        self.begun, self.gate = asyncio.Event(), asyncio.Event()

    async def stream(self, session: Session, number: int) -> socket.socket:
        """Implement `Dialler.stream`."""
        self.begun.set()
        await self.gate.wait()
        return await super().stream(session, number)


class OneCard(Recorded):
    """A dialler on a node with several network cards.

    Only the first card reaches the holder, until the test repairs the other cards.
    """

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair)
        self.tried: list[int] = []
        self.sender: ReplicaSender | None = None
        self.is_mended = False

    async def session(self) -> TcpSession:
        """Implement `Dialler.session`."""
        return await self.pair.dial(kind="fetch", rank=Rank(-1)) if self.sender is None else await super().session()

    async def stream(self, session: Session, number: int) -> socket.socket:
        """Implement `Dialler.stream`."""
        self.tried.append(number)
        if number and not self.is_mended:
            if self.sender is not None:
                look(self.sender, count=3 * LOOKS_PER_DEADLINE)  # these checks take as long as a handshake may take
            raise PeerLost("10.0.1.7:9000 does not answer")
        return await super().stream(session, number)


async def test_a_step_that_is_damaged_in_its_own_slot_is_given_up_and_costs_no_holder_its_place(pair: Pair) -> None:
    """The bytes in the owner's own slot change, so the holder rejects the step. The owner abandons the step.

    The owner must not drop the holder instead. Otherwise, the damaged copy alone would suffice for a commit.
    """
    pair.send(deadline_seconds=RARELY_SECONDS)
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    pair.apply_announcement(1, 2)
    capture = await pair.begin_capture(2)
    capture.write(pair.payload_bytes)
    capture.digests.complete()
    await capture.sealing
    with capture.slot.file.payload(0, 1) as view:
        view[0] ^= 1
    pair.shard.seal(Step(2))
    await pair.until(lambda: pair.shard.core.vote is not Vote.NONE)
    assert (pair.shard.core.vote, pair.shard.core.reason) == (
        Vote.ABANDON,
        "the captured bytes no longer match their digests",
    )
    assert pair.shard.core.view == {HOLDER}
    assert pair.shard.slot(Step(2)) is None
    pair.apply_announcement(1, 3)
    await pair.capture(3)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert pair.held()[3] == payload(3, pair.payload_bytes)


async def test_a_card_that_cannot_be_reached_takes_no_stream_from_those_that_can(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """One network card cannot reach the holder. The session continues with the streams of the other cards."""
    dialler = OneCard(pair)
    sender = dialler.sender = pair.send(deadline_seconds=RARELY_SECONDS, dialler=dialler)
    sender.stream_count = StreamCount(limit=4, count=4)
    for step in (1, 2):
        pair.apply_announcement(step - 1 or -1, step)
        await pair.capture(step)
        await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert pair.shard.core.view == {HOLDER}
    assert (dialler.tried, len(dialler.sessions), len(sender.streams.lines)) == ([0, 1], 1, 1)
    assert [record.message for record in caplog.records if "over only" in record.message] == [
        f"rank {RANK} sends to {HOLDER} over only 1 stream: 10.0.1.7:9000 does not answer"
    ]


async def test_a_card_that_was_out_of_reach_has_its_streams_in_the_next_session(pair: Pair) -> None:
    """A network card cannot reach the holder during one session, for example while the holder's agent restarts.

    The next session opens streams on this card again.
    """
    dialler = OneCard(pair)
    # measure the rate in every transfer, however small
    sender = dialler.sender = pair.send(deadline_seconds=RARELY_SECONDS, dialler=dialler, measured_bytes=0)
    sender.stream_count = StreamCount(limit=4, count=4, best_count=2)
    for step in range(1, TRIES + 2):
        pair.apply_announcement(step - 1 or -1, step)
        await pair.capture(step)
        await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert sender.stream_count == StreamCount(limit=4, count=4, best_count=2), (
        "what one stream carries says nothing of four"
    )
    dialler.is_mended = True
    dialler.sessions[0].line.shutdown(socket.SHUT_RDWR)
    pair.apply_announcement(step, step + 1)
    await pair.capture(step + 1)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert dialler.tried == [0, 1, 0, 1, 2, 3]
    assert len(sender.streams.lines) == 4


async def test_a_fetch_goes_over_the_cards_that_can_be_reached(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await held_by_the_holder(pair)
    monkeypatch.setattr(fetching, "fetch_streams", lambda *_: 4)
    dialler = OneCard(pair)
    data = payload(1, 4000)
    source = ShardSource(
        kind="peer",
        node_id=HOLDER,
        origin_generation=GENERATION,
        step=Step(1),
        digest=payload_digest(data),
        payload_bytes=len(data),
    )
    await fetch_shard(
        dialler, RANK, source, pair.owner_store, keep=set(), slot_count=2, answer_seconds=20, silence_seconds=20
    )
    assert dialler.tried == [0, 1]
    assert f"rank {RANK} is fetched over only 1 stream: 10.0.1.7:9000 does not answer" in caplog.messages
    assert pair.owner_store.sealed(RANK, content(1)) is not None


async def test_a_holder_has_acknowledged_what_it_was_sent_however_long_its_streams_took(pair: Pair) -> None:
    """While a stream to the holder is being opened, the slot of step 1 is granted again for step 3.

    The holder receives and acknowledges only step 3.
    """
    dialler = Slow(pair)
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    pair.send(dialler=dialler)
    await dialler.begun.wait()
    pair.apply_announcement(-1, 3)
    await pair.capture(2)
    await pair.capture(3)
    assert pair.shard.slot(Step(1)) is None
    dialler.gate.set()
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert pair.shard.core.held == {(HOLDER, 3)}
    assert set(pair.held()) == {3}


async def test_one_session_per_owner_the_earlier_is_joined_before_the_next_begins(pair: Pair) -> None:
    data = payload(1, 4000)
    async with by_hand(pair) as first:
        await first.begin(1, data)
        await first.wanted()
        first.chunks(data, [0, 1])
        async with by_hand(pair) as second:
            await first.closed()
            await second.begin(1, data)
            second.chunks(data, await second.wanted())
            assert isinstance(await second.session.receive(), ShardSealed)
    assert pair.held() == {1: data}


@pytest.mark.parametrize("what", ["sessions", "lines"])
async def test_a_broken_line_is_dialled_again_and_sending_goes_on(pair: Pair, what: str) -> None:
    dialler = Recorded(pair)
    pair.send(dialler=dialler)
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    (dialler.sessions[0].line if what == "sessions" else dialler.lines[0]).shutdown(socket.SHUT_RDWR)
    pair.apply_announcement(1, 2)
    await pair.capture(2)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert len(dialler.sessions) == 2
    assert set(pair.held()) == {1, 2}


async def test_a_holder_that_lost_a_slot_says_so_and_gets_it_again(pair: Pair) -> None:
    dialler = Recorded(pair)
    pair.send(dialler=dialler)
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    pair.apply_announcement(1, 2)
    lost = pair.holder_store.sealed(RANK, content(1))
    assert lost is not None
    lost.file.empty()
    dialler.sessions[0].line.shutdown(socket.SHUT_RDWR)
    await pair.until(
        lambda: pair.shard.core.view == frozenset()
    )  # the broken session ends, so the owner drops the holder
    await pair.until(lambda: pair.shard.core.view == {HOLDER})
    assert set(pair.held()) == {1}


async def test_a_replica_with_another_digest_does_not_count(pair: Pair) -> None:
    """The holder has other bytes for step 1 than the owner.

    The owner votes only after the holder has its bytes: it ignores the holder's copy and sends its own.
    """
    async with by_hand(pair) as hand:
        assert isinstance(await hand.whole(1, payload(7, pair.payload_bytes)), ShardSealed)
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    pair.send()
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert payload_digest(payload(1, pair.payload_bytes)) in {record.digest for record in pair.holder_store.inventory()}


async def test_a_peer_that_stops_reading_is_dropped_and_c_advances_without_it(make: Callable[..., Pair]) -> None:
    pair = make(payload_bytes=8 << 20, memory_bytes=1 << 26)
    deaf = asyncio.Event()

    async def never_reads(session: TcpSession) -> None:
        if session.opened.kind == "replica":
            await session.send(HolderInventory(owner_rank=RANK, sealed=()))
            assert isinstance(await session.receive(), BeginShard)
            await ask_for_all(session)
        await deaf.wait()

    pair.listen()
    pair.receiver.replica = pair.receiver.stream = never_reads  # type: ignore[method-assign]
    pair.send(deadline_seconds=0.2)
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    assert pair.shard.core.vote is Vote.NONE
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert pair.shard.core.view == frozenset()
    assert pair.shard.round().out_of_view == (HOLDER,)
    for step in range(2, 12):
        pair.apply_announcement(step - 1, step)
        await pair.capture(step)
        assert pair.shard.core.vote is Vote.ACKED
    deaf.set()


def look(sender: ReplicaSender, *, count: int, late_seconds: float = 0.0) -> None:
    """Check the holder for silence `count` times in a row, each check late by `late_seconds`."""
    for _ in range(count):
        silence = sender.silence
        before = asyncio.get_running_loop().time() if silence.checked_at < 0 else silence.checked_at
        sender.check_holder(before + silence.period_seconds + late_seconds)


async def test_an_owner_that_stood_still_itself_does_not_drop_its_holder(pair: Pair) -> None:
    sender = ReplicaSender(
        pair.shard, HOLDER, pair, pair.owner_store, pair.pacer, holder_deadline_seconds=RARELY_SECONDS
    )
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    look(sender, count=LOOKS_PER_DEADLINE)
    look(sender, count=1, late_seconds=10 * RARELY_SECONDS)
    assert pair.shard.core.view == {HOLDER}, "what came meanwhile has not been read yet"
    look(sender, count=2)
    assert pair.shard.core.view == frozenset()


async def test_a_holder_is_not_silent_while_its_owner_digests_its_own_slot(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests, begun, gate = pair.owner_store.digests, asyncio.Event(), asyncio.Event()

    async def slow(slot: Slot) -> ChunkDigests | None:
        begun.set()
        await gate.wait()
        return await digests(slot)

    monkeypatch.setattr(pair.owner_store, "digests", slow)
    sender = pair.send(deadline_seconds=RARELY_SECONDS)
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    await begun.wait()
    look(sender, count=3 * LOOKS_PER_DEADLINE)
    assert pair.shard.core.view == {HOLDER}
    gate.set()
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert set(pair.held()) == {1}
    assert not sender._is_verifying


async def test_a_holder_that_nobody_reaches_is_dropped_and_returns_by_receiving_c(pair: Pair) -> None:
    dialler = Recorded(pair)
    dialler.is_there.clear()
    pair.send(deadline_seconds=0.2, dialler=dialler)
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    pair.apply_announcement(1, 2)
    dialler.is_there.set()
    await pair.until(lambda: pair.shard.core.view == {HOLDER})
    assert set(pair.held()) == {1}
    await pair.capture(2)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert set(pair.held()) == {1, 2}


class Held:
    """A pacer that delays every piece until the test opens the gate."""

    chunk_bytes = 300

    def __init__(self) -> None:
        self.gate, self.asked = asyncio.Event(), asyncio.Event()

    async def admit(self, bytes_count: int) -> None:
        """Implement `Pacer.admit`."""
        self.asked.set()
        await self.gate.wait()

    def book(self, bytes_count: int) -> float | None:
        """Implement `Pacer.book`."""
        return None


async def test_a_holder_returns_however_long_it_takes_to_send_what_it_lacks(pair: Pair) -> None:
    """A dropped holder receives the step that it lacks over a slow connection. The owner's votes wait for this
    transfer.

    Without the wait, the next step would be captured into the slot from which the transfer reads.
    """
    dialler, slow = Recorded(pair), Held()
    dialler.is_there.clear()
    sender = pair.send(deadline_seconds=RARELY_SECONDS, dialler=dialler)
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    look(sender, count=LOOKS_PER_DEADLINE + 2)
    assert pair.shard.core.vote is Vote.ACKED
    pair.apply_announcement(1, 2)
    pair.pacer.current = slow
    dialler.is_there.set()
    await slow.asked.wait()
    await pair.capture(2)
    assert pair.shard.core.vote is Vote.NONE, "else the slot of 1 is the next one's"
    slow.gate.set()
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert pair.shard.core.view == {HOLDER}
    assert set(pair.held()) == {1, 2}


async def test_a_holder_that_returns_and_falls_silent_again_holds_nobody_up(pair: Pair) -> None:
    sender = ReplicaSender(
        pair.shard, HOLDER, pair, pair.owner_store, pair.pacer, holder_deadline_seconds=RARELY_SECONDS
    )
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    look(sender, count=LOOKS_PER_DEADLINE + 2)
    pair.apply_announcement(1, 2)
    sender._progress()
    await pair.capture(2)
    assert (pair.shard.core.returning, pair.shard.core.vote) == ({HOLDER}, Vote.NONE)
    look(sender, count=LOOKS_PER_DEADLINE + 2)
    assert (pair.shard.core.returning, pair.shard.core.vote) == (frozenset(), Vote.ACKED)


async def test_a_holder_that_refuses_what_it_takes_is_not_waited_for(pair: Pair) -> None:
    sender = ReplicaSender(
        pair.shard, HOLDER, pair, pair.owner_store, pair.pacer, holder_deadline_seconds=RARELY_SECONDS
    )
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    for _ in range(2):
        sender._progress()
        sender._failed("it refuses step 1")
    look(sender, count=LOOKS_PER_DEADLINE + 2)
    assert pair.shard.core.view == frozenset()
    sender._progress()
    assert pair.shard.core.returning == frozenset()


class Breaking(Recorded):
    """A dialler whose sessions break after the holder's inventory has arrived, until the test repairs the dialler."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair)
        self.is_mended = False

    async def stream(self, session: Session, number: int) -> socket.socket:
        """Implement `Dialler.stream`."""
        if not self.is_mended:
            raise PeerLost("the line broke")
        return await super().stream(session, number)

    async def tried(self, count: int) -> None:
        """Wait until `count` more sessions have broken."""
        enough = len(self.sessions) + count + 1
        await self.pair.until(lambda: len(self.sessions) >= enough)


async def test_a_holder_whose_line_breaks_in_every_attempt_holds_up_one_step_and_not_each(pair: Pair) -> None:
    """A holder's connection breaks in every attempt to send it a step.

    The owner's first vote waits for the holder's deadline. Later votes do not wait.
    """
    dialler = Breaking(pair)
    sender = pair.send(deadline_seconds=RARELY_SECONDS, dialler=dialler)
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    await dialler.tried(2)
    assert pair.shard.core.vote is Vote.NONE
    look(sender, count=LOOKS_PER_DEADLINE + 3)
    for step in (2, 3):
        pair.apply_announcement(step - 1, step)
        await dialler.tried(1)
        assert pair.shard.core.returning == frozenset()
        await pair.capture(step)
        assert pair.shard.core.vote is Vote.ACKED


async def test_a_holder_whose_line_holds_again_is_waited_for_after_a_while(pair: Pair) -> None:
    """A dropped holder's connection works again. After a while, the owner's votes wait for the transfer to this holder
    again.

    Without this wait, a holder with a slow connection would never return to the view.
    """
    dialler, slow = Breaking(pair), Held()
    sender = pair.send(deadline_seconds=RARELY_SECONDS, dialler=dialler)
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    await dialler.tried(2)
    look(sender, count=LOOKS_PER_DEADLINE + 3)
    pair.apply_announcement(1, 2)
    pair.pacer.current = slow
    dialler.is_mended = True
    await slow.asked.wait()
    assert pair.shard.core.returning == frozenset()
    look(sender, count=LOOKS_PER_DEADLINE + 3)
    sender._progress()
    assert pair.shard.core.returning == {HOLDER}
    await pair.capture(2)
    look(sender, count=1)
    assert pair.shard.core.vote is Vote.NONE, "what failed before says nothing of now"
    slow.gate.set()
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert (pair.shard.core.view, set(pair.held())) == ({HOLDER}, {1, 2})


async def test_a_holder_whose_line_breaks_again_and_again_is_told_in_view_until_a_step_arrives_whole(
    pair: Pair,
) -> None:
    """A holder's connection breaks again and again, each time for less than the holder's deadline.

    The holder stays in the view. The owner reports the broken connection until a whole step has arrived.
    """
    dialler = Breaking(pair)
    pair.send(deadline_seconds=RARELY_SECONDS, dialler=dialler)
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    changes = pair.changes
    await pair.until(lambda: bool(pair.shard.broken_lines))
    assert re.fullmatch(
        r"its line breaks: \d+ transfers were cut short and none came whole, the last: the line broke",
        pair.shard.broken_lines[HOLDER],
    )
    assert (pair.changes, pair.shard.core.view) == (changes + 1, {HOLDER})
    dialler.is_mended = True
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert list(pair.shard.broken_lines) == [HOLDER], "that was the rest of what broke"
    pair.apply_announcement(1, 2)
    await pair.capture(2)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert pair.shard.broken_lines == {}


async def test_a_line_that_breaks_while_nothing_is_to_be_sent_is_nobodys_trouble(pair: Pair) -> None:
    dialler = Breaking(pair)
    sender = pair.send(deadline_seconds=RARELY_SECONDS, dialler=dialler)
    await dialler.tried(CUTS)
    assert sender.line == BrokenLine()


class Buggy:
    """A replacement for `announcement` with a bug: its first `count` calls raise an error."""

    def __init__(self, count: int) -> None:
        self.left_count = count
        self.called_count = 0

    def __call__(self, slot: SlotHeader, *, transfer: int, committed: Step) -> BeginShard:
        """Implement `announcement`."""
        self.called_count += 1
        if self.left_count:
            self.left_count -= 1
            raise LookupError("a bug")
        return announcement(slot, transfer=transfer, committed=committed)


async def test_a_bug_that_ends_an_attempt_is_logged_and_not_the_end_of_all(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug ends one attempt to send a step.

    The sender logs the bug and retries, so that the holder acknowledges the step.
    """
    monkeypatch.setattr(sending, "announcement", Buggy(1))
    sender = pair.send(retry_seconds=(0.01,))
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert "LookupError: a bug" in caplog.text
    assert sender.line == BrokenLine(), "the line is sound"


async def test_a_holder_that_a_bug_keeps_from_everything_leaves_the_view_with_the_reason(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = Buggy(-1)
    monkeypatch.setattr(sending, "announcement", bug)
    sender = pair.send(deadline_seconds=RARELY_SECONDS, retry_seconds=(0.01,))
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    await pair.until(lambda: bug.called_count > 2)
    look(sender, count=LOOKS_PER_DEADLINE + 3)
    assert (pair.shard.core.view, pair.shard.core.vote) == (frozenset(), Vote.ACKED)
    assert pair.shard.holder_troubles == {HOLDER: "sending to this holder raised LookupError('a bug')"}


async def test_what_is_sent_measures_the_node_s_link(make: Callable[..., Pair]) -> None:
    pair = make(payload_bytes=2 * MEASURED_PERIOD_BYTES)
    pair.listen()
    sender = pair.send()
    for step in range(1, ENOUGH_TRANSFERS + 1):
        assert pair.pacer.bytes_per_second is None
        pair.apply_announcement(step - 1 or -1, step)
        await pair.capture(step)
        await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
        await pair.until(lambda: sender.queue is None)
    use = pair.pacer.link.use
    assert pair.pacer.bytes_per_second is not None
    assert pair.pacer.sent_bytes == ENOUGH_TRANSFERS * pair.payload_bytes
    assert pair.pacer.bytes_per_second >= pair.pacer.sent_bytes / use.busy_seconds, "the fastest of these"


async def test_a_transfer_that_ends_before_it_sends_no_longer_counts_for_the_link(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, counts = asyncio.Event(), []

    async def breaks(*_arguments: Any, **_more: Any) -> None:
        tries.set()
        counts.append(pair.pacer.link.use.sender_count)
        raise PeerLost("broken")

    monkeypatch.setattr(transfers, "send_chunks", breaks)
    pair.send()
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    await tries.wait()
    await pair.stop_sending()
    assert (counts[0], pair.pacer.link.use.sender_count) == (1, 0)


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("pacer", [Unpaced(), UniformPacer(1e9, 1000)], ids=["at_once", "paced"])
async def test_a_holder_is_called_slow_until_a_shard_of_its_own_was_not(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, pacer: Pacer, is_slow: bool
) -> None:
    monkeypatch.setattr(ReplicaSender, "is_slow", lambda _sender, _queue: is_slow)
    pair.pacer.current = pacer
    pair.shard.record_slow_link(HOLDER, "its link carries 1 MB/s")
    sender = pair.send()
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    await pair.until(lambda: sender.queue is None)
    assert bool(pair.shard.slow_holders) is is_slow


class Waiting:
    """A pacer with a virtual clock, which advances while a piece waits and while the stream sends it.

    The pacer returns a short wait for the first piece, which the stream's thread spends itself. The wait for the second
    piece is longer, so the sender awaits `admit`. The pacer lets the third piece pass at once.
    """

    chunk_bytes = CHUNK

    def __init__(self) -> None:
        self.now = 100.0
        self.count = 0
        self.moments = threading.Event()
        self.moments.wait = self.wait  # type: ignore[method-assign]

    def wait(self, timeout: float | None = None) -> bool:
        """Replace the wait in a stream's thread."""
        assert timeout == 0.5
        self.now += 7.0
        return False

    def book(self, bytes_count: int) -> float | None:
        """Implement `Pacer.book`."""
        self.count += 1
        return (0.5, None, 0.0)[self.count - 1]

    async def admit(self, bytes_count: int) -> None:
        """Implement `Pacer.admit`."""
        self.now += 50.0

    def payload(self, start: int = 0, end: int | None = None) -> memoryview:
        """Return a chunk of zeros, and advance the clock by the time of sending."""
        self.now += 1.0
        return memoryview(bytes(CHUNK))


async def test_time_in_which_a_pacer_holds_pieces_back_is_none_of_the_link_s() -> None:
    pacer, streams = Waiting(), Streams()
    queue = ChunkQueue(lambda: pacer.now)
    queue.cancelled = pacer.moments
    queue.add([(0, 3)])
    queue.complete()
    with socket.create_server(("127.0.0.1", 0)) as server:
        streams.add(socket.create_connection(server.getsockname()))
        try:
            await send_chunks(streams, pacer, 1, queue, payload_bytes=3 * CHUNK, pacer=pacer, progress=lambda _: None)
        finally:
            await streams.close()
    assert pacer.now == 100.0 + 3 * 1.0 + 7.0 + 50.0
    assert queue.busy_seconds == 3.0


async def test_a_holder_is_not_silent_while_the_pacer_holds_its_chunks_back(pair: Pair) -> None:
    pacer = pair.pacer.current = Held()
    sender = pair.send(deadline_seconds=RARELY_SECONDS)
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    await pacer.asked.wait()
    assert sender.queue is not None
    seconds = sender.queue.busy_seconds
    look(sender, count=3 * LOOKS_PER_DEADLINE)
    assert pair.shard.core.view == {HOLDER}
    assert sender.queue.busy_seconds == seconds, "nothing of it is the link's"
    pacer.gate.set()
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert pair.held() == {1: payload(1, pair.payload_bytes)}


async def test_a_slot_is_granted_anew_at_once_while_the_pacer_holds_its_chunks_back(pair: Pair) -> None:
    pacer = pair.pacer.current = Held()
    pair.send()
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    await pacer.asked.wait()
    assert (
        await pair.owner_store.grant(
            RANK, content(2), keep=set(), capacity_bytes=10_000, layout_hash=LAYOUT, slot_count=1
        )
        == 0
    )
    pair.shard.forget(Step(1))
    pacer.gate.set()
    pair.apply_announcement(-1, 2)
    await pair.capture(2)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert set(pair.held()) == {2}


async def test_a_holder_that_is_out_of_view_and_keeps_up_returns_with_the_next_commit(pair: Pair) -> None:
    """A dropped holder acknowledges every step just after the owner has voted.

    The next commit returns the holder to the view.
    """
    pair.shard.drop(HOLDER)
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    assert pair.shard.core.vote is Vote.ACKED
    pair.send()
    await pair.until(lambda: (HOLDER, 1) in pair.shard.core.held)
    assert pair.shard.core.view == frozenset()
    pair.apply_announcement(1, 2)
    assert pair.shard.core.view == {HOLDER}


async def test_a_holder_makes_its_slots_before_the_first_shard_comes(pair: Pair) -> None:
    pair.send()
    pair.shard.reserve(10_000, LAYOUT)
    await pair.until(lambda: pair.holder_states() == [SlotState.EMPTY] * 2)
    files = [slot.file for slot in pair.holder_store.shards[RANK]]
    for step in (1, 2, 3):
        pair.apply_announcement(step - 1 or -1, step)
        await pair.capture(step)
        await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert set(pair.held()) == {2, 3}
    assert [slot.file for slot in pair.holder_store.shards[RANK]] == files


@pytest.fixture
def slow(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.Event]:
    """Return an event. Until the test sets it, the holder cannot finish the creation of slots."""
    create, gate = pair.holder_store._create, asyncio.Event()

    async def slowly(rank: Rank, index: int, header: SlotHeader) -> SlotFile:
        await finish(gate.wait())  # this wait ignores cancellation, like a thread that allocates pages
        return await create(rank, index, header)

    pair.receiver.preparing_seconds = 0.02
    monkeypatch.setattr(pair.holder_store, "_create", slowly)
    yield gate
    gate.set()


async def test_a_holder_that_is_long_in_making_its_slots_is_waited_for_and_not_taken_for_silent(
    pair: Pair, slow: asyncio.Event
) -> None:
    pair.send(deadline_seconds=0.2)
    pair.shard.reserve(10_000, LAYOUT)
    ready = asyncio.create_task(pair.shard.holders_ready())
    await asyncio.wait([ready], timeout=1.0)  # one second is several times the holder's deadline
    assert not ready.done()
    assert pair.shard.core.view == {HOLDER}
    slow.set()
    assert await ready


async def test_a_holder_that_makes_a_slot_for_what_comes_says_so_also_when_that_is_given_up(
    pair: Pair, slow: asyncio.Event
) -> None:
    async with by_hand(pair) as hand:
        await hand.begin(1, payload(1, 4000))
        assert isinstance(await hand.session.receive(), PreparingShard)
        await hand.session.send(CancelShard(transfer=1))
        await hand.begin(2, payload(2, 4000))
        for _ in range(5):
            assert isinstance(await hand.session.receive(), PreparingShard)
        slow.set()
        while isinstance(message := await hand.session.receive(), PreparingShard):
            continue
        assert isinstance(message, ShardWanted)
        hand.chunks(
            payload(2, 4000), [index for first, count in message.chunks for index in range(first, first + count)]
        )
        assert isinstance(await hand.session.receive(), ShardSealed)
    assert pair.held() == {2: payload(2, 4000)}


async def test_a_holder_that_is_long_in_making_a_slot_for_what_comes_is_not_taken_for_silent(
    pair: Pair, slow: asyncio.Event
) -> None:
    pair.send(deadline_seconds=0.2)
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    voted = asyncio.create_task(pair.until(lambda: pair.shard.core.vote is Vote.ACKED))
    await asyncio.wait([voted], timeout=1.0)  # one second is several times the holder's deadline
    assert not voted.done()
    slow.set()
    await voted
    assert pair.shard.core.view == {HOLDER}


async def test_a_holder_that_falls_silent_while_it_should_make_slots_is_not_waited_for(pair: Pair) -> None:
    dialler = Recorded(pair)
    dialler.is_there.clear()
    pair.send(deadline_seconds=0.2, dialler=dialler)
    pair.shard.reserve(10_000, LAYOUT)
    assert await pair.shard.holders_ready()
    assert pair.shard.core.view == frozenset()


async def test_slots_that_are_reserved_once_more_alike_are_there(pair: Pair) -> None:
    """A rank requests the same slots again over a new connection.

    The owner answers at once and sends the holder nothing.
    """
    pair.send(deadline_seconds=RARELY_SECONDS)
    pair.shard.reserve(10_000, LAYOUT)
    assert await pair.shard.holders_ready()
    pair.shard.reserve(10_000, LAYOUT)
    assert await pair.shard.holders_ready()
    assert pair.shard.core.view == {HOLDER}


async def test_slots_that_are_reserved_anew_are_waited_for_anew(pair: Pair) -> None:
    pair.shard.reserve(10_000, LAYOUT)
    first = asyncio.create_task(pair.shard.holders_ready())
    await asyncio.sleep(0)
    pair.shard.reserve(20_000, LAYOUT)
    pair.shard.ready(HOLDER, 10_000, LAYOUT)  # the holder answers the first request
    assert not await first
    second = asyncio.create_task(pair.shard.holders_ready())
    await asyncio.sleep(0)
    assert not second.done()
    pair.send()
    assert await second


async def test_a_shard_that_is_announced_while_slots_are_being_made_waits_for_them(
    pair: Pair, slow: asyncio.Event
) -> None:
    async with by_hand(pair) as hand:
        await hand.session.send(ReserveShard(capacity_bytes=4000, layout_hash=LAYOUT))
        await hand.begin(1, payload(1, 4000))
        assert isinstance(await hand.session.receive(), PreparingShard)
        slow.set()
        while isinstance(message := await hand.session.receive(), PreparingShard):
            continue
        assert isinstance(message, ShardReserved)
        hand.chunks(payload(1, 4000), await hand.wanted())
        assert isinstance(await hand.session.receive(), ShardSealed)
    assert pair.held() == {1: payload(1, 4000)}


@pytest.mark.parametrize("wrong", [{"capacity_bytes": -1}, {"layout_hash": b"short"}], ids=str)
async def test_a_reservation_that_makes_no_sense_ends_the_session_and_is_counted(
    pair: Pair, wrong: dict[str, object]
) -> None:
    async with by_hand(pair) as hand:
        await hand.session.send(ReserveShard(**{"capacity_bytes": 4000, "layout_hash": LAYOUT, **wrong}))  # type: ignore[arg-type]
        await hand.closed()
    await pair.until(lambda: pair.listener.refused_count == 1)


async def test_a_holder_without_memory_refuses_with_the_figures_and_keeps_what_it_has(
    make: Callable[..., Pair],
) -> None:
    pair = make(holder_memory_bytes=5000)
    pair.listen()
    async with by_hand(pair) as hand:
        assert isinstance(await hand.whole(1, payload(1, 4000)), ShardSealed)
        refused = await hand.whole(2, payload(2, 4000), committed=1)
        assert isinstance(refused, ShardRefused)
        assert "8,000 bytes" in refused.reason
        assert "5,000 bytes" in refused.reason
        assert set(pair.held()) == {1}


async def test_a_holder_whose_wire_damages_everything_is_dropped_however_much_is_sent(pair: Pair) -> None:
    async def damaged(session: TcpSession) -> None:
        if session.opened.kind == "replica":
            await session.send(HolderInventory(owner_rank=RANK, sealed=()))
            while isinstance(begin := await session.receive(), BeginShard):
                named = await ask_for_all(session)
                for _ in range(3):
                    await session.send(ShardWanted(transfer=begin.transfer, chunks=((0, named),)))
                assert isinstance(await session.receive(), EndShard)
                await session.send(
                    ShardRefused(transfer=begin.transfer, reason="chunks of the shard do not match their digests")
                )
        else:
            with session.detach() as line:
                line.setblocking(False)
                while await asyncio.get_running_loop().sock_recv(line, 1 << 16):
                    continue

    pair.receiver.replica = pair.receiver.stream = damaged  # type: ignore[method-assign]
    pair.send(deadline_seconds=0.5)
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert pair.shard.core.view == frozenset()
    assert "do not match" in pair.shard.holder_troubles[HOLDER]


async def test_an_owner_says_in_the_holders_words_why_it_is_out_of_view_and_forgets_it_when_it_heals(
    make: Callable[..., Pair],
) -> None:
    pair = make(holder_memory_bytes=5000)
    pair.listen()
    pair.send(deadline_seconds=0.3)
    pair.apply_announcement(-1, 1)
    await pair.capture(1)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert pair.shard.core.view == frozenset()
    assert (
        "it refuses step 1: slots need 10,000 bytes of host memory and 5,000 bytes are there"
        in pair.shard.holder_troubles[HOLDER]
    )
    pair.apply_announcement(1, 2)
    pair.holder_store.memory_bytes = 1 << 20
    await pair.until(lambda: pair.shard.core.view == {HOLDER})
    assert pair.shard.holder_troubles == {}


class Fetching:
    """A dialler whose sessions are of the kind `fetch`."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    async def session(self) -> TcpSession:
        """Implement `Dialler.session`."""
        return await self.pair.dial(kind="fetch", rank=Rank(-1))

    async def stream(self, session: Session, number: int) -> socket.socket:
        """Implement `Dialler.stream`."""
        return await self.pair.stream(session, number)


async def fetch(pair: Pair, *, arrived: Arrived | None = None, **other: object) -> None:
    """Fetch step 1 from the holder; `other` replaces fields of the request."""
    data = payload(1, 4000)
    fields: dict[str, object] = {
        "kind": "peer",
        "node_id": HOLDER,
        "origin_generation": GENERATION,
        "step": Step(1),
        "digest": payload_digest(data),
    }
    source = ShardSource(**{**fields, "payload_bytes": len(data), **other})  # type: ignore[arg-type]
    await fetch_shard(
        Fetching(pair),
        RANK,
        source,
        pair.owner_store,
        keep=set(),
        slot_count=2,
        answer_seconds=20,
        silence_seconds=20,
        arrived=arrived,
    )


async def held_by_the_holder(pair: Pair) -> None:
    """Send step 1 to the holder, and wait until the holder has sealed it."""
    async with by_hand(pair) as hand:
        assert isinstance(await hand.whole(1, payload(1, 4000)), ShardSealed)


async def test_what_is_fetched_is_what_was_asked_for(pair: Pair) -> None:
    await held_by_the_holder(pair)
    await fetch(pair)
    slot = pair.owner_store.sealed(RANK, content(1))
    assert slot is not None
    with slot.file.payload() as view:
        assert bytes(view) == payload(1, 4000)
    await pair.listener.revoke()
    assert all(not each.pins for each in pair.holder_store.shards[RANK])


async def test_who_follows_a_fetch_is_told_of_bytes_that_are_there_the_index_first(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await held_by_the_holder(pair)
    data, asked, told = payload(1, 4000), [], []
    held = pair.holder_store.sealed(RANK, content(1))
    assert held is not None
    held.file.write_header(replace(held.file.header, index_offset=2500, index_bytes=400))
    take = ChunkQueue.add

    def add(queue: ChunkQueue, chunks: Sequence[tuple[int, int]]) -> None:
        asked.append(tuple(chunks))
        take(queue, chunks)

    def arrived(file: SlotFile, header: SlotHeader, verified_bytes: int) -> None:
        with file.payload(0, 4000) as view:
            assert bytes(view[:verified_bytes]) == data[:verified_bytes]
            assert bytes(view[2500:2900]) == data[2500:2900]
        assert (header.index_offset, header.index_bytes, header.step) == (2500, 400, 1)
        told.append(verified_bytes)

    monkeypatch.setattr(ChunkQueue, "add", add)
    await fetch(pair, arrived=arrived)
    assert asked == [((2, 1),), ((0, 2), (3, 1))]
    assert told == sorted(told)
    assert told[-1] == 4000


async def test_of_a_shard_with_a_damaged_chunk_what_lies_before_it_alone_is_there(pair: Pair) -> None:
    await held_by_the_holder(pair)
    held = pair.holder_store.sealed(RANK, content(1))
    assert held is not None
    with held.file.payload(2000, 2001) as view:
        view[0] ^= 1
    told: list[int] = []
    with pytest.raises(ShardRejected, match="do not match"):
        await fetch(pair, arrived=lambda _file, _header, verified_bytes: told.append(verified_bytes))
    assert max(told) == 2000


@pytest.mark.parametrize(
    "wrong",
    [{"digest": b"x" * 16}, {"step": Step(2)}, {"origin_generation": Generation(2)}],
    ids=lambda wrong: next(iter(wrong)),
)
async def test_what_is_not_there_exactly_is_not_to_be_fetched(pair: Pair, wrong: dict[str, object]) -> None:
    await held_by_the_holder(pair)
    with pytest.raises(ShardRejected, match="this node does not hold the shard"):
        await fetch(pair, **wrong)
    assert pair.owner_store.inventory() == ()


async def test_a_fetched_shard_that_has_rotted_in_its_holders_memory_is_not_sealed(pair: Pair) -> None:
    await held_by_the_holder(pair)
    held = pair.holder_store.sealed(RANK, content(1))
    assert held is not None
    with held.file.payload(2000, 2001) as view:
        view[0] ^= 1
    with pytest.raises(ShardRejected, match="do not match"):
        await fetch(pair)
    assert pair.owner_store.inventory() == ()


@pytest.mark.parametrize("wrong", ["the end", "another transfer", "nothing of it"])
async def test_a_holder_that_gives_something_else_is_not_believed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    await held_by_the_holder(pair)
    other = payload(7, 4000)

    async def lying(session: TcpSession) -> None:
        assert isinstance(await session.receive(), FetchShard)
        slot = pair.holder_store.sealed(RANK, content(1))
        assert slot is not None
        await session.send(announcement(slot.file.header, transfer=1, committed=Step(-1)))
        if wrong == "nothing of it":
            await session.send(PreparingShard())
        await session.send(
            ShardDigests(
                transfer=2 if wrong == "another transfer" else 1, first=0, chunk_digests=payload_chunk_digests(other)
            )
        )
        await session.send(EndShard(transfer=1, digest=payload_digest(other)))
        await gate.wait()

    async def open_stream(session: TcpSession) -> None:
        await gate.wait()

    gate = asyncio.Event()
    monkeypatch.setattr(pair.receiver, "fetch", lying)
    monkeypatch.setattr(pair.receiver, "stream", open_stream)
    told: list[int] = []
    with pytest.raises(MalformedMessage):
        await fetch(pair, arrived=lambda _file, _header, verified_bytes: told.append(verified_bytes))
    assert pair.owner_store.inventory() == ()
    assert told == []
    gate.set()


async def test_a_holder_that_closes_its_stream_has_given_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    await held_by_the_holder(pair)
    data, gate = payload(1, 4000), asyncio.Event()

    async def half(session: TcpSession) -> None:
        assert isinstance(await session.receive(), FetchShard)
        slot = pair.holder_store.sealed(RANK, content(1))
        assert slot is not None
        await session.send(announcement(slot.file.header, transfer=1, committed=Step(-1)))
        await session.send(ShardDigests(transfer=1, first=0, chunk_digests=payload_chunk_digests(data)))
        await session.send(EndShard(transfer=1, digest=payload_digest(data)))
        await gate.wait()

    async def closed(session: TcpSession) -> None:
        with session.detach() as line:
            line.sendall(CHUNK_HEADER.pack(1, 0, CHUNK) + data[:CHUNK])

    monkeypatch.setattr(pair.receiver, "fetch", half)
    monkeypatch.setattr(pair.receiver, "stream", closed)
    with pytest.raises(PeerLost, match="closed a stream"):
        await fetch(pair)
    assert pair.owner_store.inventory() == ()
    gate.set()


async def test_a_holder_that_falls_silent_in_the_middle_is_not_waited_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await held_by_the_holder(pair)
    data = payload(1, 4000)
    gate = asyncio.Event()

    async def silent(session: TcpSession) -> None:
        wanted = await session.receive()
        assert isinstance(wanted, FetchShard)
        slot = pair.holder_store.sealed(RANK, content(1))
        assert slot is not None
        await session.send(announcement(slot.file.header, transfer=1, committed=Step(-1)))
        await session.send(ShardDigests(transfer=1, first=0, chunk_digests=payload_chunk_digests(data)))
        await session.send(EndShard(transfer=1, digest=payload_digest(data)))
        await gate.wait()

    async def half(session: TcpSession) -> None:
        with session.detach() as line:
            line.sendall(CHUNK_HEADER.pack(1, 0, CHUNK) + data[:500])
            await gate.wait()

    monkeypatch.setattr(pair.receiver, "fetch", silent)
    monkeypatch.setattr(pair.receiver, "stream", half)
    source = ShardSource(
        kind="peer",
        node_id=HOLDER,
        origin_generation=GENERATION,
        step=Step(1),
        digest=payload_digest(data),
        payload_bytes=len(data),
    )
    with pytest.raises(PeerLost):  # the error describes either the silence or the connection that closed because of it
        await fetch_shard(
            Fetching(pair),
            RANK,
            source,
            pair.owner_store,
            keep=set(),
            slot_count=2,
            answer_seconds=20,
            silence_seconds=0.1,
        )
    assert pair.owner_store.inventory() == ()
    gate.set()


async def test_a_restarted_holder_is_not_stuck_with_a_half_received_shard(pair: Pair) -> None:
    """A holder's agent dies while one of its two slots has the committed step and the other a partly received shard.

    No process writes the partial shard any more, so the restarted agent grants its slot again.
    """
    await held_by_the_holder(pair)
    index = await pair.holder_store.grant(
        RANK, content(2), keep={content(1)}, capacity_bytes=4000, layout_hash=LAYOUT, slot_count=2
    )
    assert index is not None
    pair.holder_store.close()
    again = SlotStore(pair.holder_store.files, memory_bytes=1 << 20)
    assert pair.owner_store.run is not None
    again.open_run(pair.owner_store.job, pair.owner_store.run)
    # Declare the writers of the shard as ended, as `Member.adopt` does if the shard's rank is on another node.
    again.settle_copiers(RANK)
    assert (
        await again.grant(RANK, content(2), keep={content(1)}, capacity_bytes=4000, layout_hash=LAYOUT, slot_count=2)
        is not None
    )
    again.close()


async def test_an_ended_generation_leaves_no_stream_open(pair: Pair) -> None:
    async with by_hand(pair) as hand:
        await hand.begin(1, payload(1, 4000))
        await hand.wanted()
        hand.chunks(payload(1, 4000), [0, 1])
        await pair.listener.revoke()
        assert pair.held() == {}
        await hand.closed()
        assert hand.line.recv(64) == b""
    await pair.until(lambda: not [thread for thread in threading.enumerate() if thread.name == "everstep-stream"])
