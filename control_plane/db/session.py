"""The database engine and its transactions: SQLite for servers on one machine, PostgreSQL for several machines.

Only one write transaction runs at a time (on PostgreSQL under an advisory lock), so the rows that it reads stay
unchanged until its commit. Readers see new rows in the order of their ids.

Invariant: a transaction is short and stays in its thread, which sends no requests meanwhile. Code on the event loop
runs transactions in threads.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy import ColumnElement, Connection, CursorResult, Engine, Result, Row, create_engine, event, func, select
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import Session

from control_plane.db.disk_watch import DiskWatch
from control_plane.db.errors import DanglingReferences
from control_plane.db.models import Base
from everstep.host.loopback import is_this_machine

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

BUSY_TIMEOUT_MILLISECONDS = 5_000
"""Longest wait for another write transaction. Normal transactions take milliseconds."""

SILENCE_MILLISECONDS = 10_000
"""Silence, of idle transactions or unacknowledged traffic, after which PostgreSQL closes a server's connection and
frees its lock.
"""
WRITER_LOCK = 0x45560001
"""Advisory lock of each write transaction on PostgreSQL. No other lock of the database may use this number."""
_ESCAPED_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")
POSTGRESQL: Final[dict[str, str | int]] = {
    "application_name": "everstep",
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": SILENCE_MILLISECONDS,
    "options": f"-c lock_timeout={BUSY_TIMEOUT_MILLISECONDS} -c "
    f"idle_in_transaction_session_timeout={SILENCE_MILLISECONDS} "
    f"-c tcp_user_timeout={SILENCE_MILLISECONDS} -c statement_timeout=30000",
}
"""Defaults for libpq. Parameters in the URL take precedence."""

R = TypeVar("R", bound="DataclassInstance")


class Database:
    """One database, with read and write transactions.

    `url` is for example `sqlite:////var/lib/everstep/everstep.db` or
    `postgresql://everstep@database.internal/everstep`. Raises ArgumentError if the URL is invalid, or its driver is not
    installed.
    """

    def __init__(self, url: str) -> None:
        self.url = _read(url)
        self.engine: Engine
        if self.is_sqlite:
            self.engine = create_engine(self.url)
            _make_sqlite_strict(self.engine)
        else:
            self.engine = _postgresql(self.url)
        self.disk = DiskWatch(_place(self.url), is_here=_directory(self.url) is not None)
        """Detects full disks."""
        self._commits = itertools.count(1)
        self.commit_number = 0
        """Changes with each commit of this process."""
        self._reading, self._writing = self.engine, self.engine.execution_options(everstep_writes=True)
        if not self.is_sqlite:  # The isolation level is explicit, because the database's default may differ.
            self._reading = self._reading.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
            # READ COMMITTED: a write transaction first waits for the writers' advisory lock, and then sees all earlier
            # commits.
            self._writing = self._writing.execution_options(isolation_level="READ COMMITTED")

    @property
    def is_sqlite(self) -> bool:
        """Whether the database is SQLite."""
        return self.url.get_backend_name() == "sqlite"

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Yield a read-only session, whose queries all see the same state of the database."""
        with Session(self._reading, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """Yield the session of the only write transaction.

        It commits at the end of the block, and rolls back after an exception.
        """
        try:
            with Session(self._writing, expire_on_commit=False) as session, session.begin():
                yield session
        except Exception as error:
            self.disk.failed(error)
            raise
        self.disk.stored()
        self.commit_number = next(self._commits)

    @contextmanager
    def migrating(self) -> Iterator[Connection]:
        """Yield a connection for a migration, in the only write transaction, which commits at the end of the block.

        A statement waits at most `BUSY_TIMEOUT_MILLISECONDS` for a lock; a longer wait would delay connections that
        queue behind it. On SQLite, the block does not enforce foreign keys: Alembic replaces a table to change it,
        which would delete children. Raises DanglingReferences, and writes nothing, if a foreign key names no row at the
        end.
        """
        with self._writing.connect() as connection:
            # Switch foreign keys off before the transaction, because SQLite ignores this pragma within one.
            if self.is_sqlite:
                connection.connection.cursor().execute("PRAGMA foreign_keys=OFF")
            try:
                with connection.begin():
                    if not self.is_sqlite:
                        connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
                        connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
                    yield connection
                    if self.is_sqlite:
                        _refuse_dangling(connection)
            finally:
                if self.is_sqlite:
                    connection.connection.cursor().execute("PRAGMA foreign_keys=ON")

    def close(self) -> None:
        """Close all connections to the database."""
        self.engine.dispose()


def _refuse_dangling(connection: Connection) -> None:
    dangling = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
    if dangling:
        tables = ", ".join(sorted({str(row[0]) for row in dangling}))
        raise DanglingReferences(f"{len(dangling)} rows of the tables {tables} refer to rows that do not exist")


def record_of(row: Base | Row[*tuple[Any, ...]], kind: type[R]) -> R:
    """Convert a row to a frozen dataclass with the same fields."""
    return kind(**columns_of(row, kind))


def columns_for(
    table: type[Base], kind: type[DataclassInstance], leave_out: tuple[str, ...] = ()
) -> tuple[ColumnElement[Any], ...]:
    """Return the columns for the fields of a dataclass, in their order, for a SELECT.

    `leave_out` has fields without a column. Reading columns takes half as long as reading objects of `models`. Such a
    SELECT does not write changed objects of its session first, so code that changes objects must call `flush`.
    """
    return tuple(table.__table__.c[name] for name in _names(kind) if name not in leave_out)


def columns_of(
    row: Base | Row[*tuple[Any, ...]], kind: type[DataclassInstance], leave_out: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the columns for the fields of a dataclass, without `leave_out`, whose columns the caller converts."""
    names, read = _reader(kind, leave_out)
    return dict(zip(names, read(row), strict=True))


@functools.cache
def _reader(
    kind: type[DataclassInstance], leave_out: tuple[str, ...]
) -> tuple[tuple[str, ...], Callable[[object], tuple[Any, ...]]]:
    """Return the names of a dataclass's fields, and a function that reads attributes with these names."""
    names = tuple(name for name in _names(kind) if name not in leave_out)
    return names, attrgetter(*names)


@functools.cache
def _names(kind: type[DataclassInstance]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def values_of(record: DataclassInstance, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a dataclass's fields without `leave_out` as column values. The inverse of `record_of`."""
    found = {name: getattr(record, name) for name in _names(type(record)) if name not in leave_out}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in found.items()}


def equal_to(table: type[Base], **values: object) -> list[ColumnElement[bool]]:
    """Return the conditions that columns have these values. None is no condition."""
    return [table.__table__.c[name] == value for name, value in values.items() if value is not None]


def changed_rows(result: Result[Any]) -> int:
    """Return the number of rows that an UPDATE or DELETE matched."""
    assert isinstance(result, CursorResult)
    return int(result.rowcount)


def _read(url: str) -> URL:
    try:
        found = make_url(url)
    except ValueError as error:  # SQLAlchemy raises ValueError if, for example, the port is not a number.
        raise ArgumentError(f"the database URL cannot be read: {error}") from error
    match found.get_backend_name():
        case "sqlite":
            return found
        case "postgresql":
            return found.set(drivername="postgresql+psycopg")
        case other:
            raise ArgumentError(f"the database URL begins with {other!r}; Everstep supports sqlite and postgresql")


def _directory(url: URL) -> Path | None:
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        return None
    return Path(url.database).absolute().parent


def _place(url: URL) -> str:
    """Describe the database's location for users, without its password."""
    directory = _directory(url)
    return (
        str(directory)
        if directory is not None
        else f"the {url.get_backend_name()} database {url.database} at {url.host or 'this machine'}"
    )


def postgresql_arguments(url: URL) -> dict[str, str | int]:
    """Return the libpq parameters that the URL does not set. Connections to other machines require TLS."""
    others = url.query.get("host", ())
    hosts = [url.host or "", *([others] if isinstance(others, str) else others)]
    is_here = all(host == "" or host.startswith("/") or is_this_machine(host) for host in hosts)
    arguments = {**POSTGRESQL, **({} if is_here else {"sslmode": "require"})}
    return {name: value for name, value in arguments.items() if name not in url.query}


def _postgresql(url: URL) -> Engine:
    """Return an engine for PostgreSQL whose write transactions acquire the advisory lock."""
    try:
        engine = create_engine(
            url, pool_pre_ping=True, connect_args=postgresql_arguments(url), json_serializer=_plain_json
        )
    except ModuleNotFoundError as error:
        raise ArgumentError("PostgreSQL's driver is not installed: pip install 'everstep[postgres]'") from error

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        if connection.get_execution_options().get("everstep_writes", False):
            connection.execute(select(func.pg_advisory_xact_lock(WRITER_LOCK)))

    return engine


def _plain_json(value: Any) -> str:
    """Encode a value as JSON, without NUL characters: PostgreSQL stores them, but its JSON operators fail on them."""
    return _ESCAPED_NUL.sub(r"\1\\ufffd", json.dumps(value))


def _make_sqlite_strict(engine: Engine) -> None:
    """Configure SQLite for full durability and explicit transactions."""

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        # Disable the driver's own transactions, which would begin only before the first write. The listener below
        # begins each transaction explicitly.
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            "foreign_keys=ON",
            f"busy_timeout={BUSY_TIMEOUT_MILLISECONDS}",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # In SQLite, a transaction that reads before it writes cannot wait for another writer and fails. Write
        # transactions therefore acquire the lock at their start.
        if connection.get_execution_options().get("everstep_writes", False):
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            # Call the driver, because SQLAlchemy's own call takes ten times as long, and every read begins with it.
            connection.connection.cursor().execute("BEGIN")
