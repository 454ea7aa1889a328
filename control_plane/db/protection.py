"""Protection: the shards of all ranks and their holders. A commit waits for every holder in view.

Invariant: a replica row is written only when a holder is added or removed, or enters or leaves the view. The newest
steps, which change often, are in the rows of shards and jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import and_, case, delete, exists, func, select
from sqlalchemy.orm import Session

from control_plane.db import leases
from control_plane.db.leases import Lease
from control_plane.db.models import NodeRow, ReplicaRow, ShardRow
from control_plane.db.session import columns_of, values_of

_IN_VIEW = and_(
    ReplicaRow.is_in_view,
    ~exists().where(NodeRow.id == ReplicaRow.holder_node_id, NodeRow.ended_at.is_not(None)).correlate(ReplicaRow),
)
"""The owner's last report shows the holder in view, and the holder's instance has not ended.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderRecord:
    """One holder of a shard. The first is the owner's node."""

    node_id: str
    is_in_view: bool
    changed_at: datetime | None = None
    """When the holder was added, or last entered or left the view. None before the row is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedRecord:
    """The newest step of a shard that a holder has verified."""

    node_id: str
    step: int
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """The protection of one rank's shard, as its agent last reported it."""

    rank: int
    generation: int
    owner_node_id: str
    committed_step: int
    payload_bytes: int
    reason: str
    holders: tuple[HolderRecord, ...]
    verified: tuple[VerifiedRecord, ...] = ()
    """Newest verified step of each holder that has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTotals:
    """Summarizes the protection of all shards of one generation."""

    shard_count: int
    fewest_in_view: int
    """Fewest holders in view of any shard."""
    most_out_of_view: int
    """Most holders out of view of any shard."""
    least_committed: int
    """Lowest committed step of all shards. -1 if a rank has not committed a step in this generation."""
    has_reason: bool
    """Whether an owner reports why its shard is not completely protected."""
    changed_at: datetime | None = None
    """When a holder last was added, or entered or left the view."""


def record(session: Session, lease: Lease, shards: Sequence[ShardRecord], now: datetime) -> int:
    """Store shards of a job as reported.

    Return how many holders were added, removed, or changed their view; mostly zero. Raises StaleLease.
    """
    leases.guard(session, lease)
    run_id, ranks = lease.key, [shard.rank for shard in shards]
    of_shards = select(ShardRow).where(ShardRow.run_id == run_id, ShardRow.rank.in_(ranks))
    rows = {row.rank: row for row in session.scalars(of_shards)}
    replicas: dict[int, dict[str, ReplicaRow]] = {rank: {} for rank in ranks}
    for replica in session.scalars(select(ReplicaRow).where(ReplicaRow.run_id == run_id, ReplicaRow.rank.in_(ranks))):
        replicas[replica.rank][replica.holder_node_id] = replica
    for shard in shards:
        _record_shard(session, run_id, rows.get(shard.rank), shard, now)
    session.flush()
    change_count = sum(_record_holders(session, run_id, replicas[shard.rank], shard, now) for shard in shards)
    session.flush()
    return change_count


def totals(session: Session, generations: Mapping[str, int]) -> dict[str, ShardTotals]:
    """Return how well the shards of each run's given generation are protected. Runs without such shards are missing."""
    in_view = func.sum(case((_IN_VIEW, 1), else_=0)).label("in_view")
    held = (
        select(
            ReplicaRow.run_id,
            ReplicaRow.rank,
            in_view,
            func.count().label("holders"),
            func.max(ReplicaRow.changed_at).label("changed_at"),
        )
        .where(ReplicaRow.run_id.in_(generations))
        .group_by(ReplicaRow.run_id, ReplicaRow.rank)
        .subquery()
    )
    fewest, reasons = func.min(func.coalesce(held.c.in_view, 0)), func.sum(case((ShardRow.reason != "", 1), else_=0))
    most_out = func.max(func.coalesce(held.c.holders - held.c.in_view, 0))
    query = (
        select(
            ShardRow.run_id,
            ShardRow.generation,
            func.count(),
            fewest,
            most_out,
            func.min(ShardRow.committed_step),
            reasons,
            func.max(held.c.changed_at),
        )
        .outerjoin(held, and_(held.c.run_id == ShardRow.run_id, held.c.rank == ShardRow.rank))
        .where(ShardRow.run_id.in_(generations))
        .group_by(ShardRow.run_id, ShardRow.generation)
    )
    return {
        run_id: ShardTotals(
            shard_count=count,
            fewest_in_view=fewest_in_view,
            most_out_of_view=most_out_of_view,
            least_committed=least_committed,
            has_reason=reason_count > 0,
            changed_at=changed_at,
        )
        for run_id, generation, count, fewest_in_view, most_out_of_view, least_committed, reason_count, changed_at in (
            session.execute(query)
        )
        if generations[run_id] == generation
    }


def of_run(session: Session, run_id: str) -> tuple[ShardRecord, ...]:
    """Return the shards of a run in the order of ranks."""
    holders: dict[int, list[HolderRecord]] = {}
    found = (
        select(ReplicaRow, _IN_VIEW).where(ReplicaRow.run_id == run_id).order_by(ReplicaRow.rank, ReplicaRow.position)
    )
    for row, is_in_view in session.execute(found):
        holders.setdefault(row.rank, []).append(
            HolderRecord(node_id=row.holder_node_id, is_in_view=is_in_view, changed_at=row.changed_at)
        )
    return tuple(
        ShardRecord(
            **columns_of(row, ShardRecord, leave_out=("holders", "verified")),
            holders=tuple(holders.get(row.rank, ())),
            verified=tuple(
                VerifiedRecord(node_id=each["node_id"], step=each["step"], at=datetime.fromtimestamp(each["at"], UTC))
                for each in row.verified
            ),
        )
        for row in session.scalars(select(ShardRow).where(ShardRow.run_id == run_id).order_by(ShardRow.rank))
    )


def _record_shard(session: Session, run_id: str, row: ShardRow | None, shard: ShardRecord, now: datetime) -> None:
    if row is None:
        row = ShardRow(run_id=run_id)
        session.add(row)
    for name, value in values_of(shard, leave_out=("holders", "verified")).items():
        setattr(row, name, value)
    row.verified = [{"node_id": each.node_id, "step": each.step, "at": each.at.timestamp()} for each in shard.verified]
    row.updated_at = now


def _record_holders(
    session: Session, run_id: str, known: Mapping[str, ReplicaRow], shard: ShardRecord, now: datetime
) -> int:
    """Store the holders of a shard, and return how many changed."""
    gone = known.keys() - {holder.node_id for holder in shard.holders}
    if gone:
        session.execute(
            delete(ReplicaRow).where(
                ReplicaRow.run_id == run_id, ReplicaRow.rank == shard.rank, ReplicaRow.holder_node_id.in_(gone)
            )
        )
    change_count = len(gone)
    for position, holder in enumerate(shard.holders):
        replica = known.get(holder.node_id)
        if replica is not None and (replica.position, replica.is_in_view) == (position, holder.is_in_view):
            continue
        if replica is None:
            replica = ReplicaRow(run_id=run_id, rank=shard.rank, holder_node_id=holder.node_id)
            session.add(replica)
        replica.position = position
        replica.is_in_view = holder.is_in_view
        replica.changed_at = now
        change_count += 1
    return change_count
