"""Alembic's entry: runs migrations on the connection that `control_plane.db.schema` hands over, or on alembic.ini's URL
for a developer.
"""

from __future__ import annotations

from typing import Any, Literal

from alembic import context
from control_plane.db.models import Base, PlainText, RunLengths, StringTuple, UtcDateTime
from control_plane.db.session import Database


def plain_type(kind: str, item: Any, _context: object) -> str | Literal[False]:
    """Write our column types as what the database sees: a migration must not change when a class of ours does."""
    if kind != "type":
        return False
    if isinstance(item, UtcDateTime):
        return "sa.DateTime(timezone=True)"
    if isinstance(item, PlainText):
        return "sa.Text()"
    return "sa.JSON()" if isinstance(item, (StringTuple, RunLengths)) else False


def run() -> None:
    """Run the migrations that were asked for, all of them in one transaction where the database can."""
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
