"""The schema's version: what the database has, what this code was written for, and the way from one to the other.

Invariant: a server runs on exactly the schema it was written for.
"""

from __future__ import annotations

from pathlib import Path

from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError

from alembic import command
from control_plane.db.errors import SchemaMismatch
from control_plane.db.session import Database

_PACKAGE = Path(__file__).resolve().parent.parent


def migrations() -> Path:
    """Return the folder of migrations: `alembic` of a checkout, or its copy inside an installed control plane.

    Returns:
        An existing folder.

    Raises:
        SchemaMismatch: neither is there; the installation is not whole.
    """
    for folder in (_PACKAGE / "migrations", _PACKAGE.parent / "alembic"):
        if (folder / "env.py").is_file():
            return folder
    raise SchemaMismatch("the migrations are missing from this installation of Everstep: reinstall it")


def newest() -> str:
    """Return the revision that this code was written for."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    assert head is not None
    return head


def current(database: Database) -> str | None:
    """Return the revision that the database has; None where it has no tables of ours."""
    with database.engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def migrate(database: Database) -> str | None:
    """Bring the database to the newest schema. Idempotent.

    Args:
        database: any, also an empty one.

    Returns:
        The revision that it had before.

    Raises:
        SchemaMismatch: a newer Everstep has migrated it already.
    """
    before = current(database)
    _refuse_unknown(before)
    config = _config()
    with database.migrating() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    return before


def require_current(database: Database) -> None:
    """Check that the database has the schema that this code was written for.

    Args:
        database: any.

    Raises:
        SchemaMismatch: it has an older one, a newer one or none; the message says what to do.
    """
    found, wanted = current(database), newest()
    if found == wanted:
        return
    _refuse_unknown(found)
    where = database.url.render_as_string(hide_password=True)
    state = "has no Everstep tables" if found is None else f"has schema {found}; this version needs {wanted}"
    raise SchemaMismatch(
        f"the database {where} {state}: start once with --migrate (back it up first if it holds anything)"
    )


def _refuse_unknown(revision: str | None) -> None:
    if revision is None:
        return
    try:
        ScriptDirectory.from_config(_config()).get_revision(revision)
    except CommandError as error:
        raise SchemaMismatch(
            f"the database has schema {revision}, which this version of Everstep does not know: a newer one has "
            "migrated it. "
            "Start that version, or restore a backup"
        ) from error


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations()).replace("%", "%%"))
    return config
