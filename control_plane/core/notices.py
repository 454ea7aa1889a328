"""Notices: AWS's announcements that an instance will end or be interrupted, and when a notice becomes urgent.

Invariant: pure and level-triggered. A notice has the same effect if it arrives twice, late or out of order.
"""

from __future__ import annotations

from collections.abc import Iterable

from control_plane.core.observed.facts import Announced
from control_plane.core.observed.nodes import NodeObserved, Notice
from everstep.protocol.agent_messages import NoticeKind
from everstep.protocol.ids import NodeId

MAINTENANCE_LEAD_SECONDS = 3600.0
"""Time before maintenance, which AWS announces days ahead, at which a running job gives up the node."""
OVER_SECONDS = 600.0
"""Time after an announced interruption at which its notice expires if the instance still runs."""
ENDING = frozenset(
    {NoticeKind.SPOT_INTERRUPTION, NoticeKind.MAINTENANCE, NoticeKind.CAPACITY_BLOCK_END, NoticeKind.TERMINATING}
)
"""Kinds after which AWS ends or interrupts the instance. A rebalance recommendation is only advice."""


def merged(notices: Iterable[Notice]) -> tuple[Notice, ...]:
    """Return the notices of one instance, one of each kind, with the earliest time that any source names."""
    by_kind: dict[NoticeKind, Notice] = {}
    for notice in sorted(notices, key=lambda notice: (notice.ends_at is None, notice.ends_at or 0.0, notice.message)):
        by_kind.setdefault(notice.kind, notice)
    return tuple(by_kind[kind] for kind in NoticeKind if kind in by_kind)


def urgent(node: NodeObserved, now: float) -> Notice | None:
    """Return the notice for which a running job must give up the node now, or None."""
    found = [
        notice
        for notice in node.notices
        if notice.kind in ENDING and not _is_far(notice, now) and not _is_over(notice, now)
    ]
    return min(found, key=lambda notice: (notice.ends_at is None, notice.ends_at or 0.0), default=None)


def announced(node_id: NodeId, notice: Notice) -> Announced:
    """Return a notice as the reason for which a node leaves."""
    return Announced(node_id=node_id, notice=notice.kind, text=notice.message)


def _is_far(notice: Notice, now: float) -> bool:
    return (
        notice.kind is NoticeKind.MAINTENANCE
        and notice.ends_at is not None
        and notice.ends_at - now > MAINTENANCE_LEAD_SECONDS
    )


def _is_over(notice: Notice, now: float) -> bool:
    return (
        notice.kind in (NoticeKind.SPOT_INTERRUPTION, NoticeKind.CAPACITY_BLOCK_END)
        and now - (notice.ends_at or now) > OVER_SECONDS
    )
