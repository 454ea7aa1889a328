"""Tests how people start, pause, pace and stop the replacement or reboot of all nodes (a roll) over the API.

`tests/golden/incidents/roll.txt` shows the decisions of the fleet loop during a roll.
"""

from __future__ import annotations

from typing import Any

import pytest

from control_plane.core.observed.causes import RollDone
from control_plane.core.observed.rolls import RollProgress
from control_plane.db import fleets, nodes, rolls
from control_plane.db.leases import Leaser
from control_plane.db.tokens import Role
from everstep.protocol.ids import NodeId
from tests.unit.control_plane.api.conftest import refused


@pytest.fixture
def members(service, fleet) -> None:
    """Store four nodes of the fleet."""
    for name, state in (("i-1", "spare"), ("i-2", "assigned"), ("i-3", "held"), ("i-4", "draining")):
        change(
            service,
            lambda session, lease, name=name, state=state: nodes.change(
                session, lease, name, initial_state="joining", now=service.clock(), state=state
            ),
        )


def change(service, write) -> None:
    """Write to the database as the fleet loop does."""
    with service.database.write() as session:
        lease = Leaser("test", 3.0, lambda: 0.0).claim(session, "fleet", "main")
        assert lease is not None
        write(session, lease)


def end(service, *finished: str) -> None:
    """Store that the fleet's roll (replacement or reboot of all nodes) has ended."""
    with service.database.read() as session:
        roll = rolls.roll_of(fleets.get(session, "main"))
    assert roll is not None
    progress = RollProgress(
        roll_id=roll.roll_id,
        finished=tuple(map(NodeId, finished)),
        ended_at=service.clock().timestamp(),
        reason=RollDone(reboots=False, node_count=2),
    )
    change(service, lambda session, lease: fleets.change(session, lease, roll_progress=rolls.stored(progress)))


def events_of(client) -> list[str]:
    return [event["Message"] for event in client.list_events()["Events"] if event["Type"].startswith("FleetRoll")]


@pytest.mark.covers(
    "StartFleetRoll.FleetName", "StartFleetRoll.MaxUnavailable", "StartFleetRoll.Reboot", "StartFleetRoll.Reason"
)
def test_a_roll_covers_the_nodes_that_work_and_is_shown_with_the_fleet(client, service, members) -> None:
    assert "Roll" not in client.describe_fleet(FleetName="main")
    settings: dict[str, Any] = {"MaxUnavailable": 2, "Reboot": True, "Reason": "a new kernel"}
    for _ in range(2):
        roll = client.start_fleet_roll(FleetName="main", **settings)["Roll"]
    who = roll.pop("RequestedBy")
    assert roll == {
        "RollStatus": "InProgress",
        "StatusReason": "",
        "Reboot": True,
        "MaxUnavailable": 2,
        "NodeCount": 2,
        "FinishedNodeCount": 0,
        "CurrentNodeIds": [],
        "Reason": "a new kernel",
        "StartTime": service.clock(),
    }
    assert events_of(client) == [f"{who} started a roll that reboots the 2 nodes of main: a new kernel"]
    with refused("ConflictException", "already has a roll"):
        client.start_fleet_roll(FleetName="main")


@pytest.mark.covers("UpdateFleetRoll.FleetName", "UpdateFleetRoll.Paused", "UpdateFleetRoll.MaxUnavailable")
def test_a_roll_is_paused_resumed_and_paced(client, members) -> None:
    roll = client.start_fleet_roll(FleetName="main")["Roll"]
    assert (roll["MaxUnavailable"], roll["Reboot"], roll["Reason"]) == (1, False, "")
    for _ in range(2):
        assert client.update_fleet_roll(FleetName="main", Paused=True)["Roll"]["RollStatus"] == "Paused"
    changed = client.update_fleet_roll(FleetName="main", MaxUnavailable=3)["Roll"]
    assert (changed["RollStatus"], changed["MaxUnavailable"]) == ("Paused", 3)
    assert client.update_fleet_roll(FleetName="main", Paused=False)["Roll"]["RollStatus"] == "InProgress"
    endings = (" paused the roll of main", " set MaxUnavailable to 3 for the roll of main", " resumed the roll of main")
    told = events_of(client)[1:]
    assert [message.endswith(ending) for message, ending in zip(told, endings, strict=True)] == [True] * 3


@pytest.mark.covers("StopFleetRoll.FleetName")
def test_a_stopped_roll_makes_room_for_another_one(client, service, members) -> None:
    client.start_fleet_roll(FleetName="main")
    for _ in range(2):
        assert client.stop_fleet_roll(FleetName="main")["Roll"]["RollStatus"] == "Stopped"
    with refused("ConflictException", "has no roll in progress"):
        client.update_fleet_roll(FleetName="main", Paused=True)
    assert client.start_fleet_roll(FleetName="main", Reason="again")["Roll"]["RollStatus"] == "InProgress"
    assert len(events_of(client)) == 3


def test_a_complete_roll_stays_as_it_is(client, service, members) -> None:
    client.start_fleet_roll(FleetName="main")
    end(service, "i-1", "i-2")
    roll = client.describe_fleet(FleetName="main")["Roll"]
    assert (roll["RollStatus"], roll["FinishedNodeCount"], roll["EndTime"]) == ("Completed", 2, service.clock())
    with refused("ConflictException", "has no roll in progress"):
        client.stop_fleet_roll(FleetName="main")
    service.clock.advance(5)
    roll = client.start_fleet_roll(FleetName="main")["Roll"]
    assert (roll["RollStatus"], roll["FinishedNodeCount"]) == ("InProgress", 0)
    assert "EndTime" not in roll, "the progress belongs to the earlier roll"


def test_only_an_administrator_rolls_a_fleet_that_stays(client, service, members) -> None:
    for operation in ("start_fleet_roll", "update_fleet_roll", "stop_fleet_roll"):
        with refused("AccessDeniedException"):
            getattr(service.client(service.token(Role.SUBMITTER)), operation)(FleetName="main")
        with refused("ResourceNotFoundException"):
            getattr(client, operation)(FleetName="other")
    with refused("ConflictException", "has no roll in progress"):
        client.stop_fleet_roll(FleetName="main")
    with refused("ValidationException", "MaxUnavailable"):
        client.start_fleet_roll(FleetName="main", MaxUnavailable=0)
    client.delete_fleet(FleetName="main")
    with refused("ConflictException", "is being deleted"):
        client.start_fleet_roll(FleetName="main")
