"""DeleteTrainingJob and UndeleteTrainingJob.

DeleteTrainingJob deletes the records of an ended job at once. With DeleteObjects, it moves the job and its checkpoints
to the trash, from which UndeleteTrainingJob returns them (`loop.job_objects`). A deletion of objects for good removes
a limited number per call, and its last call also deletes the job's rows. A repeated call completes an interrupted
deletion.
"""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Query
from sqlalchemy.orm import Session

from control_plane.api import views
from control_plane.api.auth import User
from control_plane.api.deps import Services, ServicesDep, TrainingJobNamePath
from control_plane.api.router import Router
from control_plane.api.routes.jobs import find_job, require_no_dependent
from control_plane.api.schemas import jobs as jobs_schemas
from control_plane.core.checkpoints import TrashCause
from control_plane.db import automation, checkpoints, events, jobs
from control_plane.db.checkpoints import SavedCheckpoint
from control_plane.db.errors import Conflict
from control_plane.db.jobs import JobRows, SavedJob
from control_plane.loop import job_objects
from control_plane.loop.checkpoint_keeper import trash, trash_mark, untrash
from control_plane.loop.checkpoint_marks import TRASHED, folder_of, mark_trashed, unmark
from control_plane.loop.job_objects import JobSurvey
from control_plane.loop.records import run_folder

router = Router(prefix="/v1/training-jobs/{TrainingJobName}", tags=["TrainingJobs"])

TRASHED_AT_ONCE: Final = 200
"""Limit of checkpoints that one call moves to the trash, so that the call returns before clients time out."""


@router.delete("", operation_id="DeleteTrainingJob")
def delete_training_job(
    training_job_name: TrainingJobNamePath,
    caller: User,
    services: ServicesDep,
    delete_objects: Annotated[bool, Query(alias="DeleteObjects")] = False,
    skip_trash: Annotated[bool, Query(alias="SkipTrash")] = False,
    dry_run: Annotated[bool, Query(alias="DryRun")] = False,
) -> jobs_schemas.DeleteTrainingJobResponse:
    """Delete the records of a training job that has ended. Its objects in S3 remain unless DeleteObjects is set.

    With DeleteObjects, the job and its checkpoints stay in the trash for CheckpointConfig.TrashHours, and
    UndeleteTrainingJob returns them. Then the service deletes the job with its checkpoints, logs and outputs. With
    SkipTrash, or with TrashHours 0, the call deletes them for good, in the trash or not. With DryRun, the call deletes
    nothing and returns what it would delete. Raises ConflictException if the job has not ended, if a node still works
    for it, if an unfinished job starts from one of its checkpoints, or if DeleteObjects is set and a checkpoint is
    pinned. After a restore of the database, a deletion for good needs `everstep db restored` first.
    """
    with services.database.read() as session:
        job = find_job(session, training_job_name, caller)
        _require_deletable(session, job, with_objects=delete_objects)
        rows = jobs.rows_of(session, job.run_id)
    if dry_run:
        return _response(job, rows, job_objects.survey(services.objects, job))
    if not delete_objects:
        _forget(services, job)
        return _response(job, rows, is_deleted=True)
    if not skip_trash and job.spec.checkpoint_trash_hours > 0:
        has_more = job.purge_at is None and _trash(services, job)
        with services.database.read() as session:
            return _response(jobs.get_run(session, job.run_id), rows, has_more=has_more)
    with services.database.read() as session:
        automation.require_accepted_restore(session)
    seen = job_objects.survey(services.objects, job)
    if seen.is_pinned:
        raise Conflict(f"S3 has the mark of a pinned checkpoint of {job.name!r}; unpin it first (UnpinCheckpoint)")
    _mark_deleting(services, job)
    job_objects.delete_objects(services.objects, seen.found)
    if not seen.has_more:
        _forget(services, job)
    return _response(job, rows, seen, is_deleted=not seen.has_more)


@router.post("/undelete", operation_id="UndeleteTrainingJob")
def undelete_training_job(
    training_job_name: TrainingJobNamePath, caller: User, services: ServicesDep
) -> jobs_schemas.TrainingJobSummary:
    """Take a training job out of the trash, with all of its checkpoints that are in the trash.

    A job that is not in the trash stays unchanged. Raises ConflictException if the job's purge has begun.
    """
    now = services.now()
    with services.database.read() as session:
        job = find_job(session, training_job_name, caller)
        trashed = [each for each in checkpoints.of_run(session, job.run_id) if each.state == checkpoints.TRASHED]
        is_over = job.purge_at is not None and job.purge_at <= now and automation.may_delete(session)
    if is_over and not trashed:
        raise Conflict(f"the time of the training job {job.name!r} in the trash is over; it is being deleted")
    if job.purge_at is not None:
        folders = [run_folder(job.spec.checkpoint_uri, job.run_id), *(folder_of(each) for each in trashed)]
        unmark(services.objects, folders, TRASHED)
    with services.database.write() as session:
        job = find_job(session, training_job_name, caller)
        for each in checkpoints.of_run(session, job.run_id) if job.purge_at is not None else ():
            if each.state == checkpoints.TRASHED:
                untrash(session, job, each, now, pinned_at=None)
        job_objects.untrash_job(session, job, now)
        return views.job_summary(jobs.get_run(session, job.run_id), now)


def _require_deletable(session: Session, job: SavedJob, *, with_objects: bool) -> None:
    jobs.require_ended(session, job)
    require_no_dependent(session, job)
    if job.purge_at is not None and not with_objects:
        raise Conflict(f"the training job {job.name!r} is in the trash; take it out first (UndeleteTrainingJob)")
    if pinned := checkpoints.pinned_steps(session, job.run_id) if with_objects else ():
        steps = ", ".join(str(step) for step in pinned)
        raise Conflict(
            f"checkpoints of the training job {job.name!r} are pinned: step {steps}; unpin them first (UnpinCheckpoint)"
        )


def _trash(services: Services, job: SavedJob) -> bool:
    """Move checkpoints of a job to the trash, and the job with the last of them. Return whether checkpoints remain.

    Checkpoints that the limits have trashed get the purge time of the job, because no later checkpoint will remain.
    """
    with services.database.read() as session:
        left = [each for each in checkpoints.of_run(session, job.run_id) if _is_left(each)]
    some, has_more, now = left[:TRASHED_AT_ONCE], len(left) > TRASHED_AT_ONCE, services.now()
    mark = trash_mark(job, TrashCause.PERSON, now)
    folders = [folder_of(each) for each in some]
    for folder in folders if has_more else [*folders, run_folder(job.spec.checkpoint_uri, job.run_id)]:
        mark_trashed(services.objects, folder, mark)
    with services.database.write() as session:
        _require_deletable(session, job, with_objects=True)
        for each in some:
            current = checkpoints.find(session, job.run_id, step=each.step, generation=each.generation)
            if _is_left(current):
                trash(session, job, current, mark)
        if not has_more:
            jobs.set_purge_at(session, job.run_id, mark.purge_at)
            message = f"{job.name} is in the trash with its checkpoints, logs and outputs until {mark.purge_at}."
            events.append_for_job(session, job, "TrainingJobTrashed", message, now)
    return has_more


def _is_left(checkpoint: SavedCheckpoint) -> bool:
    is_trashed = checkpoint.state == checkpoints.TRASHED
    return checkpoint.state == checkpoints.COMPLETE or (is_trashed and checkpoint.trash_cause != TrashCause.PERSON)


def _mark_deleting(services: Services, job: SavedJob) -> None:
    """Mark the job's checkpoints as deleting, so that no request creates a job that starts from one of them."""
    with services.database.write() as session:
        _require_deletable(session, job, with_objects=True)
        for each in checkpoints.of_run(session, job.run_id):
            if each.state in (checkpoints.COMPLETE, checkpoints.TRASHED):
                checkpoints.set_state(session, job.run_id, each, checkpoints.DELETING)


def _forget(services: Services, job: SavedJob) -> None:
    with services.database.write() as session:
        require_no_dependent(session, job)
        job_objects.forget(session, job, services.now())


def _response(
    job: SavedJob, rows: JobRows, seen: JobSurvey | None = None, *, is_deleted: bool = False, has_more: bool = False
) -> jobs_schemas.DeleteTrainingJobResponse:
    found = () if seen is None else seen.found
    return jobs_schemas.DeleteTrainingJobResponse(
        training_job_name=job.name,
        run_id=job.run_id,
        is_deleted=is_deleted,
        purge_time=job.purge_at,
        generation_count=rows.generations,
        checkpoint_count=rows.checkpoints,
        incident_count=rows.incidents,
        node_seconds=job.node_microseconds / 1_000_000,
        cost_usd=job.cost_usd,
        object_count=len(found),
        object_bytes=sum(info.size_bytes for info in found),
        has_more_objects=has_more if seen is None else seen.has_more,
        s3_uris=list(
            dict.fromkeys(f"s3://{place.below.bucket}/{place.below.key}" for place in job_objects.places(job))
        ),
    )
