"""Store a person's consent that a job repeats much training."""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

phase = "expand"
revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the accepted step, and the generation after which the consent is valid."""
    with op.batch_alter_table("job", schema=None) as batch_op:
        batch_op.add_column(sa.Column("accepted_step", sa.BigInteger(), nullable=False, server_default="-1"))
        batch_op.add_column(sa.Column("accepted_after", sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    """Remove both columns."""
    with op.batch_alter_table("job", schema=None) as batch_op:
        batch_op.drop_column("accepted_after")
        batch_op.drop_column("accepted_step")
