from __future__ import annotations

import contextlib
import sys
import threading
from datetime import UTC, datetime, timedelta, timezone

import pytest
from sqlalchemy import select, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, InternalError, OperationalError, StatementError

from control_plane.db import events, jobs
from control_plane.db import session as session_module
from control_plane.db.events import NewEvent
from control_plane.db.models import CheckpointRow, EventRow, JobRow
from control_plane.db.session import Database, postgresql_arguments
from tests.postgresql import PostgreSql
from tests.unit.control_plane.db.conftest import NOW, new_job


@pytest.mark.parametrize("engine", ["sqlite"])
def test_sqlite_is_durable_and_strict(database):
    """Everstep opens SQLite with durable and strict settings.

    The test reads the settings of the driver's connection, because `sqlite_without_fsync` of tests/conftest.py changes
    those of SQLAlchemy.
    """
    with (
        contextlib.closing(Database(str(database.url))) as made,
        contextlib.closing(made.engine.raw_connection()) as connection,
    ):
        settings = {
            name: connection.cursor().execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
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
        assert session.query(EventRow).count() == 0


def test_foreign_keys_hold(database):
    with pytest.raises(IntegrityError), database.write() as session:
        session.add(
            CheckpointRow(
                run_id="nobody",
                generation=1,
                step=1,
                state="complete",
                bucket="b",
                manifest_key="k",
                object_bytes=0,
                created_at=NOW,
            )
        )


def test_two_writers_that_read_first_wait_for_each_other(database):
    """A second writer waits until the first one commits.

    In a deferred transaction, the second writer would fail at its first write, because its snapshot is outdated by
    then.
    """
    has_read, may_go = threading.Event(), threading.Event()
    failures: list[Exception] = []

    def first() -> None:
        with database.write() as session:
            session.query(EventRow).count()
            has_read.set()
            may_go.wait(10)
            events.append(session, NewEvent(at=NOW, type="first", message="m"))

    def second() -> None:
        try:
            with database.write() as session:
                count = session.query(EventRow).count()
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


@pytest.mark.parametrize(
    "url",
    [
        "",
        "everstep.db",
        "mysql://database/everstep",
        "postgresql://database:port/everstep",
        "postgresql://[::1/everstep",
    ],
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ArgumentError):
        Database(url)


@pytest.mark.parametrize("engine", ["postgresql"])
def test_ids_become_visible_in_order_while_four_write(database: Database) -> None:
    """Event ids become visible in ascending order, although four writers commit at the same time.

    A reader continues after the highest id that it has read. If a lower id became visible later, the reader would miss
    it. Ids that are missing because of a rolled-back transaction do no harm.
    """
    each, writers = 60, 4
    start = threading.Barrier(writers + 1)

    def write(writer: int) -> None:
        start.wait(10)
        for number in range(each):
            with contextlib.suppress(ZeroDivisionError), database.write() as session:
                events.append(session, NewEvent(at=NOW, type=f"{writer}", message=str(number)))
                session.flush()
                session.query(EventRow).count()
                if number % 7 == 3:
                    raise ZeroDivisionError

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(writers)]
    for thread in threads:
        thread.start()
    start.wait(10)
    seen: list[tuple[str, int]] = []
    position = 0
    while True:
        is_over = not any(thread.is_alive() for thread in threads)
        with database.read() as session:
            found = events.page(session, events.EventFilter(after_id=position), limit=1_000)
        seen += [(event.type, int(event.message)) for event in found]
        position = found[-1].id if found else position
        if is_over:
            break
    kept = [number for number in range(each) if number % 7 != 3]
    assert sorted(seen) == sorted((str(writer), number) for writer in range(writers) for number in kept)


def test_a_reader_sees_one_state_whatever_is_committed_meanwhile(database: Database) -> None:
    with database.read() as session:
        before = events.newest_id(session)
        with database.write() as other:
            events.append(other, NewEvent(at=NOW, type="T", message="m"))
        assert events.newest_id(session) == before
    with database.read() as session:
        assert events.newest_id(session) > before


@pytest.mark.parametrize("engine", ["postgresql"])
def test_how_transactions_see_each_other_is_no_matter_of_the_databases_settings(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transactions set their own isolation levels, whatever the database's default is.

    With a stricter default, a writer would read the state from before it acquired the lock.
    """
    monkeypatch.setitem(session_module.POSTGRESQL, "options", "-c default_transaction_isolation=serializable")
    elsewhere = Database(str(database.url))
    isolation = text("SHOW transaction_isolation")
    with elsewhere.read() as session:
        assert session.scalar(isolation) == "repeatable read"
    with elsewhere.write() as session:
        assert session.scalar(isolation) == "read committed"
    elsewhere.close()


@pytest.mark.parametrize("engine", ["postgresql"])
def test_a_reader_cannot_write(database: Database) -> None:
    with database.read() as session:
        events.append(session, NewEvent(at=NOW, type="T", message="m"))
        with pytest.raises(InternalError, match="read-only"):
            session.flush()


@pytest.mark.parametrize("engine", ["postgresql"])
def test_a_writer_that_says_nothing_more_is_given_up_and_stores_nothing(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server freezes in a transaction. The database aborts the transaction, so that other servers can write."""
    monkeypatch.setitem(
        session_module.POSTGRESQL, "options", "-c idle_in_transaction_session_timeout=2000 -c lock_timeout=20000"
    )
    silent = Database(str(database.url))

    def stand_still() -> None:
        with silent.write() as session:
            events.append(session, NewEvent(at=NOW, type="lost", message="m"))
            session.flush()
            say(database, "kept")  # this write waits until the database aborts the first transaction

    with pytest.raises(DBAPIError, match="idle-in-transaction"):
        stand_still()
    silent.close()
    assert said(database) == ["kept"]


@pytest.mark.parametrize("engine", ["postgresql"])
def test_a_writer_does_not_wait_for_ever(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(session_module.POSTGRESQL, "options", "-c lock_timeout=50")
    other = Database(str(database.url))
    with database.write() as session:
        events.newest_id(session)
        with pytest.raises(OperationalError, match="lock timeout"):
            say(other, "T")
    other.close()


@pytest.mark.parametrize("engine", ["postgresql"])
def test_connections_that_were_cut_are_made_again(database: Database, postgresql: PostgreSql) -> None:
    """After a fail-over cuts all connections, the running transaction fails and stores nothing.

    The next transaction opens a new connection.
    """

    def be_cut() -> None:
        with database.write() as session:
            events.append(session, NewEvent(at=NOW, type="lost", message="m"))
            session.flush()
            assert postgresql.cut(str(database.url)) == 1

    with pytest.raises(OperationalError):
        be_cut()
    say(database, "kept")
    assert postgresql.cut(str(database.url)) == 1
    assert said(database) == ["kept"]


def test_what_ranks_print_can_be_stored_whatever_it_is(database: Database) -> None:
    """The database accepts any text that ranks print.

    A job's reason contains the last lines of a failed rank. If the database rejected them, the pass would fail and
    repeat forever.
    """
    with database.write() as session:
        tags = {"a": "1\x00", "b": "\\u0000"}
        jobs.create(session, new_job(reason="x" * 5_000 + "\x00\x1b", tags=tags), NOW)
    with database.read() as session:
        job = jobs.get(session, "gpt")
        assert session.scalar(select(JobRow.name).where(JobRow.tags["b"].as_string() == tags["b"])) == "gpt"
    assert job.reason == "x" * 5_000 + "\ufffd\x1b"
    assert job.tags["b"] == tags["b"]


def say(database: Database, kind: str) -> None:
    with database.write() as session:
        events.append(session, NewEvent(at=NOW, type=kind, message="m"))


def said(database: Database) -> list[str]:
    with database.read() as session:
        return [event.type for event in events.page(session, events.EventFilter(), limit=99)]


@pytest.mark.parametrize(
    ("url", "mode"),
    [
        ("postgresql://everstep@database.internal/everstep", "require"),
        ("postgresql://everstep@/everstep?host=10.0.0.7&host=10.0.0.8", "require"),
        ("postgresql://everstep@database.internal/everstep?sslmode=verify-full", None),
        ("postgresql://everstep@127.0.0.1/everstep", None),
        ("postgresql://everstep@/everstep?host=/run/postgresql", None),
    ],
)
def test_what_goes_over_a_network_is_encrypted_unless_the_url_says_otherwise(url: str, mode: str | None) -> None:
    assert postgresql_arguments(make_url(url)).get("sslmode") == mode


def test_a_driver_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ArgumentError, match=r"pip install 'everstep\[postgres\]'"):
        Database("postgresql://everstep@127.0.0.1/everstep")
