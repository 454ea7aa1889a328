"""The writer stores metric points of agents' reports in the database and acknowledges them to the agents."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from control_plane.db import jobs, metrics, models
from control_plane.db.session import Database
from control_plane.loop import metric_writer
from control_plane.loop.agents import AgentConnection, AgentRegistry
from control_plane.loop.metric_writer import MetricWriter, first_piece
from everstep.protocol.agent_messages import (
    AgentReport,
    Hello,
    MemberPhase,
    MemberReport,
    MetricBatch,
    MetricPoint,
    MetricsStored,
    RankValues,
)
from everstep.protocol.ids import FleetName, Generation, JobName, NodeId, Rank, RunId, Step
from tests import sqlite
from tests.unit.control_plane.db.conftest import NOW, new_job
from tests.unit.control_plane.loop.test_repeating import Pauses

NODE, RUN = NodeId("i-1"), RunId("a" * 32)
BATCH = MetricBatch(
    run=RUN,
    first_number=5,
    points=(MetricPoint(generation=Generation(1), step=Step(1), values={"loss": 1.0}, at_seconds=1.0),),
)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = sqlite.migrated(tmp_path / "test.db")
    with made.write() as session:
        job = jobs.create(session, new_job(run_id=RUN), NOW)
        for number, nodes in ((1, ("i-1", "i-2")), (2, ("i-4",))):
            session.add(
                models.GenerationRow(
                    run_id=job.run_id,
                    number=number,
                    parent=0,
                    base_step=0,
                    world_size=len(nodes),
                    plan=b"",
                    node_ids=nodes,
                    created_at=NOW,
                )
            )
    yield made
    made.close()


def connected(registry: AgentRegistry) -> AgentConnection:
    hello = Hello(node_id=NODE, agent_id="one", address="", peer_port=1, memory_bytes=1, version="1")
    connection = registry.accept(hello, FleetName("main"))
    connection.report(AgentReport(node_id=NODE, sequence=1, member=None, metrics=BATCH))
    return connection


async def test_what_is_stored_is_confirmed_and_once_told_to_stop_it_stores_what_is_left(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = []
    monkeypatch.setattr(metrics, "store", lambda session, agent_id, batch, *newest: stored.append((agent_id, batch)))
    registry, stop = AgentRegistry(), asyncio.Event()
    running = asyncio.create_task(MetricWriter(database, registry, lambda: NOW).run(stop))
    connection = connected(registry)
    assert await connection.next_message() == MetricsStored(agent_id="one", next_number=6)
    registry.logged.take(NODE, "one", BATCH)
    stop.set()
    await running
    assert stored == [("one", BATCH), ("one", BATCH)]


@pytest.mark.security
async def test_a_node_that_is_not_in_the_plan_of_a_generation_stores_nothing_for_it(database: Database) -> None:
    """A node sends metric points for a generation whose plan does not contain this node. The service discards them.

    It still acknowledges the points, so that the agent does not send them forever.
    """
    registry = AgentRegistry()
    forged = {"loss": -666.0, "everstep/gpu_percent": 100.0}
    points = tuple(
        MetricPoint(generation=Generation(number), step=Step(9), values=forged, at_seconds=1.0) for number in (1, 2)
    )
    rogue = registry.accept(
        Hello(node_id=NodeId("i-4"), agent_id="rogue", address="", peer_port=1, memory_bytes=1, version="1"),
        FleetName("main"),
    )
    for batch in (
        MetricBatch(run=RUN, first_number=0, points=points),
        MetricBatch(run=RUN, first_number=7, points=points[:1]),
    ):
        rogue.report(AgentReport(node_id=NodeId("i-4"), sequence=batch.first_number + 1, member=None, metrics=batch))
        await MetricWriter(database, registry, lambda: NOW).flush()
        assert await rogue.next_message() == MetricsStored(agent_id="rogue", next_number=batch.first_number + 1)
    with database.read() as session:
        assert session.scalars(select(models.MetricRow)).all() == []
        assert session.scalars(select(models.MetricLogRow)).all() == [], (
            "the numbers of the job's own agent stay as they are"
        )


@pytest.mark.security
@pytest.mark.parametrize(
    ("node", "generation", "later", "run_of_node", "is_stored"),
    [
        ("i-1", 1, timedelta(), None, True),
        ("i-1", 1, jobs.LATE, None, True),
        ("i-1", 1, jobs.LATE + timedelta(seconds=1), None, False),
        ("i-1", 1, timedelta(days=1), RUN, True),
        ("i-1", 1, timedelta(days=1), "b" * 32, False),
        ("i-2", 1, timedelta(), RUN, False),
        ("i-4", 2, timedelta(days=1), None, True),
        ("i-4", 1, timedelta(), RUN, False),
    ],
    ids=(
        "late",
        "as late as possible",
        "a generation that is over",
        "a node that stays with the run",
        "a node that works for another run",
        "a node without rank 0",
        "the newest generation",
        "a node of another generation",
    ),
)
async def test_a_node_has_its_time_and_its_rank_for_the_values_of_a_generation(
    database: Database, node: str, generation: int, later: timedelta, run_of_node: str | None, is_stored: bool
) -> None:
    """Rank 0 of generation 1 was on i-1, beside i-2. Generation 2 began at NOW, with i-4 only.

    i-1 may be a spare now, or work for any run. Last values of an honest node arrive shortly after its generation.
    """
    with database.write() as session:
        session.add(
            models.NodeRow(id=node, fleet_name="main", state="assigned", run_id=run_of_node, created_at=NOW, since=NOW)
        )
    registry = AgentRegistry()
    agent = registry.accept(
        Hello(node_id=NodeId(node), agent_id="one", address="", peer_port=1, memory_bytes=1, version="1"),
        FleetName("main"),
    )
    point = MetricPoint(generation=Generation(generation), step=Step(9), values={"loss": 777.0}, at_seconds=1.0)
    batch = MetricBatch(run=RUN, first_number=0, points=(point,))
    agent.report(AgentReport(node_id=NodeId(node), sequence=1, member=None, metrics=batch))
    await MetricWriter(database, registry, lambda: NOW + later).flush()
    with database.read() as session:
        assert [each.name for each in metrics.names(session, RUN)] == (["loss"] if is_stored else [])


def points_of(*, count: int, apart: int, names: int = 6, generation: int = 1) -> tuple[MetricPoint, ...]:
    values = {f"v{number}": 0.5 for number in range(names)}
    return tuple(
        MetricPoint(generation=Generation(generation), step=Step(number * apart), values=values, at_seconds=1.0)
        for number in range(count)
    )


@pytest.mark.parametrize(
    ("points", "stored"),
    [
        (points_of(count=1000, apart=1), 1000),
        (points_of(count=1000, apart=1 << 33), 10),
        (points_of(count=3, apart=1 << 33, names=200), 1),
        ((*points_of(count=2, apart=1), *points_of(count=2, apart=1, generation=2)), 2),
        ((), 0),
    ],
)
@pytest.mark.security
def test_one_transaction_stores_few_rows_and_one_generation(points: tuple[MetricPoint, ...], stored: int) -> None:
    piece = first_piece(MetricBatch(run=RUN, first_number=5, points=points))
    assert (piece.first_number, piece.points) == (5, points[:stored])


@pytest.mark.security
async def test_the_agent_is_told_how_many_values_are_stored(database: Database) -> None:
    """A rank logs values of steps that lie far apart, each of which needs a row of its own."""
    registry = AgentRegistry()
    agent = registry.accept(
        Hello(node_id=NODE, agent_id="two", address="", peer_port=1, memory_bytes=1, version="1"), FleetName("main")
    )
    batch = MetricBatch(run=RUN, first_number=0, points=points_of(count=1000, apart=1 << 33))
    agent.report(AgentReport(node_id=NODE, sequence=1, member=None, metrics=batch))
    await MetricWriter(database, registry, lambda: NOW).flush()
    assert await agent.next_message() == MetricsStored(agent_id="two", next_number=10)


async def test_it_rests_after_it_has_stored(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "store", lambda *_: None)
    monkeypatch.setattr(metric_writer, "pause", pauses := Pauses(1))
    registry = AgentRegistry()
    connected(registry)
    await MetricWriter(database, registry, lambda: NOW).run(asyncio.Event())
    (seconds,) = pauses.seconds
    assert seconds >= metric_writer.FLUSH_SECONDS


async def test_a_database_that_is_away_confirms_nothing(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise OperationalError("INSERT", {}, Exception("locked"))

    monkeypatch.setattr(metrics, "store", away)
    registry = AgentRegistry()
    connection = connected(registry)
    await MetricWriter(database, registry, lambda: NOW).flush()
    later = MetricsStored(agent_id="one", next_number=1)
    assert registry.send(NODE, later)
    assert await connection.next_message() == later, "nothing was confirmed before"
    assert registry.logged.empty() == {}


async def test_what_cannot_be_stored_at_all_does_not_come_again(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(metrics, "store", broken)
    registry = AgentRegistry()
    connection = connected(registry)
    await MetricWriter(database, registry, lambda: NOW).flush()
    assert await connection.next_message() == MetricsStored(agent_id="one", next_number=6)


async def test_what_all_nodes_of_the_generation_say_they_measured_is_stored_with_it(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = []
    monkeypatch.setattr(metrics, "store", lambda session, agent_id, batch, *newest: stored.append(newest))
    registry = AgentRegistry()

    def join(number: int, run: RunId, generation: int, batch: MetricBatch | None = None) -> AgentConnection:
        node_id = NodeId(f"i-{number}")
        connection = registry.accept(
            Hello(node_id=node_id, agent_id="one", address="", peer_port=1, memory_bytes=1, version="1"),
            FleetName("main"),
        )
        member = MemberReport(
            job=JobName("gpt"),
            run=run,
            generation=Generation(generation),
            phase=MemberPhase.RUNNING,
            measured={"everstep/gpu_percent": float(number)},
            logged=(RankValues(rank=Rank(number), values={"loss": float(number)}),),
        )
        connection.report(AgentReport(node_id=node_id, sequence=1, member=member, metrics=batch))
        return connection

    join(1, RUN, 1, BATCH)
    join(2, RUN, 1)
    join(3, RunId("b" * 32), 1)
    join(4, RUN, 2)
    join(5, RUN, 1).close()
    join(6, RUN, 1)  # this node claims to be a member, but the plan does not contain it
    await MetricWriter(database, registry, lambda: NOW).flush()
    of_nodes = {"i-1": {"everstep/gpu_percent": 1.0}, "i-2": {"everstep/gpu_percent": 2.0}}
    assert stored == [(of_nodes, {1: {"loss": 1.0}, 2: {"loss": 2.0}})]
