"""The ledgers of jobs and fleets at each full hour.

Invariant: only the holder of the job's or fleet's lease writes an hour, in the transaction that stores the charge which
passes this hour. A stored hour never changes.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy.orm import Session

from control_plane.core.ledger_hours import HOUR, Ledger
from control_plane.db import leases
from control_plane.db.leases import Lease
from control_plane.db.models import FleetHour, JobHour


def record_job(session: Session, lease: Lease, hours: Iterable[Ledger]) -> None:
    """Store a job's ledger at full hours.

    Args:
        session: from `Database.write`.
        lease: lease of the job whose pass charged the ledger.
        hours: result of `core.ledger_hours.full_hours` for this pass.

    Raises:
        StaleLease: another control-plane server has taken the lease over. Nothing was written.
    """
    leases.guard(session, lease)
    session.add_all(
        JobHour(
            run_id=lease.key,
            hour=ledger.at // HOUR,
            accounting=dict(ledger.spent),
            node_microseconds=ledger.node_microseconds,
        )
        for ledger in hours
    )


def record_fleet(session: Session, lease: Lease, hours: Iterable[Ledger]) -> None:
    """Store the ledger of a fleet's idle nodes at full hours.

    Args:
        session: from `Database.write`.
        lease: lease of the fleet whose pass charged the ledger.
        hours: result of `core.ledger_hours.full_hours` for this pass.

    Raises:
        StaleLease: another control-plane server has taken the lease over. Nothing was written.
    """
    leases.guard(session, lease)
    session.add_all(
        FleetHour(fleet_name=lease.key, hour=ledger.at // HOUR, idle_microseconds=dict(ledger.spent))
        for ledger in hours
    )
