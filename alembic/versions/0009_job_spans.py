"""Add the settled spans of each job's time."""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

phase = "expand"
revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table. Jobs from before have spans from their next update on."""
    op.create_table(
        "job_span",
        sa.Column("run_id", sa.String(length=64), sa.ForeignKey("job.run_id", ondelete="CASCADE"), nullable=False),
        sa.Column("start", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("end", sa.BigInteger(), nullable=False),
        sa.Column("bucket", sa.Text(), nullable=False),
        sa.Column("missing", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "start"),
    )


def downgrade() -> None:
    """Remove the table."""
    op.drop_table("job_span")
