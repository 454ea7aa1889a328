"""Checkpoints: sets of shards in S3, complete once their manifest is put.

Invariant: a complete checkpoint carries the manifest that was put, byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from control_plane.db import leases
from control_plane.db.leases import Lease
from control_plane.db.models import Checkpoint
from control_plane.db.session import record_of
from everstep.protocol.manifest import CheckpointManifest, decode_manifest

COMPLETE = "complete"
"""The manifest names every shard."""
DELETING = "deleting"
"""A person wants it gone: nobody restores from it, its objects are being deleted."""
DELETED = "deleted"
"""Its objects are gone. The row stays with its job's, so that agents that still report its shards do not bring it back."""


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


def record(session: Session, lease: Lease, checkpoint: CheckpointRecord) -> None:
    """Write a checkpoint as it is now. Writing the same again changes nothing, and a complete one stays as it is.

    Args:
        session: a writing one.
        lease: of the checkpoint's job.
        checkpoint: as it is now.

    Raises:
        StaleLease: the lease was taken over; nothing was written.
    """
    leases.guard(session, lease)
    row = session.get(Checkpoint, (lease.key, checkpoint.generation, checkpoint.step))
    if row is not None and row.completed_at is not None:
        return
    if row is None:
        row = Checkpoint(run_id=lease.key, generation=checkpoint.generation, step=checkpoint.step, created_at=checkpoint.created_at)
        session.add(row)
    row.state = checkpoint.state
    row.bucket = checkpoint.bucket
    row.manifest_key = checkpoint.manifest_key
    row.manifest = checkpoint.manifest
    row.object_bytes = checkpoint.object_bytes
    row.completed_at = checkpoint.completed_at
    session.flush()


def of_run(session: Session, run_id: str) -> tuple[CheckpointRecord, ...]:
    """Return all checkpoints of a run, the newest step first."""
    query = select(Checkpoint).where(Checkpoint.run_id == run_id).order_by(Checkpoint.step.desc(), Checkpoint.generation.desc())
    return tuple(record_of(row, CheckpointRecord) for row in session.scalars(query))


def pinned_steps(session: Session, run_id: str) -> tuple[int, ...]:
    """Return the steps of a run's pinned checkpoints, oldest first."""
    query = select(Checkpoint.step).where(Checkpoint.run_id == run_id, Checkpoint.pinned_at.is_not(None)).order_by(Checkpoint.step)
    return tuple(session.scalars(query))


def newest_complete(session: Session, run_id: str) -> CheckpointRecord | None:
    """Return the newest complete checkpoint of a run, or None."""
    query = select(Checkpoint).where(Checkpoint.run_id == run_id, Checkpoint.completed_at.is_not(None))
    row = session.scalar(query.order_by(Checkpoint.step.desc(), Checkpoint.generation.desc()).limit(1))
    return None if row is None else record_of(row, CheckpointRecord)
