"""Tests the choice between LaunchInstances and SetDesiredCapacity, and how members that ended are replaced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from control_plane.core.actions import LaunchInstances, SetDesired, TerminateMember
from control_plane.core.capacity import ASK_AGAIN_SECONDS, MOST_LAUNCHED, REPEAT_SECONDS, SETTLE_SECONDS, growth
from control_plane.core.observed.fleets import GroupMember, GroupObserved, LaunchRecord
from everstep.protocol.ids import NodeId
from tests.unit.control_plane.core.test_fleets import NOW, decide, row, seen

SET = SetDesired(group="group", desired_count=5)


def member(number: int, state: str = "InService") -> GroupMember:
    is_leaving = state.startswith("Terminat")
    return GroupMember(
        node_id=NodeId(f"i{number}"), is_leaving=is_leaving, awaits_termination=False, lifecycle_state=state
    )


GROUP = GroupObserved(
    desired_count=3,
    min_size=0,
    max_size=200,
    members=tuple(member(number) for number in range(3)),
    termination_hooks=(),
    drift=(),
    zone="z",
)


def grown(group: GroupObserved = GROUP, launch: LaunchRecord | None = None, *, desired: int = 5) -> Any:
    return growth(NOW, "group", group, desired, launch)


def record(age: float, *, after: int = 3, **state: bool) -> LaunchRecord:
    return LaunchRecord(key="launch/old", count=1, desired_count=after, since=NOW - age, **state)


def test_a_group_grows_by_a_launch_of_what_is_missing() -> None:
    launch = LaunchInstances(group="group", key=f"launch/group/{NOW:.3f}", count=2, desired_count=5, zone="z")
    assert grown() == launch
    assert grown(replace(GROUP, members=GROUP.members[:2])) == launch, "the group itself launches what it lacks"
    assert grown(desired=500).count == MOST_LAUNCHED


@pytest.mark.parametrize(
    "change",
    [
        {"zone": ""},
        {"drift": ("two zones",)},
        {"launch_suspension": "User suspended"},
        {"members": tuple(member(number) for number in range(4))},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_group_that_aws_would_refuse_gets_a_capacity(change: dict[str, Any]) -> None:
    assert grown(replace(GROUP, **change)) == SET


def test_members_that_leave_or_stand_by_do_not_count() -> None:
    others = (member(8, "Terminating:Wait"), member(9, "Standby"))
    assert isinstance(grown(replace(GROUP, members=(*GROUP.members, *others))), LaunchInstances)


def test_a_launch_without_an_outcome_is_repeated_unchanged_and_later_given_up() -> None:
    repeated = grown(launch=record(REPEAT_SECONDS - 1, after=4, is_open=True))
    assert repeated == LaunchInstances(group="group", key="launch/old", count=1, desired_count=4, zone="z")
    assert grown(launch=record(REPEAT_SECONDS, is_open=True)) == SET


@pytest.mark.parametrize("state", ["is_refused", "is_open"])
def test_after_a_refusal_the_capacity_is_set_for_an_hour(state: str) -> None:
    assert grown(launch=record(ASK_AGAIN_SECONDS - 1, **{state: True})) == SET
    assert grown(launch=record(ASK_AGAIN_SECONDS, **{state: True})).key != "launch/old"


def test_soon_after_a_launch_that_the_group_does_not_show_the_capacity_is_set() -> None:
    assert grown(launch=record(SETTLE_SECONDS - 1, after=4)) == SET
    assert isinstance(grown(launch=record(SETTLE_SECONDS, after=4)), LaunchInstances)
    assert isinstance(grown(launch=record(0, after=3)), LaunchInstances), "the group shows the earlier launch"


def test_a_member_that_ended_is_removed_with_its_capacity_and_the_next_pass_launches_another() -> None:
    rows = [row("i1"), row("i2"), row("i3")]
    (removal,) = decide(seen(rows, [], ended=("i2",), zone="z")).actions
    assert isinstance(removal, TerminateMember)
    assert (removal.node_id, removal.decrement) == ("i2", True)
    after = decide(seen([rows[0], rows[2]], [], desired=2, zone="z"))
    assert after.actions == (
        LaunchInstances(group="group", key=f"launch/group/{NOW:.3f}", count=1, desired_count=3, zone="z"),
    )
    assert after.vacancies == ((NOW, 1),), "the replacement's time begins with the launch"


@pytest.mark.parametrize("change", [{"zone": ""}, {"zone": "z", "min_size": 3}], ids=["not supported", "at MinSize"])
def test_otherwise_the_group_replaces_a_member_that_ended(change: dict[str, Any]) -> None:
    observed = seen([row("i1"), row("i2"), row("i3")], [], ended=("i2",))
    (removal,) = decide(replace(observed, group=replace(observed.group, **change))).actions
    assert isinstance(removal, TerminateMember)
    assert not removal.decrement


def test_a_vacancy_keeps_its_time_while_the_launch_that_fills_it_is_unknown() -> None:
    open_launch = LaunchRecord(key="launch/old", count=1, desired_count=3, since=NOW - 5, is_open=True)
    rows = [row("i1"), row("i2")]
    waiting = replace(seen(rows, [], desired=2, zone="z"), launch=open_launch, vacancies=((NOW - 5, 1),))
    decision = decide(waiting)
    assert [action.key for action in decision.actions if isinstance(action, LaunchInstances)] == ["launch/old"]
    assert decision.vacancies == ((NOW - 5, 1),)
    shown = replace(seen([*rows, row("i3")], [], zone="z"), launch=replace(open_launch, is_open=False))
    assert decide(replace(shown, records=tuple(rows), vacancies=((NOW - 5, 1),))).records[0].wanted_at == NOW - 5
