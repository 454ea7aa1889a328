"""Checks the version of the database's schema, and migrates the schema to the version that this code needs.

A newer version of the server may have only added tables, indexes and columns, so that older code still works. Each
migration therefore stores the older schema revisions whose code can use the new schema (table `schema_support`).

Invariant: a server starts only if the database has the schema that the server's code needs, or a newer schema that
supports this code.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from pathlib import Path

from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, delete, insert, inspect, select

from alembic import command
from control_plane.db.errors import SchemaMismatch
from control_plane.db.models import SchemaSupportRow
from control_plane.db.session import Database

log = logging.getLogger(__name__)
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


@functools.cache  # Cached, because reading the migrations takes long.
def newest() -> str:
    """Return the schema revision that this code needs."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    assert head is not None
    return head


def current(database: Database) -> str | None:
    """Return the database's schema revision, or None if the database has no Everstep tables."""
    with database.engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def migrate(database: Database, folder: Path | None = None) -> str | None:
    """Migrate the database to the newest schema. Idempotent. A newer schema that supports this code does not change.

    Args:
        database: the database to migrate. It may be empty.
        folder: Alembic's migrations; None for those of this version. Tests pass the migrations of a newer version.

    Returns:
        The revision before the migration.

    Raises:
        SchemaMismatch: a newer version of Everstep has migrated the database, and its schema does not support this
            version.
    """
    before = current(database)
    if before is not None and folder is None and _is_supported(database, before):
        return before
    with database.migrating() as connection:
        upgrade(connection, folder)
    return before


def upgrade(connection: Connection, folder: Path | None = None) -> None:
    """Migrate the database of a connection to the newest schema, within the connection's transaction.

    Args:
        connection: from `Database.migrating`.
        folder: Alembic's migrations; None for those of this version.

    Raises:
        SchemaMismatch: a newer version of Everstep has migrated the database.
    """
    config = _config(folder)
    _refuse_unknown(MigrationContext.configure(connection).get_current_revision(), config)
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    head, *older = supported(ScriptDirectory.from_config(config))
    connection.execute(delete(SchemaSupportRow))
    if older:
        connection.execute(insert(SchemaSupportRow), [{"revision": head, "server_revision": each} for each in older])


def supported(scripts: ScriptDirectory) -> Iterator[str]:
    """Yield the schema revisions whose code can run on the newest schema: the newest revision, then older ones.

    The list ends with the newest contraction: a migration that removes parts of the schema. Servers older than this
    migration need the removed parts.
    """
    for script in scripts.walk_revisions():
        yield script.revision
        if getattr(script.module, "phase", "expand") != "expand":
            return


def require_current(database: Database) -> None:
    """Check that the database has the schema that this code needs, or a newer schema that supports this code.

    Raises SchemaMismatch if the schema is older, too new or missing. The message describes how to resolve the problem.
    """
    found, wanted = current(database), newest()
    if found == wanted:
        return
    if found is not None and _is_supported(database, found):
        log.info("the database has schema %s of a newer version, which also supports this version's %s", found, wanted)
        return
    _refuse_unknown(found, _config())
    where = database.url.render_as_string(hide_password=True)
    state = "has no Everstep tables" if found is None else f"has schema {found}; this version needs {wanted}"
    raise SchemaMismatch(
        f"the database {where} {state}: start once with --migrate (first back the database up if it has data)"
    )


def _is_supported(database: Database, found: str) -> bool:
    """Return whether the database's table of supported revisions permits this code to run on the schema `found`.

    The Everstep version that migrated the database wrote this table.
    """
    wanted = select(SchemaSupportRow).where(
        SchemaSupportRow.revision == found, SchemaSupportRow.server_revision == newest()
    )
    with database.engine.connect() as connection:
        return (
            inspect(connection).has_table(SchemaSupportRow.__tablename__)
            and connection.execute(wanted).first() is not None
        )


def _refuse_unknown(revision: str | None, config: Config) -> None:
    if revision is None:
        return
    try:
        ScriptDirectory.from_config(config).get_revision(revision)
    except CommandError as error:
        raise SchemaMismatch(
            f"the database has schema {revision}, which this version of Everstep does not support: a newer version "
            "migrated it. Start that version, or restore a backup"
        ) from error


def _config(folder: Path | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(folder or migrations()).replace("%", "%%"))
    return config
