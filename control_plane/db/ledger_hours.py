"""The ledgers of jobs and fleets at each full hour (`core.ledger_hours`), and the settled spans of jobs.

Invariant: an hour or a span is stored in the transaction that updates the counters, and never changes.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import select
from sqlalchemy.orm import Session

from control_plane.core.ledger_hours import HOUR, Ledger
from control_plane.core.observed.spans import Bucket, JobSpan
from control_plane.db import leases
from control_plane.db.leases import Lease
from control_plane.db.models import FleetHourRow, JobHourRow, JobSpanRow


def record_job(session: Session, lease: Lease, hours: Iterable[Ledger]) -> None:
    """Store a job's ledger at full hours, from `core.ledger_hours.full_hours`. Raises StaleLease."""
    leases.guard(session, lease)
    session.add_all(
        JobHourRow(
            run_id=lease.key,
            hour=ledger.at // HOUR,
            accounting=dict(ledger.spent),
            node_microseconds=ledger.node_microseconds,
        )
        for ledger in hours
    )


def record_spans(session: Session, lease: Lease, spans: Iterable[tuple[JobSpan, int]]) -> None:
    """Store settled spans of a job's time, each with its end in microseconds. Raises StaleLease."""
    leases.guard(session, lease)
    session.add_all(
        JobSpanRow(run_id=lease.key, start=span.start, end=end, bucket=span.bucket, missing=span.missing)
        for span, end in spans
    )


def spans_of(session: Session, run_id: str, *, after: int, limit: int) -> list[tuple[JobSpan, int]]:
    """Return at most `limit` settled spans that begin after `after` (microseconds), oldest first."""
    found = session.scalars(
        select(JobSpanRow)
        .where(JobSpanRow.run_id == run_id, JobSpanRow.start > after)
        .order_by(JobSpanRow.start)
        .limit(limit)
    )
    return [(JobSpan(start=row.start, bucket=Bucket(row.bucket), missing=row.missing), row.end) for row in found]


def record_fleet(session: Session, lease: Lease, hours: Iterable[Ledger]) -> None:
    """Store the ledger of a fleet's idle nodes at full hours, from `core.ledger_hours.full_hours`.

    Raises StaleLease.
    """
    leases.guard(session, lease)
    session.add_all(
        FleetHourRow(fleet_name=lease.key, hour=ledger.at // HOUR, idle_microseconds=dict(ledger.spent))
        for ledger in hours
    )
