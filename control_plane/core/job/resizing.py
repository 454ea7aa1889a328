"""Changes of a job's number of nodes: in a recovery, or after all ranks have stopped at an agreed step."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from control_plane.core import elastic, hangs, incidents, launch, moves
from control_plane.core.actions import Decision, EventDraft
from control_plane.core.incidents import Fault
from control_plane.core.job.ending import ask_to_stop
from control_plane.core.job.outcome import LAUNCH_SECONDS, stay
from control_plane.core.job.restart import start_new_generation
from control_plane.core.job.view import (
    JobView,
    has_agreed_stop,
    last_movement_at,
    rank_exits,
    watched_seconds,
    with_record,
)
from control_plane.core.observed.facts import NodesReady, NoReplacement, Returned
from control_plane.core.observed.incidents import Grows, Shrinks
from control_plane.core.observed.jobs import Departure, Growth, JobRecord
from control_plane.core.observed.nodes import Cause, Remedy
from control_plane.core.observed.reasons import JobFact, JobNote, Message
from everstep.protocol.plan import GenerationPlan


def with_vacancy(view: JobView, roll: launch.Roll) -> JobView:
    """Record since when the job has had too few nodes for its next generation, or None if it has enough."""
    since = view.record.vacant_since
    if not roll.vacancy_count:
        return with_record(view, vacant_since=None)
    return with_record(view, vacant_since=view.now if since is None else since)


def shrink(view: JobView, roll: launch.Roll) -> Decision | None:
    """Decide to continue on fewer nodes after `patience_seconds`, or return None while the job still waits."""
    since = view.record.vacant_since
    if since is None or roll.late or roll.unreachable:
        return None
    count = elastic.reduced_count(
        view.spec,
        promised_count=len(roll.promised),
        waited_seconds=watched_seconds(view, since),
        has_spare=view.seen.spare_count > 0,
        timeouts=view.policy.timeouts,
    )
    if count is None:
        return None
    shrinks = JobNote(
        what=JobFact.LACKS_NODES_AND_SHRINKS,
        missing_count=roll.vacancy_count,
        lack_reasons=view.seen.lack_reasons,
        count=count,
        node_count=view.spec.node_count,
        seconds=view.spec.patience_seconds,
    )
    return stay(with_record(view, reduced_count=count), shrinks, requeue=0.0)


def smaller_size(view: JobView, roll: launch.Roll) -> JobNote | None:
    """Return on how many nodes a waiting job will continue, or how many it needs. None if it may not shrink."""
    spec, count = view.spec, len(roll.places) - roll.vacancy_count
    if spec.least_node_count >= max(spec.node_count, elastic.needed_count(spec, view.record)):
        return None
    if count < spec.least_node_count:
        return JobNote(what=JobFact.NEEDS_MORE_NODES, count=spec.least_node_count)
    return JobNote(what=JobFact.CONTINUES_SMALLER, count=count, seconds=spec.patience_seconds)


def with_size(view: JobView, plan: GenerationPlan) -> JobView:
    """Record the number of nodes of a new plan. A change goes into the incident and an event."""
    record, spec, count = view.record, view.spec, len(plan.nodes)
    before = record.member_count or spec.node_count
    incident = record.incident
    if incident is not None:
        incident = replace(incident, node_count_before=incident.node_count_before or before, node_count_after=count)
    if count < before:
        is_return = before - count <= sum(move.is_returned and not move.is_kept for move in record.moves)
        is_limit = spec.most_node_count <= count
        none = NoReplacement(seconds=spec.patience_seconds)
        if incident is not None and not is_return and not is_limit:
            # A shrink for a planned departure or a drill keeps the incident's cause.
            cause = Cause.SHRUNK if incident.cause.is_failure else incident.cause
            incident = incidents.with_faults(incident, (Fault(cause=cause, evidence=none, at=view.now),))
            incident = replace(incident, decision=Shrinks(count=count, node_count=max(before, spec.node_count)))
        what = JobFact.SHRANK if record.member_count else JobFact.STARTED_SMALLER
        if is_return or is_limit:
            what = JobFact.SHRANK_BY_RETURN if is_return else JobFact.SHRANK_TO_LIMIT
        shrunk = JobNote(
            what=what,
            count=count,
            node_count=max(before, spec.node_count),
            because=(none,),
            limit=spec.most_node_count,
        )
        view = _with_event(view, "JobShrunk", shrunk)
    elif count > before and record.member_count:
        view = _with_event(view, "JobGrown", JobNote(what=JobFact.GREW, count=count, node_count=before))
    return with_record(
        view,
        incident=incident,
        member_count=count,
        missing_count=max(0, spec.node_count - count),
        reduced_count=0,
        vacant_since=None,
    )


def _with_event(view: JobView, kind: str, message: Message) -> JobView:
    return replace(view, events=(*view.events, EventDraft(type=kind, message=message)))


def trains(view: JobView) -> JobNote:
    """Return the reason of a job that trains: from which step, and on how many nodes."""
    count, requested = len(view.plan.nodes), view.spec.node_count
    return JobNote(what=JobFact.TRAINS, step=view.plan.base_step, count=count, node_count=requested)


def give_back(view: JobView) -> Decision | None:
    """Decide to return nodes to the fleet after an agreed stop, or return None if the job keeps its nodes for now."""
    record, seen = view.record, view.seen
    count = record.member_count - elastic.kept_count(view.spec, record, seen.keep_count)
    if count <= 0 or moves.asked(record.moves) or has_asked_to_grow(record) or seen.is_fleet_blind:
        return None
    if view.now < record.moves_after:
        return None
    is_for_other = seen.keep_count is not None and seen.keep_count < view.spec.most_node_count
    to = seen.returns_to if is_for_other else ""
    departing = {move.node_id: move for move in record.moves if not move.is_announced and not move.is_kept}
    leaving = {move.node_id for move in record.moves} if is_for_other else departing.keys()
    returned = elastic.returned_nodes(view.plan, view.reports, count, departing=leaving, is_for_other=is_for_other)
    others = tuple(move for move in record.moves if move.node_id not in returned)
    departures = tuple(
        _return_of(
            Returned(node_id=node_id, to=to, max_node_count=view.spec.most_node_count),
            departing.get(node_id),
            view.now,
        )
        for node_id in returned
    )
    asked = with_record(view, moves=(*others, *departures), growth=None)
    returns = JobNote(
        what=JobFact.RETURNS_FOR_JOB if to else JobFact.RETURNS_ABOVE_LIMIT,
        node_ids=returned,
        name=to,
        count=view.spec.most_node_count,
    )
    agreed = JobFact.TO_RETURN_FOR_JOB if to else JobFact.TO_RETURN_ABOVE_LIMIT
    event = msgspec.structs.replace(returns, what=agreed)
    return stay(_with_event(asked, "NodesToBeReturned", event), returns, requeue=0.0)


def _return_of(fact: Returned, departure: Departure | None, now: float) -> Departure:
    """Return the record of a return. It keeps the remedy of an earlier `departure`, which the fleet still applies."""
    if departure is not None:
        both = msgspec.structs.replace(fact, besides=departure.evidence)
        return replace(departure, evidence=both, cause=Cause.RETURNED, asked_at=now, is_history=False)
    return Departure(
        node_id=fact.node_id,
        evidence=fact,
        cause=Cause.RETURNED,
        remedy=Remedy.RELEASE,
        may_terminate=False,
        asked_at=now,
    )


def has_asked_to_grow(record: JobRecord) -> bool:
    """Return whether the control plane requested the stop of all ranks after which the job uses more nodes."""
    return record.growth is not None and record.growth.asked_at is not None


def with_growth(view: JobView) -> JobView:
    """Record the additional ready nodes by which a running job can grow."""
    record = view.record
    # A job that still has to give up nodes uses ready nodes as their replacements.
    if not record.member_count or record.moves:
        ready = []
    else:
        ready = moves.successors(view.plan, view.seen.assigned, view.nodes, view.now, view.policy.timeouts)
    room = max(0, view.spec.most_node_count - record.member_count)
    return with_record(view, growth=elastic.followed(record.growth, ready[:room], view.now))


def grow(view: JobView) -> Decision | None:
    """Decide how a job continues on more nodes after an agreed stop, or return None while no growth is due."""
    record, growth = view.record, view.record.growth
    if growth is None:
        return None
    if growth.asked_at is None:
        is_wanted = view.wants_pause is None and not view.seen.is_fleet_blind
        is_due = is_wanted and elastic.is_due(view.spec, record, view.now, view.policy.timeouts)
        return _ask_to_grow(view, growth) if is_due else None
    stopped_at = min(max((each.at_seconds for each in rank_exits(view.reports)), default=view.now), view.now)
    fault = Fault(cause=Cause.GROWN, evidence=NodesReady(node_ids=growth.node_ids), at=stopped_at)
    decision = Grows(count=record.member_count)
    if has_agreed_stop(view):
        return start_new_generation(view, (fault,), None, decision=decision)
    patience = view.policy.timeouts.blind_wait_seconds + hangs.promised_seconds(view.reports)
    if view.now - max(growth.asked_at, last_movement_at(view)) > patience:
        # Training makes no progress, so the ranks cannot agree on a stop. Restart them without this agreement.
        return start_new_generation(view, (replace(fault, at=view.now),), None, decision=decision)
    agrees = JobNote(what=JobFact.AGREES_TO_GROW, node_ids=growth.node_ids)
    return stay(view, agrees, ask_to_stop(view), requeue=LAUNCH_SECONDS)


def _ask_to_grow(view: JobView, growth: Growth) -> Decision:
    asked = with_record(view, growth=replace(growth, asked_at=view.now))
    event = JobNote(what=JobFact.TO_GROW, count=view.record.member_count, node_ids=growth.node_ids)
    agrees = JobNote(what=JobFact.AGREES_TO_GROW, node_ids=growth.node_ids)
    return stay(_with_event(asked, "JobToGrow", event), agrees, requeue=0.0)
