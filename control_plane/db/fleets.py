"""Fleets: the registered Auto Scaling groups.

Invariant: only users' requests change the settings, and only the fleet loop writes the observations, under the lease.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from sqlalchemy import bindparam, delete, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from control_plane.core.encryption import ReplicaEncryption
from control_plane.core.observed.causes import Reason
from control_plane.core.observed.specs import DEFAULT_REPLACEMENTS_PER_HOUR
from control_plane.db import leases, tokens
from control_plane.db.errors import AlreadyExists, Conflict, NotFound
from control_plane.db.leases import Lease
from control_plane.db.models import FleetRow, JobRow, NodeRow, NoticeRow
from control_plane.db.session import changed_rows, columns_for, record_of, values_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFleet:
    """Columns of a new fleet. The caller has checked in AWS that the group is suitable."""

    name: str
    auto_scaling_group_name: str
    project: str
    state: str
    min_node_count: int
    spare_count: int
    max_node_count: int
    instance_type: str
    availability_zone: str
    tags: Mapping[str, str]
    price_usd_per_hour: float | None = None
    spare_probability: float | None = None
    hold_failed_instances: bool = False
    max_replacements_per_hour: int = DEFAULT_REPLACEMENTS_PER_HOUR
    node_role_name: str = ""
    allow_drills: bool = False
    allow_commands: bool = False
    replica_encryption: str = ReplicaEncryption.AUTO
    encrypting_types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRecord(NewFleet):
    """A row of the table of fleets.

    Users and the fleet loop may have changed the inherited columns since the registration.
    """

    delete_requested_at: datetime | None
    blindness_lifted_at: datetime | None
    desired_node_count: int
    vacancies: tuple[tuple[float, int], ...]
    drift: tuple[str, ...]
    reasons: tuple[Reason, ...]
    created_at: datetime
    idle_microseconds: Mapping[str, int] = field(default_factory=dict[str, int])
    """Time of nodes without a job until `idle_until`, by `NodeState`, summed over nodes."""
    idle_counts: Mapping[str, int] = field(default_factory=dict[str, int])
    idle_until: datetime | None = None
    roll: Mapping[str, Any] | None = None
    """Newest roll, as `db.rolls` decodes it."""
    roll_progress: Mapping[str, Any] | None = None


def create(session: Session, fleet: NewFleet, now: datetime) -> FleetRecord:
    """Store a new fleet. Raises AlreadyExists if another fleet has the same name or Auto Scaling group."""
    require_free(session, fleet.name, fleet.auto_scaling_group_name)
    row = FleetRow(**values_of(fleet), created_at=now)
    session.add(row)
    try:
        session.flush()
    except IntegrityError as error:
        raise AlreadyExists("fleet", fleet.name) from error
    return record_of(row, FleetRecord)


def require_free(session: Session, name: str, auto_scaling_group_name: str) -> None:
    """Raise AlreadyExists if a fleet has this name or this Auto Scaling group."""
    if session.get(FleetRow, name) is not None:
        raise AlreadyExists("fleet", name)
    if (
        session.scalar(select(FleetRow.name).where(FleetRow.auto_scaling_group_name == auto_scaling_group_name))
        is not None
    ):
        raise AlreadyExists("fleet of the group", auto_scaling_group_name)


def get(session: Session, name: str) -> FleetRecord:
    """Return the fleet with this name, or raise NotFound."""
    found = find(session, name)
    if found is None:
        raise NotFound("fleet", name)
    return found


_FLEET: Final = FleetRow.__table__.c
_EVERY: Final = select(*columns_for(FleetRow, FleetRecord)).order_by(_FLEET.name)
_NAMES: Final = select(_FLEET.name).order_by(_FLEET.name)
_BY_NAME: Final = select(*columns_for(FleetRow, FleetRecord)).where(_FLEET.name == bindparam("of_fleet"))


def names(session: Session) -> tuple[str, ...]:
    """Return the names of all fleets, sorted."""
    return tuple(session.scalars(_NAMES))


def find(session: Session, name: str) -> FleetRecord | None:
    """Return the fleet with this name, or None."""
    row = session.execute(_BY_NAME, {"of_fleet": name}).one_or_none()
    return None if row is None else record_of(row, FleetRecord)


def takes_jobs(session: Session, name: str) -> bool:
    """Return whether the fleet exists and is not being deleted. In a write transaction, this holds until the commit."""
    fleet = find(session, name)
    return fleet is not None and fleet.delete_requested_at is None


def every(session: Session) -> tuple[FleetRecord, ...]:
    """Return all fleets, sorted by name."""
    return tuple(record_of(row, FleetRecord) for row in session.execute(_EVERY))


def page(session: Session, *, after: str | None, limit: int) -> tuple[FleetRecord, ...]:
    """Return one page of the fleets after a name (None: from the start), sorted by name."""
    query = select(FleetRow).order_by(FleetRow.name).limit(limit)
    if after is not None:
        query = query.where(FleetRow.name > after)
    return tuple(record_of(row, FleetRecord) for row in session.scalars(query))


def set_wanted(session: Session, name: str, **settings: object) -> FleetRecord:
    """Change the given settings of a fleet as a user requested. Raises NotFound if the fleet does not exist."""
    if settings and not changed_rows(session.execute(update(FleetRow).where(FleetRow.name == name).values(**settings))):
        raise NotFound("fleet", name)
    return get(session, name)


def lift_blindness(session: Session, name: str, now: datetime) -> FleetRecord:
    """Record a user's statement that a fleet's silent nodes are lost (UnfreezeFleet). Idempotent.

    It overrides the rule that no silent node counts as lost while most agents are silent. Raises NotFound if the fleet
    does not exist.
    """
    get(session, name)
    session.execute(
        update(FleetRow)
        .where(FleetRow.name == name, FleetRow.blindness_lifted_at.is_(None))
        .values(blindness_lifted_at=now)
    )
    return get(session, name)


def change(session: Session, lease: Lease, **changes: object) -> None:
    """Store new observations of the fleet loop about a fleet. Raises StaleLease."""
    leases.guard(session, lease)
    if changes:
        session.execute(update(FleetRow).where(FleetRow.name == lease.key).values(**changes))


def request_delete(session: Session, name: str, now: datetime) -> FleetRecord:
    """Record a user's request to delete a fleet, which the fleet loop executes. Idempotent.

    Raises NotFound if the fleet does not exist, and Conflict if it has unfinished jobs.
    """
    get(session, name)
    _require_idle(session, name)
    session.execute(
        update(FleetRow)
        .where(FleetRow.name == name, FleetRow.delete_requested_at.is_(None))
        .values(delete_requested_at=now)
    )
    return get(session, name)


def remove(session: Session, lease: Lease, now: datetime) -> None:
    """Delete a fleet with its nodes and its lease, and revoke the sessions of its agents.

    Raises StaleLease, and Conflict if the fleet has unfinished jobs.
    """
    leases.guard(session, lease)
    _require_idle(session, lease.key)
    session.execute(
        delete(NoticeRow).where(NoticeRow.node_id.in_(select(NodeRow.id).where(NodeRow.fleet_name == lease.key)))
    )
    tokens.revoke_sessions_of_fleet(session, lease.key, now)
    session.execute(delete(NodeRow).where(NodeRow.fleet_name == lease.key))
    session.execute(delete(FleetRow).where(FleetRow.name == lease.key))


def _require_idle(session: Session, name: str) -> None:
    unfinished = session.scalar(
        select(func.count()).select_from(JobRow).where(JobRow.fleet_name == name, JobRow.ended_at.is_(None))
    )
    if unfinished:
        raise Conflict(f"the fleet {name!r} has training jobs that have not ended: {unfinished}")
