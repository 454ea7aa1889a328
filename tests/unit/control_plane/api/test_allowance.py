"""Tests which AWS resources, sources and priorities a project's submitters may name in a request.

A submitter may name only AWS resources that an administrator has granted to the project.
"""

from __future__ import annotations

import hashlib
import io
from contextlib import closing

import pytest

from control_plane.db.tokens import Role
from tests.unit.control_plane.api.conftest import refused
from tests.unit.control_plane.api.test_sources import archive

ROLE = "arn:aws:iam::123456789012:role/speech"
CODE = archive(("train.py", b"pass"))


def channel(uri: str = "", directory: str = "") -> dict:
    source = {"S3DataSource": {"S3Uri": uri}} if uri else {"FileSystemDataSource": {"DirectoryPath": directory}}
    return {"InputDataConfig": [{"ChannelName": "x", "DataSource": source}]}


@pytest.fixture
def member(service, client, fleet):
    with closing(service.client(service.token(Role.SUBMITTER, "speech"))) as connected:
        connected.upload_source(Body=io.BytesIO(CODE))
        yield connected


def ask(caller, **fields):
    source = {"SourceId": hashlib.sha256(CODE).hexdigest()}
    return caller.create_training_job(
        TrainingJobName="a", Source=source, EntryPoint="train.py", NodeCount=1, DryRun=True, **fields
    )


@pytest.mark.security
@pytest.mark.covers(
    "PutProjectQuota.AllowedRoleArns",
    "PutProjectQuota.AllowedSecrets",
    "PutProjectQuota.AllowedData",
    "PutProjectQuota.MaxPriority",
)
@pytest.mark.parametrize(
    ("fields", "field", "quota", "near"),
    [
        ({"RoleArn": ROLE}, "RoleArn", {"AllowedRoleArns": [ROLE]}, {"RoleArn": ROLE + "2"}),
        (
            {"Secrets": {"A": "ssm:/speech/key"}},
            "Secrets.A",
            {"AllowedSecrets": ["ssm:/speech/*"]},
            {"Secrets": {"A": "ssm:/vision/key"}},
        ),
        (
            channel("s3://mine/speech/a"),
            "InputDataConfig[0].DataSource.S3DataSource.S3Uri",
            {"AllowedData": ["s3://mine/speech/*"]},
            channel("s3://mine/speech2"),
        ),
        (
            channel(directory="/fsx/speech/a"),
            "InputDataConfig[0].DataSource.FileSystemDataSource.DirectoryPath",
            {"AllowedData": ["/fsx/speech/*"]},
            channel(directory="/fsx/speech/../vision"),
        ),
        (
            {"CheckpointConfig": {"S3Uri": "s3://mine/speech/a"}},
            "CheckpointConfig.S3Uri",
            {"AllowedData": ["s3://mine/speech/*"]},
            {"CheckpointConfig": {"S3Uri": "s3://mine/speech2"}},
        ),
        (
            {"OutputDataConfig": {"S3OutputPath": "s3://mine/speech/a"}},
            "OutputDataConfig.S3OutputPath",
            {"AllowedData": ["s3://mine/speech/*"]},
            {"OutputDataConfig": {"S3OutputPath": "s3://mine/speech2"}},
        ),
        ({"Priority": 5}, "Priority", {"MaxPriority": 5}, {"Priority": 6}),
    ],
    ids=["role", "secret", "objects", "directory", "checkpoints", "outputs", "priority"],
)
def test_a_project_names_what_it_was_given_and_nothing_else(client, member, fields, field, quota, near):
    with refused("ValidationException") as caught:
        ask(member, **fields)
    assert [error.field for error in caught.value.fields] == [field]
    assert "everstep quotas set speech" in caught.value.message
    client.put_project_quota(Project="speech", **quota)
    ask(member, **fields)
    with refused("ValidationException"):
        ask(member, **near)
    client.put_project_quota(Project="vision", **quota)
    client.delete_project_quota(Project="speech")
    with refused("ValidationException"):
        ask(member, **fields)
    ask(client, **fields, Project="speech")  # an administrator may name any resource


@pytest.mark.security
def test_the_permissions_of_a_role_that_a_project_was_given_decide_what_its_jobs_read(client, member):
    client.put_project_quota(Project="speech", AllowedRoleArns=[ROLE])
    ask(member, RoleArn=ROLE, Secrets={"A": "ssm:/any"}, **channel("s3://any/where"))
    with refused("ValidationException"):  # nodes write outputs with their own permissions
        ask(member, RoleArn=ROLE, OutputDataConfig={"S3OutputPath": "s3://any/where"})


@pytest.mark.security
def test_no_submitter_raises_a_priority_beyond_the_projects(client, member):
    source = {"SourceId": hashlib.sha256(CODE).hexdigest()}
    member.create_training_job(TrainingJobName="a", Source=source, EntryPoint="train.py", NodeCount=1)
    with refused("ValidationException", match="may set at most 0"):
        member.update_training_job(TrainingJobName="a", Priority=1)
    member.update_training_job(TrainingJobName="a", Priority=-1)
    client.update_training_job(TrainingJobName="a", Priority=9)
    member.update_training_job(TrainingJobName="a", Tags={"x": "y"})


@pytest.mark.security
def test_a_source_belongs_to_the_projects_that_uploaded_it(service, client, member):
    source_id = hashlib.sha256(CODE).hexdigest()
    with closing(service.client(service.token(Role.SUBMITTER, "vision"))) as stranger:
        with refused("ResourceNotFoundException"):
            stranger.describe_source(SourceId=source_id)
        assert not stranger.create_source(SourceId=source_id, Bytes=len(CODE))["IsStored"]
        with refused("ConflictException"):  # the service refuses a digest that this project has not uploaded
            stranger.complete_source(SourceId=source_id)
        with refused("ValidationException", match="was not uploaded"):
            ask(stranger)
        stranger.put_source(SourceId=source_id, Body=CODE)
        ask(stranger)
    assert member.create_source(SourceId=source_id, Bytes=len(CODE))["IsStored"]
    assert client.describe_source(SourceId=source_id)["Bytes"] == len(CODE)
