"""Add the tests of a node: the newest order and the newest result."""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

phase = "expand"
revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column. Nodes from before are untested."""
    op.add_column("node", sa.Column("burn_in", sa.JSON(), nullable=True))


def downgrade() -> None:
    """Remove the column."""
    with op.batch_alter_table("node", schema=None) as batch_op:
        batch_op.drop_column("burn_in")
