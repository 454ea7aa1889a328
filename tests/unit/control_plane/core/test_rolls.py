"""Tests single decisions about rolls, each of which replaces or reboots all nodes of a fleet.

`tests/golden/incidents/roll.txt` shows a whole roll.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from control_plane.accounts.reasons import sentence
from control_plane.core import rolls
from control_plane.core.actions import FleetDecision, RebootMember, TerminateMember
from control_plane.core.observed.causes import NotInService, Reason, Rolls, RollWaits, TooFewAvailable
from control_plane.core.observed.fleets import FleetObserved, Hold, NodeRecord
from control_plane.core.observed.rolls import FleetRoll, RollProgress, RollStatus
from control_plane.core.states import JobState, NodeState
from everstep.protocol.agent_messages import ShardProtection
from everstep.protocol.ids import NodeId, Rank, Step
from tests.unit.control_plane.core.test_fleets import SPEC, decide, job, member_of, row, seen

NAMES = ("i1", "i2", "i3")
SETTLED = replace(job("a", JobState.RUNNING, 2), is_settled=True)
TEAM = [row("i1", NodeState.ASSIGNED, "a"), row("i2", NodeState.ASSIGNED, "a"), row("i3")]


def roll(*names: str, **changes: Any) -> FleetRoll:
    values: dict[str, Any] = {"max_unavailable": 1, "reboots": False, "requested_by": "ann", "reason": "new image"}
    node_ids = tuple(NodeId(name) for name in names or NAMES)
    return FleetRoll(roll_id="one", node_ids=node_ids, started_at=500.0, **{**values, **changes})


def shard(in_view: tuple[str, ...], reason: str = "") -> ShardProtection:
    return ShardProtection(
        rank=Rank(0),
        holders=(NodeId("i1"), NodeId("i2")),
        in_view=tuple(map(NodeId, in_view)),
        committed=Step(9),
        payload_bytes=1,
        reason=reason,
    )


def rolled(observed: FleetObserved, what: FleetRoll, *requested: str) -> FleetObserved:
    progress = RollProgress(roll_id="one", requested=tuple(map(NodeId, requested))) if requested else None
    return replace(observed, roll=what, roll_progress=progress)


def begun(decision: FleetDecision) -> tuple[str, ...]:
    assert decision.roll_progress is not None
    return decision.roll_progress.requested


def test_spares_come_before_nodes_of_jobs() -> None:
    decision = decide(rolled(seen(TEAM, [SETTLED]), roll()))
    assert begun(decision) == ("i3",)
    assert sentence(decision.roll_progress.reason) == "replaces i3"
    assert [(record.node_id, record.state) for record in decision.records] == [("i3", NodeState.DRAINING)]


def test_the_oldest_node_of_a_job_is_left_as_after_a_request_of_a_person() -> None:
    decision = decide(rolled(seen(TEAM, [SETTLED]), roll("i2", "i1")))
    (record,) = decision.records
    assert (record.node_id, record.state) == ("i1", NodeState.ASSIGNED)
    assert record.request == rolls.request_of(roll(), NodeId("i1"))
    assert sentence(record.request) == "the roll of the fleet replaces i1 (ann): new image"


def test_the_limit_allows_several_nodes_at_a_time() -> None:
    assert begun(decide(rolled(seen(TEAM, [SETTLED]), roll(max_unavailable=2)))) == ("i3", "i1")


@pytest.mark.parametrize("max_unavailable", [1, 2])
def test_nodes_that_are_missing_for_other_reasons_count(max_unavailable: int) -> None:
    rows = [*TEAM[:2], row("i3", NodeState.JOINING)]
    decision = decide(rolled(seen(rows, [SETTLED], silent=("i3",)), roll(max_unavailable=max_unavailable)))
    assert begun(decision) == (("i1",) if max_unavailable == 2 else ())
    if max_unavailable == 1:
        assert sentence(decision.roll_progress.reason) == "waits: unavailable nodes: 1, MaxUnavailable: 1"


def test_a_node_with_a_request_of_a_person_counts_as_missing() -> None:
    rows = [TEAM[0], request(TEAM[1], is_roll=False), TEAM[2]]
    assert begun(decide(rolled(seen(rows, [SETTLED]), roll("i1")))) == ()


def test_a_silent_node_counts_as_missing() -> None:
    assert begun(decide(rolled(seen(TEAM, [SETTLED], silent=("i3",)), roll("i1")))) == ()


@pytest.mark.parametrize(
    ("changes", "in_view", "reason", "obstacle"),
    [
        ({"state": JobState.LOADING}, ("i1", "i2"), "", "a is loading"),
        (
            {"is_settled": False},
            ("i1", "i2"),
            "",
            "a has an open incident, or has committed no step since its last launch",
        ),
        ({}, ("i1",), "", "the shard of rank 0 of a is not fully protected: i2 does not hold it"),
        ({}, ("i1", "i2"), "i2 is slow", "the shard of rank 0 of a is not fully protected: i2 is slow"),
        ({}, ("i1", "i2"), "", ""),
        ({"state": JobState.QUEUED, "is_settled": False}, ("i1",), "", ""),
    ],
)
def test_no_node_begins_while_a_job_is_below_its_protection(
    changes: dict[str, Any], in_view: tuple[str, ...], reason: str, obstacle: str
) -> None:
    observed = seen(TEAM, [])
    member = structs.replace(member_of("a"), protection=(shard(in_view, reason),))
    nodes = [replace(observed.nodes[NodeId("i1")], member=member)]
    found = rolls.obstacle_of(replace(SETTLED, **changes), nodes)
    assert ("" if found is None else sentence(found)) == obstacle


def test_the_fleet_asks_about_every_job() -> None:
    hurt = replace(SETTLED, is_settled=False)
    decision = decide(rolled(seen(TEAM, [hurt]), roll()))
    assert begun(decision) == ()
    assert sentence(decision.roll_progress.reason).startswith("waits: a has an open incident")


def test_a_frozen_fleet_waits() -> None:
    decision = decide(rolled(seen(TEAM, [SETTLED], drift=("MinSize differs.",)), roll()))
    assert (begun(decision), sentence(decision.roll_progress.reason)) == ((), "waits: the fleet is frozen")


def test_a_node_that_nothing_can_replace_is_not_asked_for() -> None:
    decision = decide(rolled(seen(TEAM[:2], [SETTLED], desired=2, max_size=2), roll("i1")))
    assert begun(decision) == ()
    assert "no node can replace it" in sentence(decision.roll_progress.reason)


def test_a_pause_begins_no_node_and_a_begun_one_finishes() -> None:
    assert begun(decide(rolled(seen(TEAM, [SETTLED]), roll(is_paused=True)))) == ()
    rows = [*TEAM[:2], row("i3", NodeState.DRAINING, reason=rolls.request_of(roll(), NodeId("i3")))]
    decision = decide(rolled(seen(rows, [SETTLED]), roll(is_paused=True), "i3"))
    assert sentence(decision.roll_progress.reason) == "paused; replaces i3"
    assert [action.node_id for action in decision.actions if isinstance(action, TerminateMember)] == ["i3"]


@pytest.mark.parametrize("limit", [0, 5])
def test_replacements_of_a_roll_do_not_use_up_the_hourly_limit(limit: int) -> None:
    rows = [*TEAM[:2], row("i3", NodeState.DRAINING, reason=rolls.request_of(roll(), NodeId("i3")))]
    decision = decide(rolled(seen(rows, [SETTLED]), roll(), "i3"), replace(SPEC, max_replacements_per_hour=limit))
    assert decision.actions == (
        TerminateMember(group="group", node_id=NodeId("i3"), decrement=False, reason=rows[2].reason),
    )
    assert decision.records == (), "the time of the replacement is not stored"


def test_a_rebooting_roll_reboots() -> None:
    decision = decide(rolled(seen(TEAM, [SETTLED]), roll(reboots=True)))
    assert begun(decision) == ("i3",)
    assert [type(action) for action in decision.actions] == [RebootMember]


def request(record: NodeRecord, *, is_roll: bool = True) -> NodeRecord:
    asked = rolls.request_of(roll(), record.node_id)
    return replace(record, request=structs.replace(asked, is_roll=is_roll, note="the roll of the fleet"))


def test_a_stop_withdraws_the_requests_that_jobs_have_not_fulfilled() -> None:
    rows = [request(TEAM[0]), request(TEAM[1], is_roll=False), TEAM[2]]
    decision = decide(rolled(seen(rows, [SETTLED]), roll(is_stopped=True), "i1", "i2"))
    assert [(record.node_id, record.request) for record in decision.records] == [("i1", None)]
    assert sentence(decision.roll_progress.reason) == "stopped after 0 of 3 nodes"
    assert [event.type for event in decision.events] == ["FleetRollEnded"]
    again = decide(replace(seen(rows, [SETTLED]), roll=roll(is_stopped=True), roll_progress=decision.roll_progress))
    assert (again.records, again.events) == ((), ())


def test_the_deletion_of_the_fleet_ends_its_roll() -> None:
    decision = decide(rolled(seen(TEAM, []), roll()), replace(SPEC, is_deleting=True))
    assert decision.roll_progress.ended_at is not None
    assert rolls.status(roll(), decision.roll_progress) is RollStatus.STOPPED


def test_a_cancelled_request_skips_the_node() -> None:
    decision = decide(rolled(seen(TEAM, [SETTLED]), roll(), "i3"))
    assert decision.roll_progress.finished == ("i3",)
    assert begun(decision) == ("i3", "i1")


def test_held_and_ended_nodes_need_no_work() -> None:
    rows = [TEAM[0], row("i2", NodeState.HELD, hold=Hold.PERSON), *[row("i4"), row("i5")]]
    decision = decide(rolled(seen(rows, [replace(SETTLED, node_count=1)], desired=4), roll()))
    assert decision.roll_progress.finished == ("i2", "i3")
    assert begun(decision) == ("i1",)


def test_the_progress_of_an_earlier_roll_is_ignored() -> None:
    earlier = RollProgress(roll_id="zero", requested=(NodeId("i3"),), finished=(NodeId("i3"),), ended_at=400.0)
    decision = decide(replace(seen(TEAM, [SETTLED]), roll=roll(), roll_progress=earlier))
    assert decision.roll_progress == RollProgress(
        roll_id="one", requested=(NodeId("i3"),), reason=Rolls(reboots=False, node_ids=(NodeId("i3"),))
    )


@pytest.mark.parametrize(
    ("changes", "finished", "ended_at", "status"),
    [
        ({}, (), None, RollStatus.IN_PROGRESS),
        ({"is_paused": True}, (), None, RollStatus.PAUSED),
        ({"is_paused": True, "is_stopped": True}, (), None, RollStatus.STOPPED),
        ({}, NAMES, 1.0, RollStatus.COMPLETED),
        ({}, NAMES[:2], 1.0, RollStatus.STOPPED),
    ],
)
def test_the_status_of_a_roll(
    changes: dict[str, Any], finished: tuple[str, ...], ended_at: float | None, status: RollStatus
) -> None:
    progress = RollProgress(roll_id="one", finished=tuple(map(NodeId, finished)), ended_at=ended_at)
    assert rolls.status(roll(**changes), progress) is status


FULL = TooFewAvailable(unavailable_count=9, max_unavailable=9)
"""An obstacle of a node."""


@pytest.mark.parametrize(
    ("changes", "requested", "rows", "refused", "begins", "reason"),
    [
        pytest.param({}, ("i3",), {}, (), (), Rolls(reboots=False, node_ids=(NodeId("i3"),)), id="no room"),
        pytest.param(
            {"max_unavailable": 2},
            ("i3",),
            {},
            (),
            ("i1",),
            Rolls(reboots=False, node_ids=("i3", "i1")),
            id="room for 1",
        ),
        pytest.param(
            {"is_paused": True},
            ("i1", "i2", "i3"),
            {},
            (),
            (),
            Rolls(reboots=False, node_ids=NAMES),
            id="all nodes begun before the pause",
        ),
        pytest.param(
            {},
            (),
            {"i1": NodeState.JOINING, "i2": NodeState.JOINING, "i3": NodeState.JOINING},
            (),
            (),
            RollWaits(because=NotInService(node_id=NodeId("i1"), state=NodeState.JOINING)),
            id="the first node is not in service",
        ),
        pytest.param({}, (), {}, ("i3",), ("i1",), Rolls(reboots=False, node_ids=("i1",)), id="the first is refused"),
        pytest.param({}, (), {}, NAMES, (), RollWaits(because=FULL), id="all are refused"),
    ],
)
def test_which_nodes_begin(
    changes: dict[str, Any],
    requested: tuple[str, ...],
    rows: dict[str, NodeState],
    refused: tuple[str, ...],
    begins: tuple[str, ...],
    reason: Reason,
) -> None:
    """The nodes `i1` and `i2` work for a job, and `i3` is a spare. The requested nodes are being replaced."""
    nodes = {
        each.node_id: replace(each, state=NodeState.DRAINING if each.node_id in requested else state)
        for each in TEAM
        for state in [rows.get(each.node_id, each.state)]
    }
    step = rolls.decide(
        1_000.0,
        roll(**changes),
        RollProgress(roll_id="one", requested=tuple(map(NodeId, requested))),
        nodes,
        unavailable_count=0,
        obstacle=None,
        refusal=lambda record: FULL if record.node_id in refused else None,
    )
    assert (step.begun, step.progress.reason) == (begins, reason)


def test_a_node_that_a_person_wants_begins_no_roll() -> None:
    wanted = {NodeId("i1"): request(TEAM[0], is_roll=False)}
    step = rolls.decide(1_000.0, roll("i1"), None, wanted, unavailable_count=0, obstacle=None, refusal=lambda _: None)
    assert step.begun == ()
    assert isinstance(step.progress.reason, RollWaits)
