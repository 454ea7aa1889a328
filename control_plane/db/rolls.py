"""Rolls: the newest roll of a fleet and its progress, in two columns of the fleet's row.

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
    """Return a fleet's newest roll, or None if it never had one."""
    return None if fleet.roll is None else msgspec.convert(fleet.roll, FleetRoll)


def progress_of(fleet: FleetRecord) -> RollProgress | None:
    """Return the progress stored last, which may belong to an earlier roll than the newest."""
    return None if fleet.roll_progress is None else msgspec.convert(fleet.roll_progress, RollProgress)


def newest(fleet: FleetRecord) -> tuple[FleetRoll, RollProgress] | None:
    """Return a fleet's newest roll with its progress, or None. The progress is empty before this roll has any."""
    roll, progress = roll_of(fleet), progress_of(fleet)
    if roll is None:
        return None
    is_own = progress is not None and progress.roll_id == roll.roll_id
    return roll, progress if progress is not None and is_own else RollProgress(roll_id=roll.roll_id)


def stored(value: FleetRoll | RollProgress) -> dict[str, Any]:
    """Return a roll or its progress as a JSON value."""
    columns: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    return columns


def put(session: Session, name: str, roll: FleetRoll) -> FleetRecord:
    """Store a new roll, or a user's change of the newest one. Raises NotFound if the fleet does not exist."""
    fleets.get(session, name)
    session.execute(update(FleetRow).where(FleetRow.name == name).values(roll=stored(roll)))
    return fleets.get(session, name)
