from __future__ import annotations

from contextlib import closing

import pytest
from botocore.config import Config

from control_plane.cloud.errors import Throttled
from control_plane.db import fleets, jobs
from control_plane.db.leases import Leaser
from control_plane.db.tokens import Role
from tests.postgresql import BOTH_ENGINES
from tests.unit.control_plane.api.conftest import BUCKET, GROUP, all_pages, refused, without_metadata

pytestmark = pytest.mark.parametrize("engine", BOTH_ENGINES)


@pytest.fixture
def request_(fleet, source):
    return {"TrainingJobName": "gpt", "Source": source, "EntryPoint": "train.py", "NodeCount": 4}


def names(client, **query):
    return [job["TrainingJobName"] for job in client.list_training_jobs(**query)["TrainingJobSummaries"]]


ROLE = "arn:aws:iam::123456789012:role/team/training"
SECRETS = {
    "A": "secretsmanager:team/token",
    "B": "ssm:/team/token",
    "C": "arn:aws:secretsmanager:us-east-1:123456789012:secret:team/token-AbCdEf",
    "D": "arn:aws-cn:ssm:cn-north-1:123456789012:parameter/team/token",
}


def test_a_job_is_created_with_its_defaults_filled_in(client, request_, service):
    created = client.create_training_job(**request_)
    job = client.describe_training_job(TrainingJobName="gpt")
    assert without_metadata(created) == {
        "TrainingJobName": "gpt",
        "RunId": job["RunId"],
        "TrainingJobStatus": "InProgress",
    }
    assert (job["TrainingJobStatus"], job["SecondaryStatus"], job["FleetName"]) == ("InProgress", "Pending", "main")
    assert job["Protection"] == {"Copies": 2, "MaxSlowdown": 1.0}
    assert (
        job["CheckpointConfig"]["S3Uri"] == f"s3://{BUCKET}/projects/default/jobs/gpt/run={job['RunId']}/checkpoints/"
    )
    assert (job["Generation"], job["CommittedStep"], job["Boundary"], job["NodeIds"]) == (0, -1, -1, [])
    assert job["Reliability"] == {"LostSteps": 0}
    assert (job["AccountingSeconds"], job["NodeSeconds"], job.get("CostUsd")) == ({}, 0, None)
    assert [event["Type"] for event in client.list_events(TrainingJobName="gpt")["Events"]] == ["TrainingJobCreated"]


@pytest.mark.covers(
    "CreateTrainingJob.CheckpointConfig.S3Uri",
    "CreateTrainingJob.OutputDataConfig.S3OutputPath",
    "CreateTrainingJob.OutputDataConfig.Keep",
    "CreateTrainingJob.Tags",
    "CreateTrainingJob.RetryStrategy.MaxRepeatedMinutes",
    "CreateTrainingJob.RetryStrategy.OnTotalLoss",
)
def test_a_request_can_say_everything(client, request_):
    # The job can read only inputs that its role may read.
    inputs = [
        {"ChannelName": "train", "DataSource": {"S3DataSource": {"S3Uri": "s3://mine/set"}}},
        {
            "ChannelName": "ours",
            "DataSource": {"S3DataSource": {"S3Uri": f"s3://{BUCKET}/jobs/mine"}},
        },
        {"ChannelName": "words", "DataSource": {"FileSystemDataSource": {"DirectoryPath": "/mnt/words"}}},
    ]
    client.create_training_job(
        **request_,
        FleetName="main",
        HyperParameters={"steps": "200", "learning-rate": "1e-3"},
        Arguments=["--fp16", "data/", "", "--fp16"],
        Environment={"MODE": "fast"},
        RanksPerNode=2,
        Protection={"Copies": 3, "MaxSlowdown": 0.05},
        CheckpointConfig={
            "EverySteps": 100,
            "S3Uri": "s3://mine/checkpoints",
            "ThirdSlot": True,
            "MaxUploadsInFlight": 2,
        },
        InputDataConfig=inputs,
        Secrets=SECRETS,
        Requirements="train.py",
        RoleArn=ROLE,
        OutputDataConfig={"S3OutputPath": "s3://mine/out/", "Keep": ["runs/*", "*.pt"]},
        StoppingCondition={"MaxRuntimeInSeconds": 3600, "MaxPendingTimeInSeconds": 60},
        RetryStrategy={"MaxAttempts": 5, "MaxRepeatedMinutes": 60, "OnTotalLoss": "Restart"},
        Priority=7,
        Project="speech",
        Tags={"team": "a"},
    )
    job = client.describe_training_job(TrainingJobName="gpt")
    assert job["HyperParameters"] == {"steps": "200", "learning-rate": "1e-3"}
    assert job["Arguments"] == ["--fp16", "data/", "", "--fp16"]
    assert job["CheckpointConfig"] == {
        "EverySteps": 100,
        "S3Uri": "s3://mine/checkpoints/gpt/",
        "ThirdSlot": True,
        "TrashHours": 24,
        "MaxUploadsInFlight": 2,
        "OnNotice": True,
    }
    assert (job["InputDataConfig"], job["Secrets"], job["Requirements"], job["RoleArn"]) == (
        inputs,
        SECRETS,
        "train.py",
        ROLE,
    )
    assert job["OutputDataConfig"] == {
        "S3OutputPath": f"s3://mine/out/gpt/run={job['RunId']}/",
        "Keep": ["runs/*", "*.pt"],
    }
    assert job["StoppingCondition"] == {"MaxRuntimeInSeconds": 3600, "MaxPendingTimeInSeconds": 60}
    assert (job["RanksPerNode"], job["Protection"], job["Priority"], job["Project"]) == (
        2,
        {"Copies": 3, "MaxSlowdown": 0.05},
        7,
        "speech",
    )
    assert (job["RetryStrategy"], job["Tags"], job["Environment"]) == (
        {"MaxAttempts": 5, "MaxRepeatedMinutes": 60, "OnTotalLoss": "Restart"},
        {"team": "a"},
        {"MODE": "fast"},
    )


@pytest.mark.covers(
    "CreateTrainingJob.CheckpointConfig.IntervalInSeconds",
    "CreateTrainingJob.CheckpointConfig.MaxOverhead",
    "CreateTrainingJob.CheckpointConfig.MaxUploadBytesPerSecond",
    "CreateTrainingJob.CheckpointConfig.OnNotice",
)
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "on a notice of AWS and when the job stops"),
        ({"OnNotice": False}, "when the job stops"),
        (
            {"EverySteps": 1000, "IntervalInSeconds": 900, "OnNotice": False},
            "every 1,000 steps, every 900 s and when the job stops",
        ),
        (
            {"MaxOverhead": 0.035, "MaxUploadBytesPerSecond": 10**7},
            "as often as 3.50% overhead and 10,000,000 bytes per second and node permit, on a notice of AWS and when "
            "the job stops",
        ),
    ],
)
def test_a_job_shows_what_makes_its_checkpoints_due(client, request_, config, words):
    client.create_training_job(**request_, CheckpointConfig=config)
    job = client.describe_training_job(TrainingJobName="gpt")
    assert job["CheckpointConfig"].items() >= config.items()
    assert job["CheckpointActivity"] == {"Policy": words}


@pytest.mark.covers(
    "CreateTrainingJob.NodeCount",
)
def test_one_node_has_one_copy(client, request_):
    client.create_training_job(**{**request_, "NodeCount": 1})
    assert client.describe_training_job(TrainingJobName="gpt")["Protection"]["Copies"] == 1


def test_parity_keeps_one_copy(client, request_):
    client.create_training_job(**{**request_, "NodeCount": 4, "Protection": {"ParityGroupSize": 3}})
    assert client.describe_training_job(TrainingJobName="gpt")["Protection"] == {
        "Copies": 1,
        "ParityGroupSize": 3,
        "MaxSlowdown": 1.0,
    }
    messages = [event["Message"] for event in client.list_events(TrainingJobName="gpt")["Events"]]
    assert "gpt was created: 4 nodes × 1 ranks, parity of 3 nodes." in messages


def test_a_budget_alone_leaves_the_copies_to_the_nodes(client, request_):
    client.create_training_job(**{**request_, "NodeCount": 1, "Protection": {"MaxSlowdown": 0.05}})
    assert client.describe_training_job(TrainingJobName="gpt")["Protection"] == {"Copies": 1, "MaxSlowdown": 0.05}


def test_all_that_is_wrong_is_said_at_once(client, request_):
    with refused("ValidationException") as caught:
        client.create_training_job(
            **{
                **request_,
                "NodeCount": 9,
                "Protection": {"Copies": 8},
                "EntryPoint": "x.py",
                "Environment": {"RANK": "1"},
            }
        )
    assert [error.field for error in caught.value.fields] == ["Environment.RANK", "NodeCount", "EntryPoint"]


def test_a_missing_field_is_named(client, fleet):
    with refused("ValidationException") as caught:
        client.create_training_job(TrainingJobName="gpt", NodeCount=1)
    assert [(error.field, error.message) for error in caught.value.fields] == [("Source", "is missing")]


@pytest.mark.covers("CreateTrainingJob.Module")
@pytest.mark.parametrize(
    ("module", "file"),
    [("pkg", "pkg/__main__.py"), ("pkg.train", "pkg/train.py"), ("train", "train.py"), ("pkg.nothing", None)],
)
def test_a_module_is_a_file_of_the_source(client, fleet, tmp_path, module, file):
    for name in ("train.py", "pkg/__init__.py", "pkg/__main__.py", "pkg/train.py"):
        (tmp_path / "modules" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "modules" / name).write_text("")
    source = client.upload_source(Directory=tmp_path / "modules")
    request = {"TrainingJobName": "gpt", "Source": source, "Module": module, "NodeCount": 1}
    if file is None:
        with refused("ValidationException", "neither pkg/nothing.py nor pkg/nothing/__main__.py"):
            client.create_training_job(**request)
        return
    client.create_training_job(**request)
    job = client.describe_training_job(TrainingJobName="gpt")
    assert (job["Module"], job["EntryPoint"]) == (module, file)


@pytest.mark.parametrize("change", [{"EntryPoint": None}, {"Module": "train"}])
def test_a_job_has_an_entry_point_or_a_module(client, request_, change):
    request = {name: value for name, value in {**request_, **change}.items() if value is not None}
    with refused("ValidationException", "EntryPoint: the request needs either EntryPoint or Module"):
        client.create_training_job(**request)


@pytest.mark.covers(
    "CreateTrainingJob.ElasticConfig.MinNodeCount",
    "CreateTrainingJob.ElasticConfig.MaxNodeCount",
    "CreateTrainingJob.ElasticConfig.PatienceInSeconds",
)
def test_an_elastic_job_shows_its_numbers_of_nodes(client, request_):
    elastic = {"MinNodeCount": 2, "MaxNodeCount": 6, "PatienceInSeconds": 30}
    client.create_training_job(**request_, ElasticConfig=elastic)
    client.create_training_job(**{**request_, "TrainingJobName": "plain"})
    job = client.describe_training_job(TrainingJobName="gpt")
    assert (job["ElasticConfig"], job["GenerationNodeCount"]) == (elastic, 4)
    plain = client.describe_training_job(TrainingJobName="plain")
    assert plain["ElasticConfig"] == {"MinNodeCount": 4, "MaxNodeCount": 4, "PatienceInSeconds": 60}


@pytest.mark.parametrize(
    ("elastic", "field", "words"),
    [
        ({"MinNodeCount": 5}, "MinNodeCount", "5 nodes; it must be at most NodeCount, which is 4"),
        ({"MaxNodeCount": 3}, "MaxNodeCount", "3 nodes; it must be at least NodeCount, which is 4"),
        ({"MaxNodeCount": 900}, "MaxNodeCount", f"900 nodes; the group {GROUP} of the fleet main has MaxSize"),
    ],
)
def test_numbers_of_nodes_that_cannot_be_are_refused(client, request_, elastic, field, words):
    with refused("ValidationException") as refusal:
        client.create_training_job(**request_, ElasticConfig=elastic)
    (error,) = refusal.value.fields
    assert error.field == f"ElasticConfig.{field}"
    assert error.message.startswith(words)


def test_the_plan_names_the_numbers_of_nodes(client, request_):
    def plan(**elastic):
        return client.create_training_job(**request_, DryRun=True, ElasticConfig=elastic)["Plan"].get("Elasticity")

    assert plan() is None
    assert plan(MinNodeCount=3) == "may start and continue on 3 of 4 nodes after 60 s without capacity"
    assert plan(MinNodeCount=3, MaxNodeCount=6, PatienceInSeconds=5) == (
        "may start and continue on 3 of 4 nodes after 5 s without capacity; may grow to 6 nodes"
    )


@pytest.mark.covers("CreateTrainingJob.TrainingJobName")
def test_a_name_is_taken_once(client, request_):
    client.create_training_job(**request_)
    with refused("ConflictException", "already a training job named 'gpt'") as caught:
        client.create_training_job(**request_)
    assert (caught.value.code, bool(caught.value.hint)) == ("ConflictException", True)


@pytest.mark.covers("CreateTrainingJob.ClientRequestToken")
def test_the_same_request_again_is_answered_with_the_job_that_it_made(client, request_, service):
    """A client that repeats a request gets the job that the first request created.

    botocore repeats a request with the same body and token if the response is lost.
    """
    made = client.create_training_job(**request_, ClientRequestToken="once")
    again = client.create_training_job(**request_, ClientRequestToken="once")
    assert without_metadata(again) == without_metadata(made)
    assert [event["Type"] for event in client.list_events()["Events"]].count("TrainingJobCreated") == 1
    for other in ({"NodeCount": 3}, {"TrainingJobName": "another"}):
        with refused("ConflictException", "used for another request: it made the training job 'gpt'"):
            client.create_training_job(**{**request_, **other}, ClientRequestToken="once")
    with refused("ConflictException"):
        client.create_training_job(**request_, ClientRequestToken="twice")
    with refused("ConflictException"):
        # this call has a new token, because the client generates a token for each call
        client.create_training_job(**request_)


def test_two_of_the_same_request_at_once_make_one_job(client, request_, service, monkeypatch):
    made = client.create_training_job(**request_, ClientRequestToken="once")
    lookups = [None]
    known = jobs.made_by
    monkeypatch.setattr(jobs, "made_by", lambda *arguments: lookups.pop() if lookups else known(*arguments))
    monkeypatch.setattr("control_plane.api.routes.jobs._require_free", lambda *_: None)
    assert client.create_training_job(**request_, ClientRequestToken="once")["RunId"] == made["RunId"]
    assert names(client) == ["gpt"]


def test_the_fleet_may_be_left_out_only_where_there_is_one(client, request_, service):
    service.operator.create_group("another")
    client.create_fleet(FleetName="second", AutoScalingGroupName="another")
    with refused("ValidationException", "exactly one fleet exists; registered: main, second"):
        client.create_training_job(**request_)


def test_a_cloud_that_does_not_answer_does_not_hold_up_a_job(client, request_, service):
    service.operator.fail_next(Throttled("Rate exceeded"))
    client.create_training_job(**request_)
    assert names(client) == ["gpt"]


def test_jobs_are_listed_in_pages_newest_first(client, request_, service):
    for number in range(5):
        service.clock.advance(1)
        client.create_training_job(**{**request_, "TrainingJobName": f"job-{number}"})
    assert [job["TrainingJobName"] for job in all_pages(client, "list_training_jobs", MaxResults=2)] == [
        f"job-{n}" for n in (4, 3, 2, 1, 0)
    ]
    assert names(client, NameContains="-3") == ["job-3"]
    assert names(client, StatusEquals="Completed") == []
    for query in (
        {"NextToken": "nonsense"},
        {"TagValue": "x"},
        {"TagKey": 'a"b'},
        {"SortBy": "Size"},
        {"MaxResults": 0},
        {"StatusEquals": "Sleeping"},
    ):
        with refused("ValidationException"):
            client.list_training_jobs(**query)


@pytest.mark.covers("StopTrainingJob.TrainingJobName")
def test_a_stop_is_a_wish_until_the_loop_has_granted_it(client, request_, service):
    client.create_training_job(**request_)
    assert client.stop_training_job(TrainingJobName="gpt")["TrainingJobStatus"] == "Stopping"
    assert client.stop_training_job(TrainingJobName="gpt")["TrainingJobStatus"] == "Stopping"
    assert names(client, StatusEquals="Stopping") == ["gpt"]
    assert names(client, StatusEquals="InProgress") == []
    assert [event["Type"] for event in client.list_events()["Events"]].count("StopRequested") == 1
    _finish(service, "stopped", "It was stopped.")
    with refused("ConflictException", "has ended: It was stopped"):
        client.stop_training_job(TrainingJobName="gpt")


def test_a_failed_job_says_why(client, request_, service):
    client.create_training_job(**request_)
    _finish(service, "failed", "rank 0 exited with code 1: boom")
    job = client.describe_training_job(TrainingJobName="gpt")
    assert (job["TrainingJobStatus"], job["FailureReason"]) == ("Failed", "rank 0 exited with code 1: boom")
    assert [(entry["Status"], entry.get("EndTime") is None) for entry in job["SecondaryStatusTransitions"]] == [
        ("Pending", False),
        ("Failed", False),
    ]


@pytest.mark.covers("DescribeTrainingJob.TrainingJobName")
def test_what_is_not_there_is_not_found(client, fleet):
    for call in (
        client.describe_training_job,
        client.stop_training_job,
        client.describe_protection,
        client.list_checkpoints,
    ):
        with refused("ResourceNotFoundException", "no training job named 'nothing'"):
            call(TrainingJobName="nothing")


@pytest.mark.covers("CreateTrainingJob.Project")
def test_roles_and_projects(client, request_, service, tmp_path):
    client.create_training_job(**request_, Project="speech")
    speaker, viewer = (
        service.client(service.token(Role.SUBMITTER, "speech")),
        service.client(service.token(Role.VIEWER, "speech")),
    )
    stranger = service.client(service.token(Role.SUBMITTER, "vision"))
    assert names(viewer) == ["gpt"]
    assert names(stranger) == []
    for call in (stranger.describe_training_job, stranger.stop_training_job, stranger.list_outputs):
        with refused("ResourceNotFoundException"):
            call(TrainingJobName="gpt")
    with refused("AccessDeniedException", "may read"):
        viewer.stop_training_job(TrainingJobName="gpt")
    with refused("AccessDeniedException", "cannot create anything in 'vision'"):
        speaker.create_training_job(**{**request_, "TrainingJobName": "other", "Project": "vision"})
    # each project uploads the source, because it may use only its own sources
    source = speaker.upload_source(Directory=tmp_path / "code")
    speaker.create_training_job(**{**request_, "TrainingJobName": "other", "Source": source})
    assert client.describe_training_job(TrainingJobName="other")["Project"] == "speech"
    with refused("AccessDeniedException", "needs the role admin"):
        speaker.create_fleet(FleetName="x", AutoScalingGroupName=GROUP)
    nobody = service.client("est_wrong")
    with refused("AccessDeniedException", "unknown, expired or revoked"):
        names(nobody)
    for other in (speaker, viewer, stranger, nobody):
        other.close()


def test_an_agents_token_opens_nothing_here(client, service):
    token = client.create_join_token(FleetName="main")["JoinToken"]
    with refused("AccessDeniedException", "belongs to an agent"), closing(service.client(token)) as agent:
        agent.list_training_jobs()


@pytest.mark.parametrize(
    ("is_gone", "words"), [(False, "the fleet 'main' is being deleted"), (True, "there is no fleet named 'main'")]
)
def test_a_fleet_that_is_deleted_while_aws_is_asked_takes_no_job_in(client, request_, service, is_gone, words):
    look = service.operator.describe_group

    def others_delete(name: str):
        with service.database.write() as session:
            fleets.request_delete(session, "main", service.clock())
            if is_gone:
                fleets.remove(
                    session, Leaser("test", 3.0, lambda: 0.0).claim(session, "fleet", "main"), service.clock()
                )
        return look(name)

    service.operator.describe_group = others_delete
    with refused("ValidationException", words):
        client.create_training_job(**request_)
    assert names(client) == []


def test_a_cloud_that_is_away_is_said_to_be_away(service):
    service.operator.fail_next(Throttled("Rate exceeded"))
    impatient = service.client(config=Config(retries={"total_max_attempts": 1}))
    with closing(impatient), refused("ServiceUnavailableException", "Rate exceeded"):
        impatient.create_fleet(FleetName="main", AutoScalingGroupName=GROUP)


def test_what_may_work_later_is_tried_again(client, service, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr("botocore.endpoint.time.sleep", pauses.append)
    for _ in range(2):
        service.operator.fail_next(Throttled("Rate exceeded"))
    answer = client.create_fleet(FleetName="main", AutoScalingGroupName=GROUP)
    assert answer["ResponseMetadata"]["RetryAttempts"] == len(pauses) == 2


def _finish(service, state: str, reason: str) -> None:
    with service.database.write() as session:
        job = jobs.get(session, "gpt")
        lease = Leaser("test", 3.0, lambda: 0.0).claim(session, "job", job.run_id)
        jobs.transition(
            session, lease, before=job.state, after=state, now=service.clock(), reason=reason, ended_at=service.clock()
        )
