"""The ledgers of jobs and fleets at each full hour, from which reports compute the figures of a time range.

A ledger is a set of time counters: of a job by accounting bucket, or of a fleet's idle nodes by state
(`core.ledger_hours`). The server's background loops add the elapsed time to the counters at each decision about the job
or fleet, and store their values at each full hour.

Invariant: only the server that has the lease of the job or fleet stores an hour, in the transaction that updates the
counters past this hour. A stored hour never changes.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy.orm import Session

from control_plane.core.ledger_hours import HOUR, Ledger
from control_plane.db import leases
from control_plane.db.leases import Lease
from control_plane.db.models import FleetHourRow, JobHourRow


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
