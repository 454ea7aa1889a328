from __future__ import annotations

from datetime import timedelta

import pytest

from tests.postgresql import BOTH_ENGINES
from tests.unit.control_plane.api.conftest import GROUP, START, refused, without_metadata

pytestmark = pytest.mark.parametrize("engine", BOTH_ENGINES)


@pytest.mark.covers("CreateFleet.FleetName", "CreateFleet.AutoScalingGroupName", "CreateFleet.Tags", "DescribeFleet.FleetName")
def test_a_fleet_is_registered_and_its_group_brought_to_the_contract(client, service):
    fleet = client.create_fleet(FleetName="main", AutoScalingGroupName=GROUP, SpareCount=1, MinNodeCount=4, Tags={"a": "b"})
    assert (fleet["FleetStatus"], fleet["SpareCount"], fleet["MinNodeCount"], fleet["MaxNodeCount"]) == ("active", 1, 4, 8)
    assert (fleet["InstanceType"], fleet["AvailabilityZone"]) == ("p5.48xlarge", "us-east-1a")
    assert without_metadata(client.describe_fleet(FleetName="main")) == without_metadata(fleet)
    assert client.list_fleets()["Fleets"] == [without_metadata(fleet)]
    group = service.operator.describe_group(GROUP)
    assert group.new_instances_protected
    assert "ReplaceUnhealthy" in group.suspended_processes


@pytest.mark.parametrize(
    ("group", "request_", "field", "figure"),
    [
        ({}, {"AutoScalingGroupName": "absent"}, "AutoScalingGroupName", "no Auto Scaling group named 'absent'"),
        ({"tags": {}}, {}, "AutoScalingGroupName", "does not carry the tag everstep:fleet"),
        ({"availability_zones": ("us-east-1a", "us-east-1b")}, {}, "AutoScalingGroupName", "spans 2 Availability Zones"),
        ({"max_size": 4}, {"MinNodeCount": 4, "SpareCount": 1}, "MinNodeCount", "4 nodes and 1 spares are 5; the group odd has MaxSize 4"),
        ({}, {"SpareCount": -1}, "SpareCount", "0"),
        ({}, {"FleetName": "bad name"}, "FleetName", "must match ^"),
    ],
)
@pytest.mark.covers("CreateFleet.AutoScalingGroupName", "CreateFleet.MinNodeCount", "CreateFleet.SpareCount")
def test_a_group_that_does_not_fit_is_refused_and_left_as_it_was(client, service, group, request_, field, figure):
    service.operator.create_group("odd", **group)
    calls = len(service.operator.calls)
    with refused("ValidationException") as caught:
        client.create_fleet(**{"FleetName": "main", "AutoScalingGroupName": "odd", **request_})
    assert [(error.field, figure in error.message) for error in caught.value.fields] == [(field, True)]
    assert client.list_fleets()["Fleets"] == []
    assert service.operator.calls[calls:] == []


def test_names_and_groups_are_taken_once(client, fleet, service):
    with refused("ConflictException", "already a fleet named 'main'"):
        client.create_fleet(FleetName="main", AutoScalingGroupName=GROUP)
    with refused("ConflictException", GROUP):
        client.create_fleet(FleetName="other", AutoScalingGroupName=GROUP)


@pytest.mark.covers(
    "UpdateFleet.FleetName",
    "UpdateFleet.SpareCount",
    "UpdateFleet.MinNodeCount",
    "UpdateFleet.PriceUsdPerHour",
    "UpdateFleet.SparePolicy.Probability",
)
def test_figures_change_one_by_one(client, fleet):
    assert client.update_fleet(FleetName="main", SpareCount=2)["MinNodeCount"] == 4
    assert client.update_fleet(FleetName="main", MinNodeCount=0)["SpareCount"] == 2
    assert client.update_fleet(FleetName="main", PriceUsdPerHour=98.32)["SpareCount"] == 2
    fleet = client.describe_fleet(FleetName="main")
    assert (fleet["PriceUsdPerHour"], fleet.get("CostUsd"), fleet["NodeSeconds"], fleet["IncidentCount"]) == (98.32, None, 0, 0)
    assert client.update_fleet(FleetName="main", SparePolicy={"Probability": 0.99})["SparePolicy"] == {"Probability": 0.99}
    assert client.update_fleet(FleetName="main", MinNodeCount=1)["SparePolicy"] == {"Probability": 0.99}
    assert "SparePolicy" not in client.update_fleet(FleetName="main", SpareCount=1)
    with refused("ResourceNotFoundException"):
        client.update_fleet(FleetName="other", SpareCount=1)


@pytest.mark.covers("DeleteFleet.FleetName")
def test_a_fleet_goes_only_without_jobs(client, fleet, source):
    client.create_training_job(TrainingJobName="gpt", Source=source, EntryPoint="train.py", NodeCount=1)
    with refused("ConflictException", "training jobs that have not ended: 1"):
        client.delete_fleet(FleetName="main")


def test_a_deleted_fleet_takes_no_jobs(client, fleet, source):
    assert client.delete_fleet(FleetName="main")["FleetStatus"] == "deleting"
    assert client.delete_fleet(FleetName="main")["FleetStatus"] == "deleting"
    with refused("ValidationException", "is being deleted"):
        client.create_training_job(TrainingJobName="gpt", Source=source, EntryPoint="train.py", NodeCount=1)


@pytest.mark.covers("CreateJoinToken.FleetName", "CreateJoinToken.ExpiresInSeconds")
def test_a_join_token_may_come_before_its_fleet(client, service):
    made = client.create_join_token(FleetName="later", ExpiresInSeconds=60)
    assert made["JoinToken"].startswith("est_")
    assert made["ExpirationTime"] == START + timedelta(seconds=60)
    assert made["JoinToken"] not in str(client.list_events())
