"""From reports to the database, and the word back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from control_plane.db import metrics
from control_plane.db.session import Database
from control_plane.loop.agents import AgentConnection, AgentRegistry
from control_plane.loop.metric_writer import MetricWriter
from everstep.protocol.agent_messages import AgentReport, Hello, MetricBatch, MetricPoint, MetricsStored
from everstep.protocol.ids import FleetName, Generation, NodeId, RunId, Step

NODE, RUN = NodeId("i-1"), RunId("a" * 32)
BATCH = MetricBatch(run=RUN, first_number=5, points=(MetricPoint(generation=Generation(1), step=Step(1), values={"loss": 1.0}, at_seconds=1.0),))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(f"sqlite:///{tmp_path / 'test.db'}")
    made.create_tables()
    yield made
    made.close()


def connected(registry: AgentRegistry) -> AgentConnection:
    hello = Hello(node_id=NODE, agent_id="one", address="", peer_port=1, memory_bytes=1, version="1")
    connection = registry.accept(hello, FleetName("main"))
    connection.report(AgentReport(node_id=NODE, sequence=1, member=None, metrics=BATCH))
    return connection


async def test_what_is_stored_is_confirmed_and_once_told_to_stop_it_stores_what_is_left(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = []
    monkeypatch.setattr(metrics, "store", lambda session, agent_id, batch: stored.append((agent_id, batch)))
    registry, stop = AgentRegistry(), asyncio.Event()
    running = asyncio.create_task(MetricWriter(database, registry).run(stop))
    connection = connected(registry)
    assert await connection.next_message() == MetricsStored(agent_id="one", next_number=6)
    registry.logged.take(NODE, "one", BATCH)
    stop.set()
    await running
    assert stored == [("one", BATCH), ("one", BATCH)]


async def test_a_database_that_is_away_confirms_nothing(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise OperationalError("INSERT", {}, Exception("locked"))

    monkeypatch.setattr(metrics, "store", away)
    registry = AgentRegistry()
    connection = connected(registry)
    await MetricWriter(database, registry).flush()
    assert not connection._queue
    assert registry.logged.empty() == {}


async def test_what_cannot_be_stored_at_all_does_not_come_again(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(metrics, "store", broken)
    registry = AgentRegistry()
    connection = connected(registry)
    await MetricWriter(database, registry).flush()
    assert await connection.next_message() == MetricsStored(agent_id="one", next_number=6)
