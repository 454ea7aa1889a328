"""Owners send shards that their ranks are still capturing.

A transfer arrives in ranges. It may break, be abandoned, or resume.
"""

from __future__ import annotations

import asyncio
import socket

import pytest

from everstep.protocol.ids import Step
from everstep.protocol.peer_messages import (
    CHUNK_HEADER,
    BeginShard,
    CancelShard,
    HolderInventory,
    ShardDigests,
    ShardRefused,
    ShardSealed,
    ShardWanted,
)
from everstep.protocol.rank_messages import Vote
from everstep.protocol.slot import SlotState, payload_digest
from tests.integration.worker.replication.pair import HOLDER, LAYOUT, RANK, Pair, content, payload
from tests.integration.worker.replication.test_replicas import CHUNK, Recorded, by_hand, landed
from tests.small_chunks import use_small_chunks
from worker.errors import PeerLost
from worker.replication.tcp import TcpSession

pytestmark = pytest.mark.integration
DATA = payload(1, 4500)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_chunks(monkeypatch, CHUNK)


def arrived(pair: Pair, step: int) -> int:
    """Return how many chunks of an unsealed step the holder has verified."""
    for owner in pair.receiver.open_sessions:
        incoming = owner.receiver.current if owner.receiver is not None else None
        if incoming is not None:
            return incoming.landed_count
    found = [slot for slot in pair.holder_store.shards.get(RANK, []) if slot.is_written_with(content(step))]
    return len(found[0].arrived) if found else 0


class TestTheOwner:
    """A real sender, and a capture whose progress the test controls."""

    async def test_what_is_captured_is_with_the_holder_before_it_is_sealed(self, pair: Pair) -> None:
        pair.send()
        pair.apply_announcement(-1, 1)
        capture = await pair.begin_capture(1)
        for end in (1000, 4200, 9000):
            capture.go_on(end)
            await pair.until(lambda: arrived(pair, 1) == end // CHUNK)  # noqa: B023 — asked at once
            assert pair.held() == {}
            assert pair.shard.core.vote is Vote.NONE
        capture.write(pair.payload_bytes)
        await capture.seal()
        await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
        assert pair.held() == {1: payload(1, pair.payload_bytes)}

    async def test_every_step_goes_that_way_and_c_is_kept(self, pair: Pair) -> None:
        pair.send()
        for step in range(1, 7):
            pair.apply_announcement(step - 1 or -1, step)
            capture = await pair.begin_capture(step)
            capture.go_on(4000)
            await pair.until(lambda: arrived(pair, step) == 4)  # noqa: B023 — asked at once
            assert set(pair.held()) == ({step - 1} if step > 1 else set())
            capture.write(pair.payload_bytes)
            await capture.seal()
            await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
        assert pair.held() == {step: payload(step, pair.payload_bytes) for step in (5, 6)}

    async def test_a_holder_without_c_gets_that_first(self, pair: Pair) -> None:
        pair.apply_announcement(-1, 1)
        await pair.capture(1)
        pair.shard.drop(HOLDER)
        pair.apply_announcement(1, 2)
        capture = await pair.begin_capture(2)
        capture.go_on(3000)
        pair.send()
        await pair.until(lambda: arrived(pair, 2) == 3)
        assert set(pair.held()) == {1}
        capture.give_up()

    @pytest.mark.parametrize("is_next", [True, False], ids=["the next comes through", "the same comes through"])
    async def test_a_capture_that_is_given_up_in_mid_stream_is_no_snapshot(self, pair: Pair, is_next: bool) -> None:
        pair.send()
        pair.apply_announcement(-1, 1)
        capture = await pair.begin_capture(1)
        # Wait until the whole payload is sent. The audit detects the changed tensor only afterwards.
        capture.go_on(pair.payload_bytes)
        await pair.until(lambda: arrived(pair, 1) == 10)
        capture.give_up()
        assert await capture.sealing is None
        assert pair.shard.core.vote is Vote.ABANDON
        # the coordinator proposes the next step, or, in the final round, the same step again
        step = 2 if is_next else 1
        pair.apply_announcement(-1, -1)
        pair.apply_announcement(-1, step)
        await pair.capture(step)
        await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
        assert pair.held() == {step: payload(step, pair.payload_bytes)}

    async def test_what_was_given_up_and_captured_otherwise_is_what_is_sealed(self, pair: Pair) -> None:
        """A capture is abandoned after the holder has received a chunk of it. The same step is captured again with
        other bytes.

        The holder seals the bytes of the second capture.
        """
        pair.send()
        pair.apply_announcement(-1, 1)
        capture = await pair.begin_capture(1)
        capture.go_on(6000)
        await pair.until(lambda: arrived(pair, 1) == 6)
        capture.give_up()
        pair.apply_announcement(-1, -1)
        pair.apply_announcement(-1, 1)
        other = bytes(2500) + payload(1, pair.payload_bytes)[2500:]
        again = await pair.begin_capture(1)
        again.write(pair.payload_bytes, other)
        await again.seal()
        await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
        assert pair.held() == {1: other}

    async def test_a_slot_granted_anew_in_mid_stream(self, pair: Pair) -> None:
        pair.send()
        pair.apply_announcement(-1, 1)
        capture = await pair.begin_capture(1)
        capture.go_on(4000)
        await pair.until(lambda: arrived(pair, 1) == 4)
        pair.apply_announcement(-1, 2)
        again = await pair.owner_store.grant(
            RANK, content(2), keep=set(), capacity_bytes=pair.payload_bytes, layout_hash=LAYOUT, slot_count=1
        )
        assert again is not None
        assert pair.owner_store.shards[RANK][again] is capture.slot
        assert all(reader.done() for reader in capture.slot.readers)
        assert await capture.sealing is None
        await pair.capture(2)
        await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
        assert pair.held() == {2: payload(2, pair.payload_bytes)}

    async def test_a_capture_whose_end_never_comes_holds_up_no_other_step(self, pair: Pair) -> None:
        """The rank's last message about a capture is lost with its connection. The sender continues with the next
        proposed step.
        """
        pair.send()
        pair.apply_announcement(-1, 1)
        capture = await pair.begin_capture(1)
        capture.go_on(4000)
        await pair.until(lambda: arrived(pair, 1) == 4)
        pair.apply_announcement(-1, 2)
        await pair.capture(2)
        await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
        assert pair.held() == {2: payload(2, pair.payload_bytes)}
        capture.give_up()

    async def test_a_step_that_is_dropped_and_proposed_again_in_mid_capture_is_not_sent_twice(self, pair: Pair) -> None:
        sender = pair.send()
        pair.apply_announcement(-1, 1)
        capture = await pair.begin_capture(1)
        capture.go_on(5000)
        await pair.until(lambda: arrived(pair, 1) == 5)
        pair.apply_announcement(-1, -1)
        await pair.until(lambda: sender.queue is None)
        await pair.until(
            lambda: all(
                owner.receiver is not None and owner.receiver.current is None for owner in pair.receiver.open_sessions
            )
        )
        pair.apply_announcement(-1, 1)
        capture.go_on(6000)
        await pair.until(lambda: arrived(pair, 1) == 1)
        queue = sender.queue
        assert queue is not None
        capture.write(pair.payload_bytes)
        await capture.seal()
        await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
        assert queue.taken_bytes == 5000
        assert pair.held() == {1: payload(1, pair.payload_bytes)}

    @pytest.mark.parametrize("what", ["sessions", "lines"])
    async def test_a_line_that_breaks_in_mid_capture_is_taken_up_where_it_stood(self, pair: Pair, what: str) -> None:
        dialler = Recorded(pair)
        sender = pair.send(dialler=dialler)
        pair.apply_announcement(-1, 1)
        capture = await pair.begin_capture(1)
        capture.go_on(5000)
        await pair.until(lambda: arrived(pair, 1) == 5)
        (dialler.sessions[0].line if what == "sessions" else dialler.lines[0]).shutdown(socket.SHUT_RDWR)
        capture.go_on(7000)
        await pair.until(lambda: len(dialler.lines) == 2)
        capture.write(pair.payload_bytes)
        await capture.seal()
        queues = []
        while pair.shard.core.vote is not Vote.ACKED:
            queues.append(sender.queue)
            await pair.shard.changed.wait(pair.shard.changed.version, 0.01)
        # The owner does not send the first five chunks again, because the holder has them.
        assert max(queue.taken_bytes for queue in queues if queue is not None) <= 5000
        assert pair.held() == {1: payload(1, pair.payload_bytes)}

    async def test_a_holder_is_not_silent_while_the_capture_stands_still(self, pair: Pair) -> None:
        pair.send(deadline_seconds=0.5)
        pair.apply_announcement(-1, 1)
        capture = await pair.begin_capture(1)
        capture.go_on(2000)
        await pair.until(lambda: arrived(pair, 1) == 2)
        for _ in range(4):
            # these four waits take longer in total than the holder's deadline
            await pair.shard.changed.wait(pair.shard.changed.version, 0.5)
        assert pair.shard.core.view == {HOLDER}
        assert pair.shard.slow_holders == {}
        capture.write(pair.payload_bytes)
        await capture.seal()
        await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
        assert pair.shard.core.view == {HOLDER}

    async def test_a_sender_that_ends_in_mid_capture_leaves_a_part_that_is_no_snapshot(self, pair: Pair) -> None:
        """The sender ends during a capture, because the owner's node is lost or its ranks have ended.

        The holder's partial slot does not count as a copy of the step.
        """
        pair.send()
        pair.apply_announcement(-1, 1)
        capture = await pair.begin_capture(1)
        capture.go_on(4000)
        await pair.until(lambda: arrived(pair, 1) == 4)
        await pair.stop_sending()
        await pair.listener.revoke()
        assert pair.held() == {}
        assert pair.holder_states() == [SlotState.WRITING]
        capture.give_up()
        assert await capture.sealing is None
        assert pair.owner_store.inventory() == ()


class TestTheHolder:
    """A real holder against an owner whose messages the test writes."""

    async def test_it_asks_range_by_range_and_seals_only_at_the_end(self, pair: Pair) -> None:
        async with by_hand(pair) as hand:
            await hand.open(1, DATA)
            for first, count in ((0, 1), (1, 3), (4, 1)):
                await hand.name(DATA, first, count)
                wanted = await hand.wanted()
                assert wanted == list(range(first, first + count))
                hand.chunks(DATA, wanted)
            await landed(pair, 5)
            assert pair.held() == {}
            await hand.finish(DATA)
            assert isinstance(await hand.session.receive(), ShardSealed)
        assert pair.held() == {1: DATA}

    async def test_a_line_that_breaks_between_and_within_ranges(self, pair: Pair) -> None:
        async with by_hand(pair) as first:
            await first.open(1, DATA)
            await first.name(DATA, 0, 2)
            first.chunks(DATA, await first.wanted())
            await first.name(DATA, 2, 2)
            assert await first.wanted() == [2, 3]
            first.chunks(DATA, [3])
            await landed(pair, 3)
        async with by_hand(pair) as again:
            await again.open(1, DATA)
            await again.name(DATA, 0, 1)
            assert await again.wanted() == []
        # The holder still has the chunks of the first session, although the second session has not announced them.
        async with by_hand(pair) as third:
            await third.begin(1, DATA)
            assert await third.wanted() == [2, 4]
            third.chunks(DATA, [2, 4])
            assert isinstance(await third.session.receive(), ShardSealed)
        assert pair.held() == {1: DATA}

    async def test_a_chunk_that_was_half_overwritten_by_another_version_of_the_step_has_not_come(
        self, pair: Pair
    ) -> None:
        other = payload(9, 4500)
        async with by_hand(pair) as first:
            await first.begin(1, DATA)
            await first.wanted()
            first.chunks(DATA, [0, 1])
            await landed(pair, 2)
        async with by_hand(pair) as second:  # the second session sends a new capture with other bytes
            await second.begin(1, other)
            await second.wanted()
            second.line.sendall(CHUNK_HEADER.pack(1, 1, CHUNK) + other[:500])
            incoming = [owner.receiver.current for owner in pair.receiver.open_sessions if owner.receiver is not None]
            await pair.until(lambda: any(each is not None and 1 in each._claimed for each in incoming))
        async with by_hand(pair) as third:
            await third.begin(1, DATA)
            wanted = await third.wanted()
            assert 1 in wanted
            third.chunks(DATA, wanted)
            assert isinstance(await third.session.receive(), ShardSealed)
        assert pair.held() == {1: DATA}

    async def test_what_did_not_change_is_found_range_by_range(self, pair: Pair) -> None:
        async with by_hand(pair) as hand:
            assert isinstance(await hand.whole(1, DATA), ShardSealed)
            other = DATA[:1000] + bytes(1000) + DATA[2000:]
            await hand.open(2, other, committed=1)
            for first, wanted in enumerate(([], [1], [], [], [])):
                await hand.name(other, first, 1)
                assert await hand.wanted() == wanted
                hand.chunks(other, wanted)
            await hand.finish(other)
            assert isinstance(await hand.session.receive(), ShardSealed)
        assert pair.held() == {1: DATA, 2: other}

    async def test_a_chunk_of_an_early_range_that_comes_damaged_is_wanted_again_at_the_end(self, pair: Pair) -> None:
        async with by_hand(pair) as hand:
            await hand.open(1, DATA)
            await hand.name(DATA, 0, 2)
            hand.chunks(bytes(2000), await hand.wanted())
            await hand.name(DATA, 2, 3)
            hand.chunks(DATA, await hand.wanted())
            await hand.finish(DATA)
            assert await hand.wanted() == [0, 1]
            hand.chunks(DATA, [0, 1])
            assert isinstance(await hand.session.receive(), ShardSealed)
        assert pair.held() == {1: DATA}

    async def test_a_chunk_that_was_not_named_yet_is_not_taken(self, pair: Pair) -> None:
        async with by_hand(pair) as hand:
            await hand.open(1, DATA)
            await hand.name(DATA, 0, 1)
            await hand.wanted()
            hand.chunks(DATA, [3, 0])
            await landed(pair, 1)
            await hand.name(DATA, 1, 4)
            assert await hand.wanted() == [1, 2, 3, 4]

    @pytest.mark.parametrize(
        "other",
        [
            {"first": 0},
            {"first": 3},
            {"first": -1},
            {"chunk_digests": b""},
            {"chunk_digests": bytes(15)},
            {"chunk_digests": bytes(16 * 5)},
        ],
        ids=["named twice", "a gap", "before the first", "none", "a part of one", "more than there are"],
    )
    async def test_ranges_that_contradict_each_other_end_the_session_and_what_came_is_kept(
        self, pair: Pair, other: dict[str, object]
    ) -> None:
        async with by_hand(pair) as hand:
            await hand.open(1, DATA)
            await hand.name(DATA, 0, 2)
            hand.chunks(DATA, await hand.wanted())
            await landed(pair, 2)
            await hand.name(DATA, **{"first": 2, "count": 1, **other})  # type: ignore[arg-type]
            await hand.closed()
        await pair.until(lambda: pair.listener.refused_count == 1)
        async with by_hand(pair) as again:
            await again.begin(1, DATA)
            assert await again.wanted() == [2, 3, 4]

    @pytest.mark.parametrize("named", [0, 4, 5])
    async def test_an_end_that_contradicts_the_ranges_seals_nothing(self, pair: Pair, named: int) -> None:
        """The owner reports the end of a shard too early, or with a digest that does not match the chunks.

        The holder closes the session and seals nothing.
        """
        async with by_hand(pair) as hand:
            await hand.open(1, DATA)
            if named:
                await hand.name(DATA, 0, named)
                hand.chunks(DATA, await hand.wanted())
                await landed(pair, named)
            await hand.finish(DATA if named < 5 else bytes(4500))
            await hand.closed()
        await pair.until(lambda: pair.listener.refused_count == 1)
        assert pair.held() == {}

    @pytest.mark.parametrize("is_named", [True, False])
    async def test_digests_that_never_come_hold_up_nothing_else(self, pair: Pair, is_named: bool) -> None:
        async with by_hand(pair) as hand:
            await hand.open(1, DATA)
            if is_named:
                await hand.name(DATA, 0, 2)
                hand.chunks(DATA, await hand.wanted())
            # the owner sends another step before the first is complete
            assert isinstance(await hand.whole(2, payload(2, 4500)), ShardSealed)
            # digests of the first step arrive after the holder has sealed the next step
            await hand.name(DATA, 2, 1, transfer=1)
        assert pair.held() == {2: payload(2, 4500)}

    async def test_word_of_a_shard_that_was_not_begun_ends_the_session(self, pair: Pair) -> None:
        async with by_hand(pair) as hand:
            await hand.name(DATA, 0, 1, transfer=3)
            await hand.closed()
        await pair.until(lambda: pair.listener.refused_count == 1)

    async def test_a_shard_that_is_refused_early_is_refused_once_and_the_rest_of_it_is_passed_over(
        self, pair: Pair
    ) -> None:
        pair.holder_store.memory_bytes = 0
        async with by_hand(pair) as hand:
            await hand.open(1, DATA)
            assert isinstance(await hand.session.receive(), ShardRefused)
            await hand.name(DATA, 0, 5)
            await hand.finish(DATA)
            pair.holder_store.memory_bytes = 1 << 20
            assert isinstance(await hand.whole(2, payload(2, 4500)), ShardSealed)
        assert pair.receiver.rejected_count == 1

    async def test_a_cancelled_part_is_no_snapshot_and_its_slot_is_the_next_ones(self, pair: Pair) -> None:
        async with by_hand(pair) as hand:
            assert isinstance(await hand.whole(1, DATA), ShardSealed)
            await hand.open(2, payload(2, 4500), committed=1)
            await hand.name(payload(2, 4500), 0, 3)
            hand.chunks(payload(2, 4500), await hand.wanted())
            await landed(pair, 3)
            await hand.session.send(CancelShard(transfer=hand.transfer))
            assert isinstance(await hand.whole(3, payload(3, 4500), committed=1), ShardSealed)
        assert pair.held() == {1: DATA, 3: payload(3, 4500)}
        assert [record.digest for record in pair.holder_store.inventory()] == [
            payload_digest(DATA),
            payload_digest(payload(3, 4500)),
        ]


async def test_an_answer_for_what_was_not_named_ends_the_session(pair: Pair) -> None:
    """The holder requests all chunks of a shard, although the owner has announced only some.

    The owner ends the session.
    """
    asked = asyncio.Event()
    serve = pair.receiver.replica

    async def greedy(session: TcpSession) -> None:
        if asked.is_set():
            await serve(session)
            return
        await session.send(HolderInventory(owner_rank=RANK, sealed=()))
        assert isinstance(await session.receive(), BeginShard)
        named = await session.receive()
        assert isinstance(named, ShardDigests)
        await session.send(ShardWanted(transfer=named.transfer, chunks=((0, 10),)))
        with pytest.raises(PeerLost):
            await session.receive()
        asked.set()

    pair.receiver.replica = greedy  # type: ignore[method-assign]
    pair.send()
    pair.apply_announcement(-1, 1)
    capture = await pair.begin_capture(1)
    capture.go_on(2000)
    await asked.wait()
    await pair.until(lambda: arrived(pair, 1) == 2)
    capture.write(pair.payload_bytes)
    await capture.seal()
    await pair.until(lambda: pair.shard.core.vote is Vote.ACKED)
    assert pair.shard.core.sealed == {Step(1)}
