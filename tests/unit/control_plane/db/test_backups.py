from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import text, update

from control_plane.core.database_restore import Reconciliation, first_event_id
from control_plane.db import backups, checkpoints, checks, events, jobs, postgresql_dumps, schema
from control_plane.db.backups import RunChanges
from control_plane.db.errors import BackupFailed, DatabaseInUse, SchemaMismatch, UnusableBackup
from control_plane.db.events import NewEvent
from control_plane.db.models import CheckpointRow, JobRow
from control_plane.db.session import Database
from control_plane.errors import ImplausibleClock
from everstep.protocol.ids import Generation, Step
from tests.unit.control_plane.db.conftest import NOW, new_job

LATER = NOW + timedelta(days=1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "backup"


@pytest.fixture
def restored(database: Database, file: Path, empty_database_url: str) -> Iterator[Database]:
    """Yield a second database, restored from a backup of the first one, which has a job and three events."""
    with database.write() as session:
        jobs.create(session, new_job(), NOW)
        session.execute(update(JobRow).values(issued_generation=7))
        for number in range(3):
            events.append(session, NewEvent(at=NOW, type="JobStateChanged", message=f"event {number}"))
    backups.back_up(database, file)
    loaded = backups.load(file, empty_database_url)
    backups.finish(loaded, file, {}, LATER)
    backups.publish(loaded, empty_database_url)
    made = Database(empty_database_url)
    yield made
    made.close()


def test_a_restored_database_has_the_rows_of_the_backup_and_higher_numbers(restored: Database, file: Path) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    schema.require_current(restored)
    assert checks.check(restored) == ()
    with restored.read() as session:
        job = jobs.get(session, "gpt", project="default")
        assert job.tags == {"team": "a"}
        assert job.issued_generation == int(LATER.timestamp())
        found = events.page(session, events.EventFilter(), limit=10)
    assert [each.message for each in found[:3]] == ["event 0", "event 1", "event 2"]
    assert found[3].type == "DatabaseRestored"
    assert found[3].id == first_event_id(3, LATER.timestamp())


def test_the_next_event_follows_the_restore(restored: Database) -> None:
    with restored.write() as session:
        events.append(session, NewEvent(at=LATER, type="JobStateChanged", message="after"))
    with restored.read() as session:
        assert events.newest_id(session) == first_event_id(3, LATER.timestamp()) + 1


def test_no_server_starts_on_a_database_whose_numbers_were_not_raised(
    database: Database, file: Path, empty_database_url: str
) -> None:
    backups.back_up(database, file)
    loaded = backups.load(file, empty_database_url)
    place = Database(empty_database_url)
    with pytest.raises(SchemaMismatch):
        schema.require_current(place)
    place.close()
    backups.discard(loaded)


def test_a_restore_needs_a_database_without_tables(database: Database, file: Path) -> None:
    backups.back_up(database, file)
    with pytest.raises(DatabaseInUse, match=r"has \d+ tables: create an empty|exists: stop the server, and move"):
        backups.load(file, database.url.render_as_string(hide_password=False))
    schema.require_current(database)


def test_a_clock_before_the_backup_restores_nothing(restored: Database, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    backups.back_up(restored, copy)
    if not restored.is_sqlite:
        # The check of the clock does not depend on the database engine. On PostgreSQL, the creation of a second empty
        # database would take about one second.
        return
    url = f"sqlite:///{tmp_path / 'again.db'}"
    loaded = backups.load(copy, url)
    with pytest.raises(ImplausibleClock, match="86400 s behind the newest time in the backup"):
        backups.finish(loaded, copy, {}, LATER - timedelta(days=1))
    backups.discard(loaded)
    assert not list(tmp_path.glob("*again*"))


def test_a_backup_of_a_newer_version_is_refused(database: Database, file: Path, empty_database_url: str) -> None:
    with database.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    backups.back_up(database, file)
    loaded = backups.load(file, empty_database_url)
    with pytest.raises(SchemaMismatch, match=r"9999.*newer version migrated it"):
        backups.finish(loaded, file, {}, LATER)
    backups.discard(loaded)
    with database.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = :newest"), {"newest": schema.newest()})


@pytest.mark.parametrize("content", [b"", b"no backup of anything", b"SQLite format 3\0" + b"x" * 5_000, b"PGDMP\1\16"])
def test_a_file_that_is_no_backup_is_refused(
    content: bytes, file: Path, empty_database_url: str, tmp_path: Path
) -> None:
    file.write_bytes(content)
    with pytest.raises(UnusableBackup, match=r"is no backup|is damaged|is a backup of|failed with exit code"):
        backups.load(file, empty_database_url)
    assert not list(tmp_path.glob(".*"))


def test_a_backup_never_replaces_a_file(database: Database, file: Path) -> None:
    file.write_text("kept")
    with pytest.raises(DatabaseInUse, match="exists: name a new file"):
        backups.back_up(database, file)
    assert file.read_text() == "kept"


def test_a_failed_backup_leaves_no_file(database: Database, tmp_path: Path) -> None:
    with pytest.raises(BackupFailed, match="No such file or directory"):
        backups.back_up(database, tmp_path / "missing" / "backup")


def test_a_database_without_tables_is_no_backup(empty_database_url: str, file: Path) -> None:
    empty = Database(empty_database_url)
    with pytest.raises(UnusableBackup, match="has no Everstep tables"):
        backups.back_up(empty, file)
    empty.close()


@pytest.mark.parametrize("engine", ["sqlite"])
def test_a_checkpoint_that_s3_lacks_counts_as_deleted(restored: Database) -> None:
    with restored.write() as session:
        run_id = jobs.get(session, "gpt", project="default").run_id
        row = CheckpointRow(
            run_id=run_id, generation=1, step=5, state=checkpoints.COMPLETE, bucket="b", manifest_key="k"
        )
        row.manifest, row.object_bytes, row.created_at, row.completed_at = b"{}", 1, NOW, NOW
        session.add(row)
    (run,) = backups.runs(restored)
    assert run.backup.complete == {(1, 5)}
    missing = Reconciliation(generations=(), checkpoints=(), missing=((Generation(1), Step(5)),))
    changes = {run.run_id: RunChanges(changes=missing, manifests={})}
    backups.finish(restored, Path(), changes, LATER + timedelta(seconds=1))
    with restored.read() as session:
        (found,) = checkpoints.of_run(session, run.run_id)
    assert (found.state, found.manifest) == (checkpoints.DELETED, None)


@pytest.mark.parametrize("engine", ["postgresql"])
def test_a_missing_program_is_named(database: Database, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(file.parent))
    with pytest.raises(BackupFailed, match=r"pg_dump is not installed: .*postgresql-client"):
        backups.back_up(database, file)


def test_no_password_is_an_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "pg_dump"
    program.write_text(f'#!/bin/sh\necho "$@" "$PGPASSWORD" >{tmp_path}/seen\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    postgresql_dumps.dump(Database("postgresql://user:geheim@database.internal/everstep").url, tmp_path / "out")
    arguments, password = (tmp_path / "seen").read_text().rsplit(maxsplit=1)
    assert password == "geheim"
    assert "geheim" not in arguments
    assert "postgresql://user@database.internal/everstep?sslmode=require" in arguments


def test_the_check_finds_rows_that_refer_to_no_row_and_numbers_that_would_be_reused(restored: Database) -> None:
    with restored.migrating() as connection:
        if restored.is_sqlite:
            connection.execute(text("INSERT INTO revision VALUES ('gone', 2, '2026-01-01', '[]')"))
            connection.execute(text("DELETE FROM revision"))
        insert = "INSERT INTO generation (run_id, number, revision, parent, base_step, world_size, plan, node_ids, "
        insert += "created_at) SELECT run_id, 4000000000, 1, 3, 0, 2, '', '[]', '2026-01-01 00:00:00' FROM job"
        connection.execute(text(insert))
    faults = checks.check(restored)
    assert len(faults) == 2
    assert "generation 4000000000 is stored, but only numbers up to" in faults[0]
    assert "has the parent 3, which has no row" in faults[1]


@pytest.mark.parametrize("engine", ["sqlite"])
def test_the_check_finds_a_foreign_key_without_a_row(restored: Database) -> None:
    with restored.engine.connect() as connection:
        connection.connection.cursor().execute("PRAGMA foreign_keys=OFF")
        connection.execute(text("INSERT INTO revision VALUES ('gone', 2, '2026-01-01', '[]')"))
        connection.commit()
        connection.connection.cursor().execute("PRAGMA foreign_keys=ON")
    assert checks.check(restored) == ("1 rows of revision name no row of job. Restore a backup",)
