"""Tests the filters and sort orders of ListTrainingJobs.

`tests/unit/control_plane/db/test_job_lists.py` tests the queries.
"""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta

import httpx
import pytest

from control_plane.db import jobs
from control_plane.db.tokens import Role
from tests.unit.control_plane.api.conftest import START, all_pages, refused
from tests.unit.control_plane.api.test_results import Job


@pytest.fixture
def three(service, client, fleet, source):
    """Create the jobs a, b and c, one minute apart. Job a has the latest change."""
    for name in "abc":
        client.create_training_job(
            TrainingJobName=name,
            Source=source,
            EntryPoint="train.py",
            NodeCount=1,
            Tags={"team": name},
            Project="speech" if name == "b" else "default",
        )
        service.clock.advance(60)
    client.update_training_job(TrainingJobName="a", Priority=1)


def names(client, **query):
    return [job["TrainingJobName"] for job in all_pages(client, "list_training_jobs", **query)]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, "cba"),
        ({"SortOrder": "Ascending"}, "abc"),
        ({"SortBy": "LastModifiedTime"}, "acb"),
        ({"SortBy": "Name", "SortOrder": "Ascending", "MaxResults": 1}, "abc"),
        ({"SortBy": "LastModifiedTime", "SortOrder": "Ascending", "MaxResults": 2}, "bca"),
        ({"Project": "speech"}, "b"),
        ({"TagKey": "team", "TagValue": "c"}, "c"),
        ({"TagKey": "team", "MaxResults": 1}, "cba"),
        ({"CreationTimeAfter": START}, "cb"),
        ({"CreationTimeBefore": START + timedelta(seconds=60)}, "a"),
        ({"LastModifiedTimeAfter": START + timedelta(seconds=120)}, "a"),
        ({"LastModifiedTimeBefore": START + timedelta(seconds=120)}, "b"),
        ({"StatusEquals": "InProgress", "NameContains": "a", "FleetName": "main"}, "a"),
        ({"StatusEquals": "Failed"}, ""),
    ],
)
@pytest.mark.covers(
    "ListTrainingJobs.MaxResults",
    "ListTrainingJobs.StatusEquals",
    "ListTrainingJobs.NameContains",
    "ListTrainingJobs.FleetName",
    "ListTrainingJobs.Project",
    "ListTrainingJobs.CreationTimeAfter",
    "ListTrainingJobs.CreationTimeBefore",
    "ListTrainingJobs.LastModifiedTimeAfter",
    "ListTrainingJobs.LastModifiedTimeBefore",
    "ListTrainingJobs.TagKey",
    "ListTrainingJobs.TagValue",
    "ListTrainingJobs.SortBy",
    "ListTrainingJobs.SortOrder",
)
def test_lists(client, three, query, expected):
    assert names(client, **query) == list(expected)


@pytest.mark.covers("ListTrainingJobs.NextToken")
def test_a_token_belongs_to_its_order(client, three):
    token = client.list_training_jobs(MaxResults=1)["NextToken"]
    with refused("ValidationException", match="sorted by CreationTime, Descending"):
        client.list_training_jobs(MaxResults=1, NextToken=token, SortOrder="Ascending")


def test_a_token_outlives_the_job_that_it_points_at(service, client, three):
    token = client.list_training_jobs(MaxResults=1)["NextToken"]
    with service.database.write() as session:
        job = jobs.get(session, "c")
        session.connection().exec_driver_sql("UPDATE job SET ended_at = created_at")
        jobs.remove(session, job.run_id)
    assert [job["TrainingJobName"] for job in client.list_training_jobs(NextToken=token)["TrainingJobSummaries"]] == [
        "b",
        "a",
    ]


def test_a_tokens_project_is_all_that_it_sees(service, client, three):
    with closing(service.client(service.token(Role.VIEWER, "speech"))) as reader:
        assert names(reader) == ["b"]
        assert names(reader, Project="default") == []


def test_times_may_be_numbers_and_must_have_a_zone(service, client, three):
    with httpx.Client(
        base_url=f"http://{service.address}/v1",
        headers={"authorization": f"Bearer {service.admin_token}"},
        trust_env=False,
        timeout=30,
    ) as http:
        found = http.get("/training-jobs", params={"CreationTimeAfter": START.timestamp()}).json()
        assert [job["TrainingJobName"] for job in found["TrainingJobSummaries"]] == ["c", "b"]
        for wrong in ("2026-03-01T12:00:00", "yesterday", "1e300"):
            answer = http.get("/training-jobs", params={"CreationTimeAfter": wrong})
            assert (answer.status_code, answer.json()["Code"]) == (400, "ValidationException"), wrong
            assert answer.json()["Fields"][0]["Message"].startswith("must be a time")


def test_a_suspected_hang_has_its_age_wherever_the_job_is_shown(service, client, fleet, source):
    job = Job(service, client, source)
    now = service.clock().timestamp()
    suspicion = {
        "since": now - 30.0,
        "began_at": now,
        "number": 1,
        "asked_at": now,
        "is_answered": True,
        "limit_seconds": 90.0,
    }
    job.write(jobs.change, reason="trains; rank 0 on i-0 made no progress in train", memo={"suspicion": suspicion})
    service.clock.advance(12)
    shown = "no progress for 42 s (limit 90 s): rank 0 on i-0 made no progress in train"
    assert client.list_training_jobs()["TrainingJobSummaries"][0]["Reason"] == shown
    assert client.describe_training_job(TrainingJobName="gpt")["Reason"] == shown
    assert client.pause_training_job(TrainingJobName="gpt")["Reason"] == shown


@pytest.mark.covers("ListTrainingJobs.ChangesSince")
def test_a_poll_receives_only_the_jobs_that_changed(three, client, service) -> None:
    first = client.list_training_jobs(ChangesSince="Start")
    assert first["Changes"]["IsIncremental"] is False
    assert first["TrainingJobSummaries"] == client.list_training_jobs()["TrainingJobSummaries"]
    same = client.list_training_jobs(ChangesSince=first["Changes"]["ChangeToken"])
    token = first["Changes"]["ChangeToken"]
    assert same["TrainingJobSummaries"] == []
    assert same["Changes"] == {"ChangeToken": token, "IsIncremental": True, "Removed": []}
    client.update_training_job(TrainingJobName="b", Priority=5)
    (changed,) = client.list_training_jobs(ChangesSince=same["Changes"]["ChangeToken"])["TrainingJobSummaries"]
    assert (changed["TrainingJobName"], changed["Priority"]) == ("b", 5)


def test_a_poll_names_the_jobs_that_left_the_page(three, client, service) -> None:
    first = client.list_training_jobs(ChangesSince="Start", MaxResults=2)
    narrower = client.list_training_jobs(ChangesSince=first["Changes"]["ChangeToken"], MaxResults=1)
    gone = {each["RunId"] for each in first["TrainingJobSummaries"] if each["TrainingJobName"] == "b"}
    assert set(narrower["Changes"]["Removed"]) == gone
    assert narrower["TrainingJobSummaries"] == []


def test_a_token_of_another_caller_or_filter_returns_everything(three, client, service) -> None:
    token = client.list_training_jobs(ChangesSince="Start")["Changes"]["ChangeToken"]
    with closing(service.client(service.token(Role.VIEWER))) as other:
        answers = [other.list_training_jobs(ChangesSince=token)]
    answers.append(client.list_training_jobs(ChangesSince=token, NameContains="a"))
    for answer in answers:
        assert answer["Changes"]["IsIncremental"] is False
        assert answer["TrainingJobSummaries"]
