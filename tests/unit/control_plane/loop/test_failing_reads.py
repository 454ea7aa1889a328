"""A failed call of AWS or S3 changes no stored conclusion.

The tests let each method of `CloudOperator`, `ServiceStore` and `EventQueue` fail in each way, and run every background
loop. Methods, errors and loops are found by introspection, so new ones are covered. A column counts as a conclusion if
it stays the same while nothing fails.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import select, update

from control_plane import loop as loop_package
from control_plane.cloud.notices import EventQueue
from control_plane.cloud.objects import ServiceStore
from control_plane.cloud.operator import CloudOperator
from control_plane.core.states import JobState
from control_plane.db import checkpoints
from control_plane.db.models import Base, CheckpointRow
from control_plane.loop import (
    cloud_watch,
    exporter,
    metric_writer,
    notice_reader,
)
from control_plane.loop.runner import Runner
from everstep.protocol.agent_messages import UploadedShard
from everstep.protocol.plan import ObjectReference
from tests.sim.world import BUCKET, World
from tests.unit.control_plane.api.test_results import tiny_shard
from tests.unit.control_plane.api.test_unreadable_store import all_errors

PROTOCOLS = (CloudOperator, ServiceStore, EventQueue)
METHODS = [
    (protocol, name)
    for protocol in PROTOCOLS
    for name, member in vars(protocol).items()
    if inspect.isfunction(member) and not name.startswith("_")
]
ERRORS: list[Exception] = [
    *all_errors(),
    TimeoutError("timed out"),
    ConnectionResetError("the connection was cut"),
    ValueError("an answer does not parse"),
]
LOOPS = {
    notice_reader.NoticeReader,  # see `FailingWorld.look`
    cloud_watch.CloudWatch,  # `World.tick` runs it
    Runner,  # `World.tick` runs the loops of fleets and jobs, and `FailingWorld.look` the periodic work
    exporter.EventExporter,  # It stores positions only.
    metric_writer.MetricWriter,  # It reads no AWS.
}
"""Every background loop."""
NO_CONCLUSIONS = {"event", "lease", "metric", "metric_chunk", "metric_log", "audit_entry", "spent_nonce", "intent"}
"""Tables of what happened, and of calls in progress."""
REQUEST = {"blocked", "verify_after", "verify_requested_at", "verified_at", "verdict"}
"""Columns of a checkpoint whose verification is requested. The tests check the verdict separately."""
IDLE_TIME = {("fleet", "idle_microseconds"), ("fleet", "idle_until")}
"""Columns that the fleet loop stores once a minute. A test would otherwise have to wait for the first time."""

READS = {"head", "get", "stream", "list", "complete_group", "describe_instances", "list_groups", "receive"}
"""Methods that the loops must call in the world of these tests. Otherwise the tests would prove nothing."""


class Queue:
    """An event queue without messages."""

    def receive(self) -> tuple[()]:
        return ()

    def delete(self, receipts: object) -> None:
        pass


class Injected:
    """Passes calls to a real object, unless the world lets this method fail."""

    def __init__(self, protocol: type, real: Any, world: FailingWorld) -> None:
        self._protocol, self._real, self._world = protocol, real, world

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._real, name)
        if (self._protocol, name) not in METHODS:
            return method

        def call(*arguments: Any, **options: Any) -> Any:
            if (self._protocol, name) in self._world.failing:
                self._world.failed.add((self._protocol, name))
                assert self._world.error is not None
                raise self._world.error
            return method(*arguments, **options)

        return call


class FailingWorld(World):
    """A world in which chosen calls of AWS and S3 fail."""

    failing: frozenset[tuple[type, str]] = frozenset()
    failed: set[tuple[type, str]]
    error: Exception | None = None

    def start_server(self) -> None:
        super().start_server()
        self.failed = set()
        self.context = replace(
            self.context,
            operator=Injected(CloudOperator, self.operator, self),
            objects=Injected(ServiceStore, self.objects, self),
            events=Injected(EventQueue, Queue(), self),
        )
        self.runner = Runner(self.context)

    async def look(self, seconds: float = 1.0) -> None:
        """Train one step, and make one pass of every loop."""
        self.complete_steps(1)
        await self.tick(seconds)
        for work, _, _ in self.runner.periodic_work(asyncio.Event()):
            with self.one_pass():
                work()
        assert self.runner.notices is not None
        with self.one_pass():
            await self.runner.notices.read()

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Bear an error as `repeat` does: it ends the pass only."""
        try:
            yield
        except Exception as error:
            if error is not self.error:
                raise

    def conclusions(self) -> dict[tuple[object, ...], object]:
        """Return every stored value by table, primary key and column. Values in a job's memo count separately."""
        found: dict[tuple[object, ...], object] = {}
        with self.database.read() as session:
            for table in Base.metadata.sorted_tables:
                if table.name in NO_CONCLUSIONS:
                    continue
                for row in session.execute(select(table)).mappings():
                    key = tuple(row[column.name] for column in table.primary_key)
                    for name, value in _flat(row):
                        found[table.name, key, name] = value
        return found

    def ask_to_verify(self) -> None:
        with self.database.write() as session:
            older = checkpoints.of_run(session, self.job().run_id)[-1]
            this = (CheckpointRow.run_id == self.job().run_id, CheckpointRow.step == older.step)
            session.execute(update(CheckpointRow).where(*this).values(verdict=None, verified_at=None))
            checkpoints.ask_to_verify(session, self.job().run_id, older, self.now)


def _flat(row: Any) -> Iterator[tuple[str, object]]:
    for name, value in row.items():
        if name == "memo":
            yield from ((f"memo.{inner}", each) for inner, each in value.items())
        else:
            yield name, value


async def steady(tmp_path: Path) -> FailingWorld:
    """Return a world with a running job, two intact checkpoints of at most two, a spare, and garbage in S3."""
    world = FailingWorld(tmp_path, nodes=2, spares=1)
    world.submit("gpt", nodes=2, checkpoint_max_count=2)
    await world.running()
    for step in (3, 6):
        await world.train(3)
        await upload(world, step)
    world.objects.put(ObjectReference(bucket=BUCKET, key="uploads/default/x.tar.gz"), b"just uploaded")
    for _ in range(5):
        await world.look()
    assert [each.state for each in world.checkpoints()] == ["complete", "complete"]
    return world


async def upload(world: FailingWorld, step: int) -> None:
    """Store intact shards of a step in S3, and let the agents report them."""
    world.report_uploads(step)
    for agent in world.team():
        agent.uploads = tuple(_stored(world, each) for each in agent.uploads)
    await world.until(lambda: step in {each.step for each in world.checkpoints() if each.state == "complete"})


def _stored(world: FailingWorld, shard: UploadedShard) -> UploadedShard:
    header, body = tiny_shard(shard.rank, shard.step, shard.origin_generation)
    world.objects.put(shard.object, body)
    return msgspec.structs.replace(
        shard, object_bytes=len(body), payload_bytes=header.payload_bytes, payload_digest=header.payload_digest
    )


def test_every_loop_is_driven() -> None:
    found = {
        member
        for module in pkgutil.iter_modules(loop_package.__path__)
        for member in vars(importlib.import_module(f"{loop_package.__name__}.{module.name}")).values()
        if inspect.isclass(member)
        and member.__module__ == f"{loop_package.__name__}.{module.name}"
        and list(inspect.signature(getattr(member, "run", lambda: None)).parameters) == ["self", "stop"]
    }
    assert found - LOOPS == set(), "add the loop to LOOPS, and drive it in `look`"


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_no_failed_call_changes_a_conclusion(tmp_path: Path, protocol: type) -> None:
    world = await steady(tmp_path)
    before = world.conclusions()
    for _ in range(8):
        world.ask_to_verify()
        await world.look()
    after = world.conclusions()
    restless = {(key[0], key[2]) for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    restless |= {("checkpoint", name) for name in REQUEST} | IDLE_TIME
    calls = len(world.operator.calls)

    def conclusions() -> dict[tuple[object, ...], object]:
        return {key: value for key, value in world.conclusions().items() if (key[0], key[2]) not in restless}

    before = conclusions()
    methods = [method for method in METHODS if method[0] is protocol]
    for failing in (*([method] for method in methods), methods):
        world.failing, world.failed = frozenset(failing), set()
        for number, world.error in enumerate(ERRORS):
            world.ask_to_verify()
            await world.look()
            found = conclusions()
            changed = {key for key in before.keys() | found.keys() if before.get(key) != found.get(key)}
            assert not changed, (failing, world.error)
            assert not any(each.is_wrong for each in world.checkpoints()), (failing, world.error)
            if number == 0 and not world.failed:
                break  # No loop calls this method while nothing has to be changed.
        if failing is not methods and failing[0][1] in READS:
            assert world.failed, f"no loop uses {failing[0][1]}"
    acted = {call[0] for call in world.operator.calls[calls:]}
    assert not acted & {"terminate_member", "reboot_member", "set_desired", "complete_termination"}
    assert world.job().state == JobState.RUNNING
    world.close()
