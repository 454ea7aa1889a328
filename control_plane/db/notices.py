"""Notices: what AWS has announced for instances, whoever heard of it.

Any replica of the control plane may read an event or poll AWS; the one that owns the node's job finds it here.
Level-triggered: a row stays as long as what it announces may still come, and is read in every pass.

Invariant: an event is one row per node and kind, however often it is delivered.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from control_plane.db.models import Node, Notice
from control_plane.db.session import changed_rows, record_of, values_of


class NoticeSource(StrEnum):
    """Who told. EVENT: EventBridge, once. STATUS: DescribeInstanceStatus. GROUP: the Auto Scaling group.

    The last two are polled and end with it.
    """

    EVENT = "event"
    STATUS = "status"
    GROUP = "group"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeRecord:
    """A notice as it is stored."""

    node_id: str
    kind: str
    """`everstep.protocol.agent_messages.NoticeKind`."""
    event_id: str
    """AWS's id of the event, or a name that a polled source always gives the same thing."""
    source: str
    message: str
    """In AWS's words."""
    ends_at: datetime | None
    """When the instance may be gone."""


def record(session: Session, notice: NoticeRecord, now: datetime) -> bool:
    """Store a notice unless the same event is known for this node and kind. What is known stays as it is.

    Args:
        session: a writing one.
        notice: as heard.
        now: when.

    Returns:
        Whether it is news. False, too, for an instance that is no node, or none any more.
    """
    is_node = session.scalar(select(Node.id).where(Node.id == notice.node_id, Node.ended_at.is_(None))) is not None
    if not is_node or session.get(Notice, (notice.node_id, notice.kind, notice.event_id)) is not None:
        return False
    session.add(Notice(**values_of(notice), recorded_at=now))
    session.flush()
    return True


def replace_polled(
    session: Session, source: NoticeSource, node_ids: Collection[str], found: Sequence[NoticeRecord], now: datetime
) -> bool:
    """Make the notices of a polled source what it says now, for the nodes that it was asked about.

    Args:
        session: a writing one.
        source: STATUS or GROUP.
        node_ids: whom it was asked about; of others nothing changes.
        found: all that it told.
        now: when.

    Returns:
        Whether anything changed. The time of a notice that is known already changes with what is found, except by
        GROUP: a hook's runs from its first sight and is moved by `hold` alone.
    """
    keys = {(notice.node_id, notice.kind, notice.event_id): notice for notice in found}
    known = {
        (row.node_id, row.kind, row.event_id): row
        for row in session.scalars(select(Notice).where(Notice.source == source, Notice.node_id.in_(sorted(node_ids))))
    }
    changed = False
    for key in known.keys() - keys.keys():
        session.delete(known[key])
        changed = True
    session.flush()
    for key, notice in keys.items():
        if key not in known:
            changed = record(session, notice, now) or changed
        elif source is not NoticeSource.GROUP and (known[key].ends_at, known[key].message) != (
            notice.ends_at,
            notice.message,
        ):
            known[key].ends_at, known[key].message = notice.ends_at, notice.message
            changed = True
    return changed


def hold(session: Session, node_id: str, ends_at: datetime) -> bool:
    """Note until when a terminating hook now holds an instance; returns whether it was known to be held."""
    held = update(Notice).where(Notice.node_id == node_id, Notice.source == NoticeSource.GROUP)
    return changed_rows(session.execute(held.values(ends_at=ends_at))) > 0


def of_fleet(session: Session, fleet_name: str) -> tuple[NoticeRecord, ...]:
    """Return the notices for the living nodes of a fleet, by node, kind and event."""
    query = (
        select(Notice)
        .join(Node, Node.id == Notice.node_id)
        .where(Node.fleet_name == fleet_name, Node.ended_at.is_(None))
    )
    return tuple(
        record_of(row, NoticeRecord)
        for row in session.scalars(query.order_by(Notice.node_id, Notice.kind, Notice.event_id))
    )


def forget(session: Session, node_ids: Collection[str]) -> None:
    """Drop the notices of nodes that are gone."""
    if node_ids:
        session.execute(delete(Notice).where(Notice.node_id.in_(sorted(node_ids))))
