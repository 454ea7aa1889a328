"""Rolls: replace or reboot all nodes of a fleet, a few at a time. Operations start, change, pause and stop a roll.

DescribeFleet returns the progress of the fleet's roll.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace

from control_plane.api.auth import Admin, Caller
from control_plane.api.deps import FleetNamePath, Services, ServicesDep
from control_plane.api.errors import InUse
from control_plane.api.router import Router
from control_plane.api.routes.fleets import view
from control_plane.api.schemas import fleets as fleets_schemas
from control_plane.core.observed.rolls import FleetRoll
from control_plane.core.states import NodeState
from control_plane.db import events, fleets, nodes
from control_plane.db import rolls as db_rolls
from control_plane.db.fleets import FleetRecord
from everstep.protocol.ids import NodeId

router = Router(prefix="/v1/fleets", tags=["Fleets"])
_LEFT_OUT = (NodeState.HELD, NodeState.DRAINING, NodeState.GONE)


@router.post("/{FleetName}/roll", operation_id="StartFleetRoll", status_code=202)
def start_fleet_roll(
    fleet_name: FleetNamePath, request: fleets_schemas.StartFleetRollRequest, caller: Admin, services: ServicesDep
) -> fleets_schemas.Fleet:
    """Replace or reboot all nodes of a fleet, a few at a time, and lose no step of its jobs.

    The roll begins with another node only while every launched job of the fleet trains without an open incident and has
    all its copies. All ranks of a job stop at the same step before the job gives up a node, as with ReplaceNode. The
    roll replaces or reboots spares first. It skips nodes in state `held` (kept out of use). A repeated call with the
    same settings changes nothing. Raises ConflictException while another roll of the fleet has not ended, and for a
    fleet that is being deleted.
    """
    now = services.now()
    with services.change() as session:
        fleet = fleets.get(session, fleet_name)
        if fleet.delete_requested_at is not None:
            raise InUse(f"The fleet {fleet_name!r} is being deleted.")
        roll = FleetRoll(
            roll_id=f"roll-{secrets.token_hex(6)}",
            node_ids=tuple(
                NodeId(node.id) for node in nodes.of_fleet(session, fleet_name) if node.state not in _LEFT_OUT
            ),
            max_unavailable=request.max_unavailable,
            reboots=request.reboot,
            requested_by=caller.name,
            reason=request.reason,
            started_at=now.timestamp(),
        )
        current = _unfinished(fleet)
        if current is None:
            fleet = db_rolls.put(session, fleet_name, roll)
            what = "reboots" if roll.reboots else "replaces"
            why = f": {roll.reason}" if roll.reason else ""
            message = f"{caller.name} started a roll that {what} the {len(roll.node_ids)} nodes of {fleet_name}{why}"
            events.append_for_fleet(session, fleet, "FleetRollStarted", message, now)
        elif _settings(current) != _settings(roll):
            raise InUse(
                f"The fleet {fleet_name!r} already has a roll.",
                hint="Wait until it has ended, or stop it: everstep fleets stop-roll",
            )
    return view(services, fleet)


@router.post("/{FleetName}/roll/update", operation_id="UpdateFleetRoll", status_code=202)
def update_fleet_roll(
    fleet_name: FleetNamePath, request: fleets_schemas.UpdateFleetRollRequest, caller: Admin, services: ServicesDep
) -> fleets_schemas.Fleet:
    """Pause or continue a fleet's roll, or change how many nodes may be out of service at the same time.

    A roll is the replacement or reboot of all nodes of the fleet.
    """

    def change(roll: FleetRoll) -> FleetRoll:
        return replace(
            roll,
            is_paused=roll.is_paused if request.paused is None else request.paused,
            max_unavailable=request.max_unavailable or roll.max_unavailable,
        )

    return _change(services, fleet_name, caller, change)


@router.post("/{FleetName}/roll/stop", operation_id="StopFleetRoll", status_code=202)
def stop_fleet_roll(fleet_name: FleetNamePath, caller: Admin, services: ServicesDep) -> fleets_schemas.Fleet:
    """End the fleet's roll, the replacement or reboot of all its nodes.

    The roll moves no further jobs. Nodes that it has already taken out of service are still replaced or rebooted. Fails
    if the fleet's newest roll is complete. Repeated calls change nothing.
    """
    return _change(services, fleet_name, caller, lambda roll: replace(roll, is_stopped=True))


def _change(
    services: Services, fleet_name: str, caller: Caller, change: Callable[[FleetRoll], FleetRoll]
) -> fleets_schemas.Fleet:
    now = services.now()
    with services.change() as session:
        fleet = fleets.get(session, fleet_name)
        before = db_rolls.roll_of(fleet)
        after = None if before is None else change(before)
        if before is None or after is None or (after != before and _unfinished(fleet) is None):
            raise InUse(f"The fleet {fleet_name!r} has no roll in progress.", hint="Start one: everstep fleets roll")
        if after != before:
            fleet = db_rolls.put(session, fleet_name, after)
            message = f"{caller.name} {_in_words(before, after)} the roll of {fleet_name}"
            events.append_for_fleet(session, fleet, "FleetRollUpdated", message, now)
    return view(services, fleet)


def _unfinished(fleet: FleetRecord) -> FleetRoll | None:
    """Return the fleet's roll (the replacement or reboot of its nodes), or None if it has ended or was stopped."""
    newest = db_rolls.newest(fleet)
    if newest is None or newest[0].is_stopped or newest[1].ended_at is not None:
        return None
    return newest[0]


def _settings(roll: FleetRoll) -> tuple[int, bool, str]:
    return roll.max_unavailable, roll.reboots, roll.reason


def _in_words(before: FleetRoll, after: FleetRoll) -> str:
    if after.is_stopped:
        return "stopped"
    if after.is_paused != before.is_paused:
        return "paused" if after.is_paused else "resumed"
    return f"set MaxUnavailable to {after.max_unavailable} for"
