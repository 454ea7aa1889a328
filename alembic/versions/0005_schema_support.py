"""Store which older versions can run on the schema."""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

phase = "expand"
revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table. `control_plane.db.schema` fills it after the last migration."""
    op.create_table(
        "schema_support",
        sa.Column("revision", sa.String(length=64), nullable=False),
        sa.Column("server_revision", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("revision", "server_revision", name=op.f("pk_schema_support")),
    )


def downgrade() -> None:
    """Remove the table."""
    op.drop_table("schema_support")
