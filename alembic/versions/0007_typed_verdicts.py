"""Store the verdict on a checkpoint as a record, and why a verification waits."""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

phase = "contract"
revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Replace the text of verdicts by records.

    An earlier version stored each refused read as damage, so these checkpoints are verified again. No limit deletes a
    checkpoint while its verification is requested.
    """
    connection = op.get_bind()
    old = sa.text("SELECT run_id, generation, step, verdict FROM checkpoint WHERE verified_at IS NOT NULL")
    rows = connection.execute(old).all()
    with op.batch_alter_table("checkpoint", schema=None) as batch_op:
        batch_op.drop_column("verdict")
    with op.batch_alter_table("checkpoint", schema=None) as batch_op:
        batch_op.add_column(sa.Column("verdict", sa.JSON(none_as_null=True), nullable=True))
        batch_op.add_column(sa.Column("blocked", sa.JSON(none_as_null=True), nullable=True))
        batch_op.add_column(sa.Column("verify_after", sa.DateTime(timezone=True), nullable=True))
    table = sa.table(
        "checkpoint",
        *(sa.column(name) for name in ("run_id", "generation", "step", "state", "verified_at", "verify_requested_at")),
        sa.column("verdict", sa.JSON(none_as_null=True)),
    )
    for run_id, generation, step, text in rows:
        damage = [{"kind": "Earlier", "rank": None, "detail": text}] if text else []
        record = {"kind": "Wrong" if text else "Intact", "damage": damage}
        key = (table.c.run_id == run_id, table.c.generation == generation, table.c.step == step)
        connection.execute(sa.update(table).where(*key).values(verdict=record))
        if text:
            again = sa.func.coalesce(table.c.verify_requested_at, table.c.verified_at)
            complete = (*key, table.c.state == "complete")
            connection.execute(sa.update(table).where(*complete).values(verify_requested_at=again))


def downgrade() -> None:
    """Store the text of each verdict again."""
    connection = op.get_bind()
    table = sa.table(
        "checkpoint",
        *(sa.column(name) for name in ("run_id", "generation", "step")),
        sa.column("verdict", sa.JSON(none_as_null=True)),
    )
    rows = connection.execute(sa.select(table).where(table.c.verdict.is_not(None))).all()
    with op.batch_alter_table("checkpoint", schema=None) as batch_op:
        batch_op.drop_column("verify_after")
        batch_op.drop_column("blocked")
        batch_op.drop_column("verdict")
    with op.batch_alter_table("checkpoint", schema=None) as batch_op:
        batch_op.add_column(sa.Column("verdict", sa.Text(), nullable=False, server_default=""))
    old = sa.table("checkpoint", *(sa.column(name) for name in ("run_id", "generation", "step", "verdict")))
    for run_id, generation, step, verdict in rows:
        text = "; ".join(each["detail"] for each in verdict["damage"])
        key = (old.c.run_id == run_id, old.c.generation == generation, old.c.step == step)
        connection.execute(sa.update(old).where(*key).values(verdict=text))
