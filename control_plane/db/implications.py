"""Implications: what incidents say of nodes, a line each; the history that remedies are chosen by.

Invariant: a line is written once, under the lease of the job or fleet that found it, and never changed; a node keeps at
most `KEPT` of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from control_plane.db import leases
from control_plane.db.leases import Lease
from control_plane.db.models import Implication, Incident
from control_plane.db.session import record_of, values_of

KEPT = 20
"""Lines per node, the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImplicationRecord:
    """A line as it is stored."""

    node_id: str
    incident_id: str
    fleet_name: str
    at: datetime
    what: str
    evidence: str
    is_own_word: bool
    remedy: str


def record(session: Session, lease: Lease, lines: Iterable[ImplicationRecord]) -> None:
    """Store lines; one that is stored already stays as it is.

    Args:
        session: a writing one.
        lease: of the job or fleet that found them.
        lines: any number.

    Raises:
        StaleLease: the lease was taken over; nothing was written.
    """
    leases.guard(session, lease)
    for line in lines:
        if session.get(Implication, (line.node_id, line.incident_id)) is None:
            session.add(Implication(**values_of(line)))
            session.flush()
            newest = (
                select(Implication.incident_id)
                .where(Implication.node_id == line.node_id)
                .order_by(Implication.at.desc())
                .limit(KEPT)
            )
            stale = Implication.incident_id.not_in(list(session.scalars(newest)))
            session.execute(delete(Implication).where(Implication.node_id == line.node_id, stale))


def of_fleet(session: Session, fleet_name: str) -> Mapping[str, tuple[ImplicationRecord, ...]]:
    """Return the histories of all nodes of a fleet that have one, by node, oldest line first."""
    found: dict[str, tuple[ImplicationRecord, ...]] = {}
    for row in session.scalars(
        select(Implication)
        .where(Implication.fleet_name == fleet_name)
        .order_by(Implication.at, Implication.incident_id)
    ):
        found[row.node_id] = (*found.get(row.node_id, ()), record_of(row, ImplicationRecord))
    return found


def of_node(session: Session, node_id: str, only_project: str | None = None) -> tuple[ImplicationRecord, ...]:
    """Return a node's history, oldest line first; of incidents of one project's jobs only, where one is given."""
    query = select(Implication).where(Implication.node_id == node_id).order_by(Implication.at, Implication.incident_id)
    if only_project is not None:
        query = query.join(Incident, Incident.id == Implication.incident_id).where(Incident.project == only_project)
    return tuple(record_of(row, ImplicationRecord) for row in session.scalars(query))
