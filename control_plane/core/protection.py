"""Finds out that a running job no longer keeps its steps, although training goes on (a lapse of its protection).

    a rank or its agent reports a cause that lasts ──────────────────┐
    training passed the proposed step, and its commit is overdue ────┴─▶ lapse ── the next commit ─▶ no lapse

Invariant: a lapse begins only while the coordinator's agent answers, or with a report of the shard's own agent. A
missing report is no evidence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace

from control_plane.core.actions import EventDraft
from control_plane.core.observed.jobs import AwaitedCommit, JobRecord
from control_plane.core.observed.reasons import JobFact, JobNote, Lapsed
from control_plane.core.observed.steps import Lapse
from everstep.protocol.agent_messages import MemberReport, ShardProtection
from everstep.protocol.ids import NodeId, Step
from everstep.protocol.limits import MAX_STEP
from everstep.protocol.plan import Timeouts
from everstep.protocol.rank_messages import UnkeptCause

LAPSE_STEPS = 3
"""Training must pass an overdue step by this number of steps. Training that has stopped is not a lapse."""
COMMIT_TIMES = 3
"""A commit is overdue after this multiple of the newest commit's duration, but not before `exclude_seconds`."""
UPLOAD_TIMES = 10
"""Further factor of this limit during the upload of a checkpoint, which may need the slot of the next step."""


def with_watch(
    now: float,
    record: JobRecord,
    reports: Mapping[NodeId, MemberReport],
    *,
    silent: frozenset[NodeId],
    is_looking: bool,
    timeouts: Timeouts,
) -> JobRecord:
    """Return the record with its awaited commit and lapse. `is_looking`: the coordinator's report is current."""
    kept = max(record.committed, record.base_step)
    awaited, lapse, commit_seconds = record.awaited, record.lapse, record.commit_seconds
    if awaited is not None and (awaited.generation, awaited.kept) != (record.generation, kept):
        if awaited.generation == record.generation and awaited.passed_at is not None:
            commit_seconds = now - awaited.passed_at
        awaited = None
    if lapse is not None and (lapse.generation, lapse.kept) != (record.generation, kept):
        lapse = None
    next_step = record.proposed if record.proposed > kept else record.boundary + 1
    if awaited is None and kept < next_step <= MAX_STEP:
        awaited = AwaitedCommit(generation=record.generation, kept=kept, step=Step(next_step))
    if awaited is not None and awaited.passed_at is None and record.boundary >= awaited.step:
        awaited = replace(awaited, passed_at=now)
    record = replace(record, awaited=awaited, lapse=lapse, commit_seconds=commit_seconds)
    if lapse is not None or not is_looking:
        return record
    shards = {node_id: report.protection for node_id, report in reports.items()}
    lasting = (each for each in _unkept(shards) if each[1].lasts and _is_current(each[1], record, kept))
    found = next(lasting, None)
    if found is None and not _is_overdue(now, record, timeouts):
        return record
    found = found or next((each for each in _unkept(shards) if _is_current(each[1], record, kept)), None)
    lapse = Lapse(
        cause=UnkeptCause.UNCONFIRMED,
        generation=record.generation,
        kept=kept,
        since=(record.committed_at if record.committed > record.base_step else record.stepped_at) or now,
    )
    if found is not None:
        node_id, shard = found
        assert shard.unkept is not None
        lapse = replace(lapse, cause=shard.unkept, node_id=node_id, rank=shard.rank, detail=shard.reason)
    elif silent:
        lapse = replace(lapse, cause=UnkeptCause.SILENT_AGENT, node_id=min(silent))
    return replace(record, lapse=lapse)


def events(before: JobRecord, after: JobRecord) -> tuple[EventDraft, ...]:
    """Return the event about the begin or the end of a lapse between two records; empty without a change."""
    if before.lapse == after.lapse:
        return ()
    if after.lapse is not None:
        detail = {name: value for name, value in asdict(after.lapse).items() if value is not None}
        draft = EventDraft(
            type="ProtectionLost", message=Lapsed(lapse=after.lapse, boundary=after.boundary), detail=detail
        )
        return (replace(draft, node_id=after.lapse.node_id),)
    restored = JobNote(what=JobFact.KEEPS_STEPS_AGAIN, step=after.committed)
    return (EventDraft(type="ProtectionRestored", message=restored),)


def _unkept(shards: Mapping[NodeId, tuple[ShardProtection, ...]]) -> Iterator[tuple[NodeId, ShardProtection]]:
    """Yield each shard of which the owner has abandoned a step since the last commit, in rank order."""
    found = [(node_id, shard) for node_id, each in shards.items() for shard in each if shard.unkept is not None]
    yield from sorted(found, key=lambda each: each[1].rank)


def _is_current(shard: ShardProtection, record: JobRecord, kept: Step) -> bool:
    return shard.committed >= kept or record.committed <= record.base_step


def _is_overdue(now: float, record: JobRecord, timeouts: Timeouts) -> bool:
    awaited = record.awaited
    if awaited is None or awaited.passed_at is None or record.boundary < awaited.step + LAPSE_STEPS:
        return False
    limit = max(timeouts.exclude_seconds, COMMIT_TIMES * record.commit_seconds)
    since = awaited.passed_at if record.unwatched is None else max(awaited.passed_at, record.unwatched[1])
    return now - since > limit * (1 if record.uploading is None else UPLOAD_TIMES)
