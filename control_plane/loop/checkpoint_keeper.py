"""Deletes checkpoints from S3, at a user's request or by the limits of the job.

A deletion starts when a user requests it, or when the job has more or older checkpoints than its `CheckpointConfig`
permits.

    complete ──▶ deleting: no restore may start from it ──▶ delete the manifest ──▶ delete the other objects ──▶ deleted

If a server crashes during a deletion, the checkpoint remains in state deleting. Any control-plane server continues the
deletion later. A deletion is idempotent.

If a checkpoint exceeds the limits, the keeper deletes it only after a later checkpoint has been verified. The keeper
requests this verification from `loop.verifier`, and waits for the result.

Invariant: the limits never make the keeper delete a pinned checkpoint, the newest checkpoint, the source of the job's
next restore, the initial state of another unfinished job, or a checkpoint without a later verified checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime
from typing import Final

from sqlalchemy.orm import Session

from control_plane.cloud.errors import CloudError
from control_plane.cloud.objects import DELETED_AT_ONCE, ServiceStore
from control_plane.core.checkpoints import CheckpointRetention, KeptCheckpoint, surplus, to_verify
from control_plane.core.checkpoints import restorable as all_restorable
from control_plane.core.observed.steps import CheckpointRecord as RestorableCheckpoint
from control_plane.core.states import JobState
from control_plane.db import automation, checkpoints, events, jobs
from control_plane.db.checkpoints import SavedCheckpoint
from control_plane.db.errors import NotFound
from control_plane.db.jobs import SavedJob
from control_plane.db.session import Database
from control_plane.loop import records
from control_plane.loop.repeating import repeat
from everstep.protocol.errors import ProtocolError
from everstep.protocol.ids import Generation
from everstep.protocol.plan import ObjectReference

log = logging.getLogger(__name__)

DELETION_CHECK_SECONDS: Final = 5.0
AT_ONCE: Final = 16
"""Limit of checkpoints per job that one call of `delete_due` marks as deleting."""
_RESTORING: Final = frozenset({JobState.PREPARING, JobState.LOADING})
"""Job states in which agents may read any of the job's checkpoints, so that the limits delete none of them."""


class CheckpointKeeper:
    """The loop that deletes checkpoints at a user's request, or by the limits of a job."""

    def __init__(self, database: Database, objects: ServiceStore, now: Callable[[], datetime]) -> None:
        self._database = database
        self._objects = objects
        self._now = now

    async def run(self, stop: asyncio.Event) -> None:
        """Call `delete_due` every `DELETION_CHECK_SECONDS` until `stop` is set."""
        await repeat(self.delete_due, stop, seconds=DELETION_CHECK_SECONDS, trouble="could not delete checkpoints")

    def delete_due(self) -> None:
        """Delete all checkpoints of all jobs that are due for deletion. This method blocks: call it in a thread."""
        with self._database.read() as session:
            if automation.find(session) is not None:
                return
            run_ids = checkpoints.runs_to_look_after(session)
        for run_id in run_ids:
            try:
                self._begin(run_id)
                with self._database.read() as session:
                    deleting = [
                        each for each in checkpoints.of_run(session, run_id) if each.state == checkpoints.DELETING
                    ]
                for each in reversed(deleting):
                    delete(self._database, self._objects, run_id, each, self._now())
            except CloudError as error:
                log.warning("run %s: could not delete a checkpoint; the next pass retries: %s", run_id, error)
            except ProtocolError as error:
                log.error("run %s: its checkpoints stay, because a stored manifest is invalid: %s", run_id, error)
            except NotFound:
                log.info("run %s: the job was deleted, with its checkpoints", run_id)

    def _begin(self, run_id: str) -> None:
        """Set the state deleting for those checkpoints of a job that exceed the job's limits.

        The same transaction reads which checkpoints are pinned or needed for a restore. A user can therefore not pin a
        checkpoint between the read and the change of its state.
        """
        with self._database.write() as session:
            job = jobs.get_run(session, run_id)
            limits = CheckpointRetention(
                max_count=job.spec.checkpoint_max_count,
                keep_every_steps=job.spec.checkpoint_keep_every_steps,
                max_age_seconds=job.spec.checkpoint_max_age_seconds,
            )
            if not limits.is_limited or job.state in _RESTORING:
                return
            found = {
                (each.generation, each.step): each
                for each in checkpoints.of_run(session, run_id)
                if each.state == checkpoints.COMPLETE and each.completed_at is not None
            }
            needed = restorable(session, job)
            dependents = (each.spec.initial for each in jobs.starting_from(session, run_id))
            initial_states = {(each.generation, each.step) for each in dependents if each is not None}
            usable = {(each.generation, each.step) for each in _all_restorable(session, job)}
            kept = [
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
                    is_damaged=each.is_wrong,
                )
                for key, each in found.items()
            ]
            now = self._now()
            for key in surplus(kept, limits, now.timestamp())[:AT_ONCE]:
                checkpoints.set_state(session, run_id, found[key], checkpoints.DELETING)
            candidate = to_verify(kept, limits, now.timestamp())
            if candidate is not None and found[candidate].verify_requested_at is None:
                checkpoints.ask_to_verify(session, run_id, found[candidate], now)


def restorable(session: Session, job: SavedJob) -> RestorableCheckpoint | None:
    """Return the newest checkpoint from which the job could be restored, or None."""
    return max(_all_restorable(session, job), key=lambda each: (each.step, each.generation), default=None)


def _all_restorable(session: Session, job: SavedJob) -> tuple[RestorableCheckpoint, ...]:
    known = (records.checkpoint_record(each) for each in checkpoints.of_run(session, job.run_id))
    lineage = records.lineage_of(job, jobs.lineage(session, job.run_id))
    return all_restorable([each for each in known if each is not None], lineage, Generation(job.generation))


def is_same(checkpoint: SavedCheckpoint, other: RestorableCheckpoint | None) -> bool:
    """Return whether a database row and the result of `restorable` describe the same checkpoint."""
    return other is not None and (checkpoint.generation, checkpoint.step) == (other.generation, other.step)


def delete(
    database: Database, objects: ServiceStore, run_id: str, checkpoint: SavedCheckpoint, now: datetime
) -> SavedCheckpoint:
    """Delete the objects of a checkpoint in state deleting, and record the event once.

    Blocks on S3.

    Idempotent. The function deletes the manifest first, so that a partly deleted checkpoint never looks complete. Then
    it deletes all other objects in the same folder, which belong to the same generation and step. If the run has ended,
    it also deletes the objects with frozen parameters that no other checkpoint of the run needs.

    Args:
        database: receives the checkpoint's new row and the event.
        objects: S3.
        run_id: run id of the job that made the checkpoint.
        checkpoint: the stored row, in state deleting.
        now: time of the event, in UTC.

    Returns:
        The checkpoint's new row.

    Raises:
        CloudError: S3 did not delete all objects. The checkpoint stays in state deleting.
        NotFound: the job was removed.
    """
    objects.delete(checkpoint.bucket, [checkpoint.manifest_key])
    folder, _, _ = checkpoint.manifest_key.rpartition("/")
    keys = [info.reference.key for info in objects.list(ObjectReference(bucket=checkpoint.bucket, key=f"{folder}/"))]
    for first in range(0, len(keys), DELETED_AT_ONCE):
        objects.delete(checkpoint.bucket, keys[first : first + DELETED_AT_ONCE])
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
    """Delete those frozen objects of a deleted checkpoint that no other checkpoint of its ended run needs.

    Frozen objects hold parameters that never change, and several checkpoints share them. The caller has already stored
    the state deleted. If two checkpoints are deleted at the same time, the later deletion therefore finds that no
    checkpoint needs their common objects.
    """
    with database.read() as session:
        needed = checkpoints.frozen_keys(checkpoints.of_run(session, job.run_id))
    own_folder = f"{records.prefix_of(job.spec.checkpoint_uri).key}run={job.run_id}/frozen/"
    unneeded = sorted(key for key in checkpoints.frozen_keys([checkpoint]) - needed if key.startswith(own_folder))
    for first in range(0, len(unneeded), DELETED_AT_ONCE):
        objects.delete(checkpoint.bucket, unneeded[first : first + DELETED_AT_ONCE])
