"""Tests until when a job waits for a store that its nodes cannot read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from control_plane.core import launch
from control_plane.core.job import store_wait
from control_plane.core.job.store_wait import LONGEST_PAUSE_SECONDS, STAND_ASIDE_SECONDS
from control_plane.core.job.view import JobView
from control_plane.core.states import JobState
from control_plane.core.verification import Blocked
from everstep.protocol.agent_messages import MemberPhase, NodeFault, Obstacle
from everstep.protocol.ids import NO_STEP, Generation, Step
from tests.unit.control_plane.core.test_job_view import NOW, checkpoint, made, report

PATIENCE = 60.0


def waiting(seconds: float, state: JobState, *, steps: tuple[int, ...] = (9,), **record: Any) -> JobView:
    """Return the view of a job that has waited for `seconds` seconds, and whose nodes repeat their loads of step 9."""
    is_probed = state is JobState.LOADING
    wait = Blocked(
        obstacle=Obstacle.DENIED,
        since=NOW - seconds,
        is_probed=is_probed,
        next_attempt_at=NOW + (0 if is_probed else 5),
    )
    values = {"state": state, "committed": Step(9), "store_wait": wait, "issued_generation": Generation(2), **record}
    return made(values, spec={"store_patience_seconds": PATIENCE}, checkpoints=tuple(map(checkpoint, steps)))


@pytest.mark.parametrize(
    ("seconds", "record", "ends"),
    [
        pytest.param(PATIENCE - 1, {}, False, id="before the end of its patience"),
        pytest.param(PATIENCE, {}, True, id="at the end of its patience"),
        pytest.param(1.0, {"pause_requested_at": NOW}, True, id="paused"),
        pytest.param(1.0, {"stop_requested_at": NOW}, True, id="stopped"),
        pytest.param(PATIENCE, {"store_wait": None}, False, id="no wait"),
    ],
)
def test_when_nodes_stop_repeating_their_loads(seconds: float, record: dict[str, Any], ends: bool) -> None:
    found = store_wait.end_hold(waiting(seconds, JobState.LOADING, **record))
    assert (found is not None) is ends
    if found is not None:
        wait = found[0].record.store_wait
        assert wait is not None
        assert (wait.is_probed, wait.next_attempt_at) == (False, NOW + LONGEST_PAUSE_SECONDS)


@pytest.mark.parametrize(
    ("seconds", "steps", "record", "state"),
    [
        pytest.param(PATIENCE - 1, (9,), {}, JobState.PREPARING, id="before the end of its patience"),
        pytest.param(PATIENCE, (9,), {}, JobState.QUEUED, id="at the end of its patience"),
        pytest.param(PATIENCE, (8,), {}, JobState.PREPARING, id="only memory has the step"),
        pytest.param(1.0, (9,), {"pause_requested_at": NOW}, JobState.QUEUED, id="paused"),
        pytest.param(1.0, (8,), {"pause_requested_at": NOW}, JobState.PREPARING, id="paused, and only memory has it"),
    ],
)
def test_when_a_job_gives_up_nodes_that_cannot_load(
    seconds: float, steps: tuple[int, ...], record: dict[str, Any], state: JobState
) -> None:
    view = waiting(seconds, JobState.PREPARING, steps=steps, **record)
    roll = launch.call_roll(view.spec, view.seen, view.record, view.policy)
    decision = store_wait.await_store(view, roll)
    assert decision is not None
    assert decision.record.state is state
    gave_up = state is JobState.QUEUED and "pause_requested_at" not in record
    assert decision.record.not_before == (NOW + STAND_ASIDE_SECONDS if gave_up else None)


def test_a_due_attempt_is_made() -> None:
    view = waiting(1.0, JobState.LOADING)
    roll = launch.call_roll(view.spec, view.seen, view.record, view.policy)
    assert store_wait.await_store(view, roll) is None
    assert store_wait.hold_reason(view) is not None
    assert store_wait.hold_reason(waiting(1.0, JobState.PREPARING)) is None


def test_a_job_that_gives_its_nodes_back_commits_no_more_than_s3_has() -> None:
    view = waiting(1.0, JobState.PREPARING)
    reason = store_wait.hold_reason(waiting(1.0, JobState.LOADING))
    assert reason is not None
    assert [store_wait.release(view, Step(step), reason).record.committed for step in (NO_STEP, 8, 9, 10)] == [
        NO_STEP,
        8,
        9,
        9,
    ]


EARLIER = Blocked(obstacle=Obstacle.DENIED, since=NOW - 9, attempt_count=3, next_attempt_at=NOW - 1, is_probed=True)


@pytest.mark.parametrize(
    ("before", "obstacle", "expected"),
    [
        pytest.param(None, None, None, id="no node waits"),
        pytest.param(EARLIER, None, None, id="no node waits any more"),
        pytest.param(
            replace(EARLIER, is_probed=False), None, replace(EARLIER, is_probed=False), id="after a failed load"
        ),
        pytest.param(EARLIER, Obstacle.DENIED, EARLIER, id="the same obstacle"),
        pytest.param(
            None,
            Obstacle.DENIED,
            Blocked(obstacle=Obstacle.DENIED, since=NOW, attempt_count=1, next_attempt_at=NOW, is_probed=True),
            id="the first obstacle",
        ),
        pytest.param(
            EARLIER,
            Obstacle.THROTTLED,
            Blocked(obstacle=Obstacle.THROTTLED, since=NOW - 9, attempt_count=4, next_attempt_at=NOW, is_probed=True),
            id="another obstacle",
        ),
        pytest.param(
            replace(EARLIER, is_probed=False),
            Obstacle.DENIED,
            replace(EARLIER, attempt_count=4, next_attempt_at=NOW),
            id="again after a failed load",
        ),
    ],
)
def test_since_when_nodes_repeat_their_loads(
    before: Blocked | None, obstacle: Obstacle | None, expected: Blocked | None
) -> None:
    faults = () if obstacle is None else (NodeFault(code="x", message="", is_permanent=False, obstacle=obstacle),)
    member = structs.replace(report(0, phase=MemberPhase.LOADING), faults=faults)
    found = store_wait.hold(made({"state": JobState.LOADING, "store_wait": before}, member)).record.store_wait
    assert (None if found is None else replace(found, detail="")) == expected


DENIED = NodeFault(code="load_failed", message="denied", is_permanent=False, obstacle=Obstacle.DENIED)
WRONG = NodeFault(code="source_mismatch", message="wrong", is_permanent=False)


@pytest.mark.parametrize(
    ("before", "faults", "expected"),
    [
        pytest.param(None, (), None, id="no wait, and no failed load"),
        pytest.param(EARLIER, (), replace(EARLIER, is_probed=False), id="the wait goes on"),
        pytest.param(EARLIER, (WRONG,), None, id="another fault ends the wait"),
        pytest.param(
            None, (DENIED,), Blocked(obstacle=Obstacle.DENIED, since=NOW, next_attempt_at=NOW + 5), id="a first wait"
        ),
    ],
)
def test_a_failed_load_begins_or_ends_a_wait_for_the_store(
    before: Blocked | None, faults: tuple[NodeFault, ...], expected: Blocked | None
) -> None:
    phase = MemberPhase.LOAD_FAILED if faults else MemberPhase.PROMISED
    members = (report(0, phase=phase, faults=faults), report(1, phase=MemberPhase.PROMISED))
    found = store_wait.after_loads(made({"state": JobState.LOADING, "store_wait": before}, *members))
    assert (found and replace(found, detail="")) == expected
    if faults == (DENIED,):
        assert found is not None
        assert found.detail == "i-0: denied"
