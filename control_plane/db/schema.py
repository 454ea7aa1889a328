"""Checks the version of the database's schema, and migrates the schema to the version that this code needs.

Invariant: a server runs only if the database has exactly the schema that the server's code needs.
"""

from __future__ import annotations

import functools
from pathlib import Path

from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection

from alembic import command
from control_plane.db.errors import SchemaMismatch
from control_plane.db.session import Database

_PACKAGE = Path(__file__).resolve().parent.parent


def migrations() -> Path:
    """Return the folder with Alembic's migrations of the schema.

    The folder is `alembic` in a checkout, and a copy of `alembic` in an installed package.

    Returns:
        An existing folder.

    Raises:
        SchemaMismatch: both folders are missing, so the installation is incomplete.
    """
    for folder in (_PACKAGE / "migrations", _PACKAGE.parent / "alembic"):
        if (folder / "env.py").is_file():
            return folder
    raise SchemaMismatch("the migrations are missing from this installation of Everstep: reinstall it")


@functools.cache  # Cached, because reading the migrations takes longer than the rest of a server's start.
def newest() -> str:
    """Return the schema revision that this code needs."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    assert head is not None
    return head


def current(database: Database) -> str | None:
    """Return the database's schema revision, or None if the database has no Everstep tables."""
    with database.engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def migrate(database: Database) -> str | None:
    """Migrate the database to the newest schema. Idempotent.

    Args:
        database: the database to migrate. It may be empty.

    Returns:
        The revision before the migration.

    Raises:
        SchemaMismatch: a newer version of Everstep has migrated the database.
    """
    before = current(database)
    _refuse_unknown(before)
    with database.migrating() as connection:
        upgrade(connection)
    return before


def upgrade(connection: Connection) -> None:
    """Migrate the database of a connection to the newest schema, within the connection's transaction.

    Args:
        connection: from `Database.migrating`.

    Raises:
        SchemaMismatch: a newer version of Everstep has migrated the database.
    """
    _refuse_unknown(MigrationContext.configure(connection).get_current_revision())
    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def require_current(database: Database) -> None:
    """Check that the database has the schema that this code needs.

    Raises SchemaMismatch if the schema is older, newer or missing. The message describes how to resolve the problem.
    """
    found, wanted = current(database), newest()
    if found == wanted:
        return
    _refuse_unknown(found)
    where = database.url.render_as_string(hide_password=True)
    state = "has no Everstep tables" if found is None else f"has schema {found}; this version needs {wanted}"
    raise SchemaMismatch(
        f"the database {where} {state}: start once with --migrate (first back the database up if it has data)"
    )


def _refuse_unknown(revision: str | None) -> None:
    if revision is None:
        return
    try:
        ScriptDirectory.from_config(_config()).get_revision(revision)
    except CommandError as error:
        raise SchemaMismatch(
            f"the database has schema {revision}, which this version of Everstep does not support: a newer version "
            "migrated it. Start that version, or restore a backup"
        ) from error


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations()).replace("%", "%%"))
    return config
