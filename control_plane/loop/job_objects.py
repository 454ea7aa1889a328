"""The objects of a job in S3: where they are, their deletion, and the trash of jobs.

After `purge_at`, `loop.checkpoint_keeper` deletes the checkpoints, each after a last check. Then `purge` deletes the
logs and outputs, and at last the job's rows.

Invariant: only objects of the job's own run or generations are deleted, because other jobs may write below the same
prefix. A job is purged only if S3 has its mark of the trash and no mark of a pin (`loop.checkpoint_marks`), and if none
of its checkpoints is outside of the trash.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy.orm import Session

from control_plane.cloud.objects import ObjectInfo, ServiceStore, delete_all
from control_plane.core.orphans import PLACE
from control_plane.db import checkpoints, events, jobs
from control_plane.db.errors import NotFound
from control_plane.db.jobs import SavedJob
from control_plane.db.session import Database
from control_plane.loop.checkpoint_marks import PINNED, TRASHED
from control_plane.loop.records import prefix_of, run_folder
from everstep.protocol.plan import ObjectReference

log = logging.getLogger(__name__)

OBJECTS_AT_ONCE: Final = 10_000
"""Limit of objects that one request or pass deletes, so that a request returns before clients time out."""


@dataclass(frozen=True, slots=True)
class _Place:
    """An S3 prefix below which the job writes objects."""

    below: ObjectReference
    own: re.Pattern[str]
    """It must match the part of the job's own keys after the prefix `below`."""


def own_place(bucket: str, project: str, name: str, run_id: str) -> str:
    """Return the prefix (an S3 URI that ends with a slash) below which only one run of a job writes."""
    # All objects of a project have one prefix, so that an IAM policy can limit a role to a project.
    return f"s3://{bucket}/projects/{project}/jobs/{name}/run={run_id}/"


def has_own_outputs(job: SavedJob) -> bool:
    """Return whether the service may read and delete objects below the job's output path.

    In the service's bucket, the path must be below the job's own prefix. Older versions of Everstep allowed output
    paths there that also contain objects of other jobs.
    """
    bucket = job.spec.source_bucket
    own = own_place(bucket, job.project, job.name, job.run_id), f"s3://{bucket}/jobs/{job.name}/run={job.run_id}/"
    return prefix_of(job.spec.output_uri).bucket != bucket or job.spec.output_uri.startswith(own)


def places(job: SavedJob) -> tuple[_Place, ...]:
    """Return where the objects of a job are: its checkpoints, logs and outputs."""
    of_generations = re.compile(r"gen=\d+/.*", re.DOTALL)
    return (
        _Place(prefix_of(job.spec.checkpoint_uri), re.compile(rf"run={re.escape(job.run_id)}/.*", re.DOTALL)),
        _Place(prefix_of(job.spec.log_uri), of_generations),
        *([_Place(prefix_of(job.spec.output_uri), of_generations)] if has_own_outputs(job) else []),
    )


def objects_of(objects: ServiceStore, job: SavedJob) -> Iterator[ObjectInfo]:
    """Yield all objects of a job."""
    for place in places(job):
        for info in objects.list(place.below):
            if place.own.fullmatch(info.reference.key[len(place.below.key) :]):
                yield info


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSurvey:
    """The objects of a job that one call may delete, and the marks beside them."""

    found: Sequence[ObjectInfo]
    has_more: bool
    is_pinned: bool
    is_trashed: bool


def survey(objects: ServiceStore, job: SavedJob) -> JobSurvey:
    """List the objects of a job: all of its checkpoints, and at most `OBJECTS_AT_ONCE` to delete."""
    folder = run_folder(job.spec.checkpoint_uri, job.run_id)
    found: list[ObjectInfo] = []
    has_more = is_pinned = is_trashed = False
    for info in objects_of(objects, job):
        name = info.reference.key.removeprefix(folder.key)
        if (has_more := len(found) == OBJECTS_AT_ONCE) and name == info.reference.key:
            break  # Only the checkpoints have marks.
        place = PLACE.match(name)
        is_pinned |= place is not None and name == f"{place[0]}{PINNED}"
        is_trashed |= name == TRASHED
        found += [] if has_more else [info]
    return JobSurvey(found=found, has_more=has_more, is_pinned=is_pinned, is_trashed=is_trashed)


def delete_objects(objects: ServiceStore, some: Iterable[ObjectInfo]) -> None:
    """Delete objects of any number and in any buckets."""
    by_bucket: dict[str, list[str]] = {}
    for info in some:
        by_bucket.setdefault(info.reference.bucket, []).append(info.reference.key)
    for bucket, keys in by_bucket.items():
        delete_all(objects, bucket, keys)


def forget(session: Session, job: SavedJob, now: datetime) -> None:
    """Delete the rows of an ended job, and record the event once. `session` comes from `Database.write`."""
    try:
        jobs.remove(session, job.run_id)
    except NotFound:
        return  # A concurrent identical deletion has already deleted the job and stored the event.
    events.append_for_job(session, job, "TrainingJobDeleted", f"{job.name} was deleted: {job.reason}", now)


def untrash_job(session: Session, job: SavedJob, now: datetime) -> None:
    """Take a job out of the trash, without its checkpoints. Nothing happens if the job is not in the trash."""
    if job.purge_at is not None:
        jobs.set_purge_at(session, job.run_id, None)
        events.append_for_job(session, job, "TrainingJobUndeleted", f"{job.name} left the trash.", now)


def purge(database: Database, objects: ServiceStore, run_id: str, now: datetime) -> None:
    """Delete what is left of a job whose time in the trash is over and whose checkpoints are deleted.

    A mark in S3 wins over the database. Raises CloudError, and leaves the job in the trash, if S3 does not answer.
    """
    with database.read() as session:
        job = jobs.get_run(session, run_id)
        states = {each.state for each in checkpoints.of_run(session, run_id)}
    is_kept = checkpoints.COMPLETE in states
    if (
        job.purge_at is None
        or job.purge_at > now
        or (states & {checkpoints.TRASHED, checkpoints.DELETING} and not is_kept)
    ):
        return
    seen = survey(objects, job)
    if is_kept or seen.is_pinned or not seen.is_trashed:
        with database.write() as session:
            untrash_job(session, jobs.get_run(session, run_id), now)
        return
    # At most `OBJECTS_AT_ONCE` objects are deleted, and the job's mark last, so that the next call continues after a
    # crash.
    mark = f"{run_folder(job.spec.checkpoint_uri, run_id).key}{TRASHED}"
    delete_objects(objects, [each for each in seen.found if each.reference.key != mark])
    if not seen.has_more:
        with database.write() as session:
            job = jobs.get_run(session, run_id)
            if job.purge_at is not None:
                forget(session, job, now)
        objects.delete(places(job)[0].below.bucket, [mark])
