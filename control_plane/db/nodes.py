"""Nodes: the instances of all fleets, their states and assignments.

Invariant: only the fleet loop assigns nodes to runs. The agents' websocket route stores only facts that agents report.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Select, bindparam, func, or_, select, tuple_, update
from sqlalchemy.orm import Session

from control_plane.core.observed.causes import Reason
from control_plane.core.observed.facts import Requested
from control_plane.core.observed.fleets import HoldRelease
from control_plane.core.observed.nodes import BurnIn
from control_plane.core.states import NodeState
from control_plane.db import leases
from control_plane.db.errors import Conflict, NotFound
from control_plane.db.leases import Lease
from control_plane.db.models import NodeRow
from control_plane.db.session import changed_rows, columns_for, record_of, values_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedNode:
    """A row of the table of nodes."""

    id: str
    fleet_name: str
    state: str
    run_id: str | None
    address: str
    peer_port: int
    memory_bytes: int
    agent_id: str
    version: str
    instance_type: str
    availability_zone: str
    failure_domain: str | None
    image_id: str | None
    image_created_at: datetime | None
    reason: Reason
    hold: str | None
    release: str
    request: Reason | None
    since: datetime | None
    replaced_at: datetime | None
    returned_at: datetime | None
    evidence_at: datetime | None
    burn_in: BurnIn | None
    created_at: datetime
    wanted_at: datetime | None
    connected_at: datetime | None
    arrival_seconds: float | None
    """Seconds from the lack of the instance, or from its first listing, to the agent's first connection. None before
    the connection, or if the agent connected first.
    """
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFacts:
    """Facts from the first message (Hello) of each connection of an agent."""

    node_id: str
    fleet_name: str
    address: str
    peer_port: int
    memory_bytes: int
    agent_id: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceFacts:
    """Facts that AWS reports about an instance and that never change, by column. None: not reported yet."""

    failure_domain: str | None = None
    """The innermost network node that EC2's topology names for the instance."""
    image_id: str | None = None
    image_created_at: datetime | None = None


def missing_facts(node: SavedNode, facts: InstanceFacts | None) -> dict[str, object]:
    """Return the columns of a node that are empty, with their values from AWS."""
    values = {} if facts is None else values_of(facts)
    return {name: value for name, value in values.items() if value is not None and getattr(node, name) is None}


def get(session: Session, node_id: str) -> SavedNode:
    """Return one node, or raise NotFound."""
    row = session.get(NodeRow, node_id)
    if row is None:
        raise NotFound("node", node_id)
    return record_of(row, SavedNode)


def of_fleet(session: Session, fleet_name: str | None = None, *, with_ended: bool = False) -> tuple[SavedNode, ...]:
    """Return the nodes of a fleet, or of all fleets, oldest first."""
    query = _of_fleet(of_all=fleet_name is None, with_ended=with_ended)
    return tuple(record_of(row, SavedNode) for row in session.execute(query, {"of_fleet": fleet_name}))


@functools.cache
def _of_fleet(*, of_all: bool, with_ended: bool) -> Select[*tuple[Any, ...]]:
    # Cached, because its construction takes time.
    columns = NodeRow.__table__.c
    query = select(*columns_for(NodeRow, SavedNode)).order_by(columns.created_at, columns.id)
    if not of_all:
        query = query.where(columns.fleet_name == bindparam("of_fleet"))
    return query if with_ended else query.where(columns.ended_at.is_(None))


def page(
    session: Session, fleet_name: str | None, *, with_ended: bool, after: tuple[datetime, str] | None, limit: int
) -> tuple[SavedNode, ...]:
    """Return one page of nodes of a fleet or of all fleets (None), oldest first.

    `after` is `(created_at, id)` of the previous page's last node. None means the first page.
    """
    query = _of_fleet(of_all=fleet_name is None, with_ended=with_ended).limit(limit)
    if after is not None:
        columns = NodeRow.__table__.c
        query = query.where(tuple_(columns.created_at, columns.id) > after)
    return tuple(record_of(row, SavedNode) for row in session.execute(query, {"of_fleet": fleet_name}))


def of_run(session: Session, run_id: str) -> tuple[SavedNode, ...]:
    """Return the nodes that are assigned to a run, oldest first."""
    query = select(NodeRow).where(NodeRow.run_id == run_id).order_by(NodeRow.created_at, NodeRow.id)
    return tuple(record_of(row, SavedNode) for row in session.scalars(query))


_BY_RUN: Final = (
    select(NodeRow.run_id, NodeRow.id)
    .where(NodeRow.run_id.in_(bindparam("run_ids", expanding=True)))
    .order_by(NodeRow.id)
)
_IDS_OF_RUN: Final = (
    select(NodeRow.__table__.c.id)
    .where(NodeRow.__table__.c.run_id == bindparam("of_run"))
    .order_by(NodeRow.__table__.c.id)
)
"""A constant, because each DescribeTrainingJob executes it and its construction takes time."""


def ids_of_run(session: Session, run_id: str) -> tuple[str, ...]:
    """Return the ids of the nodes that are assigned to a run."""
    return tuple(session.scalars(_IDS_OF_RUN, {"of_run": run_id}))


def by_run(session: Session, run_ids: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the ids of nodes by run. Runs without nodes are missing."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for run_id, node_id in session.execute(_BY_RUN, {"run_ids": list(run_ids)}):
        if run_id is not None:
            found[run_id].append(node_id)
    return {run_id: tuple(node_ids) for run_id, node_ids in found.items()}


def held(session: Session) -> tuple[SavedNode, ...]:
    """Return the held nodes of all fleets, oldest first."""
    query = select(NodeRow).where(NodeRow.state == NodeState.HELD, NodeRow.hold.is_not(None))
    return tuple(record_of(row, SavedNode) for row in session.scalars(query.order_by(NodeRow.created_at, NodeRow.id)))


def failure_domains(session: Session, node_ids: Collection[str]) -> dict[str, str]:
    """Return failure domains by node. Nodes whose domain AWS has not reported are missing."""
    rows = session.execute(
        select(NodeRow.id, NodeRow.failure_domain).where(NodeRow.id.in_(node_ids), NodeRow.failure_domain.is_not(None))
    )
    return {node_id: domain for node_id, domain in rows if domain is not None}


def among(session: Session, node_ids: Collection[str]) -> tuple[SavedNode, ...]:
    """Return the nodes with these ids, also ended ones, ordered by id. Unknown ids are ignored."""
    rows = session.scalars(select(NodeRow).where(NodeRow.id.in_(node_ids)).order_by(NodeRow.id))
    return tuple(record_of(row, SavedNode) for row in rows)


def arrivals(session: Session, fleet_name: str) -> tuple[int, float]:
    """Return the number and the sum in seconds of a fleet's measured arrival times (`SavedNode.arrival_seconds`)."""
    taken = NodeRow.arrival_seconds
    count, total = session.execute(
        select(func.count(taken), func.sum(taken)).where(NodeRow.fleet_name == fleet_name)
    ).one()
    return count, total or 0.0


def note_hello(session: Session, facts: AgentFacts, *, initial_state: str, now: datetime) -> SavedNode:
    """Store the facts that an agent reports when it connects. A new node gets `initial_state`."""
    row = session.get(NodeRow, facts.node_id)
    if row is None:
        row = NodeRow(id=facts.node_id, fleet_name=facts.fleet_name, state=initial_state, created_at=now)
        session.add(row)
    elif row.connected_at is None:
        row.arrival_seconds = (now - (row.wanted_at or row.created_at)).total_seconds()
    for name, value in {**values_of(facts, leave_out=("node_id", "fleet_name")), "connected_at": now}.items():
        setattr(row, name, value)
    session.flush()
    return record_of(row, SavedNode)


def has_joined(session: Session, node_id: str) -> bool:
    """Return whether an agent of the node has reported with a session token since the last reset of its session."""
    row = session.get(NodeRow, node_id)
    return row is not None and row.joined_at is not None


def mark_joined(session: Session, node_id: str, now: datetime) -> bool:
    """Record that the agent of a stored node has received its session token.

    Return False if an agent had already joined.
    """
    query = update(NodeRow).where(NodeRow.id == node_id, NodeRow.joined_at.is_(None)).values(joined_at=now)
    return bool(changed_rows(session.execute(query)))


def reset_joined(session: Session, node_id: str) -> None:
    """Permit a node to join again with a join token. The caller revokes its session tokens in the same transaction."""
    session.execute(update(NodeRow).where(NodeRow.id == node_id).values(joined_at=None))


_REPLACED_SINCE: Final = (
    select(NodeRow.replaced_at)
    .where(
        NodeRow.fleet_name == bindparam("of_fleet"),
        NodeRow.replaced_at.is_not(None),
        NodeRow.replaced_at >= bindparam("moment"),
    )
    .order_by(NodeRow.replaced_at)
)


def replaced_since(session: Session, fleet_name: str, moment: datetime) -> tuple[datetime, ...]:
    """Return when, since `moment`, Everstep decided to replace a node of a fleet, ended or not."""
    found = session.scalars(_REPLACED_SINCE, {"of_fleet": fleet_name, "moment": moment})
    return tuple(at for at in found if at is not None)


_NEWEST_JOINED: Final = (
    select(func.max(NodeRow.created_at))
    .where(NodeRow.fleet_name == bindparam("of_fleet"), NodeRow.connected_at.is_not(None))
    .scalar_subquery()
)
_FAILED_JOINS: Final = (
    select(func.count())
    .select_from(NodeRow)
    .where(
        NodeRow.fleet_name == bindparam("of_fleet"),
        NodeRow.connected_at.is_(None),
        NodeRow.replaced_at.is_not(None),
        NodeRow.ended_at.is_not(None),
        or_(_NEWEST_JOINED.is_(None), NodeRow.created_at > _NEWEST_JOINED),
    )
)


def failed_join_count(session: Session, fleet_name: str) -> int:
    """Count the failed joins of a fleet since its last successful join.

    A join has failed if the agent never connected, and Everstep replaced and ended the instance. Only instances newer
    than the newest connected one count.
    """
    return session.scalar(_FAILED_JOINS, {"of_fleet": fleet_name}) or 0


def ask_release(session: Session, node_id: str, *, state: str, release: HoldRelease, now: datetime) -> SavedNode:
    """Record a user's request that the fleet loop returns a held node to service or terminates it.

    Entries of the node's fault history before `now` no longer count. Raises NotFound, and Conflict if the node is not
    in `state`.
    """
    node = get(session, node_id)
    query = update(NodeRow).where(NodeRow.id == node_id, NodeRow.state == state)
    if not changed_rows(session.execute(query.values(release=release, returned_at=now))):
        raise Conflict(f"the node {node_id} is {node.state}, not {state}")
    return get(session, node_id)


def ask(session: Session, node_id: str, request: Requested) -> bool:
    """Record a user's request about a node, which `call_off` withdraws until the fleet loop executes it.

    Return False if the node already has a request.
    """
    query = update(NodeRow).where(NodeRow.id == node_id, NodeRow.request.is_(None))
    return bool(changed_rows(session.execute(query.values(request=request))))


def call_off(session: Session, node_id: str) -> bool:
    """Withdraw a user's request about a node. Return False without a request."""
    query = update(NodeRow).where(NodeRow.id == node_id, NodeRow.request.is_not(None))
    return bool(changed_rows(session.execute(query.values(request=None))))


def change(
    session: Session, lease: Lease, node_id: str, *, initial_state: str, now: datetime, **changes: object
) -> None:
    """Update a node as the fleet loop decided, or create its row. Raises StaleLease.

    `initial_state` is the state of a new row, unless `changes` contains a state.
    """
    leases.guard(session, lease)
    if session.get(NodeRow, node_id) is None:
        session.add(NodeRow(id=node_id, fleet_name=lease.key, state=initial_state, created_at=now))
        session.flush()
    if changes:
        session.execute(update(NodeRow).where(NodeRow.id == node_id).values(**changes))
