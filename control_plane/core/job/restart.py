"""Ends a generation after a fault: records the faults and the incident, and issues the next generation number."""

from __future__ import annotations

from dataclasses import replace

from control_plane.core import accounting, breakers, drills, faults, incidents, launch, moves, witnesses
from control_plane.core.actions import Decision, EventDraft
from control_plane.core.incidents import Fault
from control_plane.core.job import store_wait
from control_plane.core.job.losses import (
    exclusions_with,
    response,
    with_departures,
    with_group_loss,
    with_implications,
)
from control_plane.core.job.outcome import change_state
from control_plane.core.job.view import JobView, halt, has_agreed_stop, highest, is_in_phase, reached, with_record
from control_plane.core.observed.incidents import FailureRecord, IncidentRecord, Response, RestartsRanks
from control_plane.core.observed.nodes import Cause
from control_plane.core.observed.reasons import GenerationEnded, JobFact, JobNote, Restarts
from control_plane.core.observed.steps import DoubtedCheckpoint
from control_plane.core.states import IncidentEvent, IncidentState, JobEvent, JobState
from everstep.protocol.agent_messages import MemberPhase
from everstep.protocol.ids import Generation, Step


def start_new_generation(
    view: JobView, found: tuple[Fault, ...], failure: FailureRecord | None, *, decision: Response | None = None
) -> Decision:
    """End the generation: issue the next generation number, open or extend the incident, and kill running ranks.

    `failure` counts against the job (`core.breakers`), and is None if the job itself did not fail. Without a
    `decision`, the function derives Everstep's response from `found`, which is not empty.
    """
    plan = view.plan
    found, failure = drills.attributed(view.seen.drill, plan.generation, found, failure, reports=view.reports)
    issued = Generation(max(view.record.issued_generation, launch.highest_seen(view.seen, view.spec.run, view.now)) + 1)
    has_stopped = view.record.state is JobState.RUNNING and has_agreed_stop(view)
    leaving = tuple(moves.verdict(move) for move in moves.asked(view.record.moves) if move.is_announced and has_stopped)
    gone = tuple(verdict for verdict in view.verdicts.values() if verdict.is_final)
    done = {verdict.node_id for verdict in gone}
    boundary = reached(view)
    max_boundary = highest(view, boundary)
    view = with_departures(view)
    view, closed = with_incident(view, found, boundary, decision=decision)
    exclusions = exclusions_with(
        view, view.record, (*gone, *(verdict for verdict in leaving if verdict.node_id not in done))
    )
    incident = view.record.incident
    assert incident is not None  # `with_incident` has opened or extended an incident in the record.
    view = with_implications(with_record(view, exclusions=exclusions), found, incident)
    record = view.record
    failed = witnesses.failed_reads(plan, view.reports, view.nodes, view.now)
    reads = (*record.failed_reads, *failed)
    is_own_making = all(
        fault.cause.is_planned or fault.cause in (Cause.RANK_EXIT, Cause.HANG, Cause.LOAD_FAILED) for fault in found
    )
    # Failed reads have their own end: the source is refused, or the reader leaves the job (`core.witnesses`). A store
    # that is out of reach has the job's patience.
    is_read = bool(failed or faults.blocked_loads(plan, view.reports))
    is_read = is_read and all(fault.cause is Cause.LOAD_FAILED for fault in found)
    # Ranks of other nodes can time out in their start while a node repeats its load.
    is_read = is_read or bool(faults.held_loads(view.reports))
    record = replace(
        record,
        issued_generation=issued,
        asked=(),
        vacant_since=None,
        growth=None,
        suspicion=None,
        uploading=None,
        boundary=boundary,
        max_boundary=max_boundary,
        failures=breakers.remembered(record.failures, failure if is_own_making and not is_read else None, view.spec),
        failed_reads=reads,
        store_wait=store_wait.after_loads(view),
    )
    halts = tuple(
        halt(view, node.node_id, plan.generation, f"the generation ended ({found[0].cause})")
        for node in plan.nodes
        if is_in_phase(view, node.node_id, MemberPhase.RUNNING)
    )
    event = EventDraft(
        type="GenerationEnded",
        message=GenerationEnded(generation=plan.generation, because=incident.evidence),
        node_id=found[0].node_id,
    )
    reason = Restarts(because=found[0].evidence, response=incident.decision)
    moved = change_state(replace(view, record=record), JobEvent.FAULTED, reason)
    known = witnesses.doubted(view.record.failed_reads, view.seen.checkpoints)
    doubted = tuple(each for each in witnesses.doubted(reads, view.seen.checkpoints) if each not in known)
    return replace(
        moved,
        actions=halts,
        doubted=doubted,
        incidents=(*closed, *moved.incidents),
        events=(event, *(_doubt_event(each) for each in doubted), *moved.events),
    )


def _doubt_event(doubted: DoubtedCheckpoint) -> EventDraft:
    is_damaged = len(doubted.readers) > 1
    message = JobNote(
        what=JobFact.CHECKPOINT_DAMAGED if is_damaged else JobFact.CHECKPOINT_DOUBTED,
        step=doubted.step,
        generation=doubted.generation,
        node_ids=doubted.readers,
    )
    if is_damaged:
        return EventDraft(type="CheckpointDamaged", message=message)
    return EventDraft(type="CheckpointDoubted", message=message, node_id=doubted.readers[0])


def with_incident(
    view: JobView, found: tuple[Fault, ...], reached_step: Step, *, decision: Response | None = None
) -> tuple[JobView, tuple[IncidentRecord, ...]]:
    """Store the incident of these faults in the job's record. Also return the earlier incident if it ends now."""
    before, record = view.record.incident, view.record
    closed, incident = _incident_of(view, found, reached_step)
    if before is None or before.id != incident.id:
        unnoticed = accounting.microseconds(incident.opened_at) - accounting.microseconds(incident.failed_at)
        incident = replace(incident, node_microseconds_before=record.node_microseconds - unnoticed * record.node_count)
    return replace(
        view, record=replace(record, incident=replace(incident, decision=decision or incident.decision))
    ), closed


def _incident_of(
    view: JobView, found: tuple[Fault, ...], reached_step: Step
) -> tuple[tuple[IncidentRecord, ...], IncidentRecord]:
    before = view.record.incident
    if before is not None and before.state not in (IncidentState.REWORKING, IncidentState.CLOSED):
        # A failure before training resumes belongs to the open incident.
        again = incidents.moved(before, IncidentEvent.FAILED_AGAIN, view.now)
        again = incidents.with_faults(again, tuple(replace(fault, at=before.failed_at) for fault in found))
        # A planned departure loses no shard, because the departing node has replicated its last step.
        if view.seen.plan is not None and not again.cause.is_planned:
            again = with_group_loss(again, view.seen.plan)
        return (), replace(again, decision=response(again.cause, again.instance_ids))
    opened = incidents.opened(
        view.spec.run,
        view.plan.generation,
        found,
        decision=RestartsRanks(),
        reached=reached_step,
        now=view.now,
        earliest=_earliest_failure_at(view),
    )
    opened = incidents.with_absence(
        replace(opened, decision=response(opened.cause, opened.instance_ids)), view.record.unwatched
    )
    if before is None:
        return (), opened
    ended = incidents.ended_by_failure(before, opened.failed_at)
    # A late report must not move the new failure to a time before the end that is stored now.
    return (ended,), replace(opened, earliest_failure_at=max(opened.earliest_failure_at, ended.closed_at or 0.0))


def _earliest_failure_at(view: JobView) -> float:
    """Return the earliest Unix time at which the failure of a new incident can have occurred."""
    record, stored = view.record, view.seen.record.incident
    # The stored incident may still be open although the next failure ends it.
    moments = () if stored is None else (stored.failed_at, stored.opened_at, stored.replaced_at, stored.restored_at)
    bounds: tuple[float | None, ...] = (record.created_at, record.started_at, record.last_incident_ended_at, *moments)
    return max(each for each in bounds if each is not None)
