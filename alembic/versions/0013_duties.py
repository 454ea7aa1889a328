"""Store the duties of which the service has told people."""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

phase = "expand"
revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table. The first comparison stores the present duties, each with an event."""
    op.create_table(
        "duty",
        sa.Column("subject", sa.String(128), nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("urgency", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("subject", name=op.f("pk_duty")),
    )


def downgrade() -> None:
    """Remove the table."""
    op.drop_table("duty")
