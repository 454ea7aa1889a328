"""Tests how long an ending job waits: for an agreed stop, for its last checkpoint, and for its ranks' exits."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from control_plane.core.actions import Decision, Send
from control_plane.core.incidents import Fault
from control_plane.core.job import ending
from control_plane.core.job.ending import PAUSE_PATIENCE_TIMES
from control_plane.core.job.view import JobView
from control_plane.core.observed.facts import Recorded
from control_plane.core.observed.nodes import Cause
from control_plane.core.observed.reasons import JobFact, JobNote
from control_plane.core.observed.rehearsals import Rehearsals
from control_plane.core.queue import PAUSE_AGAIN_SECONDS
from control_plane.core.states import IncidentState, JobState
from everstep.protocol.agent_messages import HaltRanks, MemberPhase, MemberReport, RoundStatus, StopTraining
from everstep.protocol.ids import NO_STEP, Step
from tests.unit.control_plane.core.test_job_view import (
    KILLED,
    NOW,
    POLICY,
    SUCCESS,
    checkpoint,
    incident,
    made,
    report,
    rounds,
)

BLIND, FINAL = POLICY.timeouts.blind_wait_seconds, POLICY.timeouts.final_round_seconds
UPLOAD = PAUSE_PATIENCE_TIMES * BLIND
RUNS = (report(0), report(1))
OVER = (report(0, round=rounds(finished=True, stopped=True)), report(1))
DEAD = tuple(report(rank, KILLED, phase=MemberPhase.EXITED) for rank in (0, 1))
LONG_PHASE = (report(0, limit=9.0), report(1))
REHEARSES = Rehearsals(is_under_way=True)


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
    assert ending.pause(since(BLIND + 9, JobState.PAUSING, LONG_PHASE), is_durable=True).record.no_pause_before is None


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
        pytest.param(UPLOAD + 1, (OVER[0], ended(1.0)[1]), {}, False, id="training is over, and a rank has just ended"),
        pytest.param(BLIND + 9, LONG_PHASE, {"rehearsal": REHEARSES}, False, id="a long phase of a rehearsal"),
        pytest.param(BLIND + 9, LONG_PHASE, {}, True, id="a long phase outside of a rehearsal"),
    ],
)
def test_ranks_that_do_not_stop_are_killed(
    seconds: float, members: tuple[MemberReport, ...], record: dict[str, Any], is_killed: bool
) -> None:
    decision = ending.stop(since(seconds, JobState.STOPPING, members, **record), (), is_durable=True)
    assert (HaltRanks in sent(decision)) is is_killed
    assert isinstance(decision.record.reason, JobNote)
    waits = JobFact.AWAITS_RANKS if members[0] is OVER[0] else JobFact.STOPS
    assert decision.record.reason.what is (JobFact.KILLS if is_killed else waits)


@pytest.mark.parametrize(
    ("members", "boundary", "what", "step"),
    [
        pytest.param(DEAD, 9, JobFact.KILLED, NO_STEP, id="killed"),
        pytest.param(DEAD, 0, JobFact.KILLED_EARLY, NO_STEP, id="killed before the first step"),
        pytest.param((OVER[0], DEAD[1]), 9, JobFact.KILLS, 9, id="one still runs after the end"),
        pytest.param(
            (structs.replace(OVER[0], phase=MemberPhase.EXITED), DEAD[1]), 9, JobFact.STOPPED_THEN_KILLED, 9, id="after"
        ),
    ],
)
def test_a_stop_says_whether_the_ranks_stopped_before_they_were_killed(
    members: tuple[MemberReport, ...], boundary: int, what: JobFact, step: int
) -> None:
    found = tuple(Fault(cause=Cause.RANK_EXIT, evidence=Recorded(text=each), at=NOW) for each in ("first", "second"))
    view = since(UPLOAD, JobState.STOPPING, members, steps=(9,), boundary=Step(boundary))
    reason = ending.stop(view, found, is_durable=True).record.reason
    assert isinstance(reason, JobNote)
    assert (reason.what, reason.step, reason.because) == (what, step, (found[0].evidence,))


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
        pytest.param(1.0, (9,), True, OVER, JobState.PAUSING, id="stored, and the ranks still run"),
        pytest.param(1.0, (9,), True, (OVER[0], ended(1.0)[1]), JobState.PAUSING, id="stored, and a rank still runs"),
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


@pytest.mark.parametrize(
    ("requested_at", "what"), [(None, JobFact.PAUSED), (NOW - 9, JobFact.PAUSED_FOR_USER)], ids=["job", "person"]
)
def test_a_pause_says_for_whom_and_closes_the_open_incident(requested_at: float | None, what: JobFact) -> None:
    opened = incident(IncidentState.REWORKING)
    view = since(1.0, JobState.PAUSING, ended(1.0), steps=(9,), incident=opened, pause_requested_at=requested_at)
    found = ending.pause(view, is_durable=True).record
    assert isinstance(found.reason, JobNote)
    assert found.reason.what is what
    assert found.incident is not None
    assert found.incident.state is IncidentState.CLOSED
