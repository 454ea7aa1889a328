from __future__ import annotations

from contextlib import closing

import pytest
from botocore.exceptions import WaiterError

from control_plane.api.routes import jobs as job_routes
from control_plane.cloud.errors import CloudUnavailable
from control_plane.db import checkpoints, jobs, nodes
from control_plane.db.checkpoints import SavedCheckpoint
from control_plane.db.tokens import Role
from control_plane.loop.job_objects import OBJECTS_AT_ONCE
from control_plane.loop.records import prefix_of
from everstep.protocol.plan import ObjectReference
from tests.unit.control_plane.api.conftest import BUCKET, START, USERS_BUCKET, refused
from tests.unit.control_plane.api.test_results import Job, move_outputs

GPT = {"TrainingJobName": "gpt"}
AT_ONCE = {"CheckpointConfig": {"TrashHours": 0}}


@pytest.fixture
def job(service, client, fleet, source):
    """Return a job without a trash that has stored logs, outputs, checkpoints and all other kinds of data."""
    job = Job(service, client, source, **AT_ONCE)
    job.launch(1)
    record = SavedCheckpoint(
        generation=1,
        step=8,
        state=checkpoints.COMPLETE,
        bucket=BUCKET,
        manifest_key="m",
        manifest=None,
        object_bytes=1,
        created_at=START,
        completed_at=START,
    )
    job.write(checkpoints.record, record)
    job.open_incident("inc-0")
    job.put("logs", "gen=1/node=i-0/000000000000-1.jsonl")
    job.put("output", "gen=1/rank=0/model.bin", b"weights")
    job.put("checkpoints", f"run={job.run}/gen=1/step=8/manifest.json")
    job.put("output", "of-another/gen=1/rank=0/model.bin")
    job.put("checkpoints", "run=another/gen=1/step=8/manifest.json")
    return job


def end(service, job):
    job.write(jobs.change, ended_at=service.clock(), reason="stopped", node_microseconds=3_600_000_000, cost_usd=98.32)


def keys(service):
    return sorted(
        info.reference.key.partition("/run=")[2].partition("/")[2]
        for info in service.objects.list(ObjectReference(bucket=BUCKET, key="projects/default/jobs/"))
    )


def own(job):
    return [
        "logs/gen=1/rank=0.stdout",
        "output/gen=1/rank=0/model.bin",
        f"checkpoints/run={job.run}/gen=1/step=8/manifest.json",
    ]


def others():
    return sorted(["output/of-another/gen=1/rank=0/model.bin", "checkpoints/run=another/gen=1/step=8/manifest.json"])


@pytest.mark.covers("DeleteTrainingJob.DryRun")
def test_a_dry_run_says_what_would_go_and_takes_nothing(service, client, job):
    end(service, job)
    before = keys(service)
    told = client.delete_training_job(**GPT, DryRun=True, DeleteObjects=True)
    assert (told["IsDeleted"], told["GenerationCount"], told["CheckpointCount"], told["IncidentCount"]) == (
        False,
        1,
        1,
        1,
    )
    assert (told["ObjectCount"], told["ObjectBytes"], told["HasMoreObjects"]) == (3, 9, False)
    assert (told["NodeSeconds"], told["CostUsd"]) == (3600, 98.32)
    assert all(uri.startswith(f"s3://{BUCKET}/projects/default/jobs/gpt/run={job.run}/") for uri in told["S3Uris"])
    assert keys(service) == before
    client.describe_training_job(**GPT)


@pytest.mark.covers("DeleteTrainingJob.TrainingJobName")
def test_the_rows_go_and_the_objects_stay_unless_asked(service, client, job):
    end(service, job)
    before = keys(service)
    told = client.delete_training_job(**GPT)
    assert (told["IsDeleted"], told["ObjectCount"]) == (True, 0)
    assert keys(service) == before
    with refused("ResourceNotFoundException"):
        client.describe_training_job(**GPT)
    assert client.list_training_jobs()["TrainingJobSummaries"] == []
    with refused("ResourceNotFoundException"):
        client.describe_incident(IncidentId="inc-0")
    assert client.list_events(**GPT)["Events"][-1]["Type"] == "TrainingJobDeleted"
    with refused("ResourceNotFoundException"):
        client.delete_training_job(**GPT)


@pytest.mark.covers("DeleteTrainingJob.DeleteObjects")
def test_its_objects_go_when_asked_and_nobody_elses(service, client, job):
    end(service, job)
    assert client.delete_training_job(**GPT, DeleteObjects=True)["ObjectCount"] == 3
    assert keys(service) == others()


def test_outputs_among_what_belongs_to_others_stay(service, client, job):
    victim = ObjectReference(bucket=BUCKET, key="jobs/victim/run=1/output/gen=1/rank=0/x")
    service.objects.put(victim, b"weights")
    move_outputs(service, job.run, f"s3://{BUCKET}/jobs/victim/run=1/output/")
    end(service, job)
    told = client.delete_training_job(**GPT, DeleteObjects=True)
    assert (told["IsDeleted"], told["ObjectCount"]) == (True, 2)
    assert not any("victim" in uri for uri in told["S3Uris"])
    assert service.objects.head(victim).size_bytes == 7


def test_a_job_made_again_under_its_name_has_nothing_of_the_one_before(service, client, fleet, source):
    places = []
    for number, generation in ((1, 3), (2, 1)):
        job = Job(service, client, source, OutputDataConfig={"S3OutputPath": f"s3://{USERS_BUCKET}/out"}, **AT_ONCE)
        assert client.list_outputs(**GPT)["Outputs"] == []
        places.append(prefix_of(client.describe_training_job(**GPT)["OutputDataConfig"]["S3OutputPath"]))
        service.objects.put(
            ObjectReference(bucket=USERS_BUCKET, key=f"{places[-1].key}gen={generation}/rank=0/model.bin"), b"weights"
        )
        assert [entry["Generation"] for entry in client.list_outputs(**GPT)["Outputs"]] == [generation]
        end(service, job)
        assert client.delete_training_job(**GPT, DeleteObjects=number == 2)["IsDeleted"]
    assert [len(list(service.objects.list(place))) for place in places] == [1, 0]


def put_many(job: Job, count: int) -> None:
    """Store `count` further log objects of the job."""
    for number in range(count):
        job.put("logs", f"gen=1/node=i-9/{number:012}-1.jsonl")


def test_many_objects_go_in_several_calls(service, client, job):
    end(service, job)
    put_many(job, OBJECTS_AT_ONCE - 2)
    first = client.delete_training_job(**GPT, DeleteObjects=True)
    assert (first["IsDeleted"], first["HasMoreObjects"], first["ObjectCount"]) == (False, True, OBJECTS_AT_ONCE)
    client.describe_training_job(**GPT)
    second = client.delete_training_job(**GPT, DeleteObjects=True)
    assert (second["IsDeleted"], second["HasMoreObjects"], second["ObjectCount"]) == (True, False, 1)
    assert keys(service) == others()


def test_a_deletion_that_broke_off_is_made_good_by_the_same_call(service, client, job, monkeypatch):
    end(service, job)
    with monkeypatch.context() as broken:

        def fail(bucket, some):
            raise CloudUnavailable("no answer")

        broken.setattr(service.objects, "delete", fail)
        with closing(service.client()) as impatient, refused("ServiceUnavailableException"):
            impatient.delete_training_job(**GPT, DeleteObjects=True)
    client.describe_training_job(**GPT)
    assert client.delete_training_job(**GPT, DeleteObjects=True)["IsDeleted"]


def test_a_job_that_has_not_ended_or_is_not_let_go_of_is_refused(service, client, job):
    with refused("ConflictException", match="stop it first"):
        client.delete_training_job(**GPT)
    end(service, job)
    job.connect("i-0")
    with service.database.write() as session:
        lease = job.leaser.claim(session, "fleet", "main")
        nodes.change(session, lease, "i-0", initial_state="joining", now=START, state="assigned", run_id=job.run)
    with refused("ConflictException", match="still delete its state: i-0"):
        client.delete_training_job(**GPT)


def test_a_job_can_be_deleted_once_the_waiter_for_its_end_returns(service, client, job):
    end(service, job)
    job.write(jobs.change, state="stopped")
    job.connect("i-0")

    def assign(state, run):
        with service.database.write() as session:
            lease = job.leaser.claim(session, "fleet", "main")
            nodes.change(session, lease, "i-0", initial_state="joining", now=START, state=state, run_id=run)

    assign("assigned", job.run)
    waiter = client.get_waiter("training_job_completed_or_stopped")
    with pytest.raises(WaiterError, match="Max attempts exceeded"):
        waiter.wait(**GPT, WaiterConfig={"Delay": 0, "MaxAttempts": 2})
    assign("spare", None)
    waiter.wait(**GPT, WaiterConfig={"Delay": 0, "MaxAttempts": 1})
    assert client.delete_training_job(**GPT)["IsDeleted"]


@pytest.mark.parametrize(("project", "which"), [("default", "'next'"), ("speech", "a job of another project")])
def test_a_job_from_whose_checkpoint_an_unfinished_job_starts_stays(service, client, source, fleet, project, which):
    job = Job(service, client, source)
    job.launch(1)
    job.checkpoint(8)
    end(service, job)
    request = {"TrainingJobName": "next", "Source": source, "EntryPoint": "train.py", "NodeCount": 2}
    dependent = client.create_training_job(Project=project, InitialCheckpoint={"RunId": job.run}, **request)["RunId"]
    with refused("ConflictException", match=f"step 8 of 'gpt' is the initial state of {which}; wait until"):
        client.delete_training_job(**GPT)
    job.end(dependent)
    assert client.delete_training_job(**GPT)["IsDeleted"]


def test_no_job_starts_from_a_job_whose_objects_are_being_deleted(service, client, source, fleet):
    job = Job(service, client, source, **AT_ONCE)
    job.launch(1)
    job.checkpoint(8)
    end(service, job)
    put_many(job, OBJECTS_AT_ONCE)
    assert not client.delete_training_job(**GPT, DeleteObjects=True)["IsDeleted"]
    request = {"TrainingJobName": "next", "Source": source, "EntryPoint": "train.py", "NodeCount": 2}
    with refused("ValidationException", match="has no complete checkpoint"):
        client.create_training_job(InitialCheckpoint={"RunId": job.run}, **request)
    while not client.delete_training_job(**GPT, DeleteObjects=True)["IsDeleted"]:
        pass


def test_a_checkpoint_that_is_deleted_while_a_request_is_checked_starts_no_job(
    service, client, source, fleet, monkeypatch
):
    job = Job(service, client, source)
    job.launch(1)
    job.checkpoint(8)
    end(service, job)
    admit = job_routes.admit

    def admit_late(*arguments, **options):
        with closing(service.client()) as other:
            other.delete_checkpoint(**GPT, Step=8)
        return admit(*arguments, **options)

    monkeypatch.setattr(job_routes, "admit", admit_late)
    request = {"TrainingJobName": "next", "Source": source, "EntryPoint": "train.py", "NodeCount": 2}
    with refused("ValidationException", match="the checkpoint of step 8 of gpt was deleted"):
        client.create_training_job(InitialCheckpoint={"RunId": job.run}, **request)


def test_others_may_not(service, client, job):
    end(service, job)
    with (
        closing(service.client(service.token(Role.SUBMITTER, "speech"))) as stranger,
        refused("ResourceNotFoundException"),
    ):
        stranger.delete_training_job(**GPT)
    with closing(service.client(service.token(Role.VIEWER, "default"))) as reader, refused("AccessDeniedException"):
        reader.delete_training_job(**GPT)


def test_the_name_is_free_again(service, client, job, source):
    end(service, job)
    client.delete_training_job(**GPT)
    again = client.create_training_job(**GPT, Source=source, EntryPoint="train.py", NodeCount=1)
    assert again["RunId"] != job.run
