"""A loop deletes shards that ended generations uploaded without completing a checkpoint. It deletes no other object."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta

import pytest

from control_plane.cloud.errors import CloudUnavailable
from control_plane.core.orphans import KEPT_SECONDS
from control_plane.db import automation, backups, checkpoints, jobs
from control_plane.db.session import Database
from control_plane.db_commands import restore
from control_plane.loop.orphan_keeper import OrphanKeeper
from everstep.protocol.plan import ObjectReference
from tests.unit.control_plane.api.conftest import BUCKET
from tests.unit.control_plane.api.test_results import Job

DAY = timedelta(days=1).total_seconds()


@pytest.fixture
def job(service, client, fleet, source) -> Job:
    """Return a job without a trash, in its second generation.

    The first generation completed the checkpoint of step 10 and left a shard of step 20. The second generation is
    uploading step 30.
    """
    return trainee(service, client, source, CheckpointConfig={"TrashHours": 0})


def trainee(service, client, source, **request) -> Job:
    job = Job(service, client, source, **request)
    job.launch(1)
    job.run_ranks()
    job.checkpoint(10)
    job.put("checkpoints", f"run={job.run}/gen=1/step=20/u/rank=0.safetensors")
    job.launch(2, base=10)
    job.put("checkpoints", f"run={job.run}/gen=2/step=30/u/rank=0.safetensors")
    return job


def folders(service, job: Job) -> set[str]:
    place = ObjectReference(bucket=BUCKET, key=f"projects/default/jobs/gpt/run={job.run}/checkpoints/run={job.run}/")
    return {
        info.reference.key.removeprefix(place.key).rpartition("/step=")[2][:2] for info in service.objects.list(place)
    }


def test_an_upload_of_an_ended_generation_is_deleted_and_a_running_one_stays(service, client, job):
    keeper = OrphanKeeper(service.database, service.objects, service.clock)
    assert keeper.delete_due() == 0, "the second generation has just begun"
    service.clock.advance(2 * KEPT_SECONDS + 1)
    assert keeper.delete_due() == 1
    assert folders(service, job) == {"10", "30"}
    assert [each["Step"] for each in client.list_checkpoints(TrainingJobName="gpt")["Checkpoints"]] == [10]


def test_a_run_with_an_invalid_manifest_keeps_its_objects_and_delays_no_other_run(service, client, job, source):
    invalid = Job(service, client, source, TrainingJobName="invalid")
    invalid.launch(1)
    invalid.invalid_checkpoint(10, checkpoints.COMPLETE)
    invalid.launch(2, base=10)
    service.clock.advance(2 * KEPT_SECONDS + 1)
    assert OrphanKeeper(service.database, service.objects, service.clock).delete_due() == 1
    assert folders(service, job) == {"10", "30"}


@pytest.mark.security
@pytest.mark.parametrize(
    ("name", "body"),
    [("999999999999", b"[]"), ("9999999999", b"[]"), ("1", b'["\xff"]')],
    ids=["beyond datetime", "latest time", "not UTF-8"],
)
def test_forged_records_of_the_trash_delete_nothing_and_delay_no_orphan(service, job, name, body):
    job.put("checkpoints", f"run={job.run}/trash/{name}.json", body)
    service.clock.advance(2 * KEPT_SECONDS + 1)
    assert OrphanKeeper(service.database, service.objects, service.clock).delete_due() == 1
    assert {"10", "30"} <= folders(service, job)


@pytest.mark.security
@pytest.mark.parametrize("error", [CloudUnavailable("no answer"), RecursionError("too deep")])
def test_runs_that_always_fail_do_not_take_the_places_of_others(service, client, job, source, monkeypatch, error):
    other = Job(service, client, source, TrainingJobName="other")
    other.launch(1)
    other.launch(2)
    keeper = OrphanKeeper(service.database, service.objects, service.clock, runs_at_once=1)
    service.clock.advance(DAY)
    real, failed = service.objects.list, []

    def list_objects(prefix: ObjectReference, **more):
        if not failed or prefix.key in failed:
            failed.append(prefix.key)
            raise error
        return real(prefix, **more)

    monkeypatch.setattr(service.objects, "list", list_objects)
    for number in range(3):
        keeper.delete_due()
        assert len(failed) == max(1, number), "the failed run follows after the other run"
    monkeypatch.setattr(service.objects, "list", real)
    keeper.delete_due()
    assert folders(service, job) == {"10", "30"}


def test_a_run_is_listed_once_per_generation_and_again_after_a_failure(service, job, monkeypatch):
    keeper = OrphanKeeper(service.database, service.objects, service.clock)
    service.clock.advance(DAY)
    listed = []
    real = service.objects.list

    def list_objects(prefix: ObjectReference, **more):
        if prefix.key.endswith(f"/run={job.run}/"):
            listed.append(prefix)
            if len(listed) == 1:
                raise CloudUnavailable("no answer")
        return real(prefix, **more)

    monkeypatch.setattr(service.objects, "list", list_objects)
    assert [keeper.delete_due() for _ in range(3)] == [0, 1, 0]
    assert len(listed) == 2
    job.launch(3, base=10)
    service.clock.advance(DAY)
    assert keeper.delete_due() == 1, "generation 2 ended during its upload"


def test_orphans_stay_in_the_trash_for_a_day_whatever_restarts(service, client, source, fleet):
    job = trainee(service, client, source)
    service.clock.advance(2 * KEPT_SECONDS + 1)
    keeper = OrphanKeeper(service.database, service.objects, service.clock)
    assert keeper.delete_due() == 0
    assert "20" in folders(service, job)
    (trashed,) = [each for each in client.list_events(TrainingJobName="gpt")["Events"] if "Trashed" in each["Type"]]
    assert trashed["Message"].endswith("in the trash until 2026-03-02 14:00 UTC: 1 bytes.")
    service.clock.advance(DAY - 1)
    assert keeper.delete_due() == OrphanKeeper(service.database, service.objects, service.clock).delete_due() == 0
    service.clock.advance(1)
    assert keeper.delete_due() == 1
    assert folders(service, job) == {"10", "30"}
    assert keeper.delete_due() == 0


def test_orphans_stay_while_s3_lacks_the_checkpoint_that_the_job_would_be_restored_from(
    service, client, job, monkeypatch
):
    keeper = OrphanKeeper(service.database, service.objects, service.clock)
    service.clock.advance(DAY)
    place = ObjectReference(
        bucket=BUCKET,
        key=f"projects/default/jobs/gpt/run={job.run}/checkpoints/run={job.run}/gen=1/step=10/u/rank=1.safetensors",
    )
    body = service.objects.get(place)
    service.objects.delete(BUCKET, [place.key])
    assert keeper.delete_due() == 0
    service.objects.put(place, body)
    service.clock.advance(KEPT_SECONDS)
    assert keeper.delete_due() == 1


def test_a_restored_database_purges_no_object_that_it_has_never_heard_of(
    service, client, source, fleet, tmp_path, empty_database_url
):
    """The backup lacks step 40 of generation 1 and the whole generation 2, and S3 was not read during the restore."""
    job = Job(service, client, source, CheckpointConfig={"TrashHours": 0})
    job.launch(1)
    job.run_ranks()
    job.checkpoint(10)
    backups.back_up(service.database, tmp_path / "backup")
    job.checkpoint(40)
    job.launch(2, base=10)
    job.put("checkpoints", f"run={job.run}/gen=2/step=30/u/rank=0.safetensors")
    restore(tmp_path / "backup", empty_database_url, None, service.clock())
    before = folders(service, job)
    with closing(Database(empty_database_url)) as database:
        with database.write() as session:
            lease = job.leaser.claim(session, "job", job.run)
            jobs.change(session, lease, ended_at=service.clock(), reason="ended", generation=1)
        service.clock.advance(DAY)
        keeper = OrphanKeeper(database, service.objects, service.clock)
        assert keeper.delete_due() == 0, "the restore waits for a person"
        with database.write() as session:
            automation.accept_restores(session, service.clock())
        for _ in range(2):
            assert keeper.delete_due() == 0
            service.clock.advance(2 * DAY)
    assert folders(service, job) == before == {"10", "30", "40"}
