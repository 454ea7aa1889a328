"""Operations that create, describe, verify, pin, delete and undelete checkpoints. `routes.jobs` has ListCheckpoints.

A request names a checkpoint by its step. If two generations of a job have a checkpoint of the same step, the request
must also name the generation.

Invariant: DeleteCheckpoint refuses to delete a pinned checkpoint, and the checkpoint from which an unfinished job would
be restored next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Annotated

from fastapi import Depends, Path, Query
from sqlalchemy.orm import Session

from control_plane.api import views
from control_plane.api.auth import Caller, Reader, User
from control_plane.api.deps import ServicesDep, TrainingJobNamePath
from control_plane.api.router import Router
from control_plane.api.routes.jobs import find_job, require_no_dependent
from control_plane.api.schemas import checkpoints as checkpoints_schemas
from control_plane.api.schemas import common as common_schemas
from control_plane.core.checkpoints import TrashCause
from control_plane.core.states import JobState
from control_plane.db import automation, checkpoints, events, jobs
from control_plane.db.checkpoints import SavedCheckpoint
from control_plane.db.errors import Conflict
from control_plane.db.jobs import SavedJob
from control_plane.loop.checkpoint_keeper import delete, is_same, restorable, trash, trash_mark, untrash
from control_plane.loop.checkpoint_marks import (
    PINNED,
    TRASHED,
    folder_of,
    mark_pinned,
    mark_trashed,
    standing_of,
    unmark,
)
from control_plane.loop.job_objects import untrash_job
from control_plane.loop.records import run_folder

router = Router(prefix="/v1/training-jobs/{TrainingJobName}/checkpoints", tags=["Checkpoints"])

PATIENCE = timedelta(seconds=600)
"""Age at which a request for a checkpoint expires if the checkpoint does not exist yet.

The next CreateCheckpoint call then requests a checkpoint of the step that is the newest at the time of this call.
"""
_STORED = (checkpoints.COMPLETE, checkpoints.TRASHED)
StepPath = Annotated[int, Path(alias="Step", ge=0, le=common_schemas.MAX_WHOLE_NUMBER)]
GenerationQuery = Annotated[int | None, Query(alias="Generation", ge=1, le=2**31 - 1)]


@dataclass(frozen=True, slots=True)
class CheckpointName:
    """The job, the step and, unless any generation may have made the checkpoint, the generation of a checkpoint."""

    job_name: str
    step: int
    generation: int | None


async def named(
    training_job_name: TrainingJobNamePath, step: StepPath, generation: GenerationQuery = None
) -> CheckpointName:
    """Return the checkpoint that a request names. A coroutine, because FastAPI would run a function in a thread."""
    return CheckpointName(training_job_name, step, generation)


Which = Annotated[CheckpointName, Depends(named)]


@router.post("", operation_id="CreateCheckpoint", status_code=202)
def create_checkpoint(
    training_job_name: TrainingJobNamePath, caller: User, services: ServicesDep
) -> checkpoints_schemas.CreateCheckpointResponse:
    """Request a checkpoint in S3 of a running job's newest committed step or of a later step.

    While a requested checkpoint is not complete, repeated calls change nothing. Raises ConflictException if the job has
    no checkpoint of its newest step and cannot make one. The job is then not running, or has no committed step.
    """
    now = services.now()
    with services.change() as session:
        job = find_job(session, training_job_name, caller)
        newest = restorable(session, job)
        is_new = False
        wanted = job.committed_step
        if newest is not None and newest.step >= wanted:
            wanted = int(newest.step)
        else:
            if job.state != JobState.RUNNING or wanted <= 0:
                raise Conflict(_why_none(job))
            is_outstanding = job.checkpoint_wanted_step > (-1 if newest is None else newest.step)
            is_new = not is_outstanding or job.checkpoint_wanted_at is None or now - job.checkpoint_wanted_at > PATIENCE
            wanted = wanted if is_new else job.checkpoint_wanted_step
        if is_new:
            jobs.want_checkpoint(session, job.run_id, wanted, now)
            message = f"A checkpoint of step {wanted} or the next step was requested for {job.name}."
            events.append_for_job(session, job, "CheckpointRequested", message, services.now())
    is_there = newest is not None and newest.step >= wanted
    return checkpoints_schemas.CreateCheckpointResponse(
        training_job_name=job.name, run_id=job.run_id, step=wanted, status="Complete" if is_there else "Requested"
    )


@router.get("/{Step}", operation_id="DescribeCheckpoint")
def describe_checkpoint(which: Which, caller: Reader, services: ServicesDep) -> checkpoints_schemas.Checkpoint:
    """Describe one checkpoint: where its manifest is, whether it is complete and pinned, and its last verification.

    Until DeleteTrainingJob, the operation also describes a deleted checkpoint, with the status Deleted.
    """
    with services.database.read() as session:
        _, found = _find(session, which, caller)
    return views.checkpoint(found)


@router.post("/{Step}/verify", operation_id="VerifyCheckpoint", status_code=202)
def verify_checkpoint(which: Which, caller: User, services: ServicesDep) -> checkpoints_schemas.Checkpoint:
    """Read a checkpoint's objects back and compare their hashes with the manifest.

    The verification runs in the background. The checkpoint record then shows its result and time.
    """
    with services.database.write() as session:
        job, found = _find(session, which, caller)
        _require_complete(found)
        found = checkpoints.ask_to_verify(session, job.run_id, found, services.now())
    return views.checkpoint(found)


@router.post("/{Step}/pin", operation_id="PinCheckpoint")
def pin_checkpoint(which: Which, caller: User, services: ServicesDep) -> checkpoints_schemas.Checkpoint:
    """Protect a checkpoint from deletion until UnpinCheckpoint."""
    now = services.now()
    with services.database.read() as session:
        _, found = _find(session, which, caller)
        _require_complete(found)
    mark_pinned(services.objects, found, found.pinned_at or now)
    with services.database.write() as session:
        job, found = _find(session, replace(which, generation=found.generation), caller)
        _require_complete(found)
        if found.pinned_at is None:
            found = checkpoints.set_pinned(session, job.run_id, found, now)
            message = f"The checkpoint of step {found.step} was pinned."
            events.append_for_job(session, job, "CheckpointPinned", message, now)
    return views.checkpoint(found)


@router.post("/{Step}/unpin", operation_id="UnpinCheckpoint")
def unpin_checkpoint(which: Which, caller: User, services: ServicesDep) -> checkpoints_schemas.Checkpoint:
    """Allow the deletion of a pinned checkpoint again."""
    with services.database.write() as session:
        job, found = _find(session, which, caller)
        if found.pinned_at is not None:
            found = checkpoints.set_pinned(session, job.run_id, found, None)
            events.append_for_job(
                session, job, "CheckpointUnpinned", f"The checkpoint of step {found.step} was unpinned.", services.now()
            )
    unmark(services.objects, [folder_of(found)], PINNED)
    return views.checkpoint(found)


@router.delete("/{Step}", operation_id="DeleteCheckpoint")
def delete_checkpoint(
    training_job_name: TrainingJobNamePath,
    step: StepPath,
    caller: User,
    services: ServicesDep,
    generation: GenerationQuery = None,
    skip_trash: Annotated[bool, Query(alias="SkipTrash")] = False,
) -> checkpoints_schemas.Checkpoint:
    """Move a checkpoint to the trash, from which Everstep deletes it after CheckpointConfig.TrashHours.

    Until then, UndeleteCheckpoint returns it. With SkipTrash, or with TrashHours 0, the call deletes the checkpoint
    from S3 for good, in the trash or not. Raises ConflictException for a pinned checkpoint, for the checkpoint from
    which an unfinished job would be restored next, and for a checkpoint that another unfinished job names as its
    InitialCheckpoint. After a restore of the database, a deletion for good needs `everstep db restored` first.
    """
    which = CheckpointName(training_job_name, step, generation)
    with services.database.read() as session:
        job, found = _find(session, which, caller)
        if found.state == checkpoints.COMPLETE:
            _require_not_needed(session, job, found)
        mark = trash_mark(job, TrashCause.PERSON, services.now())
        is_for_good = skip_trash or mark.purge_at == mark.trashed_at
        if is_for_good:
            automation.require_accepted_restore(session)
    if found.state == checkpoints.COMPLETE and not is_for_good:
        mark_trashed(services.objects, folder_of(found), mark)
    if is_for_good and found.state in _STORED and standing_of(services.objects, found).is_pinned:
        raise _pinned(found)
    with services.database.write() as session:
        job, found = _find(session, replace(which, generation=found.generation), caller)
        if found.state == checkpoints.COMPLETE:
            _require_not_needed(session, job, found)
            if not is_for_good:
                found = trash(session, job, found, mark)
        if is_for_good and found.state in _STORED:
            found = checkpoints.set_state(session, job.run_id, found, checkpoints.DELETING)
    if found.state == checkpoints.DELETING:
        found = delete(services.database, services.objects, job.run_id, found, services.now())
    return views.checkpoint(found)


@router.post("/{Step}/undelete", operation_id="UndeleteCheckpoint")
def undelete_checkpoint(which: Which, caller: User, services: ServicesDep) -> checkpoints_schemas.Checkpoint:
    """Take a checkpoint out of the trash, and pin it. Its job leaves the trash, too, with its logs and outputs.

    Without the pin, the job's limits could delete the checkpoint again. Raises ConflictException for a checkpoint that
    is being deleted or was deleted.
    """
    now = services.now()
    with services.database.read() as session:
        job, found = _find(session, which, caller, first=checkpoints.TRASHED)
    if found.state == checkpoints.TRASHED:
        mark_pinned(services.objects, found, now)
        unmark(services.objects, [folder_of(found), run_folder(job.spec.checkpoint_uri, job.run_id)], TRASHED)
    with services.database.write() as session:
        job, found = _find(session, replace(which, generation=found.generation), caller)
        if found.state == checkpoints.TRASHED:
            found = untrash(session, job, found, now, pinned_at=now)
            untrash_job(session, job, now)
    _require_complete(found)
    return views.checkpoint(found)


def _find(
    session: Session, which: CheckpointName, caller: Caller, first: str = checkpoints.COMPLETE
) -> tuple[SavedJob, SavedCheckpoint]:
    job = find_job(session, which.job_name, caller)
    return job, checkpoints.find(session, job.run_id, step=which.step, generation=which.generation, first=first)


def _require_complete(found: SavedCheckpoint) -> None:
    if found.state != checkpoints.COMPLETE:
        raise Conflict(f"the checkpoint of step {found.step} is {found.state}")


def _require_not_needed(session: Session, job: SavedJob, found: SavedCheckpoint) -> None:
    if found.pinned_at is not None:
        raise _pinned(found)
    require_no_dependent(session, job, (found.generation, found.step))
    if job.ended_at is not None:
        return
    if is_same(found, restorable(session, job)):
        raise Conflict(
            f"the checkpoint of step {found.step} is the newest from which {job.name!r} can restore; create another "
            "one first (CreateCheckpoint)"
        )
    if job.state in (JobState.PREPARING, JobState.LOADING):
        raise Conflict(
            f"{job.name!r} is restoring, possibly from the checkpoint of step {found.step}; retry when it trains"
        )


def _pinned(found: SavedCheckpoint) -> Conflict:
    return Conflict(f"the checkpoint of step {found.step} is pinned; unpin it first (UnpinCheckpoint)")


def _why_none(job: SavedJob) -> str:
    if job.ended_at is not None:
        return f"the training job {job.name!r} has ended: {job.reason}"
    if job.state != JobState.RUNNING:
        return f"the training job {job.name!r} is not training: {job.reason}"
    return f"the training job {job.name!r} has not committed a step yet"
