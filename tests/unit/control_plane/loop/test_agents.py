"""Tests the agent registry: connections, latest reports and pending messages."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from control_plane.loop import agents
from control_plane.loop.agents import MAX_DEPARTED, AgentConnection, AgentRegistry
from control_plane.loop.metric_inbox import ReceivedBatch
from everstep.protocol.agent_messages import (
    AgentReport,
    Hello,
    MemberPhase,
    MemberReport,
    MetricBatch,
    MetricPoint,
    Prepare,
    RankStatus,
    Release,
)
from everstep.protocol.codec import Message
from everstep.protocol.ids import FleetName, Generation, JobName, NodeId, Rank, RunId, Step

NODE = NodeId("i-1")
RUN = RunId("a" * 32)


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> AgentRegistry:
    return AgentRegistry(monotonic=clock, unix=clock)


def hello(agent_id: str = "one") -> Hello:
    return Hello(node_id=NODE, agent_id=agent_id, address="127.0.0.2", peer_port=1, memory_bytes=1, version="1")


def accept(registry: AgentRegistry, agent_id: str = "one") -> AgentConnection:
    return registry.accept(hello(agent_id), FleetName("main"))


def report(
    sequence: int, boundary: int = 0, *, metrics: MetricBatch | None = None, phase: MemberPhase = MemberPhase.RUNNING
) -> AgentReport:
    member = MemberReport(
        job=JobName("gpt"),
        run=RUN,
        generation=Generation(1),
        phase=phase,
        ranks=(RankStatus(rank=Rank(0), boundary=Step(boundary)),),
    )
    return AgentReport(node_id=NODE, sequence=sequence, member=member, metrics=metrics)


def prepare(generation: int) -> Prepare:
    return Prepare(job=JobName("gpt"), run=RUN, generation=Generation(generation), parent=Generation(0))


async def test_the_newest_report_replaces_all_before_it_and_late_ones_only_show_life(
    registry: AgentRegistry, clock: Clock
) -> None:
    connection = accept(registry)
    connection.report(report(5, 50))
    clock.seconds += 3
    connection.report(report(4, 40))
    view = registry.views()[NODE]
    assert view.report == report(5, 50)
    assert view.heard_at == 103


async def test_messages_come_in_order_and_once(registry: AgentRegistry) -> None:
    connection = accept(registry)
    for message in (prepare(1), Release(run=RUN), prepare(1), prepare(2)):
        assert registry.send(NODE, message)
    assert [await connection.next_message() for _ in range(3)] == [prepare(1), Release(run=RUN), prepare(2)]
    assert registry.send(NODE, prepare(1))
    assert await connection.next_message() == prepare(1)


class LaterCommand(Message, frozen=True):
    """A command that a later minor version of the protocol, version 2, adds."""

    since_minor = 2


@pytest.mark.parametrize(("minor", "is_sent"), [(0, False), (1, False), (2, True)])
async def test_an_older_agent_receives_no_command_that_its_release_lacks(
    registry: AgentRegistry, minor: int, is_sent: bool
) -> None:
    connection = registry.accept(msgspec.structs.replace(hello(), protocol_minor=minor), FleetName("main"))
    assert registry.send(NODE, LaterCommand()) is is_sent  # type: ignore[arg-type]  # of a release that is not made yet
    assert registry.send(NODE, prepare(1))
    assert await connection.next_message() == (LaterCommand() if is_sent else prepare(1))


async def test_an_agent_that_does_not_read_holds_a_bounded_queue(registry: AgentRegistry) -> None:
    connection = accept(registry)
    for generation in range(agents.QUEUE_LIMIT + 5):
        registry.send(NODE, prepare(generation))
    assert await connection.next_message() == prepare(5)


async def test_a_newer_connection_ends_the_older_one(registry: AgentRegistry) -> None:
    old = accept(registry)
    waiting = asyncio.create_task(old.next_message())
    await asyncio.sleep(0)
    new = accept(registry)
    assert await waiting is None
    old.report(report(1))
    old.close()
    assert registry.connected()[NODE].report is None
    new.report(report(1))
    assert registry.connected()[NODE].report is not None


async def test_a_new_connection_does_not_renew_a_nodes_pace(registry: AgentRegistry) -> None:
    pace = registry.pace_of(NODE)
    accept(registry)
    accept(registry)
    assert registry.pace_of(NODE) is pace
    forget_many(registry, MAX_DEPARTED)
    registry.forget(NODE)
    forget_many(registry, MAX_DEPARTED, first=MAX_DEPARTED)
    assert registry.pace_of(NODE) is not pace, "a node that is long gone"


async def test_a_reconnected_agent_keeps_its_word_a_restarted_one_has_said_nothing(registry: AgentRegistry) -> None:
    accept(registry).report(report(7))
    assert accept(registry).is_open
    assert registry.views()[NODE].report == report(7)
    accept(registry, "two").report(report(1))
    assert registry.views()[NODE].report == report(1)


async def test_a_broken_connection_is_told_and_nothing_can_be_sent(registry: AgentRegistry) -> None:
    connection = accept(registry)
    connection.close()
    connection.close()
    assert list(registry.take_lost()) == [NODE]
    assert list(registry.take_lost()) == []
    assert not registry.views()[NODE].is_connected
    assert NODE not in registry.connected()
    assert not registry.send(NODE, prepare(1))
    assert await connection.next_message() is None
    heard_at = registry.views()[NODE].heard_at
    registry.forget(NODE)
    assert registry.views()[NODE].heard_at == heard_at, (
        "the last word of an ended node dates the incident that it belongs to"
    )


def forget_many(registry: AgentRegistry, count: int, first: int = 0) -> None:
    """Let `count` nodes join the registry and end."""
    for number in range(first, first + count):
        node_id = NodeId(f"i-other-{number}")
        registry.accept(msgspec.structs.replace(hello(), node_id=node_id), FleetName("main"))
        registry.forget(node_id)


async def test_the_last_words_of_ended_nodes_are_bounded(registry: AgentRegistry) -> None:
    accept(registry)
    registry.forget(NODE)
    registry.forget(NODE)
    forget_many(registry, MAX_DEPARTED - 1)
    assert len(registry.views()) == MAX_DEPARTED
    assert NODE in registry.views()
    forget_many(registry, 1, first=MAX_DEPARTED)
    assert len(registry.views()) == MAX_DEPARTED
    assert NODE not in registry.views()


async def test_reports_of_another_node_are_dropped(registry: AgentRegistry) -> None:
    accept(registry).report(AgentReport(node_id=NodeId("i-2"), sequence=1, member=None))
    assert registry.views()[NODE].report is None


async def test_every_loop_hears_of_every_change(registry: AgentRegistry) -> None:
    seen = await registry.wait_for_change(0, 5)
    waiting = [asyncio.create_task(registry.wait_for_change(seen, 5)) for _ in range(2)]
    await asyncio.sleep(0)
    registry.hint()
    assert all([(await task) > seen for task in waiting])
    registry.hint()
    assert await registry.wait_for_change(seen, 5) > seen


async def test_nothing_new_ends_with_the_timeout(registry: AgentRegistry) -> None:
    seen = await registry.wait_for_change(0, 5)
    assert await registry.wait_for_change(seen, 0.01) == seen


async def test_steps_alone_wake_nobody_unless_the_run_is_watched(registry: AgentRegistry) -> None:
    connection = accept(registry)
    connection.report(report(1, 1))
    seen = await registry.wait_for_change(0, 5)
    connection.report(report(2, 2))
    assert await registry.wait_for_change(seen, 0.01) == seen
    connection.report(report(3, 2, phase=MemberPhase.EXITED))
    seen = await registry.wait_for_change(seen, 5)
    registry.watch_closely(frozenset({RUN}))
    connection.report(report(4, 3, phase=MemberPhase.EXITED))
    assert await registry.wait_for_change(seen, 5) > seen


async def test_logged_values_wait_for_the_database_one_batch_a_node(registry: AgentRegistry) -> None:
    def batch(first: int) -> MetricBatch:
        point = MetricPoint(generation=Generation(1), step=Step(1), values={"loss": 1.0}, at_seconds=1.0)
        return MetricBatch(run=RUN, first_number=first, points=(point,))

    connection = accept(registry)
    connection.report(report(1, metrics=batch(0)))
    connection.report(report(2, metrics=batch(0)))
    connection.report(report(3))
    assert registry.logged.filled.is_set()
    assert registry.logged.empty() == {NODE: ReceivedBatch("one", batch(0))}
    assert not registry.logged.filled.is_set()
    assert registry.logged.empty() == {}


def test_refusals_are_counted_until_the_node_is_long_gone() -> None:
    registry = AgentRegistry()
    for _ in range(2):
        registry.refuse(NODE)
    accept(registry)
    registry.forget(NODE)
    assert registry.refusals() == {NODE: 2}
    forget_many(registry, MAX_DEPARTED)
    assert registry.refusals() == {}
