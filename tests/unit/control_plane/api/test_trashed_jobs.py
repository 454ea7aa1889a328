"""A deleted job stays in the trash with its checkpoints, logs and outputs, and one command takes it out."""

from __future__ import annotations

from contextlib import closing

import pytest

from control_plane.api.routes.deletions import TRASHED_AT_ONCE
from control_plane.cloud.errors import CloudUnavailable
from control_plane.db import automation, backups, checkpoints, jobs
from control_plane.db.session import Database
from control_plane.db_commands import restore
from control_plane.loop.job_objects import OBJECTS_AT_ONCE
from everstep.protocol.plan import ObjectReference
from tests.unit.control_plane.api.conftest import BUCKET, refused
from tests.unit.control_plane.api.test_checkpoint_keeper import collect, keeper, steps
from tests.unit.control_plane.api.test_deletions import put_many
from tests.unit.control_plane.api.test_trash import GPT, HOUR, mark, run_keeper, states, trash


@pytest.fixture
def job(service, make):
    """Return an ended job with three checkpoints, of which the limits have trashed two, and with other objects."""
    job = make(MaxCount=1, TrashHours=24)
    for step in (10, 20, 30):
        job.checkpoint(step)
    job.put("logs", "gen=1/node=i-0/000000000000-1.jsonl")
    job.put("output", "gen=1/rank=0/pinned", b"the name of an output is no mark")
    collect(service)
    job.end(job.run)
    return job


def everything(service, job) -> set[str]:
    place = ObjectReference(bucket=BUCKET, key=f"projects/default/jobs/gpt/run={job.run}/")
    return {info.reference.key.removeprefix(place.key) for info in service.objects.list(place)}


def types(client) -> list[str]:
    return [each["Type"] for each in client.list_events(**GPT)["Events"] if each["Type"].startswith("TrainingJob")]


@pytest.mark.covers("UndeleteTrainingJob.TrainingJobName")
def test_one_command_returns_a_deleted_job_with_all_that_it_had(service, client, job):
    before = everything(service, job)
    service.clock.advance(HOUR)
    gone = client.delete_training_job(**GPT, DeleteObjects=True)
    assert (gone["IsDeleted"], gone["HasMoreObjects"], gone["ObjectCount"]) == (False, False, 0)
    assert gone["PurgeTime"].timestamp() == service.clock().timestamp() + 24 * HOUR
    assert client.delete_training_job(**GPT, DeleteObjects=True)["PurgeTime"] == gone["PurgeTime"], "asked again"
    assert before < everything(service, job)
    assert (steps(client), trash(client)) == ([], [30, 20, 10])
    assert client.list_checkpoints(**GPT)["TrashBytes"] > 0
    (listed,) = client.list_training_jobs()["TrainingJobSummaries"]
    assert listed["PurgeTime"] == client.describe_training_job(**GPT)["PurgeTime"] == gone["PurgeTime"]
    service.clock.advance(24 * HOUR - 1)
    collect(service)
    for _ in range(2):
        assert "PurgeTime" not in client.undelete_training_job(**GPT)
    service.clock.advance(2 * HOUR)
    keeper(service).delete_due()
    assert {each["Step"] for each in client.list_checkpoints(**GPT)["Checkpoints"]} | set(trash(client)) == {10, 20, 30}
    assert everything(service, job) >= before - {"checkpoints/trashed"}
    assert types(client) == ["TrainingJobCreated", "TrainingJobTrashed", "TrainingJobUndeleted"]


def test_the_purge_deletes_what_the_job_has_and_then_its_records(service, client, job):
    put_many(job, OBJECTS_AT_ONCE)
    client.delete_training_job(**GPT, DeleteObjects=True)
    service.clock.advance(24 * HOUR)
    keeper(service).delete_due()
    assert "PurgeTime" in client.describe_training_job(**GPT), "one pass deletes a limited number"
    keeper(service).delete_due()
    assert everything(service, job) == set()
    with refused("ResourceNotFoundException"):
        client.describe_training_job(**GPT)
    assert types(client)[-1] == "TrainingJobDeleted"


def test_many_checkpoints_are_trashed_in_several_calls(service, client, job):
    for step in range(100, 100 + TRASHED_AT_ONCE - 2):
        job.checkpoint(step)
    answers = [client.delete_training_job(**GPT, DeleteObjects=True) for _ in range(2)]
    assert [each["HasMoreObjects"] for each in answers] == [True, False]
    assert ["PurgeTime" in each for each in answers] == [False, True]
    assert len(trash(client)) == TRASHED_AT_ONCE + 1


def test_an_undeleted_checkpoint_takes_its_job_out_of_the_trash(service, client, job):
    client.delete_training_job(**GPT, DeleteObjects=True)
    assert client.undelete_checkpoint(**GPT, Step=20)["IsPinned"]
    service.clock.advance(24 * HOUR)
    keeper(service).delete_due()
    keeper(service).delete_due()
    assert "PurgeTime" not in client.describe_training_job(**GPT)
    assert (steps(client), trash(client)) == ([20], [])
    assert any(key.startswith("logs/") for key in everything(service, job))


@pytest.mark.parametrize("lost", ["the job", "a checkpoint"])
def test_a_mark_that_s3_lacks_takes_the_job_out_of_the_trash(service, client, job, lost):
    """A server dies while a person undeletes the job: S3 has changed already, and the database has not."""
    client.delete_training_job(**GPT, DeleteObjects=True)
    places = {
        "the job": mark(job, 0, "").key.partition("gen=")[0] + "trashed",
        "a checkpoint": mark(job, 30, "trashed").key,
    }
    service.objects.delete(BUCKET, [places[lost]])
    service.clock.advance(24 * HOUR)
    for _ in range(3):
        keeper(service).delete_due()
    assert "PurgeTime" not in client.describe_training_job(**GPT)
    assert any(key.startswith("output/") for key in everything(service, job))
    assert steps(client) == ([30] if lost == "a checkpoint" else [])


@pytest.mark.parametrize("call", ["list", "delete"])
def test_an_outage_of_s3_delays_the_purge(service, client, job, call, monkeypatch):
    client.delete_training_job(**GPT, DeleteObjects=True)
    service.clock.advance(24 * HOUR)

    def fail(*_: object) -> None:
        raise CloudUnavailable("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(service.objects, call, fail)
        keeper(service).delete_due()
    assert "PurgeTime" in client.describe_training_job(**GPT)
    for _ in range(2):
        keeper(service).delete_due()
    assert everything(service, job) == set()


def test_the_trash_of_jobs_refuses_what_would_lose_it(service, client, job, source):
    client.delete_training_job(**GPT, DeleteObjects=True)
    with refused("ConflictException", match="in the trash; take it out first"):
        client.delete_training_job(**GPT)
    with refused("ConflictException", match="in the trash until 2026-03-02"):
        client.create_training_job(**GPT, Source=source, EntryPoint="train.py", NodeCount=1)
    with refused("ValidationException", match="no complete checkpoint"):
        request = {"TrainingJobName": "next", "Source": source, "EntryPoint": "train.py", "NodeCount": 2}
        client.create_training_job(InitialCheckpoint=GPT, **request)
    service.clock.advance(24 * HOUR)
    for each in (10, 20, 30):
        service.objects.delete(BUCKET, [mark(job, each, "pinned").key])
    with service.database.write() as session:
        for each in checkpoints.of_run(session, job.run):
            checkpoints.set_state(session, job.run, each, checkpoints.DELETED)
    with refused("ConflictException", match="time of the training job 'gpt' in the trash is over"):
        client.undelete_training_job(**GPT)


@pytest.mark.covers("DeleteTrainingJob.SkipTrash")
def test_a_job_can_be_deleted_for_good_also_from_the_trash(service, client, job):
    client.delete_training_job(**GPT, DeleteObjects=True)
    assert client.delete_training_job(**GPT, DeleteObjects=True, SkipTrash=True)["IsDeleted"]
    assert everything(service, job) == set()


def test_a_pin_in_s3_prevents_a_deletion_for_good(service, client, job):
    """The database does not know the pin: it was restored from a backup without S3."""
    service.objects.put(mark(job, 10, "pinned"), b"{}")
    before = everything(service, job)
    with refused("ConflictException", match="S3 has the mark of a pinned checkpoint"):
        client.delete_training_job(**GPT, DeleteObjects=True, SkipTrash=True)
    assert everything(service, job) == before


def test_a_restored_database_purges_no_job_that_a_person_took_out_of_the_trash(service, client, job, tmp_path):
    url = f"sqlite:///{tmp_path / 'restored.db'}"
    client.delete_training_job(**GPT, DeleteObjects=True)
    backups.back_up(service.database, tmp_path / "backup")
    client.undelete_training_job(**GPT)
    before = everything(service, job)
    restore(tmp_path / "backup", url, lambda: service.objects, service.clock())
    with closing(Database(url)) as database:
        service.clock.advance(48 * HOUR)
        run_keeper(database, service)
        assert everything(service, job) == before, "nobody has seen the differences"
        with database.write() as session:
            automation.accept_restores(session, service.clock())
        run_keeper(database, service)
        with database.read() as session:
            assert jobs.get(session, "gpt").purge_at is None
        assert states(database, job)[30] == "complete"
    assert {key for key in before if key.startswith(("logs/", "output/"))} <= everything(service, job)


def test_a_restored_database_deletes_no_job_for_good_before_a_person_has_seen_it(service, client, job):
    with service.database.write() as session:
        restored = automation.DatabaseRestore(restored_at=service.clock(), first_generation=1, differences=())
        automation.add_restore(session, restored)
    with refused("ConflictException", match="everstep db restored"):
        client.delete_training_job(**GPT, DeleteObjects=True, SkipTrash=True)
    client.delete_training_job(**GPT, DeleteObjects=True)
    service.clock.advance(48 * HOUR)
    keeper(service).delete_due()
    assert trash(client) == [30, 20, 10]
    client.undelete_training_job(**GPT)
    assert steps(client) == [30, 20, 10]
