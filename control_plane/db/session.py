"""The database engine and its transactions.

    SQLite        for control-plane servers on one machine
    PostgreSQL    for control-plane servers on several machines (`everstep[postgres]`)

Only one write transaction runs at a time, so the rows that it reads stay unchanged until its commit. SQLite has a
single writer by design. On PostgreSQL, each write transaction holds an advisory lock from its start to its end. Code
that checks rows before it writes therefore needs no further locks. Readers see new rows in the order of their ids.

Invariant: a transaction is short and stays in its thread. While a transaction is open, its thread sends no requests to
AWS, to agents or to other servers. Code on the event loop runs transactions in threads.
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
"""Time that a write transaction waits for another one before it fails. Normal transactions take milliseconds."""

SILENCE_MILLISECONDS = 10_000
"""Time without traffic after which PostgreSQL closes the connection of a control-plane server.

The limit applies to idle transactions and to unacknowledged network traffic. The closed connection also releases the
lock of a write transaction.
"""
WRITER_LOCK = 0x45560001
"""Number of the PostgreSQL advisory lock that each write transaction holds.

No other lock of the database may use this number.
"""
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
"""Default connection parameters for libpq. Parameters in the URL take precedence."""

R = TypeVar("R", bound="DataclassInstance")


class Database:
    """One database, with read and write transactions.

    Args:
        url: SQLAlchemy URL, for example `sqlite:////var/lib/everstep/everstep.db` or
            `postgresql://everstep@database.internal/everstep`.

    Raises:
        ArgumentError: the URL is invalid, or its driver is not installed.
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
        """Detects transactions that fail for lack of disk space."""
        self._commits = itertools.count(1)
        self.commit_number = 0
        """A number that changes with each commit of this process."""
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
        """Yield a read-only session, in which all queries see the same state of the database."""
        with Session(self._reading, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """Yield a session that commits at the end of the block.

        After an exception, the session rolls back. No other write transaction of any control-plane server runs at the
        same time.
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
        """Yield a connection for a migration. The connection commits at the end of the block.

        No other write transaction or migration runs at the same time. A statement may run for any time, but it waits at
        most `BUSY_TIMEOUT_MILLISECONDS` for a lock of another connection. Then the migration fails. A longer wait would
        delay other connections, which queue behind the migration.

        On SQLite, the block does not enforce foreign keys: Alembic replaces a table to change it, and the replacement
        of a parent table would delete its children. The method checks all foreign keys before the commit.

        Yields:
            The connection, with an open write transaction.

        Raises:
            DanglingReferences: the block leaves a row whose foreign key names no row. Nothing was written.
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
    """Convert a row to a frozen dataclass with fields of the same names."""
    return kind(**columns_of(row, kind))


def columns_for(
    table: type[Base], kind: type[DataclassInstance], leave_out: tuple[str, ...] = ()
) -> tuple[ColumnElement[Any], ...]:
    """Return the columns of a table that contain the fields of a dataclass, for a SELECT.

    The background loops use such SELECTs, because reading the columns takes half as long as reading objects of
    `models`. A SELECT of columns does not write changed objects of its session first. Code that changes objects must
    therefore call `flush`.

    Args:
        table: class of `models`. Its table has a column for each field.
        kind: dataclass that `record_of` makes of the rows.
        leave_out: fields that no column contains.

    Returns:
        The columns, in the order of the fields.
    """
    return tuple(table.__table__.c[name] for name in _names(kind) if name not in leave_out)


def columns_of(
    row: Base | Row[*tuple[Any, ...]], kind: type[DataclassInstance], leave_out: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the columns of a table for the fields of a dataclass, in the order of the fields.

    The result excludes the fields in `leave_out`, because the caller converts their columns itself.
    """
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
    """Return a dataclass's fields as column values of a new row.

    The result excludes the fields in `leave_out`. The function is the inverse of `record_of`.
    """
    found = {name: getattr(record, name) for name in _names(type(record)) if name not in leave_out}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in found.items()}


def equal_to(table: type[Base], **values: object) -> list[ColumnElement[bool]]:
    """Return the conditions that columns of a table have these values. A column whose value is None is no condition."""
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
    """Return the libpq parameters that the URL does not set.

    Connections to other machines require TLS.
    """
    others = url.query.get("host", ())
    hosts = [url.host or "", *([others] if isinstance(others, str) else others)]
    is_here = all(host == "" or host.startswith("/") or is_this_machine(host) for host in hosts)
    arguments = {**POSTGRESQL, **({} if is_here else {"sslmode": "require"})}
    return {name: value for name, value in arguments.items() if name not in url.query}


def _postgresql(url: URL) -> Engine:
    """Return an engine for PostgreSQL. Its write transactions acquire the advisory lock, so only one runs at a time."""
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
    """Encode a value as JSON, with NUL characters replaced (see `models.PlainText`).

    PostgreSQL stores an escaped NUL in a JSON column, but its JSON operators fail on that value.
    """
    return _ESCAPED_NUL.sub(r"\1\\ufffd", json.dumps(value))


def _make_sqlite_strict(engine: Engine) -> None:
    """Configure SQLite for full durability and explicit transactions.

    This also enables the write-ahead log and foreign keys.
    """

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
