"""What AWS announces: which of it counts, and from when on. What follows for a job is in `core.moves`.

Invariant: pure, and level-triggered: a notice that comes twice, late or in another order says the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from control_plane.core.observed.nodes import NodeObserved, Notice
from everstep.protocol.agent_messages import NoticeKind
from everstep.protocol.ids import NodeId

MAINTENANCE_LEAD_SECONDS = 3600.0
"""Maintenance is announced days ahead.

From this long before its window a running job moves; until then the node is left when it is idle.
"""
OVER_SECONDS = 600.0
"""An instance that is still there so long after it was to be interrupted is not going to be: the event was late, or AWS has changed its mind."""
ANNOUNCED = "AWS announced for"
"""How the evidence begins by which such a node is left: what AWS takes anyway is no verdict of Everstep's."""
ENDING = frozenset(
    {NoticeKind.SPOT_INTERRUPTION, NoticeKind.MAINTENANCE, NoticeKind.CAPACITY_BLOCK_END, NoticeKind.TERMINATING}
)
"""Kinds after which the instance is gone.

The other one, a rebalance recommendation, is advice: it never interrupts anything.
"""


def merged(notices: Iterable[Notice]) -> tuple[Notice, ...]:
    """Return one notice of each kind: several sources tell of the same thing, and the earliest time that any of them names counts."""
    by_kind: dict[NoticeKind, Notice] = {}
    for notice in sorted(notices, key=lambda notice: (notice.ends_at is None, notice.ends_at or 0.0, notice.message)):
        by_kind.setdefault(notice.kind, notice)
    return tuple(by_kind[kind] for kind in NoticeKind if kind in by_kind)


def urgent(node: NodeObserved, now: float) -> Notice | None:
    """Return the notice for which this node is given to nobody and running ranks leave it, or None: far maintenance is not urgent yet."""
    found = [
        notice
        for notice in node.notices
        if notice.kind in ENDING and not _is_far(notice, now) and not _is_over(notice, now)
    ]
    return min(found, key=lambda notice: (notice.ends_at is None, notice.ends_at or 0.0), default=None)


def in_words(node_id: NodeId, notice: Notice) -> str:
    """Return a sentence of evidence in AWS's words; without a running clock: it is stored, and told, when it changes."""
    return f"{ANNOUNCED} {node_id}: {notice.kind.value.replace('_', ' ')} ({notice.message})"


def _is_far(notice: Notice, now: float) -> bool:
    return (
        notice.kind is NoticeKind.MAINTENANCE
        and notice.ends_at is not None
        and notice.ends_at - now > MAINTENANCE_LEAD_SECONDS
    )


def _is_over(notice: Notice, now: float) -> bool:
    """Say whether a warning that is given once has not come true: the instance is still there long after its time."""
    return (
        notice.kind in (NoticeKind.SPOT_INTERRUPTION, NoticeKind.CAPACITY_BLOCK_END)
        and now - (notice.ends_at or now) > OVER_SECONDS
    )
