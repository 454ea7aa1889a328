"""Reads all data that DescribeTrainingJob returns, in two queries.

    job ─ newest generation ─ totals of its incidents ─ unfinished drill       one joined row
    node                                                                       one row per node

DescribeTrainingJob is the most frequent call of waiters and scripts. The queries use SQLAlchemy's Core tables, because
the creation of ORM objects takes longer than the database's answer.

Invariant: all data of a description is from the same moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import and_, bindparam, select
from sqlalchemy.orm import Session

from control_plane.db import incidents, nodes
from control_plane.db.errors import NotFound
from control_plane.db.incidents import IncidentTotals
from control_plane.db.jobs import JobRecord, record_of_row
from control_plane.db.models import Drill, Generation, Job
from everstep.protocol.codec import decode
from everstep.protocol.plan import GenerationPlan

_JOB: Final = Job.__table__.c
_GENERATION: Final = Generation.__table__.c
_DRILL: Final = Drill.__table__.c
_TOTALS: Final = incidents.totals_where_run(
    select(_JOB.run_id).where(_JOB.name == bindparam("of_name")).scalar_subquery()
).subquery()
_ASKED: Final = (
    select(
        *_JOB,
        _GENERATION.plan,
        _GENERATION.revision.label("observed_revision"),
        select(_DRILL.id)
        .where(_DRILL.run_id == _JOB.run_id, _DRILL.ended_at.is_(None))
        .limit(1)
        .scalar_subquery()
        .label("open_drill_id"),
        *_TOTALS.c,
    )
    .select_from(Job.__table__)
    .outerjoin(Generation.__table__, and_(_GENERATION.run_id == _JOB.run_id, _GENERATION.number == _JOB.generation))
    .join(_TOTALS, _JOB.run_id.is_not(None))  # the query for totals always returns exactly one row
    .where(_JOB.name == bindparam("of_name"))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDescription:
    """A job with its related rows."""

    job: JobRecord
    plan: GenerationPlan | None
    """Plan of the newest generation. None before the first generation."""
    observed_revision: int | None
    """Revision of the job from which the newest generation was planned."""
    incidents: IncidentTotals
    open_drill_id: str | None
    node_ids: tuple[str, ...]
    """Nodes that are assigned to the job now."""


def find(session: Session, name: str) -> JobDescription:
    """Read a job's description.

    Raises NotFound if the job does not exist. `session` comes from `Database.read` or `Database.write`.
    """
    row = session.execute(_ASKED, {"of_name": name}).one_or_none()
    if row is None:
        raise NotFound("training job", name)
    job = record_of_row(row)
    return JobDescription(
        job=job,
        plan=decode(row.plan, GenerationPlan) if row.plan else None,
        observed_revision=row.observed_revision,
        incidents=incidents.totals_of(row[-len(_TOTALS.c) :]),
        open_drill_id=row.open_drill_id,
        node_ids=nodes.ids_of_run(session, job.run_id),
    )
