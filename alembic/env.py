"""Alembic's entry point.

Migrations run on the connection that `control_plane.db.schema` passes, or for developers on the URL in alembic.ini.
"""

from __future__ import annotations

from typing import Any, Literal

from alembic import context
from control_plane.db.models import Base, PlainText, StoredValue, UtcDateTime, ValueText
from control_plane.db.session import Database


def plain_type(kind: str, item: Any, _context: object) -> str | Literal[False]:
    """Return Everstep's column types as plain SQL types.

    A migration must not change when a class of Everstep changes.
    """
    if kind != "type":
        return False
    if isinstance(item, UtcDateTime):
        return "sa.DateTime(timezone=True)"
    if isinstance(item, PlainText | ValueText):
        return "sa.Text()"
    return "sa.JSON()" if isinstance(item, StoredValue) else False


def run() -> None:
    """Run the requested migrations, in one transaction if the database supports that."""
    connection = context.config.attributes.get("connection")
    if connection is not None:
        context.configure(
            connection=connection, target_metadata=Base.metadata, render_as_batch=True, render_item=plain_type
        )
        with context.begin_transaction():
            context.run_migrations()
        return
    url = context.config.get_main_option("sqlalchemy.url")
    assert url is not None
    database = Database(url)
    with database.migrating() as own:
        context.configure(connection=own, target_metadata=Base.metadata, render_as_batch=True, render_item=plain_type)
        with context.begin_transaction():
            context.run_migrations()
    database.close()


run()
