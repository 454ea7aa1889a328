"""Reads single fields of a job's memo (`core.observed.jobs.Memo`), for answers that do not need the whole record."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Generic, TypeVar

import msgspec

from control_plane.core.observed.jobs import CapacityWait, Suspicion, UnstoredOutputs
from control_plane.core.observed.reasons import JobReason
from control_plane.core.observed.rehearsals import Rehearsals
from control_plane.core.observed.steps import CheckpointUpload, Lapse, RepeatedWork
from control_plane.core.states import RUNNING_JOBS
from control_plane.core.verification import Blocked
from control_plane.db import incidents, jobs
from everstep.protocol.agent_messages import CheckpointPace
from everstep.protocol.codec import resolve

T = TypeVar("T")


class _MemoField(Generic[T]):
    """One field of the memo. A read converts no other field."""

    def __init__(self, name: str, kind: Any) -> None:
        resolve(kind)
        self._name = name
        self._convert: Callable[[object], T] = partial(msgspec.convert, type=kind)

    def of(self, job: jobs.SavedJob | incidents.JobOfIncident) -> T | None:
        stored = job.memo.get(self._name)
        return None if stored is None else self._convert(stored)

    def of_unfinished(self, job: jobs.SavedJob) -> T | None:
        return None if job.ended_at is not None else self.of(job)


_REASON: Final = _MemoField[JobReason]("reason", JobReason)
_CHECKPOINTS: Final = _MemoField[CheckpointPace]("checkpoints", CheckpointPace)
_UPLOADING: Final = _MemoField[CheckpointUpload]("uploading", CheckpointUpload)
_LAPSE: Final = _MemoField[Lapse]("lapse", Lapse)
_REHEARSAL: Final = _MemoField[Rehearsals]("rehearsal", Rehearsals)
suspicion_of: Final = _MemoField[Suspicion]("suspicion", Suspicion).of
capacity_wait_of: Final = _MemoField[CapacityWait]("capacity_wait", CapacityWait).of_unfinished
"""None if the job does not wait or has ended."""
final_checkpoint_of: Final = _MemoField[int]("final_checkpoint", int).of
"""Step of an ended job's final checkpoint, or -1 without a checkpoint. None if the job makes none."""
unstored_outputs_of: Final = _MemoField[UnstoredOutputs]("unstored", UnstoredOutputs).of
store_wait_of: Final = _MemoField[Blocked]("store_wait", Blocked).of_unfinished
"""The job's wait for S3, IAM or KMS, which prevents a restore, or None."""
repeat_choice_of: Final = _MemoField[RepeatedWork]("repeat", RepeatedWork).of_unfinished
"""None if the job waits for no choice or has ended."""


def rehearsal_of(job: jobs.SavedJob) -> Rehearsals:
    """Return the newest order to rehearse a job's resume, and the newest result."""
    return _REHEARSAL.of(job) or Rehearsals()


def reason_of(job: jobs.SavedJob | incidents.JobOfIncident) -> JobReason:
    """Return why a job is in its state. A job that an earlier version stored last has only the sentence."""
    found = _REASON.of(job)
    return job.reason if found is None else found


def checkpoint_pace_of(job: jobs.SavedJob) -> CheckpointPace:
    """Return when the job's next checkpoint is due, as its coordinator last reported."""
    return _CHECKPOINTS.of(job) or CheckpointPace()


def checkpoint_upload_of(job: jobs.SavedJob) -> CheckpointUpload | None:
    """Return the progress of the checkpoint that the job's current generation uploads, or None."""
    upload = _UPLOADING.of(job)
    return None if upload is None or upload.generation != job.generation or job.ended_at is not None else upload


def lapse_of(job: jobs.SavedJob) -> Lapse | None:
    """Return why the job's running generation keeps no further step, or None."""
    lapse = _LAPSE.of(job) if job.state in RUNNING_JOBS else None
    return None if lapse is None or lapse.generation != job.generation else lapse
