from __future__ import annotations

import base64
from contextlib import closing

import pytest

from control_plane.db import jobs, nodes, protection, revisions
from control_plane.db.errors import Conflict
from control_plane.db.revisions import Change
from control_plane.db.tokens import Role
from everstep.cli import submission
from tests.unit.control_plane.api.conftest import START, all_pages, refused
from tests.unit.control_plane.api.test_results import Job, shard

GPT = {"TrainingJobName": "gpt"}


@pytest.fixture
def job(service, client, fleet, source):
    return Job(service, client, source)


def trains(service, job):
    job.launch(1)
    job.write(jobs.transition, before="queued", after="running", now=START, reason="trains", started_at=START)


def told(answer):
    return {
        change["Field"]: (change.get("Before"), change.get("After"), change["Applies"]) for change in answer["Changes"]
    }


@pytest.mark.covers(
    "UpdateTrainingJob.CheckpointConfig.IntervalInSeconds",
    "UpdateTrainingJob.CheckpointConfig.MaxOverhead",
    "UpdateTrainingJob.CheckpointConfig.MaxUploadBytesPerSecond",
    "UpdateTrainingJob.CheckpointConfig.OnNotice",
)
def test_a_job_may_change_from_a_fixed_to_an_automatic_interval(client, job):
    client.update_training_job(**GPT, CheckpointConfig={"IntervalInSeconds": 600, "OnNotice": False})
    with refused("ValidationException") as caught:
        client.update_training_job(**GPT, CheckpointConfig={"MaxOverhead": 0.02})
    assert [error.field for error in caught.value.fields] == ["CheckpointConfig.MaxOverhead"]
    change = {"IntervalInSeconds": 0, "MaxOverhead": 0.02, "MaxUploadBytesPerSecond": 10**6}
    assert told(client.update_training_job(**GPT, CheckpointConfig=change)) == {
        "CheckpointConfig.IntervalInSeconds": ("600", None, "Now"),
        "CheckpointConfig.MaxOverhead": (None, "0.02", "Now"),
        "CheckpointConfig.MaxUploadBytesPerSecond": (None, "1000000", "Now"),
    }
    config = client.describe_training_job(**GPT)["CheckpointConfig"]
    assert (config["OnNotice"], config["MaxOverhead"], "IntervalInSeconds" in config) == (False, 0.02, False)


@pytest.mark.covers(
    "UpdateTrainingJob.TrainingJobName",
    "UpdateTrainingJob.Priority",
    "UpdateTrainingJob.Preemptible",
    "UpdateTrainingJob.RetryStrategy.MaxAttempts",
    "UpdateTrainingJob.RetryStrategy.MaxRepeatedMinutes",
    "UpdateTrainingJob.RetryStrategy.OnTotalLoss",
    "UpdateTrainingJob.CheckpointConfig.ThirdSlot",
    "UpdateTrainingJob.Tags",
    "UpdateTrainingJob.Protection.Copies",
)
def test_what_can_change_at_once_does_and_the_plan_changes_with_the_next_generation(service, client, job):
    trains(service, job)
    service.clock.advance(60)
    answer = client.update_training_job(
        **GPT,
        Priority=7,
        Preemptible=True,
        RetryStrategy={"MaxAttempts": 9, "MaxRepeatedMinutes": 90, "OnTotalLoss": "Restart"},
        StoppingCondition={"MaxRuntimeInSeconds": 3600},
        Protection={"Copies": 1, "MaxSlowdown": 0.05},
        CheckpointConfig={"EverySteps": 50, "ThirdSlot": True},
        Tags={"team": "b"},
    )
    assert answer["Revision"] == 2
    assert told(answer) == {
        "Priority": ("0", "7", "Now"),
        "Preemptible": ("false", "true", "Now"),
        "RetryStrategy.MaxAttempts": ("3", "9", "Now"),
        "RetryStrategy.MaxRepeatedMinutes": ("30", "90", "Now"),
        "RetryStrategy.OnTotalLoss": ("Wait", "Restart", "Now"),
        "StoppingCondition.MaxRuntimeInSeconds": (None, "3600", "Now"),
        "Protection.Copies": ("2", "1", "NextGeneration"),
        "Protection.MaxSlowdown": ("1.0", "0.05", "NextGeneration"),
        "CheckpointConfig.EverySteps": ("0", "50", "NextGeneration"),
        "CheckpointConfig.ThirdSlot": ("false", "true", "NextGeneration"),
        "Tags": ("{}", '{"team": "b"}', "Now"),
    }
    seen = client.describe_training_job(**GPT)
    assert (seen["Revision"], seen["ObservedRevision"], seen["Priority"], seen["Tags"]) == (2, 1, 7, {"team": "b"})
    assert (seen["LastModifiedTime"] - START).total_seconds() == 60
    assert seen["Protection"] == {"Copies": 1, "MaxSlowdown": 0.05}
    assert client.list_events(**GPT)["Events"][-1]["Type"] == "TrainingJobUpdated"


def test_a_job_that_has_no_plan_takes_everything_at_once(client, job):
    answer = client.update_training_job(**GPT, Protection={"Copies": 1})
    assert told(answer) == {"Protection.Copies": ("2", "1", "Now")}
    assert "ObservedRevision" not in client.describe_training_job(**GPT)


def test_what_is_so_already_makes_no_revision(client, job):
    first = client.update_training_job(**GPT, Priority=7)
    again = client.update_training_job(**GPT, Priority=7)
    assert (first["Revision"], again["Revision"], again["Changes"]) == (2, 2, [])
    assert client.update_training_job(**GPT)["Revision"] == 2
    assert [event["Type"] for event in client.list_events(**GPT)["Events"]].count("TrainingJobUpdated") == 1


@pytest.mark.covers(
    "ListTrainingJobRevisions.TrainingJobName",
    "ListTrainingJobRevisions.MaxResults",
    "ListTrainingJobRevisions.NextToken",
)
def test_revisions_are_listed(service, client, job):
    client.update_training_job(**GPT, Priority=7)
    service.clock.advance(5)
    client.update_training_job(**GPT, StoppingCondition={"MaxPendingTimeInSeconds": 60})
    listed = client.list_training_job_revisions(**GPT)["Revisions"]
    assert [(each["Revision"], (each["Time"] - START).total_seconds(), list(told(each))) for each in listed] == [
        (1, 0, []),
        (2, 0, ["Priority"]),
        (3, 5, ["StoppingCondition.MaxPendingTimeInSeconds"]),
    ]
    for size in (1, 2):
        assert all_pages(client, "list_training_job_revisions", **GPT, MaxResults=size) == listed
    assert [each["Revision"] for each in client.list_training_job_revisions(**GPT, MaxResults=2)["Revisions"]] == [1, 2]
    for made_up in ("[Infinity]", "[NaN]", f"[{10**30}]", "[]", '["x"]', "{}"):
        token = base64.urlsafe_b64encode(made_up.encode()).decode()
        with refused("ValidationException"):
            client.list_training_job_revisions(**GPT, NextToken=token)


@pytest.mark.covers(
    "UpdateTrainingJob.StoppingCondition.MaxPendingTimeInSeconds",
    "UpdateTrainingJob.StoppingCondition.MaxRuntimeInSeconds",
)
def test_zero_lifts_a_limit(client, job):
    client.update_training_job(**GPT, StoppingCondition={"MaxRuntimeInSeconds": 60, "MaxPendingTimeInSeconds": 70})
    answer = client.update_training_job(**GPT, StoppingCondition={"MaxRuntimeInSeconds": 0})
    assert told(answer) == {"StoppingCondition.MaxRuntimeInSeconds": ("60", None, "Now")}
    assert client.describe_training_job(**GPT)["StoppingCondition"] == {"MaxPendingTimeInSeconds": 70}


@pytest.mark.parametrize(
    "field",
    [
        "NodeCount",
        "RanksPerNode",
        "EntryPoint",
        "Source",
        "HyperParameters",
        "Environment",
        "FleetName",
        "Project",
        "OutputDataConfig",
    ],
)
def test_what_cannot_change_is_refused_by_name(client, job, field):
    with refused("ValidationException", match=f"{field}: .* it is set at creation and cannot be changed"):
        client.update_training_job(**GPT, **{field: {}})


def test_what_cannot_be_is_refused_whole(service, client, job):
    with refused("ValidationException") as caught:
        client.update_training_job(**GPT, Priority=7, Protection={"Copies": 3}, StoppingCondition={"MaxCostUsd": 5})
    assert [error.field for error in caught.value.fields] == ["Protection.Copies", "StoppingCondition.MaxCostUsd"]
    assert client.describe_training_job(**GPT)["Priority"] == 0
    client.update_fleet(FleetName="main", PriceUsdPerHour=1.0)
    client.update_training_job(**GPT, StoppingCondition={"MaxCostUsd": 5})
    assert client.describe_training_job(**GPT)["StoppingCondition"] == {"MaxCostUsd": 5.0}


def test_a_limit_that_creation_would_refuse_is_refused(service, client, job):
    client.update_fleet(FleetName="main", PriceUsdPerHour=1.0)
    with refused("ValidationException") as caught:
        client.update_training_job(
            **GPT, CheckpointConfig={"MaxAgeInSeconds": 59}, StoppingCondition={"MaxCostUsd": 0.005}
        )
    assert [(error.field, error.message) for error in caught.value.fields] == [
        ("StoppingCondition.MaxCostUsd", "must be at least 0.01, not '0.005'; 0 removes the limit"),
        ("CheckpointConfig.MaxAgeInSeconds", "must be at least 60, not '59'; 0 removes the limit"),
    ]
    client.update_training_job(**GPT, CheckpointConfig={"MaxAgeInSeconds": 60}, StoppingCondition={"MaxCostUsd": 0.01})
    seen = client.describe_training_job(**GPT)
    assert (seen["CheckpointConfig"]["MaxAgeInSeconds"], seen["StoppingCondition"]) == (60, {"MaxCostUsd": 0.01})


def test_more_memory_is_held_against_what_the_nodes_have(service, client, job):
    trains(service, job)
    job.write(protection.record, [shard(0, True, True), shard(1, True, True)], START)  # each shard has 100 bytes
    with service.database.write() as session:
        for number in range(2):
            facts = nodes.AgentFacts(
                node_id=f"i-{number}",
                fleet_name="main",
                address="",
                peer_port=0,
                memory_bytes=500,
                agent_id="a",
                version="1",
            )
            nodes.note_hello(session, facts, initial_state="spare", now=START)
    with refused(
        "ValidationException",
        match="6 slots of 100 bytes need 600 bytes of host memory per node; the smallest node has 500",
    ):
        client.update_training_job(**GPT, CheckpointConfig={"ThirdSlot": True})
    client.update_training_job(**GPT, Protection={"Copies": 1})


@pytest.mark.covers("UpdateTrainingJob.Protection.ParityGroupSize")
def test_parity_is_decided_at_creation(client, job):
    with refused("ValidationException", match="Protection.ParityGroupSize: cannot change after creation"):
        client.update_training_job(**GPT, Protection={"ParityGroupSize": 2})


def test_a_job_with_parity_keeps_one_copy(client, fleet, source):
    request = {"Source": source, "EntryPoint": "train.py", "NodeCount": 4, "Protection": {"ParityGroupSize": 4}}
    client.create_training_job(**GPT, **request)
    with refused("ValidationException", match="Protection.Copies: parity keeps 1 copy of each shard, not 2"):
        client.update_training_job(**GPT, Protection={"Copies": 2})
    client.update_training_job(**GPT, Protection=client.describe_training_job(**GPT)["Protection"])
    assert client.update_training_job(**GPT, Protection={"MaxSlowdown": 0.05})["Changes"]


def test_a_job_with_parity_keeps_the_nodes_of_one_group(client, fleet, source):
    request = {"Source": source, "EntryPoint": "train.py", "NodeCount": 4, "Protection": {"ParityGroupSize": 3}}
    client.create_training_job(**GPT, **request)
    with refused("ValidationException", match="ElasticConfig.MinNodeCount: groups of 3 nodes need 3 nodes"):
        client.update_training_job(**GPT, ElasticConfig={"MinNodeCount": 2})
    assert client.update_training_job(**GPT, ElasticConfig={"MinNodeCount": 3, "MaxNodeCount": 6})["Changes"]


@pytest.mark.covers("UpdateTrainingJob.CheckpointConfig.ThirdSlot")
def test_a_third_slot_is_not_taken_back(service, client, job):
    client.update_training_job(**GPT, CheckpointConfig={"ThirdSlot": True})
    client.update_training_job(**GPT, CheckpointConfig={"ThirdSlot": False})
    client.update_training_job(**GPT, CheckpointConfig={"ThirdSlot": True})
    trains(service, job)
    with refused("ValidationException", match="cannot be removed after"):
        client.update_training_job(**GPT, CheckpointConfig={"ThirdSlot": False})


def test_an_ended_job_is_history(service, client, job):
    job.write(jobs.change, ended_at=START, reason="done")
    with refused("ConflictException", match="has ended: done"):
        client.update_training_job(**GPT, Priority=7)


def test_of_two_updates_at_once_one_is_refused(service, client, job):
    with service.database.read() as session:
        read = jobs.get(session, "gpt")
    client.update_training_job(**GPT, Priority=7)
    change = Change(field="Priority", before="0", after="8", needs_generation=False)
    with service.database.write() as session, pytest.raises(Conflict, match="at the same time"):
        revisions.revise(session, read, spec=read.spec, priority=8, tags={}, changes=(change,), now=START)


def test_others_may_not(service, client, job):
    with closing(service.client(service.token(Role.VIEWER, "default"))) as reader, refused("AccessDeniedException"):
        reader.update_training_job(**GPT, Priority=7)
    with (
        closing(service.client(service.token(Role.SUBMITTER, "speech"))) as stranger,
        refused("ResourceNotFoundException"),
    ):
        stranger.update_training_job(**GPT, Priority=7)


def test_a_job_does_not_differ_from_the_request_that_made_it(client, fleet, source):
    """A job and the request that created it are compared, and no difference is reported.

    The service has appended the job's own directory to the checkpoint and output paths. The comparison ignores this
    directory.
    """
    request = {
        **GPT,
        "FleetName": "main",
        "Source": {"SourceId": source["SourceId"]},
        "EntryPoint": "train.py",
        "HyperParameters": {"lr": "1"},
        "Environment": {"A": ""},
        "Secrets": {"KEY": "ssm:key"},
        "RoleArn": "arn:aws:iam::123456789012:role/mine",
        "NodeCount": 2,
        "RanksPerNode": 2,
        "Protection": {"Copies": 2, "MaxSlowdown": 0.05},
        "CheckpointConfig": {"EverySteps": 50, "S3Uri": "s3://mine/checkpoints", "ThirdSlot": True, "MaxCount": 3},
        "InputDataConfig": [{"ChannelName": "train", "DataSource": {"S3DataSource": {"S3Uri": "s3://mine/data/"}}}],
        "OutputDataConfig": {"S3OutputPath": "s3://mine/out/"},
        "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
        "RetryStrategy": {"MaxAttempts": 4},
        "Priority": 7,
        "Preemptible": True,
        "Project": "default",
        "Tags": {"team": "b"},
    }
    client.create_training_job(**request)
    made = client.describe_training_job(**GPT)
    assert submission.difference(made, request) == {}
    places = {"CheckpointConfig": made["CheckpointConfig"], "OutputDataConfig": made["OutputDataConfig"]}
    assert submission.difference(made, places) == {}, "as they are shown"
    other = {
        "CheckpointConfig": {"S3Uri": "s3://mine/out/"},
        "OutputDataConfig": {"S3OutputPath": "s3://mine/checkpoints"},
    }
    assert submission.difference(made, other) == other


@pytest.mark.covers(
    "UpdateTrainingJob.ElasticConfig.MinNodeCount",
    "UpdateTrainingJob.ElasticConfig.MaxNodeCount",
    "UpdateTrainingJob.ElasticConfig.PatienceInSeconds",
)
def test_the_numbers_of_nodes_of_a_running_job_can_change(service, client, job):
    trains(service, job)
    change = {"MinNodeCount": 1, "MaxNodeCount": 6, "PatienceInSeconds": 5}
    assert told(client.update_training_job(**GPT, ElasticConfig=change)) == {
        "ElasticConfig.MinNodeCount": (None, "1", "Now"),
        "ElasticConfig.MaxNodeCount": (None, "6", "Now"),
        "ElasticConfig.PatienceInSeconds": ("60", "5", "Now"),
    }
    assert client.describe_training_job(**GPT)["ElasticConfig"] == change
    answer = client.update_training_job(**GPT, ElasticConfig={"MinNodeCount": 0, "MaxNodeCount": 0})
    assert told(answer)["ElasticConfig.MinNodeCount"] == ("1", None, "Now")
    assert client.describe_training_job(**GPT)["ElasticConfig"]["MinNodeCount"] == 2


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"MinNodeCount": 5}, "MinNodeCount", "5 nodes; it must be at most NodeCount, which is 2"),
        ({"MaxNodeCount": 1}, "MaxNodeCount", "1 nodes; it must be at least NodeCount, which is 2"),
        ({"MaxNodeCount": 900}, "MaxNodeCount", "900 nodes; the group "),
    ],
)
def test_numbers_of_nodes_that_creation_would_refuse_are_refused(client, job, change, field, words):
    with refused("ValidationException") as refusal:
        client.update_training_job(**GPT, ElasticConfig=change)
    (error,) = refusal.value.fields
    assert error.field == f"ElasticConfig.{field}"
    assert error.message.startswith(words)


def test_a_maximum_beyond_the_quota_of_the_project_is_refused(client, job):
    client.put_project_quota(Project="default", MaxNodeCount=4)
    client.update_training_job(**GPT, ElasticConfig={"MaxNodeCount": 4})
    with refused("ValidationException", match="5 nodes; jobs of the project default may hold 4 nodes of a fleet"):
        client.update_training_job(**GPT, ElasticConfig={"MaxNodeCount": 5})
