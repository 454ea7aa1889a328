"""DeleteTrainingJob: deletes the records of an ended job and, on request, its objects in S3.

Each call deletes at most `OBJECTS_AT_ONCE` objects. A call that leaves no object to delete also deletes the job's rows
in the database. A repeated call completes an interrupted deletion.

Invariant: a call deletes only objects of the job's own run or generations, because other jobs may write below the same
prefix. In the service's bucket, a call searches only the job's own prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

from fastapi import Query

from control_plane.api.auth import User
from control_plane.api.deps import Services, ServicesDep, TrainingJobNamePath
from control_plane.api.router import Router
from control_plane.api.routes.jobs import find_job, require_no_dependent
from control_plane.api.routes.results import has_own_outputs
from control_plane.api.schemas import jobs as jobs_schemas
from control_plane.cloud.objects import DELETED_AT_ONCE, ObjectInfo
from control_plane.db import checkpoints, events, jobs
from control_plane.db.errors import Conflict, NotFound
from control_plane.db.jobs import SavedJob
from control_plane.loop.records import prefix_of
from everstep.protocol.plan import ObjectReference

router = Router(prefix="/v1/training-jobs/{TrainingJobName}", tags=["TrainingJobs"])

OBJECTS_AT_ONCE = 10_000
"""Limit of objects that one call deletes, so that the call returns before clients time out."""


@dataclass(frozen=True, slots=True)
class _Place:
    """An S3 prefix below which the job writes objects."""

    below: ObjectReference
    own: re.Pattern[str]
    """Pattern of the keys of the job's own objects. It must match the part of a key after the prefix `below`."""


@router.delete("", operation_id="DeleteTrainingJob")
def delete_training_job(
    training_job_name: TrainingJobNamePath,
    caller: User,
    services: ServicesDep,
    delete_objects: Annotated[bool, Query(alias="DeleteObjects")] = False,
    dry_run: Annotated[bool, Query(alias="DryRun")] = False,
) -> jobs_schemas.DeleteTrainingJobResponse:
    """Delete the records of a training job that has ended.

    Its objects in S3 remain unless DeleteObjects is set. With DryRun, the call deletes nothing and returns what it
    would delete. Raises ConflictException if the job has not ended, if a node still works for it, if an unfinished job
    starts from one of its checkpoints, or if DeleteObjects is set and a checkpoint is pinned.
    """
    with services.database.read() as session:
        job = find_job(session, training_job_name, caller)
        jobs.require_ended(session, job)
        require_no_dependent(session, job)
        rows = jobs.rows_of(session, job.run_id)
        pinned = checkpoints.pinned_steps(session, job.run_id) if delete_objects else ()
    if pinned:
        steps = ", ".join(str(step) for step in pinned)
        raise Conflict(
            f"checkpoints of the training job {job.name!r} are pinned: step {steps}; unpin them first (UnpinCheckpoint)"
        )
    if delete_objects and not dry_run:
        _mark_deleting(services, job)
    found = list(islice(_objects(services, job), OBJECTS_AT_ONCE + 1)) if delete_objects or dry_run else []
    has_more, found = len(found) > OBJECTS_AT_ONCE, found[:OBJECTS_AT_ONCE]
    if not dry_run:
        _delete(services, found)
        if not has_more:
            _forget(services, job)
    return jobs_schemas.DeleteTrainingJobResponse(
        training_job_name=job.name,
        run_id=job.run_id,
        is_deleted=not dry_run and not has_more,
        generation_count=rows.generations,
        checkpoint_count=rows.checkpoints,
        incident_count=rows.incidents,
        node_seconds=job.node_microseconds / 1_000_000,
        cost_usd=job.cost_usd,
        object_count=len(found),
        object_bytes=sum(info.size_bytes for info in found),
        has_more_objects=has_more,
        s3_uris=list(dict.fromkeys(f"s3://{place.below.bucket}/{place.below.key}" for place in _places(services, job))),
    )


def _mark_deleting(services: Services, job: SavedJob) -> None:
    """Mark the job's checkpoints as deleting, so that no request creates a job that starts from one of them."""
    with services.database.write() as session:
        require_no_dependent(session, job)
        for each in checkpoints.of_run(session, job.run_id):
            if each.state == checkpoints.COMPLETE:
                checkpoints.set_state(session, job.run_id, each, checkpoints.DELETING)


def _forget(services: Services, job: SavedJob) -> None:
    now = services.now()
    with services.database.write() as session:
        require_no_dependent(session, job)
        try:
            jobs.remove(session, job.run_id)
        except NotFound:
            return  # A concurrent identical request has already deleted the job and stored the event.
        message = f"{job.name} was deleted: {job.reason}"
        events.append_for_job(session, job, "TrainingJobDeleted", message, now)


def _places(services: Services, job: SavedJob) -> tuple[_Place, ...]:
    of_generations = re.compile(r"gen=\d+/.*", re.DOTALL)
    return (
        _Place(prefix_of(job.spec.checkpoint_uri), re.compile(rf"run={re.escape(job.run_id)}/.*", re.DOTALL)),
        _Place(prefix_of(job.spec.log_uri), of_generations),
        *([_Place(prefix_of(job.spec.output_uri), of_generations)] if has_own_outputs(job, services.bucket) else []),
    )


def _objects(services: Services, job: SavedJob) -> Iterator[ObjectInfo]:
    for place in _places(services, job):
        for info in services.objects.list(place.below):
            if place.own.fullmatch(info.reference.key[len(place.below.key) :]):
                yield info


def _delete(services: Services, found: list[ObjectInfo]) -> None:
    by_bucket: dict[str, list[str]] = {}
    for info in found:
        by_bucket.setdefault(info.reference.bucket, []).append(info.reference.key)
    for bucket, keys in by_bucket.items():
        for first in range(0, len(keys), DELETED_AT_ONCE):
            services.objects.delete(bucket, keys[first : first + DELETED_AT_ONCE])
