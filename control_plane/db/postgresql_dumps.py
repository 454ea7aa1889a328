"""Runs pg_dump and pg_restore for `backups`. No password appears among the arguments of a process.

A restore leaves out the row of `alembic_version`, so no server starts before `backups.finish` has written it.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from sqlalchemy.engine import URL

from control_plane.db.errors import BackupFailed, UnusableBackup
from control_plane.db.session import postgresql_arguments

MAGIC: Final = b"PGDMP"
"""First bytes of a dump in custom format. Source: pg_backup_archiver.c of PostgreSQL."""
_VERSION_ROW: Final = "TABLE DATA public alembic_version "
_TOOLS: Final = "install PostgreSQL's client programs of the server's version or a newer version, for example "
_MAX_WORDS: Final = 300
"""Characters of error output in an exception's message."""


def dump(url: URL, file: Path) -> None:
    """Write all tables and sequences to a file, in one consistent state. Servers may run meanwhile.

    Raises BackupFailed if pg_dump is missing or fails.
    """
    _run(["pg_dump", "--format=custom", "--no-owner", "--no-privileges", f"--file={file}", _target(url)], url)


def load(file: Path, url: URL) -> None:
    """Restore a dump in one transaction into a database without tables, without the row of `alembic_version`.

    Raises:
        UnusableBackup: the file is damaged.
        BackupFailed: pg_restore is missing or fails.
    """
    contents = _run(["pg_restore", "--list", str(file)], error=UnusableBackup).splitlines()
    with tempfile.NamedTemporaryFile("w", suffix=".list") as chosen:
        chosen.write("\n".join(line for line in contents if _VERSION_ROW not in line) + "\n")
        chosen.flush()
        options = ["--no-owner", "--no-privileges", "--single-transaction", "--exit-on-error"]
        _run(["pg_restore", *options, f"--use-list={chosen.name}", _target(url), str(file)], url)


def revision(file: Path) -> str | None:
    """Return the schema revision of a dump, or None if it has no Everstep tables.

    Raises:
        UnusableBackup: the file is damaged.
        BackupFailed: pg_restore is missing.
    """
    arguments = ["pg_restore", "--data-only", "--table=alembic_version", "--file=-", str(file)]
    lines = iter(_run(arguments, error=UnusableBackup).splitlines())
    return next((next(lines, None) for line in lines if line.startswith("COPY ")), None)


def _target(url: URL) -> str:
    """Return the option `--dbname` with a URL without password."""
    arguments = postgresql_arguments(url)
    query = {**url.query, **({"sslmode": str(arguments["sslmode"])} if "sslmode" in arguments else {})}
    place = URL.create(
        "postgresql", username=url.username, host=url.host, port=url.port, database=url.database, query=query
    )
    return f"--dbname={place.render_as_string(hide_password=False)}"


def _run(
    arguments: Sequence[str],
    url: URL | None = None,
    error: type[BackupFailed | UnusableBackup] = BackupFailed,
) -> str:
    environment = dict(os.environ)
    if url is not None and url.password is not None:
        environment["PGPASSWORD"] = str(url.password)
    try:
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError as missing:
        raise BackupFailed(f"{arguments[0]} is not installed: {_TOOLS}apt-get install postgresql-client") from missing
    if done.returncode:
        words = " ".join(done.stderr.split())[-_MAX_WORDS:]
        raise error(f"{arguments[0]} failed with exit code {done.returncode}: {words}")
    return done.stdout
