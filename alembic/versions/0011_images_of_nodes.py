"""Add the image of a node, with its creation time."""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

phase = "expand"
revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns. The server fills them from AWS."""
    op.add_column("node", sa.Column("image_id", sa.Text(), nullable=True))
    op.add_column("node", sa.Column("image_created_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    """Remove the columns."""
    with op.batch_alter_table("node", schema=None) as batch_op:
        batch_op.drop_column("image_created_at")
        batch_op.drop_column("image_id")
