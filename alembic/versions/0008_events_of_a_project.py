"""Add an index of each project's events, which their followers read in order."""

from __future__ import annotations

from alembic import op

phase = "expand"
revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the index."""
    op.create_index("ix_event_project_id", "event", ["project", "id"])


def downgrade() -> None:
    """Remove the index."""
    op.drop_index("ix_event_project_id", table_name="event")
