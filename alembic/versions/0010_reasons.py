"""Store the reasons of nodes, fleets and rolls as values in place of sentences."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import sqlalchemy as sa

from alembic import op

phase = "contract"
revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_REQUESTED = re.compile(
    r"(?:a user requested to (\w+)|the roll of the fleet (\w+)s) (\S+) \((.*?)\)(?:: (.*))?", re.DOTALL
)
_ANNOUNCED = re.compile(r"AWS announced for (\S+): ([a-z ]+) \((.*)\)", re.DOTALL)
_GIVEN_UP = re.compile(r"(left|unreachable|excluded) by (\S+): (.*)", re.DOTALL)
_SURPLUS = re.compile(r"surplus: the fleet needs (\d+) nodes")
_REMEDIES = {"left": "release", "unreachable": "hold", "excluded": "replace"}


def _requested(sentence: str) -> dict[str, object] | None:
    found = _REQUESTED.fullmatch(sentence)
    if found is None:
        return None
    asked, rolled, node_id, by, note = found.groups()
    return {
        "kind": "Requested",
        "request": asked or rolled,
        "node_id": node_id,
        "by": by,
        "note": note or "",
        "is_roll": rolled is not None,
    }


def _reason(sentence: str) -> Mapping[str, object]:
    """Return the value for a stored sentence. Sentences on which no decision depends stay as they are."""
    if found := _SURPLUS.fullmatch(sentence):
        return {"kind": "Surplus", "desired_count": int(found[1])}
    if found := _ANNOUNCED.fullmatch(sentence):
        notice = found[2].replace(" ", "_")
        return {"kind": "Announced", "node_id": found[1], "notice": notice, "text": found[3]}
    if found := _GIVEN_UP.fullmatch(sentence):
        remedy = "let_go" if _ANNOUNCED.fullmatch(found[3]) else _REMEDIES[found[1]]
        return {"kind": "GivenUp", "job": found[2], "remedy": remedy, "because": _recorded(found[3])}
    if sentence.startswith("EC2: "):
        return {"kind": "InstanceEnded", "node_id": "", "state": sentence.removeprefix("EC2: ")}
    return _requested(sentence) or _recorded(sentence)


def _recorded(sentence: str) -> dict[str, object]:
    return {"kind": "Recorded", "text": sentence}


def upgrade() -> None:
    """Convert every sentence once."""
    connection = op.get_bind()
    node = sa.table("node", sa.column("id"), sa.column("reason"), sa.column("request"), sa.column("request_words"))
    fleet = sa.table(
        "fleet", sa.column("name"), sa.column("reason"), sa.column("roll_progress", sa.JSON(none_as_null=True))
    )
    with op.batch_alter_table("node", schema=None) as batch_op:
        batch_op.alter_column("request_words", existing_type=sa.Text(), nullable=True)
    for row in connection.execute(sa.select(node)).all():
        pending = None
        if row.request:
            pending = json.dumps(_requested(row.request_words) or _by_kind(row.request, row.id, row.request_words))
        values = {"reason": json.dumps(_reason(row.reason)), "request_words": pending}
        connection.execute(sa.update(node).where(node.c.id == row.id).values(values))
    for row in connection.execute(sa.select(fleet)).all():
        progress = row.roll_progress
        if progress is not None:
            progress = {**progress, "reason": _recorded(progress.get("reason", ""))}
        values = {"reason": json.dumps([_recorded(row.reason)]), "roll_progress": progress}
        connection.execute(sa.update(fleet).where(fleet.c.name == row.name).values(values))
    with op.batch_alter_table("node", schema=None) as batch_op:
        batch_op.drop_column("request")
    with op.batch_alter_table("node", schema=None) as batch_op:
        batch_op.alter_column("request_words", new_column_name="request", existing_type=sa.Text())
    with op.batch_alter_table("fleet", schema=None) as batch_op:
        batch_op.alter_column("reason", new_column_name="reasons", existing_type=sa.Text())


def _by_kind(request: str, node_id: str, words: str) -> dict[str, object]:
    return {"kind": "Requested", "request": request, "node_id": node_id, "by": "", "note": words}


def downgrade() -> None:
    """Restore the columns. They keep the values as JSON text."""
    with op.batch_alter_table("node", schema=None) as batch_op:
        batch_op.alter_column("request", new_column_name="request_words", existing_type=sa.Text())
    with op.batch_alter_table("node", schema=None) as batch_op:
        batch_op.add_column(sa.Column("request", sa.String(length=64), server_default="", nullable=False))
    with op.batch_alter_table("fleet", schema=None) as batch_op:
        batch_op.alter_column("reasons", new_column_name="reason", existing_type=sa.Text())
