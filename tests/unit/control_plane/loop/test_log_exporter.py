"""The export sends every printed line to the log group. The lines of one node arrive in order.

In the tests, servers die and the log group refuses lines.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from control_plane.cloud.errors import CloudError, NotFound
from control_plane.core.log_batches import BatchLine
from control_plane.core.states import JobState
from control_plane.db import exports, jobs, nodes
from control_plane.db.leases import Leaser
from control_plane.db.nodes import AgentFacts
from control_plane.loop.log_exporter import LogExporter, cursor_of, text_of
from control_plane.loop.log_reader import Cursor
from everstep.protocol.ids import NO_RANK, NodeId, Rank
from everstep.protocol.log_chunks import ChunkHead, ChunkName, LogLine, encode_head, encode_lines
from everstep.protocol.plan import ObjectReference
from tests import sqlite
from tests.fakes.cloud import MemoryObjectStore
from tests.unit.control_plane.db.conftest import NOW, new_job
from tests.unit.control_plane.db.test_jobs import plan

MS = int(NOW.timestamp() * 1000)
RUN = "gpt".ljust(32, "0")
GROUP = "/everstep/jobs"


class Sink:
    def __init__(self) -> None:
        self.streams: dict[str, list[BatchLine]] = {}
        self.refusals: list[CloudError] = []
        self.dies_after: int | None = None

    def put_lines(self, stream: str, batch: Sequence[BatchLine]) -> int:
        if self.refusals:
            raise self.refusals.pop(0)
        self.streams.setdefault(stream, []).extend(batch)
        if self.dies_after is not None:
            self.dies_after -= 1
            if self.dies_after == 0:
                raise KeyboardInterrupt
        return 0

    def texts(self, node: int) -> list[str]:
        return [json.loads(line.message)["message"] for line in self.streams.get(f"gpt/{RUN}/i-{node}", [])]


class World:
    def __init__(self, directory: Path) -> None:
        self.database = sqlite.migrated(directory / "test.db")
        self.objects = MemoryObjectStore("b")
        self.sink = Sink()
        self.seconds = 0.0
        with self.database.write() as session:
            jobs.create(session, new_job(), NOW)
            for node in range(2):
                facts = AgentFacts(
                    node_id=f"i-{node}",
                    fleet_name="main",
                    address="",
                    peer_port=0,
                    memory_bytes=0,
                    agent_id="a",
                    version="1",
                )
                nodes.note_hello(session, facts, initial_state="joining", now=NOW)
        self.exporter = self.replica("one")

    def replica(self, owner: str, **options: int) -> LogExporter:
        leaser = Leaser(owner, 9.0, lambda: self.seconds)
        return LogExporter(self.database, self.objects, GROUP, self.sink, leaser, lambda: NOW, **options)

    def launch(self) -> None:
        with self.database.write() as session:
            lease = Leaser("test", 3.0, lambda: 0.0).claim(session, "job", RUN)
            assert lease is not None
            jobs.add_generation(session, lease, plan(1, 0), NOW)

    def end(self) -> None:
        with self.database.write() as session:
            lease = Leaser("test", 3.0, lambda: 0.0).claim(session, "job", RUN)
            assert lease is not None
            jobs.transition(
                session, lease, before=JobState.QUEUED, after=JobState.COMPLETED, now=NOW, reason="done", ended_at=NOW
            )

    def print(self, node: int, first: int, *texts: str, at: int = 0, is_last: bool = False) -> None:
        lines = [
            LogLine(at_ms=MS + at + n, rank=Rank(node), stream="stdout", text=text, end=1)
            for n, text in enumerate(texts)
        ]
        if is_last:
            lines.append(LogLine(at_ms=MS + at + 99, rank=NO_RANK, stream="end", text="", end=0))
        name = ChunkName(NodeId(f"i-{node}"), first, lines[0].at_ms)
        body = encode_head(ChunkHead(first=first, positions={})) + encode_lines(lines)
        self.objects.put(ObjectReference(bucket="b", key=f"l/gen=1/{name.path}"), body)

    @property
    def record(self) -> exports.ExportRecord:
        with self.database.read() as session:
            return exports.get(session, f"logs:{GROUP}")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.database.close()


def test_lines_go_out_once_to_a_stream_for_each_node_and_say_whose_they_are(world: World) -> None:
    world.exporter.export_some()  # the export finds nothing to do, because no generation is planned yet
    world.launch()
    world.print(0, 0, "a", "b")
    world.print(1, 0, "x", at=1)
    world.exporter.export_some()
    world.exporter.export_some()
    world.print(0, 2, "c", at=5)
    world.exporter.export_some()
    assert (world.sink.texts(0), world.sink.texts(1)) == (["a", "b", "c"], ["x"])
    first = world.sink.streams[f"gpt/{RUN}/i-0"][0]
    assert (first.at_ms, json.loads(first.message)) == (
        MS,
        {"generation": 1, "rank": 0, "stream": "stdout", "message": "a"},
    )


def test_a_job_that_ended_is_copied_to_its_end_and_then_left(world: World) -> None:
    world.launch()
    world.print(0, 0, "a")
    world.exporter.export_some()
    world.end()
    world.print(0, 1, "z", at=5, is_last=True)
    world.print(1, 0, "y", at=6, is_last=True)
    for _ in range(2):
        world.exporter.export_some()
    assert (world.sink.texts(0), world.sink.texts(1)) == (["a", "z"], ["y"])
    with world.database.read() as session:
        assert exports.logs_to_copy(session) == ()


def test_a_job_that_ended_before_its_first_launch_is_left(world: World) -> None:
    world.exporter.export_some()
    world.end()
    world.exporter.export_some()
    with world.database.read() as session:
        assert exports.logs_to_copy(session) == ()


def test_what_is_refused_is_shown_and_comes_again(world: World) -> None:
    world.launch()
    world.print(0, 0, "a")
    world.sink.refusals = [NotFound("PutLogEvents: no such group", code="ResourceNotFoundException")] * 2
    for _ in range(2):
        world.exporter.export_some()
    assert world.exporter.failure_count == 2
    assert (world.record.failure, world.record.failing_since) == (
        "ResourceNotFoundException: PutLogEvents: no such group",
        NOW,
    )
    world.exporter.export_some()
    assert world.sink.texts(0) == ["a"]
    assert (world.exporter.failure_count, world.record.failure, world.record.failing_since) == (0, "", None)


def test_a_server_that_dies_in_between_sends_again_and_another_one_goes_on(world: World) -> None:
    world.launch()
    world.print(0, 0, "a")
    world.print(1, 0, "x", at=1)
    world.sink.dies_after = 1
    with pytest.raises(KeyboardInterrupt):
        world.exporter.export_some()
    world.sink.dies_after = None
    other = world.replica("two")
    other.export_some()
    assert world.sink.texts(1) == []  # the second server must wait, because the first server's lease may still be valid
    world.seconds += 10
    other.export_some()
    assert (world.sink.texts(0), world.sink.texts(1)) == (["a", "a"], ["x"])


def test_a_pass_that_takes_longer_than_its_lease_is_made_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.launch()
    world.print(0, 0, "a")
    world.print(1, 0, "x", at=1)
    other, put_lines = world.replica("two"), world.sink.put_lines

    def slow(stream: str, batch: Sequence[BatchLine]) -> int:
        refused = put_lines(stream, batch)
        for _ in range(3):
            world.seconds += 2
            with monkeypatch.context() as meanwhile:
                meanwhile.setattr(world.sink, "put_lines", put_lines)
                other.export_some()
        return refused

    monkeypatch.setattr(world.sink, "put_lines", slow)
    for _ in range(3):
        world.exporter.export_some()
    assert (world.sink.texts(0), world.sink.texts(1)) == (["a"], ["x"])


def test_a_pass_makes_so_many_calls(world: World) -> None:
    world.exporter = world.replica("one", calls_per_pass=1)
    world.launch()
    world.print(0, 0, "a")
    with world.database.write() as session:
        jobs.create(session, new_job("other"), NOW)
    world.exporter.export_some()
    with world.database.read() as session:
        assert exports.log_cursor(session, RUN) is not None
        assert exports.log_cursor(session, "other".ljust(32, "0")) is None


def test_a_job_that_prints_without_end_keeps_no_other_from_being_copied(world: World) -> None:
    world.exporter = world.replica("one", calls_per_pass=1)
    world.launch()
    with world.database.write() as session:
        jobs.create(session, new_job("other"), NOW)
    for number in range(4):
        world.print(0, number, f"line {number}", at=number)
        world.exporter.export_some()
    with world.database.read() as session:
        assert exports.log_cursor(session, "other".ljust(32, "0")) is not None
    assert len(world.sink.texts(0)) == 4


def test_a_cursor_is_read_as_it_was_stored() -> None:
    cursor = Cursor(3, {NodeId("i-0"): 7}, frozenset({NodeId("i-1")}))
    assert cursor_of(text_of(cursor)) == cursor


async def test_a_server_that_stops_leaves_the_export_to_another_one_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, stop = asyncio.Event(), asyncio.Event()
    loop, put_lines = asyncio.get_running_loop(), world.sink.put_lines

    def put_and_report(stream: str, batch: Sequence[BatchLine]) -> int:
        loop.call_soon_threadsafe(sent.set)
        return put_lines(stream, batch)

    monkeypatch.setattr(world.sink, "put_lines", put_and_report)
    world.launch()
    world.print(0, 0, "a")
    running = asyncio.create_task(world.exporter.run(stop))
    await sent.wait()
    stop.set()
    await running
    world.print(0, 1, "b", at=5)
    world.replica("two").export_some()
    assert world.sink.texts(0) == ["a", "b"]
