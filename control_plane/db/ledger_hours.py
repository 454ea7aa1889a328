"""The ledgers of jobs and fleets at each full hour, and the settled spans of jobs.

Reports compute the figures of a time range from the hours. The dashboard's timeline shows the spans.

A ledger is a set of time counters: of a job by accounting bucket, or of a fleet's idle nodes by state
(`core.ledger_hours`). The server's background loops add the elapsed time to the counters at each decision about the job
or fleet, and store their values at each full hour.

Invariant: only the server that has the lease of the job or fleet stores an hour or a span, in the transaction that
updates the counters. A stored hour or span never changes.
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
    """Store a job's ledger, which is a set of time counters, at full hours.

    Args:
        session: from `Database.write`.
        lease: lease of the job whose counters the job loop has just updated.
        hours: result of `core.ledger_hours.full_hours` for this update of the counters.

    Raises:
        StaleLease: another control-plane server has taken the lease over. Nothing was written.
    """
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
    """Store settled spans of a job's time, each with its end in microseconds.

    Raises StaleLease if another control-plane server has taken the lease over. Nothing was written then.
    """
    leases.guard(session, lease)
    session.add_all(
        JobSpanRow(run_id=lease.key, start=span.start, end=end, bucket=span.bucket, missing=span.missing)
        for span, end in spans
    )


def spans_of(session: Session, run_id: str, *, after: int, limit: int) -> list[tuple[JobSpan, int]]:
    """Return at most `limit` settled spans of a job that begin after `after` (microseconds), oldest first."""
    found = session.scalars(
        select(JobSpanRow)
        .where(JobSpanRow.run_id == run_id, JobSpanRow.start > after)
        .order_by(JobSpanRow.start)
        .limit(limit)
    )
    return [(JobSpan(start=row.start, bucket=Bucket(row.bucket), missing=row.missing), row.end) for row in found]


def record_fleet(session: Session, lease: Lease, hours: Iterable[Ledger]) -> None:
    """Store the ledger (the time counters) of a fleet's idle nodes at full hours.

    Args:
        session: from `Database.write`.
        lease: lease of the fleet whose counters the fleet loop has just updated.
        hours: result of `core.ledger_hours.full_hours` for this update of the counters.

    Raises:
        StaleLease: another control-plane server has taken the lease over. Nothing was written.
    """
    leases.guard(session, lease)
    session.add_all(
        FleetHourRow(fleet_name=lease.key, hour=ledger.at // HOUR, idle_microseconds=dict(ledger.spent))
        for ledger in hours
    )
