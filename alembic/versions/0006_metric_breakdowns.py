"""Add the values of single nodes and ranks to the chunks of metrics."""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

phase = "expand"
revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column. Chunks from before have no such values."""
    op.add_column("metric_chunk", sa.Column("breakdowns", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    """Remove the column."""
    with op.batch_alter_table("metric_chunk", schema=None) as batch_op:
        batch_op.drop_column("breakdowns")
