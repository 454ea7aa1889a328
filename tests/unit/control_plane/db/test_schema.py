from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import JSON, Integer, MetaData, Table, bindparam, inspect, text

from alembic import command
from control_plane.accounts import facts
from control_plane.accounts.answers import why
from control_plane.accounts.reasons import sentence, sentences
from control_plane.accounts.responses import response
from control_plane.api import incident_reports
from control_plane.core.incidents import absent_seconds
from control_plane.core.observed.causes import GivenUp, Surplus
from control_plane.core.observed.facts import Announced, NodeRequest, RankEnded, Recorded, Requested
from control_plane.core.observed.incidents import RestartsRanks
from control_plane.core.observed.nodes import Remedy
from control_plane.core.verification import CheckpointVerdict, Damage, DamageKind
from control_plane.db import checkpoints, fleets, implications, incidents, jobs, nodes, rolls, schema
from control_plane.db.errors import DanglingReferences, SchemaMismatch
from control_plane.db.leases import Leaser
from control_plane.db.session import Database
from control_plane.loop import records
from everstep.protocol.agent_messages import ExitClass, NoticeKind
from everstep.protocol.ids import NodeId, Rank
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
    missing = CheckpointVerdict.of(Damage(kind=DamageKind.MISSING, rank=1))
    with empty.write() as session:
        checkpoints.store_verdict(session, job.run_id, two, verdict=missing, now=NOW)
        session.execute(text("UPDATE checkpoint SET state = 'trashed' WHERE step = 1"))
    _downgrade(empty, "0006")
    restored = [("complete", ""), ("complete", "Missing"), ("complete", "rank 0: the token has expired")]
    assert [(each["state"], each["verdict"]) for each in rows(empty, "checkpoint")] == restored


def migration_config():
    config = Config()
    config.set_main_option("script_location", str(schema.migrations()).replace("%", "%%"))
    return config


def _downgrade(database, revision):
    config = migration_config()
    with database.migrating() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, revision)


def _upgrade(database, revision):
    config = migration_config()
    with database.migrating() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


ANNOUNCED = Announced(node_id=NodeId("i-1"), notice=NoticeKind.SPOT_INTERRUPTION, text="two (2) minutes")
OLD_REASONS = {
    "surplus: the fleet needs 3 nodes": Surplus(desired_count=3),
    "AWS announced for i-1: spot interruption (two (2) minutes)": ANNOUNCED,
    "excluded by gpt: AWS announced for i-1: spot interruption (two (2) minutes)": GivenUp(
        job="gpt", remedy=Remedy.TERMINATE, because=ANNOUNCED
    ),
    "the roll of the fleet replaces i-3 (ann (ops)): new image": Requested(
        request=NodeRequest.REPLACE, node_id=NodeId("i-3"), by="ann (ops)", note="new image", is_roll=True
    ),
    "a user requested to drain i-4 (ann): AWS announced for i-7: the same (fault)": None,
    "unreachable by gpt: the agent of i-5 was silent for 7.4 s": None,
    "EC2: terminated": None,
    "": None,
}
"""Reasons of nodes in an old database, each with its value. None: no decision depends on the sentence."""
OLD_REQUESTS = {
    "a user requested to drain i-1 (ann)": Requested(request=NodeRequest.DRAIN, node_id=NodeId("i-1"), by="ann"),
    "the roll of the fleet reboots i-2 (ann): x: (y)": Requested(
        request=NodeRequest.REBOOT, node_id=NodeId("i-2"), by="ann", note="x: (y)", is_roll=True
    ),
    "a user requested to replace i-3 (ann): a\nb": Requested(
        request=NodeRequest.REPLACE, node_id=NodeId("i-3"), by="ann", note="a\nb"
    ),
}


def insert(connection, table_name, /, **values):
    """Insert a row into a table of any revision. Columns without a value are empty."""
    table = Table(table_name, MetaData(), autoload_with=connection, resolve_fks=False)
    required = (each for each in table.columns if not each.nullable and each.server_default is None)
    kinds = {each.name: list if isinstance(each.type, JSON) else each.type.python_type for each in required}
    empty = {name: kind() for name, kind in kinds.items() if kind is not datetime}
    connection.execute(table.insert().values({**empty, **values}))


def rows(database, name):
    with database.engine.connect() as connection:
        table = Table(name, MetaData(), autoload_with=connection, resolve_fks=False)
        return list(connection.execute(table.select().order_by(*table.primary_key)).mappings())


def test_old_reasons_become_values_if_a_decision_depends_on_them(empty):
    _upgrade(empty, "0006")
    with empty.migrating() as connection:
        for number, reason in enumerate(OLD_REASONS):
            insert(connection, "node", id=f"i-{number}", fleet_name="main", reason=reason, created_at=NOW)
    schema.migrate(empty)
    with empty.read() as session:
        found = [node.reason for node in nodes.of_fleet(session, "main")]
    assert [sentence(reason) for reason in found] == list(OLD_REASONS)
    assert found == [Recorded(text=words) if value is None else value for words, value in OLD_REASONS.items()]


def test_the_request_of_an_old_node_stays_open_in_both_directions(empty):
    _upgrade(empty, "0006")
    with empty.migrating() as connection:
        for number, (words, value) in enumerate([*OLD_REQUESTS.items(), ("", None)], start=1):
            request = "" if value is None else value.request.value
            old = {"id": f"i-{number}", "request": request, "request_words": words}
            insert(connection, "node", fleet_name="main", created_at=NOW, **old)
    before = rows(empty, "node")
    schema.migrate(empty)
    with empty.read() as session:
        found = [node.request for node in nodes.of_fleet(session, "main")]
    assert found == [*OLD_REQUESTS.values(), None]
    assert [sentence(request) for request in found if request is not None] == list(OLD_REQUESTS)
    _downgrade(empty, "0006")
    assert rows(empty, "node") == before


def test_a_downgrade_restores_each_column(empty):
    def columns():
        with empty.engine.connect() as connection:
            found = inspect(connection)
            return {
                table: {each["name"]: (str(each["type"]), each["nullable"]) for each in found.get_columns(table)}
                for table in found.get_table_names()
            }

    _upgrade(empty, "0006")
    before = columns()
    schema.migrate(empty)
    _downgrade(empty, "0006")
    assert columns() == before


ABSENT = "no control plane was running for 88 s, until 11:59:54 UTC"
DAMAGED = "the GPU of i-2 failed: {gpu}"
OLD_EVIDENCE = ["rank 1 on i-2 ended: crashed, signal 9", ABSENT]
OLD_MEMO = {
    "state_since": NOW.timestamp(),
    "exclusions": [{"node_id": "i-2", "evidence": DAMAGED, "may_terminate": True, "remedy": "reboot"}],
    "moves": [
        {
            "node_id": "i-3",
            "evidence": "AWS announced for i-3: rebalance (soon)",
            "cause": "notice",
            "remedy": "let_go",
            "may_terminate": True,
        }
    ],
    "incident": {
        "id": "inc-open",
        "state": "replacing",
        "cause": "rank_exit",
        "evidence": OLD_EVIDENCE,
        "decision": "replace i-2 and restart all ranks",
        "generation_before": 2,
        "failed_at": NOW.timestamp(),
        "opened_at": NOW.timestamp(),
        "reached_step": 12,
    },
}


@pytest.fixture
def old(empty):
    """A database of revision 0006: a running job, its fleet in a roll, two incidents, and an entry of fault history."""
    schema.migrate(empty)
    with empty.write() as session:
        job = jobs.create(session, new_job(), NOW)
    _downgrade(empty, "0006")
    with empty.migrating() as connection:
        connection.execute(text("UPDATE job SET memo = :memo").bindparams(bindparam("memo", OLD_MEMO, JSON())))
        progress = {
            "roll_id": "r",
            "requested": [],
            "finished": [],
            "reason": "waits: gpt is starting",
            "ended_at": None,
        }
        insert(
            connection,
            "fleet",
            name="main",
            auto_scaling_group_name="asg",
            created_at=NOW,
            reason="keeps 4 nodes",
            roll_progress=progress,
        )
        for incident_id, closed_at in (("inc-1", NOW), ("inc-open", None)):
            insert(
                connection,
                "incident",
                id=incident_id,
                run_id=job.run_id,
                job_name="gpt",
                phase="detect" if closed_at is None else "closed",
                cause="rank_exit",
                evidence=OLD_EVIDENCE,
                decision="replace i-2 and restart all ranks",
                instance_ids=["i-2"],
                failed_at=NOW,
                opened_at=NOW,
                closed_at=closed_at,
            )
        insert(connection, "implication", node_id="i-2", incident_id="inc-1", at=NOW, remedy="reboot", evidence=DAMAGED)
    return empty


def test_the_sentences_of_an_old_database_are_shown_after_an_upgrade_a_downgrade_and_another_upgrade(old):
    tables = ("job", "fleet", "incident", "implication")
    before = {name: rows(old, name) for name in tables}
    for is_last in (False, True):
        schema.migrate(old)
        with old.read() as session:
            job = jobs.get(session, "gpt")
            found = [incidents.get(session, incident_id) for incident_id in ("inc-1", "inc-open")]
            accounts = [incident_reports.account(session, each, NOW) for each in found]
            (history,) = implications.of_node(session, "i-2")
            fleet = fleets.get(session, "main")
        record = records.job_record(job)
        assert record.incident is not None
        for each in (*found, record.incident):
            assert [facts.sentence(fact) for fact in each.evidence] == OLD_EVIDENCE
            assert absent_seconds(each.evidence) == 88
            assert response(each.decision) == "replace i-2 and restart all ranks"
        assert [why(account) for account in accounts] == [
            "Cause unknown: rank 1 on i-2 ended: crashed, signal 9. Outage: cause unknown."
        ] * 2
        assert facts.sentence(history.evidence) == DAMAGED
        assert [(each.node_id, each.evidence, each.is_to) for each in record.exclusions] == [
            ("i-2", Recorded(text=DAMAGED), Remedy.REBOOT)
        ]
        assert [(facts.sentence(move.evidence), move.is_announced) for move in record.moves] == [
            ("AWS announced for i-3: rebalance (soon)", True)
        ]
        assert sentences(fleet.reasons) == "keeps 4 nodes"
        assert sentence(rolls.progress_of(fleet).reason) == "waits: gpt is starting"
        if not is_last:
            _downgrade(old, "0006")
            assert {name: rows(old, name) for name in tables} == before


def test_a_value_without_an_old_sentence_survives_a_downgrade_and_another_upgrade(old):
    ended = RankEnded(rank=Rank(1), node_id=NodeId("i-2"), exit_class=ExitClass.CRASHED, code=-9)
    schema.migrate(old)
    with old.write() as session:
        lease = Leaser("owner", 3.0, lambda: 0.0).claim(session, "job", new_job().run_id)
        incidents.change(session, lease, "inc-1", evidence=(ended,), decision=RestartsRanks())
    _downgrade(old, "0006")
    assert [json.loads(each)["kind"] for each in rows(old, "incident")[0]["evidence"]] == ["RankEnded"]
    schema.migrate(old)
    with old.read() as session:
        stored = incidents.get(session, "inc-1")
    assert (stored.evidence, stored.decision) == ((ended,), RestartsRanks())
