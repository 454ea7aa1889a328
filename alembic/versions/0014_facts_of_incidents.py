"""Store the evidence of incidents, nodes and jobs, and Everstep's responses, as values in place of sentences."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC
from typing import Any

import sqlalchemy as sa
from alembic.operations import BatchOperations

from alembic import op

phase = "contract"
revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_ABSENT = re.compile(r"no control plane was running for (\d+) s, until (\d\d):(\d\d):(\d\d) UTC")
_ANNOUNCED = re.compile(r"AWS announced for (\S+): ([a-z ]+) \((.*)\)", re.DOTALL)
_DRILL = re.compile(r"a drill \((\S+)\): (.*) requested ([a-z-]+) on (?:rank (\d+) on )?(\S+)")
_ENDED = re.compile(r"rank (\d+) on (\S+) ended: (\w+), (signal|code) (\d+)")
_FAULTY = re.compile(r"the agent of (\S+) reports (\w+): (.*?)(; a reboot did not repair it)?", re.DOTALL)
_GPU = re.compile(r"gpu \d+")
_SHARDS = re.compile(
    r"(every node that held|two nodes of a parity group are lost, and with them|no remaining node holds) the shard of "
    r"rank ([\d, ]+)(?: is lost)?"
)
_SILENT = re.compile(r"the agent of (\S+) was silent for ([\d.]+) s")
_TERMINATED = re.compile(r"EC2 reports (\S+) as ([\w-]+)(?: \(((?:[\w.]+(?=:))?)(.*)\))?", re.DOTALL)
_XID = re.compile(r"\bxid\D{0,3}(\d{1,3})\b", re.IGNORECASE)
_LEAVE = re.compile(r"stop at an agreed step and (return|move the ranks of) ([^;]*?)(?: to other nodes)?")
_REPLACE = re.compile(r"replace (.*) and restart all ranks")
_SHRINK = re.compile(r"continue on (\d+) of (\d+) nodes; grow when nodes return")
_GROW = re.compile(r"stop at an agreed step and continue on more than (\d+) nodes")
_TRIAL = re.compile(
    r"(?:(i-\S+) is replaced|step (\d+) is skipped) once, to find out whether the \w+ or the script is at fault: (.*)",
    re.DOTALL,
)
_REPEATED = re.compile(r"(?:the same failure occurred (\d+) times |(\d+) failures occurred since )")
_EXCEPTION = re.compile(r"(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Iteration)(?:: .*)?)")
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "<")
_LOSSES = {"every": "holders", "two": "parity", "no": "memory"}


def fact(sentence: str | dict[str, Any]) -> dict[str, Any]:
    """Return the value of a sentence of evidence. A sentence that no pattern matches stays as it is.

    A downgraded database already has values.
    """
    if not isinstance(sentence, str):
        return sentence
    if found := _ENDED.fullmatch(sentence):
        rank, node, exit_class, kind, number = found.groups()
        code = -int(number) if kind == "signal" else int(number)
        return {"kind": "RankEnded", "rank": int(rank), "node_id": node, "exit_class": exit_class, "code": code}
    if found := _TERMINATED.fullmatch(sentence):
        node, state, code, rest = found.groups()
        return {
            "kind": "InstanceEnded",
            "node_id": node,
            "state": state,
            "code": code or "",
            "text": f"{code or ''}{rest or ''}",
        }
    if found := _FAULTY.fullmatch(sentence):
        node, code, text, again = found.groups()
        xid, gpu = _XID.search(text) if code == "gpu_xid" else None, _GPU.match(text)
        fault = {"kind": "Faulty", "code": code, "text": text, "is_repeated": again is not None}
        fault |= {"xid": int(xid[1])} if xid else {}
        fault |= {"device": gpu[0]} if gpu else {}
        return {"kind": "NodeFaulty", "node_id": node, "fault": fault}
    if found := _SILENT.fullmatch(sentence):
        return {"kind": "AgentSilent", "node_id": found[1], "seconds": float(found[2])}
    if found := _ANNOUNCED.fullmatch(sentence):
        return {"kind": "Announced", "node_id": found[1], "notice": found[2].replace(" ", "_"), "text": found[3]}
    if found := _SHARDS.fullmatch(sentence):
        ranks = [int(rank) for rank in found[2].split(", ")]
        return {"kind": "ShardsLost", "ranks": ranks, "how": _LOSSES[sentence.split(" ", 1)[0]]}
    if found := _DRILL.fullmatch(sentence):
        drill_id, by, kind, rank, node = found.groups()
        value = {"kind": "DrillOrdered", "drill_id": drill_id, "by": by, "drill": kind, "node_id": node}
        return value | ({"rank": int(rank)} if rank else {})
    return {"kind": "Recorded", "text": sentence}


def facts(sentences: Iterable[str | dict[str, Any]], opened_at: float) -> list[dict[str, Any]]:
    """Return the values of an incident's evidence. `opened_at`, in Unix seconds, dates an outage of the server."""
    return [
        _absence(found, opened_at) if isinstance(each, str) and (found := _ABSENT.fullmatch(each)) else fact(each)
        for each in sentences
    ]


def _absence(found: re.Match[str], opened_at: float) -> dict[str, Any]:
    seconds, *clock = map(int, found.groups())
    of_day = clock[0] * 3600 + clock[1] * 60 + clock[2]
    until = opened_at - (opened_at - of_day) % 86400
    return {"kind": "ControlPlaneAbsent", "seconds": seconds, "until": until}


def response(decision: str | dict[str, Any]) -> dict[str, Any]:
    """Return the value of a sentence about Everstep's response."""
    if not isinstance(decision, str):
        return decision
    before = decision.removesuffix("; then give the job up")
    if before != decision:
        return {"kind": "GivesUp", "after": response(before)}
    value: dict[str, Any] = {"kind": "Recorded", "text": before}
    if before == "restart all ranks on the same nodes":
        value = {"kind": "RestartsRanks"}
    elif found := _REPLACE.fullmatch(before):
        value = {"kind": "RestartsRanks", "replaced": found[1].split(", ")}
    elif found := _SHRINK.fullmatch(before):
        value = {"kind": "Shrinks", "count": int(found[1]), "node_count": int(found[2])}
    elif found := _GROW.fullmatch(before):
        value = {"kind": "Grows", "count": int(found[1])}
    elif found := _TRIAL.fullmatch(before):
        node, step, rest = found.groups()
        change = {"kind": "Change", **({"node_id": node} if node else {"skipped_step": int(step)})}
        value = {"kind": "Tries", "change": change, "because": {"kind": "Recorded", "text": rest}}
    elif found := _LEAVE.fullmatch(before):
        value = {"kind": "LeavesNodes", "node_ids": found[2].split(", "), "is_return": found[1] == "return"}
    return value


def gave_up(reason: str, failures: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the value of the reason for which Everstep gave a job up after `failures`, or None for other reasons."""
    found = _REPEATED.match(reason)
    if found is None or not failures:
        return None
    _, *traceback = reason.strip().split("\n")
    error = _EXCEPTION.fullmatch(traceback[-1].strip()) if traceback else None
    own = [(path, line) for path, line in _FRAME.findall(reason) if not any(part in path for part in _LIBRARIES)]
    place = f"{own[-1][0].rpartition('/')[2]}:{own[-1][1]}" if own else None
    failure = {**failures[-1], "error": None if error is None else error[1], "error_place": place}
    failure.pop("words", None)
    return {"kind": "GaveUp", "because": {"kind": "Repeated", "count": int(found[1] or found[2]), "failure": failure}}


def memo(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's stored record with values in place of sentences."""
    changed = dict(stored)
    for name in ("moves", "exclusions"):
        changed[name] = [{**each, "evidence": fact(each["evidence"])} for each in stored.get(name, ())]
    if (incident := stored.get("incident")) is not None:
        evidence = facts(incident["evidence"], incident["opened_at"])
        changed["incident"] = {**incident, "evidence": evidence, "decision": response(incident["decision"])}
    return changed


def upgrade() -> None:
    """Convert every sentence once."""
    connection = op.get_bind()
    with op.batch_alter_table("incident", schema=None) as batch_op:
        batch_op.drop_column("reason")
    columns = (sa.column("id"), sa.column("opened_at", sa.DateTime(timezone=True)), sa.column("decision"))
    incident = sa.table("incident", *columns, sa.column("evidence", sa.JSON()))
    for row in connection.execute(sa.select(incident)).all():
        opened_at = row.opened_at if row.opened_at.tzinfo else row.opened_at.replace(tzinfo=UTC)
        values = {
            "evidence": facts(row.evidence or (), opened_at.timestamp()),
            "decision": json.dumps(response(_stored(row.decision))),
        }
        connection.execute(sa.update(incident).where(incident.c.id == row.id).values(values))
    line = sa.table("implication", sa.column("node_id"), sa.column("incident_id"), sa.column("evidence"))
    for row in connection.execute(sa.select(line)).all():
        of_row = (line.c.node_id == row.node_id, line.c.incident_id == row.incident_id)
        connection.execute(sa.update(line).where(*of_row).values(evidence=json.dumps(fact(_stored(row.evidence)))))
    with op.batch_alter_table("incident", schema=None) as batch_op:
        _alter(batch_op, "decision")
    with op.batch_alter_table("implication", schema=None) as batch_op:
        _alter(batch_op, "evidence")
    columns = (sa.column("run_id"), sa.column("reason"), sa.column("failures", sa.JSON()))
    job = sa.table("job", *columns, sa.column("memo", sa.JSON()))
    for row in connection.execute(sa.select(job)).all():
        value, ended = memo(row.memo), gave_up(row.reason, row.failures)
        if ended is not None:
            value["reason"] = ended
        connection.execute(sa.update(job).where(job.c.run_id == row.run_id).values(memo=value))


def _stored(text: str) -> str | dict[str, Any]:
    return json.loads(text) if text.startswith('{"kind":') else text


def _alter(batch_op: BatchOperations, column: str) -> None:
    """Change a column of JSON text to JSON."""
    batch_op.alter_column(column, existing_type=sa.Text(), type_=sa.JSON(), postgresql_using=f"{column}::json")


def downgrade() -> None:
    """Restore the columns. They keep the values as JSON text."""
    with op.batch_alter_table("implication", schema=None) as batch_op:
        batch_op.alter_column("evidence", existing_type=sa.JSON(), type_=sa.Text())
    with op.batch_alter_table("incident", schema=None) as batch_op:
        batch_op.alter_column("decision", existing_type=sa.JSON(), type_=sa.Text())
        batch_op.add_column(sa.Column("reason", sa.Text(), server_default="", nullable=False))
