"""The service refuses requests for jobs that cannot run.

All tests use one service, because a refused request stores no data.
"""

from __future__ import annotations

from contextlib import closing

import pytest

from everstep.protocol.plan import CHECK_VARIABLE
from tests.unit.control_plane.api.conftest import BUCKET, GROUP, Service, refused

ROLE = "arn:aws:iam::123456789012:role/training"
S3 = {"S3DataSource": {"S3Uri": "s3://data/set"}}
HERE = {"FileSystemDataSource": {"DirectoryPath": "/data"}}


def channel(name: str) -> dict:
    return {"ChannelName": name, "DataSource": S3}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("service")) as running:
        running.operator.create_group(GROUP, max_size=8)
        yield running


@pytest.fixture(scope="module")
def client(service):
    with closing(service.client()) as connected:
        yield connected


@pytest.fixture(scope="module")
def request_(client, tmp_path_factory):
    client.create_fleet(FleetName="main", AutoScalingGroupName=GROUP)
    directory = tmp_path_factory.mktemp("code")
    (directory / "train.py").write_text("pass")
    (directory / "data.txt").write_text("x")
    (directory / "environment.yaml").write_text("dependencies: [numpy]")
    return {
        "TrainingJobName": "gpt",
        "Source": client.upload_source(Directory=directory),
        "EntryPoint": "train.py",
        "NodeCount": 4,
    }


@pytest.mark.parametrize(
    ("change", "field", "figure"),
    [
        (
            {"Environment": {f"NAME{number}": "x" * 4000 for number in range(20)}, "Arguments": ["y" * 2000] * 5},
            "Environment",
            "may have 65536. Put large values into a file",
        ),
        ({"Protection": {"Copies": 5}}, "Protection.Copies", "5 copies need 5 nodes; NodeCount is 4"),
        ({"Protection": {"ParityGroupSize": 1}}, "Protection.ParityGroupSize", "must be at least 2"),
        ({"Protection": {"ParityGroupSize": 9}}, "Protection.ParityGroupSize", "must be at most 8"),
        (
            {"Protection": {"ParityGroupSize": 5}},
            "Protection.ParityGroupSize",
            "groups of 5 nodes need 5 nodes; NodeCount is 4. Lower ParityGroupSize or raise NodeCount",
        ),
        (
            {"Protection": {"ParityGroupSize": 4, "Copies": 2}},
            "Protection.Copies",
            "parity keeps 1 copy of each shard, not 2; remove Copies or ParityGroupSize",
        ),
        (
            {"Protection": {"ParityGroupSize": 4}, "ElasticConfig": {"MinNodeCount": 3}},
            "ElasticConfig.MinNodeCount",
            "groups of 4 nodes need 4 nodes; MinNodeCount is 3. Raise MinNodeCount or lower ParityGroupSize",
        ),
        ({"Protection": {"MaxSlowdown": 0}}, "Protection.MaxSlowdown", "must be at least 0.0001"),
        ({"NodeCount": 9}, "NodeCount", "NodeCount is 9; the group training-group of the fleet main has MaxSize 8"),
        (
            {"EntryPoint": "missing.py"},
            "EntryPoint",
            "'missing.py' is not among the 3 files of the source; the source has train.py at its top level",
        ),
        ({"EntryPoint": "../train.py"}, "EntryPoint", "is not among"),
        ({"EntryPoint": "data.txt"}, "EntryPoint", "is not a Python file"),
        ({"Source": {"SourceId": "0" * 64}}, "Source.SourceId", "was not uploaded"),
        ({"Source": {"SourceId": "../../etc"}}, "Source.SourceId", "must match ^"),
        ({"FleetName": "other"}, "FleetName", "there is no fleet named 'other'; registered: main"),
        ({"TrainingJobName": "no_underscores"}, "TrainingJobName", "no_underscores"),
        ({"TrainingJobName": "a" * 64}, "TrainingJobName", "must match ^"),
        ({"TrainingJobName": "trailing\n"}, "TrainingJobName", "must match ^"),
        ({"Environment": {"RANK": "0"}}, "Environment.RANK", "set by Everstep"),
        ({"Environment": {"EVERSTEP_TOKEN": "x"}}, "Environment.EVERSTEP_TOKEN", "set by Everstep"),
        *(
            (
                {"Environment": {CHECK_VARIABLE: steps}},
                f"Environment.{CHECK_VARIABLE}",
                "number of steps from 2 to 1000",
            )
            for steps in ("", "1", "1001", "-8", "8.0", "٨", "8\n")
        ),
        ({"Secrets": {CHECK_VARIABLE: "ssm:/a"}}, f"Secrets.{CHECK_VARIABLE}", "set by Everstep"),
        ({"Environment": {"A=B": "x"}}, "Environment.A=B", "must match ^"),
        ({"NodeCount": 0}, "NodeCount", "must be at least 1, not '0'"),
        ({"NodeCount": "many"}, "NodeCount", "many"),
        ({"RanksPerNode": 65}, "RanksPerNode", "64"),
        ({"Secrets": {"A": "hunter2"}}, "Secrets.A", "must match ^(secretsmanager:"),
        ({"Secrets": {"RANK": "ssm:/a"}}, "Secrets.RANK", "set by Everstep"),
        ({"Secrets": {"A": "ssm:/a"}, "Environment": {"A": ""}}, "Secrets.A", "is also set in Environment"),
        (
            {"Secrets": {"SM_CHANNEL_X": "ssm:/a"}, "InputDataConfig": [channel("x")]},
            "Secrets.SM_CHANNEL_X",
            "is set by the channel 'x'",
        ),
        (
            {"Requirements": "requirements.txt"},
            "Requirements",
            "'requirements.txt' is not among the 3 files of the source",
        ),
        (
            {"Requirements": "environment.yaml"},
            "Requirements",
            "Write missing packages into a requirements.txt",
        ),
        ({"Requirements": ""}, "Requirements", "must have at least 1 characters"),
        ({"RoleArn": "arn:aws:iam::1:role/x"}, "RoleArn", "must match ^arn:aws"),
        (
            {"RoleArn": ROLE, "Environment": {"AWS_PROFILE": "x"}},
            "Environment.AWS_PROFILE",
            "would prevent ranks from using the credentials of RoleArn",
        ),
        (
            {"RoleArn": ROLE, "Secrets": {"AWS_ACCESS_KEY_ID": "ssm:/x"}},
            "Secrets.AWS_ACCESS_KEY_ID",
            "would prevent ranks from using the credentials of RoleArn",
        ),
        (
            {"Environment": {"AWS_EC2_METADATA_DISABLED": "false"}},
            "Environment.AWS_EC2_METADATA_DISABLED",
            "set by Everstep",
        ),
        ({"InputDataConfig": [{"ChannelName": "x"}]}, "InputDataConfig[0].DataSource", "is missing"),
        (
            {"InputDataConfig": [{"ChannelName": "x", "DataSource": {}}]},
            "InputDataConfig[0].DataSource",
            "must contain either S3DataSource or FileSys",
        ),
        (
            {"InputDataConfig": [{"ChannelName": "x", "DataSource": {**S3, **HERE}}]},
            "InputDataConfig[0].DataSource",
            "must contain either",
        ),
        (
            {"InputDataConfig": [channel("a-b"), channel("A_b")]},
            "InputDataConfig[1].ChannelName",
            "the channels 'A_b' and 'a-b' would both set SM_CHANNEL_A_B",
        ),
        ({"InputDataConfig": [channel("a.b")]}, "InputDataConfig[0].ChannelName", "must match ^"),
        ({"InputDataConfig": [channel("x")] * 21}, "InputDataConfig", "at most 20"),
        (
            {"InputDataConfig": [channel("x")], "Environment": {"SM_CHANNEL_X": "/"}},
            "Environment.SM_CHANNEL_X",
            "is set by the channel 'x'",
        ),
        (
            {
                "InputDataConfig": [
                    {"ChannelName": "x", "DataSource": {"S3DataSource": {"S3Uri": f"s3://{BUCKET}/jobs/other"}}}
                ]
            },
            "InputDataConfig[0].DataSource.S3DataSource.S3Uri",
            "everstep is the service's own bucket",
        ),
        (
            {"OutputDataConfig": {"S3OutputPath": f"s3://{BUCKET}"}},
            "OutputDataConfig.S3OutputPath",
            "everstep is the service's own bucket",
        ),
        (
            {"OutputDataConfig": {"S3OutputPath": f"s3://{BUCKET}/jobs/other/run=1"}, "RoleArn": ROLE},
            "OutputDataConfig.S3OutputPath",
            "own bucket",
        ),
        (
            {"CheckpointConfig": {"S3Uri": f"s3://{BUCKET}/jobs/other"}},
            "CheckpointConfig.S3Uri",
            "everstep is the service's own bucket",
        ),
        (
            {"CheckpointConfig": {"S3Uri": "s3://mine/" + "x" * 896}},
            "CheckpointConfig.S3Uri",
            "has a path of 901 characters",
        ),
        (
            {"OutputDataConfig": {"S3OutputPath": "s3://mine/" + "x" * 900}},
            "OutputDataConfig.S3OutputPath",
            "has a path of 942 characters",
        ),
        (
            {
                "InputDataConfig": [
                    {"ChannelName": "x", "DataSource": {"FileSystemDataSource": {"DirectoryPath": "data"}}}
                ]
            },
            "InputDataConfig[0].DataSource.FileSystemDataSource.DirectoryPath",
            "must match ^/",
        ),
        (
            {"InputDataConfig": [{**channel("x"), "InputMode": "File"}]},
            "InputDataConfig[0].InputMode",
            "a SageMaker field that Everstep does not support; all files are downloaded before the ranks start",
        ),
        ({"StoppingCondition": {"MaxCostUsd": 5}}, "StoppingCondition.MaxCostUsd", "needs the price of the fleet main"),
        ({"CheckpointConfig": {"EverySteps": -1}}, "CheckpointConfig.EverySteps", "0"),
        (
            {"CheckpointConfig": {"EverySteps": 5, "IntervalInSeconds": 60, "MaxOverhead": 0.01}},
            "CheckpointConfig.MaxOverhead",
            "remove EverySteps and IntervalInSeconds",
        ),
        (
            {"CheckpointConfig": {"MaxUploadBytesPerSecond": 10**6}},
            "CheckpointConfig.MaxUploadBytesPerSecond",
            "set MaxOverhead",
        ),
        ({"CheckpointConfig": {"S3Uri": "http://x"}}, "CheckpointConfig.S3Uri", "s3"),
        ({"RetryStrategy": {"MaxAttempts": 0}}, "RetryStrategy.MaxAttempts", "1"),
        ({"Unknown": 1}, "Unknown", "is not a field of this request"),
        ({"Arguments": ["a\0b"]}, "Arguments[0]", "must match ^[^\\x00]*$"),
        ({"HyperParameters": {"steps": 200}}, "HyperParameters.steps", "must be text, not '200'"),
    ],
)
@pytest.mark.covers("CreateTrainingJob.FleetName", "CreateTrainingJob.EntryPoint", "CreateTrainingJob.Source.SourceId")
def test_what_cannot_run_is_refused_by_field_and_figure_and_leaves_nothing(client, request_, change, field, figure):
    with refused("ValidationException") as caught:
        client.create_training_job(**{**request_, **change})
    (wrong,) = [error for error in caught.value.fields if error.field == field]
    assert figure in wrong.message
    assert field in caught.value.message
    assert caught.value.code == "ValidationException"
    assert client.list_training_jobs()["TrainingJobSummaries"] == []
    assert client.list_events(TrainingJobName="gpt")["Events"] == []
