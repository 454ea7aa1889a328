"""Reads all data that DescribeTrainingJob returns, from one consistent state, in two queries.

    job ─ newest generation ─ totals of its incidents ─ unfinished drill       one joined row
    node                                                                       one row per node

The queries use Core tables, because the creation of ORM objects takes longer than the database's answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, and_, func, select
from sqlalchemy.orm import Session

from control_plane.db import incidents, nodes
from control_plane.db.incidents import IncidentTotals
from control_plane.db.jobs import ByNameOrRun, SavedJob, record_of_row
from control_plane.db.models import DrillRow, GenerationRow, JobRow
from everstep.protocol.codec import decode
from everstep.protocol.plan import GenerationPlan

_JOB: Final = JobRow.__table__.c
_GENERATION: Final = GenerationRow.__table__.c
_DRILL: Final = DrillRow.__table__.c


def _statement(conditions: Collection[ColumnElement[bool]]) -> Select[*tuple[Any, ...]]:
    # A name can match jobs of several projects, but a scalar subquery must return one row. The choice of `min` does not
    # matter, because `ByNameOrRun` rejects such a name.
    run_id = select(func.min(_JOB.run_id)).where(*conditions).scalar_subquery()
    totals = incidents.totals_where_run(run_id).subquery()
    open_drill = select(_DRILL.id).where(_DRILL.run_id == _JOB.run_id, _DRILL.ended_at.is_(None)).limit(1)
    return (
        select(
            *_JOB,
            _GENERATION.plan,
            _GENERATION.revision.label("observed_revision"),
            open_drill.scalar_subquery().label("open_drill_id"),
            *totals.c,
        )
        .select_from(JobRow.__table__)
        .outerjoin(
            GenerationRow.__table__, and_(_GENERATION.run_id == _JOB.run_id, _GENERATION.number == _JOB.generation)
        )
        # The query for totals always returns exactly one row. A join needs a condition, and this one is always true.
        .join(totals, _JOB.run_id.is_not(None))
        .where(*conditions)
    )


_ONE: Final = ByNameOrRun(_statement)
_TOTALS_WIDTH: Final = len(dataclasses.fields(IncidentTotals))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDescription:
    """A job, with everything from other tables that DescribeTrainingJob returns."""

    job: SavedJob
    plan: GenerationPlan | None
    """Plan of the newest generation. None before the first generation."""
    observed_revision: int | None
    """Revision of the job from which the newest generation was planned."""
    incidents: IncidentTotals
    open_drill_id: str | None
    node_ids: tuple[str, ...]
    """Nodes that are assigned to the job now."""


def find(session: Session, text: str, project: str | None = None) -> JobDescription:
    """Read the description of the job with a name or run id, in one project or in all (None).

    Raises:
        NotFound: the job does not exist in the project.
        AmbiguousName: jobs of several projects have this name.
    """
    row = _ONE.row(session, text, project)
    job = record_of_row(row)
    return JobDescription(
        job=job,
        plan=decode(row.plan, GenerationPlan) if row.plan else None,
        observed_revision=row.observed_revision,
        incidents=incidents.totals_of(row[-_TOTALS_WIDTH:]),
        open_drill_id=row.open_drill_id,
        node_ids=nodes.ids_of_run(session, job.run_id),
    )
