"""Tests which changes of a job's record the job loop stores immediately."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.core.actions import Decision
from control_plane.core.job.outcome import PROGRESS_SECONDS, end_job, settle, stay
from control_plane.core.job.view import with_record
from control_plane.core.observed.incidents import GivesUp
from control_plane.core.observed.jobs import JobRecord
from control_plane.core.observed.reasons import JobFact, JobNote
from control_plane.core.observed.spans import Bucket
from control_plane.core.observed.steps import CheckpointUpload
from control_plane.core.states import IncidentState, JobEvent, JobState
from everstep.protocol.agent_messages import RunningUpload
from everstep.protocol.ids import Generation, Rank, Step
from tests.unit.control_plane.core.test_job_view import NOW, incident, made

BEGUN = 1000.0


def upload(stored_bytes: int) -> CheckpointUpload:
    slowest = RunningUpload(
        rank=Rank(0), step=Step(5), object_name="rank=0", stored_bytes=stored_bytes, object_bytes=100
    )
    return CheckpointUpload(
        generation=Generation(1), step=Step(5), stored_bytes=stored_bytes, total_bytes=100, slowest=slowest
    )


RECORD = JobRecord(
    state=JobState.RUNNING,
    reason="trains",
    created_at=0.0,
    state_since=0.0,
    progress_at=BEGUN,
    accounted_until=BEGUN,
    uploading=upload(10),
)


def settled(seconds: float, uploading: CheckpointUpload | None) -> JobRecord:
    """Return the record that the job loop stores when the last upload progress was stored `seconds` ago."""
    decision = Decision(record=replace(RECORD, uploading=uploading))
    return settle(RECORD, decision, BEGUN + seconds).record


def test_the_progress_of_an_upload_is_stored_once_per_second() -> None:
    assert settled(PROGRESS_SECONDS / 2, upload(20)) == RECORD
    later = settled(PROGRESS_SECONDS, upload(20))
    assert (later.uploading, later.progress_at) == (upload(20), BEGUN + PROGRESS_SECONDS)


def test_the_end_of_an_upload_is_stored_at_once() -> None:
    assert settled(PROGRESS_SECONDS / 2, None).uploading is None


@pytest.mark.parametrize(("seconds", "is_stored"), [(4.9, False), (5.0, True)])
def test_a_changed_ledger_is_stored_after_five_times_the_interval(seconds: float, is_stored: bool) -> None:
    charged = replace(RECORD, microseconds={Bucket.TRAIN.value: 1})
    found = settle(RECORD, Decision(record=charged), BEGUN + seconds * PROGRESS_SECONDS).record
    assert (found != RECORD) is is_stored
    never = replace(RECORD, accounted_until=None)
    assert settle(never, Decision(record=replace(charged, accounted_until=None)), BEGUN).record != never


@pytest.mark.parametrize(
    ("closed_at", "ended_at"),
    [(None, NOW - 60), (NOW - 70, NOW - 60), (NOW - 5, NOW - 5)],
)
def test_a_closed_incident_leaves_its_end_in_the_record(closed_at: float | None, ended_at: float) -> None:
    closed = replace(incident(IncidentState.CLOSED), closed_at=closed_at)
    found = settle(RECORD, Decision(record=replace(RECORD, incident=closed)), NOW).record
    assert (found.incident, found.last_incident_ended_at) == (None, ended_at)
    opened = incident(IncidentState.REWORKING)
    assert settle(RECORD, Decision(record=replace(RECORD, incident=opened)), NOW).record.incident == opened


@pytest.mark.parametrize(("event", "gives_up"), [(JobEvent.GAVE_UP, True), (JobEvent.FINISHED, False)])
def test_the_end_of_a_job_closes_its_incident(event: JobEvent, gives_up: bool) -> None:
    note = JobNote(what=JobFact.COMPLETED)
    decision = end_job(made({"incident": incident(IncidentState.REWORKING)}), event, note)
    assert decision.requeue_after_seconds == 0.0
    (closed,) = decision.incidents
    assert (closed.state, isinstance(closed.decision, GivesUp)) == (IncidentState.CLOSED, gives_up)
    assert end_job(made(), event, note).incidents == ()
    ended = made({"incident": incident(IncidentState.CLOSED)})
    assert end_job(ended, JobEvent.FINISHED, note).incidents == (), "it is stored as closed"


def test_only_a_changed_incident_is_stored() -> None:
    view = made({"incident": incident(IncidentState.REWORKING)})
    assert stay(view, "trains").incidents == ()
    changed = replace(incident(IncidentState.REWORKING), reached_step=Step(9))
    assert stay(with_record(view, incident=changed), "trains").incidents == (changed,)
    assert stay(with_record(view, incident=None), "trains").incidents == ()
