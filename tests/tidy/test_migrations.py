"""The migrations create the tables of the models, never change, and suit servers of the version before.

A migration has one of two phases. A server of the version before keeps running after an expansion, and can start again,
so servers can be updated one after the other. A contraction removes what only older versions use, at least one release
later.

    expand      adds tables, indexes, and columns that may be empty or have a default of the database
    contract    may do anything
"""

from __future__ import annotations

import ast
import hashlib
import subprocess
import sys
from collections.abc import Iterator
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
MIGRATIONS = sorted((ROOT / "alembic/versions").glob("*.py"))
DIGESTS = {
    "0001_everything_of_the_first_slice.py": "411cd1c7d82f9bb285e588d43a7d445afc18ed049ce12828b247b0cc42b03abf",
    "0002_audit_entries_and_automation_pause.py": "2a7884b68f8ff21a59781db8a9e7a77418ac54f6dd1ea82a73beee3c03a82e4b",
    "0003_replica_encryption.py": "2f2750e8e44947bb0615b19525b5f8caee0bde60c4c2349e59099e99a35b9cb1",
    "0004_rolls.py": "5ff84a0ed7198b1550ffaee7f5fee2762bcfc6e13f8775fb2b99a52f92267495",
    "0005_schema_support.py": "7deb8753f37d8676f542034ac02c14539a6e6c8ac95043db620dea418b6749ff",
    "0006_metric_breakdowns.py": "3704780c47872d82842d1dc62a8bee71cdecb3755d6e173086fc49d4ae61eff4",
    "0007_facts_trash_and_duties.py": "779bfb5676ee31c5d285bd992376dc4c754a5c978b23ff5519256a08f23f4f54",
    "0008_events_of_a_project.py": "52ad3db2edaedbcb1bf57748501c9055fdf3dd4c823ef3b926a02017517567ce",
    "0009_encrypting_types.py": "6287f6d250c8dc8d94839528c9c1d303f65879caa3c5186df98466fab6d234da",
    "0010_burn_in.py": "faab9299ed3971edf1dce333b838fb3d935f0db89067dfc8934ca15693f05b96",
    "0011_images_of_nodes.py": "eb6bd32ae6f9b7d27c62574c9787f21e848d0a16ca57ab76bc4e2312bb5d9c7e",
}
"""SHA-256 of each migration. Change neither a file nor its digest once a user's database may have run the migration."""
EXPANSIONS = {"create_table", "create_index", "add_column", "batch_alter_table", "f", "get_bind", "execute"}
"""Operations that a migration in the phase `expand` may use."""


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


@pytest.mark.parametrize("file", MIGRATIONS, ids=lambda file: file.name)
def test_a_migration_never_changes(file: Path):
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert DIGESTS.get(file.name) == digest, (
        f"{file.name}: add a new migration in place of a change. A new migration needs a line in DIGESTS: {digest}"
    )


def test_no_migration_is_deleted():
    assert {file.name for file in MIGRATIONS} == set(DIGESTS)


def refused_in_expansion(source: str) -> Iterator[str]:
    """Yield what a migration does in `upgrade` that a server of the version before would not survive."""
    tree = ast.parse(source)
    (upgrade,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "upgrade")
    for call in (node for node in ast.walk(upgrade) if isinstance(node, ast.Call)):
        if not isinstance(call.func, ast.Attribute) or not isinstance(call.func.value, ast.Name):
            continue
        if call.func.value.id != "sa" and call.func.attr not in EXPANSIONS:
            yield f"line {call.lineno}: {call.func.attr}"
        if call.func.attr == "add_column":
            options = {
                each.arg: ast.unparse(each.value) for part in call.args for each in getattr(part, "keywords", ())
            }
            if "server_default" not in options and options.get("nullable") != "True":
                yield f"line {call.lineno}: a column without server_default that may not be empty"


@pytest.mark.parametrize("file", MIGRATIONS[1:], ids=lambda file: file.name)
def test_an_expansion_suits_servers_of_the_version_before(file: Path):
    source = file.read_text()
    if 'phase = "contract"' not in source:
        assert list(refused_in_expansion(source)) == []


@pytest.mark.parametrize(
    ("line", "is_expansion"),
    [
        ('op.add_column("job", sa.Column("a", sa.Integer(), nullable=True))', True),
        ('op.add_column("job", sa.Column("a", sa.Integer(), nullable=False, server_default="0"))', True),
        ('op.add_column("job", sa.Column("a", sa.Integer(), nullable=False))', False),
        ('op.create_index(op.f("ix_job_a"), "job", ["a"])', True),
        ('op.drop_column("job", "a")', False),
        ('op.alter_column("job", "a", nullable=False)', False),
        ('op.rename_table("job", "work")', False),
    ],
)
def test_what_an_expansion_may_do(line: str, is_expansion: bool):
    found = list(refused_in_expansion(f"def upgrade():\n    {line}\n"))
    assert (not found) == is_expansion
