"""Notices: AWS's announcements that an instance will end or be interrupted, and when a notice becomes urgent.

A running job must give up a node with an urgent notice now. `core.moves` decides how the job does this.

Invariant: pure and level-triggered. A notice has the same effect if it arrives twice, late or out of order.
"""

from __future__ import annotations

from collections.abc import Iterable

from control_plane.core.observed.facts import Announced
from control_plane.core.observed.nodes import NodeObserved, Notice
from everstep.protocol.agent_messages import NoticeKind
from everstep.protocol.ids import NodeId

MAINTENANCE_LEAD_SECONDS = 3600.0
"""Time before a maintenance window at which a running job gives up the node.

AWS announces maintenance days ahead. Before this time, the fleet replaces the node only while no job uses it.
"""
OVER_SECONDS = 600.0
"""Time after an announced interruption at which its notice expires if the instance still runs.

In that case, the announcement was outdated, or AWS cancelled the interruption.
"""
ENDING = frozenset(
    {NoticeKind.SPOT_INTERRUPTION, NoticeKind.MAINTENANCE, NoticeKind.CAPACITY_BLOCK_END, NoticeKind.TERMINATING}
)
"""Kinds of notices after which AWS ends or interrupts the instance.

The remaining kind, a rebalance recommendation, is only advice.
"""


def merged(notices: Iterable[Notice]) -> tuple[Notice, ...]:
    """Return the notices of one instance, with at most one of each kind.

    Several sources can announce the same event. The merged notice has the earliest time that any source names.
    """
    by_kind: dict[NoticeKind, Notice] = {}
    for notice in sorted(notices, key=lambda notice: (notice.ends_at is None, notice.ends_at or 0.0, notice.message)):
        by_kind.setdefault(notice.kind, notice)
    return tuple(by_kind[kind] for kind in NoticeKind if kind in by_kind)


def urgent(node: NodeObserved, now: float) -> Notice | None:
    """Return the notice for which a running job must give up the node now, or None.

    The fleet assigns a node with an urgent notice to no job. Maintenance in the far future is not urgent yet.
    """
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
    """Return whether the notice has expired: the announced time passed `OVER_SECONDS` ago without an interruption."""
    return (
        notice.kind in (NoticeKind.SPOT_INTERRUPTION, NoticeKind.CAPACITY_BLOCK_END)
        and now - (notice.ends_at or now) > OVER_SECONDS
    )
