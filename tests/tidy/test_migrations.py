"""The migrations and the models tell one story."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from control_plane.db import schema
from control_plane.db.models import Base
from control_plane.db.session import Database

ROOT = Path(__file__).parents[2]


def test_the_folder_does_not_shadow_the_library():
    assert not (ROOT / "alembic/__init__.py").exists()
    found = subprocess.run(
        [sys.executable, "-c", "import alembic.config; print(alembic.__version__)"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip()


def test_there_is_one_head():
    config = Config()
    config.set_main_option("script_location", str(schema.migrations()))
    assert len(ScriptDirectory.from_config(config).get_heads()) == 1


def test_migrated_is_what_the_models_say(tmp_path):
    database = Database(f"sqlite:///{tmp_path / 'x.db'}")
    schema.migrate(database)
    with database.engine.connect() as connection:
        difference = compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), Base.metadata)
    database.close()
    assert difference == []


def test_nothing_in_the_tables_is_known_to_one_database_only():
    """Every table can be written down for PostgreSQL, too."""
    from sqlalchemy.dialects import postgresql
    from sqlalchemy.schema import CreateTable

    statements = [str(CreateTable(table).compile(dialect=postgresql.dialect())) for table in Base.metadata.sorted_tables]
    assert all("TIMESTAMP WITHOUT TIME ZONE" not in statement for statement in statements)
