"""Add to each incident whether the job ended or was paused before training had caught up."""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

phase = "expand"
revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

SAME_PASS_SECONDS = 1.0
"""A job ends, and closes its open incident, in one decision. Both times are therefore equal except for rounding."""


def upgrade() -> None:
    """Add the column. An incident that closed when its job ended was given up."""
    op.add_column("incident", sa.Column("is_given_up", sa.Boolean(), server_default=sa.false(), nullable=False))
    connection = op.get_bind()
    at = sa.DateTime(timezone=True)
    job = sa.table("job", sa.column("run_id"), sa.column("ended_at", at))
    incident = sa.table(
        "incident", sa.column("id"), sa.column("run_id"), sa.column("closed_at", at), sa.column("is_given_up")
    )
    ends = sa.select(incident.c.id, incident.c.closed_at, job.c.ended_at).join(job, job.c.run_id == incident.c.run_id)
    for incident_id, closed_at, ended_at in connection.execute(ends).all():
        if None not in (closed_at, ended_at) and abs((ended_at - closed_at).total_seconds()) <= SAME_PASS_SECONDS:
            change = sa.update(incident).where(incident.c.id == incident_id).values(is_given_up=sa.true())
            connection.execute(change)


def downgrade() -> None:
    """Remove the column."""
    with op.batch_alter_table("incident", schema=None) as batch_op:
        batch_op.drop_column("is_given_up")
