"""Tests when a job is ordered to rehearse its resume, and the result that follows from the ranks' reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from control_plane.accounts.jobs import message as words
from control_plane.accounts.rehearsals import finding
from control_plane.core import accounting, rehearsal
from control_plane.core.observed.jobs import JobRecord
from control_plane.core.observed.rehearsals import NoResult, RehearsalOutcome, Rehearsals
from control_plane.core.observed.spans import Bucket
from control_plane.core.observed.specs import JobSpec, OnDifference, RehearsalMode
from control_plane.core.states import JobState
from everstep.protocol.agent_messages import ExitClass, MemberPhase, MemberReport, RankExit, RankStatus, RoundStatus
from everstep.protocol.ids import NO_STEP, Generation, NodeId, Rank, Step
from everstep.protocol.plan import CHECK_VARIABLE
from everstep.protocol.rank_messages import StopState
from everstep.protocol.rehearsals import RehearsalVerdict, Rehearsed, ReplayDifference
from tests.unit.control_plane.core.cluster import spec_of
from tests.unit.worker.rank_plans import RUN, rank_plan

START, NOW, GENERATION = 1_000.0, 1_100.0, Generation(1)
SPEC = replace(spec_of("job", "ab", 2, 2), run=RUN, rehearsal_mode=RehearsalMode.AUTO)
PLAN = rank_plan(addresses=("a", "b"))
PROVEN, UNPROVEN, DIFFERS, UNSTABLE, REFUSED = RehearsalVerdict
RESULT = RehearsalOutcome(verdict=PROVEN, step=Step(20), steps=5, seconds=3.0, at=NOW)
NONE = Rehearsals()
OUTDATED = Rehearsals(result=RESULT, automatic_count=1, is_outdated=True)


def running(*, committed: int = 20, step_seconds: float = 1.0, **changes: Any) -> JobRecord:
    """Return the record of a job that trains since step 0, and whose ranks needed 10 s to make their first step."""
    trained = round(committed * step_seconds * 1_000_000)
    values = {
        "state": JobState.RUNNING,
        "created_at": START,
        "state_since": START,
        "stepped_at": START + 10,
        "generation": GENERATION,
        "committed": Step(committed),
        "boundary": Step(committed + 1),
        "max_boundary": Step(max(committed, 1)),
        "microseconds": {Bucket.TRAIN.value: trained},
        **changes,
    }
    return JobRecord(**values)


def script_with(**environment: str) -> JobSpec:
    return replace(SPEC, script=msgspec.structs.replace(SPEC.script, environment=environment))


@pytest.mark.parametrize(
    ("changes", "spec", "is_due"),
    [
        pytest.param({"committed": 19}, {}, False, id="before AtStep"),
        pytest.param({"committed": 20}, {}, True, id="at AtStep"),
        pytest.param({"committed": 7}, {"rehearsal_at_step": 7}, True, id="at another AtStep"),
        pytest.param({"committed": 20, "base_step": Step(20)}, {}, False, id="the base is not a committed step"),
        pytest.param({"committed": 21, "base_step": Step(20)}, {}, True, id="the first step after the base"),
        pytest.param({"rehearsal": Rehearsals(result=RESULT)}, {}, False, id="once"),
        pytest.param({"rehearsal": OUTDATED}, {}, True, id="again after the job has changed"),
        pytest.param(
            {"rehearsal": replace(OUTDATED, automatic_count=2)}, {"rehearsal_mode": RehearsalMode.ON}, True, id="third"
        ),
        pytest.param(
            {"rehearsal": replace(OUTDATED, automatic_count=3)},
            {"rehearsal_mode": RehearsalMode.ON},
            False,
            id="at most three times",
        ),
        pytest.param(
            {"rehearsal": replace(OUTDATED, result=replace(RESULT, verdict=DIFFERS))},
            {},
            False,
            id="a proof after a change must not hide a difference",
        ),
        pytest.param(
            {"rehearsal": replace(OUTDATED, result=replace(RESULT, verdict=UNPROVEN))},
            {},
            True,
            id="a later rehearsal may find a difference",
        ),
        pytest.param(
            {"rehearsal": Rehearsals(result=RESULT, unanswered_count=1)}, {}, True, id="again after a lost generation 2"
        ),
        pytest.param({"rehearsal": Rehearsals(is_open=True)}, {}, False, id="no second order before a result"),
        pytest.param({"rehearsal": Rehearsals(unanswered_count=1)}, {}, True, id="again after a lost generation"),
        pytest.param({"rehearsal": Rehearsals(unanswered_count=2)}, {}, False, id="not a third time"),
        pytest.param({}, {"rehearsal_mode": RehearsalMode.OFF}, False, id="off"),
        pytest.param(
            {"rehearsal_requested_at": NOW}, {"rehearsal_mode": RehearsalMode.OFF}, False, id="off for a person"
        ),
        pytest.param(
            {"rehearsal_requested_at": NOW, "rehearsal": Rehearsals(result=RESULT)}, {}, True, id="asked again"
        ),
        pytest.param({"rehearsal_requested_at": NOW, "committed": 3}, {}, True, id="a person need not wait for AtStep"),
        pytest.param({"rehearsal_requested_at": NOW, "committed": 0}, {}, False, id="a person waits for a commit"),
        pytest.param(
            {"rehearsal_requested_at": NOW, "rehearsal": Rehearsals(result=RESULT, served_at=NOW)},
            {},
            False,
            id="served",
        ),
        pytest.param(
            {"rehearsal_requested_at": NOW, "rehearsal": Rehearsals(unanswered_count=2)}, {}, True, id="asked after two"
        ),
        pytest.param({"target": Step(180)}, {}, True, id="180 s"),
        pytest.param({"target": Step(179)}, {}, False, id="shorter than 180 s"),
        pytest.param({"target": Step(180 * 20 * 10**6), "microseconds": {}}, {}, False, id="no training yet"),
        pytest.param({"target": Step(179)}, {"rehearsal_mode": RehearsalMode.ON}, True, id="short, but on"),
        pytest.param({"target": Step(179), "rehearsal_requested_at": NOW}, {}, True, id="short, but asked"),
        pytest.param(
            {"target": Step(46)}, {"rehearsal_mode": RehearsalMode.ON}, True, id="the room before the target suffices"
        ),
        pytest.param({"target": Step(45)}, {"rehearsal_mode": RehearsalMode.ON}, False, id="too near to the target"),
        pytest.param({"target": Step(1)}, {"rehearsal_mode": RehearsalMode.ON}, False, id="the target is passed"),
        pytest.param({"target": Step(0)}, {}, True, id="the target is unknown"),
    ],
)
def test_when_a_job_of_a_local_cluster_rehearses(changes: dict[str, Any], spec: dict[str, Any], is_due: bool) -> None:
    assert rehearsal.is_due(replace(SPEC, **spec), running(**changes), is_local=True) is is_due


@pytest.mark.parametrize(
    ("changes", "is_due"),
    [
        pytest.param({"target": Step(30_000)}, True, id="30 s of 30,000 s, for two replays"),
        pytest.param({"target": Step(29_999)}, False, id="more than 0.1 % of the run"),
        pytest.param({"target": Step(29_999), "stepped_at": START + 9}, True, id="a faster start costs less"),
        pytest.param({"target": Step(10_000), "stepped_at": START}, True, id="a start without delay is free"),
        pytest.param({"target": Step(10_000), "stepped_at": START - 5}, True, id="a start never earns seconds"),
        pytest.param({"target": Step(9_999), "stepped_at": None}, False, id="an unknown start is free, not its steps"),
        pytest.param({"target": Step(0), "committed": 15_000}, True, id="half of a run without a target is over"),
        pytest.param({"target": Step(60_000), "rehearsal": OUTDATED}, True, id="60 s for two rehearsals"),
        pytest.param({"target": Step(59_999), "rehearsal": OUTDATED}, False, id="both cost more than 0.1 % of the run"),
        pytest.param({"committed": 15_000}, True, id="half of an unknown run is over"),
        pytest.param({"committed": 14_999}, False, id="an unknown run that is too short so far"),
        pytest.param({"committed": 10_000, "step_seconds": 0.005}, False, id="an unknown run of 100 s"),
    ],
)
def test_when_a_job_on_aws_rehearses(changes: dict[str, Any], is_due: bool) -> None:
    assert rehearsal.is_due(SPEC, running(**changes), is_local=False) is is_due
    assert rehearsal.is_due(replace(SPEC, rehearsal_mode=RehearsalMode.ON), running(**changes), is_local=False)


def test_a_job_from_the_checkpoint_of_another_job_has_the_pace_of_its_own_steps() -> None:
    """A step takes 1 s, so that a rehearsal costs 30 s."""
    times = {"stepped_at": START + 10, "boundary_at": START + 30, "microseconds": {Bucket.TRAIN.value: 20_000_000}}
    started = running(committed=10_020, base_step=Step(10_000), target=Step(29_999), **times)
    assert not rehearsal.is_due(SPEC, started, is_local=False)
    assert rehearsal.is_due(SPEC, replace(started, target=Step(30_000)), is_local=False)


@pytest.mark.parametrize(
    ("boundary", "steps"),
    [pytest.param(1, 90, id="2 s of all training"), pytest.param(2, 45, id="4 s of the steps after the first")],
)
def test_the_pace_of_a_generation_needs_two_steps(boundary: int, steps: int) -> None:
    """The generation's second step took 4 s. All training of the job took 4 s for 2 steps."""
    begun = running(
        committed=1,
        boundary=Step(boundary),
        max_boundary=Step(2),
        boundary_at=START + 14,
        microseconds={Bucket.TRAIN.value: 4_000_000},
    )
    spec = replace(SPEC, rehearsal_at_step=1)
    assert rehearsal.is_due(spec, replace(begun, target=Step(steps)), is_local=True), "180 s"
    assert not rehearsal.is_due(spec, replace(begun, target=Step(steps - 1)), is_local=True)


def test_a_refusal_answers_the_request_and_names_the_first_rank_of_the_old_agent() -> None:
    asked = running(rehearsal_requested_at=NOW - 1)
    node = rank_plan(ranks_per_node=2, addresses=("a", "b")).nodes[1]
    record, (event,) = rehearsal.refused(SPEC, asked, node, NOW)
    result = record.rehearsal.result
    assert result is not None
    assert (result.verdict, result.step, result.steps, result.seconds, result.at) == (REFUSED, 20, 5, 0.0, NOW)
    assert (result.rank, event.type) == (2, "RehearsalRefused")
    assert not rehearsal.is_asked(record)


def test_a_determinism_check_never_rehearses() -> None:
    asked = running(rehearsal_requested_at=NOW)
    assert rehearsal.is_due(script_with(OTHER="1"), asked, is_local=True)
    assert not rehearsal.is_due(script_with(**{CHECK_VARIABLE: "8"}), asked, is_local=True)


def rehearsed(verdict: RehearsalVerdict, step: int = 30, at: int | None = None, **changes: Any) -> Rehearsed:
    """Return a rank's report. `at` is the step of the first difference."""
    found = None if at is None else ReplayDifference(step=Step(at), kind="loss", source="unknown")
    values = {"generation": GENERATION, "step": Step(step), "steps": 5, "seconds": 3.0, "difference": found}
    return Rehearsed(verdict=verdict, **{**values, **changes})


def reports(*each: Rehearsed | None, phase: str = "train") -> dict[NodeId, MemberReport]:
    return {
        NodeId(f"i-{rank}"): MemberReport(
            job=SPEC.job,
            run=RUN,
            generation=GENERATION,
            phase=MemberPhase.RUNNING,
            ranks=(RankStatus(rank=Rank(rank), boundary=Step(36), phase=phase, rehearsed=report),),
        )
        for rank, report in enumerate(each)
    }


def ordered(**changes: Any) -> JobRecord:
    record = running(committed=25, **changes)
    return replace(record, rehearsal=rehearsal.ordered(record, {}))


def follow(record: JobRecord, *each: Rehearsed | None, spec: JobSpec = SPEC, phase: str = "train", now: float = NOW):
    return rehearsal.followed(spec, record, record, PLAN, reports(*each, phase=phase), now)


def test_a_result_needs_the_reports_of_all_ranks() -> None:
    record, events = follow(ordered(), rehearsed(PROVEN), None)
    assert (record.rehearsal.is_open, record.rehearsal.result, events) == (True, None, ())
    record, (event,) = follow(record, rehearsed(PROVEN, seconds=2.0), rehearsed(PROVEN, seconds=4.0))
    assert record.rehearsal.result == replace(RESULT, step=Step(30), seconds=4.0)
    assert not record.rehearsal.is_open
    assert event.type == "ResumeProven"
    assert words(event.message) == "a restart from step 30 repeated 5 steps bit for bit, in 4.0 s"
    assert follow(record, rehearsed(PROVEN), rehearsed(PROVEN)) == (record, ()), "each result once"


@pytest.mark.parametrize(
    ("earlier", "later", "verdict", "message"),
    [
        (UNPROVEN, PROVEN, UNPROVEN, "count"),
        (UNPROVEN, DIFFERS, DIFFERS, ""),
        (DIFFERS, PROVEN, PROVEN, ""),
        (PROVEN, PROVEN, PROVEN, ""),
    ],
)
def test_a_proof_carries_the_lost_values_of_the_earlier_rehearsal_along(
    earlier: RehearsalVerdict, later: RehearsalVerdict, verdict: RehearsalVerdict, message: str
) -> None:
    before = replace(RESULT, verdict=earlier, rank=Rank(1), message="count", advice="keep it")
    record = ordered(rehearsal=Rehearsals(result=before))
    record, (event,) = follow(record, rehearsed(PROVEN, seconds=2.0), rehearsed(later))
    told = record.rehearsal.result
    assert told is not None
    assert (told.verdict, told.message, told.step) == (verdict, message, 30)
    assert (event.type == "ResumeUnproven") == (verdict is UNPROVEN)
    if message:
        assert (told.rank, told.advice) == (1, "keep it")


@pytest.mark.parametrize(
    ("each", "rank"),
    [
        ((rehearsed(PROVEN), rehearsed(DIFFERS, at=31)), 1),
        ((rehearsed(DIFFERS, at=32), rehearsed(DIFFERS, at=31)), 1),
        ((rehearsed(DIFFERS, at=31), rehearsed(DIFFERS, at=31)), 0),
        ((rehearsed(DIFFERS), rehearsed(UNSTABLE, at=35)), 0),
        ((rehearsed(DIFFERS), rehearsed(UNSTABLE, at=34)), 1),
        ((rehearsed(UNSTABLE, at=30), rehearsed(DIFFERS, at=31)), 0),
        ((rehearsed(PROVEN), rehearsed(REFUSED)), 1),
        ((None, rehearsed(REFUSED)), 1),
        ((rehearsed(REFUSED), rehearsed(DIFFERS, at=30)), 0),
        ((rehearsed(PROVEN), rehearsed(UNPROVEN, at=35)), 1),
        ((rehearsed(UNPROVEN, at=35), rehearsed(DIFFERS, at=35)), 1),
    ],
)
def test_a_result_names_the_first_difference(each: tuple[Rehearsed | None, ...], rank: int) -> None:
    named = [
        None if one is None else msgspec.structs.replace(one, message=f"m{who}", advice="a")
        for who, one in enumerate(each)
    ]
    result = follow(ordered(), *named)[0].rehearsal.result
    assert result is not None
    assert (result.rank, result.message, result.advice) == (rank, f"m{rank}", "a")
    assert named[rank] is not None
    assert result.verdict is named[rank].verdict


@pytest.mark.parametrize(
    ("verdict", "type_", "message"),
    [
        (DIFFERS, "ResumeDiffers", "a restart from step 30 does not repeat its steps: rank 0: loss differs. Keep it."),
        (UNSTABLE, "ResumeDiffers", "a restart from step 30 is not deterministic: rank 0: loss differs. Keep it."),
        (
            UNPROVEN,
            "ResumeUnproven",
            "a restart from step 30 loses values of the script: rank 0: loss differs. Keep it.",
        ),
        (REFUSED, "RehearsalRefused", "rank 0 cannot rehearse a restart: loss differs."),
    ],
)
def test_a_difference_is_an_event_with_its_advice(verdict: RehearsalVerdict, type_: str, message: str) -> None:
    told = rehearsed(verdict, at=31, message="loss differs.", advice="Keep it.")
    record, (event,) = follow(ordered(), told, told)
    assert (event.type, words(event.message)) == (type_, message)
    assert record.stop_reason is None


@pytest.mark.parametrize(
    ("verdict", "stops"), [(PROVEN, False), (UNPROVEN, False), (DIFFERS, True), (UNSTABLE, True), (REFUSED, False)]
)
def test_a_difference_stops_a_job_that_asks_for_it(verdict: RehearsalVerdict, stops: bool) -> None:
    spec = replace(SPEC, rehearsal_on_difference=OnDifference.STOP)
    told = rehearsed(verdict, at=31, message="loss differs")
    assert bool(follow(ordered(), told, told, spec=spec)[0].stop_reason) is stops
    limited = replace(ordered(), stop_reason="MaxCostUsd (5) is spent")
    assert follow(limited, told, told, spec=spec)[0].stop_reason == "MaxCostUsd (5) is spent"


def test_reports_of_earlier_rehearsals_do_not_answer_an_order() -> None:
    record = running(committed=25)
    told = reports(rehearsed(PROVEN, step=30), rehearsed(PROVEN, step=25))
    record = replace(record, rehearsal=rehearsal.ordered(record, told))
    assert record.rehearsal.after == 30
    assert follow(record, rehearsed(PROVEN, step=30), rehearsed(PROVEN, step=41))[0].rehearsal.is_open
    old = rehearsed(PROVEN, step=41, generation=Generation(0))
    assert follow(record, old, rehearsed(PROVEN, step=41))[0].rehearsal.is_open
    assert not follow(record, rehearsed(PROVEN, step=41), rehearsed(PROVEN, step=41))[0].rehearsal.is_open


def test_a_generation_that_ends_before_a_result_lets_the_job_rehearse_once_more() -> None:
    record = ordered()
    for number in (1, 2):
        assert (record.rehearsal.number, record.rehearsal.is_open) == (number, True)
        later = replace(record, generation=Generation(record.generation + 1))
        record, events = rehearsal.followed(SPEC, later, later, PLAN, {}, NOW)
        assert (record.rehearsal.unanswered_count, record.rehearsal.is_open) == (number, False)
        assert [each.type for each in events] == ["RehearsalRefused"] * (number - 1)
        assert not record.rehearsal.is_outdated, "no rank has reported a change"
        assert rehearsal.is_due(SPEC, record, is_local=True) is (number == 1)
        record = replace(record, rehearsal=rehearsal.ordered(record, {}))
    result = record.rehearsal.result
    assert result is not None
    assert (result.verdict, result.rank) == (REFUSED, None)
    assert result.unanswered is NoResult.RANKS_ENDED
    asked = replace(record, rehearsal=replace(record.rehearsal, is_open=False), rehearsal_requested_at=NOW)
    assert rehearsal.is_due(SPEC, asked, is_local=True)
    assert rehearsal.ordered(asked, {}).unanswered_count == 0, "a person's request begins again"


def changed(record: JobRecord, *revisions: int, generation: int = 1) -> JobRecord:
    """Return the record after a report of each rank's number of changes."""
    told = {
        node: msgspec.structs.replace(
            report, ranks=(msgspec.structs.replace(report.ranks[0], resume_revision=revision),)
        )
        for revision, (node, report) in zip(revisions, reports(*[None] * len(revisions)).items(), strict=True)
    }
    record = replace(record, generation=Generation(generation))
    return rehearsal.followed(SPEC, record, record, PLAN, told, NOW)[0]


def test_a_job_rehearses_again_after_each_change_of_any_rank() -> None:
    record = running(committed=25)
    found = []
    told = ((1, (0, 0)), (1, (0, 1)), (1, (1, 0)), (1, (0, 0)), (1, (1, 1)), (2, (0, 0)), (2, (1, 0)), (2, (5, 9)))
    for generation, revisions in told:
        record = changed(record, *revisions, generation=generation)
        found.append(rehearsal.is_due(replace(SPEC, rehearsal_mode=RehearsalMode.ON), record, is_local=True))
        if found[-1]:
            record = replace(record, rehearsal=rehearsal.ordered(record, {}))
            assert not record.rehearsal.is_outdated
            record = replace(record, rehearsal=replace(record.rehearsal, is_open=False, result=RESULT))
    assert found == [True, True, False, False, False, False, True, False]


def test_only_new_orders_that_no_person_requests_count() -> None:
    record = replace(running(), rehearsal=Rehearsals(automatic_count=1))
    assert rehearsal.ordered(record, {}).automatic_count == 2
    assert rehearsal.ordered(replace(record, rehearsal_requested_at=NOW), {}).automatic_count == 1
    repeated = replace(record, rehearsal=replace(record.rehearsal, unanswered_count=1))
    assert rehearsal.ordered(repeated, {}).automatic_count == 1


def test_a_request_during_a_rehearsal_is_served_by_it() -> None:
    record, _ = follow(replace(ordered(), rehearsal_requested_at=NOW), None, None)
    assert record.rehearsal.served_at == NOW
    record, _ = follow(record, rehearsed(PROVEN), rehearsed(PROVEN))
    assert not rehearsal.is_due(SPEC, record, is_local=True)


def test_an_order_that_its_coordinator_has_ended_waits_30_s_for_the_last_reports() -> None:
    def told(number: int, state: StopState, phase: str = "train") -> dict[NodeId, MemberReport]:
        found = reports(rehearsed(PROVEN), None, phase=phase)
        status = RoundStatus(
            committed=Step(35),
            proposed=Step(36),
            boundary=Step(36),
            committed_at_seconds=NOW,
            rehearsal_number=number,
            rehearsal_state=state,
        )
        return {**found, PLAN.coordinator: msgspec.structs.replace(found[PLAN.coordinator], round=status)}

    record = ordered()
    for number, state, phase in (
        (0, StopState.NONE, "train"),
        (1, StopState.ANNOUNCED, "train"),
        (1, StopState.NONE, "rehearse"),
    ):
        found, _ = rehearsal.followed(SPEC, record, record, PLAN, told(number, state, phase), NOW)
        assert found.rehearsal.over_since is None
    for seconds, is_open in ((0.0, True), (30.0, True), (30.1, False)):
        record, _ = rehearsal.followed(SPEC, record, record, PLAN, told(1, StopState.NONE), NOW + seconds)
        assert (record.rehearsal.is_open, record.rehearsal.unanswered_count) == (is_open, int(not is_open))
    assert rehearsal.ordered(record, {}).over_since is None


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        pytest.param({}, False, id="no order"),
        pytest.param({"rehearsal": Rehearsals(number=1, is_open=True)}, True, id="an open order"),
        pytest.param({"rehearsal": Rehearsals(number=1, unanswered_count=1)}, True, id="an order to repeat"),
        pytest.param({"rehearsal_requested_at": NOW}, True, id="a request without an order"),
        pytest.param({"rehearsal": Rehearsals(number=2, is_open=True, result=RESULT)}, False, id="an earlier result"),
    ],
)
def test_a_job_that_ends_before_its_rehearsal_says_so(changes: dict[str, Any], is_told: bool) -> None:
    record, events = rehearsal.closed(SPEC, running(**changes), NOW)
    assert [each.type for each in events] == ["RehearsalRefused"] * is_told
    if is_told:
        result = record.rehearsal.result
        assert result is not None
        assert (result.verdict, result.rank, record.rehearsal.is_open) == (REFUSED, None, False)
        assert words(events[0].message) == f"the job has not rehearsed a restart: {finding(result)}"
        assert not rehearsal.is_asked(record)
    else:
        assert record.rehearsal == running(**changes).rehearsal


def test_the_ledger_counts_the_seconds_without_training() -> None:
    """The ranks reached step 35 at 1,060 s, and did not train for 30 s. The control plane received that at 1,100 s."""
    record = ordered(boundary=Step(35), boundary_at=1_060.0, accounted_until=1_000.0)
    record = accounting.charge(replace(record, microseconds={}), 1_070.0, gap_seconds=1_000)
    record, _ = follow(record, None, None, phase="rehearse", now=1_070.0)
    assert record.rehearsal.is_under_way
    record = accounting.charge(record, NOW, gap_seconds=1_000)
    assert record.microseconds == {"train": 70_000_000, "rehearsal": 30_000_000}
    record, _ = follow(record, rehearsed(PROVEN, seconds=30.0), rehearsed(PROVEN, seconds=20.0))
    assert record.microseconds == {"train": 70_000_000, "rehearsal": 30_000_000}
    assert [(span.start // 1_000_000, span.bucket) for span in record.spans] == [
        (1_000, Bucket.TRAIN),
        (1_060, Bucket.REHEARSAL),
        (1_090, Bucket.TRAIN),
    ]
    assert (record.rehearsal.is_under_way, record.rehearsal.ended_at) == (False, NOW)


def test_without_a_time_of_the_last_step_the_seconds_before_the_report_count() -> None:
    record = replace(ordered(boundary=Step(36), accounted_until=1_000.0), microseconds={})
    record = accounting.charge(record, NOW, gap_seconds=1_000)
    record, _ = follow(record, rehearsed(PROVEN, seconds=30.0), rehearsed(PROVEN, seconds=20.0))
    assert record.microseconds == {"train": 70_000_000, "rehearsal": 30_000_000}


def test_the_rehearsal_begins_when_the_ranks_had_passed_its_last_step_also_if_they_have_trained_on() -> None:
    """The ranks reached step 35 at 1,060 s, and step 36 at 1,095 s, before the control plane received their reports."""
    before = ordered(boundary=Step(35), boundary_at=1_060.0, accounted_until=1_000.0)
    before = accounting.charge(replace(before, microseconds={}), NOW, gap_seconds=1_000)
    record = replace(before, boundary=Step(36), boundary_at=1_095.0)
    told = reports(rehearsed(PROVEN, seconds=30.0), rehearsed(PROVEN, seconds=30.0))
    record, _ = rehearsal.followed(SPEC, before, record, PLAN, told, NOW)
    assert [(span.start // 1_000_000, span.bucket) for span in record.spans] == [
        (1_000, Bucket.TRAIN),
        (1_060, Bucket.REHEARSAL),
        (1_090, Bucket.TRAIN),
    ]


def test_a_rank_that_has_ended_does_not_rehearse() -> None:
    exited = RankExit(exit_class=ExitClass.ERROR, code=1, at_seconds=NOW, boundary=Step(36))
    told = reports(None, None, phase="rehearse")
    gone = {
        node: msgspec.structs.replace(
            each, ranks=tuple(msgspec.structs.replace(rank, exit=exited) for rank in each.ranks)
        )
        for node, each in told.items()
    }
    record = ordered()
    assert rehearsal.followed(SPEC, record, record, PLAN, told, NOW)[0].rehearsal.is_under_way
    assert not rehearsal.followed(SPEC, record, record, PLAN, gone, NOW)[0].rehearsal.is_under_way


def test_a_rehearsal_without_a_result_ends_when_the_ranks_train_on() -> None:
    record, found = ordered(), []
    for later, phase in enumerate(("train", "rehearse", "rehearse", "train", "train")):
        record, _ = follow(record, None, None, phase=phase, now=NOW + later)
        found.append((record.rehearsal.is_under_way, record.rehearsal.ended_at))
    assert found == [(False, None), (True, None), (True, None), (False, NOW + 3), (False, NOW + 3)]


def test_the_first_order_of_a_job() -> None:
    order = ordered().rehearsal
    assert order == replace(NONE, number=1, generation=GENERATION, is_open=True, after=NO_STEP, automatic_count=1)
