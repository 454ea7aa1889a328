from __future__ import annotations

import logging
from pathlib import Path

import pytest
from sqlalchemy import update

from control_plane.cloud.errors import CloudUnavailable
from control_plane.core.database_restore import BackedUpRun
from control_plane.db import jobs, schema
from control_plane.db.backups import RestoredRun
from control_plane.db.models import JobRow
from control_plane.db.session import Database
from control_plane.db_commands import EXIT_FAILED, EXIT_REFUSED, found_in_s3, main, restore
from control_plane.replica import ServerReplica
from everstep.protocol.manifest import encode_manifest
from everstep.protocol.plan import ObjectReference
from tests import sqlite
from tests.fakes.cloud import MemoryObjectStore
from tests.unit.control_plane.core.test_database_restore import FOLDER, RUN, manifest
from tests.unit.control_plane.db.conftest import NOW, new_job

pytestmark = pytest.mark.usefixtures("restored_umask")

STRANGER = RestoredRun(
    run_id=RUN,
    job_name="gpt",
    checkpoint_uri="s3://b/k/",
    has_ended=False,
    backup=BackedUpRun(generations=frozenset(), complete=frozenset()),
)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Return a server's state directory, whose database has an unfinished job."""
    directory = tmp_path / "state"
    directory.mkdir()
    database = sqlite.migrated(directory / "everstep.db")
    with database.write() as session:
        jobs.create(session, new_job(), NOW)
    database.close()
    return directory


def run(*arguments: object) -> int:
    return main([str(each) for each in arguments])


def test_backup_restore_check_and_migrate(state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("backup", "--state-dir", state, tmp_path / "backup") == 0
    new = tmp_path / "new"
    assert run("restore", "--state-dir", new, "--without-checkpoints", tmp_path / "backup") == 0
    assert run("check", "--state-dir", new) == 0
    assert run("migrate", "--state-dir", new) == 0
    words = capsys.readouterr().out
    assert "New generations have numbers above 17" in words
    assert f"the database is intact, with schema {schema.newest()}" in words
    assert f"schema {schema.newest()} → {schema.newest()}" in words


def test_a_damaged_database_has_another_exit_code(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database = Database(f"sqlite:///{state / 'everstep.db'}")
    with database.write() as session:
        session.execute(update(JobRow).values(generation=3, issued_generation=3))
    database.close()
    assert run("check", "--state-dir", state) == EXIT_FAILED
    assert "job gpt: its generation 3 has no row" in capsys.readouterr().out


def test_a_running_server_keeps_its_database(state: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run("backup", "--state-dir", state, tmp_path / "backup")
    (state / "everstep.db").rename(tmp_path / "moved.db")
    with ServerReplica(state):
        assert run("restore", "--state-dir", state, tmp_path / "backup") == EXIT_REFUSED
    assert "a server runs with the state directory" in caplog.text
    assert not (state / "everstep.db").exists()
    assert run("restore", "--state-dir", state, "--without-checkpoints", tmp_path / "backup") == 0


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        ("mysql://db/everstep", EXIT_REFUSED, "Everstep supports sqlite and postgresql"),
        ("postgresql://db:port/everstep", EXIT_REFUSED, "the database URL cannot be read"),
        ("postgresql://user:geheim@127.0.0.1:1/everstep", EXIT_FAILED, "the database failed: connection failed"),
        ("sqlite:////nowhere/everstep.db", EXIT_REFUSED, "/nowhere/everstep.db does not exist"),
    ],
)
def test_a_wrong_database_url_is_named(
    url: str, code: int, words: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for command in (["check"], ["backup", tmp_path / "backup"]):
        caplog.clear()
        assert run(*command, "--database-url", url) == code
        assert words in caplog.text
        assert "geheim" not in caplog.text


def test_without_s3_nothing_is_restored(state: Path, tmp_path: Path) -> None:
    run("backup", "--state-dir", state, tmp_path / "backup")

    def connect() -> MemoryObjectStore:
        raise CloudUnavailable("S3 does not answer")

    with pytest.raises(CloudUnavailable):
        restore(tmp_path / "backup", f"sqlite:///{tmp_path / 'new.db'}", connect, NOW)
    assert not list(tmp_path.glob("*new.db*"))


def test_invalid_manifests_are_skipped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    objects = MemoryObjectStore("b")

    def put(key: str, body: bytes) -> None:
        objects.put(ObjectReference(bucket="b", key=f"{FOLDER}{key}"), body)

    put("gen=1/step=5/manifest.json", encode_manifest(manifest(1, 5, [(1, 0)])))
    put("gen=1/step=5/u/rank=0.safetensors", b"no manifest")
    put("gen=1/step=6/manifest.json", b"{}")
    put("gen=1/step=7/manifest.json", encode_manifest(manifest(1, 5, [(1, 0)])))
    with caplog.at_level(logging.WARNING):
        found = found_in_s3(objects, STRANGER)
    assert [(each.generation, each.step) for each in found.changes.checkpoints] == [(1, 5)]
    assert found.manifests[found.changes.checkpoints[0].generation, found.changes.checkpoints[0].step].object_bytes == 2
    assert "step=6/manifest.json: not a checkpoint manifest" in caplog.text
    assert "step=7/manifest.json: it names objects of another run" in caplog.text
