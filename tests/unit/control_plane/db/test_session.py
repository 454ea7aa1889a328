from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta, timezone
from typing import ClassVar

import pytest
from sqlalchemy import text
from sqlalchemy.dialects import postgresql
from sqlalchemy.event import listen, remove
from sqlalchemy.exc import ArgumentError, IntegrityError, StatementError
from sqlalchemy.orm import Session

from control_plane.db import events
from control_plane.db.events import NewEvent
from control_plane.db.models import Checkpoint, Event, Quota
from control_plane.db.session import Database
from tests.unit.control_plane.db.conftest import NOW


def test_sqlite_is_durable_and_strict(database):
    with database.read() as session:
        settings = {
            name: session.execute(text(f"PRAGMA {name}")).scalar() for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert settings == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 5000}


def test_times_come_back_in_utc_whatever_zone_they_went_in_with(database):
    there = datetime(2026, 3, 1, 14, tzinfo=timezone(timedelta(hours=2)))
    with database.write() as session:
        events.append(session, NewEvent(at=there, type="T", message="m"))
    with database.read() as session:
        (event,) = events.page(session, events.EventFilter(), limit=10)
    assert event.at == there
    assert event.at.tzinfo is UTC


def test_a_time_without_a_zone_is_refused(database):
    with pytest.raises(StatementError, match="without a time zone"), database.write() as session:
        events.append(session, NewEvent(at=datetime(2026, 3, 1, 12), type="T", message="m"))  # noqa: DTZ001


def test_a_write_that_raises_leaves_nothing(database):
    def write_and_fail() -> None:
        with database.write() as session:
            events.append(session, NewEvent(at=NOW, type="T", message="m"))
            raise RuntimeError("changed my mind")

    with pytest.raises(RuntimeError, match="mind"):
        write_and_fail()
    with database.read() as session:
        assert session.query(Event).count() == 0


def test_foreign_keys_hold(database):
    with pytest.raises(IntegrityError), database.write() as session:
        session.add(Checkpoint(run_id="nobody", generation=1, step=1, state="complete", bucket="b", manifest_key="k", object_bytes=0, created_at=NOW))


def test_two_writers_that_read_first_wait_for_each_other(database):
    """With a deferred transaction the second would fail at once: its view is old by the time it wants to write."""
    has_read, may_go = threading.Event(), threading.Event()
    failures: list[Exception] = []

    def first() -> None:
        with database.write() as session:
            session.query(Event).count()
            has_read.set()
            may_go.wait(10)
            events.append(session, NewEvent(at=NOW, type="first", message="m"))

    def second() -> None:
        try:
            with database.write() as session:
                count = session.query(Event).count()
                events.append(session, NewEvent(at=NOW, type="second", message=str(count)))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=first)]
    threads[0].start()
    assert has_read.wait(10)
    threads.append(threading.Thread(target=second))
    threads[1].start()
    may_go.set()
    for thread in threads:
        thread.join(20)
    assert failures == []
    with database.read() as session:
        found = events.page(session, events.EventFilter(), limit=10)
    assert [(event.type, event.message) for event in found] == [("first", "m"), ("second", "1")]


@pytest.mark.parametrize("url", ["", "everstep.db", "postgresql://database:port/everstep", "postgresql://[::1/everstep"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ArgumentError):
        Database(url)


def test_events_are_the_last_thing_that_a_transaction_writes_and_elsewhere_under_a_lock(database, monkeypatch):
    """A reader goes on from the last id that it saw: ids have to become visible in order."""
    said: list[str] = []
    monkeypatch.setattr(events, "_queue_up", lambda session, dialect: said.append(f"queue up in {dialect}"))

    def note(session, _context):
        said.extend(type(row).__name__ for row in session.new)

    listen(Session, "after_flush", note)
    try:
        with database.write() as session:
            events.append(session, NewEvent(at=NOW, type="first", message="m"))
            session.add(Quota(project="p", max_node_count=1, max_job_count=None))
            events.append(session, NewEvent(at=NOW, type="second", message="m"))
    finally:
        remove(Session, "after_flush", note)
    assert said == ["Quota", "queue up in sqlite", "Event", "Event"]
    with database.read() as session:
        found = events.page(session, events.EventFilter(), limit=9)
    assert [event.type for event in found] == ["first", "second"]


def test_only_a_database_with_several_writers_needs_the_lock():
    class Session:
        said: ClassVar[list[str]] = []

        def execute(self, statement):
            self.said.append(str(statement.compile(dialect=postgresql.dialect())))

    for dialect in ("sqlite", "postgresql"):
        events._queue_up(Session(), dialect)
    assert len(Session.said) == 1
    assert "pg_advisory_xact_lock" in Session.said[0]
