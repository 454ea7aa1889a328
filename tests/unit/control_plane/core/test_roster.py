"""Tests which nodes take part in the next generation of a job, and which the job gives up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from control_plane.core.evidence import NodeDisposition
from control_plane.core.job import roster
from control_plane.core.job.view import JobView
from control_plane.core.observed.facts import NOTHING, Absence, NotPrepared
from control_plane.core.observed.incidents import FailureRecord, IncidentRecord, RestartsRanks
from control_plane.core.observed.jobs import Departure, Exclusion, Trial
from control_plane.core.observed.nodes import Cause, InstanceCondition, NodeObserved, Remedy
from control_plane.core.observed.steps import FailedRead, RefusedSource
from control_plane.core.states import IncidentState, JobState
from everstep.protocol.agent_messages import (
    EndedRanks,
    ExitClass,
    MemberPhase,
    MemberReport,
    NodeFault,
    RankExit,
    RankStatus,
)
from everstep.protocol.ids import NO_STEP, Generation, NodeId, Rank, RunId, Step
from everstep.protocol.plan import SlotRecord
from tests.unit.control_plane.core.test_job_view import NOW, ONE, POLICY, SPEC, TWO, made
from tests.unit.worker.rank_plans import RUN

TIMEOUTS = POLICY.timeouts
SPARE = NodeId("i-2")
OPEN = IncidentRecord(
    id="inc-1",
    state=IncidentState.REPLACING,
    cause=Cause.RANK_EXIT,
    evidence=(NOTHING,),
    decision=RestartsRanks(),
    generation_before=Generation(1),
    failed_at=NOW - 60,
    opened_at=NOW - 59,
    reached_step=Step(7),
)
LOST_GPU = NodeFault(code="gpu_lost", message="gone", is_permanent=True)


def slot(rank: int, step: int) -> SlotRecord:
    return SlotRecord(
        owner_rank=Rank(rank),
        origin_generation=Generation(1),
        step=Step(step),
        payload_bytes=1,
        digest=bytes([rank, step]) + bytes(14),
        layout_hash=bytes(16),
    )


def promised(*slots: SlotRecord, **changes: Any) -> MemberReport:
    """Return the report of an agent that has promised to join generation 2, with the shards in its node's memory."""
    made = MemberReport(
        job=SPEC.job, run=RUN, generation=Generation(2), phase=MemberPhase.PROMISED, inventory=tuple(slots)
    )
    return structs.replace(made, **changes)


def node(name: NodeId, member: MemberReport | None = None, **changes: Any) -> NodeObserved:
    values = {"is_connected": True, "has_reported": member is not None, "member": member, **changes}
    return NodeObserved(node_id=name, **values)


def preparing(*nodes: NodeObserved, record: dict[str, Any] | None = None, **changes: Any) -> JobView:
    """Return the view of a job whose next generation 2 is prepared, and that has committed step 9."""
    values = {
        "state": JobState.PREPARING,
        "issued_generation": Generation(2),
        "committed": Step(9),
        "incident": OPEN,
        **(record or {}),
    }
    observed: dict[str, Any] = {
        "assigned": tuple(each.node_id for each in nodes),
        "nodes": {each.node_id: each for each in nodes},
        **changes,
    }
    return made(values, **observed)


def excluded(view: JobView) -> list[NodeId]:
    return [each.node_id for each in view.record.exclusions]


def incident_of(view: JobView) -> IncidentRecord:
    assert view.record.incident is not None
    return view.record.incident


@pytest.mark.parametrize(
    ("generation", "boundary", "run", "reached"),
    [
        pytest.param(1, 8, RUN, 8, id="the failed generation"),
        pytest.param(2, 8, RUN, 8, id="a later one"),
        pytest.param(0, 8, RUN, 7, id="an earlier one"),
        pytest.param(1, 6, RUN, 7, id="an older step"),
        pytest.param(1, 8, RunId("cd" * 16), 7, id="another run"),
    ],
)
def test_late_reports_can_only_raise_the_reached_step(generation: int, boundary: int, run: RunId, reached: int) -> None:
    ended = EndedRanks(generation=Generation(generation), boundary=Step(boundary))
    late = node(ONE, promised(ended=ended, run=run))
    assert incident_of(roster.with_late_reports(preparing(late, node(TWO)))).reached_step == reached
    restoring = replace(OPEN, state=IncidentState.RESTORING)
    after = roster.with_late_reports(preparing(late, node(TWO), record={"incident": restoring}))
    assert incident_of(after).reached_step == 7, "the next generation has a plan"


@pytest.mark.parametrize(
    ("seconds", "cause", "failed"),
    [
        pytest.param(-5.0, Cause.RANK_EXIT, NOW - 65, id="an earlier exit"),
        pytest.param(0.0, Cause.RANK_EXIT, NOW - 60, id="the same exit"),
        pytest.param(5.0, Cause.RANK_EXIT, NOW - 60, id="a later exit"),
        pytest.param(-5.0, Cause.HANG, NOW - 60, id="of another cause"),
    ],
)
def test_an_exit_that_is_reported_late_can_only_be_the_earlier_failure(
    seconds: float, cause: Cause, failed: float
) -> None:
    gone = RankExit(exit_class=ExitClass.ERROR, code=1, at_seconds=NOW - 60 + seconds, boundary=Step(9))
    late = MemberReport(
        job=SPEC.job,
        run=RUN,
        generation=Generation(1),
        phase=MemberPhase.EXITED,
        ranks=(RankStatus(rank=Rank(0), boundary=Step(9), exit=gone),),
    )
    incident = replace(OPEN, cause=cause, node_microseconds_before=100_000_000)
    found = incident_of(roster.with_late_reports(preparing(node(ONE, late), node(TWO), record={"incident": incident})))
    assert (found.failed_at, found.reached_step) == (failed, 9)
    unnoticed = round((NOW - 60 - failed) * 1e6)
    assert found.node_microseconds_before == 100_000_000 - 2 * unnoticed, "of both nodes"
    assert len(found.evidence) == (2 if failed < NOW - 60 else 1)


def test_a_promise_has_its_time_from_the_first_request() -> None:
    view = preparing(node(ONE), node(TWO, silent_seconds=1e6), record={"asked": ((TWO, 9_000.0), (SPARE, 9_500.0))})
    assert roster.with_promise_deadlines(view).record.asked == ((ONE, NOW), (TWO, 9_000.0))
    joined = preparing(node(ONE, promised()), node(TWO, promised()), record={"asked": ((TWO, 9_000.0),)})
    assert roster.with_promise_deadlines(joined).record.asked == ()


def departure(name: NodeId, **changes: Any) -> Departure:
    made = Departure(node_id=name, evidence=NOTHING, cause=Cause.NOTICE, remedy=Remedy.TERMINATE, may_terminate=True)
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("record", "assigned", "disposition", "moves"),
    [
        pytest.param({}, (ONE, TWO), NodeDisposition.IMPAIRED, 1, id="a faulty member is to leave"),
        pytest.param({}, (TWO,), NodeDisposition.GONE, 0, id="it has left"),
        pytest.param(
            {"moves": (departure(ONE),)}, (ONE, TWO), NodeDisposition.IMPAIRED, 1, id="it already is to leave"
        ),
        pytest.param(
            {"moves": (departure(ONE, has_left=True),)}, (ONE, TWO), NodeDisposition.IMPAIRED, 2, id="it has come back"
        ),
        pytest.param(
            {"incident": replace(OPEN, kept_instance_ids=(ONE,))},
            (ONE, TWO),
            NodeDisposition.GONE,
            0,
            id="kept in vain",
        ),
    ],
)
def test_a_member_with_a_fault_leaves_or_is_lost(
    record: dict[str, Any], assigned: tuple[NodeId, ...], disposition: NodeDisposition, moves: int
) -> None:
    view = preparing(node(ONE, faults=(LOST_GPU,)), node(TWO), record=record, assigned=assigned)
    found = roster.with_faulty(view)
    assert (found.verdicts[ONE].disposition, len(found.record.moves)) == (disposition, moves)
    assert found.verdicts[ONE].is_final is (disposition is NodeDisposition.GONE)
    assert found.verdicts[TWO].disposition is NodeDisposition.ALIVE


def test_a_healthy_member_does_not_hide_the_fault_of_a_later_one() -> None:
    found = roster.with_faulty(preparing(node(ONE), node(TWO, faults=(LOST_GPU,))))
    assert [move.node_id for move in found.record.moves] == [TWO]


@pytest.mark.parametrize(
    ("record", "is_excluded"),
    [
        pytest.param({}, True, id="lost"),
        pytest.param(
            {"exclusions": (Exclusion(node_id=ONE, evidence=NOTHING, may_terminate=True),)}, True, id="known as lost"
        ),
        pytest.param({"moves": (departure(ONE, asked_at=NOW),)}, True, id="ended before it left as planned"),
    ],
)
def test_a_lost_node_is_excluded_once_and_named_by_the_incident(record: dict[str, Any], is_excluded: bool) -> None:
    view = preparing(node(ONE, instance=InstanceCondition.ENDED), node(TWO), record=record)
    found = roster.without_lost(view)
    assert excluded(found) == [ONE] * is_excluded
    assert incident_of(found).instance_ids == (ONE,)


FAILURE = FailureRecord(
    generation=Generation(1),
    step=Step(7),
    exit_class=ExitClass.ERROR,
    code=1,
    at=NOW - 60,
    max_boundary=Step(7),
    node_id=ONE,
)


def test_a_node_that_was_given_back_or_leaves_as_planned_is_not_lost() -> None:
    trial = Trial(kind="node", failure=FAILURE, node_id=ONE)
    back = preparing(node(TWO), record={"trials": (trial,)})
    assert incident_of(roster.without_lost(back)).instance_ids == ()
    kept = preparing(node(ONE, instance=InstanceCondition.ENDED), node(TWO), record={"trials": (trial,)})
    assert incident_of(roster.without_lost(kept)).instance_ids == (ONE,), "the job still has it"
    for has_left in (False, True):
        moves = (departure(ONE, asked_at=NOW, has_left=has_left),)
        left = preparing(node(TWO), record={"moves": moves})
        assert incident_of(roster.without_lost(left)).instance_ids == ()
    unheard = NodeObserved(node_id=ONE)
    again = preparing(node(TWO), record={"moves": moves}, nodes={ONE: unheard, TWO: node(TWO)}, assigned=(ONE, TWO))
    gone = {**again.verdicts, ONE: replace(again.verdicts[ONE], disposition=NodeDisposition.GONE, is_final=True)}
    lost = roster.without_lost(replace(again, verdicts=gone))
    assert incident_of(lost).instance_ids == (ONE,), "it had come back to the job"


PREPARE, BLIND, EXCLUDE = (
    TIMEOUTS.prepare_deadline_seconds,
    TIMEOUTS.blind_wait_seconds,
    TIMEOUTS.exclude_seconds,
)
HELD = (slot(0, 9), slot(1, 9))


@pytest.mark.parametrize(
    ("slots", "silent", "waited", "is_given_up"),
    [
        pytest.param(HELD, True, PREPARE, False, id="silent: at its limit"),
        pytest.param(HELD, True, PREPARE + 1, True, id="silent: after its limit"),
        pytest.param(HELD, False, EXCLUDE, False, id="connected: at its limit"),
        pytest.param(HELD, False, EXCLUDE + 1, True, id="connected: after its limit"),
        pytest.param((), True, BLIND, False, id="silent with the only copy: at its limit"),
        pytest.param((), True, BLIND + 1, True, id="silent with the only copy: after its limit"),
        pytest.param((), False, BLIND + EXCLUDE, False, id="connected with the only copy: at its limit"),
        pytest.param((), False, BLIND + EXCLUDE + 1, True, id="connected with the only copy: after its limit"),
    ],
)
def test_how_long_a_job_waits_for_the_promise_of_a_member(
    slots: tuple[SlotRecord, ...], silent: bool, waited: float, is_given_up: bool
) -> None:
    view = preparing(
        node(ONE, promised(*slots)),
        node(TWO, silent_seconds=1e6 if silent else 0.0),
        record={"asked": ((TWO, NOW - waited),), "started_at": NOW},
    )
    found = roster.without_unreachable(view)
    assert excluded(found) == ([TWO] if is_given_up else [])
    for exclusion in found.record.exclusions:
        assert isinstance(exclusion.evidence, NotPrepared)
        how = Absence.LATE if not silent else Absence.SILENT if slots else Absence.UNREACHABLE
        assert (exclusion.evidence.how, exclusion.evidence.committed_step) == (how, None if slots else 9)
    blind = roster.without_unreachable(replace(view, seen=replace(view.seen, is_fleet_blind=True)))
    assert excluded(blind) == ([TWO] if is_given_up and not silent else [])


def test_members_with_the_only_copies_are_given_up_together() -> None:
    nodes = (node(ONE, silent_seconds=1e6), node(TWO, silent_seconds=1e6))
    for waited, found in ((BLIND, []), (BLIND + 1, [ONE, TWO])):
        asked = ((ONE, NOW - BLIND - 1), (TWO, NOW - waited))
        view = preparing(*nodes, record={"asked": asked, "started_at": NOW})
        assert excluded(roster.without_unreachable(view)) == found


def test_much_training_is_repeated_only_with_consent() -> None:
    view = preparing(
        node(ONE, promised()),
        node(TWO, silent_seconds=1e6),
        record={"asked": ((TWO, NOW - BLIND - 1),), "started_at": 0.0},
        spec={"max_repeated_minutes": 3},
    )
    found = roster.without_unreachable(view)
    assert excluded(found) == []
    assert found.record.repeat is not None


SOURCE = RefusedSource(rank=Rank(0), origin_generation=Generation(1), step=Step(9))


def failed_read(generation: int, *, is_mismatch: bool) -> FailedRead:
    return FailedRead(
        reader=TWO,
        generation=Generation(generation),
        at=100.0,
        source=SOURCE,
        is_mismatch=is_mismatch,
    )


@pytest.mark.parametrize(
    ("reads", "spares", "slots", "is_excluded", "is_skipped"),
    [
        pytest.param((failed_read(1, is_mismatch=True),), 1, HELD, True, False, id="wrong content and a spare"),
        pytest.param((failed_read(1, is_mismatch=True),), 0, HELD, False, False, id="wrong content without a spare"),
        pytest.param((failed_read(1, is_mismatch=False),), 1, HELD, False, False, id="unreachable once"),
        pytest.param(
            (failed_read(0, is_mismatch=False), failed_read(1, is_mismatch=False)), 0, HELD, True, False, id="twice"
        ),
        pytest.param(
            (failed_read(0, is_mismatch=True), failed_read(1, is_mismatch=True)),
            0,
            (slot(0, 9),),
            False,
            True,
            id="twice, and the job needs its memory",
        ),
        pytest.param(
            (failed_read(1, is_mismatch=True),), 1, (slot(0, 9),), False, False, id="once, and the job needs its memory"
        ),
    ],
)
def test_a_node_that_alone_fails_to_load_leaves_unless_its_memory_is_needed(
    reads: tuple[FailedRead, ...], spares: int, slots: tuple[SlotRecord, ...], is_excluded: bool, is_skipped: bool
) -> None:
    nodes = (node(ONE, promised(*slots)), node(TWO, promised(slot(1, 9))))
    view = preparing(*nodes, record={"failed_reads": reads}, spare_count=spares)
    found = roster.without_suspects(view)
    assert excluded(found) == [TWO] * is_excluded
    remedy = Remedy.REPLACE if len(reads) > 1 else Remedy.RETIRE
    assert [(each.remedy, each.may_terminate) for each in found.record.exclusions] == [
        (remedy, len(reads) > 1)
    ] * is_excluded
    assert bool(found.record.refused) is is_skipped
    assert [event.type for event in found.events] == ["StepSkipped"] * is_skipped
    again = roster.without_suspects(replace(found, events=()))
    assert again.events == (), "told once"
    late = preparing(nodes[0], node(TWO), record={"failed_reads": reads}, spare_count=spares)
    assert excluded(roster.without_suspects(late)) == [], "not before it has reported its shards"


def test_each_suspect_among_the_members_is_judged() -> None:
    """The first suspect has left the job, the second one is not due yet, and the third one is."""
    reads = (
        replace(failed_read(1, is_mismatch=True), reader=SPARE, source=replace(SOURCE, step=Step(11))),
        replace(failed_read(1, is_mismatch=False), reader=ONE, source=replace(SOURCE, step=Step(10))),
        failed_read(1, is_mismatch=True),
    )
    both = (node(ONE, promised(*HELD)), node(TWO, promised(*HELD)))
    found = roster.without_suspects(preparing(*both, record={"failed_reads": reads}, spare_count=1))
    assert excluded(found) == [TWO]


RETURNED = {"cause": Cause.RETURNED, "asked_at": NOW}
FAULTY = {"cause": Cause.NODE_FAULT}


@pytest.mark.parametrize(
    ("moves", "spares", "left"),
    [
        pytest.param((departure(TWO, asked_at=NOW),), 0, [TWO], id="aws reclaims it"),
        pytest.param((departure(TWO),), 0, [], id="aws reclaims it later"),
        pytest.param((departure(TWO, **RETURNED),), 0, [TWO], id="the job returns it"),
        pytest.param((departure(TWO, **FAULTY),), 0, [TWO], id="its fault would end the ranks again"),
        pytest.param((departure(TWO, asked_at=NOW, **FAULTY),), 0, [], id="a fault without a replacement"),
        pytest.param((departure(TWO, asked_at=NOW, **FAULTY),), 1, [TWO], id="a fault with a spare"),
        pytest.param((departure(TWO, asked_at=NOW, is_kept=True),), 1, [], id="kept before"),
        pytest.param((departure(TWO, asked_at=NOW, has_left=True),), 1, [], id="an earlier departure"),
        pytest.param((departure(SPARE, asked_at=NOW),), 1, [], id="no node of the job"),
    ],
)
def test_which_members_leave_as_planned(moves: tuple[Departure, ...], spares: int, left: list[NodeId]) -> None:
    both = (node(ONE, promised(*HELD)), node(TWO, promised(*HELD)))
    found = roster.without_departing(preparing(*both, record={"moves": moves}, spare_count=spares))
    assert excluded(found) == left
    assert incident_of(found).instance_ids == tuple(left)
    reduced = 1 if left and moves[0].is_returned else 0
    assert found.record.reduced_count == reduced
    late = (node(ONE), node(TWO, promised(*HELD)))
    assert excluded(roster.without_departing(preparing(*late, record={"moves": moves}, spare_count=spares))) == []


def test_a_member_that_leaves_need_not_promise_and_is_excluded_once() -> None:
    nodes = (node(ONE, promised(*HELD)), node(TWO))
    moves = (departure(TWO, asked_at=NOW),)
    view = preparing(*nodes, record={"moves": moves})
    assert excluded(roster.without_departing(view)) == [TWO]
    out = Exclusion(node_id=TWO, evidence=NOTHING, may_terminate=True)
    known = preparing(*nodes, record={"moves": moves, "exclusions": (out,)})
    assert excluded(roster.without_departing(known)) == [TWO]


@pytest.mark.parametrize(("is_excluded", "left"), [(False, [TWO]), (True, [])])
def test_a_node_that_the_last_plan_does_not_use_is_a_replacement(is_excluded: bool, left: list[NodeId]) -> None:
    nodes = (node(ONE, promised(*HELD)), node(TWO, promised(*HELD)), node(SPARE))
    out = (Exclusion(node_id=SPARE, evidence=NOTHING, may_terminate=True),) if is_excluded else ()
    moves = (departure(TWO, asked_at=NOW, **FAULTY),)
    found = roster.without_departing(preparing(*nodes, record={"moves": moves, "exclusions": out}))
    assert [each for each in excluded(found) if each != SPARE] == left


def test_of_two_members_with_the_only_copies_one_stays() -> None:
    both = (node(ONE, promised(*HELD)), node(TWO, promised(*HELD)))
    moves = (departure(ONE, asked_at=NOW), departure(TWO, asked_at=NOW))
    found = roster.without_departing(preparing(*both, record={"moves": moves}))
    assert excluded(found) == [ONE]
    assert [move.is_kept for move in found.record.moves] == [False, True]
    assert found.record.moves_after == NOW + BLIND
    assert [(event.type, event.message.node_ids) for event in found.events] == [("NodeKept", (TWO,))]
    assert NO_STEP < found.events[0].message.step < found.events[0].message.committed_step == 9
