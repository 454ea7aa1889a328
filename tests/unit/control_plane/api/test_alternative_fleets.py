"""Tests jobs that name several fleets: the checks of the request, and the fields of the response."""

from __future__ import annotations

import pytest

from tests.unit.control_plane.api.conftest import refused


@pytest.fixture
def asked(service, client, tmp_path):
    """Return a request for four nodes that names several fleets. Only the fleet `small` has fewer than four."""
    for name, size in (("first", 8), ("second", 4), ("small", 3)):
        service.operator.create_group(f"{name}-group", max_size=size)
        client.create_fleet(FleetName=name, AutoScalingGroupName=f"{name}-group")
    (tmp_path / "train.py").write_text("pass")
    source = client.upload_source(Directory=tmp_path)
    return {"TrainingJobName": "gpt", "FleetName": "first", "Source": source, "EntryPoint": "train.py", "NodeCount": 4}


@pytest.mark.covers("CreateTrainingJob.AlternativeFleetNames")
def test_a_job_tells_where_else_it_may_start(client, asked):
    client.create_training_job(**asked, AlternativeFleetNames=["second"])
    job = client.describe_training_job(TrainingJobName="gpt")
    assert (job["FleetName"], job["AlternativeFleetNames"]) == ("first", ["second"])
    client.create_training_job(**{**asked, "TrainingJobName": "plain"})
    assert client.describe_training_job(TrainingJobName="plain")["AlternativeFleetNames"] == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"AlternativeFleetNames": ["other"]}, "there is no fleet named 'other'"),
        ({"AlternativeFleetNames": ["first"]}, "the fleet first is listed twice"),
        ({"AlternativeFleetNames": ["second", "second"]}, "the fleet second is listed twice"),
        (
            {"AlternativeFleetNames": ["small"]},
            "NodeCount is 4; the group small-group of the fleet small has MaxSize 3",
        ),
        ({"AlternativeFleetNames": ["second"] * 8}, "7"),
    ],
)
def test_an_alternative_has_to_be_one(client, asked, change, words):
    with refused("ValidationException") as caught:
        client.create_training_job(**asked, **change)
    assert {error.field.partition(".")[0] for error in caught.value.fields} == {"AlternativeFleetNames"}
    assert words in caught.value.message
    assert client.list_training_jobs()["TrainingJobSummaries"] == []


def test_a_limit_of_cost_needs_the_price_of_every_fleet(client, asked):
    client.update_fleet(FleetName="first", PriceUsdPerHour=10.0)
    limited = {**asked, "StoppingCondition": {"MaxCostUsd": 5}, "AlternativeFleetNames": ["second"]}
    with refused("ValidationException") as caught:
        client.create_training_job(**limited)
    assert "MaxCostUsd needs the price of the fleet second" in caught.value.message
    client.update_fleet(FleetName="second", PriceUsdPerHour=10.0)
    client.create_training_job(**limited)
