"""The export sends each event to the sink at least once. The events of one job arrive in order.

In the tests, servers die and the sink refuses events.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from control_plane.cloud.errors import AccessDenied, CloudError, CloudUnavailable
from control_plane.cloud.sinks import ENTRIES_AT_ONCE, MAX_ENTRY_BYTES, SinkEntry
from control_plane.db import events, exports
from control_plane.db.errors import StaleLease
from control_plane.db.events import NewEvent
from control_plane.db.leases import Leaser
from control_plane.loop import exporter
from control_plane.loop.duty_watch import BEGAN, ENDED
from control_plane.loop.exporter import EXPORT_POLL_SECONDS, MOST_RETRY_SECONDS, EventExporter
from tests import sqlite
from tests.unit.control_plane.loop.test_repeating import Pauses

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
NAME = "arn:aws:events:us-east-1:123456789012:event-bus/ops"


class Sink:
    def __init__(self) -> None:
        self.taken: list[SinkEntry] = []
        self.calls: list[int] = []
        self.refusals: list[CloudError] = []
        self.is_partial = False
        self.dies = False

    def put(self, entries: Sequence[SinkEntry]) -> CloudError | None:
        self.calls.append(len(entries))
        if self.refusals:
            error = self.refusals.pop(0)
            if not self.is_partial:
                raise error
            self.taken += entries[1:]  # the sink refuses the first entry and accepts the others
            return error
        self.taken += entries
        if self.dies:
            raise KeyboardInterrupt
        return None

    @property
    def ids(self) -> list[int]:
        return [entry.event_id for entry in self.taken]


class World:
    def __init__(self, directory: Path) -> None:
        self.database = sqlite.migrated(directory / "test.db")
        self.seconds = 0.0
        self.sink = Sink()
        self.exporter = self.replica("one")
        self.exporter.export_some()

    def replica(self, owner: str) -> EventExporter:
        leaser = Leaser(owner, 9.0, lambda: self.seconds)
        return EventExporter(self.database, NAME, self.sink, leaser, lambda: NOW, uniform=lambda _, most: most)

    def tell(self, *jobs: str | None, message: str = "m", project: str = "p") -> None:
        with self.database.write() as session:
            for job in jobs:
                events.append(
                    session,
                    NewEvent(
                        at=NOW, type="JobStateChanged", message=message, project=project, job_name=job, detail={"n": 1}
                    ),
                )

    def export_all(self) -> None:
        while self.exporter.export_some():
            pass

    @property
    def record(self) -> exports.ExportRecord:
        with self.database.read() as session:
            return exports.get(session, NAME)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.database.close()


def test_what_happens_to_jobs_goes_out_once_and_nothing_else(world: World) -> None:
    world.tell("a", None, "b", "a", None)
    world.export_all()
    world.export_all()
    assert world.sink.ids == [1, 3, 4]
    assert world.record.position == 5
    first = world.sink.taken[0]
    assert (first.subject, first.type, first.at) == ("a", "JobStateChanged", NOW)
    assert json.loads(first.detail) == {
        "EventId": 1,
        "Time": "2026-03-01T12:00:00+00:00",
        "Type": "JobStateChanged",
        "Message": "m",
        "Project": "p",
        "TrainingJobName": "a",
        "Detail": {"n": 1},
    }


def test_a_duty_of_a_fleet_goes_out_and_other_events_of_it_do_not(world: World) -> None:
    with world.database.write() as session:
        for kind in ("NodeStateChanged", BEGAN, ENDED):
            events.append(session, NewEvent(at=NOW, type=kind, message="m", project="p", fleet_name="main", detail={}))
    world.export_all()
    assert world.sink.calls == [1, 1], "the events of one fleet arrive in order"
    assert [(entry.subject, entry.type) for entry in world.sink.taken] == [("main", BEGAN), ("main", ENDED)]


def test_what_happened_before_it_was_asked_for_stays_untold(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.tell("a")
    sink = Sink()
    late = EventExporter(world.database, "arn:another", sink, Leaser("one", 9.0, lambda: 0.0), lambda: NOW)
    late.export_some()
    world.tell("b")
    late.export_some()
    assert [entry.subject for entry in sink.taken] == ["b"]
    world.database.close()


def test_a_call_has_different_jobs_and_at_most_ten(world: World) -> None:
    world.tell("a", "b", "a", "a", *(f"job-{n}" for n in range(25)))
    world.export_all()
    assert world.sink.calls == [2, 1, 10, 10, 6]
    assert max(world.sink.calls) <= ENTRIES_AT_ONCE
    assert world.sink.ids == sorted(world.sink.ids)


def test_jobs_of_two_projects_with_the_same_name_are_different_jobs(world: World) -> None:
    for project in ("art", "speech", "art"):
        world.tell("gpt", project=project)
    world.export_all()
    assert world.sink.calls == [2, 1]


def test_what_is_refused_comes_again_before_anything_behind_it_and_is_shown(world: World) -> None:
    world.tell("a", "b")
    world.sink.refusals = [AccessDenied("PutEvents: not allowed", code="AccessDeniedException")] * 3
    waits = []
    for _ in range(3):
        assert not world.exporter.export_some()
        waits.append(world.exporter.pause_seconds())
    assert waits == [1.0, 2.0, 4.0]
    assert (world.record.position, world.record.failure, world.record.failing_since) == (
        0,
        "AccessDeniedException: PutEvents: not allowed",
        NOW,
    )
    world.tell("a")
    world.export_all()
    assert world.sink.ids == [1, 2, 3]
    assert (world.record.position, world.record.failure, world.record.failing_since) == (3, "", None)
    assert world.exporter.pause_seconds() == EXPORT_POLL_SECONDS


def test_waits_grow_to_a_limit(world: World) -> None:
    world.exporter.failure_count = 10_000
    assert world.exporter.pause_seconds() == MOST_RETRY_SECONDS


def test_a_wait_is_random_between_zero_and_its_limit(world: World) -> None:
    bounds = []

    def uniform(least: float, most: float) -> float:
        bounds.append((least, most))
        return 0.25

    leaser = Leaser("two", 9.0, lambda: 0.0)
    exporter = EventExporter(world.database, NAME, world.sink, leaser, lambda: NOW, uniform=uniform)
    exporter.failure_count = 3
    assert exporter.pause_seconds() == 0.25
    assert bounds == [(0.0, 4.0)]


def test_a_call_that_is_taken_in_part_is_repeated_whole_and_no_job_is_out_of_order(world: World) -> None:
    world.tell("a", "b", "a", "b")
    world.sink.is_partial, world.sink.refusals = True, [CloudUnavailable("PutEvents: one was not taken")]
    world.export_all()
    world.export_all()
    assert world.sink.ids == [2, 1, 2, 3, 4]
    for job in "ab":
        told = [entry.event_id for entry in world.sink.taken if entry.subject == job]
        assert [*dict.fromkeys(told)] == sorted(set(told))


def test_a_server_that_dies_after_sending_sends_again_and_another_one_goes_on(world: World) -> None:
    world.tell("a")
    world.sink.dies = True
    with pytest.raises(KeyboardInterrupt):
        world.exporter.export_some()
    world.sink.dies = False
    other = world.replica("two")
    assert not other.export_some()
    assert world.sink.ids == [1]  # the second server must wait, because the first server's lease may still be valid
    world.seconds += 10
    other.export_some()
    assert world.sink.ids == [1, 1]
    assert world.record.position == 1


def test_who_lost_the_lease_stores_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.tell("a")
    other, put = world.replica("two"), world.sink.put

    def put_slowly(entries: Sequence[SinkEntry]) -> CloudError | None:
        monkeypatch.setattr(world.sink, "put", put)
        other.export_some()
        world.seconds += 10
        other.export_some()
        return None

    monkeypatch.setattr(world.sink, "put", put_slowly)
    with pytest.raises(StaleLease):
        world.exporter.export_some()
    assert world.record.position == 1
    assert world.sink.ids == [1]


def test_an_event_that_is_too_long_is_cut_and_holds_nothing_up(world: World) -> None:
    world.tell("a", message="ü" * MAX_ENTRY_BYTES)
    world.export_all()
    (entry,) = world.sink.taken
    assert len(entry.detail.encode()) <= MAX_ENTRY_BYTES
    assert json.loads(entry.detail)["IsCut"] is True


async def test_it_goes_on_at_once_while_there_is_more_and_rests_longer_the_longer_it_fails(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "pause", pauses := Pauses(5))
    world.tell("a", "a")
    passes: list[object] = [None, None, None, ZeroDivisionError(), ZeroDivisionError(), StaleLease("export", NAME)]
    export_some = world.exporter.export_some

    def next_pass() -> bool:
        error = passes.pop(0)
        if isinstance(error, Exception):
            raise error
        return export_some()

    monkeypatch.setattr(world.exporter, "export_some", next_pass)
    await world.exporter.run(asyncio.Event())
    assert world.sink.ids == [1, 2]
    assert pauses.seconds == [EXPORT_POLL_SECONDS, EXPORT_POLL_SECONDS, 1.0, 2.0, 2.0]


async def test_a_server_that_stops_leaves_the_export_to_another_one_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, sent = asyncio.Event(), asyncio.Event()
    loop, put = asyncio.get_running_loop(), world.sink.put

    def put_and_report(entries: Sequence[SinkEntry]) -> CloudError | None:
        loop.call_soon_threadsafe(sent.set)
        return put(entries)

    monkeypatch.setattr(world.sink, "put", put_and_report)
    world.tell("a")
    running = asyncio.create_task(world.exporter.run(stop))
    await sent.wait()
    stop.set()
    await running
    world.tell("b")
    world.replica("two").export_some()
    assert [entry.subject for entry in world.sink.taken] == ["a", "b"]
