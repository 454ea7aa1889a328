"""Nodes: the table node → {job, spare, held, draining}, and what is known of each instance.

Invariant: only the fleet loop changes which run a node belongs to; the agents' route only notes who said hello.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypedDict, Unpack

from sqlalchemy import Select, bindparam, func, or_, select, tuple_, update
from sqlalchemy.orm import Session

from control_plane.db import leases
from control_plane.db.errors import Conflict, NotFound
from control_plane.db.leases import Lease
from control_plane.db.models import Node
from control_plane.db.session import changed_rows, record_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node as it is stored."""

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
    reason: str
    hold: str | None
    release: str
    request: str
    request_words: str
    since: datetime | None
    replaced_at: datetime | None
    returned_at: datetime | None
    evidence_at: datetime | None
    created_at: datetime
    wanted_at: datetime | None
    connected_at: datetime | None
    arrival_seconds: float | None
    """From when its group had a place for it until its agent dialled in for the first time; None before that, or where nobody saw it come."""
    ended_at: datetime | None


class NodeUpdate(TypedDict, total=False):
    """What the fleet loop may change; what is left out stays."""

    state: str
    run_id: str | None
    instance_type: str
    availability_zone: str
    failure_domain: str | None
    reason: str
    hold: str | None
    release: str
    request: str
    request_words: str
    wanted_at: datetime | None
    since: datetime | None
    replaced_at: datetime | None
    returned_at: datetime | None
    evidence_at: datetime | None
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFacts:
    """What an agent said of itself."""

    node_id: str
    fleet_name: str
    address: str
    peer_port: int
    memory_bytes: int
    agent_id: str
    version: str


def get(session: Session, node_id: str) -> NodeRecord:
    """Return one node.

    Args:
        session: any.
        node_id: of the node.

    Returns:
        The node as stored.

    Raises:
        NotFound: no such node was ever seen.
    """
    row = session.get(Node, node_id)
    if row is None:
        raise NotFound("node", node_id)
    return record_of(row, NodeRecord)


def of_fleet(session: Session, fleet_name: str | None = None, *, with_ended: bool = False) -> tuple[NodeRecord, ...]:
    """Return the nodes of a fleet (or of all), oldest first; ended ones only on request."""
    return tuple(record_of(row, NodeRecord) for row in session.scalars(_of_fleet(fleet_name, with_ended=with_ended)))


def _of_fleet(fleet_name: str | None, *, with_ended: bool) -> Select[Node]:
    query = select(Node).order_by(Node.created_at, Node.id)
    if fleet_name is not None:
        query = query.where(Node.fleet_name == fleet_name)
    return query if with_ended else query.where(Node.ended_at.is_(None))


def page(
    session: Session, fleet_name: str | None, *, with_ended: bool, after: tuple[datetime, str] | None, limit: int
) -> tuple[NodeRecord, ...]:
    """Return nodes, oldest first, from after a position on.

    Args:
        session: any.
        fleet_name: of this fleet only; None: of all.
        with_ended: also those that have ended.
        after: creation time and id of the last one that is known already.
        limit: how many at most.

    Returns:
        The nodes as stored.
    """
    query = _of_fleet(fleet_name, with_ended=with_ended).limit(limit)
    if after is not None:
        query = query.where(tuple_(Node.created_at, Node.id) > after)
    return tuple(record_of(row, NodeRecord) for row in session.scalars(query))


def of_run(session: Session, run_id: str) -> tuple[NodeRecord, ...]:
    """Return the nodes that belong to a run, oldest first."""
    return tuple(
        record_of(row, NodeRecord)
        for row in session.scalars(select(Node).where(Node.run_id == run_id).order_by(Node.created_at, Node.id))
    )


_BY_RUN: Final = (
    select(Node.run_id, Node.id).where(Node.run_id.in_(bindparam("run_ids", expanding=True))).order_by(Node.id)
)
_IDS_OF_RUN: Final = (
    select(Node.__table__.c.id).where(Node.__table__.c.run_id == bindparam("of_run")).order_by(Node.__table__.c.id)
)
"""Put together once: every description of a job asks for it."""


def ids_of_run(session: Session, run_id: str) -> tuple[str, ...]:
    """Return which nodes belong to a run."""
    return tuple(session.scalars(_IDS_OF_RUN, {"of_run": run_id}))


def by_run(session: Session, run_ids: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return which nodes belong to each of several runs, in one query; for lists. Runs without any are missing."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for run_id, node_id in session.execute(_BY_RUN, {"run_ids": list(run_ids)}):
        if run_id is not None:
            found[run_id].append(node_id)
    return {run_id: tuple(node_ids) for run_id, node_ids in found.items()}


def failure_domains(session: Session, node_ids: Collection[str]) -> dict[str, str]:
    """Return the failure domains of nodes, as far as AWS has told them; for one job's nodes."""
    rows = session.execute(
        select(Node.id, Node.failure_domain).where(Node.id.in_(node_ids), Node.failure_domain.is_not(None))
    )
    return {node_id: domain for node_id, domain in rows if domain is not None}


def arrivals(session: Session, fleet_name: str) -> tuple[int, float]:
    """Return of how many instances of a fleet it is known how long they took to come, and how long that was, all together."""
    taken = Node.arrival_seconds
    count, total = session.execute(
        select(func.count(taken), func.sum(taken)).where(Node.fleet_name == fleet_name)
    ).one()
    return count, total or 0.0


def note_hello(session: Session, facts: AgentFacts, *, initial_state: str, now: datetime) -> NodeRecord:
    """Write what an agent said when it connected; a node that nobody knew appears in `initial_state`."""
    row = session.get(Node, facts.node_id)
    if row is None:
        row = Node(id=facts.node_id, fleet_name=facts.fleet_name, state=initial_state, created_at=now)
        session.add(row)
    elif row.connected_at is None:
        row.arrival_seconds = (now - (row.wanted_at or row.created_at)).total_seconds()
    row.address = facts.address
    row.peer_port = facts.peer_port
    row.memory_bytes = facts.memory_bytes
    row.agent_id = facts.agent_id
    row.version = facts.version
    row.connected_at = now
    session.flush()
    return record_of(row, NodeRecord)


def has_joined(session: Session, node_id: str) -> bool:
    """Return True if an agent of the node has reported with a session, and no administrator has reset that since."""
    row = session.get(Node, node_id)
    return row is not None and row.joined_at is not None


def mark_joined(session: Session, node_id: str, now: datetime) -> bool:
    """Record that an agent of the node holds a session.

    Args:
        session: a writing one.
        node_id: a node that `note_hello` has stored.
        now: the time of the join.

    Returns:
        False if an agent of the node had joined before.
    """
    query = update(Node).where(Node.id == node_id, Node.joined_at.is_(None)).values(joined_at=now)
    return bool(changed_rows(session.execute(query)))


def reset_joined(session: Session, node_id: str) -> None:
    """Let the node join once more. The caller revokes its sessions in the same transaction."""
    session.execute(update(Node).where(Node.id == node_id).values(joined_at=None))


def replaced_since(session: Session, fleet_name: str, moment: datetime) -> tuple[datetime, ...]:
    """Return when nodes of a fleet were replaced by Everstep's own verdict, from a moment on; ended ones count."""
    query = select(Node.replaced_at).where(
        Node.fleet_name == fleet_name, Node.replaced_at.is_not(None), Node.replaced_at >= moment
    )
    return tuple(at for at in session.scalars(query.order_by(Node.replaced_at)) if at is not None)


def failed_join_count(session: Session, fleet_name: str) -> int:
    """Return how many replaced instances of a fleet never joined, of those that came after the newest one that did; all of them have ended."""
    joined = (
        select(func.max(Node.created_at))
        .where(Node.fleet_name == fleet_name, Node.connected_at.is_not(None))
        .scalar_subquery()
    )
    failed = (
        Node.fleet_name == fleet_name,
        Node.connected_at.is_(None),
        Node.replaced_at.is_not(None),
        Node.ended_at.is_not(None),
    )
    query = select(func.count()).select_from(Node).where(*failed, or_(joined.is_(None), Node.created_at > joined))
    return session.scalar(query) or 0


def ask_release(session: Session, node_id: str, *, state: str, release: str, now: datetime) -> NodeRecord:
    """Note what a person wants of a held node; the fleet loop does it.

    Args:
        session: a writing one.
        node_id: of the node.
        state: the one that it has to be in.
        release: what is wanted.
        now: when; the node's history counts from here.

    Returns:
        The node as it is now.

    Raises:
        NotFound: no such node was ever seen.
        Conflict: it is not in that state.
    """
    node = get(session, node_id)
    if not changed_rows(
        session.execute(
            update(Node).where(Node.id == node_id, Node.state == state).values(release=release, returned_at=now)
        )
    ):
        raise Conflict(f"the node {node_id} is {node.state}, not {state}")
    return get(session, node_id)


def ask(session: Session, node_id: str, request: str, words: str) -> bool:
    """Note what a person wants done with a node, and say whether that is new; the fleet loop does it.

    Nothing takes it back but `call_off`.
    """
    query = update(Node).where(Node.id == node_id, Node.request == "")
    return bool(changed_rows(session.execute(query.values(request=request, request_words=words))))


def call_off(session: Session, node_id: str) -> bool:
    """Take back what a person wanted done with a node, and say whether that was still to be done."""
    query = update(Node).where(Node.id == node_id, Node.request != "")
    return bool(changed_rows(session.execute(query.values(request="", request_words=""))))


def change(
    session: Session, lease: Lease, node_id: str, *, initial_state: str, now: datetime, **changes: Unpack[NodeUpdate]
) -> None:
    """Write what the fleet loop decided about a node; one that is not in the table appears.

    Args:
        session: a writing one.
        lease: of the node's fleet.
        node_id: which.
        initial_state: of a node that is not in the table, unless `changes` says otherwise.
        now: when.
        **changes: what changes.

    Raises:
        StaleLease: the lease was taken over; nothing was written.
    """
    leases.guard(session, lease)
    if session.get(Node, node_id) is None:
        session.add(Node(id=node_id, fleet_name=lease.key, state=initial_state, created_at=now))
        session.flush()
    if changes:
        session.execute(update(Node).where(Node.id == node_id).values(**changes))
