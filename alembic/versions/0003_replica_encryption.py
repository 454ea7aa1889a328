"""Add the fleets' setting for TLS between nodes."""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column. Fleets from before get the default."""
    with op.batch_alter_table("fleet", schema=None) as batch_op:
        batch_op.add_column(sa.Column("replica_encryption", sa.Text(), server_default="Auto", nullable=False))


def downgrade() -> None:
    """Remove the column."""
    with op.batch_alter_table("fleet", schema=None) as batch_op:
        batch_op.drop_column("replica_encryption")
