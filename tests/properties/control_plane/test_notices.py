"""Announcements of AWS may arrive doubled, late or out of order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from control_plane.core import notices
from control_plane.core.observed.nodes import Notice
from everstep.protocol.agent_messages import NoticeKind

NOTICES = st.builds(
    Notice,
    kind=st.sampled_from(NoticeKind),
    message=st.sampled_from("ab"),
    ends_at=st.none() | st.integers(0, 5).map(float),
)


@given(st.lists(NOTICES, max_size=8), st.data())
def test_notices_doubled_late_or_out_of_order_change_nothing(told: list[Notice], data: st.DataObject) -> None:
    again = data.draw(
        st.permutations([*told, *data.draw(st.lists(st.sampled_from(told), max_size=5) if told else st.just([]))])
    )
    assert notices.merged(again) == notices.merged(told)
    assert {notice.kind for notice in notices.merged(told)} == {notice.kind for notice in told}
