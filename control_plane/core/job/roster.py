"""Decides for a job in state PREPARING which nodes take part in the next generation, and which the job gives up."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from control_plane.core import (
    accounting,
    breakers,
    claims,
    drills,
    elastic,
    faults,
    incidents,
    launch,
    moves,
    witnesses,
)
from control_plane.core.actions import EventDraft
from control_plane.core.evidence import NodeDisposition, NodeVerdict
from control_plane.core.incidents import Fault
from control_plane.core.job.losses import exclusions_with, loss_faults, with_losses
from control_plane.core.job.sources import repeat_choice, restorable_step, step_to_keep
from control_plane.core.job.view import JobView, reached, watched_seconds, with_record
from control_plane.core.observed.facts import Absence, AloneFailedToLoad, NotPrepared
from control_plane.core.observed.incidents import IncidentRecord
from control_plane.core.observed.jobs import Departure
from control_plane.core.observed.nodes import Cause, InstanceCondition, Remedy
from control_plane.core.observed.reasons import JobFact, JobNote
from control_plane.core.states import IncidentState
from everstep.protocol.ids import NodeId

NODE_LOSS_CAUSES = (Cause.NODE_UNREACHABLE, Cause.NODE_FAULT, Cause.INSTANCE_TERMINATED, Cause.SHRUNK)


def with_late_reports(view: JobView) -> JobView:
    """Update the incident from late reports about the ended generation: an earlier exit, or a later finished step."""
    # After a downtime, a lost node can be detected before other nodes report the earlier exits of their ranks.
    before = view.record.incident
    if before is None or before.state is not IncidentState.REPLACING:
        return view
    ended = {
        node_id: member.ended.boundary
        for node_id, node in view.nodes.items()
        if (member := node.member) is not None and member.run == view.spec.run
        if member.ended is not None and member.ended.generation >= before.generation_before
    }
    finished = claims.reached(view.seen, view.record, ended, view.now)
    before = replace(before, reached_step=max(before.reached_step, finished))
    view = with_record(view, incident=before)
    if view.record.generation != before.generation_before:
        return view
    earlier = tuple(
        fault
        for fault in faults.of_ranks(view.reports)
        if before.cause is Cause.RANK_EXIT and fault.at < before.failed_at
    )
    view, before, earlier = _with_struck_rank(view, before, earlier)
    incident = replace(incidents.with_faults(before, earlier), reached_step=max(before.reached_step, reached(view)))
    if before.cause in (*NODE_LOSS_CAUSES, Cause.GROUP_LOST):
        incident = incidents.with_failure_at(incident, faults.failing_since(view.reports, before.failed_at))
    incident = incidents.with_absence(incident, view.record.unwatched)
    unnoticed = accounting.microseconds(before.failed_at) - accounting.microseconds(incident.failed_at)
    incident = replace(
        incident, node_microseconds_before=before.node_microseconds_before - unnoticed * len(view.plan.nodes)
    )
    return with_record(view, incident=incident)


def _with_struck_rank(
    view: JobView, incident: IncidentRecord, late_exits: tuple[Fault, ...]
) -> tuple[JobView, IncidentRecord, tuple[Fault, ...]]:
    """Give rank exits the cause DRILL, once an agent reports the exit of the rank that a drill killed."""
    drill = view.seen.drill
    if drill is None or incident.cause is not Cause.RANK_EXIT or not drills.has_struck_rank_ended(drill, view.reports):
        return view, incident, late_exits
    struck = faults.of_ranks({drill.node_id: view.reports[drill.node_id]}, only=drill.rank)
    found, _ = drills.attributed(
        drill, incident.generation_before, tuple(dict.fromkeys((*late_exits, *struck))), reports=view.reports
    )
    recast = drills.recast(drill, incident, found)
    if recast.cause is not Cause.DRILL:
        return view, incident, late_exits
    return (
        with_record(view, failures=breakers.forgiven(view.record.failures, incident.generation_before)),
        recast,
        found,
    )


def with_promise_deadlines(view: JobView) -> JobView:
    """Record when the control plane first requested each missing promise. The deadline starts then."""
    roll = launch.call_roll(view.spec, view.seen, view.record, view.policy)
    before = dict(view.record.asked)
    return with_record(
        view, asked=tuple((node_id, before.get(node_id, view.now)) for node_id in (*roll.late, *roll.unreachable))
    )


def with_faulty(view: JobView) -> JobView:
    """Record the members whose agents report a fault of their own node during a recovery.

    The job keeps such a member once if it needs its shards. A fault in the next generation is then a loss.
    """
    record, verdicts = view.record, dict(view.verdicts)
    tried = record.incident.kept_instance_ids if record.incident is not None else ()
    known = {move.node_id for move in record.moves if not move.has_left}
    left: list[Departure] = []
    for each in view.verdicts.values():
        if each.disposition is not NodeDisposition.IMPAIRED or each.node_id not in view.seen.assigned:
            continue
        if each.node_id in tried:
            verdicts[each.node_id] = replace(each, disposition=NodeDisposition.GONE, is_final=True)
        elif each.node_id not in known:
            left.append(moves.impaired(each))
    return with_record(replace(view, verdicts=verdicts), moves=(*record.moves, *left))


def without_lost(view: JobView) -> JobView:
    """Exclude the nodes that are certainly lost from the job, and add them to the job's incident."""
    record = view.record
    known = {exclusion.node_id for exclusion in record.exclusions}
    # After repeated failures, the job may have released a node to try another one. The released node is not lost.
    given_back = {trial.node_id for trial in record.trials} - set(view.seen.assigned)
    asked = {
        move.node_id for move in moves.asked(record.moves) if not (move.has_left and move.node_id in view.seen.assigned)
    }
    stopped = {node_id for node_id in asked if view.nodes[node_id].instance is not InstanceCondition.ENDED}
    # The nodes in `given_back` and `stopped` still work, so the job does not count them as lost.
    spared = given_back | stopped
    gone = [
        view.verdicts[node_id] for node_id in view.nodes if view.verdicts[node_id].is_final and node_id not in spared
    ]
    fresh = tuple(verdict for verdict in gone if verdict.node_id not in known)
    record = replace(record, exclusions=exclusions_with(view, record, fresh))
    lost = tuple(fault for verdict in gone for fault in loss_faults(view, verdict))
    return with_losses(replace(view, record=record), lost)


def without_unreachable(view: JobView) -> JobView:
    """Exclude members that have not promised in time to join the issued generation.

    Without a loss of committed steps, the wait is `prepare_deadline_seconds`, or `exclude_seconds` for a connected
    member. Otherwise it is `blind_wait_seconds`, and `exclude_seconds` longer for a connected member. If the job would
    then repeat much training, it waits until the member returns or a person decides (`core.repeats`).
    """
    record, timeouts = view.record, view.policy.timeouts
    roll = launch.call_roll(view.spec, view.seen, record, view.policy)
    waited = {node_id: watched_seconds(view, at) for node_id, at in record.asked}
    if all(seconds <= timeouts.prepare_deadline_seconds for seconds in waited.values()):
        return view
    left, floor = restorable_step(view, record, roll), launch.floor_of(view.spec, view.seen, record, view.now)
    late_seconds, silent_seconds = timeouts.exclude_seconds, timeouts.prepare_deadline_seconds
    silence = Absence.SILENT
    # The member may hold the only copy of a shard.
    if left < floor:
        late_seconds, silent_seconds = (
            timeouts.blind_wait_seconds + timeouts.exclude_seconds,
            timeouts.blind_wait_seconds,
        )
        silence = Absence.UNREACHABLE

    def absent(node_id: NodeId, how: Absence, seconds: float) -> NotPrepared:
        fact = NotPrepared(node_id=node_id, how=how, seconds=seconds)
        return msgspec.structs.replace(fact, restorable_step=left, committed_step=floor) if left < floor else fact

    dropped = [absent(node_id, Absence.LATE, late_seconds) for node_id in roll.late if waited[node_id] > late_seconds]
    if len(dropped) == len(roll.late) and not view.seen.is_fleet_blind:
        dropped += [
            absent(node_id, silence, silent_seconds) for node_id in roll.unreachable if waited[node_id] > silent_seconds
        ]
    if not dropped or (left < floor and len(dropped) < len(roll.late) + len(roll.unreachable)):
        return view
    if (choice := repeat_choice(view, left)) is not None:
        return with_record(view, repeat=choice)
    verdicts = tuple(
        NodeVerdict(
            node_id=fact.node_id,
            disposition=NodeDisposition.GONE,
            evidence=fact,
            since=view.verdicts[fact.node_id].since,
        )
        for fact in dropped
    )
    excluded = with_record(view, exclusions=exclusions_with(view, record, verdicts))
    return with_losses(excluded, tuple(fault for verdict in verdicts for fault in loss_faults(view, verdict)))


def without_suspects(view: JobView) -> JobView:
    """Exclude the nodes that alone fail to load some state, so that another node reads it (`core.witnesses`).

    If the job needs such a node's memory, it skips the state after two failed loads instead.
    """
    roll = launch.call_roll(view.spec, view.seen, view.record, view.policy)
    if roll.late or roll.unreachable:
        return view  # Wait until all members have reported their shards.
    for suspect in witnesses.suspects(view.record.failed_reads, view.seen.checkpoints):
        record = view.record
        is_again = suspect.load_count > 1 or suspect.is_refuted
        is_due = is_again or (suspect.is_mismatch and view.seen.spare_count > 0)
        if not is_due or all(suspect.node_id != place for place in roll.places):
            continue
        fact = AloneFailedToLoad(node_id=suspect.node_id, step=suspect.step)
        verdict = NodeVerdict(
            node_id=suspect.node_id,
            disposition=NodeDisposition.GONE,
            evidence=fact,
            cause=Cause.LOAD_FAILED,
            may_terminate=is_again,
            remedy=Remedy.REPLACE if is_again else Remedy.RETIRE,
        )
        fewer = replace(record, exclusions=exclusions_with(view, record, (verdict,)))
        left = restorable_step(view, fewer, launch.call_roll(view.spec, view.seen, fewer, view.policy))
        if left >= step_to_keep(view, roll):
            view = with_losses(replace(view, record=fewer), loss_faults(view, verdict))
        elif is_again:
            skipped = tuple(dict.fromkeys((*record.refused, *suspect.sources)))
            if skipped != record.refused:
                event = EventDraft(
                    type="StepSkipped",
                    message=JobNote(what=JobFact.STEP_SKIPPED, because=(fact,)),
                    node_id=suspect.node_id,
                )
                view = replace(with_record(view, refused=skipped), events=(*view.events, event))
    return view


def without_departing(view: JobView) -> JobView:
    """Exclude the members that the job should give up, unless this would lose a committed step."""
    record = view.record
    known = {exclusion.node_id for exclusion in record.exclusions}
    here = [move for move in record.moves if move.node_id in view.seen.assigned and move.node_id not in known]
    left = [move for move in here if not (move.is_kept or move.has_left)]
    lent = (
        [node_id for node_id in moves.lent(view.seen.plan, view.seen.assigned) if node_id not in known]
        if view.seen.plan is not None
        else []
    )
    # AWS will reclaim these nodes. The job gives them up, with or without a replacement.
    announced = [move for move in left if move.is_announced and move.asked_at is not None]
    # The job returns these nodes to the fleet once all ranks have stopped, and continues on fewer nodes.
    returned = [move for move in left if move.is_returned and move.asked_at is not None]
    # The job gives up these nodes even without a replacement. Faulty nodes would end the restarted ranks again.
    goes = [
        *announced,
        *returned,
        *(move for move in left if move.is_faulty and move.asked_at is None),
    ]
    # Give up further nodes only if each of them has a replacement: a spare, or an assigned node that the last plan does
    # not use.
    due = [*goes, *(move for move in left if move not in goes)][: max(len(goes), len(lent) + view.seen.spare_count)]
    if not due:
        return view
    leaving = {move.node_id for move in due}
    roll = launch.call_roll(view.spec, view.seen, record, view.policy)
    if any(node_id not in leaving for node_id in (*roll.late, *roll.unreachable)):
        return view  # Wait until all members that stay have promised and reported their shards.
    floor = step_to_keep(view, roll)
    without, kept = record, set[NodeId]()
    verdicts: list[NodeVerdict] = []
    events: list[EventDraft] = []
    for move in due:  # Check members one by one: two of them may hold the only copies of a shard, and one must stay.
        verdict = moves.verdict(move)
        fewer = replace(without, exclusions=exclusions_with(view, without, (verdict,)))
        base = restorable_step(view, fewer, launch.call_roll(view.spec, view.seen, fewer, view.policy))
        if base >= floor:
            without = (
                replace(fewer, reduced_count=elastic.count_before(view.spec, fewer) - 1) if move.is_returned else fewer
            )
            verdicts.append(verdict)
        else:
            kept.add(move.node_id)
            kept_note = JobNote(what=JobFact.NODE_KEPT, node_ids=(move.node_id,), step=base, committed_step=floor)
            events.append(EventDraft(type="NodeKept", message=kept_note))
    if kept:
        if roll.late or roll.unreachable:
            return view
        later = view.now + view.policy.timeouts.blind_wait_seconds
        stays = tuple(replace(move, is_kept=move.is_kept or move.node_id in kept) for move in record.moves)
        without = replace(without, moves=stays, moves_after=later)
    spared = replace(view, record=without, events=(*view.events, *events))
    return with_losses(spared, tuple(fault for verdict in verdicts for fault in loss_faults(view, verdict)))
