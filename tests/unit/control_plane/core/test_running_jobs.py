"""Tests single decisions of the job loop about a job whose ranks run or restart.

The tests in tests/unit/control_plane/loop cover whole sequences.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from control_plane.core.incidents import Fault
from control_plane.core.job.progress import with_progress
from control_plane.core.job.restart import with_incident
from control_plane.core.job.roster import without_unreachable
from control_plane.core.job.view import JobView, view_of
from control_plane.core.observed.facts import NOTHING
from control_plane.core.observed.incidents import IncidentRecord, RestartsRanks
from control_plane.core.observed.jobs import JobObserved, JobRecord
from control_plane.core.observed.nodes import Cause, NodeObserved
from control_plane.core.observed.specs import Policy
from control_plane.core.observed.steps import SealedStates, StepStates
from control_plane.core.states import IncidentState, JobState
from control_plane.core.timeouts import ladder
from everstep.protocol.agent_messages import MemberPhase, MemberReport, ShardProtection
from everstep.protocol.ids import NO_STEP, Generation, NodeId, Rank, Step
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
