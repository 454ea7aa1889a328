"""The sender decides whether a holder's link is slow.

Other transfers of the node on the same link do not make the link look slow.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast
from unittest.mock import create_autospec

import pytest

from everstep.protocol.ids import NodeId
from tests.unit.worker.replication.wire import Wire
from worker.core.slow_link import ROOM_RATIO
from worker.replication.sender import FLOW_BYTES_PER_SECOND, LOOKS_PER_DEADLINE, SUSPECT_RATIO, ReplicaSender
from worker.replication.streams import Streams
from worker.shards.owned_shard import OwnedShard

DEADLINE_SECONDS = 5.0


def sender(wire: Wire, shard: Any = None) -> ReplicaSender:
    """Return a sender without a holder and without data to send."""
    nothing = cast(Any, None)
    return ReplicaSender(shard, NodeId("i-b"), nothing, nothing, wire.pacer, holder_deadline_seconds=DEADLINE_SECONDS)


@pytest.mark.parametrize("count", [1, 8, 32])
@pytest.mark.parametrize(("part_of_a_flow", "is_slow"), [(1.6, False), (0.2, False), (0.05, True)])
def test_senders_that_share_a_link_are_slow_when_the_link_is(count: int, part_of_a_flow: float, is_slow: bool) -> None:
    wire = Wire(part_of_a_flow * FLOW_BYTES_PER_SECOND)
    queues = [wire.queue() for _ in range(count)]
    for queue in queues:
        queue.add([(0, 2)])
    wire.wait(2 * DEADLINE_SECONDS)
    for queue in queues:
        queue.taken(int(2 * DEADLINE_SECONDS * wire.bytes_per_second / count))
        queue.finish()
    assert [sender(wire).is_slow(queue) for queue in queues] == [is_slow] * count


def test_one_slow_way_is_told_from_the_seven_beside_it() -> None:
    wire = Wire(8 * FLOW_BYTES_PER_SECOND)
    quick, slow = [wire.queue() for _ in range(7)], wire.queue()
    for queue in (*quick, slow):
        queue.add([(0, 2)])
    wire.wait(1.0)
    for queue in quick:
        queue.taken(int(FLOW_BYTES_PER_SECOND / 2))
        queue.finish()
        queue.taken(int(FLOW_BYTES_PER_SECOND / 2))
        queue.finish()
    wire.wait(DEADLINE_SECONDS)
    slow.taken(int(0.01 * FLOW_BYTES_PER_SECOND * DEADLINE_SECONDS))
    slow.finish()
    assert [sender(wire).is_slow(queue) for queue in (*quick, slow)] == [False] * 7 + [True]


def test_an_agent_that_stood_still_calls_no_link_slow_for_it() -> None:
    """An agent is stopped for 30 s during a transfer. It does not report its holder's link as slow afterwards."""
    wire = Wire(FLOW_BYTES_PER_SECOND)
    queue = wire.queue()
    queue.add([(0, 2)])
    wire.wait(0.2)
    queue.taken(int(0.2 * wire.bytes_per_second))
    wire.stand_still(30.0)
    queue.taken(1)
    judge = sender(wire)
    judge.check_link(queue)
    assert not judge.is_slow(queue)
    assert judge.link.limit is None
    wire.wait(2 * DEADLINE_SECONDS)
    assert judge.is_slow(queue), "nothing has left it since"


async def test_a_watch_that_a_bug_ends_ends_its_sender_which_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a bug ends the task that watches for a silent holder, the sender ends with the same error.

    Its caller then starts it again. Without the task, the sender would never drop a silent holder.
    """

    class Unanswered:
        async def session(self) -> None:
            await asyncio.Future()

    async def watch(_sender: ReplicaSender) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(ReplicaSender, "_watch", watch)
    broken = sender(Wire(FLOW_BYTES_PER_SECOND))
    broken.dialler = cast(Any, Unanswered())
    with pytest.raises(LookupError):
        await broken.run()


def test_a_short_wait_says_nothing() -> None:
    wire = Wire(1.0)
    queue = wire.queue()
    queue.add([(0, 1)])
    wire.wait(DEADLINE_SECONDS)
    assert not sender(wire).is_slow(queue)


@pytest.mark.parametrize(("part_of_a_flow", "is_limited"), [(0.2, False), (0.05, True)])
async def test_a_link_that_seems_slow_is_treated_as_one_before_it_is_called_so(
    part_of_a_flow: float, is_limited: bool
) -> None:
    wire = Wire(part_of_a_flow * FLOW_BYTES_PER_SECOND)
    queue, suspicious = wire.queue(), sender(wire)
    queue.add([(0, 2)])
    for _ in range(3):
        seconds = SUSPECT_RATIO * DEADLINE_SECONDS / 2
        wire.wait(1.01 * seconds)
        assert suspicious.link.limit is None, "a moment says nothing"
        queue.taken(int(seconds * wire.bytes_per_second))
        queue.finish()
        queue.add([(2, 1)])
        suspicious.check_link(queue)  # this sender has no shard, so it would raise an error if it reported the link
        if suspicious.link.carries:
            break
    assert (suspicious.link.limit is not None) is is_limited


@pytest.mark.parametrize("count", [1, 12])
async def test_a_link_that_many_share_is_suspected_and_called_slow_no_later_and_with_its_rate(count: int) -> None:
    """Each sender on a slow link first suspects the link, and then reports it as slow with the rate of the whole link.

    Several senders do so as early as a single one, because each counts the time in which any of them used the link.
    """
    wire = Wire(0.05 * FLOW_BYTES_PER_SECOND)
    shards = [create_autospec(OwnedShard) for _ in range(count)]
    senders = [sender(wire, shard) for shard in shards]
    queues = [wire.queue() for _ in range(count)]
    for queue in queues:
        queue.add([(0, 2)])
    for look in range(1, 2 * LOOKS_PER_DEADLINE + 1):
        wire.wait(DEADLINE_SECONDS / LOOKS_PER_DEADLINE)
        for each, queue in zip(senders, queues, strict=True):
            queue.taken(int(DEADLINE_SECONDS / LOOKS_PER_DEADLINE * wire.bytes_per_second / count))
            each.check_link(queue)
        assert look < 0.4 * LOOKS_PER_DEADLINE or all(each.link.carries for each in senders)
        if look <= LOOKS_PER_DEADLINE:
            assert not any(shard.record_slow_link.called for shard in shards)
    told = [call.args[1] for shard in shards for call in shard.record_slow_link.call_args_list]
    assert all(shard.record_slow_link.called for shard in shards)
    assert {words.split(";")[0] for words in told} == {f"its link carries {wire.bytes_per_second / 1e6:.3g} MB/s"}


async def test_no_link_is_called_slow_before_its_rate_is_known() -> None:
    """A sender reports no link as slow before it has measured the link's rate.

    In the test, the first check is late, so that the sender has no rate yet. It reports the link at the second check.
    """
    wire, shard = Wire(0.05 * FLOW_BYTES_PER_SECOND), create_autospec(OwnedShard)
    queue, late = wire.queue(), sender(wire, shard)
    queue.add([(0, 2)])
    for is_called in (False, True):
        wire.wait(2 * DEADLINE_SECONDS)
        queue.taken(int(2 * DEADLINE_SECONDS * wire.bytes_per_second))
        late.check_link(queue)
        assert shard.record_slow_link.called is is_called


@pytest.mark.parametrize("count", [1, 2, 8])
async def test_all_that_share_a_slow_link_leave_training_a_half_of_it_together(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All senders on a slow link together use half of it. Their limits add up to half of the link's rate."""
    limits: dict[int, float] = {}
    monkeypatch.setattr(Streams, "limit", lambda streams, rate: limits.update({id(streams): rate or 0.0}))
    wire = Wire(0.05 * FLOW_BYTES_PER_SECOND)
    senders, queues = [sender(wire) for _ in range(count)], [wire.queue() for _ in range(count)]
    for queue in queues:
        queue.add([(0, 2)])
    while len([rate for rate in limits.values() if rate]) < count:
        wire.wait(DEADLINE_SECONDS / LOOKS_PER_DEADLINE)
        for each, queue in zip(senders, queues, strict=True):
            queue.taken(int(DEADLINE_SECONDS / LOOKS_PER_DEADLINE * wire.bytes_per_second / count))
            each.check_link(queue)
    assert sum(limits.values()) == pytest.approx(ROOM_RATIO * wire.bytes_per_second, rel=0.01)
