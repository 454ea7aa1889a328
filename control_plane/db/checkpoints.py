"""Checkpoints: complete sets of shards in S3, and sets whose shards agents are still uploading.

Invariant: the row of a complete checkpoint contains an exact copy of the manifest in S3.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import JSON, bindparam, func, or_, select, tuple_, type_coerce, union
from sqlalchemy.orm import Session

from control_plane.core.checkpoints import TrashMark
from control_plane.core.verification import Blocked, CheckpointVerdict, VerdictKind
from control_plane.db import leases
from control_plane.db.errors import NotFound
from control_plane.db.leases import Lease
from control_plane.db.models import CheckpointRow, JobRow
from control_plane.db.session import columns_for, columns_of, record_of, values_of
from everstep.protocol.manifest import CheckpointManifest, decode_manifest

COMPLETE = "complete"
"""The manifest is in S3 and names all shards."""
TRASHED = "trashed"
"""All objects are in S3 until `purge_at`, but no restore may use them. S3 has a mark that says the same
(`loop.checkpoint_marks`).
"""
DELETING = "deleting"
"""The control plane deletes the objects. No restore may use the checkpoint."""
DELETED = "deleted"
"""The objects are deleted. The row remains, because agents that still report the shards would create it again."""
USABLE_LIMIT: Final = 32
"""Number of a run's checkpoints that each decision about its job considers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A row of the table of checkpoints."""

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
    blocked: Blocked | None = None
    verdict: CheckpointVerdict | None = None
    trashed_at: datetime | None = None
    purge_at: datetime | None = None
    trash_cause: str | None = None
    """A `TrashCause`."""

    @property
    def is_wrong(self) -> bool:
        """Whether a verification or a restore found damage, not whether a verification was impossible."""
        return self.verdict is not None and self.verdict.is_wrong

    def contents(self) -> CheckpointManifest | None:
        """Return the decoded manifest, or None while the checkpoint is not complete."""
        return None if self.manifest is None else decode_manifest(self.manifest)


def record(session: Session, lease: Lease, checkpoint: SavedCheckpoint) -> bool:
    """Store a checkpoint. Idempotent. Return False, and change nothing, if the checkpoint was completed before.

    Raises StaleLease.
    """
    leases.guard(session, lease)
    row = session.get(CheckpointRow, (lease.key, checkpoint.generation, checkpoint.step))
    if row is not None and row.completed_at is not None:
        return False  # A repeated report of its shards must not change a complete or deleted checkpoint.
    if row is None:
        row = CheckpointRow(
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


_CHECKPOINT: Final = CheckpointRow.__table__.c
_OF_RUN: Final = (
    select(*columns_for(CheckpointRow, SavedCheckpoint))
    .where(_CHECKPOINT.run_id == bindparam("of_run"))
    .order_by(_CHECKPOINT.step.desc(), _CHECKPOINT.generation.desc())
)


def of_run(session: Session, run_id: str, *, with_deleted: bool = True) -> tuple[SavedCheckpoint, ...]:
    """Return all checkpoints of a run, newest step first."""
    query = _OF_RUN if with_deleted else _OF_RUN.where(_CHECKPOINT.state != DELETED)
    return tuple(record_of(row, SavedCheckpoint) for row in session.execute(query, {"of_run": run_id}))


_SUMMARY: Final = (
    select(*columns_for(CheckpointRow, SavedCheckpoint, ("manifest",)))
    .where(_CHECKPOINT.run_id == bindparam("of_run"), _CHECKPOINT.state == COMPLETE)
    .order_by(_CHECKPOINT.generation.desc(), _CHECKPOINT.step.desc())
    .execution_options(yield_per=USABLE_LIMIT)
)


def newest_usable(session: Session, run_id: str, is_on_path: Callable[[int, int], bool]) -> tuple[SavedCheckpoint, ...]:
    """Return the newest complete checkpoints without their manifests, newest first: `USABLE_LIMIT` that a restore may
    use, and the damaged ones between them. `is_on_path` decides by generation and step.
    """
    # On the path, a later generation has no older steps, so the primary key has the checkpoints in order.
    found: list[SavedCheckpoint] = []
    usable_count = 0
    with session.execute(_SUMMARY, {"of_run": run_id}) as rows:
        for row in rows:
            if is_on_path(row.generation, row.step):
                found.append(SavedCheckpoint(**columns_of(row, SavedCheckpoint, ("manifest",)), manifest=None))
                usable_count += not found[-1].is_wrong
                if usable_count == USABLE_LIMIT:
                    break
    return tuple(found)


def manifests(
    session: Session, run_id: str, keys: Collection[tuple[int, int]]
) -> Mapping[tuple[int, int], CheckpointManifest]:
    """Return the decoded manifests of complete checkpoints by generation and step."""
    query = select(_CHECKPOINT.generation, _CHECKPOINT.step, _CHECKPOINT.manifest)
    is_wanted = tuple_(_CHECKPOINT.generation, _CHECKPOINT.step).in_(keys)
    rows = session.execute(query.where(_CHECKPOINT.run_id == run_id, is_wanted)) if keys else ()
    return {(generation, step): decode_manifest(body) for generation, step, body in rows if body is not None}


def newest_steps(session: Session, run_id: str, generation: int) -> frozenset[int]:
    """Return the steps of a generation's newest checkpoints in any state, more than agents report."""
    query = select(_CHECKPOINT.step).where(_CHECKPOINT.run_id == run_id, _CHECKPOINT.generation == generation)
    return frozenset(session.scalars(query.order_by(_CHECKPOINT.step.desc()).limit(USABLE_LIMIT)))


def frozen_keys(rows: Iterable[SavedCheckpoint]) -> frozenset[str]:
    """Return the S3 keys of these checkpoints' frozen parameters, each of which several checkpoints may share."""
    manifests = (each.contents() for each in rows)
    return frozenset(frozen.key for each in manifests if each is not None for frozen in each.frozen)


def page(
    session: Session, run_id: str, *, is_trash: bool, min_step: int, before: tuple[int, int] | None, limit: int
) -> tuple[SavedCheckpoint, ...]:
    """Return one page of a run's checkpoints that are not deleted, newest step first.

    `is_trash` selects the trash or everything else. `before` is step and generation of the previous page's last
    checkpoint; None means the first page.
    """
    query = select(CheckpointRow).where(
        CheckpointRow.run_id == run_id,
        CheckpointRow.step >= min_step,
        CheckpointRow.state == TRASHED if is_trash else CheckpointRow.state.not_in((TRASHED, DELETED)),
    )
    if before is not None:
        query = query.where(tuple_(CheckpointRow.step, CheckpointRow.generation) < before)
    query = query.order_by(CheckpointRow.step.desc(), CheckpointRow.generation.desc()).limit(limit)
    return tuple(record_of(row, SavedCheckpoint) for row in session.scalars(query))


def trash_bytes(session: Session, run_id: str) -> int:
    """Return the total size of the objects of a run's checkpoints in the trash."""
    query = select(func.sum(CheckpointRow.object_bytes))
    return session.scalar(query.where(CheckpointRow.run_id == run_id, CheckpointRow.state == TRASHED)) or 0


def find(session: Session, run_id: str, *, step: int, generation: int | None, first: str = COMPLETE) -> SavedCheckpoint:
    """Return one checkpoint, or raise NotFound.

    If `generation` is None, the function prefers checkpoints in the state `first`, then those that are not deleted,
    then the newest generation.
    """
    best_first = (CheckpointRow.state != first, CheckpointRow.state == DELETED, CheckpointRow.generation.desc())
    query = (
        select(CheckpointRow)
        .where(CheckpointRow.run_id == run_id, CheckpointRow.step == step)
        .order_by(*best_first)
        .limit(1)
    )
    row = session.scalar(query if generation is None else query.where(CheckpointRow.generation == generation))
    if row is None:
        raise NotFound(
            "checkpoint", f"step {step}" if generation is None else f"step {step} of generation {generation}"
        )
    return record_of(row, SavedCheckpoint)


def set_pinned(session: Session, run_id: str, checkpoint: SavedCheckpoint, at: datetime | None) -> SavedCheckpoint:
    """Pin a checkpoint, or unpin it if `at` is None. Return the changed row."""
    return _set(session, run_id, checkpoint, pinned_at=at)


def set_state(session: Session, run_id: str, checkpoint: SavedCheckpoint, state: str) -> SavedCheckpoint:
    """Change a checkpoint's state and return the changed row.

    COMPLETE takes the checkpoint out of the trash. DELETED also clears the manifest.
    """
    cleared = {
        COMPLETE: {"trashed_at": None, "purge_at": None, "trash_cause": None},
        DELETED: {"manifest": None, **_NO_REQUEST},
    }
    return _set(session, run_id, checkpoint, state=state, **cleared.get(state, {}))


def set_trashed(session: Session, run_id: str, checkpoint: SavedCheckpoint, mark: TrashMark) -> SavedCheckpoint:
    """Move a checkpoint to the trash, and return the changed row."""
    facts = {**values_of(mark), "trash_cause": mark.trash_cause.value}
    return _set(session, run_id, checkpoint, state=TRASHED, **_NO_REQUEST, **facts)


def deleted_counts(session: Session) -> dict[str, int]:
    """Return the number of deleted checkpoints by run. Runs without any are missing."""
    query = (
        select(CheckpointRow.run_id, func.count()).where(CheckpointRow.state == DELETED).group_by(CheckpointRow.run_id)
    )
    return {row[0]: row[1] for row in session.execute(query)}


def runs_to_look_after(session: Session, now: datetime) -> tuple[str, ...]:
    """Return the runs whose checkpoints `loop.checkpoint_keeper` must delete or check against the job's limits."""
    has_limit = or_(
        *(
            JobRow.spec[limit].as_string().is_not(None)
            for limit in ("checkpoint_max_count", "checkpoint_max_age_seconds")
        )
    )
    several = (
        select(CheckpointRow.run_id)
        .join(JobRow, JobRow.run_id == CheckpointRow.run_id)
        .where(CheckpointRow.state == COMPLETE, has_limit)
    )
    several = several.group_by(CheckpointRow.run_id).having(func.count() > 1)
    is_due = (CheckpointRow.state == TRASHED) & (CheckpointRow.purge_at <= now)
    deleting = select(CheckpointRow.run_id).where(or_(CheckpointRow.state == DELETING, is_due))
    purged = select(JobRow.run_id).where(JobRow.purge_at <= now)
    return tuple(session.scalars(union(several, deleting, purged)))


def ask_to_verify(session: Session, run_id: str, checkpoint: SavedCheckpoint, now: datetime) -> SavedCheckpoint:
    """Record a user's request to verify a checkpoint, and return the row.

    An open request remains and becomes due now.
    """
    return _set(
        session, run_id, checkpoint, verify_requested_at=checkpoint.verify_requested_at or now, verify_after=None
    )


def to_verify(session: Session, now: datetime) -> tuple[str, SavedCheckpoint] | None:
    """Return run and checkpoint of the oldest verification request that is due, or None."""
    query = select(CheckpointRow).where(
        CheckpointRow.verify_requested_at.is_not(None),
        CheckpointRow.state == COMPLETE,
        or_(CheckpointRow.verify_after.is_(None), CheckpointRow.verify_after <= now),
    )
    row = session.scalar(query.order_by(CheckpointRow.verify_requested_at).limit(1))
    return None if row is None else (row.run_id, record_of(row, SavedCheckpoint))


_NO_REQUEST: Final[Mapping[str, None]] = {"verify_requested_at": None, "verify_after": None, "blocked": None}


def store_verdict(
    session: Session, run_id: str, checkpoint: SavedCheckpoint, *, verdict: CheckpointVerdict, now: datetime
) -> None:
    """Store the result of a verification that could read everything, unless the checkpoint was deleted meanwhile."""
    if session.get(CheckpointRow, (run_id, checkpoint.generation, checkpoint.step)) is not None:
        _set(session, run_id, checkpoint, verified_at=now, verdict=verdict, **_NO_REQUEST)


def store_blocked(session: Session, run_id: str, checkpoint: SavedCheckpoint, blocked: Blocked) -> None:
    """Record that a verification could not read S3. The verdict remains, and the request stays open."""
    row = session.get(CheckpointRow, (run_id, checkpoint.generation, checkpoint.step))
    if row is not None and row.verify_requested_at is not None:
        row.blocked, row.verify_after = blocked, datetime.fromtimestamp(blocked.next_attempt_at, UTC)
        session.flush()


def mark_damaged(
    session: Session, run_id: str, checkpoint: SavedCheckpoint, verdict: CheckpointVerdict, now: datetime
) -> None:
    """Record that two nodes found a checkpoint damaged. Damage that is already recorded remains."""
    if not checkpoint.is_wrong:
        _set(session, run_id, checkpoint, verdict=verdict, verified_at=now)


def _set(session: Session, run_id: str, checkpoint: SavedCheckpoint, **columns: Any) -> SavedCheckpoint:
    row = session.get(CheckpointRow, (run_id, checkpoint.generation, checkpoint.step))
    if row is None:
        raise NotFound("checkpoint", f"step {checkpoint.step}")
    for name, value in columns.items():
        setattr(row, name, value)
    session.flush()
    return record_of(row, SavedCheckpoint)


def pinned(session: Session) -> list[SavedCheckpoint]:
    """Return all pinned checkpoints of all runs."""
    query = select(*columns_for(CheckpointRow, SavedCheckpoint)).where(_CHECKPOINT.pinned_at.is_not(None))
    return [record_of(row, SavedCheckpoint) for row in session.execute(query)]


def pinned_steps(session: Session, run_id: str) -> tuple[int, ...]:
    """Return the steps of a run's pinned checkpoints, oldest first."""
    query = (
        select(CheckpointRow.step)
        .where(CheckpointRow.run_id == run_id, CheckpointRow.pinned_at.is_not(None))
        .order_by(CheckpointRow.step)
    )
    return tuple(session.scalars(query))


def newest_complete(session: Session, run_id: str) -> SavedCheckpoint | None:
    """Return the newest complete checkpoint of a run without known faults, or None."""
    query = select(CheckpointRow).where(CheckpointRow.run_id == run_id, *_IS_WHOLE)
    row = session.scalar(query.order_by(*_NEWEST_FIRST).limit(1))
    return None if row is None else record_of(row, SavedCheckpoint)


def newest_of(session: Session, run_ids: Collection[str]) -> dict[str, tuple[int, datetime]]:
    """Return step and completion time of each run's newest complete checkpoint. Runs without one are missing."""
    place = func.row_number().over(partition_by=CheckpointRow.run_id, order_by=_NEWEST_FIRST).label("place")
    columns = CheckpointRow.run_id, CheckpointRow.step, CheckpointRow.completed_at
    placed = select(*columns, place).where(CheckpointRow.run_id.in_(run_ids), *_IS_WHOLE).subquery()
    rows = session.execute(select(placed).where(placed.c.place == 1)) if run_ids else ()
    return {run_id: (step, completed_at) for run_id, step, completed_at, _ in rows}


_VERDICT_KIND = type_coerce(CheckpointRow.verdict, JSON)["kind"].as_string()
_IS_WHOLE = (
    CheckpointRow.completed_at.is_not(None),
    CheckpointRow.state == COMPLETE,
    or_(CheckpointRow.verdict.is_(None), VerdictKind.WRONG.value != _VERDICT_KIND),
)
_NEWEST_FIRST = CheckpointRow.step.desc(), CheckpointRow.generation.desc()
