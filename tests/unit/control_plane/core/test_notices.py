"""Tests how and when the control plane reacts to announcements of AWS, such as a maintenance.

The golden incidents test whole sequences.
"""

from __future__ import annotations

import pytest

from control_plane.core import notices
from control_plane.core.observed.nodes import NodeObserved, Notice
from everstep.protocol.agent_messages import NoticeKind
from everstep.protocol.ids import NodeId

NOW = 10_000.0


def spot(seconds: float) -> Notice:
    return Notice(kind=NoticeKind.SPOT_INTERRUPTION, message="soon", ends_at=NOW + seconds)


def node(*announced: Notice) -> NodeObserved:
    return NodeObserved(node_id=NodeId("n0"), notices=announced)


@pytest.mark.parametrize(
    ("kind", "seconds", "is_urgent"),
    [
        (NoticeKind.SPOT_INTERRUPTION, 120, True),
        (NoticeKind.SPOT_INTERRUPTION, -500, True),
        (NoticeKind.SPOT_INTERRUPTION, -600, True),
        (NoticeKind.SPOT_INTERRUPTION, -601, False),
        (NoticeKind.CAPACITY_BLOCK_END, -601, False),
        (NoticeKind.MAINTENANCE, 3600, True),
        (NoticeKind.MAINTENANCE, 3601, False),
        (NoticeKind.MAINTENANCE, -5000, True),
        (NoticeKind.TERMINATING, -5000, True),
        (NoticeKind.REBALANCE, 0, False),
    ],
)
def test_what_is_far_or_has_not_come_true_is_not_urgent(kind: NoticeKind, seconds: float, is_urgent: bool) -> None:
    notice = Notice(kind=kind, message="", ends_at=NOW + seconds)
    assert (notices.urgent(node(notice), NOW) is not None) == is_urgent


def test_the_earliest_of_several_announcements_counts() -> None:
    late, early, unknown = spot(100), spot(50), Notice(kind=NoticeKind.SPOT_INTERRUPTION, message="")
    assert notices.merged([late, unknown, early, late]) == (early,)
    assert (
        notices.urgent(node(spot(50), Notice(kind=NoticeKind.TERMINATING, message="", ends_at=NOW + 20)), NOW)
        is not None
    )
    found = notices.urgent(node(spot(50), Notice(kind=NoticeKind.TERMINATING, message="", ends_at=NOW + 20)), NOW)
    assert found is not None
    assert found.ends_at == NOW + 20
    found = notices.urgent(node(unknown, spot(50)), NOW)
    assert found is not None
    assert found.ends_at == NOW + 50, "a known end comes first"
