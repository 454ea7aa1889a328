"""The notice reader passes events from a queue to the loops.

Events may be duplicated, late or malformed, or concern instances of no fleet. Several servers read the queue.
"""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import pytest

from control_plane.cloud.errors import CloudUnavailable
from control_plane.cloud.notices import QueuedMessage
from control_plane.core.polling import AWS_POLL_SECONDS, EVENT_POLL_SECONDS, EVENTS_TRUSTED_SECONDS
from control_plane.db import notices
from control_plane.db.notices import NoticeRecord
from control_plane.loop import notice_reader
from control_plane.loop.cloud_watch import CloudWatch
from control_plane.loop.notice_reader import MAX_DELIVERIES, NoticeReader
from tests.sim.world import FLEET, START, World, evidence_of
from tests.unit.control_plane.cloud import aws_events
from tests.unit.control_plane.loop.test_repeating import Pauses


class Queue:
    """A minimal SQS queue: it delivers each message again, to any reader, until the message is deleted."""

    def __init__(self, *bodies: str) -> None:
        self.waiting = {f"receipt-{number}": body for number, body in enumerate(bodies)}
        self.deliveries = dict.fromkeys(self.waiting, 0)
        self.error: Exception | None = None

    def receive(self) -> tuple[QueuedMessage, ...]:
        if self.error is not None:
            raise self.error
        for receipt in self.waiting:
            self.deliveries[receipt] += 1
        return tuple(
            QueuedMessage(message_id=receipt, receipt=receipt, body=body, delivery_count=self.deliveries[receipt])
            for receipt, body in self.waiting.items()
        )

    def delete(self, receipts) -> None:
        for receipt in receipts:
            self.waiting.pop(receipt, None)


def reader_of(world: World, queue: Queue) -> NoticeReader:
    return NoticeReader(queue, world.context, world.runner.cloud)


def stored(world: World) -> tuple[NoticeRecord, ...]:
    with world.database.read() as session:
        return notices.of_fleet(session, FLEET)


def at_start(body: str) -> str:
    """Return the event with its time set to the start of the simulation."""
    return body.replace(aws_events.TIME, START.isoformat())


async def node_of(world: World) -> str:
    await world.until(lambda: len(world.agents) == 5)
    return sorted(world.agents)[1]


async def test_a_spot_warning_reaches_the_job_through_the_database(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    queue = Queue(at_start(aws_events.spot(world.team()[1].node_id)))
    await reader_of(world, queue).read()
    assert not queue.waiting
    # the first server has stored the event and dies; the next server reads the event from the database
    world.start_server()
    await world.until(lambda: world.is_stopped)
    world.finish()
    await world.until(lambda: world.job().generation == 2)
    (incident,) = world.incidents()
    assert (incident.cause, incident.lost_steps, incident.from_step) == ("notice", 0, 10)
    assert "EC2 Spot Instance Interruption Warning at 2026-03-01 00:02:00 UTC" in evidence_of(incident)[0]


async def test_a_doubled_event_is_one_notice_and_one_line_of_history(world: World) -> None:
    node = await node_of(world)
    await reader_of(world, Queue(*[at_start(aws_events.spot(node))] * 3)).read()
    await reader_of(world, Queue(at_start(aws_events.spot(node)))).read()
    assert len(stored(world)) == 1
    assert sum("Spot" in message for message in world.events()) == 1


async def test_late_foreign_and_unknown_events_leave_nothing(world: World) -> None:
    node = await node_of(world)
    world.now += timedelta(hours=1)
    queue = Queue(
        at_start(aws_events.spot(node)),
        aws_events.rebalance("i-0fffffffffffffff0"),
        aws_events.envelope("Object Created", {}),
    )
    assert await reader_of(world, queue).read() == 3
    assert not queue.waiting
    assert stored(world) == ()


async def test_a_poison_message_is_recorded_and_deleted(world: World) -> None:
    queue = Queue("\x00no event\n")
    await reader_of(world, queue).read()
    assert not queue.waiting
    assert world.events() == [
        "message receipt-0 of the queue of events is dropped: not JSON: Expecting value: line 1 column 1 "
        "(char 0): \\x00no event\\n"
    ]


async def test_a_message_that_cannot_be_stored_comes_again_but_not_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await node_of(world)
    queue = Queue(at_start(aws_events.spot(node)))
    reader = reader_of(world, queue)
    monkeypatch.setattr(notices, "record", lambda *_: 1 / 0)
    for _ in range(MAX_DELIVERIES - 1):
        with pytest.raises(ZeroDivisionError):
            await reader.read()
        assert queue.waiting
    await reader.read()
    assert not queue.waiting
    assert "ZeroDivisionError" in world.events()[-1]


async def test_the_end_of_a_capacity_block_concerns_its_instances(world: World) -> None:
    await node_of(world)
    first, second, *_ = sorted(world.agents)
    for node, block in ((first, "cr-1"), (second, "cr-2")):
        world.operator.put_in_block(node, block)
    await reader_of(world, Queue(aws_events.block_end("cr-1").replace("2026-03-01T12:40", "2026-03-01T00:40"))).read()
    assert [notice.node_id for notice in stored(world)] == [first]


async def test_an_event_makes_the_cloud_watch_look_and_a_scheduled_change_look_closely(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    monkeypatch.setattr(CloudWatch, "poll_now", lambda self: looks.append("now"))
    monkeypatch.setattr(CloudWatch, "poll_details", lambda self: looks.append("closely"))
    for body in (aws_events.state_change(), aws_events.health(), aws_events.envelope("Object Created", {})):
        await reader_of(world, Queue(body)).read()
    assert looks == ["now", "closely"]


async def test_while_events_arrive_aws_is_polled_less_often(world: World) -> None:
    cloud = world.runner.cloud
    await reader_of(world, Queue(aws_events.envelope("Object Created", {}))).read()
    assert cloud.poll_interval_seconds() == AWS_POLL_SECONDS, "an event that concerns no instance proves nothing"
    await reader_of(world, Queue(aws_events.state_change())).read()
    assert cloud.poll_interval_seconds() == EVENT_POLL_SECONDS
    world.now += timedelta(seconds=EVENTS_TRUSTED_SECONDS)
    assert cloud.poll_interval_seconds() == AWS_POLL_SECONDS


async def test_a_queue_that_fails_does_not_end_the_loop(world: World) -> None:
    queue, stop = Queue(aws_events.state_change()), asyncio.Event()
    reader = reader_of(world, queue)
    failed = asyncio.Event()

    async def fail_once() -> int:
        stop.set()
        failed.set()
        raise CloudUnavailable("no answer")

    reader.read = fail_once  # type: ignore[method-assign]
    await reader.run(stop)
    assert failed.is_set()


async def test_a_queue_that_fails_is_tried_ever_more_seldom_and_one_that_answers_is_read_on_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notice_reader, "pause", pauses := Pauses(9))
    reader = reader_of(world, Queue())
    answers = iter([*[CloudUnavailable("no answer")] * 7, 0, 1, ZeroDivisionError(), CloudUnavailable("no answer")])

    async def read() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(reader, "read", read)
    await reader.run(asyncio.Event())
    assert pauses.seconds == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 1.0, 2.0]


async def test_a_server_that_stops_does_not_wait_for_the_end_of_a_long_poll(world: World) -> None:
    polled, ends, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    class LongPoll(Queue):
        def receive(self) -> tuple[QueuedMessage, ...]:
            loop.call_soon_threadsafe(polled.set)
            ends.wait()
            return super().receive()

    queue, stop = LongPoll(aws_events.state_change()), asyncio.Event()
    running = asyncio.create_task(reader_of(world, queue).run(stop))
    try:
        await polled.wait()
        stop.set()
        await running
        assert not ends.is_set()
        assert queue.waiting, "what comes after that is for the next server"
    finally:
        ends.set()
