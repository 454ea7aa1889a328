"""Moves checkpoints to the trash by the limits of the job, and purges the trash.

    complete ◀──▶ trashed ──last check──▶ deleting ──▶ delete the manifest ──▶ delete the other objects ──▶ deleted

A deletion is idempotent: after a crash, any server continues it. A checkpoint that exceeds the limits enters the trash
only after a later checkpoint has been verified. After the job's end, a person's own deletion needs no later checkpoint.

Invariant: the limits never make the keeper trash a pinned checkpoint, the newest checkpoint, the source of the job's
next restore, the initial state of another unfinished job, or a checkpoint without a later verified checkpoint. The
keeper purges a checkpoint only if the database and the marks in S3 agree (`loop.checkpoint_marks`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy.orm import Session

from control_plane.cloud.errors import CloudError
from control_plane.cloud.objects import ServiceStore, delete_all
from control_plane.core.checkpoints import (
    CheckpointRetention,
    KeptCheckpoint,
    TrashCause,
    TrashMark,
    newest_safe,
    surplus,
    to_verify,
)
from control_plane.core.checkpoints import restorable as all_restorable
from control_plane.core.observed.steps import CheckpointRecord as RestorableCheckpoint
from control_plane.core.states import JobState
from control_plane.db import automation, checkpoints, events, jobs
from control_plane.db.checkpoints import SavedCheckpoint
from control_plane.db.errors import NotFound
from control_plane.db.jobs import SavedJob
from control_plane.db.session import Database
from control_plane.loop import records
from control_plane.loop.checkpoint_marks import (
    folder_of,
    is_over,
    is_stored,
    mark_issued,
    mark_pinned,
    mark_trashed,
    standing_of,
)
from control_plane.loop.job_objects import purge
from everstep.protocol.errors import ProtocolError
from everstep.protocol.ids import Generation
from everstep.protocol.plan import ObjectReference

log = logging.getLogger(__name__)

DELETION_CHECK_SECONDS: Final = 5.0
AT_ONCE: Final = 16
_RESTORING: Final = frozenset({JobState.PREPARING, JobState.LOADING})


class CheckpointKeeper:
    """The loop that deletes checkpoints and jobs at a user's request, and checkpoints by the limits of a job."""

    def __init__(self, database: Database, objects: ServiceStore, now: Callable[[], datetime]) -> None:
        self._database = database
        self._objects = objects
        self._now = now
        self._has_marked_pins = False
        self._issued: dict[str, int] = {}
        """For each run, the number in its mark of the highest issued generation, as far as this server wrote it."""

    def delete_due(self) -> None:
        """Trash and purge all checkpoints of all jobs that are due. Blocks."""
        self._mark_facts()
        with self._database.read() as session:
            if not automation.may_delete(session):
                return
            run_ids = checkpoints.runs_to_look_after(session, self._now())
        for run_id in run_ids:
            try:
                self._trash_surplus(run_id)
                self._purge_due(run_id)
                with self._database.read() as session:
                    deleting = [
                        each
                        for each in checkpoints.of_run(session, run_id, with_deleted=False)
                        if each.state == checkpoints.DELETING
                    ]
                for each in reversed(deleting):
                    delete(self._database, self._objects, run_id, each, self._now())
                purge(self._database, self._objects, run_id, self._now())
            except CloudError as error:
                log.warning("run %s: could not delete a checkpoint; the next pass retries: %s", run_id, error)
            except ProtocolError as error:
                log.error("run %s: its checkpoints stay, because a stored manifest is invalid: %s", run_id, error)
            except NotFound:
                log.info("run %s: the job was deleted, with its checkpoints", run_id)

    def _trash_surplus(self, run_id: str) -> None:
        with self._database.read() as session:
            job, chosen, _ = self._surplus(session, run_id)
        now = self._now()
        mark = trash_mark(job, TrashCause.RETENTION, now)
        for each in chosen.values():
            mark_trashed(self._objects, folder_of(each), mark)
        # One transaction reads which checkpoints are pinned or needed and changes their state, so that no user can pin
        # a checkpoint in between. S3 has the marks before it.
        with self._database.write() as session:
            _, confirmed, unverified = self._surplus(session, run_id)
            for key in chosen.keys() & confirmed.keys():
                trash(session, job, confirmed[key], mark)
            if unverified is not None and unverified.verify_requested_at is None:
                checkpoints.ask_to_verify(session, run_id, unverified, now)

    def _surplus(
        self, session: Session, run_id: str
    ) -> tuple[SavedJob, Mapping[tuple[int, int], SavedCheckpoint], SavedCheckpoint | None]:
        """Return the job, its surplus checkpoints, and the checkpoint to verify before the keeper deletes more."""
        job, now = jobs.get_run(session, run_id), self._now()
        rows = checkpoints.of_run(session, run_id, with_deleted=False)
        waiting = [each.step for each in rows if _is_due(each, now) and _needs_later(job, each)]
        limits = CheckpointRetention(
            max_count=job.spec.checkpoint_max_count,
            keep_every_steps=job.spec.checkpoint_keep_every_steps,
            max_age_seconds=job.spec.checkpoint_max_age_seconds,
        )
        if job.state in _RESTORING or not (limits.is_limited or waiting):
            return job, {}, None
        found = {(each.generation, each.step): each for each in rows if each.state == checkpoints.COMPLETE}
        kept = _kept(session, job, found)
        keys = surplus(kept, limits, now.timestamp())[:AT_ONCE]
        unverified = to_verify(kept, limits, now.timestamp(), waiting)
        return job, {key: found[key] for key in keys}, None if unverified is None else found[unverified]

    def _purge_due(self, run_id: str) -> None:
        with self._database.read() as session:
            job = jobs.get_run(session, run_id)
            due = [
                each for each in checkpoints.of_run(session, run_id, with_deleted=False) if _is_due(each, self._now())
            ]
            safe = _newest_safe(session, job)
        for each in due:
            needs_later = _needs_later(job, each)
            disposition = standing_of(self._objects, each)
            if disposition.may_purge and not is_over(self._objects, each, disposition):
                log.error("run %s: step %d is not purged, because S3's clock is behind", run_id, each.step)
                continue
            if disposition.may_purge and needs_later and not self._has_later(run_id, each, safe):
                continue
            with self._database.write() as session:
                job, now = jobs.get_run(session, run_id), self._now()
                current = checkpoints.find(session, run_id, step=each.step, generation=each.generation)
                if not _is_due(current, now) or job.state in _RESTORING:
                    continue
                if not disposition.may_purge:
                    untrash(session, job, current, now, pinned_at=now if disposition.is_pinned else None)
                elif not needs_later or _newest_safe(session, job) == safe:
                    checkpoints.set_state(session, run_id, current, checkpoints.DELETING)

    def _has_later(self, run_id: str, trashed: SavedCheckpoint, safe: SavedCheckpoint | None) -> bool:
        """Return whether S3 still stores the verified checkpoint `safe`, and `safe` is later than `trashed`."""
        if safe is None or safe.step <= trashed.step:
            return False  # `_surplus` requests the verification of a later checkpoint.
        if is_stored(self._objects, safe):
            return True
        log.error("run %s: S3 lacks objects of step %d, so step %d is not purged", run_id, safe.step, trashed.step)
        if safe.verify_requested_at is None:
            with self._database.write() as session:
                checkpoints.ask_to_verify(session, run_id, safe, self._now())
        return False

    def _mark_facts(self) -> None:
        """Write the marks that S3 may lack: all pins, once per server, and generation numbers that have grown."""
        with self._database.read() as session:
            issued = jobs.issued_generations(session)
            # Older versions of Everstep did not mark pins.
            pinned = [] if self._has_marked_pins else checkpoints.pinned(session)
        written = [self._try(f"step {each.step}", mark_pinned, each, each.pinned_at or self._now()) for each in pinned]
        self._has_marked_pins = all(written)
        for run_id, (uri, number) in issued.items():
            folder = records.run_folder(uri, run_id)
            is_new = number > self._issued.get(run_id, 0)
            if is_new and self._try(f"run {run_id}", mark_issued, folder, Generation(number)):
                self._issued[run_id] = number

    def _try(self, what: str, write: Callable[..., None], *arguments: object) -> bool:
        try:
            write(self._objects, *arguments)
        except CloudError as error:
            log.warning("%s: could not write a mark to S3; the next pass retries: %s", what, error)
            return False
        return True


def trash_mark(job: SavedJob, cause: TrashCause, now: datetime) -> TrashMark:
    """Return the mark of a checkpoint that moves to the trash now."""
    hours = timedelta(hours=job.spec.checkpoint_trash_hours)
    return TrashMark(trashed_at=now, purge_at=now + hours, trash_cause=cause)


def trash(session: Session, job: SavedJob, checkpoint: SavedCheckpoint, mark: TrashMark) -> SavedCheckpoint:
    """Move a complete checkpoint to the trash, and record the event. S3 must have the mark already."""
    after = checkpoints.set_trashed(session, job.run_id, checkpoint, mark)
    message = (
        f"The checkpoint of step {after.step} is in the trash: {after.object_bytes:,} bytes until {mark.purge_at}."
    )
    events.append_for_job(session, job, "CheckpointTrashed", message, mark.trashed_at)
    return after


def untrash(
    session: Session, job: SavedJob, checkpoint: SavedCheckpoint, now: datetime, *, pinned_at: datetime | None
) -> SavedCheckpoint:
    """Take a checkpoint out of the trash, pinned if `pinned_at` is a time, and record the event.

    S3 must have lost the mark of the trash, or have the mark of the pin.
    """
    checkpoints.set_pinned(session, job.run_id, checkpoint, pinned_at or checkpoint.pinned_at)
    after = checkpoints.set_state(session, job.run_id, checkpoint, checkpoints.COMPLETE)
    message = f"The checkpoint of step {after.step} left the trash."
    events.append_for_job(session, job, "CheckpointUndeleted", message, now)
    return after


def _is_due(checkpoint: SavedCheckpoint, now: datetime) -> bool:
    is_trashed = checkpoint.state == checkpoints.TRASHED
    return is_trashed and checkpoint.purge_at is not None and checkpoint.purge_at <= now


def _needs_later(job: SavedJob, checkpoint: SavedCheckpoint) -> bool:
    return checkpoint.trash_cause == TrashCause.RETENTION or job.ended_at is None


def _kept(session: Session, job: SavedJob, complete: Mapping[tuple[int, int], SavedCheckpoint]) -> list[KeptCheckpoint]:
    needed = restorable(session, job)
    dependents = (each.spec.initial for each in jobs.starting_from(session, job.run_id))
    initial_states = {(each.generation, each.step) for each in dependents if each is not None}
    usable = {(each.generation, each.step) for each in _all_restorable(session, job)}
    return [
        KeptCheckpoint(
            generation=each.generation,
            step=each.step,
            completed_at=(each.completed_at or each.created_at).timestamp(),
            is_needed=each.pinned_at is not None
            or each.verify_requested_at is not None
            or is_same(each, needed)
            or key in initial_states,
            is_counted=each.pinned_at is None,
            is_restorable=key in usable,
            is_verified=each.verdict is not None and not each.is_wrong,
        )
        for key, each in complete.items()
    ]


def _newest_safe(session: Session, job: SavedJob) -> SavedCheckpoint | None:
    rows = checkpoints.of_run(session, job.run_id, with_deleted=False)
    found = {(each.generation, each.step): each for each in rows if each.state == checkpoints.COMPLETE}
    safe = newest_safe(_kept(session, job, found))
    return None if safe is None else found[safe.key]


def restorable(session: Session, job: SavedJob) -> RestorableCheckpoint | None:
    """Return the newest checkpoint from which the job could be restored, or None."""
    return max(_all_restorable(session, job), key=lambda each: (each.step, each.generation), default=None)


def _all_restorable(session: Session, job: SavedJob) -> tuple[RestorableCheckpoint, ...]:
    known = (records.checkpoint_record(each) for each in checkpoints.of_run(session, job.run_id, with_deleted=False))
    lineage = records.lineage_of(job, jobs.lineage(session, job.run_id))
    return all_restorable([each for each in known if each is not None], lineage, Generation(job.generation))


def is_same(checkpoint: SavedCheckpoint, other: RestorableCheckpoint | None) -> bool:
    """Return whether a database row and the result of `restorable` describe the same checkpoint."""
    return other is not None and (checkpoint.generation, checkpoint.step) == (other.generation, other.step)


def delete(
    database: Database, objects: ServiceStore, run_id: str, checkpoint: SavedCheckpoint, now: datetime
) -> SavedCheckpoint:
    """Delete the objects of a checkpoint in state deleting, and record the event once. Idempotent. Blocks on S3.

    Raises CloudError if S3 did not delete all objects; the checkpoint then stays in state deleting. Raises NotFound if
    the job was removed.
    """
    # Delete the manifest first, so that a partly deleted checkpoint never looks complete.
    objects.delete(checkpoint.bucket, [checkpoint.manifest_key])
    folder, _, _ = checkpoint.manifest_key.rpartition("/")
    keys = [info.reference.key for info in objects.list(ObjectReference(bucket=checkpoint.bucket, key=f"{folder}/"))]
    delete_all(objects, checkpoint.bucket, keys)
    with database.write() as session:
        job = jobs.get_run(session, run_id)
        before = checkpoints.find(session, run_id, step=checkpoint.step, generation=checkpoint.generation)
        if before.state == checkpoints.DELETED:
            return before
        after = checkpoints.set_state(session, run_id, before, checkpoints.DELETED)
        message = f"The checkpoint of step {before.step} was deleted: {before.object_bytes:,} bytes."
        events.append_for_job(session, job, "CheckpointDeleted", message, now)
    if job.ended_at is not None:
        try:
            _delete_frozen(database, objects, job, checkpoint)
        except CloudError as error:
            log.warning("run %s: frozen objects stay until the next pass of the orphan keeper: %s", run_id, error)
    return after


def _delete_frozen(database: Database, objects: ServiceStore, job: SavedJob, checkpoint: SavedCheckpoint) -> None:
    # The caller has already stored the state deleted. Of two concurrent deletions, the later one therefore finds that
    # no checkpoint needs their common objects.
    with database.read() as session:
        needed = checkpoints.frozen_keys(checkpoints.of_run(session, job.run_id, with_deleted=False))
    own_folder = f"{records.run_folder(job.spec.checkpoint_uri, job.run_id).key}frozen/"
    unneeded = sorted(key for key in checkpoints.frozen_keys([checkpoint]) - needed if key.startswith(own_folder))
    delete_all(objects, checkpoint.bucket, unneeded)
