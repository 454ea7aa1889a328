"""Tests the effect of those fields of requests that no other test covers."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from control_plane.core.actions import TerminateMember
from control_plane.core.observed.fleets import FleetSpec
from control_plane.core.states import NodeState
from control_plane.db import drills, fleets, jobs
from control_plane.db.drills import NewDrill
from control_plane.db.models import DrillRow
from control_plane.db.tokens import Role
from control_plane.loop import records
from tests.unit.control_plane.api.conftest import GROUP, START, all_pages, refused
from tests.unit.control_plane.api.test_logs import END, Following, line, put
from tests.unit.control_plane.api.test_results import Job
from tests.unit.control_plane.core.test_fleets import LOST, NOW, decide, row, seen, states

GPT = {"TrainingJobName": "gpt"}


@pytest.fixture
def job(service, client, fleet, source) -> Job:
    made = Job(service, client, source)
    made.launch(1)
    made.connect("i-0", "i-1")
    return made


@pytest.fixture
def created(service, client):
    """Return a function that creates a fleet and returns its spec as the fleet loop reads it.

    The fleet's group allows eight instances.
    """

    def create(**asked: Any) -> FleetSpec:
        client.create_fleet(FleetName="main", AutoScalingGroupName=GROUP, **asked)
        with service.database.read() as session:
            return records.fleet_spec(fleets.get(session, "main"))

    return create


@pytest.mark.covers("CreateFleet.MinNodeCount", "CreateFleet.SpareCount", "CreateFleet.SparePolicy.Probability")
@pytest.mark.parametrize(
    ("asked", "desired"),
    [
        ({"SpareCount": 0}, 0),
        ({"SpareCount": 3}, 3),
        ({"SpareCount": 0, "MinNodeCount": 2}, 2),
        ({"SpareCount": 0, "SparePolicy": {"Probability": 0.5}}, 1),
    ],
)
def test_a_fleet_asks_for_as_many_nodes_as_it_is_to_keep(created, asked, desired):
    assert decide(seen([], [], desired=0), created(**asked)).desired_count == desired


@pytest.mark.covers("CreateFleet.HoldFailedInstances")
@pytest.mark.parametrize(("holds", "state"), [(True, "held"), (False, "draining")])
def test_a_failed_instance_is_kept_where_its_fleet_asked_for_that(created, holds, state):
    rows = [row("i1"), row("i2"), row("i3")]
    decision = decide(seen(rows, [], faulty={"i1": LOST}), created(MinNodeCount=2, HoldFailedInstances=holds))
    assert states(decision) == {"i1": (state, None)}


@pytest.mark.covers("CreateFleet.MaxReplacementsPerHour")
@pytest.mark.parametrize(
    ("limit", "ended"), [({"MaxReplacementsPerHour": 1}, []), ({"MaxReplacementsPerHour": 2}, ["i1"]), ({}, ["i1"])]
)
def test_a_fleet_replaces_as_many_within_an_hour_as_it_was_told(created, limit, ended):
    rows = [row("i1", NodeState.DRAINING, reason="excluded by a: words"), row("i2"), row("i3")]
    decision = decide(seen(rows, [], replaced=(NOW - 10,)), created(MinNodeCount=2, **limit))
    assert [action.node_id for action in decision.actions if isinstance(action, TerminateMember)] == ended


@pytest.mark.covers("CreateFleet.PriceUsdPerHour")
def test_jobs_are_valued_at_the_price_that_a_fleet_was_made_with(client, service, source):
    service.operator.create_group("free", max_size=8)
    client.create_fleet(FleetName="free", AutoScalingGroupName="free")
    client.create_fleet(FleetName="main", AutoScalingGroupName=GROUP, PriceUsdPerHour=2.5)
    job = {"TrainingJobName": "gpt", "Source": source, "EntryPoint": "train.py", "NodeCount": 4, "DryRun": True}
    assert client.create_training_job(**job, FleetName="main")["Plan"]["CostUsdPerHour"] == 10.0
    assert "CostUsdPerHour" not in client.create_training_job(**job, FleetName="free")["Plan"]
    with refused("ValidationException", "MaxCostUsd"):
        client.create_training_job(**job, FleetName="free", StoppingCondition={"MaxCostUsd": 5.0})


@pytest.mark.covers("CreateFleet.AllowDrills")
@pytest.mark.parametrize("allows", [True, False])
def test_drills_are_made_where_a_fleet_was_made_for_them(client, service, source, allows):
    client.create_fleet(FleetName="main", AutoScalingGroupName=GROUP, MinNodeCount=2, AllowDrills=allows)
    made = Job(service, client, source)
    made.launch(1)
    made.run_ranks()
    if allows:
        assert client.start_drill(TrainingJobName="gpt", DrillType="kill-rank")["DrillStatus"] == "requested"
    else:
        with refused("AccessDeniedException", "does not allow drills"):
            client.start_drill(TrainingJobName="gpt", DrillType="kill-rank")


@pytest.mark.covers("CreateFleet.ReplicaEncryption", "UpdateFleet.ReplicaEncryption")
@pytest.mark.parametrize(("setting", "encrypts"), [("Auto", False), ("On", True), ("Off", False)])
def test_a_fleet_uses_tls_between_its_nodes_as_it_was_told(client, setting, encrypts):
    created = client.create_fleet(FleetName="main", AutoScalingGroupName=GROUP, ReplicaEncryption=setting)["Fleet"]
    assert (created["ReplicaEncryption"], created["EncryptsReplicas"]) == (setting, encrypts)
    other = "Off" if setting == "On" else "On"
    changed = client.update_fleet(FleetName="main", ReplicaEncryption=other)
    assert (changed["ReplicaEncryption"], changed["EncryptsReplicas"]) == (other, other == "On")
    kept = client.update_fleet(FleetName="main", MinNodeCount=1)
    assert kept["ReplicaEncryption"] == other
    with refused("ValidationException", "ReplicaEncryption"):
        client.update_fleet(FleetName="main", ReplicaEncryption="on")


@pytest.mark.covers("CreateFleet.Project", "ListEvents.FleetName", "ListEvents.TrainingJobName")
def test_a_fleets_events_are_its_projects(client, service, job):
    service.operator.create_group("speech", max_size=1)
    client.create_fleet(FleetName="speech", AutoScalingGroupName="speech", Project="speech")
    told = client.list_events(FleetName="speech")["Events"]
    assert [(event["Type"], event["FleetName"]) for event in told] == [("FleetCreated", "speech")]
    with closing(service.client(service.token(Role.VIEWER, "speech"))) as reader:
        assert reader.list_events()["Events"] == told
    assert {event["TrainingJobName"] for event in client.list_events(**GPT)["Events"]} == {"gpt"}


@pytest.mark.covers("UnpinCheckpoint.Generation", "DeleteCheckpoint.Generation", "VerifyCheckpoint.Generation")
def test_of_two_checkpoints_of_one_step_the_named_one_is_meant(client, service, job):
    job.write(jobs.transition, before="queued", after="running", now=START, reason="trains", started_at=START)
    job.checkpoint(4)
    job.launch(2, base=0)
    job.checkpoint(4, generation=2)
    for generation in (1, 2):
        client.pin_checkpoint(**GPT, Step=4, Generation=generation)

    def shown(field: str) -> dict[int, object]:
        return {each["Generation"]: each[field] for each in client.list_checkpoints(**GPT)["Checkpoints"]}

    client.unpin_checkpoint(**GPT, Step=4, Generation=1)
    assert shown("IsPinned") == {1: False, 2: True}
    client.verify_checkpoint(**GPT, Step=4, Generation=2)
    assert shown("Verification") == {1: "NotVerified", 2: "Verifying"}
    client.delete_checkpoint(**GPT, Step=4, Generation=1)
    assert shown("Status") == {2: "Complete"}


@pytest.mark.covers("DescribeSource.SourceId")
def test_a_source_is_found_by_its_digest(client, source):
    told = client.describe_source(SourceId=source["SourceId"])
    assert told["SourceId"] == source["SourceId"]
    with refused("ResourceNotFoundException"):
        client.describe_source(SourceId="0" * 64)


@pytest.mark.covers("FollowLogs.Rank", "FollowLogs.Generation", "FollowLogs.StartTime", "FollowLogs.FilterPattern")
@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"Rank": 1}, ["other rank"]),
        ({"Generation": 2}, ["again"]),
        ({"FilterPattern": "loss"}, ["loss 1", "loss 2"]),
        ({"StartTime": START.timestamp() + 2}, ["loss 2", "again"]),
    ],
)
def test_a_follower_is_told_what_it_asks_for(client, job, query, expected):
    job.launch(2)
    put(job, 0, line("loss 1", 0), line("loss 2", 3000), END)
    put(job, 1, line("other rank", 1000, rank=1), END)
    put(job, 0, line("again", 9000), generation=2)
    following = Following(client, StartFromHead=True, **query)
    try:
        assert following.lines(len(expected)) == expected
    finally:
        following.stream.close()


@pytest.mark.covers("ListDrills.MaxResults", "ListDrills.NextToken")
def test_drills_come_in_pages(client, service, job):
    with service.database.write() as session:
        for number in range(3):
            made = drills.create(
                session,
                NewDrill(
                    run_id=job.run,
                    job_name="gpt",
                    fleet_name="main",
                    project="default",
                    kind="kill-rank",
                    node_id=f"i-{number}",
                    rank=number,
                    requested_by="somebody",
                    requested_at=START,
                    state="absorbed",
                ),
            )
            row = session.get(DrillRow, made.id)
            row.ended_at = START
            session.flush()
    paged = all_pages(client, "list_drills", TrainingJobName="gpt", MaxResults=1)
    assert sorted(each["NodeId"] for each in paged) == ["i-0", "i-1", "i-2"]
    assert paged == client.list_drills(TrainingJobName="gpt")["Drills"]


@pytest.mark.covers(
    "UpdateTrainingJob.StoppingCondition.MaxCostUsd", "UpdateTrainingJob.StoppingCondition.MaxPendingTimeInSeconds"
)
def test_limits_are_set_and_lifted(client, job):
    client.update_fleet(FleetName="main", PriceUsdPerHour=1.0)
    limits = {"MaxCostUsd": 7.5, "MaxPendingTimeInSeconds": 60}
    client.update_training_job(**GPT, StoppingCondition=limits)
    assert client.describe_training_job(**GPT)["StoppingCondition"] == limits
    client.update_training_job(**GPT, StoppingCondition={"MaxCostUsd": 0, "MaxPendingTimeInSeconds": 0})
    assert client.describe_training_job(**GPT)["StoppingCondition"] == {}
