"""Tests requests of people about nodes, fleets and jobs.

For example, a person returns a node that Everstep has kept out of use, or declares silent nodes as ended.
"""

from __future__ import annotations

from contextlib import closing

import pytest

from control_plane.core.observed.facts import Recorded
from control_plane.db import fleets, implications, jobs, nodes
from control_plane.db.implications import ImplicationRecord
from control_plane.db.leases import Leaser
from control_plane.db.tokens import Role
from tests.unit.control_plane.api.conftest import START, refused
from tests.unit.control_plane.api.test_results import Job


def hold(service, **changes):
    with service.database.write() as session:
        lease = Leaser("test", 3.0, lambda: 0.0).claim(session, "fleet", "main")
        assert lease is not None
        columns = {"state": "held", "hold": "distrusted", "reason": "words", **changes}
        nodes.change(session, lease, "i-1", initial_state="joining", now=service.clock(), **columns)
        line = ImplicationRecord(
            node_id="i-1",
            incident_id="inc-1",
            fleet_name="main",
            at=service.clock(),
            what="gpu_xid 95",
            evidence=Recorded(text="words"),
            is_own_word=True,
            remedy="reboot",
        )
        implications.record(session, lease, [line, line])


@pytest.mark.covers("ReleaseNode.NodeId", "ReleaseNode.Terminate")
def test_a_held_node_tells_its_history_and_is_released_as_a_person_says(client, fleet, service):
    hold(service)
    described = client.describe_node(NodeId="i-1")
    assert described["Hold"] == "distrusted"
    assert [(line["IncidentId"], line["Cause"], line["Remedy"]) for line in described["Incidents"]] == [
        ("inc-1", "gpu_xid 95", "reboot")
    ]
    assert client.list_nodes()["Nodes"][0]["Incidents"] == []
    another = service.client(service.token(Role.SUBMITTER, "another"))
    for node in (another.describe_node(NodeId="i-1"), *another.list_nodes()["Nodes"]):
        assert (node["Incidents"], node["Reason"]) == ([], ""), "it may speak of another project's job"
    assert described["Reason"]
    client.release_node(NodeId="i-1", Terminate=True)
    client.release_node(NodeId="i-1")
    with service.database.read() as session:
        stored = nodes.get(session, "i-1")
    assert (stored.release, stored.returned_at) == ("return", service.clock())
    assert sum(event["Type"] == "NodeReleased" for event in client.list_events()["Events"]) == 2


def test_only_a_held_node_is_released_and_only_by_an_administrator(client, fleet, service):
    hold(service, state="assigned", hold=None)
    with refused("ConflictException", "is assigned, not held"):
        client.release_node(NodeId="i-1", Terminate=True)
    with refused("ResourceNotFoundException"):
        client.release_node(NodeId="i-2")
    with refused("AccessDeniedException"):
        service.client(service.token(Role.SUBMITTER)).release_node(NodeId="i-1")


@pytest.mark.covers("UnfreezeFleet.FleetName")
def test_a_person_says_that_who_is_silent_is_gone(client, fleet, service):
    client.unfreeze_fleet(FleetName="main")
    service.clock.advance(5)
    client.unfreeze_fleet(FleetName="main")
    with service.database.read() as session:
        assert (service.clock() - fleets.get(session, "main").blindness_lifted_at).total_seconds() == 5
    assert sum(event["Type"] == "FleetUnfrozen" for event in client.list_events()["Events"]) == 1
    with refused("ResourceNotFoundException"):
        client.unfreeze_fleet(FleetName="other")
    with refused("AccessDeniedException"):
        service.client(service.token(Role.SUBMITTER)).unfreeze_fleet(FleetName="main")


@pytest.mark.covers("UpdateFleet.HoldFailedInstances", "UpdateFleet.MaxReplacementsPerHour")
def test_what_becomes_of_failed_instances_is_the_fleets(client, fleet):
    before = client.describe_fleet(FleetName="main")
    assert (before["HoldFailedInstances"], before["MaxReplacementsPerHour"]) == (False, 20)
    changed = client.update_fleet(FleetName="main", HoldFailedInstances=True, MaxReplacementsPerHour=0)
    assert (changed["HoldFailedInstances"], changed["MaxReplacementsPerHour"]) == (True, 0)
    assert client.update_fleet(FleetName="main", HoldFailedInstances=False)["MaxReplacementsPerHour"] == 0


OPERATIONS = ("drain_node", "replace_node", "reboot_node", "hold_node")


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.covers(
    "DrainNode.NodeId",
    "DrainNode.Reason",
    "ReplaceNode.NodeId",
    "ReplaceNode.Reason",
    "RebootNode.NodeId",
    "RebootNode.Reason",
    "HoldNode.NodeId",
    "HoldNode.Reason",
)
def test_what_is_asked_of_a_node_is_stored_shown_and_told_once(client, fleet, service, operation):
    hold(service, state="spare", hold=None)
    for _ in range(2):
        node = getattr(client, operation)(NodeId="i-1", Reason="a new kernel")
    own = client.get_caller_identity()["TokenId"]
    verb = operation.removesuffix("_node")
    assert (node["Request"], node["RequestReason"]) == (
        verb,
        f"a user requested to {verb} i-1 (first administrator, {own}): a new kernel",
    )
    assert [event["Message"] for event in client.list_events()["Events"] if event["Type"] == "NodeRequested"] == [
        node["RequestReason"]
    ]
    other = next(name for name in OPERATIONS if name != operation)
    with refused("ConflictException", f"already has a pending request: {verb}"):
        getattr(client, other)(NodeId="i-1")
    assert "Request" not in client.release_node(NodeId="i-1")
    assert "Request" in getattr(client, other)(NodeId="i-1")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_asked_of_nodes_is_the_administrators_to_ask(client, fleet, service, operation):
    hold(service, state="spare", hold=None)
    with refused("AccessDeniedException", "needs the role admin"):
        getattr(service.client(service.token(Role.SUBMITTER)), operation)(NodeId="i-1")
    with refused("ResourceNotFoundException"):
        getattr(client, operation)(NodeId="i-2")


def test_a_node_that_works_where_nobody_can_take_over_stays(client, fleet, service, source):
    job = Job(service, client, source)
    job.launch(1)
    hold(service, state="assigned", hold=None, run_id=job.run)
    # the service accepts the request, because the group can launch a replacement
    assert client.drain_node(NodeId="i-1")["Request"] == "drain"
    client.release_node(NodeId="i-1")
    with service.database.write() as session:
        lease = Leaser("test", 3.0, lambda: 0.0).claim(session, "fleet", "main")
        fleets.change(session, lease, max_node_count=1)
    with refused("ConflictException", "no node can replace it"):
        client.drain_node(NodeId="i-1")
    with refused("ConflictException", "works for gpt; everstep nodes drain"):
        client.hold_node(NodeId="i-1")


def test_a_node_that_is_held_for_a_person_is_that_already(client, fleet, service):
    hold(service, hold="person")
    assert "Request" not in client.drain_node(NodeId="i-1")
    assert "Request" not in client.hold_node(NodeId="i-1")


@pytest.mark.covers("AcknowledgeIncident.IncidentId", "AcknowledgeIncident.Note")
def test_who_saw_an_incident_first_stays(client, fleet, service, source):
    job = Job(service, client, source)
    job.launch(1)
    job.open_incident("inc-7")
    assert "AcknowledgementTime" not in client.describe_incident(IncidentId="inc-7")
    service.client(service.token(Role.SUBMITTER)).acknowledge_incident(IncidentId="inc-7", Note="the switch")
    service.clock.advance(5)
    seen = client.acknowledge_incident(IncidentId="inc-7", Note="no, the cable")
    assert (seen["Acknowledgement"], (service.clock() - seen["AcknowledgementTime"]).total_seconds()) == (
        "the switch",
        5,
    )
    assert sum(event["Type"] == "IncidentAcknowledged" for event in client.list_events()["Events"]) == 1
    with refused("AccessDeniedException"):
        service.client(service.token(Role.VIEWER)).acknowledge_incident(IncidentId="inc-7")
    with refused("ResourceNotFoundException"):
        service.client(service.token(Role.SUBMITTER, "other")).acknowledge_incident(IncidentId="inc-7")


@pytest.mark.covers("AcceptLoss.TrainingJobName", "AcceptLoss.FromStep")
def test_a_person_lets_a_job_repeat_the_training_that_it_names(client, fleet, service, source):
    job = Job(service, client, source)
    with refused("ConflictException", "waits for no decision"):
        client.accept_loss(TrainingJobName="gpt", FromStep=0)
    job.launch(1)
    holders = [{"node_id": "i-1", "state": "Ended"}, {"node_id": "i-2", "state": "Silent"}]
    choice = {"base_step": 30, "newest_step": 900, "after": 1, "seconds": 3600.0, "since": START.timestamp()}
    job.write(jobs.change, memo={"repeat": {**choice, "holders": holders, "wrong_steps": [60]}})
    assert client.describe_training_job(TrainingJobName="gpt")["RepeatChoice"] == {
        "BaseStep": 30,
        "NewestStep": 900,
        "RepeatedSeconds": 3600.0,
        "StartTime": START,
        "EndedNodeIds": ["i-1"],
        "SilentNodeIds": ["i-2"],
        "DamagedSteps": [60],
        "UnknownSteps": [],
        "IsStoreListed": False,
        "IsTotalLoss": False,
    }
    with refused("ConflictException", "can now restore step 30, not step 60"):
        client.accept_loss(TrainingJobName="gpt", FromStep=60)
    for _ in range(2):
        client.accept_loss(TrainingJobName="gpt", FromStep=30)
    told = [event["Message"] for event in client.list_events()["Events"] if event["Type"] == "LossAccepted"]
    assert [message.partition(" lets ")[2] for message in told] == ["gpt continue from step 30."]
    job.write(jobs.change, memo={})
    client.accept_loss(TrainingJobName="gpt", FromStep=30)
    with refused("AccessDeniedException"):
        service.client(service.token(Role.VIEWER)).accept_loss(TrainingJobName="gpt", FromStep=30)
    with refused("ResourceNotFoundException"):
        service.client(service.token(Role.SUBMITTER, "other")).accept_loss(TrainingJobName="gpt", FromStep=30)


@pytest.mark.covers(
    "TakeOverTrainingJob.TrainingJobName", "TakeOverTrainingJob.Reason", "HandBackTrainingJob.TrainingJobName"
)
def test_a_job_is_taken_over_and_handed_back(client, fleet, service, source):
    job = Job(service, client, source)
    with refused("ConflictException", "is queued and cannot be taken over"):
        client.take_over_training_job(TrainingJobName="gpt")
    job.launch(1)
    job.run_ranks()
    client.take_over_training_job(TrainingJobName="gpt", Reason="the loader")
    service.clock.advance(5)
    service.client(service.token(Role.SUBMITTER)).take_over_training_job(TrainingJobName="gpt")
    described = client.describe_training_job(TrainingJobName="gpt")
    assert described["TakenOverBy"].startswith("first administrator")
    assert (service.clock() - described["TakenOverTime"]).total_seconds() == 5
    hold(service, state="assigned", hold=None, run_id=job.run)
    with refused("ConflictException", "has taken over; hand the job back first"):
        client.drain_node(NodeId="i-1")
    for _ in range(2):
        client.hand_back_training_job(TrainingJobName="gpt")
    assert "TakenOverBy" not in client.describe_training_job(TrainingJobName="gpt")
    told = [event["Type"] for event in client.list_events()["Events"]]
    assert (told.count("TrainingJobTakenOver"), told.count("TrainingJobHandedBack")) == (1, 1)
    for change in ("take_over_training_job", "hand_back_training_job"):
        with refused("AccessDeniedException"):
            getattr(service.client(service.token(Role.VIEWER)), change)(TrainingJobName="gpt")
        with refused("ResourceNotFoundException"):
            getattr(service.client(service.token(Role.SUBMITTER, "other")), change)(TrainingJobName="gpt")


# Drills: faults that a person injects to test the recovery


@pytest.mark.covers(
    "UpdateFleet.AllowDrills",
    "StartDrill.TrainingJobName",
    "StartDrill.DrillType",
    "StartDrill.NodeId",
    "StartDrill.Rank",
    "ListDrills.TrainingJobName",
)
def test_a_drill_is_for_fleets_that_allow_it_and_jobs_that_train(client, fleet, service, source):
    job = Job(service, client, source)
    job.launch(1)
    with refused("AccessDeniedException", "does not allow drills"):
        client.start_drill(TrainingJobName="gpt", DrillType="kill-rank")
    client.update_fleet(FleetName="main", AllowDrills=True)
    with refused("ConflictException", "is queued; a drill needs a job that trains"):
        client.start_drill(TrainingJobName="gpt", DrillType="kill-rank")
    job.run_ranks()
    client.take_over_training_job(TrainingJobName="gpt")
    with refused("ConflictException", "is taken over"):
        client.start_drill(TrainingJobName="gpt", DrillType="kill-rank")
    client.hand_back_training_job(TrainingJobName="gpt")
    for wrong, words in (
        ({"DrillType": "kill-rank", "NodeId": "i-9"}, "NodeId: is not a node of gpt: i-0, i-1"),
        ({"DrillType": "kill-rank", "NodeId": "i-0", "Rank": 1}, "Rank: is not on i-0, which runs 0"),
        ({"DrillType": "kill-agent", "Rank": 1}, "Rank: is allowed only for kill-rank"),
    ):
        with refused("ValidationException", words):
            client.start_drill(TrainingJobName="gpt", **wrong)
    with refused("AccessDeniedException", "needs the role admin"):
        service.client(service.token(Role.SUBMITTER)).start_drill(TrainingJobName="gpt", DrillType="kill-rank")
    drill = client.start_drill(TrainingJobName="gpt", DrillType="kill-rank")
    assert (drill["NodeId"], drill["Rank"], drill["DrillStatus"]) == ("i-1", 1, "requested")
    with refused("ConflictException", "has not ended"):
        client.start_drill(TrainingJobName="gpt", DrillType="kill-agent")
    assert [shown["DrillId"] for shown in client.list_drills(TrainingJobName="gpt")["Drills"]] == [drill["DrillId"]]
    assert service.client(service.token(Role.VIEWER, "other")).list_drills()["Drills"] == []


def test_a_node_names_its_job_to_the_jobs_project_only(client, fleet, service, source):
    job = Job(service, client, source)
    hold(service, state="assigned", hold=None, run_id=job.run)
    shown = []
    for project in (client.describe_training_job(TrainingJobName="gpt")["Project"], "vision"):
        with closing(service.client(service.token(Role.VIEWER, project))) as reader:
            nodes = (reader.describe_node(NodeId="i-1"), *reader.list_nodes()["Nodes"])
            shown.append({node.get("TrainingJobName") for node in nodes if node["NodeId"] == "i-1"})
    assert shown == [{"gpt"}, {None}]
