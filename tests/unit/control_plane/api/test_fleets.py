from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from control_plane.cloud import contract
from control_plane.cloud.contract import drift
from tests.postgresql import BOTH_ENGINES
from tests.unit.control_plane.api.conftest import GROUP, START, all_pages, refused, without_metadata

pytestmark = pytest.mark.parametrize("engine", BOTH_ENGINES)


@pytest.mark.covers(
    "CreateFleet.FleetName", "CreateFleet.AutoScalingGroupName", "CreateFleet.Tags", "DescribeFleet.FleetName"
)
def test_a_fleet_is_registered_and_its_group_brought_to_the_contract(client, service):
    fleet = client.create_fleet(
        FleetName="main", AutoScalingGroupName=GROUP, SpareCount=1, MinNodeCount=4, Tags={"a": "b"}
    )["Fleet"]
    assert fleet["Tags"] == {"a": "b"}
    assert (fleet["FleetStatus"], fleet["SpareCount"], fleet["MinNodeCount"], fleet["MaxNodeCount"]) == (
        "active",
        1,
        4,
        8,
    )
    assert (fleet["InstanceType"], fleet["AvailabilityZone"]) == ("p5.48xlarge", "us-east-1a")
    assert without_metadata(client.describe_fleet(FleetName="main")) == fleet
    assert client.list_fleets()["Fleets"] == [fleet]
    group = service.operator.describe_group(GROUP)
    assert group.new_instances_protected
    assert "ReplaceUnhealthy" in group.suspended_processes


CHANGED = ["SuspendedProcesses", "NewInstancesProtectedFromScaleIn", "LifecycleHooks.everstep-termination"]


@pytest.mark.covers("CreateFleet.DryRun")
def test_what_registering_changes_is_told_before_and_after_and_a_dry_run_changes_nothing(client, service):
    asked = {"FleetName": "main", "AutoScalingGroupName": GROUP, "SpareCount": 1, "MinNodeCount": 4}
    before, calls = service.operator.describe_group(GROUP), len(service.operator.calls)
    told = without_metadata(client.create_fleet(**asked, DryRun=True))
    assert told.keys() == {"FleetName", "Checks", "Changes"}
    assert [check["Setting"] for check in told["Checks"]] == [
        "Status",
        "AvailabilityZones",
        "ScalingPolicies",
        "LaunchTemplate",
        "CapacityRebalance",
        "WarmPoolConfiguration",
        "SuspendedProcesses",
    ]
    assert told["Checks"][1]["Message"] == f"{GROUP} has one Availability Zone, us-east-1a."
    assert [change["Setting"] for change in told["Changes"] if change["Applies"] == "Now"] == CHANGED
    assert [change["Reason"] for change in told["Changes"][:-1]] == list(drift(before))
    assert told["Changes"][-1] == {
        "Setting": "DesiredCapacity",
        "Before": "0",
        "After": "5",
        "Reason": "The fleet main keeps 5 nodes before its first job, including spares.",
        "Applies": "Later",
    }
    assert service.operator.calls[calls:] == []
    assert service.operator.describe_group(GROUP) == before
    assert client.list_fleets()["Fleets"] == client.list_events()["Events"] == []
    made = client.create_fleet(**asked)
    assert (made["Fleet"]["FleetName"], made["Changes"], made["Checks"]) == ("main", told["Changes"], told["Checks"])
    with refused("ConflictException", GROUP):
        client.create_fleet(**{**asked, "FleetName": "other"}, DryRun=True)


def test_of_a_group_that_fits_nothing_is_changed_and_a_surplus_is_told(client, service):
    contract.ensure(service.operator, service.operator.describe_group(GROUP))
    service.operator.set_desired(GROUP, 3)
    told = client.create_fleet(FleetName="main", AutoScalingGroupName=GROUP, SpareCount=1, DryRun=True)["Changes"]
    assert [(change["Setting"], change["Before"], change["After"]) for change in told] == [
        ("DesiredCapacity", "3", "1")
    ]
    assert "terminates idle instances" in told[0]["Reason"]
    assert client.create_fleet(FleetName="main", AutoScalingGroupName=GROUP, SpareCount=3)["Changes"] == []


@pytest.mark.covers(
    "CreateFleet.ExpectedChanges[].Setting",
    "CreateFleet.ExpectedChanges[].Before",
    "CreateFleet.ExpectedChanges[].After",
    "CreateFleet.ExpectedChanges[].Reason",
    "CreateFleet.ExpectedChanges[].Applies",
)
def test_what_nobody_was_shown_is_not_changed(client, service):
    asked = {"FleetName": "main", "AutoScalingGroupName": GROUP, "SpareCount": 1}
    told = client.create_fleet(**asked, DryRun=True)["Changes"]
    service.operator.set_desired(GROUP, 3)  # the group changes between the dry run and the request
    before, calls = service.operator.describe_group(GROUP), len(service.operator.calls)
    with refused("ConflictException", "differs from ExpectedChanges; nothing was changed") as caught:
        client.create_fleet(**asked, ExpectedChanges=told)
    assert "DesiredCapacity: 3 → 1." in str(caught.value)
    assert "without protection from scale-in" in str(caught.value)
    assert "SuspendedProcesses" not in str(caught.value), "that was shown"
    for part, other in (("Setting", "x"), ("Before", "x"), ("After", "x"), ("Reason", "x"), ("Applies", "Later")):
        with refused("ConflictException", "SuspendedProcesses: none →"):
            client.create_fleet(**asked, ExpectedChanges=[{**told[0], part: other}, *told[1:]], DryRun=True)
    assert (service.operator.calls[calls:], service.operator.describe_group(GROUP)) == ([], before)
    assert client.list_fleets()["Fleets"] == []
    told = client.create_fleet(**asked, DryRun=True)["Changes"]
    made = client.create_fleet(**asked, ExpectedChanges=[*told, {**told[0], "Setting": "nothing any more"}])
    assert made["Changes"] == told


def test_a_group_that_changes_under_the_call_is_changed_as_it_was_looked_at(client, service):
    asked = {"FleetName": "main", "AutoScalingGroupName": GROUP, "SpareCount": 3}
    contract.ensure(service.operator, service.operator.describe_group(GROUP))
    service.operator.set_desired(GROUP, 3)
    looked, service.operator.describe_group = service.operator.describe_group, lambda name: others_change(looked(name))

    def others_change(group):
        service.operator.put_termination_hook(
            GROUP, replace(contract.TERMINATION_HOOK, heartbeat_timeout=timedelta(hours=1))
        )
        return group

    assert client.create_fleet(**asked, ExpectedChanges=[])["Changes"] == []


@pytest.mark.covers("ListFleets.MaxResults", "ListFleets.NextToken")
def test_fleets_come_in_pages(client, service):
    for name in ("c", "a", "b"):
        service.operator.create_group(f"group-{name}", max_size=1)
        client.create_fleet(FleetName=name, AutoScalingGroupName=f"group-{name}")
    first = client.list_fleets(MaxResults=2)
    assert [fleet["FleetName"] for fleet in first["Fleets"]] == ["a", "b"]
    last = client.list_fleets(MaxResults=2, NextToken=first["NextToken"])
    assert ([fleet["FleetName"] for fleet in last["Fleets"]], "NextToken" in last) == (["c"], False)
    assert all_pages(client, "list_fleets", MaxResults=1) == client.list_fleets()["Fleets"]


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("group", "request_", "field", "figure"),
    [
        ({}, {"AutoScalingGroupName": "absent"}, "AutoScalingGroupName", "no Auto Scaling group named 'absent'"),
        ({"tags": {}}, {}, "AutoScalingGroupName", "has no tag everstep:fleet"),
        (
            {"availability_zones": ("us-east-1a", "us-east-1b")},
            {},
            "AutoScalingGroupName",
            "spans 2 Availability Zones",
        ),
        (
            {"max_size": 4},
            {"MinNodeCount": 4, "SpareCount": 1},
            "MinNodeCount",
            "4 nodes and 1 spares are 5; the group odd has MaxSize 4",
        ),
        ({}, {"SpareCount": -1}, "SpareCount", "0"),
        ({}, {"FleetName": "bad name"}, "FleetName", "must match ^"),
    ],
)
@pytest.mark.covers("CreateFleet.AutoScalingGroupName", "CreateFleet.MinNodeCount", "CreateFleet.SpareCount")
def test_a_group_that_does_not_fit_is_refused_and_left_as_it_was(
    client, service, group, request_, field, figure, dry_run
):
    service.operator.create_group("odd", **group)
    calls = len(service.operator.calls)
    with refused("ValidationException") as caught:
        client.create_fleet(**{"FleetName": "main", "AutoScalingGroupName": "odd", "DryRun": dry_run, **request_})
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
    assert (fleet["PriceUsdPerHour"], fleet.get("CostUsd"), fleet["NodeSeconds"], fleet["IncidentCount"]) == (
        98.32,
        None,
        0,
        0,
    )
    assert client.update_fleet(FleetName="main", SparePolicy={"Probability": 0.99})["SparePolicy"] == {
        "Probability": 0.99
    }
    assert client.update_fleet(FleetName="main", MinNodeCount=1)["SparePolicy"] == {"Probability": 0.99}
    told = client.list_events(FleetName="main", SortOrder="Descending")["Events"][0]["Message"]
    assert "at least 1 nodes and enough spares that one is free with probability 99.0000%" in told
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
