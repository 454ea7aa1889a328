"""Tests single decisions of the job loop about a job whose ranks run or restart.

The tests in tests/unit/control_plane/loop cover whole sequences.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from control_plane.core.incidents import Fault
from control_plane.core.job.progress import SHOWN_OUTPUTS, unstored_outputs, with_progress
from control_plane.core.job.restart import with_incident
from control_plane.core.job.roster import without_unreachable
from control_plane.core.job.view import JobView, view_of
from control_plane.core.observed.facts import NOTHING
from control_plane.core.observed.incidents import IncidentRecord, RestartsRanks
from control_plane.core.observed.jobs import MAX_NAMED_OUTPUTS, JobObserved, JobRecord
from control_plane.core.observed.nodes import Cause, NodeObserved
from control_plane.core.observed.reasons import OutputsLost
from control_plane.core.observed.specs import Policy
from control_plane.core.observed.steps import GenerationRecord, RefusedSource, SealedStates, StepStates
from control_plane.core.states import IncidentState, JobState
from control_plane.core.timeouts import ladder
from everstep.protocol.agent_messages import (
    MemberPhase,
    MemberReport,
    NodeFault,
    OutputCause,
    OutputFailure,
    RoundStatus,
    ShardProtection,
)
from everstep.protocol.ids import FIRST_STEP, NO_STEP, Generation, NodeId, Rank, Step
from tests.properties.control_plane.simulated import spec_of
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


@pytest.mark.parametrize(("targets", "target"), [((0, 0), 100), ((0, 50), 50)])
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
