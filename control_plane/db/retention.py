"""Retention: deletes old rows of growing tables, in many small transactions (passes).

    intents        records of calls to AWS, by creation time; the control plane does not reuse their idempotency keys
    events         all events
    nodes          ended nodes, their fault histories, and their agents' session tokens
    tokens         revoked and expired tokens; used nonces after their expiry
    generations    generations of ended jobs without a checkpoint, except the newest generation of each job
    plans          plans of generations, except the newest few of each job; parents and times remain for restores
    protection     shards and holders of ended jobs
    metrics        metrics of ended jobs
    audit          entries of the audit log
    hours          time counters of jobs and fleets at full hours, from which reports compute their figures

Invariant: it deletes no row that the background loops still read. Several servers may run passes at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, and_, delete, inspect, or_, select, tuple_, update
from sqlalchemy.orm import Session

from control_plane.db import checkpoints
from control_plane.db.models import (
    AuditEntryRow,
    Base,
    CheckpointRow,
    EventRow,
    FleetHourRow,
    GenerationRow,
    ImplicationRow,
    IntentRow,
    JobHourRow,
    JobRow,
    MetricChunkRow,
    MetricRow,
    NodeRow,
    ShardRow,
    SpentNonceRow,
    TokenRow,
)

NO_PLAN = b""
"""Value of `GenerationRow.plan` after retention has deleted the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRetention:
    """Limits of retention: days per kind of rows, plans kept per job, and rows of a kind per transaction."""

    intents: int = 7
    events: int = 90
    nodes: int = 7
    tokens: int = 7
    generations: int = 30
    protection: int = 1
    metrics: int = 90
    audit: int = 400
    hours: int = 400
    plans_per_job: int = 10
    batch_rows: int = 1_000


DEFAULT = RowRetention()


def prune(session: Session, retention: RowRetention, now: datetime) -> Mapping[str, int]:
    """Delete rows beyond the limits in one transaction, and return the number per kind.

    `loop.runner` calls this once a minute, and immediately again after a full batch.
    """

    def before(days: int) -> datetime:
        return now - timedelta(days=days)

    alive = select(NodeRow.id).where(NodeRow.ended_at.is_(None))
    # Keep the generations of a job with checkpoints: they show which checkpoint the job could restore, and so which one
    # the limits must not delete.
    is_stored = CheckpointRow.state.in_((checkpoints.COMPLETE, checkpoints.TRASHED))
    ended = select(JobRow.run_id).where(
        JobRow.ended_at < before(retention.generations),
        JobRow.run_id.not_in(select(CheckpointRow.run_id).where(is_stored)),
    )
    silent = select(JobRow.run_id).where(JobRow.ended_at < before(retention.protection))
    unread = select(JobRow.run_id).where(JobRow.ended_at < before(retention.metrics))
    newest = select(JobRow.generation).where(JobRow.run_id == GenerationRow.run_id).scalar_subquery()
    is_of_a_node_that_is_gone = and_(
        TokenRow.node_id.is_not(None), TokenRow.node_id.not_in(alive), TokenRow.created_at < before(retention.tokens)
    )
    rules: dict[str, tuple[type[Base], ColumnElement[bool]]] = {
        "intents": (IntentRow, IntentRow.created_at < before(retention.intents)),
        "events": (EventRow, EventRow.at < before(retention.events)),
        "nodes": (NodeRow, NodeRow.ended_at < before(retention.nodes)),
        "histories": (
            ImplicationRow,
            and_(ImplicationRow.at < before(retention.nodes), ImplicationRow.node_id.not_in(alive)),
        ),
        "tokens": (
            TokenRow,
            or_(
                TokenRow.revoked_at < before(retention.tokens),
                TokenRow.expires_at < before(retention.tokens),
                is_of_a_node_that_is_gone,
            ),
        ),
        "nonces": (SpentNonceRow, SpentNonceRow.ends_at < now),
        "generations": (GenerationRow, and_(GenerationRow.run_id.in_(ended), GenerationRow.number < newest)),
        "protection": (ShardRow, ShardRow.run_id.in_(silent)),
        "metrics": (MetricRow, MetricRow.run_id.in_(unread)),
        "audit entries": (AuditEntryRow, AuditEntryRow.at < before(retention.audit)),
        "job hours": (JobHourRow, JobHourRow.hour < before(retention.hours).timestamp() // 3600),
        "fleet hours": (FleetHourRow, FleetHourRow.hour < before(retention.hours).timestamp() // 3600),
        "metric chunks": (MetricChunkRow, MetricChunkRow.run_id.in_(unread)),
    }
    counts = {kind: _delete(session, table, which, retention.batch_rows) for kind, (table, which) in rules.items()}
    old = and_(GenerationRow.number <= newest - retention.plans_per_job, GenerationRow.plan != NO_PLAN)
    found = _keys(session, GenerationRow, old, retention.batch_rows)
    for run_id, number in found:
        session.execute(
            update(GenerationRow)
            .where(GenerationRow.run_id == run_id, GenerationRow.number == number)
            .values(plan=NO_PLAN)
        )
    return {**counts, "plans": len(found)}


def _delete(session: Session, table: type[Base], which: ColumnElement[bool], limit: int) -> int:
    found = _keys(session, table, which, limit)
    columns = inspect(table).primary_key
    if found:
        is_found = tuple_(*columns).in_(found) if len(columns) > 1 else columns[0].in_([key for (key,) in found])
        session.execute(delete(table).where(is_found), execution_options={"synchronize_session": False})
    return len(found)


def _keys(session: Session, table: type[Base], which: ColumnElement[bool], limit: int) -> list[tuple[object, ...]]:
    columns = inspect(table).primary_key
    return [tuple(row) for row in session.execute(select(*columns).where(which).order_by(*columns).limit(limit))]
