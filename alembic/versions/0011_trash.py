"""Store the trash of checkpoints, the deletions of jobs, and the restores of the database."""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

phase = "expand"
revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table and the columns. No checkpoint is in the trash, and no restore waits for a person."""
    op.create_table(
        "database_restore",
        sa.Column("restored_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("first_generation", sa.BigInteger(), nullable=False),
        sa.Column("differences", sa.JSON(), nullable=False),
        sa.Column("accepted_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("restored_at", name=op.f("pk_database_restore")),
    )
    op.add_column("checkpoint", sa.Column("trashed_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("checkpoint", sa.Column("purge_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("checkpoint", sa.Column("trash_cause", sa.String(length=64), nullable=True))
    op.add_column("job", sa.Column("purge_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    """Remove the table and the columns. Trashed checkpoints become complete ones."""
    op.execute(sa.text("UPDATE checkpoint SET state = 'complete' WHERE state = 'trashed'"))
    op.drop_column("job", "purge_at")
    op.drop_column("checkpoint", "trash_cause")
    op.drop_column("checkpoint", "purge_at")
    op.drop_column("checkpoint", "trashed_at")
    op.drop_table("database_restore")
