"""The engine and its transactions.

Invariant: a transaction is short and stays in its thread; nothing outside the database is called while one is open. The asyncio shell reaches
it through `asyncio.to_thread`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Connection, CursorResult, Engine, Result, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import Session

from control_plane.db.models import Base

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

BUSY_TIMEOUT_MILLISECONDS = 5_000
"""A writer waits this long for another one: transactions take milliseconds, so this is an emergency."""

R = TypeVar("R", bound="DataclassInstance")


class Database:
    """One database and the two ways into it.

    Args:
        url: SQLAlchemy's URL, for instance `sqlite:////var/lib/everstep/everstep.db`.

    Raises:
        ArgumentError: it is none.
    """

    def __init__(self, url: str) -> None:
        try:
            self.url = make_url(url)
        except ValueError as error:  # of a port that is no number
            raise ArgumentError(f"the database URL cannot be read: {error}") from error
        self.engine: Engine = create_engine(self.url, pool_pre_ping=self.url.get_backend_name() != "sqlite")
        if self.url.get_backend_name() == "sqlite":
            _make_sqlite_strict(self.engine)
        self._commits = itertools.count(1)
        self.commit_number = 0
        """Another one after every commit of this process."""
        self._writing = self.engine.execution_options(everstep_writes=True)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Yield a session that sees one consistent state and writes nothing."""
        with Session(self.engine, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """Yield a session that is committed when the block ends and rolled back when it raises."""
        with Session(self._writing, expire_on_commit=False) as session, session.begin():
            yield session
        self.commit_number = next(self._commits)

    def create_tables(self) -> None:
        """Create every table at once, without migrations; for tests of what stands on the tables."""
        Base.metadata.create_all(self.engine)

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def record_of(row: Base, kind: type[R]) -> R:
    """Return a frozen dataclass with the row's columns of the same names."""
    return kind(**columns_of(row, kind))


def columns_of(row: Base, kind: type[DataclassInstance], leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
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


def _make_sqlite_strict(engine: Engine) -> None:
    """Give SQLite write-ahead logging, real durability, foreign keys and transactions that begin when they are told to."""

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # the driver would begin transactions of its own, and only before a write
        cursor = connection.cursor()
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", f"busy_timeout={BUSY_TIMEOUT_MILLISECONDS}"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that reads first and writes later cannot wait for another writer; one that will write takes the lock at once.
        writes = connection.get_execution_options().get("everstep_writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
