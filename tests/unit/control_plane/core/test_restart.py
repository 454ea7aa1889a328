"""Tests how a generation ends, and what a job records about lost nodes (`core.job.restart`, `core.job.losses`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from control_plane.core.evidence import NodeDisposition, NodeVerdict
from control_plane.core.incidents import Fault
from control_plane.core.job import losses, restart
from control_plane.core.job.view import JobView
from control_plane.core.observed.facts import NOTHING, Recorded
from control_plane.core.observed.incidents import FailureRecord, LeavesNodes, RestartsRanks
from control_plane.core.observed.jobs import Exclusion
from control_plane.core.observed.nodes import Cause, Implication, Remedy
from control_plane.core.remedies import LEMON_INCIDENTS
from control_plane.core.states import IncidentState, JobState
from everstep.protocol.agent_messages import ExitClass, FaultCode, MemberPhase, MemberReport, NodeFault, Obstacle
from everstep.protocol.ids import Generation, NodeId, Step
from everstep.protocol.plan import ObjectReference, ShardSource
from tests.unit.control_plane.core.test_job_view import NOW, ONE, SUCCESS, TWO, checkpoint, incident, made, report
from tests.unit.control_plane.core.test_resizing import departure
from tests.unit.worker.rank_plans import rank_plan

SPARE = NodeId("i-2")
RUNS = (report(0), report(1))
STOPPED = (report(0, SUCCESS), report(1, SUCCESS))
EXIT = Fault(cause=Cause.RANK_EXIT, evidence=Recorded(text="exit"), at=NOW, seen_on=(ONE,))
LOST = Fault(cause=Cause.AGENT_LOST, evidence=Recorded(text="lost"), at=NOW, node_id=TWO)
LEFT = Fault(cause=Cause.REQUESTED, evidence=Recorded(text="left"), at=NOW, node_id=TWO)
FAILURE = FailureRecord(
    generation=Generation(1), step=Step(9), exit_class=ExitClass.ERROR, code=1, at=NOW, max_boundary=Step(9)
)
BLOCKED = NodeFault(code=FaultCode.SOURCE_UNAVAILABLE, message="denied", is_permanent=False, obstacle=Obstacle.DENIED)


@pytest.mark.parametrize(("issued", "reported", "expected"), [(4, 1, 5), (4, 7, 8), (4, 4, 5)])
def test_a_new_generation_has_a_number_that_no_earlier_one_had(issued: int, reported: int, expected: int) -> None:
    member = structs.replace(report(0), generation=Generation(reported))
    view = made({"issued_generation": Generation(issued)}, member)
    assert restart.start_new_generation(view, (EXIT,), None).record.issued_generation == expected


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        pytest.param({"boundary": Step(5), "max_boundary": Step(6)}, (9, 9), id="the reports are newer"),
        pytest.param({"boundary": Step(12), "max_boundary": Step(20)}, (12, 20), id="the record is newer"),
    ],
)
def test_the_end_of_a_generation_keeps_the_newest_finished_step(
    record: dict[str, Any], expected: tuple[int, int]
) -> None:
    after = restart.start_new_generation(made(record, *RUNS), (EXIT,), None).record
    assert after.incident is not None
    assert ((after.boundary, after.max_boundary), after.incident.reached_step) == (expected, expected[0])


@pytest.mark.parametrize(
    ("state", "members", "cause", "ended", "excluded"),
    [
        pytest.param(JobState.RUNNING, STOPPED, Cause.NOTICE, False, [TWO], id="stopped for an announced end"),
        pytest.param(JobState.RUNNING, STOPPED, Cause.NOTICE, True, [TWO], id="and ended"),
        pytest.param(JobState.RUNNING, RUNS, Cause.NOTICE, False, [], id="not stopped"),
        pytest.param(JobState.STARTING, STOPPED, Cause.NOTICE, False, [], id="not running yet"),
        pytest.param(JobState.RUNNING, STOPPED, Cause.NODE_FAULT, False, [], id="stopped for a fault"),
    ],
)
def test_a_node_whose_end_is_announced_is_excluded_after_an_agreed_stop(
    state: JobState, members: tuple[MemberReport, ...], cause: Cause, ended: bool, excluded: list[NodeId]
) -> None:
    view = made({"state": state, "moves": (departure(TWO, cause, asked_at=1.0),)}, *members)
    if ended:
        gone = NodeVerdict(node_id=TWO, disposition=NodeDisposition.GONE, is_final=True)
        view = replace(view, verdicts={**view.verdicts, TWO: gone})
    after = restart.start_new_generation(view, (EXIT,), None).record
    assert [each.node_id for each in after.exclusions] == excluded


FAILED_LOAD = replace(EXIT, cause=Cause.LOAD_FAILED)


@pytest.mark.parametrize(
    ("found", "members", "is_counted"),
    [
        pytest.param((EXIT,), RUNS, True, id="a rank"),
        pytest.param((EXIT, LEFT), RUNS, True, id="a rank, as a node leaves"),
        pytest.param((EXIT, LOST), RUNS, False, id="a rank, and a lost node"),
        pytest.param((FAILED_LOAD,), RUNS, True, id="a load"),
        pytest.param(
            (FAILED_LOAD,),
            (report(0, phase=MemberPhase.LOAD_FAILED, faults=(BLOCKED,)),),
            False,
            id="S3 is out of reach",
        ),
        pytest.param(
            (FAILED_LOAD, EXIT),
            (report(0, phase=MemberPhase.LOAD_FAILED, faults=(BLOCKED,)),),
            True,
            id="S3 is out of reach, and a rank failed",
        ),
        pytest.param(
            (EXIT,), (report(0, phase=MemberPhase.LOADING, faults=(BLOCKED,)),), False, id="a rank waits for a load"
        ),
    ],
)
def test_only_a_failure_of_the_jobs_own_making_counts_against_it(
    found: tuple[Fault, ...], members: tuple[MemberReport, ...], is_counted: bool
) -> None:
    after = restart.start_new_generation(made({}, *members), found, FAILURE).record
    assert after.failures == ((FAILURE,) if is_counted else ())


def test_ranks_that_run_are_killed_for_the_first_fault() -> None:
    decision = restart.start_new_generation(
        made({}, report(0), report(1, phase=MemberPhase.EXITED)), (LOST, EXIT), None
    )
    assert [getattr(action, "node_id", None) for action in decision.actions] == [ONE]
    assert decision.events[0].node_id == TWO


@pytest.mark.parametrize(
    ("before", "at", "expected"),
    [
        pytest.param(None, NOW - 3, 94_000_000, id="a new incident, noticed after 3 s"),
        pytest.param(IncidentState.REWORKING, NOW - 3, 94_000_000, id="a new incident after an earlier one"),
        pytest.param(IncidentState.RESTORING, NOW - 3, None, id="the open incident"),
    ],
)
def test_a_new_incident_costs_node_time_from_its_failure_on(
    before: IncidentState | None, at: float, expected: int | None
) -> None:
    record = {
        "node_microseconds": 100_000_000,
        "node_count": 2,
        "incident": None if before is None else incident(before),
    }
    view, closed = restart.with_incident(made(record), (replace(EXIT, at=at),), Step(9))
    assert view.record.incident is not None
    assert view.record.incident.node_microseconds_before == (
        incident(IncidentState.RESTORING).node_microseconds_before if expected is None else expected
    )
    assert len(closed) == (before is IncidentState.REWORKING)


@pytest.mark.parametrize(
    ("record", "earliest"),
    [
        pytest.param({}, 9_000.0, id="the creation"),
        pytest.param({"started_at": 9_100.0}, 9_100.0, id="the first start"),
        pytest.param({"started_at": 9_100.0, "last_incident_ended_at": NOW - 5}, NOW - 5, id="the last incident"),
        pytest.param({"incident": incident(IncidentState.REWORKING)}, NOW - 1, id="the end of the reworking incident"),
    ],
)
def test_an_incident_begins_after_the_incident_before_it(record: dict[str, Any], earliest: float) -> None:
    view, _ = restart.with_incident(made(record), (replace(EXIT, at=NOW - 1),), Step(9))
    assert view.record.incident is not None
    assert view.record.incident.earliest_failure_at == earliest


@pytest.mark.parametrize(
    ("fault", "cause", "expected"),
    [
        pytest.param(LOST, Cause.RANK_EXIT, Cause.GROUP_LOST, id="lost"),
        pytest.param(LEFT, Cause.NOTICE, Cause.REQUESTED, id="left as planned"),
        pytest.param(LEFT, Cause.RANK_EXIT, Cause.GROUP_LOST, id="left in a failure"),
    ],
)
def test_a_further_lost_node_can_take_the_last_copy_of_a_shard(fault: Fault, cause: Cause, expected: Cause) -> None:
    """Each node of the plan is the only holder of its shard."""
    opened = replace(incident(IncidentState.RESTORING), cause=cause)
    view, _ = restart.with_incident(made({"incident": opened}), (fault,), Step(9))
    assert view.record.incident is not None
    assert view.record.incident.cause is expected
    assert restart.with_incident(made({"incident": opened}, plan=None), (fault,), Step(9))[0].record.incident


GONE = NodeVerdict(node_id=TWO, disposition=NodeDisposition.GONE, evidence=NOTHING, cause=Cause.INSTANCE_TERMINATED)


@pytest.mark.parametrize(
    ("view", "node", "lost"),
    [
        pytest.param(made(), TWO, [TWO], id="a member"),
        pytest.param(made(), SPARE, [], id="not in the plan"),
        pytest.param(made(plan=None), TWO, [], id="no plan"),
    ],
)
def test_only_a_member_of_the_newest_plan_is_lost(view: JobView, node: NodeId, lost: list[NodeId]) -> None:
    assert [fault.node_id for fault in losses.loss_faults(view, replace(GONE, node_id=node))] == lost


@pytest.mark.parametrize(
    ("fresh", "known", "decision", "is_forgiven"),
    [
        pytest.param((LOST,), (), RestartsRanks(replaced=(TWO,)), True, id="lost"),
        pytest.param((LEFT,), (), RestartsRanks(), False, id="left as planned"),
        pytest.param((LEFT,), (NOTHING,), RestartsRanks(replaced=(TWO,)), False, id="left in a failure"),
        pytest.param(
            (LEFT, replace(LOST, node_id=ONE)), (), RestartsRanks(replaced=(TWO, ONE)), True, id="one left, one lost"
        ),
    ],
)
def test_lost_nodes_change_the_response_unless_all_left_as_planned(
    fresh: tuple[Fault, ...], known: tuple[Any, ...], decision: object, is_forgiven: bool
) -> None:
    opened = replace(incident(IncidentState.REPLACING), evidence=known)
    moves = (replace(departure(TWO, Cause.REQUESTED, asked_at=1.0), evidence=LEFT.evidence),)
    view = losses.with_losses(made({"incident": opened, "moves": moves, "failures": (FAILURE,)}), fresh)
    assert view.record.incident is not None
    assert view.record.incident.decision == decision
    assert view.record.failures == (() if is_forgiven else (FAILURE,))


def test_a_lost_group_of_a_drill_stays_a_drill() -> None:
    plan = made().plan
    opened = replace(incident(IncidentState.REPLACING), instance_ids=(TWO,))
    assert losses.with_group_loss(opened, plan).cause is Cause.GROUP_LOST
    assert losses.with_group_loss(replace(opened, cause=Cause.DRILL), plan).cause is Cause.DRILL


def implicated(number: int, node_id: NodeId = TWO, **changes: Any) -> Implication:
    values = {"at": NOW, "what": "x", "evidence": NOTHING, "remedy": Remedy.HOLD, **changes}
    return Implication(node_id=node_id, incident_id=f"inc-{number}", **values)


@pytest.mark.parametrize(
    ("record", "earlier", "moves"),
    [
        pytest.param({}, LEMON_INCIDENTS - 2, 0, id="too few incidents"),
        pytest.param({}, LEMON_INCIDENTS - 1, 1, id="a lemon"),
        pytest.param({"moves": (departure(TWO),)}, LEMON_INCIDENTS - 1, 1, id="leaves already"),
        pytest.param({"moves": (departure(TWO, has_left=True),)}, LEMON_INCIDENTS - 1, 2, id="left and returned"),
        pytest.param(
            {"exclusions": (Exclusion(node_id=TWO, evidence=NOTHING, may_terminate=False),)},
            LEMON_INCIDENTS - 1,
            0,
            id="excluded",
        ),
    ],
)
@pytest.mark.parametrize("is_own_word", [False, True])
def test_a_node_of_too_many_incidents_leaves_once(
    record: dict[str, Any], earlier: int, moves: int, is_own_word: bool
) -> None:
    view = made(record)
    history = tuple(implicated(number) for number in range(5, 5 + earlier))
    view = replace(view, nodes={**view.nodes, TWO: replace(view.nodes[TWO], history=history)})
    twice = tuple(replace(EXIT, implicates=implicated(9, is_own_word=is_own_word)) for _ in range(2))
    found = losses.with_implications(view, twice, incident(IncidentState.REPLACING))
    assert [line.incident_id for line in found.implications] == ["inc-1", "inc-1"]
    assert len(found.record.moves) == moves
    fresh = [move for move in found.record.moves if move.is_history]
    assert all(move.may_terminate is is_own_word for move in fresh)
    assert len(fresh) == moves - len(record.get("moves", ()))


def test_a_history_of_an_unknown_node_begins_with_its_first_fault() -> None:
    found = losses.with_implications(
        made(), (replace(EXIT, implicates=implicated(9, SPARE)), EXIT), incident(IncidentState.REPLACING)
    )
    assert [line.node_id for line in found.implications] == [SPARE]


@pytest.mark.parametrize(
    ("changes", "known", "seen_on"),
    [
        pytest.param({}, (EXIT,), [ONE], id="a fault of a member"),
        pytest.param({}, (replace(LOST, node_id=ONE),), [], id="the fault is known"),
        pytest.param({"disposition": NodeDisposition.GONE}, (EXIT,), [], id="the member is lost"),
        pytest.param({"may_terminate": False}, (EXIT,), [], id="a fault that may pass"),
        pytest.param({"node_id": TWO}, (EXIT,), [], id="no report"),
    ],
)
def test_faults_that_members_report_may_have_caused_the_incident(
    changes: dict[str, Any], known: tuple[Fault, ...], seen_on: list[NodeId]
) -> None:
    values = {"node_id": ONE, "disposition": NodeDisposition.IMPAIRED, "cause": Cause.NODE_FAULT, "may_terminate": True}
    verdict = NodeVerdict(evidence=NOTHING, **{**values, **changes})
    view = replace(made({}, report(0)), verdicts={verdict.node_id: verdict})
    assert [fault.seen_on for fault in losses.reported_besides(view, known)] == [(node,) for node in seen_on]


@pytest.mark.parametrize(
    ("record", "node", "moves", "excluded"),
    [
        pytest.param({}, TWO, [TWO], [], id="a member leaves after a stop"),
        pytest.param({}, SPARE, [], [SPARE], id="a node without ranks leaves at once"),
        pytest.param(
            {"exclusions": (Exclusion(node_id=SPARE, evidence=NOTHING, may_terminate=False),)},
            SPARE,
            [],
            [SPARE],
            id="and only once",
        ),
    ],
)
def test_an_unusable_node_without_ranks_leaves_at_once(
    record: dict[str, Any], node: NodeId, moves: list[NodeId], excluded: list[NodeId]
) -> None:
    view = made(record, *RUNS, assigned=(ONE, TWO, SPARE))
    verdict = NodeVerdict(node_id=node, disposition=NodeDisposition.IMPAIRED, evidence=NOTHING, cause=Cause.NODE_FAULT)
    found = losses.with_departures(replace(view, verdicts={**view.verdicts, node: verdict})).record
    assert [move.node_id for move in found.moves] == moves
    assert [each.node_id for each in found.exclusions] == excluded


def test_the_response_to_a_planned_departure_names_the_nodes_that_left() -> None:
    assert losses.response(Cause.RETURNED, (TWO,)) == LeavesNodes(node_ids=(TWO,), is_return=True)
    assert losses.response(Cause.REQUESTED, (TWO,)) == LeavesNodes(node_ids=(TWO,), is_return=False)
    assert losses.response(Cause.REQUESTED, ()) == RestartsRanks()
    assert losses.response(Cause.AGENT_LOST, (TWO,)) == RestartsRanks(replaced=(TWO,))


@pytest.mark.parametrize(
    ("remedy", "with_proof", "without"),
    [
        (None, Remedy.REPLACE, Remedy.HOLD),
        (Remedy.REBOOT, Remedy.REBOOT, Remedy.HOLD),
        (Remedy.RELEASE, Remedy.RELEASE, Remedy.RELEASE),
        (Remedy.RETIRE, Remedy.RETIRE, Remedy.RETIRE),
    ],
)
def test_only_a_proof_permits_the_fleet_to_end_or_reboot_a_node(
    remedy: Remedy | None, with_proof: Remedy, without: Remedy
) -> None:
    for may_terminate, expected in ((True, with_proof), (False, without)):
        given = Exclusion(node_id=TWO, evidence=NOTHING, may_terminate=may_terminate, remedy=remedy)
        assert given.is_to is expected


@pytest.mark.parametrize(
    ("readers", "kind", "named"),
    [
        pytest.param((ONE,), "CheckpointDoubted", ONE, id="one reader"),
        pytest.param((ONE, TWO), "CheckpointDamaged", None, id="two readers"),
    ],
)
def test_nodes_that_read_wrong_content_doubt_the_checkpoint_once(
    readers: tuple[NodeId, ...], kind: str, named: NodeId | None
) -> None:
    stored = checkpoint(9)
    keyed = replace(stored, shards=tuple(structs.replace(each, key=f"k{each.rank}") for each in stored.shards))
    plan = rank_plan(addresses=("a", "b"))
    sources = tuple(
        ShardSource(
            kind="s3",
            origin_generation=Generation(1),
            step=Step(9),
            digest=bytes(16),
            payload_bytes=1,
            object=ObjectReference(bucket="b", key=each.key),
        )
        for each in keyed.shards
    )
    ranks = tuple(structs.replace(rank, sources=(source,)) for rank, source in zip(plan.ranks, sources, strict=True))
    wrong = NodeFault(code=FaultCode.SOURCE_MISMATCH, message="", is_permanent=False)
    members = tuple(
        report(rank, phase=MemberPhase.LOAD_FAILED, faults=(wrong,)) if node in readers else report(rank)
        for rank, node in enumerate((ONE, TWO))
    )
    view = made({}, *members, checkpoints=(keyed,), plan=structs.replace(plan, ranks=ranks))
    found = restart.start_new_generation(view, (FAILED_LOAD,), None)
    assert [each.readers for each in found.doubted] == [readers]
    assert [(event.type, event.node_id) for event in found.events if "Checkpoint" in event.type] == [(kind, named)]
    again = replace(view, record=replace(view.record, failed_reads=found.record.failed_reads))
    assert restart.start_new_generation(again, (FAILED_LOAD,), None).doubted == ()


UNREACHABLE = replace(LOST, cause=Cause.NODE_UNREACHABLE, implicates=implicated(9))


@pytest.mark.parametrize(
    ("found", "base", "counted", "lines"),
    [
        pytest.param((UNREACHABLE,), 9, 1, 0, id="without a new step"),
        pytest.param((replace(UNREACHABLE, cause=Cause.AGENT_LOST),), 9, 1, 0, id="an agent that began anew"),
        pytest.param((UNREACHABLE, UNREACHABLE), 9, 1, 0, id="two nodes at once"),
        pytest.param((UNREACHABLE,), 8, 1, 1, id="after a new step"),
        pytest.param((UNREACHABLE, replace(EXIT, implicates=implicated(9, ONE))), 9, 1, 1, id="another fault too"),
        pytest.param((replace(LOST, cause=Cause.NODE_UNREACHABLE),), 9, 0, 0, id="a node that may still join"),
        pytest.param((UNREACHABLE, replace(LOST, cause=Cause.NODE_FAULT)), 9, 0, 1, id="beside a faulty node"),
        pytest.param((UNREACHABLE, replace(LOST, cause=Cause.INSTANCE_TERMINATED)), 9, 0, 1, id="beside an ended one"),
        pytest.param((replace(UNREACHABLE, cause=Cause.DRILL),), 9, 0, 1, id="a drill"),
    ],
)
def test_an_unexplained_loss_without_a_new_step_counts_against_the_job(
    found: tuple[Fault, ...], base: int, counted: int, lines: int
) -> None:
    view = made({"boundary": Step(9), "max_boundary": Step(9)})
    assert view.seen.plan is not None
    view = replace(view, seen=replace(view.seen, plan=structs.replace(view.seen.plan, base_step=Step(base))))
    after = losses.with_implications(view, found, incident(IncidentState.REPLACING))
    assert (len(after.record.failures), len(after.implications)) == (counted, lines)
    again = losses.with_implications(after, found, incident(IncidentState.REPLACING))
    assert again.record.failures == after.record.failures, "one loss per generation"
