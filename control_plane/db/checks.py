"""Checks that a database is intact, also while servers run. A check only reads."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import and_, exists, func, select
from sqlalchemy.orm import Session

from control_plane.db import implications, schema
from control_plane.db.models import Base, GenerationRow, ImplicationRow, JobRow
from control_plane.db.session import Database

SHOWN_ROWS = 3
"""Maximum number of faulty rows that each check reports."""


def check(database: Database) -> tuple[str, ...]:
    """Return the faults in a database, one sentence each.

    Raises SchemaMismatch if the database has another schema than this version needs.
    """
    schema.require_current(database)
    with database.read() as session:
        return (*_file(session, database), *_references(session), *_numbers(session), *_histories(session))


def _file(session: Session, database: Database) -> Iterator[str]:
    if database.is_sqlite:
        for (result,) in session.connection().exec_driver_sql("PRAGMA integrity_check(10)"):
            if result != "ok":
                yield f"the file is damaged: {result}. Restore a backup"


def _references(session: Session) -> Iterator[str]:
    """Yield a sentence for each foreign key that refers to rows that do not exist."""
    for table in Base.metadata.sorted_tables:
        for key in table.foreign_key_constraints:
            other = key.referred_table.alias()
            pairs = [(element.parent, other.c[element.column.name]) for element in key.elements]
            is_set = and_(*(column.is_not(None) for column, _ in pairs))
            is_known = exists().where(and_(*(column == target for column, target in pairs)))
            count = session.scalar(select(func.count()).select_from(table).where(is_set, ~is_known)) or 0
            if count:
                yield f"{count} rows of {table.name} name no row of {key.referred_table.name}. Restore a backup"


def _numbers(session: Session) -> Iterator[str]:
    newest = select(func.max(GenerationRow.number)).where(GenerationRow.run_id == JobRow.run_id).scalar_subquery()
    for name, issued, number in session.execute(
        select(JobRow.name, JobRow.issued_generation, newest).where(newest > JobRow.issued_generation).limit(SHOWN_ROWS)
    ):
        yield f"job {name}: generation {number} is stored, but only numbers up to {issued} count as issued"
    known = exists().where(GenerationRow.run_id == JobRow.run_id, GenerationRow.number == JobRow.generation)
    lost = select(JobRow.name, JobRow.generation).where(JobRow.generation > 0, ~known).limit(SHOWN_ROWS)
    for name, number in session.execute(lost):
        yield f"job {name}: its generation {number} has no row"
    parents = select(GenerationRow.run_id, GenerationRow.number).subquery()
    has_parent = exists().where(parents.c.run_id == GenerationRow.run_id, parents.c.number == GenerationRow.parent)
    orphans = select(GenerationRow.run_id, GenerationRow.number, GenerationRow.parent).where(
        GenerationRow.parent > 0, ~has_parent
    )
    for run_id, number, parent in session.execute(orphans.limit(SHOWN_ROWS)):
        yield f"run {run_id}: generation {number} has the parent {parent}, which has no row"


def _histories(session: Session) -> Iterator[str]:
    limit = implications.KEPT
    query = select(ImplicationRow.node_id, func.count()).group_by(ImplicationRow.node_id).having(func.count() > limit)
    for node_id, count in session.execute(query.limit(SHOWN_ROWS)):
        yield f"node {node_id}: its fault history has {count} entries, and the limit is {limit}"
