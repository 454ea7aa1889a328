"""Add the instance types of each fleet that encrypt traffic between instances."""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

phase = "expand"
revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("fleet", sa.Column("encrypting_types", sa.JSON(), nullable=False, server_default="[]"))


def downgrade() -> None:
    """Remove the column."""
    op.drop_column("fleet", "encrypting_types")
