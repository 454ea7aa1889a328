"""Tests when a job continues on fewer or more nodes, and what it records (`core.job.resizing`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from control_plane.core import launch
from control_plane.core.job import resizing
from control_plane.core.observed.facts import NOTHING
from control_plane.core.observed.incidents import Shrinks
from control_plane.core.observed.jobs import Departure, Growth
from control_plane.core.observed.nodes import Cause, NodeObserved, Remedy
from control_plane.core.observed.reasons import JobFact, JobNote
from control_plane.core.states import IncidentState, JobState
from everstep.protocol.agent_messages import MemberPhase
from everstep.protocol.ids import Generation, NodeId, Step
from tests.unit.control_plane.core.test_job_view import NOW, ONE, POLICY, SUCCESS, TWO, incident, made, report, rounds
from tests.unit.worker.rank_plans import rank_plan

THREE = NodeId("i-2")
BLIND, LEASE = POLICY.timeouts.blind_wait_seconds, POLICY.timeouts.lease_seconds
RUNS = (report(0), report(1))


def departure(node_id: NodeId = TWO, cause: Cause = Cause.NODE_FAULT, **changes: Any) -> Departure:
    values = {"evidence": NOTHING, "cause": cause, "remedy": Remedy.HOLD, "may_terminate": True, **changes}
    return Departure(node_id=node_id, **values)


RETURNED = departure(cause=Cause.RETURNED)
MEMBER = NodeObserved(
    node_id=ONE,
    is_connected=True,
    has_reported=True,
    member=structs.replace(report(0, phase=MemberPhase.PROMISED), generation=Generation(2)),
)
SILENT = NodeObserved(node_id=TWO, silent_seconds=1e6)
ENDING = departure(ONE, Cause.NOTICE)


@pytest.mark.parametrize(
    ("record", "spec", "event"),
    [
        pytest.param({}, {}, None, id="all nodes at the start"),
        pytest.param({}, {"node_count": 3}, (JobFact.STARTED_SMALLER, 2, 3), id="a start with fewer"),
        pytest.param({"member_count": 2}, {"node_count": 3}, None, id="the same number"),
        pytest.param({"member_count": 1}, {}, (JobFact.GREW, 2, 1), id="more"),
        pytest.param({"member_count": 3}, {"node_count": 4}, (JobFact.SHRANK, 2, 4), id="fewer of an elastic job"),
        pytest.param({"member_count": 4}, {"node_count": 3}, (JobFact.SHRANK, 2, 4), id="fewer than it grew to"),
        pytest.param(
            {"member_count": 3, "moves": (RETURNED,)}, {"node_count": 3}, (JobFact.SHRANK_BY_RETURN, 2, 3), id="return"
        ),
        pytest.param(
            {"member_count": 4, "moves": (RETURNED,)}, {"node_count": 4}, (JobFact.SHRANK, 2, 4), id="one of two"
        ),
        pytest.param(
            {"member_count": 3, "moves": (replace(RETURNED, is_kept=True),)},
            {"node_count": 3},
            (JobFact.SHRANK, 2, 3),
            id="the returned node stayed",
        ),
        pytest.param(
            {"member_count": 3}, {"max_node_count": 2}, (JobFact.SHRANK_TO_LIMIT, 2, 3), id="down to the largest number"
        ),
    ],
)
@pytest.mark.parametrize("cause", [Cause.RANK_EXIT, Cause.NOTICE])
def test_a_new_number_of_nodes_is_an_event_and_part_of_the_incident(
    record: dict[str, Any], spec: dict[str, Any], event: tuple[JobFact, int, int] | None, cause: Cause
) -> None:
    opened = replace(incident(IncidentState.RESTORING), cause=cause)
    view = made({"incident": opened, "reduced_count": 2, "vacant_since": 1.0, **record}, spec=spec)
    changed = resizing.with_size(view, rank_plan(addresses=("a", "b")))
    notes = [each.message for each in changed.events if isinstance(each.message, JobNote)]
    assert [(note.what, note.count, note.node_count) for note in notes] == ([] if event is None else [event])
    after = changed.record
    missing = max(0, spec.get("node_count", 2) - 2)
    assert (after.member_count, after.missing_count, after.reduced_count, after.vacant_since) == (2, missing, 0, None)
    assert after.incident is not None
    before = record.get("member_count") or spec.get("node_count", 2)
    assert (after.incident.node_count_before, after.incident.node_count_after) == (before, 2)
    has_shrunk = event is not None and event[0] in (JobFact.SHRANK, JobFact.STARTED_SMALLER)
    assert after.incident.cause is (Cause.SHRUNK if has_shrunk and cause is Cause.RANK_EXIT else cause)
    assert (after.incident.decision == Shrinks(count=2, node_count=event[2] if event else 0)) is has_shrunk


@pytest.mark.parametrize(
    ("spec", "assigned", "what"),
    [
        pytest.param({}, (ONE,), None, id="not elastic"),
        pytest.param({"min_node_count": 1}, (ONE,), JobFact.CONTINUES_SMALLER, id="its minimum"),
        pytest.param({"min_node_count": 1}, (), JobFact.NEEDS_MORE_NODES, id="less than its minimum"),
        pytest.param({"min_node_count": 2, "max_node_count": 3}, (ONE,), None, id="it can only grow"),
        pytest.param(
            {"min_node_count": 2, "max_node_count": 3, "members": 3},
            (ONE, TWO),
            JobFact.CONTINUES_SMALLER,
            id="it grew",
        ),
    ],
)
def test_a_waiting_job_says_on_how_many_nodes_it_will_continue(
    spec: dict[str, Any], assigned: tuple[NodeId, ...], what: JobFact | None
) -> None:
    limits = {name: value for name, value in spec.items() if name != "members"}
    view = made({"state": JobState.PREPARING, "member_count": spec.get("members", 0)}, spec=limits, assigned=assigned)
    found = resizing.smaller_size(view, launch.call_roll(view.spec, view.seen, view.record, view.policy))
    assert (found and found.what) == what


def growing(*nodes: NodeId, **changes: Any) -> Any:
    """Return the view of a running job to whose two members the fleet has added ready nodes."""
    values: dict[str, Any] = {"member_count": 2, "committed": Step(9), "progress_at": NOW, **changes.pop("record", {})}
    spec = {"max_node_count": 3, **changes.pop("spec", {})}
    members = changes.pop("members", RUNS)
    view = made(values, *members, spec=spec, assigned=(ONE, TWO, *nodes), **changes)
    ready = {node: NodeObserved(node_id=node, is_connected=True, has_reported=True) for node in nodes}
    return replace(view, nodes={**view.nodes, **ready})


@pytest.mark.parametrize(
    ("record", "nodes", "expected"),
    [
        pytest.param({}, (THREE,), Growth(node_ids=(THREE,), since=NOW), id="a ready node"),
        pytest.param({}, (THREE, NodeId("i-3")), Growth(node_ids=(THREE,), since=NOW), id="only up to the limit"),
        pytest.param({"member_count": 3}, (THREE,), None, id="as large as it may be"),
        pytest.param({"member_count": 0}, (THREE,), None, id="no plan yet"),
        pytest.param({"moves": (departure(),)}, (THREE,), None, id="a node is to leave"),
        pytest.param({"growth": Growth(node_ids=(THREE,), since=5.0), "member_count": 3}, (THREE,), None, id="no more"),
        pytest.param(
            {"growth": Growth(node_ids=(TWO,), since=5.0, asked_at=6.0), "member_count": 3},
            (THREE,),
            Growth(node_ids=(TWO,), since=5.0, asked_at=6.0),
            id="the ranks are asked to stop",
        ),
    ],
)
def test_a_job_records_the_ready_nodes_by_which_it_can_grow(
    record: dict[str, Any], nodes: tuple[NodeId, ...], expected: Growth | None
) -> None:
    assert resizing.with_growth(growing(*nodes, record=record)).record.growth == expected


@pytest.mark.parametrize(
    ("record", "seen", "is_asked"),
    [
        pytest.param({}, {}, True, id="ready for long enough"),
        pytest.param({"growth": Growth(node_ids=(THREE,), since=NOW - 1)}, {}, False, id="just ready"),
        pytest.param({"pause_requested_at": NOW}, {}, False, id="to be paused"),
        pytest.param({}, {"is_fleet_blind": True}, False, id="most of the fleet is silent"),
    ],
)
def test_a_job_that_trains_undisturbed_is_asked_to_grow(
    record: dict[str, Any], seen: dict[str, Any], is_asked: bool
) -> None:
    view = growing(THREE, record={"growth": Growth(node_ids=(THREE,), since=NOW - LEASE), **record}, **seen)
    decision = resizing.grow(view)
    assert (decision is not None) is is_asked
    if decision is not None:
        assert decision.record.growth == Growth(node_ids=(THREE,), since=NOW - LEASE, asked_at=NOW)
        assert decision.requeue_after_seconds == 0.0


@pytest.mark.parametrize(
    ("record", "members", "failed_at"),
    [
        pytest.param({}, RUNS, None, id="they have not stopped"),
        pytest.param({"progress_at": NOW - BLIND}, RUNS, None, id="they stand still, at the limit"),
        pytest.param({"progress_at": NOW - BLIND - 1}, RUNS, NOW, id="they stand still, after the limit"),
        pytest.param(
            {"progress_at": NOW - BLIND - 9},
            (report(0, limit=9.0), report(1)),
            None,
            id="in a phase that may take long",
        ),
        pytest.param({}, tuple(report(rank, SUCCESS) for rank in (0, 1)), NOW, id="they have stopped"),
        pytest.param(
            {},
            tuple(report(rank, structs.replace(SUCCESS, at_seconds=NOW - 5 + rank)) for rank in (0, 1)),
            NOW - 4,
            id="the last of them stopped earlier",
        ),
        pytest.param(
            {},
            tuple(report(rank, structs.replace(SUCCESS, at_seconds=NOW + 5)) for rank in (0, 1)),
            NOW,
            id="the clock of a node is ahead",
        ),
        pytest.param(
            {}, (report(0, round=rounds(finished=True, stopped=True)), report(1)), NOW, id="they agreed on a stop"
        ),
    ],
)
def test_a_job_grows_when_its_ranks_have_stopped_or_stand_still(
    record: dict[str, Any], members: tuple[Any, ...], failed_at: float | None
) -> None:
    growth = Growth(node_ids=(THREE,), since=9_000.0, asked_at=9_001.0)
    decision = resizing.grow(growing(THREE, record={"growth": growth, **record}, members=members))
    assert decision is not None
    assert decision.record.state is (JobState.RUNNING if failed_at is None else JobState.PREPARING)
    opened = decision.record.incident
    assert (opened and (opened.cause, opened.failed_at)) == (failed_at and (Cause.GROWN, failed_at))


@pytest.mark.parametrize(
    ("record", "seen", "spec", "returned"),
    [
        pytest.param({}, {}, {}, (), id="nobody needs nodes"),
        pytest.param({}, {"keep_count": 1, "returns_to": "bert"}, {}, (TWO,), id="for another job"),
        pytest.param({}, {"keep_count": 2, "returns_to": "bert"}, {}, (), id="the other job needs none"),
        pytest.param({}, {}, {"max_node_count": 1}, (TWO,), id="above the limit"),
        pytest.param({"moves_after": NOW}, {"keep_count": 1}, {}, (TWO,), id="at the earliest time"),
        pytest.param({"moves_after": NOW + 1}, {"keep_count": 1}, {}, (), id="too early"),
        pytest.param({"moves": (departure(ONE, asked_at=1.0),)}, {"keep_count": 1}, {}, (), id="asked to stop"),
        pytest.param({}, {"keep_count": 1, "is_fleet_blind": True}, {}, (), id="most of the fleet is silent"),
        pytest.param(
            {"growth": Growth(node_ids=(THREE,), since=1.0, asked_at=2.0)},
            {"keep_count": 1},
            {},
            (),
            id="asked to grow",
        ),
        pytest.param({"moves": (departure(),)}, {"keep_count": 1}, {}, (ONE,), id="others cannot use a faulty node"),
        pytest.param({"moves": (departure(),)}, {}, {"max_node_count": 1}, (TWO,), id="the faulty node goes first"),
        pytest.param({}, {"keep_count": 1, "returns_to": "bert"}, {"max_node_count": 1}, (TWO,), id="limit and job"),
        pytest.param({"moves": (ENDING,)}, {"keep_count": 1, "returns_to": "bert"}, {}, (TWO,), id="AWS takes another"),
        pytest.param({"moves": (ENDING,)}, {}, {"max_node_count": 1}, (TWO,), id="AWS takes the node above the limit"),
    ],
)
def test_which_nodes_a_job_returns(
    record: dict[str, Any], seen: dict[str, Any], spec: dict[str, Any], returned: tuple[NodeId, ...]
) -> None:
    values = {"member_count": 2, "committed": Step(9), "base_step": Step(0), **record}
    decision = resizing.give_back(made(values, *RUNS, spec={"min_node_count": 1, **spec}, **seen))
    assert (decision is not None) is bool(returned)
    if decision is None:
        return
    assert decision.record.growth is None
    asked = [move for move in decision.record.moves if move.asked_at == NOW]
    assert [(move.node_id, move.cause) for move in asked] == [(node, Cause.RETURNED) for node in returned]
    (event,) = decision.events
    assert isinstance(event.message, JobNote)
    assert isinstance(decision.record.reason, JobNote)
    is_for_other = bool(seen.get("returns_to")) and "max_node_count" not in spec
    assert (event.message.what, decision.record.reason.what, decision.requeue_after_seconds) == (
        JobFact.TO_RETURN_FOR_JOB if is_for_other else JobFact.TO_RETURN_ABOVE_LIMIT,
        JobFact.RETURNS_FOR_JOB if is_for_other else JobFact.RETURNS_ABOVE_LIMIT,
        0.0,
    )


@pytest.mark.parametrize(
    ("move", "kept"),
    [
        pytest.param((), (Remedy.RELEASE, False), id="a sound node"),
        pytest.param((departure(is_history=True),), (Remedy.HOLD, True), id="a faulty node"),
        pytest.param((departure(is_kept=True),), (Remedy.RELEASE, False), id="a faulty node that stayed"),
        pytest.param((departure(cause=Cause.NOTICE),), (Remedy.RELEASE, False), id="a node that AWS ends"),
    ],
)
def test_a_returned_node_keeps_the_remedy_of_its_fault(move: tuple[Departure, ...], kept: tuple[Remedy, bool]) -> None:
    values = {"member_count": 2, "committed": Step(9), "moves": move}
    decision = resizing.give_back(made(values, *RUNS, spec={"min_node_count": 1, "max_node_count": 1}))
    assert decision is not None
    (returned,) = decision.record.moves
    assert ((returned.remedy, returned.may_terminate), returned.is_history, returned.asked_at) == (kept, False, NOW)


@pytest.mark.parametrize(
    ("vacant", "since", "after"),
    [(False, None, None), (False, 5.0, None), (True, None, NOW), (True, 5.0, 5.0)],
)
def test_a_vacancy_has_the_time_since_which_a_node_is_missing(
    vacant: bool, since: float | None, after: float | None
) -> None:
    view = made({"vacant_since": since}, assigned=(ONE,) if vacant else (ONE, TWO))
    roll = launch.call_roll(view.spec, view.seen, view.record, view.policy)
    assert resizing.with_vacancy(view, roll).record.vacant_since == after


@pytest.mark.parametrize(
    ("record", "nodes", "seen", "count"),
    [
        pytest.param({}, (MEMBER,), {}, 1, id="after its patience"),
        pytest.param({"vacant_since": NOW - 29}, (MEMBER,), {}, None, id="before the end of its patience"),
        pytest.param({"vacant_since": None}, (MEMBER,), {}, None, id="no node is missing"),
        pytest.param({}, (replace(MEMBER, member=None),), {}, None, id="a member has not promised yet"),
        pytest.param({}, (MEMBER, SILENT), {}, None, id="a member is silent"),
        pytest.param({}, (MEMBER,), {"spare_count": 1}, None, id="a spare is about to come"),
    ],
)
def test_a_job_shrinks_after_its_patience(
    record: dict[str, Any], nodes: tuple[NodeObserved, ...], seen: dict[str, Any], count: int | None
) -> None:
    values = {"state": JobState.PREPARING, "issued_generation": Generation(2), "vacant_since": NOW - 30, **record}
    view = made(
        values,
        spec={"node_count": 3, "min_node_count": 1, "patience_seconds": 30},
        assigned=tuple(each.node_id for each in nodes),
        nodes={each.node_id: each for each in nodes},
        **seen,
    )
    decision = resizing.shrink(view, launch.call_roll(view.spec, view.seen, view.record, view.policy))
    assert (decision and (decision.record.reduced_count, decision.requeue_after_seconds)) == (count and (count, 0.0))
