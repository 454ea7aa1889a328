"""Tests single decisions of the job loop about a job whose ranks run or restart.

The tests in tests/unit/control_plane/loop cover whole sequences.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from control_plane.accounts import jobs
from control_plane.core.incidents import Fault
from control_plane.core.job.progress import SHOWN_OUTPUTS, unstored_outputs, with_progress
from control_plane.core.job.restart import with_incident
from control_plane.core.job.roster import without_unreachable
from control_plane.core.job.view import JobView, view_of
from control_plane.core.observed.facts import NOTHING
from control_plane.core.observed.incidents import FailureRecord, IncidentRecord, RestartsRanks
from control_plane.core.observed.jobs import MAX_NAMED_OUTPUTS, JobObserved, JobRecord, Trial
from control_plane.core.observed.nodes import Cause, NodeObserved
from control_plane.core.observed.reasons import OutputsLost, ReplacedOptions
from control_plane.core.observed.specs import Policy
from control_plane.core.observed.steps import GenerationRecord, RefusedSource, SealedStates, StepStates
from control_plane.core.states import IncidentState, JobState
from control_plane.core.timeouts import ladder
from everstep.protocol.agent_messages import (
    ExitClass,
    MemberPhase,
    MemberReport,
    NodeFault,
    OutputCause,
    OutputFailure,
    RankStatus,
    RoundStatus,
    ShardProtection,
)
from everstep.protocol.ids import FIRST_STEP, NO_STEP, Generation, NodeId, Rank, Step
from everstep.protocol.options import KeptOption
from tests.unit.control_plane.core.cluster import spec_of
from tests.unit.worker.rank_plans import RUN, rank_plan

NOW = 10_000.0
POLICY = Policy(timeouts=ladder(3.0))
SPEC = replace(spec_of("job", "ab", 2, 2), run=RUN)
ONE, TWO = NodeId("i-0"), NodeId("i-1")


def view(state: JobState, *nodes: NodeObserved, **record: Any) -> JobView:
    values = {"state": state, "reason": "", "created_at": 9_000.0, "state_since": 9_000.0, **record}
    seen = JobObserved(
        record=JobRecord(generation=Generation(1), **values),
        plan=rank_plan(addresses=("a", "b")),
        lineage=(),
        checkpoints=(),
        assigned=tuple(node.node_id for node in nodes),
        nodes={node.node_id: node for node in nodes},
    )
    return view_of(NOW, SPEC, seen, POLICY, seen.record)


def running(node_id: NodeId, *, target: int) -> NodeObserved:
    report = MemberReport(
        job=SPEC.job, run=RUN, generation=Generation(1), phase=MemberPhase.RUNNING, target=Step(target)
    )
    return NodeObserved(node_id=node_id, is_connected=True, has_reported=True, member=report)


@pytest.mark.parametrize(("targets", "target"), [((0, 0), 100), ((0, 50), 50), ((1, 0), 1), ((5, 7), 7)])
def test_a_report_without_a_target_leaves_the_target_of_the_job(targets: tuple[int, int], target: int) -> None:
    nodes = (running(ONE, target=targets[0]), running(TWO, target=targets[1]))
    assert with_progress(view(JobState.RUNNING, *nodes, target=Step(100))).record.target == target


def test_a_repeated_step_with_another_state_is_an_event_of_the_job() -> None:
    shard = ShardProtection(
        rank=Rank(1), holders=(), in_view=(), committed=NO_STEP, payload_bytes=1, states=((Step(1), b"after..."),)
    )
    node = running(TWO, target=0)
    assert node.member is not None
    node = replace(node, member=structs.replace(node.member, protection=(shard,)))
    before = StepStates(step=Step(1), digests=bytes(8) + b"before..")
    states = SealedStates(generation=Generation(0), world_size=2, newest=(before,))
    seen = with_progress(view(JobState.RUNNING, node, states=states))
    (event,) = seen.events
    assert (event.type, event.detail["Rank"]) == ("RepeatedStepDiffers", 1)
    assert with_progress(replace(seen, events=())).events == ()


def test_a_member_that_does_not_prepare_in_time_is_excluded_before_others_that_still_have_time() -> None:
    silent = (NodeObserved(node_id=node_id, silent_seconds=10.0) for node_id in (ONE, TWO))
    limit = POLICY.timeouts.prepare_deadline_seconds
    asked = ((ONE, NOW - limit - 1), (TWO, NOW - 1))
    found = without_unreachable(view(JobState.PREPARING, *silent, asked=asked))
    assert [each.node_id for each in found.record.exclusions] == [ONE]


@pytest.mark.parametrize("seconds", [-5.0, 5.0])
def test_a_further_failure_in_a_recovery_keeps_the_time_of_the_first_failure(seconds: float) -> None:
    """The clocks of nodes differ, so the report of a later failure can name an earlier time."""
    open_incident = IncidentRecord(
        id="inc-1",
        state=IncidentState.RESTORING,
        cause=Cause.RANK_EXIT,
        evidence=(NOTHING,),
        decision=RestartsRanks(),
        generation_before=Generation(1),
        failed_at=NOW - 60,
        opened_at=NOW - 59,
        reached_step=Step(7),
    )
    later = Fault(cause=Cause.AGENT_LOST, evidence=NOTHING, at=NOW - 60 + seconds, node_id=TWO)
    before = view(JobState.LOADING, running(ONE, target=0), incident=open_incident)
    found = with_incident(before, (later,), Step(7))[0].record.incident
    assert found is not None
    assert (found.instance_ids, found.failed_at) == ((TWO,), NOW - 60)


def rounds(committed: int, proposed: int, at: float) -> RoundStatus:
    return RoundStatus(committed=Step(committed), proposed=Step(proposed), boundary=Step(9), committed_at_seconds=at)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        pytest.param(rounds(8, 9, 50.0), (8, 9, 50.0), id="a newer commit"),
        pytest.param(rounds(7, 8, 50.0), (7, 8, 50.0), id="the same commit"),
        pytest.param(rounds(7, 8, 0.0), (7, 8, 40.0), id="the same commit without its time"),
        pytest.param(rounds(6, 7, 50.0), (7, 3, 40.0), id="an older commit"),
    ],
)
def test_the_coordinator_tells_what_is_proposed_after_the_newest_commit(
    status: RoundStatus, expected: tuple[int, int, float]
) -> None:
    node = running(ONE, target=0)
    assert node.member is not None
    node = replace(node, member=structs.replace(node.member, round=status))
    lineage = (
        GenerationRecord(
            generation=Generation(1), parent=Generation(0), base_step=FIRST_STEP, world_size=2, was_started=True
        ),
    )
    before = view(JobState.RUNNING, node, committed=Step(7), proposed=Step(3), committed_at=40.0)
    found = with_progress(replace(before, seen=replace(before.seen, lineage=lineage))).record
    assert (found.committed, found.proposed, found.committed_at) == expected


@pytest.mark.parametrize(("committed", "is_safe"), [(0, False), (1, True)])
def test_a_commit_of_a_generation_ends_the_doubts_about_its_sources(committed: int, is_safe: bool) -> None:
    node = running(ONE, target=0)
    assert node.member is not None
    node = replace(node, member=structs.replace(node.member, round=rounds(committed, 9, 50.0)))
    source = RefusedSource(rank=Rank(0), origin_generation=Generation(1), step=Step(5))
    found = with_progress(view(JobState.RUNNING, node, refused=(source,))).record
    assert found.refused == (() if is_safe else (source,))


def lost_output(number: int, generation: int | None = 1) -> OutputFailure:
    return OutputFailure(
        rank=Rank(0),
        path=f"{number:03}.txt",
        cause=next(iter(OutputCause)),
        generation=None if generation is None else Generation(generation),
    )


def reporting(*outputs: OutputFailure) -> MemberReport:
    faults = tuple(NodeFault(code="upload_failed", message="", is_permanent=False, output=each) for each in outputs)
    return MemberReport(job=SPEC.job, run=RUN, generation=Generation(1), phase=MemberPhase.EXITED, faults=faults)


def test_unstored_outputs_are_counted_once_and_named_up_to_a_limit() -> None:
    many = [lost_output(number) for number in range(MAX_NAMED_OUTPUTS + 2)]
    found, event = unstored_outputs(
        None, Generation(1), [reporting(*many[:-1], structs.replace(many[-1], omitted_count=4))]
    )
    assert found is not None
    assert event is not None
    assert (found.generation, len(found.outputs), found.count) == (1, MAX_NAMED_OUTPUTS, MAX_NAMED_OUTPUTS + 6)
    assert isinstance(event.message, OutputsLost)
    assert (len(event.message.outputs), event.message.other_count) == (
        SHOWN_OUTPUTS,
        MAX_NAMED_OUTPUTS + 6 - SHOWN_OUTPUTS,
    )
    one, _ = unstored_outputs(None, Generation(1), [reporting(many[0])])
    assert unstored_outputs(one, Generation(2), [reporting(many[0])]) == (one, None), "told once"
    assert unstored_outputs(one, Generation(2), []) == (one, None)
    old = reporting(lost_output(0, generation=None))
    assert unstored_outputs(one, Generation(2), [old]) == (one, None), "an older agent names no generation"
    both, event = unstored_outputs(one, Generation(2), [reporting(many[0], many[1])])
    assert both is not None
    assert event is not None
    assert isinstance(event.message, OutputsLost)
    assert (both.generation, both.count, event.message.outputs, event.message.other_count) == (1, 2, (many[1],), 0)


def test_files_that_each_launch_writes_and_the_job_does_not_keep_are_told_once() -> None:
    first = OutputFailure(rank=Rank(0), path="runs/", cause=OutputCause.NOT_KEPT, generation=Generation(1))
    found, event = unstored_outputs(None, Generation(1), [reporting(first)])
    assert found is not None
    assert event is not None
    again = structs.replace(first, generation=Generation(2))
    assert unstored_outputs(found, Generation(2), [reporting(again)]) == (found, None)
    assert unstored_outputs(found, Generation(2), [reporting(structs.replace(again, path="log"))])[1] is not None


def stepping(rank: int, boundary: int, passed_at: float = 0.0, first_at: float = 0.0) -> NodeObserved:
    """Return a member whose rank finished step `boundary` at `passed_at`, and its first new step at `first_at`."""
    status = RankStatus(
        rank=Rank(rank), boundary=Step(boundary), passed_at_seconds=passed_at, first_passed_at_seconds=first_at
    )
    report = MemberReport(job=SPEC.job, run=RUN, generation=Generation(1), phase=MemberPhase.RUNNING, ranks=(status,))
    name = (ONE, TWO)[rank]
    return NodeObserved(node_id=name, is_connected=True, has_reported=True, member=report)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        pytest.param({"boundary": Step(5), "boundary_at": 1.0}, (9, NOW - 3), id="a newer step"),
        pytest.param({"boundary": Step(9), "boundary_at": 1.0}, (9, 1.0), id="the same step"),
        pytest.param({"boundary": Step(9)}, (9, NOW - 3), id="the same step without its time"),
        pytest.param({"boundary": Step(12), "boundary_at": 1.0}, (12, 1.0), id="an older step"),
        pytest.param({"boundary": Step(12)}, (12, None), id="an older step, and no time"),
    ],
)
def test_the_newest_finished_step_has_the_time_of_the_first_rank(
    record: dict[str, Any], expected: tuple[int, float | None]
) -> None:
    found = with_progress(view(JobState.RUNNING, stepping(0, 9, NOW - 2), stepping(1, 9, NOW - 3), **record)).record
    assert (found.boundary, found.boundary_at) == expected
    assert found.max_boundary == found.boundary


OPTION = KeptOption(name="optimizer.lr", script="0.1", kept="0.2")


@pytest.mark.parametrize(
    ("boundary", "record", "count"),
    [
        pytest.param(0, {}, 0, id="before the first step"),
        pytest.param(1, {}, 1, id="after the first step"),
        pytest.param(2, {"stepped_at": NOW - 5, "boundary": Step(1)}, 0, id="later"),
    ],
)
def test_each_launch_reports_the_options_that_its_restored_step_replaced(
    boundary: int, record: dict[str, Any], count: int
) -> None:
    nodes = [stepping(rank, boundary, NOW - 1, NOW - 1) for rank in (0, 1)]
    first = nodes[0].member
    assert first is not None
    status = structs.replace(first.ranks[0], kept_options=(OPTION,))
    nodes[0] = replace(nodes[0], member=structs.replace(first, ranks=(status,)))
    events = [
        each for each in with_progress(view(JobState.RUNNING, *nodes, **record)).events if each.type == "OptionsKept"
    ]
    assert [each.message for each in events] == [ReplacedOptions(options=(OPTION,))] * count
    for event in events:
        assert "optimizer.lr is 0.2 (script: 0.1)" in jobs.message(event.message)
        assert "options_from_script=['lr']" in jobs.message(event.message)


def recovering(state: IncidentState, **changes: Any) -> IncidentRecord:
    values = {"reached_step": Step(7), "opened_at": NOW - 59, **changes}
    return IncidentRecord(
        id="inc-1",
        state=state,
        cause=Cause.RANK_EXIT,
        evidence=(NOTHING,),
        decision=RestartsRanks(),
        generation_before=Generation(1),
        failed_at=NOW - 60,
        **values,
    )


@pytest.mark.parametrize(
    ("boundaries", "opened", "expected"),
    [
        pytest.param((0, 0), {}, (IncidentState.RESTORING, None), id="no new step"),
        pytest.param((1, -1), {}, (IncidentState.RESTORING, None), id="a rank has not restored"),
        pytest.param((1, 0), {}, (IncidentState.REWORKING, NOW - 4), id="the first step of one rank"),
        pytest.param((1, 1), {"replaced_at": NOW - 3}, (IncidentState.REWORKING, NOW - 3), id="not before the nodes"),
        pytest.param((1, 1), {"opened_at": NOW - 2}, (IncidentState.REWORKING, NOW - 2), id="not before the incident"),
    ],
)
def test_training_runs_again_from_the_first_new_step_on(
    boundaries: tuple[int, int], opened: dict[str, Any], expected: tuple[IncidentState, float | None]
) -> None:
    nodes = (stepping(rank, boundary, NOW - 1, NOW - 4) for rank, boundary in enumerate(boundaries))
    found = with_progress(view(JobState.RUNNING, *nodes, incident=recovering(IncidentState.RESTORING, **opened))).record
    assert found.incident is not None
    assert (found.incident.state, found.incident.restored_at) == expected


@pytest.mark.parametrize(
    ("boundary", "opened", "closed_at"),
    [
        pytest.param(6, {}, None, id="one step is missing"),
        pytest.param(7, {}, NOW - 1, id="reached"),
        pytest.param(8, {}, NOW - 5.5, id="passed, between two known times"),
        pytest.param(7, {"restored_at": NOW - 0.5}, NOW - 0.5, id="not before the restore"),
        pytest.param(7, {"opened_at": NOW - 0.5}, NOW - 0.5, id="not before the incident"),
    ],
)
def test_a_recovery_ends_once_the_highest_step_is_reached_again(
    boundary: int, opened: dict[str, Any], closed_at: float | None
) -> None:
    record = {"boundary": Step(6), "boundary_at": NOW - 10, "stepped_at": NOW - 20}
    before = view(
        JobState.RUNNING,
        stepping(0, boundary, NOW - 1),
        stepping(1, boundary, NOW - 1),
        incident=recovering(IncidentState.REWORKING, **opened),
        **record,
    )
    found = with_progress(before).record.incident
    assert found is not None
    assert (found.state, found.closed_at) == (
        IncidentState.REWORKING if closed_at is None else IncidentState.CLOSED,
        closed_at,
    )


@pytest.mark.parametrize(
    ("record", "boundary", "first_at", "stepped_at"),
    [
        pytest.param({}, 0, NOW - 4, None, id="no step yet"),
        pytest.param({}, 1, NOW - 4, NOW - 4, id="the first step"),
        pytest.param({}, 1, NOW + 4, NOW, id="a clock that is ahead"),
        pytest.param({}, 1, 1.0, 9_000.0, id="not before the job was created"),
        pytest.param({}, 1, 0.0, NOW, id="no time"),
        pytest.param({"stepped_at": NOW - 20}, 1, NOW - 4, NOW - 20, id="known"),
    ],
)
def test_a_generation_steps_since_its_first_rank_finished_a_step(
    record: dict[str, Any], boundary: int, first_at: float, stepped_at: float | None
) -> None:
    found = with_progress(view(JobState.RUNNING, stepping(0, boundary, 0.0, first_at), **record)).record
    assert found.stepped_at == stepped_at


def test_figures_that_no_report_contains_stay() -> None:
    found = with_progress(view(JobState.RUNNING, stepping(0, 9), upload_seconds=7.0, checkpoints=5)).record
    assert (found.upload_seconds, found.checkpoints) == (7.0, 5)


@pytest.mark.parametrize(
    ("exit_class", "node", "named"),
    [
        pytest.param(ExitClass.ERROR, TWO, [TWO], id="another node trains past the failure"),
        pytest.param(ExitClass.OUT_OF_MEMORY, TWO, [], id="memory is no fault of hardware"),
        pytest.param(ExitClass.ERROR, None, [], id="another state was tried"),
    ],
)
def test_a_node_whose_replacement_trains_past_the_failure_is_implicated(
    exit_class: ExitClass, node: NodeId | None, named: list[NodeId]
) -> None:
    failure = FailureRecord(
        generation=Generation(0), step=Step(5), exit_class=exit_class, code=1, at=NOW - 60, max_boundary=Step(5)
    )
    trial = Trial(kind="state" if node is None else "node", failure=failure, node_id=node)
    found = with_progress(view(JobState.RUNNING, stepping(0, 9), stepping(1, 9), trials=(trial,)))
    assert [(line.node_id, line.what) for line in found.implications] == [(each, "rank_exit") for each in named]
    hung = replace(trial, failure=replace(failure, is_hang=True))
    hangs = with_progress(view(JobState.RUNNING, stepping(0, 9), stepping(1, 9), trials=(hung,)))
    assert [line.what for line in hangs.implications] == ["hang"] * len(named)
    assert found.record.trials == ()
    waits = with_progress(view(JobState.RUNNING, stepping(0, 9), stepping(1, 5), trials=(trial,)))
    assert (waits.implications, waits.record.trials) == ((), (trial,))
