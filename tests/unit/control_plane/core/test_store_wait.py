"""Tests until when a job waits for a store that its nodes cannot read."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane.core import launch
from control_plane.core.job import store_wait
from control_plane.core.job.store_wait import LONGEST_PAUSE_SECONDS, STAND_ASIDE_SECONDS
from control_plane.core.job.view import JobView
from control_plane.core.states import JobState
from control_plane.core.verification import Blocked
from everstep.protocol.agent_messages import Obstacle
from everstep.protocol.ids import NO_STEP, Generation, Step
from tests.unit.control_plane.core.test_job_view import NOW, checkpoint, made

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
