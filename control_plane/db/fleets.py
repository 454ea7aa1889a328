"""Fleets: which Auto Scaling groups Everstep keeps, and how many nodes are wanted of each.

Invariant: users write what they want (spares, floor), the fleet loop writes what it finds, under the fleet's lease.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TypedDict, Unpack

from sqlalchemy import delete, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from control_plane.core.observed.jobs import DEFAULT_REPLACEMENTS_PER_HOUR
from control_plane.db import leases, tokens
from control_plane.db.errors import AlreadyExists, Conflict, NotFound
from control_plane.db.leases import Lease
from control_plane.db.models import Fleet, Job, Node, Notice
from control_plane.db.session import changed_rows, record_of, values_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRecord:
    """A fleet as it is stored."""

    name: str
    auto_scaling_group_name: str
    project: str
    state: str
    delete_requested_at: datetime | None
    min_node_count: int
    spare_count: int
    spare_probability: float | None
    hold_failed_instances: bool
    max_replacements_per_hour: int
    node_role_name: str
    allow_drills: bool
    allow_commands: bool
    blindness_lifted_at: datetime | None
    max_node_count: int
    instance_type: str
    availability_zone: str
    price_usd_per_hour: float | None
    desired_node_count: int
    vacancies: tuple[tuple[float, int], ...]
    drift: tuple[str, ...]
    reason: str
    tags: Mapping[str, str]
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFleet:
    """A fleet that is about to be stored; the group was looked at before."""

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


class FleetUpdate(TypedDict, total=False):
    """What the fleet loop may change; what is left out stays."""

    state: str
    max_node_count: int
    instance_type: str
    availability_zone: str
    desired_node_count: int
    vacancies: tuple[tuple[float, int], ...]
    drift: tuple[str, ...]
    reason: str
    blindness_lifted_at: datetime | None


class FleetWishes(TypedDict, total=False):
    """What a user may change; what is left out stays."""

    min_node_count: int
    spare_count: int
    spare_probability: float | None
    price_usd_per_hour: float
    hold_failed_instances: bool
    max_replacements_per_hour: int
    node_role_name: str
    allow_drills: bool
    allow_commands: bool


def create(session: Session, fleet: NewFleet, now: datetime) -> FleetRecord:
    """Store a new fleet.

    Args:
        session: a writing one.
        fleet: what to store.
        now: when.

    Returns:
        The fleet as stored.

    Raises:
        AlreadyExists: the name is taken, or the group belongs to another fleet.
    """
    require_free(session, fleet.name, fleet.auto_scaling_group_name)
    row = Fleet(**values_of(fleet), created_at=now)
    session.add(row)
    try:
        session.flush()
    except IntegrityError as error:
        raise AlreadyExists("fleet", fleet.name) from error
    return record_of(row, FleetRecord)


def require_free(session: Session, name: str, auto_scaling_group_name: str) -> None:
    """Refuse what another fleet has already.

    Args:
        session: any.
        name: of a fleet that is to be.
        auto_scaling_group_name: its group.

    Raises:
        AlreadyExists: the name is taken, or the group belongs to another fleet.
    """
    if session.get(Fleet, name) is not None:
        raise AlreadyExists("fleet", name)
    if session.scalar(select(Fleet.name).where(Fleet.auto_scaling_group_name == auto_scaling_group_name)) is not None:
        raise AlreadyExists("fleet of the group", auto_scaling_group_name)


def get(session: Session, name: str) -> FleetRecord:
    """Return the fleet of this name.

    Args:
        session: any.
        name: of the fleet.

    Returns:
        The fleet as stored.

    Raises:
        NotFound: there is none.
    """
    found = find(session, name)
    if found is None:
        raise NotFound("fleet", name)
    return found


def find(session: Session, name: str) -> FleetRecord | None:
    """Return the fleet of this name, or None: a job outlives its fleet."""
    row = session.get(Fleet, name)
    return None if row is None else record_of(row, FleetRecord)


def takes_jobs(session: Session, name: str) -> bool:
    """Say whether a fleet is there to stay: in a transaction that writes, until that is committed."""
    fleet = find(session, name)
    return fleet is not None and fleet.delete_requested_at is None


def every(session: Session) -> tuple[FleetRecord, ...]:
    """Return all fleets by name; they are few."""
    return tuple(record_of(row, FleetRecord) for row in session.scalars(select(Fleet).order_by(Fleet.name)))


def page(session: Session, *, after: str | None, limit: int) -> tuple[FleetRecord, ...]:
    """Return fleets by name.

    Args:
        session: any.
        after: name of the last one of the page before, or None for the first page.
        limit: at most this many.

    Returns:
        At most `limit` fleets.
    """
    query = select(Fleet).order_by(Fleet.name).limit(limit)
    if after is not None:
        query = query.where(Fleet.name > after)
    return tuple(record_of(row, FleetRecord) for row in session.scalars(query))


def set_wanted(session: Session, name: str, **wishes: Unpack[FleetWishes]) -> FleetRecord:
    """Change what the user wants of a fleet.

    Args:
        session: a writing one.
        name: of the fleet.
        **wishes: what changes.

    Returns:
        The fleet as it is now.

    Raises:
        NotFound: there is no such fleet.
    """
    if wishes and not changed_rows(session.execute(update(Fleet).where(Fleet.name == name).values(**wishes))):
        raise NotFound("fleet", name)
    return get(session, name)


def lift_blindness(session: Session, name: str, now: datetime) -> FleetRecord:
    """Note that a person says of a fleet most of which is silent: who is silent is gone. Again, it changes nothing.

    Args:
        session: a writing one.
        name: of the fleet.
        now: when.

    Returns:
        The fleet as it is now.

    Raises:
        NotFound: there is no such fleet.
    """
    get(session, name)
    session.execute(
        update(Fleet).where(Fleet.name == name, Fleet.blindness_lifted_at.is_(None)).values(blindness_lifted_at=now)
    )
    return get(session, name)


def change(session: Session, lease: Lease, **changes: Unpack[FleetUpdate]) -> None:
    """Write what a pass of the fleet loop found out.

    Args:
        session: a writing one.
        lease: the fleet's.
        **changes: what changes.

    Raises:
        StaleLease: the lease was taken over; nothing was written.
    """
    leases.guard(session, lease)
    if changes:
        session.execute(update(Fleet).where(Fleet.name == lease.key).values(**changes))


def request_delete(session: Session, name: str, now: datetime) -> FleetRecord:
    """Note that the user wants the fleet gone: the loop ends its nodes, then removes it. Asking again changes nothing.

    Args:
        session: a writing one.
        name: of the fleet.
        now: when.

    Returns:
        The fleet as it is now.

    Raises:
        NotFound: there is no such fleet.
        Conflict: jobs on it have not ended.
    """
    get(session, name)
    _require_idle(session, name)
    session.execute(
        update(Fleet).where(Fleet.name == name, Fleet.delete_requested_at.is_(None)).values(delete_requested_at=now)
    )
    return get(session, name)


def remove(session: Session, lease: Lease, now: datetime) -> None:
    """Delete a fleet and its nodes, and revoke the sessions of their agents.

    Args:
        session: a writing one.
        lease: the fleet's; it ends with the row.
        now: the time of the revocation.

    Raises:
        StaleLease: the lease was taken over; nothing was written.
        Conflict: jobs on it have not ended.
    """
    leases.guard(session, lease)
    _require_idle(session, lease.key)
    session.execute(delete(Notice).where(Notice.node_id.in_(select(Node.id).where(Node.fleet_name == lease.key))))
    tokens.revoke_sessions_of_fleet(session, lease.key, now)
    session.execute(delete(Node).where(Node.fleet_name == lease.key))
    session.execute(delete(Fleet).where(Fleet.name == lease.key))


def _require_idle(session: Session, name: str) -> None:
    unfinished = session.scalar(
        select(func.count()).select_from(Job).where(Job.fleet_name == name, Job.ended_at.is_(None))
    )
    if unfinished:
        raise Conflict(f"the fleet {name!r} has training jobs that have not ended: {unfinished}")
