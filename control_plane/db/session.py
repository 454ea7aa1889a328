"""The engine and its transactions.

    SQLite        serves replicas on one machine
    PostgreSQL    serves replicas anywhere (`everstep[postgres]`)

What a writer reads is true until it commits, on either: SQLite has one writer at a time, and PostgreSQL is made to have
one by a lock that is held from the transaction's beginning to its end. What looks first and writes then needs nothing
more, wherever its twin runs; ids become visible in order.

Invariant: a transaction is short and stays in its thread; nothing outside the database is called while one is open. The
asyncio shell reaches it from threads.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy import Connection, CursorResult, Engine, Result, Row, create_engine, event, func, select
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import Session

from control_plane.db.disk_watch import DiskWatch
from control_plane.db.models import Base
from everstep.protocol.loopback import is_this_machine

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

BUSY_TIMEOUT_MILLISECONDS = 5_000
"""A writer waits this long for another one: transactions take milliseconds, so this is an emergency."""

SILENCE_MILLISECONDS = 10_000
"""A replica that PostgreSQL has not heard of for so long, in a transaction or on the network, is taken for dead: others can write again."""
WRITER_LOCK = 0x45560001
"""PostgreSQL's number of the lock that a writer holds; of this database alone."""
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
"""How libpq connects, unless the URL says otherwise."""

R = TypeVar("R", bound="DataclassInstance")


class Database:
    """One database and the two ways into it.

    Args:
        url: SQLAlchemy's URL, for instance `sqlite:////var/lib/everstep/everstep.db` or
            `postgresql://everstep@database.internal/everstep`.

    Raises:
        ArgumentError: it is none, or its driver is not installed.
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
        """Notices when a transaction cannot be stored for lack of space."""
        self._commits = itertools.count(1)
        self.commit_number = 0
        """Another one after every commit of this process."""
        self._reading, self._writing = self.engine, self.engine.execution_options(everstep_writes=True)
        if not self.is_sqlite:  # whatever the database's own default is
            self._reading = self._reading.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
            self._writing = self._writing.execution_options(
                isolation_level="READ COMMITTED"
            )  # what was committed before the lock was had is seen

    @property
    def is_sqlite(self) -> bool:
        """Whether it is a file of this machine, which has one writer and shows every commit of anybody."""
        return self.url.get_backend_name() == "sqlite"

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Yield a session that sees one consistent state and writes nothing."""
        with Session(self._reading, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """Yield a session that is committed when the block ends and rolled back when it raises; meanwhile nobody else writes, in any replica."""
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
        """Yield a connection that is committed when the block ends; of two replicas that migrate, one waits for the other."""
        with self._writing.begin() as connection:
            yield connection

    def create_tables(self) -> None:
        """Create every table at once, without migrations; for tests of what stands on the tables."""
        Base.metadata.create_all(self.engine)

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def record_of(row: Base, kind: type[R]) -> R:
    """Return a frozen dataclass with the row's columns of the same names."""
    return kind(**columns_of(row, kind))


def columns_of(
    row: Base | Row[*tuple[Any, ...]], kind: type[DataclassInstance], leave_out: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the row's columns that have the names of a dataclass's fields, without those to be converted by hand."""
    return {field.name: getattr(row, field.name) for field in fields(kind) if field.name not in leave_out}


def values_of(record: DataclassInstance, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a frozen dataclass as the columns of a new row, without those to be converted by hand; the way back is `record_of`."""
    found = {field.name: getattr(record, field.name) for field in fields(record) if field.name not in leave_out}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in found.items()}


def changed_rows(result: Result[Any]) -> int:
    """Return how many rows an UPDATE or DELETE found."""
    assert isinstance(result, CursorResult)
    return int(result.rowcount)


def _read(url: str) -> URL:
    """Return a URL with the driver that is ours."""
    try:
        found = make_url(url)
    except ValueError as error:  # of a port that is no number
        raise ArgumentError(f"the database URL cannot be read: {error}") from error
    match found.get_backend_name():
        case "sqlite":
            return found
        case "postgresql":
            return found.set(drivername="postgresql+psycopg")
        case other:
            raise ArgumentError(
                f"the database URL begins with {other!r}: Everstep keeps what it knows in sqlite or postgresql"
            )


def _directory(url: URL) -> Path | None:
    """Return the directory of SQLite's file; None for PostgreSQL and for a database in memory."""
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        return None
    return Path(url.database).absolute().parent


def _place(url: URL) -> str:
    """Return where the database's disk is, for people; never its password."""
    directory = _directory(url)
    return (
        str(directory)
        if directory is not None
        else f"the {url.get_backend_name()} database {url.database} at {url.host or 'this machine'}"
    )


def postgresql_arguments(url: URL) -> dict[str, str | int]:
    """Return how libpq connects besides what the URL says, which wins. What goes over a network is encrypted."""
    others = url.query.get("host", ())
    hosts = [url.host or "", *([others] if isinstance(others, str) else others)]
    is_here = all(host == "" or host.startswith("/") or is_this_machine(host) for host in hosts)
    arguments = {**POSTGRESQL, **({} if is_here else {"sslmode": "require"})}
    return {name: value for name, value in arguments.items() if name not in url.query}


def _postgresql(url: URL) -> Engine:
    """Return an engine whose writers wait for each other."""
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
    """Return JSON without NUL (`models.PlainText`): PostgreSQL takes it, and then refuses to look into the value."""
    return _ESCAPED_NUL.sub(r"\1\\ufffd", json.dumps(value))


def _make_sqlite_strict(engine: Engine) -> None:
    """Give SQLite write-ahead logging, real durability, foreign keys and transactions that begin when they are told to."""

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # the driver would begin transactions of its own, and only before a write
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
        # A transaction that reads first and writes later cannot wait for another writer; one that will write takes the
        # lock at once.
        writes = connection.get_execution_options().get("everstep_writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
