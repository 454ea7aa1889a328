"""Replicas between two nodes: sent, verified, acknowledged, taken up again, dropped and taken back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.peer_messages import BeginShard, CancelShard, EndShard, FetchShard, HolderInventory, ShardRefused, ShardSealed
from everstep.protocol.rank_messages import Vote
from everstep.protocol.slot import SlotState, digest
from tests.integration.worker.replication.pair import GENERATION, HOLDER, LAYOUT, RANK, Pair, content, payload
from worker.errors import PeerLost
from worker.replication import shard_stream, tcp
from worker.replication.shard_stream import ShardRejected, receive_shard
from worker.replication.tcp import TcpSession
from worker.shm.store import SlotStore

pytestmark = pytest.mark.integration
CHUNK = 1000


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_stream, "CHUNK_BYTES", CHUNK)


def begin(step: int, size: int, *, committed: int = -1) -> BeginShard:
    return BeginShard(
        owner_rank=RANK,
        origin_generation=GENERATION,
        step=Step(step),
        payload_bytes=size,
        capacity_bytes=size,
        index_offset=0,
        index_bytes=0,
        layout_hash=LAYOUT,
        committed=Step(committed),
    )


def end_of(step: int, data: bytes) -> EndShard:
    return EndShard(owner_rank=RANK, origin_generation=GENERATION, step=Step(step), digest=digest(data))


async def connected(pair: Pair) -> TcpSession:
    """Open a replica session by hand and take the inventory."""
    session = await pair.dial()
    assert isinstance(await session.receive(), HolderInventory)
    return session


async def send_by_hand(session: TcpSession, step: int, data: bytes, *, until: int | None = None, committed: int = -1) -> None:
    """Send a shard, or only its first chunks."""
    await session.send(begin(step, len(data), committed=committed))
    for start in range(0, len(data) if until is None else until, CHUNK):
        await session.send_chunk(start, memoryview(data)[start : start + CHUNK])
    if until is None:
        await session.send(end_of(step, data))


async def test_steps_are_replicated_verified_and_acknowledged(pair: Pair) -> None:
    pair.send()
    for step in range(1, 6):
        pair.hear(step - 1 or -1, step)
        await pair.capture(step)
        await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert pair.held() == {step: payload(step, pair.payload_bytes) for step in (4, 5)}
    assert pair.receiver.rejected_count == 0
    assert pair.shard.page.agent.vote_step == 5


async def test_the_page_says_nothing_of_a_vote_that_was_not_given(pair: Pair) -> None:
    pair.hear(-1, 1)
    assert (pair.shard.page.agent.proposed, pair.shard.page.agent.vote_step) == (1, -1)
    await pair.capture(1)
    assert pair.shard.page.agent.vote_step == -1
    pair.send()
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert pair.shard.page.agent.vote_step == 1


async def test_a_holder_keeps_c_although_it_has_not_heard_of_it(pair: Pair) -> None:
    pair.send()
    for step in (1, 2, 3):
        pair.hear(step - 1 or -1, step)
        await pair.capture(step)
        await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    pair.hear(2, 4)  # 3 was given up by somebody else: C stays 2
    await pair.capture(4)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert set(pair.held()) == {2, 4}


@pytest.mark.parametrize("sent", range(0, 4001, CHUNK))
async def test_a_stream_that_breaks_at_any_chunk_leaves_nothing(pair: Pair, sent: int) -> None:
    session = await connected(pair)
    await send_by_hand(session, 1, payload(1, 4000), until=sent)
    session.close()
    again = await connected(pair)  # joins the broken session first
    assert pair.held() == {}
    assert SlotState.WRITING not in pair.holder_states()
    await send_by_hand(again, 1, payload(1, 4000))
    assert isinstance(await again.receive(), ShardSealed)
    assert pair.held() == {1: payload(1, 4000)}
    again.close()


async def test_a_stream_that_breaks_within_a_chunk_leaves_nothing(pair: Pair) -> None:
    session = await connected(pair)
    await session.send(begin(1, 4000))
    await session._send_all((tcp.CHUNK_PREFIX.pack(tcp.CHUNK_BIT | CHUNK, 0), payload(1, 300)))
    session.close()
    again = await connected(pair)
    assert pair.held() == {}
    assert SlotState.WRITING not in pair.holder_states()
    again.close()


@pytest.mark.parametrize("byte", [0, 1999, 3999])
async def test_a_flipped_byte_is_refused_and_counted_and_the_line_lives_on(pair: Pair, byte: int) -> None:
    session = await connected(pair)
    data = bytearray(payload(1, 4000))
    await session.send(begin(1, 4000))
    data[byte] ^= 1
    for start in range(0, 4000, CHUNK):
        await session.send_chunk(start, memoryview(data)[start : start + CHUNK])
    await session.send(end_of(1, payload(1, 4000)))
    answer = await session.receive()
    assert isinstance(answer, ShardRefused)
    assert "does not hash" in answer.reason
    assert pair.receiver.rejected_count == 1
    assert pair.held() == {}
    await send_by_hand(session, 1, payload(1, 4000))
    assert isinstance(await session.receive(), ShardSealed)
    session.close()


async def test_a_sender_repeats_what_its_holder_refused(pair: Pair) -> None:
    """The holder has no slot for the moment: an upload has pinned one, the other holds C."""
    pair.send()
    for step in (1, 2):
        pair.hear(step - 1 or -1, step)
        await pair.capture(step)
        await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    slot = pair.holder_store.sealed(RANK, content(1))
    assert slot is not None
    slot.pins += 1
    pair.hear(2, 3)
    await pair.capture(3)
    await pair.until(lambda: pair.receiver.rejected_count > 0)
    assert pair.shard.core.vote is Vote.NONE
    slot.pins -= 1
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert set(pair.held()) == {2, 3}


@pytest.mark.parametrize("broken", ["gap", "overlap", "too long", "empty", "ends early", "another end", "bounds"])
async def test_a_stream_that_contradicts_itself_is_closed_and_counted(pair: Pair, broken: str) -> None:
    session = await connected(pair)
    data = memoryview(payload(1, 4000))
    if broken == "bounds":
        await session.send(BeginShard(**{**_fields(begin(1, 4000)), "capacity_bytes": 3999}))
    else:
        await session.send(begin(1, 4000))
    match broken:
        case "gap":
            await session.send_chunk(CHUNK, data[:CHUNK])
        case "overlap":
            await session.send_chunk(0, data[:CHUNK])
            await session.send_chunk(0, data[:CHUNK])
        case "too long":
            await session.send_chunk(0, memoryview(bytes(4001)))
        case "empty":
            await session.send_chunk(0, data[:0])
        case "ends early":
            await session.send_chunk(0, data[:CHUNK])
            await session.send(end_of(1, bytes(data)))
        case "another end":
            await session.send_chunk(0, data)
            await session.send(end_of(2, bytes(data)))
    with pytest.raises(PeerLost):
        await session.receive()
    again = await connected(pair)
    assert pair.listener.refused_count == 1
    assert pair.held() == {}
    assert SlotState.WRITING not in pair.holder_states()
    again.close()
    session.close()


def _fields(message: BeginShard) -> dict[str, object]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


async def test_a_cancelled_shard_is_nothing_and_the_next_one_comes_through(pair: Pair) -> None:
    session = await connected(pair)
    await send_by_hand(session, 1, payload(1, 4000), until=2000)
    await session.send(CancelShard(owner_rank=RANK, step=Step(1)))
    assert isinstance(await session.receive(), ShardRefused)
    await session.send(CancelShard(owner_rank=RANK, step=Step(1)))  # late: the shard is over
    await send_by_hand(session, 2, payload(2, 4000))
    sealed = await session.receive()
    assert isinstance(sealed, ShardSealed)
    assert (sealed.step, pair.held()) == (2, {2: payload(2, 4000)})
    session.close()


async def test_a_slot_granted_anew_while_it_is_being_sent(make: Callable[..., Pair]) -> None:
    """The stream of 1 stands in mid-chunk behind a full socket when the slot is granted for 2: 1 is nowhere sealed, 2 is."""
    pair = make(payload_bytes=8 << 20, memory_bytes=1 << 26, holder_memory_bytes=1 << 26)
    pair.listen()
    gate, begun = asyncio.Event(), asyncio.Event()
    receive = pair.receiver.replica

    async def slow(session: TcpSession) -> None:
        if not gate.is_set():
            await session.send(HolderInventory(owner_rank=RANK, sealed=()))
            assert isinstance(await session.receive(), BeginShard)
            begun.set()
            await gate.wait()
            session.close()
            return
        await receive(session)

    pair.receiver.replica = slow  # type: ignore[method-assign]
    pair.send()
    pair.hear(-1, 1)
    await pair.capture(1)
    await begun.wait()
    pair.hear(-1, 2)
    slot = pair.owner_store.sealed(RANK, content(1))
    assert slot is not None
    slot.pins = 0
    other = await pair.owner_store.grant(RANK, content(2), keep=set(), capacity_bytes=8 << 20, layout_hash=LAYOUT, slot_count=1)
    assert other is not None
    assert pair.owner_store.shards[RANK][other] is slot
    assert all(reader.done() for reader in slot.readers)
    pair.shard.apply(pair.shard.core.forget(Step(1)))
    gate.set()
    await pair.capture(2)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert set(pair.held()) == {2}


async def test_one_session_per_owner_the_earlier_is_joined_before_the_next_begins(pair: Pair) -> None:
    first = await connected(pair)
    await send_by_hand(first, 1, payload(1, 4000), until=2000)
    second = await connected(pair)
    assert SlotState.WRITING not in pair.holder_states()
    with pytest.raises(PeerLost):
        await first.receive()
    await send_by_hand(second, 1, payload(1, 4000))
    assert isinstance(await second.receive(), ShardSealed)
    first.close()
    second.close()


async def test_a_broken_line_is_dialled_again_and_sending_goes_on_where_it_stood(pair: Pair) -> None:
    sessions: list[TcpSession] = []

    async def dial() -> TcpSession:
        sessions.append(await pair.dial())
        return sessions[-1]

    pair.send(dial=dial)
    pair.hear(-1, 1)
    await pair.capture(1)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    sessions[0]._line.shutdown(socket.SHUT_RDWR)
    pair.hear(1, 2)
    await pair.capture(2)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert len(sessions) == 2
    assert set(pair.held()) == {1, 2}


async def test_a_holder_that_lost_a_slot_says_so_and_gets_it_again(pair: Pair) -> None:
    sessions: list[TcpSession] = []

    async def dial() -> TcpSession:
        sessions.append(await pair.dial())
        return sessions[-1]

    pair.send(dial=dial)
    pair.hear(-1, 1)
    await pair.capture(1)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    pair.hear(1, 2)
    lost = pair.holder_store.sealed(RANK, content(1))
    assert lost is not None
    lost.file.empty()
    sessions[0]._line.shutdown(socket.SHUT_RDWR)
    await pair.until(lambda: pair.shard.core.view == frozenset())  # revoked, loudly
    await pair.until(lambda: pair.shard.core.view == {HOLDER})
    assert set(pair.held()) == {1}


async def test_a_replica_with_another_digest_does_not_count(pair: Pair) -> None:
    """The holder has a step 1 of this generation with other bytes: it is not the owner's step 1."""
    session = await connected(pair)
    await send_by_hand(session, 1, payload(7, pair.payload_bytes))
    assert isinstance(await session.receive(), ShardSealed)
    session.close()
    pair.hear(-1, 1)
    await pair.capture(1)
    pair.send()
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert digest(payload(1, pair.payload_bytes)) in {record.digest for record in pair.holder_store.inventory()}


async def test_a_peer_that_stops_reading_is_dropped_and_c_advances_without_it(make: Callable[..., Pair]) -> None:
    pair = make(payload_bytes=8 << 20, memory_bytes=1 << 26)
    deaf = asyncio.Event()

    async def never_reads(session: TcpSession) -> None:
        await session.send(HolderInventory(owner_rank=RANK, sealed=()))
        await deaf.wait()

    pair.listen()
    pair.receiver.replica = never_reads  # type: ignore[method-assign]
    pair.send(deadline_seconds=0.2)
    pair.hear(-1, 1)
    await pair.capture(1)
    assert pair.shard.core.vote is Vote.NONE
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert pair.shard.core.view == frozenset()
    assert pair.shard.round().out_of_view == (HOLDER,)
    for step in range(2, 12):
        pair.hear(step - 1, step)
        await pair.capture(step)
        assert pair.shard.core.vote is Vote.ACKED
    deaf.set()


async def test_a_holder_that_nobody_reaches_is_dropped_and_returns_by_receiving_c(pair: Pair) -> None:
    is_there = asyncio.Event()

    async def dial() -> TcpSession:
        if not is_there.is_set():
            raise PeerLost("nobody answers")
        return await pair.dial()

    pair.send(deadline_seconds=0.2, dial=dial)
    pair.hear(-1, 1)
    await pair.capture(1)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    pair.hear(1, 2)
    is_there.set()
    await pair.until(lambda: pair.shard.core.view == {HOLDER})
    assert set(pair.held()) == {1}
    await pair.capture(2)
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert set(pair.held()) == {1, 2}


async def test_a_holder_that_is_out_of_view_and_keeps_up_returns_with_the_next_commit(pair: Pair) -> None:
    """It acknowledges every step just after its owner has voted; it has every C, and must not stay out for ever."""
    pair.send()
    pair.shard.apply(pair.shard.core.drop(HOLDER))
    pair.hear(-1, 1)
    await pair.capture(1)
    assert pair.shard.core.vote is Vote.ACKED
    await pair.until(lambda: (HOLDER, 1) in pair.shard.core.held)
    assert pair.shard.core.view == frozenset()
    pair.hear(1, 2)
    assert pair.shard.core.view == {HOLDER}


async def test_a_holder_without_memory_refuses_with_the_figures_and_keeps_what_it_has(make: Callable[..., Pair]) -> None:
    pair = make(holder_memory_bytes=5000)
    pair.listen()
    session = await connected(pair)
    await send_by_hand(session, 1, payload(1, 4000))
    assert isinstance(await session.receive(), ShardSealed)
    await send_by_hand(session, 2, payload(2, 4000), committed=1)
    refused = await session.receive()
    assert isinstance(refused, ShardRefused)
    assert "8,000 bytes" in refused.reason
    assert "5,000 bytes" in refused.reason
    assert set(pair.held()) == {1}
    session.close()


async def test_what_is_fetched_is_what_was_asked_for(pair: Pair, tmpfs: object) -> None:
    session = await connected(pair)
    await send_by_hand(session, 1, payload(1, 4000))
    await session.receive()
    session.close()
    fetching = await pair.dial(kind="fetch", rank=Rank(-1))
    wanted = FetchShard(owner_rank=RANK, origin_generation=GENERATION, step=Step(1), digest=digest(payload(1, 4000)))
    await fetching.send(wanted)
    announced = await fetching.receive()
    assert isinstance(announced, BeginShard)
    got = await receive_shard(fetching, announced, pair.owner_store, keep=set(), slot_count=2, expected=wanted.digest)
    assert got == wanted.digest
    slot = pair.owner_store.sealed(RANK, content(1))
    assert slot is not None
    with slot.file.payload() as view:
        assert bytes(view) == payload(1, 4000)
    assert all(not each.pins for each in pair.holder_store.shards[RANK])
    fetching.close()


@pytest.mark.parametrize(
    "wrong",
    [{"digest": b"x" * 16}, {"step": Step(2)}, {"origin_generation": Generation(2)}, {"owner_rank": Rank(1)}],
    ids=lambda wrong: next(iter(wrong)),
)
async def test_what_is_not_there_exactly_is_not_to_be_fetched(pair: Pair, wrong: dict[str, object]) -> None:
    session = await connected(pair)
    await send_by_hand(session, 1, payload(1, 4000))
    await session.receive()
    session.close()
    fetching = await pair.dial(kind="fetch", rank=Rank(-1))
    asked = {"owner_rank": RANK, "origin_generation": GENERATION, "step": Step(1), "digest": digest(payload(1, 4000)), **wrong}
    await fetching.send(FetchShard(**asked))  # type: ignore[arg-type]
    assert isinstance(await fetching.receive(), ShardRefused)
    fetching.close()


async def test_a_fetched_shard_that_has_rotted_in_its_holders_memory_is_not_sealed(pair: Pair) -> None:
    session = await connected(pair)
    await send_by_hand(session, 1, payload(1, 4000))
    await session.receive()
    session.close()
    held = pair.holder_store.sealed(RANK, content(1))
    assert held is not None
    with held.file.payload(2000, 2001) as view:
        view[0] ^= 1
    fetching = await pair.dial(kind="fetch", rank=Rank(-1))
    wanted = digest(payload(1, 4000))
    await fetching.send(FetchShard(owner_rank=RANK, origin_generation=GENERATION, step=Step(1), digest=wanted))
    announced = await fetching.receive()
    assert isinstance(announced, BeginShard)
    with pytest.raises(ShardRejected, match="does not hash"):
        await receive_shard(fetching, announced, pair.owner_store, keep=set(), slot_count=2, expected=wanted)
    assert pair.owner_store.inventory() == ()
    fetching.close()


async def test_a_restarted_holder_is_not_stuck_with_a_half_received_shard(pair: Pair) -> None:
    """One slot holds C, the other was being received into when the agent died: nobody writes there any more."""
    session = await connected(pair)
    await send_by_hand(session, 1, payload(1, 4000))
    await session.receive()
    index = await pair.holder_store.grant(RANK, content(2), keep={content(1)}, capacity_bytes=4000, layout_hash=LAYOUT, slot_count=2)
    assert index is not None
    session.close()
    root = pair.holder_store.root
    pair.holder_store.close()
    again = SlotStore(root, memory_bytes=1 << 20)
    assert pair.owner_store.run is not None
    again.open_run(pair.owner_store.job, pair.owner_store.run)
    again.settle_copiers(RANK)  # as `Member.adopt` does for shards whose ranks live elsewhere
    assert await again.grant(RANK, content(2), keep={content(1)}, capacity_bytes=4000, layout_hash=LAYOUT, slot_count=2) is not None
    again.close()


async def test_an_ended_generation_leaves_no_stream_open(pair: Pair) -> None:
    session = await connected(pair)
    await send_by_hand(session, 1, payload(1, 4000), until=2000)
    await pair.listener.revoke()
    assert SlotState.WRITING not in pair.holder_states()
    with pytest.raises(PeerLost):
        await session.receive()
    session.close()
