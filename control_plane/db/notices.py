"""Notices: announcements by AWS about instances. A row remains while the announced change may still happen.

Invariant: an event of AWS creates one row per node and kind of notice, however often AWS delivers the event.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

from sqlalchemy import bindparam, delete, select, update
from sqlalchemy.orm import Session

from control_plane.db.models import NodeRow, NoticeRow
from control_plane.db.session import changed_rows, columns_for, record_of, values_of


class NoticeSource(StrEnum):
    """Origin of a notice: EventBridge, a poll of DescribeInstanceStatus, or a poll of the Auto Scaling group.

    The control plane deletes a notice of STATUS or GROUP when a poll no longer contains it.
    """

    EVENT = "event"
    STATUS = "status"
    GROUP = "group"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeRecord:
    """A row of the table of AWS notices."""

    node_id: str
    kind: str
    """An `everstep.protocol.agent_messages.NoticeKind`."""
    event_id: str
    """AWS's id of the event; for a notice from a poll, the scheduled event's id or code, or the group's name."""
    source: str
    message: str
    """The text of AWS's announcement."""
    ends_at: datetime | None
    """When the instance may end. None if the notice states no time."""


def record(session: Session, notice: NoticeRecord, now: datetime) -> bool:
    """Store a notice, unless the row exists or the instance is no living node. Return whether a row was added."""
    is_node = (
        session.scalar(select(NodeRow.id).where(NodeRow.id == notice.node_id, NodeRow.ended_at.is_(None))) is not None
    )
    if not is_node or session.get(NoticeRow, (notice.node_id, notice.kind, notice.event_id)) is not None:
        return False
    session.add(NoticeRow(**values_of(notice), recorded_at=now))
    session.flush()
    return True


def replace_polled(
    session: Session, source: NoticeSource, node_ids: Collection[str], found: Sequence[NoticeRecord], now: datetime
) -> bool:
    """Replace the notices of one polled source for the nodes that the poll covered. Return whether anything changed.

    Existing STATUS notices receive the new time and message. Existing GROUP notices keep their time, the expiry of a
    lifecycle hook, because only `hold` changes it.
    """
    keys = {(notice.node_id, notice.kind, notice.event_id): notice for notice in found}
    known = {
        (row.node_id, row.kind, row.event_id): row
        for row in session.scalars(
            select(NoticeRow).where(NoticeRow.source == source, NoticeRow.node_id.in_(sorted(node_ids)))
        )
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
    """Store a new expiry time of a terminating instance's lifecycle hook.

    Return False without a notice of such a hook.
    """
    held = update(NoticeRow).where(NoticeRow.node_id == node_id, NoticeRow.source == NoticeSource.GROUP)
    return changed_rows(session.execute(held.values(ends_at=ends_at))) > 0


_NOTICES: Final = NoticeRow.__table__
_NODES: Final = NodeRow.__table__
_OF_FLEET: Final = (
    select(*columns_for(NoticeRow, NoticeRecord))
    .select_from(_NOTICES.join(_NODES, _NODES.c.id == _NOTICES.c.node_id))
    .where(_NODES.c.fleet_name == bindparam("of_fleet"), _NODES.c.ended_at.is_(None))
    .order_by(_NOTICES.c.node_id, _NOTICES.c.kind, _NOTICES.c.event_id)
)


def of_fleet(session: Session, fleet_name: str) -> tuple[NoticeRecord, ...]:
    """Return the notices for living nodes of a fleet, sorted by node, kind and event."""
    return tuple(record_of(row, NoticeRecord) for row in session.execute(_OF_FLEET, {"of_fleet": fleet_name}))


def forget(session: Session, node_ids: Collection[str]) -> None:
    """Delete the notices of ended nodes."""
    if node_ids:
        session.execute(delete(NoticeRow).where(NoticeRow.node_id.in_(sorted(node_ids))))
