"""Fault histories of nodes, from which the control plane chooses the remedy for a fault.

Invariant: an entry never changes. Only the holder of the job's or fleet's lease writes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import bindparam, delete, select
from sqlalchemy.orm import Session

from control_plane.core.observed.facts import Fact
from control_plane.db import leases
from control_plane.db.leases import Lease
from control_plane.db.models import ImplicationRow, IncidentRow
from control_plane.db.session import columns_for, record_of, values_of

KEPT = 20
"""Maximum number of entries per node. `record` deletes older entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImplicationRecord:
    """An incident that involved a node."""

    node_id: str
    incident_id: str
    fleet_name: str
    at: datetime
    what: str
    evidence: Fact
    is_own_word: bool
    remedy: str


def record(session: Session, lease: Lease, lines: Iterable[ImplicationRecord]) -> None:
    """Store entries of fault histories, for any nodes. An existing entry stays unchanged. Raises StaleLease."""
    leases.guard(session, lease)
    for line in lines:
        if session.get(ImplicationRow, (line.node_id, line.incident_id)) is None:
            session.add(ImplicationRow(**values_of(line)))
            session.flush()
            newest = (
                select(ImplicationRow.incident_id)
                .where(ImplicationRow.node_id == line.node_id)
                .order_by(ImplicationRow.at.desc())
                .limit(KEPT)
            )
            stale = ImplicationRow.incident_id.not_in(list(session.scalars(newest)))
            session.execute(delete(ImplicationRow).where(ImplicationRow.node_id == line.node_id, stale))


_OF_FLEET: Final = (
    select(*columns_for(ImplicationRow, ImplicationRecord))
    .where(ImplicationRow.__table__.c.fleet_name == bindparam("of_fleet"))
    .order_by(ImplicationRow.__table__.c.at, ImplicationRow.__table__.c.incident_id)
)


def runs_of(session: Session, node_ids: Collection[str]) -> tuple[tuple[str, str], ...]:
    """Return pairs of run id and node id: the runs whose incidents involved the given nodes."""
    query = select(IncidentRow.run_id, ImplicationRow.node_id).distinct()
    query = query.join(IncidentRow, IncidentRow.id == ImplicationRow.incident_id)
    return tuple((run, node) for run, node in session.execute(query.where(ImplicationRow.node_id.in_(node_ids))))


def of_fleet(session: Session, fleet_name: str) -> Mapping[str, tuple[ImplicationRecord, ...]]:
    """Return the fault history of each node of a fleet that has one, oldest entry first."""
    found: dict[str, tuple[ImplicationRecord, ...]] = {}
    for row in session.execute(_OF_FLEET, {"of_fleet": fleet_name}):
        found[row.node_id] = (*found.get(row.node_id, ()), record_of(row, ImplicationRecord))
    return found


def of_node(session: Session, node_id: str, only_project: str | None = None) -> tuple[ImplicationRecord, ...]:
    """Return a node's fault history, oldest entry first, of one project's jobs or of all (None)."""
    query = (
        select(ImplicationRow)
        .where(ImplicationRow.node_id == node_id)
        .order_by(ImplicationRow.at, ImplicationRow.incident_id)
    )
    if only_project is not None:
        query = query.join(IncidentRow, IncidentRow.id == ImplicationRow.incident_id).where(
            IncidentRow.project == only_project
        )
    return tuple(record_of(row, ImplicationRecord) for row in session.scalars(query))
