from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import msgspec
import pytest

from control_plane.core.observed.rehearsals import RehearsalOutcome, Rehearsals
from control_plane.db import jobs
from control_plane.db.tokens import Role
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.plan import CHECK_VARIABLE
from everstep.protocol.rehearsals import RehearsalVerdict, ReplayDifference, ScriptLine
from tests.unit.control_plane.api.conftest import refused
from tests.unit.control_plane.api.test_results import Job

GPT = {"TrainingJobName": "gpt"}
DIFFERENCE = RehearsalOutcome(
    verdict=RehearsalVerdict.DIFFERS,
    step=Step(20),
    steps=5,
    seconds=12.5,
    at=1_800_000_000.0,
    rank=Rank(3),
    difference=ReplayDifference(
        step=Step(21),
        kind="loss",
        source="unknown",
        names=("loss",),
        unkept=("train.py:f.x",),
        lines=(ScriptLine(name="train.py:f.x", file="train.py", line=7),),
    ),
    message="the loss of step 21 differs",
    advice="Register the network.",
)


@pytest.fixture
def job(service, client, fleet, source):
    return Job(service, client, source)


@pytest.fixture
def request_(source):
    return {"TrainingJobName": "gpt", "Source": source, "EntryPoint": "train.py", "NodeCount": 2}


def store(job: Job, **changes: object) -> None:
    """Store the newest order and result of the job, as the job loop does."""
    memo = {"rehearsal": msgspec.to_builtins(Rehearsals(**changes))}  # type: ignore[arg-type]
    job.write(jobs.change, memo=memo)


def pending(client) -> bool:
    return client.describe_training_job(**GPT)["IsRehearsalPending"]


@pytest.mark.covers("CreateTrainingJob.Rehearsal.Mode", "CreateTrainingJob.Rehearsal.OnDifference")
@pytest.mark.covers("CreateTrainingJob.Rehearsal.AtStep", "CreateTrainingJob.Rehearsal.Steps")
def test_the_settings_of_rehearsals_are_stored_and_described(client, fleet, request_):
    client.create_training_job(**request_)
    described = client.describe_training_job(**GPT)
    assert described["Rehearsal"] == {"Mode": "Auto", "OnDifference": "Continue", "AtStep": 20, "Steps": 5}
    assert "RehearsalResult" not in described
    assert described["IsRehearsalPending"] is False
    wanted = {"Mode": "On", "OnDifference": "Stop", "AtStep": 7, "Steps": 100}
    client.create_training_job(**{**request_, "TrainingJobName": "other", "Rehearsal": wanted})
    assert client.describe_training_job(TrainingJobName="other")["Rehearsal"] == wanted


@pytest.mark.parametrize(
    ("field", "value"),
    [("Mode", "Never"), ("OnDifference", "Fail"), ("AtStep", 0), ("AtStep", 10**9 + 1), ("Steps", 0), ("Steps", 101)],
)
def test_settings_of_rehearsals_have_limits(client, fleet, request_, field, value):
    with refused("ValidationException", match=f"Rehearsal.{field}"):
        client.create_training_job(**request_, Rehearsal={field: value})


@pytest.mark.covers("RehearseTrainingJob.TrainingJobName")
def test_a_request_is_pending_until_an_order_serves_it_and_has_a_result(service, client, job):
    assert not pending(client)
    client.rehearse_training_job(**GPT)
    assert pending(client)
    asked = service.clock().timestamp()
    store(job, number=1, generation=Generation(1), is_open=True, served_at=asked)
    assert pending(client)
    store(job, number=1, generation=Generation(1), served_at=asked, result=DIFFERENCE)
    assert not pending(client)
    service.clock.advance(1)
    client.rehearse_training_job(**GPT)
    assert pending(client)
    job.write(jobs.change, ended_at=service.clock(), state="stopped", reason="stopped")
    assert not pending(client)


def test_the_result_of_a_rehearsal_is_described(client, job):
    store(job, result=DIFFERENCE)
    described = client.describe_training_job(**GPT)
    result = described["RehearsalResult"]
    assert result.pop("Time").timestamp() == DIFFERENCE.at
    assert result == {
        "Verdict": "Differs",
        "Step": 20,
        "Steps": 5,
        "Seconds": 12.5,
        "Rank": 3,
        "Difference": {
            "Step": 21,
            "Kind": "loss",
            "Source": "unknown",
            "Names": ["loss"],
            "Unkept": ["train.py:f.x"],
            "Lines": [{"Name": "train.py:f.x", "File": "train.py", "Line": 7}],
        },
        "Message": "the loss of step 21 differs",
        "Advice": "Register the network.",
    }
    assert [each["Type"] for each in described["Conditions"]] == ["ResumeDiffers"]
    assert described["Duty"]["Kind"] == "ResumeDiffers"


def test_lost_values_are_described_as_an_unproven_resume(client, job):
    store(job, result=replace(DIFFERENCE, verdict=RehearsalVerdict.UNPROVEN))
    described = client.describe_training_job(**GPT)
    assert described["RehearsalResult"]["Verdict"] == "Unproven"
    assert [each["Type"] for each in described["Conditions"]] == ["ResumeUnproven"]
    assert described["Duty"]["Kind"] == "ResumeUnproven"


def test_a_job_that_cannot_rehearse_refuses_with_the_reason(service, client, fleet, request_):
    client.create_training_job(**request_, Rehearsal={"Mode": "Off"})
    with refused("ConflictException", match=r"Rehearsal\.Mode is Off"):
        client.rehearse_training_job(**GPT)
    check = {**request_, "TrainingJobName": "check", "Environment": {CHECK_VARIABLE: "8"}}
    client.create_training_job(**check)
    with refused("ConflictException", match="is a determinism check"):
        client.rehearse_training_job(TrainingJobName="check")
    client.create_training_job(**{**request_, "TrainingJobName": "stops"})
    client.stop_training_job(TrainingJobName="stops")
    with refused("ConflictException", match="cannot rehearse"):
        client.rehearse_training_job(TrainingJobName="stops")
    with refused("ResourceNotFoundException"):
        client.rehearse_training_job(TrainingJobName="none")
    with closing(service.client(service.token(Role.VIEWER, "default"))) as reader, refused("AccessDeniedException"):
        reader.rehearse_training_job(TrainingJobName="gpt")
