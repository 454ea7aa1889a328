"""Rolls: a roll replaces or reboots all nodes of a fleet, a few at a time.

Two columns of the fleet's row contain the newest roll and its progress.

Invariant: only users' requests change `roll`. Only the fleet loop writes `roll_progress`, with `fleets.change`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import update
from sqlalchemy.orm import Session

from control_plane.core.observed.rolls import FleetRoll, RollProgress
from control_plane.db import fleets
from control_plane.db.fleets import FleetRecord
from control_plane.db.models import FleetRow
from everstep.protocol.codec import resolve

resolve(FleetRoll)
resolve(RollProgress)


def roll_of(fleet: FleetRecord) -> FleetRoll | None:
    """Return a fleet's newest roll (request to replace or reboot all its nodes), or None if it never had one."""
    return None if fleet.roll is None else msgspec.convert(fleet.roll, FleetRoll)


def progress_of(fleet: FleetRecord) -> RollProgress | None:
    """Return the progress that the fleet loop stored last for a roll (replacement or reboot of all nodes of a fleet).

    It may belong to an earlier roll than the fleet's newest one.
    """
    return None if fleet.roll_progress is None else msgspec.convert(fleet.roll_progress, RollProgress)


def newest(fleet: FleetRecord) -> tuple[FleetRoll, RollProgress] | None:
    """Return a fleet's newest roll (request to replace or reboot all its nodes) with its progress, or None.

    The progress is empty if the fleet loop has stored only the progress of an earlier roll.
    """
    roll, progress = roll_of(fleet), progress_of(fleet)
    if roll is None:
        return None
    is_own = progress is not None and progress.roll_id == roll.roll_id
    return roll, progress if progress is not None and is_own else RollProgress(roll_id=roll.roll_id)


def stored(value: FleetRoll | RollProgress) -> dict[str, Any]:
    """Return a roll (a user's request to replace or reboot all nodes of a fleet) or its progress as a JSON value."""
    columns: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    return columns


def put(session: Session, name: str, roll: FleetRoll) -> FleetRecord:
    """Store a new roll (replacement or reboot of all nodes of a fleet), or a user's change of the newest roll.

    `session` comes from `Database.write`. Raises NotFound if the fleet does not exist.
    """
    fleets.get(session, name)
    session.execute(update(FleetRow).where(FleetRow.name == name).values(roll=stored(roll)))
    return fleets.get(session, name)
