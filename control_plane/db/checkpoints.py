"""Checkpoints: sets of shards in S3, complete once their manifest is put.

Invariant: a complete checkpoint carries the manifest that was put, byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import func, or_, select, tuple_, union
from sqlalchemy.orm import Session

from control_plane.db import leases
from control_plane.db.errors import NotFound
from control_plane.db.leases import Lease
from control_plane.db.models import Checkpoint, Job
from control_plane.db.session import record_of
from everstep.protocol.manifest import CheckpointManifest, decode_manifest

COMPLETE = "complete"
"""The manifest names every shard."""
DELETING = "deleting"
"""It is to go, at a person's word or by its job's limits: nobody restores from it, its objects are being deleted."""
DELETED = "deleted"
"""Its objects are gone.

The row stays with its job's, so that agents that still report its shards do not bring it back.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint as it is stored."""

    generation: int
    step: int
    state: str
    bucket: str
    manifest_key: str
    manifest: bytes | None
    object_bytes: int
    created_at: datetime
    completed_at: datetime | None
    pinned_at: datetime | None = None
    verify_requested_at: datetime | None = None
    verified_at: datetime | None = None
    verdict: str = ""

    def contents(self) -> CheckpointManifest | None:
        """Return the manifest, decoded; None while the checkpoint is not complete."""
        return None if self.manifest is None else decode_manifest(self.manifest)


def record(session: Session, lease: Lease, checkpoint: CheckpointRecord) -> bool:
    """Write a checkpoint as it is now. Writing the same again changes nothing, and a complete one stays as it is.

    Args:
        session: a writing one.
        lease: of the checkpoint's job.
        checkpoint: as it is now.

    Returns:
        Whether it was written: it had not come to its end before.

    Raises:
        StaleLease: the lease was taken over; nothing was written.
    """
    leases.guard(session, lease)
    row = session.get(Checkpoint, (lease.key, checkpoint.generation, checkpoint.step))
    if row is not None and row.completed_at is not None:
        return False  # complete, or deleted: an agent that reports its shards once more does not bring it back
    if row is None:
        row = Checkpoint(
            run_id=lease.key, generation=checkpoint.generation, step=checkpoint.step, created_at=checkpoint.created_at
        )
        session.add(row)
    row.state = checkpoint.state
    row.bucket = checkpoint.bucket
    row.manifest_key = checkpoint.manifest_key
    row.manifest = checkpoint.manifest
    row.object_bytes = checkpoint.object_bytes
    row.completed_at = checkpoint.completed_at
    session.flush()
    return True


def of_run(session: Session, run_id: str) -> tuple[CheckpointRecord, ...]:
    """Return all checkpoints of a run, deleted ones included, the newest step first."""
    query = (
        select(Checkpoint)
        .where(Checkpoint.run_id == run_id)
        .order_by(Checkpoint.step.desc(), Checkpoint.generation.desc())
    )
    return tuple(record_of(row, CheckpointRecord) for row in session.scalars(query))


def page(
    session: Session, run_id: str, *, min_step: int, before: tuple[int, int] | None, limit: int
) -> tuple[CheckpointRecord, ...]:
    """Return checkpoints of a run that have not been deleted, the newest step first, from behind a position on.

    Args:
        session: any.
        run_id: the job's run.
        min_step: none of an earlier step.
        before: step and generation of the last one that is known already.
        limit: how many at most.

    Returns:
        The checkpoints as stored.
    """
    query = select(Checkpoint).where(
        Checkpoint.run_id == run_id, Checkpoint.step >= min_step, Checkpoint.state != DELETED
    )
    if before is not None:
        query = query.where(tuple_(Checkpoint.step, Checkpoint.generation) < before)
    query = query.order_by(Checkpoint.step.desc(), Checkpoint.generation.desc()).limit(limit)
    return tuple(record_of(row, CheckpointRecord) for row in session.scalars(query))


def find(session: Session, run_id: str, *, step: int, generation: int | None) -> CheckpointRecord:
    """Return one checkpoint.

    Args:
        session: any.
        run_id: the job's run.
        step: of it.
        generation: that made it; None: the newest that made that step and whose checkpoint was not deleted, else the
            newest.

    Returns:
        The checkpoint as stored.

    Raises:
        NotFound: there is none.
    """
    best_first = (Checkpoint.state == DELETED, Checkpoint.generation.desc())
    query = (
        select(Checkpoint).where(Checkpoint.run_id == run_id, Checkpoint.step == step).order_by(*best_first).limit(1)
    )
    row = session.scalar(query if generation is None else query.where(Checkpoint.generation == generation))
    if row is None:
        raise NotFound(
            "checkpoint", f"step {step}" if generation is None else f"step {step} of generation {generation}"
        )
    return record_of(row, CheckpointRecord)


def set_pinned(session: Session, run_id: str, checkpoint: CheckpointRecord, at: datetime | None) -> CheckpointRecord:
    """Pin a checkpoint at a moment, or with None let go of it; return it as it is now."""
    return _set(session, run_id, checkpoint, pinned_at=at)


def set_state(session: Session, run_id: str, checkpoint: CheckpointRecord, state: str) -> CheckpointRecord:
    """Move a checkpoint towards its end and return it as it is now; what is deleted has no manifest any more."""
    dropped = {"manifest": None, "verify_requested_at": None} if state == DELETED else {}
    return _set(session, run_id, checkpoint, state=state, **dropped)


def runs_to_look_after(session: Session) -> tuple[str, ...]:
    """Return the runs of which something is being deleted, or may have become too much: those with limits and two or more complete ones."""
    has_limit = or_(
        *(Job.spec[limit].as_string().is_not(None) for limit in ("checkpoint_max_count", "checkpoint_max_age_seconds"))
    )
    several = (
        select(Checkpoint.run_id)
        .join(Job, Job.run_id == Checkpoint.run_id)
        .where(Checkpoint.state == COMPLETE, has_limit)
    )
    several = several.group_by(Checkpoint.run_id).having(func.count() > 1)
    deleting = select(Checkpoint.run_id).where(Checkpoint.state == DELETING)
    return tuple(session.scalars(union(several, deleting)))


def ask_to_verify(session: Session, run_id: str, checkpoint: CheckpointRecord, now: datetime) -> CheckpointRecord:
    """Note that a person wants a checkpoint read back; asking again while it is changes nothing.

    Return it as it is now.
    """
    return (
        checkpoint
        if checkpoint.verify_requested_at is not None
        else _set(session, run_id, checkpoint, verify_requested_at=now)
    )


def to_verify(session: Session) -> tuple[str, CheckpointRecord] | None:
    """Return the run and the checkpoint that was first asked to be read back, or None."""
    query = select(Checkpoint).where(Checkpoint.verify_requested_at.is_not(None), Checkpoint.state == COMPLETE)
    row = session.scalar(query.order_by(Checkpoint.verify_requested_at).limit(1))
    return None if row is None else (row.run_id, record_of(row, CheckpointRecord))


def store_verdict(session: Session, run_id: str, checkpoint: CheckpointRecord, *, verdict: str, now: datetime) -> None:
    """Store what was found when a checkpoint was read back.

    Args:
        session: a writing one.
        run_id: the job's run.
        checkpoint: which; gone meanwhile, nothing is stored.
        verdict: what is wrong; empty: nothing.
        now: when.
    """
    if session.get(Checkpoint, (run_id, checkpoint.generation, checkpoint.step)) is not None:
        _set(session, run_id, checkpoint, verify_requested_at=None, verified_at=now, verdict=verdict)


def _set(session: Session, run_id: str, checkpoint: CheckpointRecord, **columns: Any) -> CheckpointRecord:
    row = session.get(Checkpoint, (run_id, checkpoint.generation, checkpoint.step))
    if row is None:
        raise NotFound("checkpoint", f"step {checkpoint.step}")
    for name, value in columns.items():
        setattr(row, name, value)
    session.flush()
    return record_of(row, CheckpointRecord)


def pinned_steps(session: Session, run_id: str) -> tuple[int, ...]:
    """Return the steps of a run's pinned checkpoints, oldest first."""
    query = (
        select(Checkpoint.step)
        .where(Checkpoint.run_id == run_id, Checkpoint.pinned_at.is_not(None))
        .order_by(Checkpoint.step)
    )
    return tuple(session.scalars(query))


def newest_complete(session: Session, run_id: str) -> CheckpointRecord | None:
    """Return the newest complete checkpoint of a run that was not found damaged, or None."""
    is_whole = (Checkpoint.completed_at.is_not(None), Checkpoint.state == COMPLETE, Checkpoint.verdict == "")
    query = select(Checkpoint).where(Checkpoint.run_id == run_id, *is_whole)
    row = session.scalar(query.order_by(Checkpoint.step.desc(), Checkpoint.generation.desc()).limit(1))
    return None if row is None else record_of(row, CheckpointRecord)
