from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Integer, text

from alembic import command
from control_plane.accounts.reasons import sentence
from control_plane.core.observed.facts import NodeRequest, Requested
from control_plane.core.verification import CheckpointVerdict, Damage, DamageKind
from control_plane.db import checkpoints, jobs, nodes, schema
from control_plane.db.errors import DanglingReferences, SchemaMismatch
from control_plane.db.leases import Leaser
from control_plane.db.session import Database
from everstep.protocol.ids import NodeId
from tests.unit.control_plane.db.conftest import NOW, new_job
from tests.unit.control_plane.db.test_nouns import checkpoint


@pytest.fixture
def empty(empty_database_url):
    made = Database(empty_database_url)
    yield made
    made.close()


def test_a_new_database_needs_a_migration(empty):
    with pytest.raises(SchemaMismatch, match="start once with --migrate"):
        schema.require_current(empty)


def test_migrating_makes_it_current_and_may_be_repeated(empty):
    assert schema.migrate(empty) is None
    schema.require_current(empty)
    assert schema.migrate(empty) == schema.newest()


def test_of_replicas_that_migrate_at_once_one_waits_for_the_other(empty):
    with ThreadPoolExecutor(3) as threads:
        before = list(threads.map(lambda _: schema.migrate(empty), range(3)))
    assert None in before
    schema.require_current(empty)


def test_a_schema_of_the_future_is_left_alone(empty):
    schema.migrate(empty)
    with empty.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    for refuse in (schema.require_current, schema.migrate):
        with pytest.raises(SchemaMismatch, match=r"9999.*newer version migrated it"):
            refuse(empty)
    assert schema.current(empty) == "9999"


def newer(folder: Path, *phases: str) -> Path:
    """Return the migrations of a newer version, which has one more migration per phase."""
    shutil.copytree(schema.migrations(), folder)
    before = schema.newest()
    for number, phase in enumerate(phases, start=9001):
        lines = (
            "import sqlalchemy as sa",
            "from alembic import op",
            f"phase, revision, down_revision = {phase!r}, '{number}', '{before}'",
            f"def upgrade(): op.add_column('fleet', sa.Column('of_{number}', sa.Text(), nullable=True))",
        )
        (folder / "versions" / f"{number}_newer.py").write_text("\n".join(lines))
        before = str(number)
    return folder


@pytest.mark.parametrize(
    ("phases", "is_supported"),
    [
        (("expand",), True),
        (("expand", "expand"), True),
        (("contract",), False),
        (("contract", "expand"), False),
        (("expand", "contract"), False),
    ],
)
def test_a_server_starts_again_on_a_newer_schema_if_all_later_migrations_are_expansions(
    empty, tmp_path, phases, is_supported
):
    schema.migrate(empty)
    schema.migrate(empty, newer(tmp_path / "newer", *phases))
    found = schema.current(empty)
    assert found == str(9000 + len(phases))
    for start in (schema.require_current, schema.migrate):
        if is_supported:
            start(empty)
        else:
            with pytest.raises(SchemaMismatch, match=rf"{found}.*newer version migrated it"):
                start(empty)
    assert schema.current(empty) == found


def test_a_row_about_another_schema_supports_nobody(empty, tmp_path):
    """Rows about supported versions are ignored if they describe another schema than the database has.

    Alembic's own command line, for example, migrates a database without updating these rows.
    """
    schema.migrate(empty, newer(tmp_path / "newer", "expand"))
    with empty.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(SchemaMismatch, match=r"9999.*newer version migrated it"):
        schema.require_current(empty)


def test_a_newer_version_migrates_a_database_whose_schema_it_supports_only_as_an_older_one(empty, tmp_path):
    folder = newer(tmp_path / "newer", "expand")
    schema.migrate(empty)
    assert schema.migrate(empty, folder) == schema.newest()
    assert schema.migrate(empty, folder) == "9001"


@pytest.fixture
def parent_and_child(empty):
    with empty.migrating() as connection:
        connection.execute(text("CREATE TABLE parent (id INTEGER PRIMARY KEY, size INTEGER)"))
        connection.execute(
            text("CREATE TABLE child (parent_id INTEGER NOT NULL REFERENCES parent (id) ON DELETE CASCADE)")
        )
        connection.execute(text("INSERT INTO parent VALUES (1, 2)"))
        connection.execute(text("INSERT INTO child VALUES (1)"))
    return empty


def test_a_changed_table_keeps_the_rows_that_refer_to_it(parent_and_child):
    """A migration that changes a table keeps the rows of other tables that refer to it.

    On SQLite, Alembic copies the table and drops the original, which could delete these rows.
    """
    with parent_and_child.migrating() as connection:
        operations = Operations(MigrationContext.configure(connection))
        with operations.batch_alter_table("parent", recreate="auto") as batch:
            batch.alter_column("size", nullable=False, existing_type=Integer())
    with parent_and_child.engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM child")).scalar_one() == 1
        if parent_and_child.is_sqlite:
            assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar_one() == 1


@pytest.mark.parametrize("engine", ["sqlite"])
def test_a_migration_that_leaves_a_row_without_its_parent_writes_nothing(parent_and_child):
    words = "1 rows of the tables child refer to rows that do not exist"
    with pytest.raises(DanglingReferences, match=words), parent_and_child.migrating() as connection:
        connection.execute(text("DELETE FROM parent"))
    with parent_and_child.engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM parent")).scalar_one() == 1


@pytest.mark.parametrize("engine", ["postgresql"])
def test_only_a_migration_has_no_time_limit(empty):
    def limits(connection):
        names = ("statement_timeout", "idle_in_transaction_session_timeout", "lock_timeout")
        return [connection.execute(text(f"SHOW {name}")).scalar_one() for name in names]

    with empty.migrating() as connection:
        assert limits(connection) == ["0", "0", "5s"]
    with empty.write() as session:
        assert limits(session) == ["30s", "10s", "5s"]


def test_old_verdicts_become_records_and_old_damage_is_verified_again(empty):
    """Earlier versions stored each refused read of S3 as damage, in the words of AWS."""
    schema.migrate(empty)
    with empty.write() as session:
        job = jobs.create(session, new_job(), NOW)
        lease = Leaser("owner", 3.0, lambda: 0.0).claim(session, "job", job.run_id)
        for step in (1, 2, 3):
            checkpoints.record(session, lease, checkpoint(step, b"manifest"))
    _downgrade(empty, "0006")
    with empty.write() as session:
        verified = text("UPDATE checkpoint SET verified_at = created_at, verdict = :verdict WHERE step = :step")
        for step, verdict in ((2, ""), (3, "rank 0: the token has expired")):
            session.execute(verified, {"step": step, "verdict": verdict})
    schema.migrate(empty)
    with empty.read() as session:
        three, two, one = checkpoints.of_run(session, job.run_id)
        newest = checkpoints.newest_complete(session, job.run_id)
    assert (one.verdict, two.verdict) == (None, CheckpointVerdict.of())
    assert three.verdict == CheckpointVerdict.of(
        Damage(kind=DamageKind.EARLIER, detail="rank 0: the token has expired")
    )
    assert [each.verify_requested_at for each in (one, two, three)] == [None, None, NOW]
    assert newest == two
    _downgrade(empty, "0006")
    with empty.engine.connect() as connection:
        texts = connection.execute(text("SELECT verdict FROM checkpoint ORDER BY step")).scalars().all()
    assert texts == ["", "", "rank 0: the token has expired"]


def migration_config():
    config = Config()
    config.set_main_option("script_location", str(schema.migrations()).replace("%", "%%"))
    return config


def _downgrade(database, revision):
    config = migration_config()
    with database.migrating() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, revision)


OLD_REASONS = {
    "surplus: the fleet needs 3 nodes": {"kind": "Surplus", "desired_count": 3},
    "AWS announced for i-1: spot interruption (two minutes)": {
        "kind": "Announced",
        "node_id": "i-1",
        "notice": "spot_interruption",
        "text": "two minutes",
    },
    "the roll of the fleet replaces i-1 (ann): new image": {
        "kind": "Requested",
        "request": "replace",
        "node_id": "i-1",
        "by": "ann",
        "note": "new image",
        "is_roll": True,
    },
    "a user requested to drain i-1 (ann): AWS announced for i-7: the same (fault)": {
        "kind": "Requested",
        "request": "drain",
        "node_id": "i-1",
        "by": "ann",
        "note": "AWS announced for i-7: the same (fault)",
        "is_roll": False,
    },
    "excluded by gpt: AWS announced for i-1: maintenance (soon)": {
        "kind": "GivenUp",
        "job": "gpt",
        "remedy": "let_go",
        "because": {"kind": "Recorded", "text": "AWS announced for i-1: maintenance (soon)"},
    },
    "EC2: terminated": {"kind": "InstanceEnded", "node_id": "", "state": "terminated"},
    "its agent is connected": {"kind": "Recorded", "text": "its agent is connected"},
    "": {"kind": "Recorded", "text": ""},
}


def test_the_sentences_of_old_rows_become_reasons(empty):
    with empty.migrating() as connection:
        config = migration_config()
        config.attributes["connection"] = connection
        command.upgrade(config, "0009")
        for number, reason in enumerate(OLD_REASONS):
            connection.execute(
                text(
                    "INSERT INTO node (id, fleet_name, state, address, peer_port, memory_bytes, agent_id, version, "
                    "instance_type, availability_zone, reason, release, request, request_words, created_at) "
                    "VALUES (:id, 'main', 'draining', '', 0, 0, '', '', '', '', :reason, '', :request, :words, :at)"
                ),
                {
                    "id": f"i-{number}",
                    "reason": reason,
                    "request": "drain" if number == 1 else "",
                    "words": "a user requested to drain i-1 (ann)" if number == 1 else "",
                    "at": "2026-01-01 00:00:00",
                },
            )
    schema.migrate(empty)
    with empty.read() as session:
        assert session.execute(text("SELECT id FROM node")).scalars().all()
        rows = session.execute(text("SELECT reason, request FROM node ORDER BY id")).all()
        found = nodes.of_fleet(session, "main")
    assert [json.loads(row.reason) for row in rows] == list(OLD_REASONS.values())
    assert [sentence(node.reason) for node in found] == list(OLD_REASONS)
    assert [node.request for node in found] == [
        Requested(request=NodeRequest.DRAIN, node_id=NodeId("i-1"), by="ann") if number == 1 else None
        for number in range(len(OLD_REASONS))
    ]
