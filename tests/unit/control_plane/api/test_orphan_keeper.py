"""A loop deletes shards that ended generations uploaded without completing a checkpoint. It deletes no other object."""

from __future__ import annotations

from datetime import timedelta

import pytest

from control_plane.cloud.errors import CloudUnavailable
from control_plane.core.orphans import KEPT_SECONDS
from control_plane.db import checkpoints
from control_plane.loop.orphan_keeper import OrphanKeeper
from everstep.protocol.plan import ObjectReference
from tests.unit.control_plane.api.conftest import BUCKET
from tests.unit.control_plane.api.test_results import Job

DAY = timedelta(days=1).total_seconds()


@pytest.fixture
def job(service, client, fleet, source) -> Job:
    """Return a job in its second generation.

    The first generation completed the checkpoint of step 10 and left a shard of step 20. The second generation is
    uploading step 30.
    """
    job = Job(service, client, source)
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


def test_a_run_is_listed_once_per_generation_and_again_after_a_failure(service, job, monkeypatch):
    keeper = OrphanKeeper(service.database, service.objects, service.clock)
    service.clock.advance(DAY)
    listed = []
    real = service.objects.list

    def list_objects(prefix: ObjectReference, **more):
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
