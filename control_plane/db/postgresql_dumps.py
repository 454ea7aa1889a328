"""Runs pg_dump and pg_restore for `backups`.

A dump has PostgreSQL's custom format. A restore leaves out the row of `alembic_version`, which names the schema's
version, so no server starts on the database before `backups.finish` has written the row.

Invariant: no password appears among the arguments of a process, where every user of the machine can read it.
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
"""Maximum number of characters of a program's error output that an exception's message contains."""


def dump(url: URL, file: Path) -> None:
    """Write all tables and sequences to a file, in one consistent state. Servers may run meanwhile.

    Raises BackupFailed if pg_dump is missing or fails.
    """
    _run(["pg_dump", "--format=custom", "--no-owner", "--no-privileges", f"--file={file}", _target(url)], url)


def load(file: Path, url: URL) -> None:
    """Restore all tables and sequences of a dump in one transaction, without the row of `alembic_version`.

    Args:
        file: a file that `dump` wrote.
        url: a PostgreSQL database without tables.

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
    """Return the schema revision of a dump.

    Args:
        file: a file that `dump` wrote.

    Returns:
        The revision, or None if the dump has no Everstep tables.

    Raises:
        UnusableBackup: the file is damaged.
        BackupFailed: pg_restore is missing.
    """
    arguments = ["pg_restore", "--data-only", "--table=alembic_version", "--file=-", str(file)]
    lines = iter(_run(arguments, error=UnusableBackup).splitlines())
    return next((next(lines, None) for line in lines if line.startswith("COPY ")), None)


def _target(url: URL) -> str:
    """Return the option `--dbname` for pg_dump and pg_restore, with a URL that omits the password."""
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
