"""The migrations create the tables of the models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from control_plane.db import schema
from control_plane.db.models import Base
from control_plane.db.session import Database
from tests.postgresql import BOTH_ENGINES

ROOT = Path(__file__).parents[2]


def test_the_folder_does_not_shadow_the_library():
    assert not (ROOT / "alembic/__init__.py").exists()
    found = subprocess.run(
        [sys.executable, "-c", "import alembic.config; print(alembic.__version__)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip()


def test_there_is_one_head():
    config = Config()
    config.set_main_option("script_location", str(schema.migrations()))
    assert len(ScriptDirectory.from_config(config).get_heads()) == 1


@pytest.mark.parametrize("engine", BOTH_ENGINES)
def test_migrated_is_what_the_models_say(empty_database_url):
    database = Database(empty_database_url)
    schema.migrate(database)
    with database.engine.connect() as connection:
        difference = compare_metadata(
            MigrationContext.configure(connection, opts={"compare_type": True}), Base.metadata
        )
    database.close()
    assert difference == []
