"""Tests the plan that a dry run of CreateTrainingJob returns."""

from __future__ import annotations

import pytest

from control_plane.db import incidents, jobs, nodes
from control_plane.db.tokens import Role
from everstep.protocol.agent_messages import Hello
from everstep.protocol.ids import FleetName, NodeId
from tests.unit.control_plane.api.conftest import START, refused, without_metadata
from tests.unit.control_plane.api.test_results import Job

GIB = 2**30


@pytest.fixture
def wanted(source):
    return {
        "TrainingJobName": "new",
        "Source": source,
        "EntryPoint": "train.py",
        "NodeCount": 4,
        "RanksPerNode": 2,
        "DryRun": True,
    }


def spares(service, count, memory_bytes=64 * GIB):
    """Add `count` free nodes with connected agents to the fleet."""
    with service.database.write() as session:
        for number in range(count):
            node_id = f"i-{number}"
            facts = nodes.AgentFacts(
                node_id=node_id,
                fleet_name="main",
                address="",
                peer_port=0,
                memory_bytes=memory_bytes + number,
                agent_id="a",
                version="1",
            )
            nodes.note_hello(session, facts, initial_state="spare", now=START)
            hello = Hello(
                node_id=NodeId(node_id), agent_id="a", address="", peer_port=0, memory_bytes=memory_bytes, version="1"
            )
            service.services.registry.accept(hello, FleetName("main"))


def planned(client, wanted, **changes):
    return client.create_training_job(**{**wanted, **changes})["Plan"]


@pytest.mark.covers("CreateTrainingJob.DryRun")
def test_a_dry_run_creates_nothing(service, client, fleet, wanted):
    told = without_metadata(client.create_training_job(**wanted))
    assert told.keys() == {"TrainingJobName", "Plan"}
    assert client.list_training_jobs()["TrainingJobSummaries"] == []
    assert client.list_events(TrainingJobName="new")["Events"] == []
    created = client.create_training_job(**{**wanted, "DryRun": False})
    assert "Plan" not in created
    with refused("ConflictException"):
        client.create_training_job(**wanted)


def test_an_empty_fleet_tells_what_it_knows(client, fleet, wanted):
    assert planned(client, wanted) == {
        "FleetName": "main",
        "NodeCount": 4,
        "RanksPerNode": 2,
        "WorldSize": 8,
        "Copies": 2,
        "SlotsPerNode": 8,
        "MemoryRatio": 4.0,
        "RecoveryOdds": [
            {"LostNodes": 1, "Probability": 1.0},
            {"LostNodes": 2, "Probability": 4 / 6},
            {"LostNodes": 3, "Probability": 0.0},
        ],
        "CanStartNow": False,
        "QueuedBehind": [],
        "WaitsFor": "4 more nodes; 0 of 4 are free now",
        "FreeNodeCount": 0,
        "NodesToLaunch": 4,
    }


@pytest.mark.covers(
    "CreateTrainingJob.RanksPerNode",
    "CreateTrainingJob.CheckpointConfig.ThirdSlot",
    "CreateTrainingJob.Protection.Copies",
)
def test_memory_is_counted_as_the_agents_count_it(service, client, fleet, wanted):
    spares(service, 2, 64 * GIB)
    plan = planned(client, wanted, Protection={"Copies": 3}, CheckpointConfig={"ThirdSlot": True})
    assert (plan["SlotsPerNode"], plan["NodeMemoryBytes"], plan["LargestShardBytes"]) == (18, 64 * GIB, 64 * GIB // 18)


@pytest.mark.covers("CreateTrainingJob.CheckpointConfig.MaxUploadsInFlight")
def test_each_upload_at_the_same_time_has_a_slot(service, client, fleet, wanted):
    spares(service, 2, 64 * GIB)
    config = {"ThirdSlot": True, "MaxUploadsInFlight": 3}
    assert planned(client, wanted, Protection={"Copies": 2}, CheckpointConfig=config)["SlotsPerNode"] == 5 * 2 * 2
    with refused("ValidationException", match="3 uploads need a memory slot each; set ThirdSlot, too"):
        planned(client, wanted, CheckpointConfig={"MaxUploadsInFlight": 3})


@pytest.mark.covers("CreateTrainingJob.Protection.ParityGroupSize")
def test_a_plan_shows_the_memory_of_parity_beside_that_of_copies(service, client, fleet, wanted):
    spares(service, 2, 64 * GIB)
    plan = planned(client, wanted, Protection={"ParityGroupSize": 4})
    assert (plan["Copies"], plan["ParityGroupSize"], plan["SlotsPerNode"]) == (1, 4, 8)
    assert (plan["MemoryRatio"], plan["CopiesMemoryRatio"]) == (pytest.approx(8 / 3), 4.0)
    assert plan["LargestShardBytes"] > planned(client, wanted)["LargestShardBytes"]
    assert [odds["Probability"] for odds in plan["RecoveryOdds"]] == [1.0, 0.0, 0.0]


def test_it_can_start_where_enough_nodes_are_free_and_connected(service, client, fleet, wanted):
    spares(service, 3)
    assert (planned(client, wanted)["CanStartNow"], planned(client, wanted)["NodesToLaunch"]) == (False, 1)
    assert planned(client, wanted)["WaitsFor"] == "1 more node; 3 of 4 are free now"
    plan = planned(client, wanted, NodeCount=3)
    assert (plan["CanStartNow"], plan["FreeNodeCount"], plan["NodesToLaunch"], "WaitsFor" in plan) == (
        True,
        3,
        0,
        False,
    )


def test_its_place_is_the_one_that_it_would_have(client, fleet, wanted):
    real = {**wanted, "DryRun": False}
    client.create_training_job(**{**real, "TrainingJobName": "big", "NodeCount": 6, "Priority": 5})
    client.create_training_job(**{**real, "TrainingJobName": "head", "NodeCount": 8, "Priority": 3})
    plan = planned(client, wanted)
    assert (plan["QueuePosition"], plan["QueuedBehind"], plan["NodesToLaunch"]) == (2, ["head"], 0)
    assert (
        plan["WaitsFor"]
        == "place 2 of 2 in the queue, behind head (priority 3): needs 4 nodes; jobs use 6 of at most 8 nodes"
    )
    assert planned(client, wanted, Priority=4)["QueuePosition"] == 1


def test_who_is_ahead_is_named_to_its_own_project_only(client, fleet, wanted, service, tmp_path):
    real = {**wanted, "DryRun": False}
    client.create_training_job(**{**real, "TrainingJobName": "big", "NodeCount": 6, "Priority": 5})
    client.create_training_job(**{**real, "TrainingJobName": "head", "NodeCount": 8, "Priority": 3})
    client.put_project_quota(Project="theirs", MaxPriority=2)
    theirs = service.client(service.token(Role.SUBMITTER, "theirs"))
    wanted = {**wanted, "Source": theirs.upload_source(Directory=tmp_path / "code")}
    theirs.create_training_job(
        **{**wanted, "DryRun": False, "TrainingJobName": "second", "NodeCount": 8, "Priority": 2}
    )
    plan = planned(theirs, wanted)
    assert (plan["QueuePosition"], plan["QueuedBehind"]) == (3, ["second"])
    assert plan["WaitsFor"].startswith("place 3 of 3 in the queue, behind second (priority 2) and 1 more: ")
    assert theirs.describe_training_job(TrainingJobName="second")["QueuedBehind"] == []
    assert client.describe_training_job(TrainingJobName="second")["QueuedBehind"] == ["head"]


@pytest.mark.covers("UpdateFleet.PriceUsdPerHour")
def test_cost_and_ettr_come_from_the_fleet_alone(service, client, fleet, source, wanted):
    job = Job(service, client, source)
    job.write(jobs.change, node_microseconds=10 * 3_600_000_000)
    client.update_fleet(FleetName="main", PriceUsdPerHour=98.32)
    plan = planned(client, wanted)
    assert plan["CostUsdPerHour"] == 393.28
    assert "ExpectedEttrRatio" not in plan, "nothing has failed yet"
    assert "MostCostUsd" not in plan, "nothing bounds it"
    limits = ({"MaxRuntimeInSeconds": 7200}, {"MaxRuntimeInSeconds": 7200, "MaxCostUsd": 500.0}, {"MaxCostUsd": 900.0})
    assert [planned(client, wanted, StoppingCondition=each)["MostCostUsd"] for each in limits] == [786.56, 500.0, 900.0]
    job.open_incident("inc-0")
    assert "ExpectedEttrRatio" not in planned(client, wanted), "nothing has recovered yet"
    job.write(
        incidents.change,
        "inc-0",
        closed_at=START,
        detect_seconds=1.0,
        replace_seconds=2.0,
        restore_seconds=3.0,
        rework_seconds=94.0,
    )
    plan = planned(client, wanted)
    assert (plan["ExpectedMttfSeconds"], plan["ExpectedRecoverySeconds"], plan["ExpectedEttrRatio"]) == (
        9000.0,
        100.0,
        9000 / 9100,
    )
    job.open_incident("inc-1")
    job.write(
        incidents.change,
        "inc-1",
        cause="drill",
        closed_at=START,
        detect_seconds=1000.0,
        replace_seconds=0.0,
        restore_seconds=0.0,
    )
    assert planned(client, wanted) == plan, "a drill is no failure"


def test_what_cannot_run_is_refused_as_ever(client, fleet, wanted):
    with refused("ValidationException", match="NodeCount"):
        client.create_training_job(**{**wanted, "NodeCount": 9})
