"""Retention: deletes old rows of growing tables, in bounded passes.

    intents        records of calls to AWS, by creation time; the control plane does not reuse their idempotency keys
    events         all events
    nodes          ended nodes, their fault histories, and their agents' session tokens
    tokens         revoked and expired tokens; used nonces after their expiry
    generations    generations of ended jobs, except the newest generation of each job
    plans          plans of generations, except the newest few of each job; parents and times of the generations
                   remain, because restores need them
    protection     shards and holders of ended jobs
    metrics        metrics of ended jobs
    audit          entries of the audit log
    hours          time counters of jobs and fleets at full hours, from which reports compute their figures

Retention deletes no jobs, incidents, checkpoints, sources or fleets.

Invariant: a pass deletes at most `batch_rows` rows of a kind, in one short transaction. It deletes no row that the
server's background loops still read. Several control-plane servers may run passes at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, and_, delete, inspect, or_, select, tuple_, update
from sqlalchemy.orm import Session

from control_plane.db.models import (
    AuditEntry,
    Base,
    Event,
    FleetHour,
    Generation,
    Implication,
    Intent,
    Job,
    JobHour,
    Metric,
    MetricChunk,
    Node,
    Shard,
    SpentNonce,
    Token,
)

LET_GO = b""
"""Value of `Generation.plan` after retention has deleted the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Limits of retention: days for which each kind of rows is kept, plans kept per job, and rows per transaction."""

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


DEFAULT = Retention()


def prune(session: Session, retention: Retention, now: datetime) -> Mapping[str, int]:
    """Delete rows beyond the limits in `retention`, and return the number of deleted rows per kind.

    `loop.runner` calls this function once a minute, and again immediately if a call has deleted `batch_rows` rows of a
    kind.
    """

    def before(days: int) -> datetime:
        return now - timedelta(days=days)

    alive = select(Node.id).where(Node.ended_at.is_(None))
    ended = select(Job.run_id).where(Job.ended_at < before(retention.generations))
    silent = select(Job.run_id).where(Job.ended_at < before(retention.protection))
    unread = select(Job.run_id).where(Job.ended_at < before(retention.metrics))
    newest = select(Job.generation).where(Job.run_id == Generation.run_id).scalar_subquery()
    is_of_a_node_that_is_gone = and_(
        Token.node_id.is_not(None), Token.node_id.not_in(alive), Token.created_at < before(retention.tokens)
    )
    rules: dict[str, tuple[type[Base], ColumnElement[bool]]] = {
        "intents": (Intent, Intent.created_at < before(retention.intents)),
        "events": (Event, Event.at < before(retention.events)),
        "nodes": (Node, Node.ended_at < before(retention.nodes)),
        "histories": (Implication, and_(Implication.at < before(retention.nodes), Implication.node_id.not_in(alive))),
        "tokens": (
            Token,
            or_(
                Token.revoked_at < before(retention.tokens),
                Token.expires_at < before(retention.tokens),
                is_of_a_node_that_is_gone,
            ),
        ),
        "nonces": (SpentNonce, SpentNonce.ends_at < now),
        "generations": (Generation, and_(Generation.run_id.in_(ended), Generation.number < newest)),
        "protection": (Shard, Shard.run_id.in_(silent)),
        "metrics": (Metric, Metric.run_id.in_(unread)),
        "audit entries": (AuditEntry, AuditEntry.at < before(retention.audit)),
        "job hours": (JobHour, JobHour.hour < before(retention.hours).timestamp() // 3600),
        "fleet hours": (FleetHour, FleetHour.hour < before(retention.hours).timestamp() // 3600),
        "metric chunks": (MetricChunk, MetricChunk.run_id.in_(unread)),
    }
    counts = {kind: _delete(session, table, which, retention.batch_rows) for kind, (table, which) in rules.items()}
    old = and_(Generation.number <= newest - retention.plans_per_job, Generation.plan != LET_GO)
    found = _keys(session, Generation, old, retention.batch_rows)
    for run_id, number in found:
        session.execute(
            update(Generation).where(Generation.run_id == run_id, Generation.number == number).values(plan=LET_GO)
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
