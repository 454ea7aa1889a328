"""What people say of nodes and fleets: a held node is released, a silent fleet is gone."""

from __future__ import annotations

from control_plane.db import fleets, implications, nodes
from control_plane.db.implications import ImplicationRecord
from control_plane.db.leases import Leaser
from control_plane.db.tokens import Role
from tests.unit.control_plane.api.conftest import refused


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
            evidence="words",
            is_own_word=True,
            remedy="reboot",
        )
        implications.record(session, lease, [line, line])


def test_a_held_node_tells_its_history_and_is_released_as_a_person_says(client, fleet, service):
    hold(service)
    described = client.describe_node(NodeId="i-1")
    assert described["Hold"] == "distrusted"
    assert [(line["IncidentId"], line["Cause"], line["Remedy"]) for line in described["Incidents"]] == [("inc-1", "gpu_xid 95", "reboot")]
    assert client.list_nodes()["Nodes"][0]["Incidents"] == []
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


def test_what_becomes_of_failed_instances_is_the_fleets(client, fleet):
    before = client.describe_fleet(FleetName="main")
    assert (before["HoldFailedInstances"], before["MaxReplacementsPerHour"]) == (False, 20)
    changed = client.update_fleet(FleetName="main", HoldFailedInstances=True, MaxReplacementsPerHour=0)
    assert (changed["HoldFailedInstances"], changed["MaxReplacementsPerHour"]) == (True, 0)
    assert client.update_fleet(FleetName="main", HoldFailedInstances=False)["MaxReplacementsPerHour"] == 0
