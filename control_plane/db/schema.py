"""Checks the version of the database's schema, and migrates it to the version that this code needs.

Each migration stores the older revisions whose code can use the new schema (table `schema_support`), because many
migrations only add parts. Invariant: a server starts only on its own schema or on a newer one that supports it.
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
    """Return the folder with Alembic's migrations: `alembic` in a checkout, or its copy in an installed package.

    Raises SchemaMismatch if both are missing.
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
    """Return the database's schema revision, or None without Everstep tables."""
    with database.engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def migrate(database: Database, folder: Path | None = None) -> str | None:
    """Migrate the database to the newest schema, and return the revision before. Idempotent. A newer schema stays.

    `folder` has the migrations; None for those of this version. Raises SchemaMismatch if a newer schema does not
    support this version.
    """
    before = current(database)
    if before is not None and folder is None and _is_supported(database, before):
        return before
    with database.migrating() as connection:
        upgrade(connection, folder)
    return before


def upgrade(connection: Connection, folder: Path | None = None) -> None:
    """Migrate a connection of `Database.migrating` to the newest schema, within its transaction.

    `folder` has the migrations; None for those of this version. Raises SchemaMismatch if a newer version has migrated
    the database.
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
    """Yield the revisions whose code can run on the newest schema, newest first, down to the newest contraction.

    A contraction removes parts of the schema that servers of older revisions need.
    """
    for script in scripts.walk_revisions():
        yield script.revision
        if getattr(script.module, "phase", "expand") != "expand":
            return


def require_current(database: Database) -> None:
    """Raise SchemaMismatch with a remedy if the schema is older, unsupportedly new or missing."""
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
    """Return whether the version that migrated the database lets this code run on the schema `found`."""
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
