from __future__ import annotations

from contextlib import closing

import pytest

from control_plane.db import jobs
from control_plane.db.tokens import Role
from tests.unit.control_plane.api.conftest import refused
from tests.unit.control_plane.api.test_results import Job


@pytest.fixture
def job(service, client, fleet, source):
    return Job(service, client, source)


def seen(client):
    described = client.describe_training_job(TrainingJobName="gpt")
    return described["TrainingJobStatus"], described["SecondaryStatus"], "PauseRequestedTime" in described


def move(service, job, before, after):
    job.write(jobs.transition, before=before, after=after, now=service.clock(), reason=f"is {after}")


@pytest.mark.covers("PauseTrainingJob.TrainingJobName", "ResumeTrainingJob.TrainingJobName")
def test_a_pause_shows_at_once_and_lasts_until_it_is_resumed(service, client, job):
    job.launch(1)
    job.write(jobs.change, started_at=service.clock(), reason="trains", boundary=1, max_boundary=1)
    move(service, job, "queued", "running")
    assert seen(client) == ("InProgress", "Training", False)
    service.clock.advance(5)
    assert client.pause_training_job(TrainingJobName="gpt")["SecondaryStatus"] == "Pausing"
    assert client.pause_training_job(TrainingJobName="gpt")["SecondaryStatus"] == "Pausing"
    assert seen(client) == ("InProgress", "Pausing", True)
    move(service, job, "running", "pausing")
    move(service, job, "pausing", "queued")
    assert seen(client) == ("InProgress", "Paused", True)
    described = client.describe_training_job(TrainingJobName="gpt")
    assert described["NodeIds"] == []
    assert [line["Status"] for line in described["SecondaryStatusTransitions"]] == [
        "Pending",
        "Training",
        "Pausing",
        "Paused",
    ]
    assert client.resume_training_job(TrainingJobName="gpt")["SecondaryStatus"] == "Interrupted"
    client.resume_training_job(TrainingJobName="gpt")
    assert seen(client) == ("InProgress", "Interrupted", False)
    said = [event["Type"] for event in client.list_events(TrainingJobName="gpt")["Events"]]
    assert [kind for kind in said if kind.endswith("Requested")] == ["PauseRequested", "ResumeRequested"]


def test_what_cannot_be_paused_is_refused(service, client, job):
    with refused("ResourceNotFoundException"):
        client.pause_training_job(TrainingJobName="none")
    client.stop_training_job(TrainingJobName="gpt")
    with refused("ConflictException", match="cannot be paused"):
        client.pause_training_job(TrainingJobName="gpt")
    job.write(jobs.change, ended_at=service.clock(), reason="stopped before it started")
    with refused("ConflictException", match="has ended: stopped before it started"):
        client.resume_training_job(TrainingJobName="gpt")


def test_a_stop_shows_before_a_pause(client, job):
    client.pause_training_job(TrainingJobName="gpt")
    client.stop_training_job(TrainingJobName="gpt")
    assert seen(client)[:2] == ("Stopping", "Stopping")


def test_readers_may_not(service, client, job):
    with closing(service.client(service.token(Role.VIEWER, "default"))) as reader:
        for ask in (reader.pause_training_job, reader.resume_training_job):
            with refused("AccessDeniedException"):
                ask(TrainingJobName="gpt")
