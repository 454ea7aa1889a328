"""Tests single answers to what a running job reports (`core.job.watching`, `core.job.taken_over`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from control_plane.core.actions import Decision, Send
from control_plane.core.evidence import NodeDisposition, NodeVerdict
from control_plane.core.job.taken_over import observe_only
from control_plane.core.job.view import JobView
from control_plane.core.job.watching import watch
from control_plane.core.observed.facts import NOTHING
from control_plane.core.observed.jobs import Growth
from control_plane.core.observed.nodes import NodeObserved, Notice
from control_plane.core.observed.reasons import AwaitsFirstStep, JobFact, JobNote, Observes, Unclear
from control_plane.core.observed.rehearsals import Rehearsals
from control_plane.core.observed.specs import RehearsalMode
from control_plane.core.states import IncidentState, JobState
from everstep.protocol.agent_messages import (
    HaltRanks,
    MemberPhase,
    MemberReport,
    NodeFault,
    NoticeKind,
    Rehearse,
    TakeCheckpoint,
)
from everstep.protocol.ids import NO_STEP, Generation, NodeId, RunId, Step
from tests.unit.control_plane.core.test_job_view import (
    KILLED,
    NOW,
    ONE,
    SUCCESS,
    TWO,
    checkpoint,
    incident,
    made,
    report,
    rounds,
)
from tests.unit.control_plane.core.test_resizing import departure

RUNS = (report(0, round=rounds()), report(1))
DONE = tuple(report(rank, SUCCESS, phase=MemberPhase.EXITED) for rank in (0, 1))


def trains(
    record: dict[str, Any],
    members: tuple[MemberReport, ...] = RUNS,
    *,
    steps: tuple[int, ...] = (),
    nodes: dict[str, Any] | None = None,
    **changes: Any,
) -> JobView:
    """Return the view of a job that trains undisturbed. `nodes`: changes of both nodes' observations."""
    values = {"committed": Step(8), "boundary": Step(9), "stepped_at": NOW - 9, "progress_at": NOW - 1, **record}
    observed = {
        name: NodeObserved(
            node_id=name, is_connected=True, has_reported=True, member=member, **{"protocol_minor": 1, **(nodes or {})}
        )
        for name, member in zip((ONE, TWO), members, strict=True)
    }
    return made(values, *members, checkpoints=tuple(map(checkpoint, steps)), nodes=observed, **changes)


def sent(decision: Decision, kind: type) -> list[Any]:
    return [each.message for each in decision.actions if isinstance(each, Send) and isinstance(each.message, kind)]


@pytest.mark.parametrize(
    ("record", "steps", "members", "order"),
    [
        pytest.param({}, (), RUNS, None, id="nobody asks"),
        pytest.param({"checkpoint_wanted": Step(0)}, (), RUNS, (0, False), id="any step"),
        pytest.param({"checkpoint_wanted": Step(5)}, (4,), RUNS, (5, False), id="an older one is stored"),
        pytest.param({"checkpoint_wanted": Step(5)}, (5,), RUNS, None, id="stored"),
        pytest.param({"checkpoint_wanted": Step(5), "notice_wanted": Step(7)}, (5,), RUNS, (7, True), id="a notice"),
        pytest.param({"checkpoint_wanted": Step(7), "notice_wanted": Step(5)}, (5,), RUNS, (7, False), id="it is past"),
        pytest.param({"notice_wanted": Step(0)}, (), RUNS, (0, True), id="a notice before the first checkpoint"),
        pytest.param({"checkpoint_wanted": Step(5)}, (), (DONE[0], RUNS[1]), None, id="the coordinator has ended"),
    ],
)
def test_the_coordinator_is_asked_for_a_checkpoint_until_s3_has_it(
    record: dict[str, Any], steps: tuple[int, ...], members: tuple[MemberReport, ...], order: tuple[int, bool] | None
) -> None:
    found = sent(watch(trains(record, members, steps=steps)), TakeCheckpoint)
    assert [(each.step, each.ends_exports) for each in found] == ([] if order is None else [order])


SPOT = Notice(kind=NoticeKind.SPOT_INTERRUPTION, message="soon", ends_at=NOW + 1_000)


@pytest.mark.parametrize(
    ("record", "spec", "notices", "expected"),
    [
        pytest.param({}, {}, (SPOT,), ((ONE, TWO), 8), id="new"),
        pytest.param({"noticed": (ONE,)}, {}, (SPOT,), ((ONE, TWO), 8), id="one of two is new"),
        pytest.param({"noticed": (TWO, ONE)}, {}, (SPOT,), ((TWO, ONE), NO_STEP), id="known"),
        pytest.param({}, {"checkpoint_on_notice": False}, (SPOT,), ((), NO_STEP), id="not wanted"),
        pytest.param({"committed": Step(0)}, {}, (SPOT,), ((), NO_STEP), id="no step yet"),
        pytest.param({"committed": Step(1)}, {}, (SPOT,), ((ONE, TWO), 1), id="the first step"),
        pytest.param({"noticed": (ONE,)}, {}, (), ((), NO_STEP), id="no longer announced"),
    ],
)
def test_each_notice_asks_for_one_checkpoint(
    record: dict[str, Any], spec: dict[str, Any], notices: tuple[Notice, ...], expected: tuple[tuple[NodeId, ...], int]
) -> None:
    members = RUNS if record.get("committed", 8) == 8 else (report(0), report(1))
    found = watch(trains(record, members, spec=spec, nodes={"notices": notices})).record
    assert (found.noticed, found.notice_wanted) == expected


ASKED = {"rehearsal_requested_at": NOW - 5}


@pytest.mark.parametrize(
    ("record", "nodes", "ordered"),
    [
        pytest.param(ASKED, {}, True, id="asked"),
        pytest.param({}, {}, False, id="not asked"),
        pytest.param({**ASKED, "incident": incident(IncidentState.REWORKING)}, {}, False, id="in a recovery"),
        pytest.param({**ASKED, "growth": Growth(node_ids=(TWO,), since=NOW - 1)}, {}, True, id="growth is over"),
        pytest.param(ASKED, {"protocol_minor": 0}, False, id="an earlier release"),
        pytest.param(ASKED, {"protocol_minor": None}, False, id="an unknown release"),
    ],
)
def test_a_job_that_trains_undisturbed_is_ordered_to_rehearse(
    record: dict[str, Any], nodes: dict[str, Any], ordered: bool
) -> None:
    reached = {"incident": replace(record["incident"], reached_step=Step(50))} if "incident" in record else {}
    view = trains(
        {**record, **reached}, spec={"rehearsal_mode": RehearsalMode.ON, "rehearsal_at_step": 99}, nodes=nodes
    )
    found = watch(view)
    assert (found.record.rehearsal.is_open, found.record.rehearsal.number) == (ordered, int(ordered))
    is_refused = nodes.get("protocol_minor", 1) == 0
    assert (found.record.rehearsal.result is not None) is is_refused
    assert sent(found, Rehearse) == [], "the order is stored first"


@pytest.mark.parametrize("minors", [(1, 0), (0, None), (1, None)])
def test_every_agent_must_support_a_rehearsal(minors: tuple[int | None, int | None]) -> None:
    view = trains({}, spec={"rehearsal_mode": RehearsalMode.ON, "rehearsal_at_step": 1})
    assert watch(view).record.rehearsal.is_open
    nodes = {
        name: replace(view.nodes[name], protocol_minor=minor) for name, minor in zip((ONE, TWO), minors, strict=True)
    }
    found = watch(replace(view, nodes=nodes)).record.rehearsal
    assert (found.is_open, found.result) == (False, None), "nobody has asked, so nothing is refused"


OPEN = Rehearsals(number=3, generation=Generation(1), is_open=True)


@pytest.mark.parametrize(
    ("order", "status", "is_sent"),
    [
        pytest.param(OPEN, rounds(rehearsal_number=2), True, id="the coordinator does not have it"),
        pytest.param(OPEN, rounds(rehearsal_number=3), False, id="the coordinator has it"),
        pytest.param(replace(OPEN, is_open=False), rounds(), False, id="it is over"),
        pytest.param(replace(OPEN, generation=Generation(0)), rounds(), False, id="of an earlier generation"),
        pytest.param(OPEN, None, False, id="no report of the rounds"),
    ],
)
def test_a_stored_order_to_rehearse_is_sent_until_the_coordinator_has_it(
    order: Rehearsals, status: Any, is_sent: bool
) -> None:
    found = sent(watch(trains({"rehearsal": order}, (report(0, round=status), report(1)))), Rehearse)
    assert [each.number for each in found] == ([3] if is_sent else [])


@pytest.mark.parametrize(
    ("record", "unclear", "kind"),
    [
        pytest.param({}, False, JobFact.TRAINS, id="trains"),
        pytest.param({"boundary": Step(0), "committed": NO_STEP, "stepped_at": None}, False, AwaitsFirstStep, id="new"),
        pytest.param({}, True, Unclear, id="unclear"),
        pytest.param({"rehearsal": replace(OPEN, is_under_way=True)}, False, JobFact.REHEARSES, id="rehearses"),
        pytest.param({"moves": (departure(TWO, is_history=True),)}, False, JobFact.MOVES_OFF, id="a node is to leave"),
    ],
)
def test_a_running_job_says_what_it_does(record: dict[str, Any], unclear: bool, kind: object) -> None:
    begins = "stepped_at" in record
    members = (report(0, boundary=0), report(1, boundary=0)) if begins else RUNS
    if "rehearsal" in record:
        ranks = tuple(structs.replace(each, phase="rehearse") for each in RUNS[1].ranks)
        members = (RUNS[0], structs.replace(RUNS[1], ranks=ranks))
    view = trains(record, members)
    if unclear:
        doubt = NodeVerdict(node_id=TWO, disposition=NodeDisposition.UNCLEAR, evidence=NOTHING)
        view = replace(view, verdicts={**view.verdicts, TWO: doubt})
    reason = watch(view).record.reason
    assert reason.what is kind if isinstance(reason, JobNote) else type(reason) is kind
    if isinstance(reason, Unclear):
        assert isinstance(reason.doing, JobNote)
        assert (reason.doing.what, reason.silent, reason.because) == (JobFact.TRAINS, (), (NOTHING,))


@pytest.mark.parametrize(
    ("record", "members", "state"),
    [
        pytest.param({}, DONE, JobState.COMPLETED, id="all have finished"),
        pytest.param({}, (DONE[0], RUNS[1]), JobState.RUNNING, id="one runs"),
        pytest.param(
            {"moves": (departure(TWO, asked_at=1.0),)}, DONE, JobState.PREPARING, id="stopped to leave a node"
        ),
        pytest.param(
            {"growth": Growth(node_ids=(NodeId("i-2"),), since=1.0, asked_at=1.0)},
            DONE,
            JobState.PREPARING,
            id="to grow",
        ),
        pytest.param({"stop_requested_at": NOW}, RUNS, JobState.STOPPING, id="to stop"),
        pytest.param({"pause_requested_at": NOW}, RUNS, JobState.PAUSING, id="to pause"),
    ],
)
def test_ranks_that_have_finished_end_the_job_unless_they_stopped_on_request(
    record: dict[str, Any], members: tuple[MemberReport, ...], state: JobState
) -> None:
    assert watch(trains({"committed": Step(9), **record}, members, steps=(9,))).record.state is state


@pytest.mark.parametrize(
    ("record", "changes", "member", "halted"),
    [
        pytest.param({"state": JobState.RUNNING}, {}, {}, False, id="of the generation"),
        pytest.param({"state": JobState.RUNNING, "generation": Generation(2)}, {}, {}, True, id="of an earlier one"),
        pytest.param({"state": JobState.PREPARING}, {}, {}, True, id="while the next one is prepared"),
        pytest.param({"state": JobState.QUEUED}, {}, {}, True, id="while the job is queued"),
        pytest.param({"state": JobState.LOADING}, {}, {}, False, id="while it loads"),
        pytest.param({"state": JobState.QUEUED}, {"is_connected": False}, {}, False, id="not connected"),
        pytest.param({"state": JobState.QUEUED}, {}, {"run": RunId("b" * 32)}, False, id="of another job"),
        pytest.param({"state": JobState.QUEUED}, {}, {"phase": MemberPhase.EXITED}, False, id="ended"),
    ],
)
def test_ranks_of_an_old_generation_end_although_a_person_has_taken_over(
    record: dict[str, Any], changes: dict[str, Any], member: dict[str, Any], halted: bool
) -> None:
    second = structs.replace(report(1), **member)
    view = trains({"issued_generation": Generation(2), **record}, (RUNS[0], second))
    view = replace(view, nodes={TWO: replace(view.nodes[TWO], **changes)})
    assert len(sent(observe_only(view), HaltRanks)) == halted


@pytest.mark.parametrize(
    ("disposition", "members", "left_alone"),
    [
        pytest.param(NodeDisposition.ALIVE, RUNS, False, id="sound"),
        pytest.param(NodeDisposition.IMPAIRED, RUNS, True, id="a faulty node"),
        pytest.param(NodeDisposition.GONE, RUNS, True, id="a lost node"),
        pytest.param(NodeDisposition.ALIVE, (RUNS[0], report(1, KILLED)), True, id="a failed rank"),
    ],
)
def test_a_job_that_a_person_has_taken_over_says_what_everstep_leaves_alone(
    disposition: NodeDisposition, members: tuple[MemberReport, ...], left_alone: bool
) -> None:
    view = trains({"boundary": Step(5)}, members)
    view = replace(view, verdicts={TWO: NodeVerdict(node_id=TWO, disposition=disposition, evidence=NOTHING)})
    found = observe_only(view).record
    assert isinstance(found.reason, Observes)
    assert (found.left_alone, found.boundary) == (left_alone, 9)
    assert found.reason.impaired == ((TWO,) if disposition is NodeDisposition.IMPAIRED else ())
    assert found.reason.lost == ((TWO,) if disposition is NodeDisposition.GONE else ())
    assert len(found.reason.exits) == (members is not RUNS)


@pytest.mark.parametrize(("boundary", "has_failed"), [(0, True), (1, False)])
def test_one_permanent_fault_ends_a_job_only_before_its_first_step(boundary: int, has_failed: bool) -> None:
    fault = NodeFault(code="bad_source", message="no such file", is_permanent=True)
    members = (report(0, boundary=boundary, faults=(fault,)), report(1, boundary=boundary))
    record = {"boundary": Step(0), "committed": NO_STEP, "stepped_at": None}
    assert (watch(trains(record, members)).record.state is JobState.FAILED) is has_failed
