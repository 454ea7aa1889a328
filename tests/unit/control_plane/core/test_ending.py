"""Tests how long an ending job waits: for an agreed stop, for its last checkpoint, and for its ranks' exits."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from control_plane.core.actions import Decision, Send
from control_plane.core.job import ending
from control_plane.core.job.ending import PAUSE_PATIENCE_TIMES
from control_plane.core.job.view import JobView
from control_plane.core.observed.reasons import JobFact, JobNote
from control_plane.core.queue import PAUSE_AGAIN_SECONDS
from control_plane.core.states import JobState
from everstep.protocol.agent_messages import HaltRanks, MemberPhase, MemberReport, RoundStatus, StopTraining
from everstep.protocol.ids import NO_STEP, Step
from tests.unit.control_plane.core.test_job_view import NOW, POLICY, SUCCESS, checkpoint, made, report, rounds

BLIND, FINAL = POLICY.timeouts.blind_wait_seconds, POLICY.timeouts.final_round_seconds
UPLOAD = PAUSE_PATIENCE_TIMES * BLIND
RUNS = (report(0), report(1))
OVER = (report(0, round=rounds(finished=True, stopped=True)), report(1))


def ended(seconds: float) -> tuple[MemberReport, ...]:
    """Return the reports of two nodes whose ranks exited with success `seconds` ago."""
    ends = structs.replace(SUCCESS, at_seconds=NOW - seconds)
    return tuple(report(rank, ends, phase=MemberPhase.EXITED) for rank in (0, 1))


def since(
    seconds: float, state: JobState, members: tuple[MemberReport, ...], *, steps: tuple[int, ...] = (), **record: Any
) -> JobView:
    """Return the view of a job that entered its state `seconds` ago, and has made no progress since.

    `steps`: the job's checkpoints.
    """
    values = {"boundary": Step(9), "max_boundary": Step(9), "committed": Step(9), **record}
    timed = {"state": state, "state_since": NOW - seconds, "progress_at": 1.0, **values}
    return made(timed, *members, checkpoints=tuple(map(checkpoint, steps)))


def sent(decision: Decision) -> set[type]:
    return {type(action.message) for action in decision.actions if isinstance(action, Send)}


@pytest.mark.parametrize(("seconds", "resumes"), [(BLIND, False), (BLIND + 1, True)])
def test_ranks_that_do_not_stop_for_a_pause_train_on(seconds: float, resumes: bool) -> None:
    decision = ending.pause(since(seconds, JobState.PAUSING, RUNS), is_durable=True)
    assert decision.record.no_pause_before == (NOW + PAUSE_AGAIN_SECONDS if resumes else None)
    assert (StopTraining in sent(decision)) is not resumes


@pytest.mark.parametrize(
    ("seconds", "members", "record", "is_killed"),
    [
        pytest.param(BLIND, RUNS, {}, False, id="at the limit"),
        pytest.param(BLIND + 1, RUNS, {}, True, id="after the limit"),
        pytest.param(15.0, RUNS, {"boundary": Step(0)}, False, id="without a step: at the limit"),
        pytest.param(16.0, RUNS, {"boundary": Step(0)}, True, id="without a step: after the limit"),
        pytest.param(UPLOAD, OVER, {}, False, id="training is over: at the limit"),
        pytest.param(UPLOAD + 1, OVER, {}, True, id="training is over: after the limit"),
        pytest.param(1.5 * UPLOAD, OVER, {"upload_seconds": UPLOAD}, False, id="a long upload"),
        pytest.param(1.5 * UPLOAD + 1, OVER, {"upload_seconds": UPLOAD}, True, id="longer than a long upload"),
    ],
)
def test_ranks_that_do_not_stop_are_killed(
    seconds: float, members: tuple[MemberReport, ...], record: dict[str, Any], is_killed: bool
) -> None:
    decision = ending.stop(since(seconds, JobState.STOPPING, members, **record), (), is_durable=True)
    assert (HaltRanks in sent(decision)) is is_killed


@pytest.mark.parametrize(
    ("seconds", "steps", "is_durable", "state"),
    [
        pytest.param(1.0, (9,), True, JobState.COMPLETED, id="stored"),
        pytest.param(FINAL - 1, (), True, JobState.RUNNING, id="not stored yet"),
        pytest.param(FINAL, (), True, JobState.COMPLETED, id="not stored in time"),
        pytest.param(UPLOAD - 1, (9,), False, JobState.RUNNING, id="without its manifest yet"),
        pytest.param(UPLOAD, (9,), False, JobState.COMPLETED, id="without its manifest in time"),
    ],
)
def test_a_finished_job_waits_for_its_last_checkpoint(
    seconds: float, steps: tuple[int, ...], is_durable: bool, state: JobState
) -> None:
    view = since(seconds, JobState.RUNNING, ended(seconds), steps=steps)
    record = ending.finish(view, is_durable=is_durable).record
    assert record.state is state
    if state is JobState.COMPLETED:
        assert record.final_checkpoint == max(steps, default=NO_STEP)


def test_a_job_without_a_step_has_no_final_checkpoint() -> None:
    for boundary, final, what in ((0, None, JobFact.COMPLETED_WITHOUT_STEPS), (1, NO_STEP, JobFact.COMPLETED)):
        values = {"boundary": Step(boundary), "max_boundary": Step(boundary), "committed": NO_STEP}
        record = ending.finish(since(1.0, JobState.RUNNING, ended(1.0), **values), is_durable=True).record
        assert (record.state, record.final_checkpoint) == (JobState.COMPLETED, final)
        assert isinstance(record.reason, JobNote)
        assert record.reason.what is what


@pytest.mark.parametrize(
    ("state", "status", "ends"),
    [
        pytest.param(JobState.STOPPING, None, JobState.STOPPED, id="stopped"),
        pytest.param(JobState.STOPPING, rounds(finished=True, stopped=True), JobState.STOPPED, id="agreed"),
        pytest.param(JobState.STOPPING, rounds(), JobState.STOPPED, id="the coordinator has not finished"),
        pytest.param(JobState.STOPPING, rounds(finished=True), JobState.COMPLETED, id="finished by itself"),
        pytest.param(JobState.PAUSING, rounds(finished=True), JobState.COMPLETED, id="finished before a pause"),
        pytest.param(JobState.PAUSING, None, JobState.QUEUED, id="paused"),
        pytest.param(JobState.RUNNING, rounds(finished=True, stopped=True), JobState.COMPLETED, id="nobody asked"),
    ],
)
def test_a_job_that_finishes_by_itself_is_completed_whatever_was_asked(
    state: JobState, status: RoundStatus | None, ends: JobState
) -> None:
    first, second = ended(1.0)
    view = since(1.0, state, (structs.replace(first, round=status), second), steps=(9,))
    assert ending.finish(view, is_durable=True).record.state is ends


@pytest.mark.parametrize(
    ("seconds", "steps", "is_durable", "members", "state"),
    [
        pytest.param(1.0, (9,), True, None, JobState.QUEUED, id="stored and exited"),
        pytest.param(1.0, (9,), True, OVER, JobState.PAUSING, id="stored, and a rank still runs"),
        pytest.param(UPLOAD, (9,), True, OVER, JobState.PAUSING, id="at the limit"),
        pytest.param(UPLOAD + 1, (9,), True, OVER, JobState.QUEUED, id="after the limit"),
        pytest.param(UPLOAD, (), True, None, JobState.PAUSING, id="not stored"),
        pytest.param(UPLOAD + 1, (), True, None, JobState.PREPARING, id="not stored in time"),
        pytest.param(1.0, (9,), False, None, JobState.PAUSING, id="without its manifest"),
    ],
)
def test_a_job_gives_its_nodes_back_once_its_last_step_is_stored(
    seconds: float,
    steps: tuple[int, ...],
    is_durable: bool,
    members: tuple[MemberReport, ...] | None,
    state: JobState,
) -> None:
    view = since(seconds, JobState.PAUSING, ended(seconds) if members is None else members, steps=steps)
    assert ending.pause(view, is_durable=is_durable).record.state is state
