"""Tests which changes of a job's record the job loop stores immediately."""

from __future__ import annotations

from dataclasses import replace

from control_plane.core.actions import Decision
from control_plane.core.job.outcome import PROGRESS_SECONDS, settle
from control_plane.core.observed.jobs import JobRecord
from control_plane.core.observed.steps import CheckpointUpload
from control_plane.core.states import JobState
from everstep.protocol.agent_messages import RunningUpload
from everstep.protocol.ids import Generation, Rank, Step

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
