"""Store the rolls of fleets."""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the newest roll of a fleet, and its progress."""
    op.add_column("fleet", sa.Column("roll", sa.JSON(), nullable=True))
    op.add_column("fleet", sa.Column("roll_progress", sa.JSON(), nullable=True))


def downgrade() -> None:
    """Remove the columns."""
    op.drop_column("fleet", "roll_progress")
    op.drop_column("fleet", "roll")
