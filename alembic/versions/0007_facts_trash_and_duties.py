"""Store facts as values in place of sentences. Add the trash, duties, restores of the database, and spans of jobs.

A sentence becomes a typed value only if a decision or a figure depends on it. Other evidence becomes `Recorded`, which
keeps the sentence. The server also reads the text of a reason, an implication or a response as `Recorded`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from alembic import op

phase = "contract"
revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

SAME_PASS_SECONDS = 1.0
"""A job ends, and closes its open incident, in one decision. Both times are therefore equal except for rounding."""
_ABSENT = re.compile(r"no control plane was running for (\d+) s, until (\d\d):(\d\d):(\d\d) UTC")
_ANNOUNCED = re.compile(r"(?:excluded by (\S+): )?AWS announced for (\S+): ([a-z ]+) \((.*)\)", re.DOTALL)
_REQUESTED = re.compile(r"(.*?) \w+ \S+ \((.*?)\)(?:: (.*))?", re.DOTALL)
_SURPLUS = re.compile(r"surplus: the fleet needs (\d+) nodes")
_ROLL = "the roll of the fleet"

Row = Mapping[str, Any]


def upgrade() -> None:
    """Add the tables and columns, and convert each row once.

    An earlier version stored each refused read as damage, so these checkpoints are verified again. No limit deletes a
    checkpoint while its verification is requested.
    """
    op.create_table(
        "database_restore",
        sa.Column("restored_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("first_generation", sa.BigInteger(), nullable=False),
        sa.Column("differences", sa.JSON(), nullable=False),
        sa.Column("accepted_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("restored_at", name=op.f("pk_database_restore")),
    )
    op.create_table(
        "duty",
        sa.Column("subject", sa.String(length=128), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("urgency", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("subject", name=op.f("pk_duty")),
    )
    op.create_table(
        "job_span",
        sa.Column("run_id", sa.String(length=64), sa.ForeignKey("job.run_id", ondelete="CASCADE"), nullable=False),
        sa.Column("start", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("end", sa.BigInteger(), nullable=False),
        sa.Column("bucket", sa.Text(), nullable=False),
        sa.Column("missing", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "start"),
    )
    for table, column in _columns():
        op.add_column(table, column)
    _alter("checkpoint", "verdict", type_=sa.Text(), nullable=True)
    _alter("node", "request", type_=sa.Text(), nullable=True)
    _rewrite("checkpoint", ("state", "verdict", "verified_at", "verify_requested_at"), _verdict)
    _rewrite("node", ("reason", "request", "request_words"), _node)
    _rewrite("fleet", ("roll_progress",), lambda row: _roll(row, _value))
    job = sa.table("job", sa.column("run_id"), sa.column("ended_at", sa.DateTime(timezone=True)))
    ends = {row.run_id: row.ended_at for row in op.get_bind().execute(sa.select(job))}
    _rewrite("incident", ("run_id", "opened_at", "closed_at", "evidence"), lambda row: _incident(row, ends))
    _rewrite("job", ("memo",), lambda row: _memo(row, _value))
    _alter("checkpoint", "verdict", type_=sa.JSON(), postgresql_using="verdict::json")
    _alter("fleet", "reason", existing_type=sa.Text(), new_column_name="reasons")
    op.drop_column("node", "request_words")
    op.drop_column("incident", "reason")


def downgrade() -> None:
    """Restore the schema and the sentences, and move each checkpoint out of the trash.

    An earlier server shows each other value as JSON, and replaces a node that drains now. A later upgrade restores the
    values.
    """
    op.execute(sa.text("UPDATE checkpoint SET state = 'complete' WHERE state = 'trashed'"))
    op.add_column("incident", sa.Column("reason", sa.Text(), server_default="", nullable=False))
    op.add_column("node", sa.Column("request_words", sa.Text(), server_default="", nullable=False))
    _alter("fleet", "reasons", existing_type=sa.Text(), new_column_name="reason")
    _alter("checkpoint", "verdict", type_=sa.Text())
    _rewrite("job", ("memo",), lambda row: _memo(row, _sentence))
    _rewrite("incident", ("evidence",), lambda row: {"evidence": [_sentence(each) for each in row["evidence"]]})
    _rewrite("fleet", ("roll_progress",), lambda row: _roll(row, _sentence))
    _rewrite("node", ("request",), _request)
    _rewrite("checkpoint", ("verdict",), _damage)
    _alter("node", "request", type_=sa.String(length=64), nullable=False)
    _alter("checkpoint", "verdict", existing_type=sa.Text(), nullable=False)
    for table, column in _columns():
        op.drop_column(table, column.name)
    for name in ("job_span", "duty", "database_restore"):
        op.drop_table(name)


def _columns() -> tuple[tuple[str, sa.Column[Any]], ...]:
    return (
        ("checkpoint", sa.Column("blocked", sa.JSON(), nullable=True)),
        ("checkpoint", sa.Column("verify_after", sa.DateTime(timezone=True), nullable=True)),
        ("checkpoint", sa.Column("trashed_at", sa.DateTime(timezone=True), nullable=True)),
        ("checkpoint", sa.Column("purge_at", sa.DateTime(timezone=True), nullable=True)),
        ("checkpoint", sa.Column("trash_cause", sa.String(length=64), nullable=True)),
        ("incident", sa.Column("is_given_up", sa.Boolean(), server_default=sa.false(), nullable=False)),
        ("job", sa.Column("purge_at", sa.DateTime(timezone=True), nullable=True)),
        ("job", sa.Column("accepted_step", sa.BigInteger(), server_default="-1", nullable=False)),
        ("job", sa.Column("accepted_after", sa.BigInteger(), server_default="0", nullable=False)),
        ("job", sa.Column("rehearsal_requested_at", sa.DateTime(timezone=True), nullable=True)),
    )


def _alter(table: str, column: str, **changes: Any) -> None:
    with op.batch_alter_table(table) as batch:
        batch.alter_column(column, **changes)


def _rewrite(name: str, columns: tuple[str, ...], change: Callable[[Row], Row]) -> None:
    """Update each row of a table with what `change` returns for its primary key and `columns`."""
    connection = op.get_bind()
    table = sa.Table(name, sa.MetaData(), autoload_with=connection, resolve_fks=False)
    rows = connection.execute(sa.select(*table.primary_key, *(table.c[column] for column in columns)))
    for row in rows.mappings().all():
        if values := change(row):
            same = (key == row[key.name] for key in table.primary_key)
            connection.execute(sa.update(table).where(*same).values(values))


def _value(sentence: str, opened_at: float = 0.0) -> dict[str, Any]:
    """Return the value of a sentence of evidence. `opened_at` (Unix seconds) dates an outage of the control plane."""
    if found := _ABSENT.fullmatch(sentence):
        seconds, hours, minutes, rest = map(int, found.groups())
        until = opened_at - (opened_at - hours * 3600 - minutes * 60 - rest) % 86400
        return {"kind": "ControlPlaneAbsent", "seconds": seconds, "until": until}
    return json.loads(sentence) if sentence.startswith('{"kind":') else {"kind": "Recorded", "text": sentence}


def _sentence(value: Row, _opened_at: float = 0.0) -> str:
    if value["kind"] == "ControlPlaneAbsent":
        until = datetime.fromtimestamp(value["until"], UTC)
        return f"no control plane was running for {value['seconds']:.0f} s, until {until:%H:%M:%S} UTC"
    return value.get("text", "") if value["kind"] == "Recorded" else json.dumps(value)


def _roll(row: Row, change: Callable[[Any], object]) -> Row:
    progress = row["roll_progress"]
    return {"roll_progress": {**progress, "reason": change(progress["reason"])}} if progress else {}


def _memo(row: Row, change: Callable[..., object]) -> Row:
    memo = dict(row["memo"])
    for name in ("moves", "exclusions"):
        memo[name] = [{**each, "evidence": change(each["evidence"])} for each in memo.get(name, ())]
    if incident := memo.get("incident"):
        evidence = [change(each, incident["opened_at"]) for each in incident["evidence"]]
        memo["incident"] = {**incident, "evidence": evidence, "decision": change(incident["decision"])}
    return {"memo": memo}


def _incident(row: Row, ends: Row) -> Row:
    opened_at = row["opened_at"].replace(tzinfo=row["opened_at"].tzinfo or UTC).timestamp()
    closed_at, ended_at = row["closed_at"], ends[row["run_id"]]
    is_over = closed_at is not None and ended_at is not None
    return {
        "evidence": [_value(each, opened_at) for each in row["evidence"]],
        "is_given_up": is_over and abs((ended_at - closed_at).total_seconds()) <= SAME_PASS_SECONDS,
    }


def _verdict(row: Row) -> Row:
    text, requested_at = row["verdict"], row["verify_requested_at"]
    if row["verified_at"] is None:
        return {"verdict": None}
    if text and row["state"] == "complete":
        requested_at = requested_at or row["verified_at"]
    damage = [{"kind": "Earlier", "rank": None, "detail": text}] if text else []
    verdict = {"kind": "Wrong" if text else "Intact", "damage": damage}
    return {"verdict": json.dumps(verdict), "verify_requested_at": requested_at}


def _damage(row: Row) -> Row:
    verdict = json.loads(row["verdict"] or '{"damage": []}')
    return {"verdict": "; ".join(each["detail"] or each["kind"] for each in verdict["damage"])}


def _node(row: Row) -> Row:
    """Return the values of a node's request, and of its reason if a decision depends on the reason."""
    reason, value = row["reason"], None
    if found := _SURPLUS.fullmatch(reason):
        value = {"kind": "Surplus", "desired_count": int(found[1])}
    elif found := _ANNOUNCED.fullmatch(reason):
        job, node_id, notice, text = found.groups()
        value = {"kind": "Announced", "node_id": node_id, "notice": notice.replace(" ", "_"), "text": text}
        if job is not None:
            value = {"kind": "GivenUp", "job": job, "remedy": "let_go", "because": value}
    elif reason.startswith(f"{_ROLL} replaces "):
        value = _requested("replace", row["id"], reason)
    request = _requested(row["request"], row["id"], row["request_words"]) if row["request"] else None
    return {"reason": json.dumps(value) if value else reason, "request": json.dumps(request) if request else None}


def _requested(request: str, node_id: str, words: str) -> dict[str, Any]:
    found = _REQUESTED.fullmatch(words)
    start, by, note = found.groups() if found else ("", "", words)
    value = {"kind": "Requested", "request": request, "node_id": node_id, "by": by, "note": note or ""}
    return value | {"is_roll": start == _ROLL}


def _request(row: Row) -> Row:
    if row["request"] is None:
        return {"request": ""}
    value = json.loads(row["request"])
    request, note = value["request"], value.get("note")
    start = f"{_ROLL} {request}s" if value.get("is_roll") else f"a user requested to {request}"
    words = f"{start} {row['id']} ({value['by']})" + (f": {note}" if note else "")
    return {"request": request, "request_words": words}
