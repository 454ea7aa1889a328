"""Tests the facts that decisions about a job read from agents' reports and the job's record (`core.job.view`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from control_plane.core.evidence import NodeDisposition
from control_plane.core.job import view
from control_plane.core.observed.facts import NOTHING
from control_plane.core.observed.incidents import IncidentRecord, RestartsRanks
from control_plane.core.observed.jobs import (
    CapacityWait,
    Departure,
    Exclusion,
    FailedLaunches,
    Impairment,
    JobObserved,
    JobRecord,
)
from control_plane.core.observed.nodes import Cause, Implication, NodeObserved, Remedy
from control_plane.core.observed.reasons import JobFact, JobNote
from control_plane.core.observed.rehearsals import Rehearsals
from control_plane.core.observed.specs import Policy
from control_plane.core.observed.steps import CheckpointRecord, GenerationRecord
from control_plane.core.states import IncidentState, JobState
from control_plane.core.timeouts import ladder
from everstep.protocol.agent_messages import (
    ExitClass,
    MemberPhase,
    MemberReport,
    NodeFault,
    RankExit,
    RankStatus,
    RoundStatus,
)
from everstep.protocol.ids import FIRST_STEP, NO_STEP, Generation, NodeId, Rank, Step
from everstep.protocol.manifest import ManifestShard
from tests.unit.control_plane.core.cluster import spec_of
from tests.unit.protocol.test_codec import example
from tests.unit.worker.rank_plans import RUN, rank_plan

NOW = 10_000.0
POLICY = Policy(timeouts=ladder(3.0))
SPEC = replace(spec_of("job", "ab", 2, 2), run=RUN)
ONE, TWO = NodeId("i-0"), NodeId("i-1")
FIRST = GenerationRecord(
    generation=Generation(1), parent=Generation(0), base_step=FIRST_STEP, world_size=2, was_started=True
)
SUCCESS = RankExit(exit_class=ExitClass.SUCCESS, code=0, at_seconds=NOW, boundary=Step(9))
KILLED = structs.replace(SUCCESS, exit_class=ExitClass.KILLED)


def made(
    record: dict[str, Any] | None = None, *members: MemberReport, spec: dict[str, Any] | None = None, **changes: Any
) -> view.JobView:
    """Return the view of a running job of two nodes, whose agents have sent these reports."""
    values = {"state": JobState.RUNNING, "created_at": 9_000.0, "state_since": 9_000.0, **(record or {})}
    told = [*members, *[None] * (2 - len(members))]
    nodes = {
        node_id: NodeObserved(node_id=node_id, is_connected=True, has_reported=member is not None, member=member)
        for node_id, member in zip((ONE, TWO), told, strict=True)
    }
    observed: dict[str, Any] = {
        "record": JobRecord(**{"generation": Generation(1), **values}),
        "plan": rank_plan(addresses=("a", "b")),
        "lineage": (FIRST,),
        "checkpoints": (),
        "assigned": (ONE, TWO),
        "nodes": nodes,
    }
    seen = JobObserved(**{**observed, **changes})
    return view.view_of(NOW, replace(SPEC, **(spec or {})), seen, POLICY, seen.record)


def report(
    rank: int,
    ended: RankExit | None = None,
    *,
    boundary: int = 9,
    phase: MemberPhase = MemberPhase.RUNNING,
    limit: float = 0.0,
    **more: Any,
) -> MemberReport:
    """Return the report of a member with one rank, in a phase that may last `limit` seconds."""
    status = RankStatus(rank=Rank(rank), boundary=Step(boundary), exit=ended, limit_seconds=limit)
    return MemberReport(job=SPEC.job, run=RUN, generation=Generation(1), phase=phase, ranks=(status,), **more)


def rounds(**changes: Any) -> RoundStatus:
    values = {"committed": Step(8), "proposed": Step(9), "boundary": Step(9), "committed_at_seconds": NOW, **changes}
    return RoundStatus(**values)


def incident(state: IncidentState) -> IncidentRecord:
    return IncidentRecord(
        id="inc-1",
        state=state,
        cause=Cause.RANK_EXIT,
        evidence=(NOTHING,),
        decision=RestartsRanks(),
        generation_before=Generation(1),
        failed_at=NOW - 60,
        opened_at=NOW - 59,
        reached_step=Step(7),
    )


@pytest.mark.parametrize(
    ("record", "is_wanted"),
    [
        pytest.param({}, False, id="nobody asks"),
        pytest.param({"pause_requested_at": NOW}, True, id="a person asks"),
        pytest.param(
            {"pause_requested_at": NOW, "no_pause_before": NOW + 1}, False, id="too soon after a failed pause"
        ),
        pytest.param({"pause_requested_at": NOW, "no_pause_before": NOW}, True, id="at the earliest time"),
        pytest.param(
            {"pause_requested_at": NOW, "incident": incident(IncidentState.RESTORING)}, False, id="not in a restore"
        ),
        pytest.param(
            {"pause_requested_at": NOW, "incident": incident(IncidentState.REWORKING)}, True, id="while steps repeat"
        ),
    ],
)
def test_a_job_pauses_for_a_person_once_it_trains(record: dict[str, Any], is_wanted: bool) -> None:
    assert made(record).wants_pause == (JobNote(what=JobFact.PAUSES_FOR_USER) if is_wanted else None)
    forced = made(record, gives_way_to="bert").wants_pause
    assert forced == JobNote(what=JobFact.PAUSES_FOR_JOB, name="bert"), "a job of higher priority waits for nothing"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({}, None),
        ({"stop_requested_at": NOW}, JobNote(what=JobFact.USER_ASKS_TO_STOP)),
        ({"stop_reason": "found"}, "found"),
        ({"stop_requested_at": NOW, "stop_reason": "found"}, "found"),
    ],
)
def test_a_job_stops_for_its_own_reason_before_that_of_a_person(record: dict[str, Any], reason: object) -> None:
    assert made(record).wants_stop == reason


QUEUED, ALLOCATING = {"state": JobState.QUEUED}, {"state": JobState.ALLOCATING}


@pytest.mark.parametrize(
    ("record", "spec", "reached"),
    [
        pytest.param({"started_at": 9_100.0}, {"max_runtime_seconds": 900.0}, None, id="at the runtime"),
        pytest.param({"started_at": 9_099.0}, {"max_runtime_seconds": 900.0}, JobFact.MAX_RUNTIME_OVER, id="after it"),
        pytest.param({}, {"max_runtime_seconds": 1.0}, None, id="no runtime before the start"),
        pytest.param(
            {"started_at": 9_050.0, "microseconds": {"paused": 50_000_000}},
            {"max_runtime_seconds": 900.0},
            None,
            id="paused time is no runtime",
        ),
        pytest.param(QUEUED, {"max_pending_seconds": 1_000.0}, None, id="at the pending time"),
        pytest.param(QUEUED, {"max_pending_seconds": 999.0}, JobFact.MAX_PENDING_TIME_OVER, id="after it"),
        pytest.param(
            ALLOCATING, {"max_pending_seconds": 999.0}, JobFact.MAX_PENDING_TIME_OVER, id="while nodes are launched"
        ),
        pytest.param({}, {"max_pending_seconds": 1.0}, None, id="a running job is not pending"),
        pytest.param({**QUEUED, "started_at": 9_500.0}, {"max_pending_seconds": 1.0}, None, id="not after the start"),
        pytest.param(
            {**QUEUED, "microseconds": {"paused": 2_000_000}}, {"max_pending_seconds": 998.0}, None, id="paused"
        ),
        pytest.param(
            {"node_microseconds": 3_600_000_000}, {"max_cost_usd": 5.0}, JobFact.MAX_COST_SPENT, id="one hour of a node"
        ),
        pytest.param({"node_microseconds": 3_599_000_000}, {"max_cost_usd": 5.0}, None, id="less than one hour"),
    ],
)
def test_a_job_stops_at_its_limits(record: dict[str, Any], spec: dict[str, Any], reached: JobFact | None) -> None:
    found = made(record, spec=spec, price_usd_per_hour=5.0).record.stop_reason
    assert found == (None if reached is None else JobNote(what=reached, limit=next(iter(spec.values()))))
    assert made({**record, "stop_reason": "first"}, spec=spec, price_usd_per_hour=5.0).record.stop_reason == "first"


def test_every_node_has_its_ranks() -> None:
    assert replace(SPEC, node_count=3, ranks_per_node=4).world_size == 12


def test_a_cost_without_a_price_is_no_limit() -> None:
    assert made({"node_microseconds": 10**15}, spec={"max_cost_usd": 5.0}).record.stop_reason is None


@pytest.mark.parametrize(
    ("members", "is_over", "has_agreed", "have_succeeded", "step"),
    [
        pytest.param((), False, False, False, NO_STEP, id="no report"),
        pytest.param((report(0), report(1, boundary=8)), False, False, False, 8, id="running"),
        pytest.param((report(0, SUCCESS),), False, False, False, NO_STEP, id="one report is missing"),
        pytest.param((report(0, SUCCESS), report(1)), False, False, False, 9, id="one rank runs"),
        pytest.param((report(0, SUCCESS), report(1, KILLED)), False, False, False, 9, id="one was killed"),
        pytest.param((report(0, SUCCESS), report(1, SUCCESS)), True, True, True, 9, id="all succeeded"),
        pytest.param((report(0, round=rounds(finished=True)), report(1)), True, False, False, 9, id="the script's end"),
        pytest.param(
            (report(0, round=rounds(finished=True, stopped=True)), report(1)), True, True, False, 9, id="agreed stop"
        ),
        pytest.param((report(0, round=rounds(stopped=True)), report(1)), False, False, False, 9, id="not finished yet"),
        pytest.param(
            (report(0, SUCCESS, round=rounds(finished=True)), report(1, SUCCESS)),
            True,
            False,
            True,
            9,
            id="finished by itself",
        ),
    ],
)
def test_when_training_is_over(
    members: tuple[MemberReport, ...], is_over: bool, has_agreed: bool, have_succeeded: bool, step: int
) -> None:
    seen = made({}, *members)
    assert view.is_training_over(seen.reports, 2) is is_over
    assert view.has_agreed_stop(seen) is has_agreed
    assert view.have_all_succeeded(seen.reports, 2) is have_succeeded
    assert view.passed_by_all(seen) == step


@pytest.mark.parametrize(
    ("member", "has_finished"),
    [
        (None, False),
        (report(0, SUCCESS), False),
        (report(0, SUCCESS, phase=MemberPhase.EXITED), True),
        (report(0, KILLED, phase=MemberPhase.EXITED), False),
        (report(0, phase=MemberPhase.EXITED), False),
        (structs.replace(report(0, phase=MemberPhase.EXITED), ranks=()), False),
    ],
)
def test_a_member_has_finished_with_the_success_of_all_its_ranks(
    member: MemberReport | None, has_finished: bool
) -> None:
    assert view.has_finished(made({}, *([] if member is None else [member])), ONE) is has_finished


def test_a_member_has_not_finished_before_its_last_rank() -> None:
    (status,) = report(0, SUCCESS).ranks
    both = structs.replace(report(0, phase=MemberPhase.EXITED), ranks=(status, structs.replace(status, exit=KILLED)))
    assert not view.has_finished(made({}, both, spec={"ranks_per_node": 2}), ONE)
    both = structs.replace(both, ranks=(status, status))
    assert view.has_finished(made({}, both, spec={"ranks_per_node": 2}), ONE)


def test_a_phase_is_that_of_a_connected_member() -> None:
    seen = made({}, report(0))
    assert view.is_in_phase(seen, ONE, MemberPhase.LOADED, MemberPhase.RUNNING)
    assert not view.is_in_phase(seen, ONE, MemberPhase.LOADED)
    assert not view.is_in_phase(seen, TWO, MemberPhase.RUNNING)
    cut = replace(seen, nodes={ONE: replace(seen.nodes[ONE], is_connected=False)})
    assert not view.is_in_phase(cut, ONE, MemberPhase.RUNNING)


def checkpoint(step: int) -> CheckpointRecord:
    shards = tuple(
        ManifestShard(
            rank=Rank(rank),
            key="k",
            object_bytes=1,
            etag="",
            payload_bytes=1,
            payload_digest="",
            layout_hash="",
            origin_generation=Generation(1),
        )
        for rank in range(2)
    )
    return CheckpointRecord(generation=Generation(1), step=Step(step), bucket="b", shards=shards)


@pytest.mark.parametrize(
    ("committed", "steps", "durable", "lacks"),
    [
        (NO_STEP, (), NO_STEP, False),
        (FIRST_STEP, (), NO_STEP, False),
        (Step(1), (), NO_STEP, True),
        (Step(7), (5, 7), Step(7), False),
        (Step(8), (5, 7), Step(7), True),
    ],
)
def test_a_checkpoint_is_missing_for_a_newer_commit(
    committed: Step, steps: tuple[int, ...], durable: Step, lacks: bool
) -> None:
    seen = made({"committed": committed}, checkpoints=tuple(map(checkpoint, steps)))
    assert (view.durable_step(seen), view.lacks_checkpoint(seen)) == (durable, lacks)


def test_time_counts_from_the_return_of_a_control_plane() -> None:
    assert view.watched_seconds(made(), NOW - 50) == 50
    assert view.watched_seconds(made({"unwatched": (9_000.0, NOW - 30)}), NOW - 50) == 30
    assert view.watched_seconds(made({"unwatched": (9_000.0, NOW - 70)}), NOW - 50) == 50
    assert view.gap_seconds(POLICY) == 4 * POLICY.timeouts.lease_seconds


@pytest.mark.parametrize(
    ("record", "members", "changes", "at"),
    [
        pytest.param({"progress_at": 9_500.0}, 2, {}, 9_500.0, id="the last progress"),
        pytest.param({"progress_at": 9_500.0, "unwatched": (9_400.0, 9_600.0)}, 2, {}, 9_600.0, id="unwatched since"),
        pytest.param({"progress_at": 9_500.0, "unwatched": (9_300.0, 9_400.0)}, 2, {}, 9_500.0, id="watched since"),
        pytest.param({"progress_at": 9_500.0}, 1, {}, NOW, id="a member has not reported"),
        pytest.param({"progress_at": 9_500.0}, 2, {"is_fleet_blind": True}, NOW, id="most of the fleet is silent"),
    ],
)
def test_training_has_last_moved_when_a_control_plane_could_see_it(
    record: dict[str, Any], members: int, changes: dict[str, Any], at: float
) -> None:
    seen = made(record, *(report(rank) for rank in range(members)), **changes)
    assert view.last_movement_at(seen) == at


@pytest.mark.parametrize("changes", [{"boundary": Step(1)}, {"committed": Step(1)}, {"proposed": Step(1)}])
def test_new_progress_is_of_now(changes: dict[str, Any]) -> None:
    seen = made({"progress_at": 9_500.0})
    assert view.last_progress_at(seen) == 9_500.0
    assert view.last_progress_at(view.with_record(seen, **changes)) == NOW


def test_a_job_waits_for_capacity_only_if_nodes_are_missing() -> None:
    failed = FailedLaunches(message="no p5", failed_count=3, next_attempt_at=NOW + 60)
    wait = CapacityWait(missing_count=1, message="no p5", failed_count=3, next_attempt_at=NOW + 60)
    assert view.with_capacity_wait(made(failed_launches=failed), 1).record.capacity_wait == wait
    assert view.with_capacity_wait(made(failed_launches=failed), 0).record.capacity_wait is None
    assert view.with_capacity_wait(made(), 1).record.capacity_wait is None


def test_a_view_drops_what_the_fleet_has_done() -> None:
    """The fleet has removed `TWO` from the job, and not yet `ONE`."""
    out = tuple(Exclusion(node_id=node_id, evidence=NOTHING, may_terminate=False) for node_id in (ONE, TWO))
    moves = tuple(
        Departure(node_id=node_id, evidence=NOTHING, cause=Cause.NOTICE, remedy=Remedy.HOLD, may_terminate=True)
        for node_id in (ONE, TWO)
    )
    seen = made({"exclusions": out, "moves": moves}, assigned=(ONE,)).record
    assert seen.exclusions == out[:1]
    assert [move.has_left for move in seen.moves] == [False, True]
    again = made({"moves": (replace(moves[0], has_left=True),)}).record
    assert again.moves[0].has_left


def test_the_open_incident_is_no_part_of_a_nodes_history() -> None:
    lines = tuple(
        Implication(node_id=ONE, incident_id=each, at=1.0, what="x", evidence=NOTHING, remedy=Remedy.HOLD)
        for each in ("inc-0", "inc-1")
    )
    nodes = {ONE: NodeObserved(node_id=ONE, history=lines)}
    assert made({"incident": incident(IncidentState.REPLACING)}, nodes=nodes).nodes[ONE].history == lines[:1]
    assert made(nodes=nodes).nodes[ONE].history == lines


FAULT = NodeFault(code="gpu_lost", message="gone", is_permanent=True)
IMPAIRED = Impairment(node_id=ONE, is_out_of_view=False, since=9_000.0, boundary=Step(9), stepped_at=9_000.0)


@pytest.mark.parametrize(
    ("record", "members", "changes", "stepped_at"),
    [
        pytest.param({}, (report(0), report(1)), {}, 9_000.0, id="training"),
        pytest.param({"rehearsal": Rehearsals(is_under_way=True)}, (report(0), report(1)), {}, NOW, id="rehearsing"),
        pytest.param({}, (report(0), report(1)), {"is_fleet_blind": True}, None, id="most of the fleet is silent"),
    ],
)
def test_no_step_is_expected_of_an_impaired_member_in_a_rehearsal(
    record: dict[str, Any], members: tuple[MemberReport, ...], changes: dict[str, Any], stepped_at: float | None
) -> None:
    seen = made({"impairments": (IMPAIRED,), **record}, *members, **changes).seen
    nodes = {**seen.nodes, ONE: replace(seen.nodes[ONE], faults=(FAULT,))}
    found = view.view_of(NOW, SPEC, replace(seen, nodes=nodes), POLICY, seen.record).record.impairments
    assert [each.stepped_at for each in found] == ([] if stepped_at is None else [stepped_at])


@pytest.mark.parametrize(
    ("record", "members", "changes", "disposition"),
    [
        pytest.param({}, (report(0), report(1)), {}, NodeDisposition.GONE, id="training"),
        pytest.param({}, (report(0, SUCCESS), report(1, SUCCESS)), {}, NodeDisposition.IMPAIRED, id="training is over"),
        pytest.param(
            {}, (report(0), report(1)), {"is_fleet_blind": True}, NodeDisposition.IMPAIRED, id="fleet is silent"
        ),
        pytest.param({"state": JobState.PREPARING}, (), {}, NodeDisposition.IMPAIRED, id="launching"),
        pytest.param({"state": JobState.QUEUED}, (), {}, NodeDisposition.GONE, id="not launched"),
    ],
)
def test_a_node_with_an_old_fault_is_lost_unless_no_step_is_expected(
    record: dict[str, Any], members: tuple[MemberReport, ...], changes: dict[str, Any], disposition: NodeDisposition
) -> None:
    seen = made({"impairments": (IMPAIRED,), **record}, *members, **changes).seen
    nodes = {**seen.nodes, ONE: replace(seen.nodes[ONE], faults=(FAULT,))}
    found = view.view_of(NOW, SPEC, replace(seen, nodes=nodes), POLICY, seen.record)
    assert (found.verdicts[ONE].disposition, found.verdicts[TWO].disposition) == (disposition, NodeDisposition.ALIVE)


def test_of_two_members_that_do_not_reach_each_other_one_is_blamed() -> None:
    found = made({}, report(0, silent_peers=(TWO,)), report(1, silent_peers=(ONE,))).verdicts
    assert found[ONE].disposition is NodeDisposition.ALIVE
    assert found[TWO].disposition is not NodeDisposition.ALIVE


@pytest.mark.security
@pytest.mark.parametrize(
    "name",
    [
        field.name
        for field in structs.fields(MemberReport)
        if isinstance(entries := getattr(example(MemberReport), field.name), tuple)
        and entries
        and hasattr(entries[0], "rank")
    ],
)
def test_a_report_is_believed_about_the_ranks_of_its_own_node_only(name: str) -> None:
    """A hostile agent reports an entry about a rank of another node in one of the lists of its report."""
    entry, *_ = getattr(example(MemberReport), name)
    own, foreign = (structs.replace(entry, rank=Rank(rank)) for rank in range(2))
    seen = made({}, structs.replace(report(0), **{name: (foreign, own, foreign)}))
    assert getattr(seen.reports[ONE], name) == (own,)


@pytest.mark.security
def test_only_the_coordinator_reports_rounds() -> None:
    seen = made({}, report(0), report(1, round=rounds(finished=True, stopped=True)))
    assert seen.plan.coordinator == ONE
    assert seen.reports[TWO].round is None
    assert not view.is_training_over(seen.reports, 2)
