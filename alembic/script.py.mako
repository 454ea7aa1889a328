"""${message}."""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op
${imports if imports else ""}
phase = "expand"
"""Servers of the version before keep running after this migration. `contract` if they do not."""
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    """Migrate to this version from the version before it."""
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    """Migrate back to the version before it."""
    ${downgrades if downgrades else "pass"}
