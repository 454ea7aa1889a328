"""Deleted checkpoints stay in the trash, from which a person can undelete them, and marks in S3 repeat both facts."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta

import pytest

from control_plane.cloud.errors import AccessDenied, CloudUnavailable, GarbledAnswer, NotFound
from control_plane.db import automation, backups, checkpoints, retention
from control_plane.db.session import Database
from control_plane.db_commands import main, restore
from control_plane.loop.checkpoint_keeper import CheckpointKeeper
from control_plane.loop.verifier import Verifier
from everstep.protocol.plan import ObjectReference
from tests.unit.control_plane.api.conftest import BUCKET, refused
from tests.unit.control_plane.api.test_checkpoint_keeper import collect, keeper, keys, steps
from tests.unit.control_plane.api.test_unreadable_store import Broken
from tests.unit.control_plane.loop.test_failing_reads import ERRORS

GPT = {"TrainingJobName": "gpt"}
HOUR = timedelta(hours=1).total_seconds()


def mark(job, step: int, name: str, generation: int = 1) -> ObjectReference:
    folder = f"projects/default/jobs/gpt/run={job.run}/checkpoints/run={job.run}"
    return ObjectReference(bucket=BUCKET, key=f"{folder}/gen={generation}/step={step}/{name}")


def trash(client) -> list[int]:
    return [each["Step"] for each in client.list_checkpoints(**GPT, Trashed=True)["Checkpoints"]]


def kinds(client) -> list[str]:
    return [each["Type"] for each in client.list_events(**GPT)["Events"] if each["Type"].startswith("Checkpoint")]


@pytest.fixture
def job(make):
    """Return a job that keeps one checkpoint, and has three."""
    job = make(MaxCount=1, TrashHours=24)
    for step in (10, 20, 30):
        job.checkpoint(step)
    return job


@pytest.mark.covers("ListCheckpoints.Trashed", "CreateTrainingJob.CheckpointConfig.TrashHours")
def test_the_limits_fill_the_trash_and_time_empties_it(service, client, job):
    collect(service)
    assert (steps(client), trash(client), keys(service, job)) == ([30], [20, 10], {"10", "20", "30"})
    shown = client.list_checkpoints(**GPT, Trashed=True)
    assert {each["TrashCause"] for each in shown["Checkpoints"]} == {"Retention"}
    assert {each["PurgeTime"] for each in shown["Checkpoints"]} == {service.clock() + timedelta(hours=24)}
    assert shown["TrashBytes"] == sum(each["Bytes"] for each in shown["Checkpoints"]) > 0
    assert client.list_checkpoints(**GPT)["TrashBytes"] == shown["TrashBytes"]
    pages = client.get_paginator("list_checkpoints").paginate(**GPT, Trashed=True, PaginationConfig={"PageSize": 1})
    assert pages.build_full_result()["TrashBytes"] == shown["TrashBytes"], "the size of all pages, once"
    service.clock.advance(24 * HOUR - 1)
    collect(service)
    assert trash(client) == [20, 10]
    service.clock.advance(1)
    collect(service)
    assert (trash(client), keys(service, job)) == ([], {"30"})
    assert sorted(kinds(client)) == ["CheckpointDeleted"] * 2 + ["CheckpointTrashed"] * 2
    assert client.list_checkpoints(**GPT)["TrashBytes"] == 0


@pytest.mark.covers("UndeleteCheckpoint.TrainingJobName", "UndeleteCheckpoint.Step", "UndeleteCheckpoint.Generation")
def test_an_undeleted_checkpoint_is_pinned_so_that_the_limits_leave_it(service, client, job):
    collect(service)
    shown = client.undelete_checkpoint(**GPT, Step=20, Generation=1)
    assert (shown["Status"], shown["IsPinned"], "PurgeTime" in shown) == ("Complete", True, False)
    assert client.undelete_checkpoint(**GPT, Step=20)["Status"] == "Complete", (
        "asked again, because the answer was lost"
    )
    service.clock.advance(25 * HOUR)
    collect(service)
    assert (steps(client), trash(client), keys(service, job)) == ([30, 20], [], {"20", "30"})
    assert kinds(client).count("CheckpointUndeleted") == 1
    with refused("ConflictException", match="step 10 is deleted"):
        client.undelete_checkpoint(**GPT, Step=10)


@pytest.mark.covers("DeleteCheckpoint.SkipTrash")
def test_a_persons_deletion_goes_to_the_trash_unless_the_person_skips_it(service, client, job):
    client.update_training_job(**GPT, CheckpointConfig={"MaxCount": 0})
    deleted = client.delete_checkpoint(**GPT, Step=20)
    assert (deleted["Status"], deleted["TrashCause"]) == ("Trashed", "Person")
    assert client.delete_checkpoint(**GPT, Step=20)["Status"] == "Trashed", "a repeated call deletes nothing more"
    assert keys(service, job) == {"10", "20", "30"}
    assert client.delete_checkpoint(**GPT, Step=20, SkipTrash=True)["Status"] == "Deleted"
    assert client.delete_checkpoint(**GPT, Step=10, SkipTrash=True)["Status"] == "Deleted"
    assert keys(service, job) == {"30"}


def test_a_persons_deletion_needs_a_later_checkpoint_while_the_job_runs(service, client, job):
    client.update_training_job(**GPT, CheckpointConfig={"MaxCount": 0})
    client.delete_checkpoint(**GPT, Step=20)
    service.clock.advance(24 * HOUR)
    keeper(service).delete_due()
    assert keys(service, job) == {"10", "20", "30"}
    collect(service)
    assert keys(service, job) == {"10", "30"}


@pytest.mark.covers("UpdateTrainingJob.CheckpointConfig.TrashHours")
def test_new_hours_apply_to_later_deletions(service, client, job):
    collect(service)
    client.update_training_job(**GPT, CheckpointConfig={"TrashHours": 0})
    job.checkpoint(40)
    collect(service)
    assert (steps(client), trash(client)) == ([40], [20, 10])


def test_the_last_check_needs_a_later_verified_checkpoint_in_s3(service, client, job):
    """The only later checkpoint loses a shard while the others are in the trash."""
    collect(service)
    service.objects.delete(BUCKET, [mark(job, 30, "u/rank=1.safetensors").key])
    service.clock.advance(24 * HOUR)
    collect(service)
    assert trash(client) == [20, 10]
    (last,) = client.list_checkpoints(**GPT)["Checkpoints"]
    assert last["Verification"] == "Damaged", "the last check requests another verification"
    job.checkpoint(40)
    collect(service)
    assert (trash(client), keys(service, job)) == ([30], {"30", "40"})


@pytest.mark.parametrize("call", ["list", "get"])
def test_nothing_is_purged_while_s3_does_not_answer_the_last_check(service, client, job, call, monkeypatch):
    collect(service)
    service.clock.advance(24 * HOUR)
    with monkeypatch.context() as patch:

        def deny(*_: object, **__: object) -> None:
            raise AccessDenied("The provided token has expired.", code="ExpiredToken")

        patch.setattr(service.objects, call, deny)
        keeper(service).delete_due()
    assert trash(client) == [20, 10]
    keeper(service).delete_due()
    assert trash(client) == []


def test_what_is_in_the_trash_is_no_base_and_no_initial_checkpoint(service, client, job, source):
    collect(service)
    request = {"TrainingJobName": "next", "Source": source, "EntryPoint": "train.py", "NodeCount": 2}
    with refused("ValidationException", match="no complete checkpoint of step 20"):
        client.create_training_job(InitialCheckpoint={**GPT, "Step": 20}, **request)
    with refused("ConflictException", match="step 20 is trashed"):
        client.pin_checkpoint(**GPT, Step=20)


@pytest.mark.parametrize("lost", ["the answer", "the commit"])
def test_a_crash_between_s3_and_the_database_protects_the_checkpoint(service, client, job, lost, monkeypatch):
    """The server dies while a person undeletes a checkpoint, or pins one.

    The marks in S3 are written, the database is not.
    """
    collect(service)
    if lost == "the answer":
        service.objects.delete(BUCKET, [mark(job, 20, "trashed").key])
    else:
        service.objects.put(mark(job, 20, "pinned"), b"{}")
    service.clock.advance(24 * HOUR)
    keeper(service).delete_due()
    assert keys(service, job) == {"20", "30"}
    assert [each["Step"] for each in client.list_checkpoints(**GPT)["Checkpoints"]][1] == 20
    assert client.describe_checkpoint(**GPT, Step=20)["IsPinned"] == (lost == "the commit")


def test_s3_knows_pins_and_the_trash(service, client, job):
    def marks() -> set[str]:
        names = {info.reference.key.rpartition("/")[2] for info in service.objects.list(mark(job, 10, ""))}
        return names & {"pinned", "trashed"}

    client.pin_checkpoint(**GPT, Step=10)
    assert marks() == {"pinned"}
    client.unpin_checkpoint(**GPT, Step=10)
    assert marks() == set()
    collect(service)
    assert marks() == {"trashed"}
    client.undelete_checkpoint(**GPT, Step=10)
    assert marks() == {"pinned"}


def test_a_pin_that_s3_refuses_is_no_pin(service, client, job, monkeypatch):
    def fail(*_: object) -> None:
        raise CloudUnavailable("no answer")

    with monkeypatch.context() as patch, closing(service.client()) as impatient:
        patch.setattr(service.objects, "put", fail)
        with refused("ServiceUnavailableException"):
            impatient.pin_checkpoint(**GPT, Step=10)
    assert not client.describe_checkpoint(**GPT, Step=10)["IsPinned"]


def test_pins_of_an_older_version_get_their_marks(service, client, job):
    with service.database.write() as session:
        found = checkpoints.find(session, job.run, step=10, generation=1)
        checkpoints.set_pinned(session, job.run, found, service.clock())
    keeper(service).delete_due()
    service.objects.head(mark(job, 10, "pinned"))


@pytest.fixture
def restored(service, client, make, tmp_path):
    """Yield a job, and a database that was restored from a backup without the job's later pins and deletions."""
    job = make(MaxCount=2, TrashHours=24)
    for step in (10, 20, 30):
        job.checkpoint(step)
    backups.back_up(service.database, tmp_path / "backup")
    client.pin_checkpoint(**GPT, Step=10)
    for step in (40, 50):
        job.checkpoint(step)
    client.pin_checkpoint(**GPT, Step=40)
    job.checkpoint(60)
    collect(service)
    assert (steps(client), trash(client)) == ([60, 50, 40, 10], [30, 20])
    return job


def states(database: Database, job) -> dict[int, str]:
    with database.read() as session:
        rows = checkpoints.of_run(session, job.run)
    return {each.step: f"{'pinned ' if each.pinned_at else ''}{each.state}" for each in rows}


def run_keeper(database: Database, service) -> None:
    for _ in range(4):
        CheckpointKeeper(database, service.objects, service.clock).delete_due()
        Verifier(database, service.objects, service.clock).verify_next()


@pytest.mark.usefixtures("restored_umask")
def test_a_restored_database_knows_pins_and_the_trash_and_waits_for_a_person(
    service, client, restored, tmp_path, capsys
):
    url = f"sqlite:///{tmp_path / 'restored.db'}"
    garbled = restored.checkpoint(70)
    service.objects.put(mark(restored, 70, "manifest.json"), b"{}")
    restore(tmp_path / "backup", url, lambda: service.objects, service.clock())
    expected = {10: "pinned complete", 20: "trashed", 30: "trashed", 40: "pinned complete", 50: "complete"}
    with closing(Database(url)) as database:
        assert states(database, restored) == {**expected, 60: "complete"}
        service.clock.advance(48 * HOUR)
        run_keeper(database, service)
        assert keys(service, restored) == {"10", "20", "30", "40", "50", "60", "70"}, "nobody has seen the differences"
        assert main(["restored", "--database-url", url]) == 0
        shown = capsys.readouterr().out
        assert f"gpt (run {restored.run}), step 10 of generation 1: a mark in S3 says that it is pinned" in shown
        assert f"step {garbled.step} of generation 1: the manifest in S3 is invalid" in shown
        assert "until you run: everstep db restored --accept" in shown
        run_keeper(database, service)
        assert main(["restored", "--database-url", url, "--accept"]) == 0
        run_keeper(database, service)
        assert keys(service, restored) == {"10", "40", "50", "60", "70"}, (
            "the trash is purged, with all other objects left"
        )
        assert main(["restored", "--database-url", url]) == 0
        assert "deletions are not paused" in capsys.readouterr().out


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("call", ["list", "get"])
def test_a_failed_read_ends_a_restore_before_a_server_can_use_the_database(service, tmp_path, call):
    def fail(name, read):
        if name == call:
            raise error
        return read()

    for error in ERRORS:
        with pytest.raises(type(error)):
            restore(
                tmp_path / "backup",
                f"sqlite:///{tmp_path / 'x.db'}",
                lambda: Broken(service.objects, fail),
                service.clock(),
            )
        assert not (tmp_path / "x.db").exists()


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("cut_count", [1, 100], ids=["a list that ends early", "an empty bucket"])
def test_a_list_that_lacks_manifests_deletes_no_checkpoint(service, tmp_path, cut_count):
    """S3 cuts its first answer, or the name belongs to another bucket."""
    lists = iter(range(cut_count))

    def cut(name, read):
        return iter(()) if name == "list" and next(lists, None) is not None else read()

    with pytest.raises(NotFound if cut_count > 1 else GarbledAnswer):
        restore(
            tmp_path / "backup", f"sqlite:///{tmp_path / 'x.db'}", lambda: Broken(service.objects, cut), service.clock()
        )
    assert not (tmp_path / "x.db").exists()


def test_a_manifest_that_does_not_decode_is_not_missing(service, client, restored, tmp_path):
    url = f"sqlite:///{tmp_path / 'restored.db'}"
    service.objects.put(mark(restored, 30, "manifest.json"), b"{}")
    restore(tmp_path / "backup", url, lambda: service.objects, service.clock())
    with closing(Database(url)) as database:
        assert states(database, restored)[30] == "trashed"


@pytest.mark.parametrize("is_told", [False, True])
def test_pins_protect_also_after_a_restore_without_s3(service, client, restored, tmp_path, is_told):
    """The restore does not read S3. The backup has 10 and 20 as surplus checkpoints once 30 is verified."""
    url = f"sqlite:///{tmp_path / 'restored.db'}"
    restore(tmp_path / "backup", url, None, service.clock())
    with closing(Database(url)) as database:
        assert states(database, restored) == {10: "complete", 20: "complete", 30: "complete"}
        if is_told:
            with database.write() as session:
                automation.accept_restores(session, service.clock())
        for _ in range(3):
            run_keeper(database, service)
            service.clock.advance(25 * HOUR)
        assert states(database, restored)[10] == ("pinned complete" if is_told else "complete")
    assert keys(service, restored) == {"10", "20", "30", "40", "50", "60"}


def test_a_person_deletes_nothing_for_good_before_the_restore_is_accepted(service, client, job):
    with service.database.write() as session:
        restored = automation.DatabaseRestore(restored_at=service.clock(), first_generation=1, differences=())
        automation.add_restore(session, restored)
    with refused("ConflictException", match="everstep db restored"):
        client.delete_checkpoint(**GPT, Step=20, SkipTrash=True)
    assert client.delete_checkpoint(**GPT, Step=20)["Status"] == "Trashed"


def test_pruned_rows_trash_no_checkpoint_within_the_limit(service, client, make):
    """The limits count checkpoints from which the job can restore, and only its generations say which these are."""
    job = make(MaxCount=3, TrashHours=24)
    for generation, step in ((1, 10), (2, 20), (3, 30)):
        if generation > 1:
            job.launch(generation, base=step - 10)
        job.checkpoint(step, generation=generation)
    collect(service)
    job.end(job.run)
    client.verify_checkpoint(**GPT, Step=30)
    service.clock.advance(24 * HOUR * 60)
    with service.database.write() as session:
        retention.prune(session, retention.DEFAULT, service.clock())
    collect(service)
    assert (steps(client), trash(client)) == ([30, 20, 10], [])


def test_the_last_usable_checkpoint_stays_in_the_trash(service, client, make):
    """The newest checkpoint proves damaged while the older one, which a person deleted, is in the trash."""
    job = make(TrashHours=24)
    for step in (10, 20):
        job.checkpoint(step)
    client.delete_checkpoint(**GPT, Step=10)
    service.objects.delete(BUCKET, [mark(job, 20, "u/rank=1.safetensors").key])
    client.verify_checkpoint(**GPT, Step=20)
    Verifier(service.database, service.objects, service.clock).verify_next()
    service.clock.advance(24 * HOUR)
    collect(service)
    assert "10" in keys(service, job), "the only checkpoint that is whole is purged"
    assert trash(client) == [10]
    job.checkpoint(30)
    collect(service)
    assert (trash(client), "10" in keys(service, job)) == ([], False)


def test_a_servers_clock_that_jumps_does_not_empty_the_trash(service, client, make):
    job = make(TrashHours=24)
    for step in (10, 20, 30):
        job.checkpoint(step)
    collect(service)
    client.delete_checkpoint(**GPT, Step=10)
    real = service.clock()
    service.objects.now = lambda: real
    service.clock.advance(48 * HOUR)
    collect(service)
    assert "10" in keys(service, job), "S3's clock says that no time has passed"
    service.objects.now = service.clock
    collect(service)
    assert "10" not in keys(service, job)
