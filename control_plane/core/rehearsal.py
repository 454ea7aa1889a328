"""Decides when a job rehearses its own resume, and combines the ranks' reports to one result.

    committed ≥ AtStep, cheap enough ─┐
    a person asks ────────────────────┴▶ order ─▶ ranks repeat steps ─▶ all ranks report, or one refuses ─▶ result
                                           ▲                                │
                                           └── once more ◀── the order ends before a result

    the first pass over the data ends, or modules, parameters or groups change ─▶ another order

Invariant: pure. An order is stored before any agent receives it. A job gets at most `MOST_AUTOMATIC` orders, besides
repeated ones and a person's, and none of them after a difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import msgspec

from control_plane.core import accounting
from control_plane.core.actions import EventDraft
from control_plane.core.hangs import REHEARSE
from control_plane.core.observed.jobs import JobRecord
from control_plane.core.observed.reasons import RehearsalEnded
from control_plane.core.observed.rehearsals import NoResult, RehearsalOutcome, Rehearsals
from control_plane.core.observed.spans import Bucket
from control_plane.core.observed.specs import JobSpec, OnDifference, RehearsalMode
from everstep.protocol.agent_messages import MemberReport
from everstep.protocol.ids import NO_STEP, NodeId, Rank
from everstep.protocol.plan import CHECK_VARIABLE, GenerationPlan, PlanNode
from everstep.protocol.rank_messages import StopState
from everstep.protocol.rehearsals import RehearsalVerdict, Rehearsed

MOST_ORDERS = 2
MOST_AUTOMATIC = 3
MAX_COST_RATIO = 0.001
"""Largest cost of a rehearsal in mode AUTO, as a share of the expected run."""
REPORT_SECONDS = 30.0
"""Time after the coordinator's end of an order, after which missing reports of agents will not arrive."""
LEAST_RUN_SECONDS = 180.0
"""Shortest expected run in mode AUTO. A shorter job costs little to repeat."""
_LEAD_STEPS = 10
"""Steps that the coordinator may need to announce a rehearsal, besides three times the number of repeated steps."""


def is_due(spec: JobSpec, record: JobRecord, *, is_local: bool) -> bool:
    """Return whether a running job that neither stops nor moves must be ordered to rehearse now."""
    told = record.rehearsal
    if spec.rehearsal_mode is RehearsalMode.OFF or CHECK_VARIABLE in spec.script.environment or told.is_open:
        return False
    if record.committed <= record.base_step or (record.committed < spec.rehearsal_at_step and not is_asked(record)):
        return False
    if 0 < record.target < record.boundary + 3 * spec.rehearsal_steps + _LEAD_STEPS:
        return False
    if is_asked(record):
        return True
    if told.unanswered_count:
        return told.unanswered_count < MOST_ORDERS
    # After a difference, a later proof would hide what a restart loses.
    if told.result is not None and (told.result.is_difference or not told.is_outdated):
        return False
    return told.automatic_count < MOST_AUTOMATIC and (
        spec.rehearsal_mode is RehearsalMode.ON or _is_worth_it(spec, record, is_local=is_local)
    )


def _is_worth_it(spec: JobSpec, record: JobRecord, *, is_local: bool) -> bool:
    trained = record.microseconds.get(Bucket.TRAIN, 0) / 1_000_000
    step_seconds = trained / record.max_boundary
    newer = record.boundary - record.base_step - 1
    if record.boundary_at is not None and record.stepped_at is not None and newer > 0:
        # A job that starts from another job's checkpoint has not trained the steps before its base.
        step_seconds = (record.boundary_at - record.stepped_at) / newer
    if record.target > 0:
        run = record.target * step_seconds
    elif is_local:
        return True
    else:
        run = 2 * trained
    start = max(0.0, (record.stepped_at or record.state_since) - record.state_since)
    cost = (record.rehearsal.automatic_count + 1) * 2 * (start + spec.rehearsal_steps * step_seconds)
    return run >= LEAST_RUN_SECONDS and (is_local or cost <= MAX_COST_RATIO * run)


def is_asked(record: JobRecord) -> bool:
    """Return whether a person has requested a rehearsal that no order serves yet."""
    return record.rehearsal_requested_at not in (None, record.rehearsal.served_at)


def refused(spec: JobSpec, record: JobRecord, node: PlanNode, now: float) -> tuple[JobRecord, tuple[EventDraft, ...]]:
    """Refuse a person's request, because `node` has an earlier agent. Return the record and an event."""
    return _unanswered(spec, record, NoResult.EARLIER_AGENT, now, node)


def ordered(record: JobRecord, reports: Mapping[NodeId, MemberReport]) -> Rehearsals:
    """Return the rehearsal of a job's record with a new order for the newest generation."""
    earlier = (each.step for each in _reported(record, reports).values())
    is_repeated = record.rehearsal.unanswered_count > 0
    return replace(
        record.rehearsal,
        number=record.rehearsal.number + 1,
        generation=record.generation,
        is_open=True,
        over_since=None,
        after=max(earlier, default=NO_STEP),
        served_at=record.rehearsal_requested_at,
        unanswered_count=0 if is_asked(record) else record.rehearsal.unanswered_count,
        automatic_count=record.rehearsal.automatic_count + (not is_asked(record) and not is_repeated),
        is_outdated=False,
    )


def followed(
    spec: JobSpec,
    before: JobRecord,
    record: JobRecord,
    plan: GenerationPlan,
    reports: Mapping[NodeId, MemberReport],
    now: float,
) -> tuple[JobRecord, tuple[EventDraft, ...]]:
    """Return the record with what the ranks report about the newest order, and an event about a new result."""
    told = _with_revision(record.rehearsal, record, reports)
    living = [rank for report in reports.values() for rank in report.ranks if rank.exit is None]
    is_under_way = any(rank.phase == REHEARSE for rank in living)
    if told.is_under_way and not is_under_way:
        told = replace(told, ended_at=now)
    is_over = _is_over(told, plan, reports) and not is_under_way
    over_since = (now if told.over_since is None else told.over_since) if is_over else None
    told = replace(told, is_under_way=is_under_way, over_since=over_since)
    is_lost = told.generation != record.generation or (over_since is not None and now - over_since > REPORT_SECONDS)
    if told.is_open and is_lost:
        told = replace(told, is_open=False, unanswered_count=told.unanswered_count + 1)
        if told.unanswered_count >= MOST_ORDERS:
            is_failed = told.generation != record.generation
            return _unanswered(
                spec,
                replace(record, rehearsal=told),
                NoResult.RANKS_ENDED if is_failed else NoResult.NOT_REPORTED,
                now,
            )
    if not told.is_open:
        return replace(record, rehearsal=told), ()
    told = replace(told, served_at=record.rehearsal_requested_at)
    news = {rank: each for rank, each in _reported(record, reports).items() if each.step > told.after}
    result = _combined(news, plan.world_size, now)
    if result is None:
        return replace(record, rehearsal=told), ()
    result = _with_earlier_loss(result, told.result)
    told = replace(told, is_open=False, unanswered_count=0, ended_at=now, result=result)
    record = replace(record, rehearsal=told)
    if result.verdict is not RehearsalVerdict.REFUSED:
        last = result.step + result.steps
        passed_at = next((each.boundary_at for each in (before, record) if each.boundary == last), None)
        start = now - result.seconds if passed_at is None else passed_at
        record = accounting.recharge_rehearsal(record, start, min(now, start + result.seconds))
    if result.is_difference and spec.rehearsal_on_difference is OnDifference.STOP and not record.stop_reason:
        record = replace(record, stop_reason=RehearsalEnded(outcome=result))
    return record, (_event(result),)


def _with_earlier_loss(result: RehearsalOutcome, earlier: RehearsalOutcome | None) -> RehearsalOutcome:
    """Return a proof with the lost values that the job's earlier rehearsal named, or another result unchanged."""
    # In the ranks that rehearse again, these values have begun anew. The next failure loses them again.
    if result.verdict is not RehearsalVerdict.PROVEN or earlier is None or not earlier.is_unproven:
        return result
    return replace(
        result,
        verdict=RehearsalVerdict.UNPROVEN,
        rank=earlier.rank,
        difference=earlier.difference,
        message=earlier.message,
        advice=earlier.advice,
    )


def closed(spec: JobSpec, record: JobRecord, now: float) -> tuple[JobRecord, tuple[EventDraft, ...]]:
    """Return the record of a job that ends now, with the reason why an ordered rehearsal has no result."""
    told = record.rehearsal
    if told.result is not None or not (told.number or is_asked(record)):
        return record, ()
    return _unanswered(spec, record, NoResult.JOB_ENDED, now)


def _unanswered(
    spec: JobSpec, record: JobRecord, why: NoResult, now: float, node: PlanNode | None = None
) -> tuple[JobRecord, tuple[EventDraft, ...]]:
    result = RehearsalOutcome(
        verdict=RehearsalVerdict.REFUSED,
        step=record.committed,
        steps=spec.rehearsal_steps,
        seconds=0.0,
        at=now,
        rank=min(node.ranks) if node is not None else None,
        unanswered=why,
        node_id=node.node_id if node is not None else None,
    )
    told = replace(record.rehearsal, is_open=False, served_at=record.rehearsal_requested_at, result=result)
    return replace(record, rehearsal=told), (_event(result),)


def _with_revision(told: Rehearsals, record: JobRecord, reports: Mapping[NodeId, MemberReport]) -> Rehearsals:
    """Note whether a rank has changed since the newest order. Ranks count their changes anew in each generation."""
    known = told.revision if told.revision_of == record.generation else 0
    revision = max((rank.resume_revision for report in reports.values() for rank in report.ranks), default=0)
    is_outdated = told.is_outdated or revision > known
    return replace(told, revision=max(known, revision), revision_of=record.generation, is_outdated=is_outdated)


def _is_over(told: Rehearsals, plan: GenerationPlan, reports: Mapping[NodeId, MemberReport]) -> bool:
    status = reports[plan.coordinator].round if plan.coordinator in reports else None
    is_taken = status is not None and told.is_open and status.rehearsal_number >= told.number
    return is_taken and status is not None and status.rehearsal_state is StopState.NONE


_EVENTS: Final[Mapping[RehearsalVerdict, str]] = {
    RehearsalVerdict.PROVEN: "ResumeProven",
    RehearsalVerdict.UNPROVEN: "ResumeUnproven",
    RehearsalVerdict.REFUSED: "RehearsalRefused",
}


def _event(result: RehearsalOutcome) -> EventDraft:
    return EventDraft(
        type=_EVENTS.get(result.verdict, "ResumeDiffers"),
        message=RehearsalEnded(outcome=result),
        detail=msgspec.to_builtins(result),
    )


def _reported(record: JobRecord, reports: Mapping[NodeId, MemberReport]) -> dict[Rank, Rehearsed]:
    return {
        rank.rank: rank.rehearsed
        for report in reports.values()
        for rank in report.ranks
        if rank.rehearsed is not None and rank.rehearsed.generation == record.generation
    }


def _combined(news: Mapping[Rank, Rehearsed], world_size: int, now: float) -> RehearsalOutcome | None:
    """Return the result for all ranks: a refusal, the first difference, lost values, or the slowest proof."""
    # A rank that refuses withdraws the rehearsal, so the other ranks report nothing.
    refused = [(rank, each) for rank, each in sorted(news.items()) if each.verdict is RehearsalVerdict.REFUSED]
    if not refused and len(news) < world_size:
        return None
    imperfect = [(rank, each) for rank, each in sorted(news.items()) if each.verdict is not RehearsalVerdict.PROVEN]
    differing = [each for each in imperfect if each[1].verdict is not RehearsalVerdict.UNPROVEN]
    slowest = max(each.seconds for each in news.values())
    candidates = refused or differing or imperfect or [*news.items()]
    rank, first = min(candidates, key=lambda each: (each[1].first_step, each[0]))
    return RehearsalOutcome(
        verdict=first.verdict,
        step=first.step,
        steps=first.steps,
        seconds=slowest,
        at=now,
        rank=rank if first.verdict is not RehearsalVerdict.PROVEN else None,
        difference=first.difference,
        message=first.message,
        advice=first.advice,
    )
