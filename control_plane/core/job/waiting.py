"""Handles a job in state QUEUED or ALLOCATING: the job waits for its turn in the queue, then for all of its nodes."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from control_plane.core import capacity, elastic, launch, queue
from control_plane.core.actions import Decision
from control_plane.core.job.outcome import change_state, end_job, stay
from control_plane.core.job.view import JobView, durable_step, with_capacity_wait, with_record
from control_plane.core.observed.reasons import JobFact, JobNote, JobReason
from control_plane.core.states import JobEvent, JobState
from control_plane.core.timeouts import GANG_PATIENCE_SECONDS
from everstep.protocol.ids import FleetName, Generation


def wait_for_nodes(view: JobView) -> Decision:
    """Admit a job from the queue, then wait until it has all of its nodes."""
    view = _with_vacancy(view)
    record, spec = view.record, view.spec
    if view.wants_stop is not None:
        what = JobFact.STOPPED_BEFORE_START if record.started_at is None else JobFact.STOPPED_WHILE_PAUSED
        return end_job(view, JobEvent.HALTED, JobNote(what=what, stop=view.wants_stop))
    if record.pause_requested_at is not None:
        if record.state is JobState.QUEUED:
            return stay(view, _paused(view))
        return change_state(view, JobEvent.SENT_BACK, _paused(view))
    if record.state is JobState.QUEUED:
        if not view.seen.is_admitted:
            return stay(view, _queued(view))
        # These nodes remain from before the job's return to the queue. The fleet removes them before it assigns new
        # nodes.
        if view.seen.assigned:
            return stay(view, JobNote(what=JobFact.AWAITS_RETURN_OF_NODES))
        waiting = with_capacity_wait(view, spec.node_count)
        return change_state(waiting, JobEvent.ADMITTED, _lacks(view, spec.node_count))
    if view.seen.gives_way_to:
        gives_way = JobNote(what=JobFact.GIVES_WAY, name=view.seen.gives_way_to)
        return change_state(view, JobEvent.SENT_BACK, gives_way)
    count = len(view.seen.assigned)
    missing = spec.node_count - count
    if missing > 0 and not _may_start_smaller(view):
        waits_since = max(record.state_since, view.seen.newest_node_at or 0.0)
        has_none_come = view.now - waits_since > GANG_PATIENCE_SECONDS
        is_refused = view.seen.launch_failed_at is not None and view.seen.launch_failed_at > record.state_since
        if (has_none_come or is_refused) and (fleet := _next_fleet(view)) is not None:
            return _change_fleet(view, fleet, missing)
        if has_none_come:
            return _stand_aside(view, missing)
        return stay(with_capacity_wait(view, missing), _lacks(view, missing))
    issued = Generation(max(record.issued_generation, launch.highest_seen(view.seen, spec.run, view.now)) + 1)
    ready = with_record(
        view,
        issued_generation=issued,
        asked=(),
        gang_attempts=0,
        member_count=0,
        missing_count=0,
        reduced_count=count if missing > 0 else 0,
        vacant_since=None,
    )
    what = JobFact.PREPARES_SMALLER if missing > 0 else JobFact.PREPARES
    prepares = JobNote(what=what, count=count, node_count=spec.node_count)
    return change_state(ready, JobEvent.GANG_ASSIGNED, prepares)


def _with_vacancy(view: JobView) -> JobView:
    since = view.record.vacant_since
    is_paused = view.record.pause_requested_at is not None
    return with_record(view, vacant_since=None if is_paused else view.now if since is None else since)


def _may_start_smaller(view: JobView) -> bool:
    smaller_from = elastic.smaller_from(view.spec, view.record)
    is_enough = len(view.seen.assigned) >= max(1, view.spec.least_node_count)
    return is_enough and smaller_from is not None and view.now >= smaller_from


def _lacks(view: JobView, missing: int, what: JobFact | None = None) -> JobNote:
    is_elastic = view.spec.least_node_count < view.spec.node_count
    waits = JobFact.LACKS_NODES_TO_START_SMALLER if is_elastic else JobFact.LACKS_NODES
    return JobNote(
        what=what or waits,
        missing_count=missing,
        lack_reasons=view.seen.lack_reasons,
        count=view.spec.least_node_count,
        seconds=view.spec.patience_seconds,
    )


def _stand_aside(view: JobView, missing: int) -> Decision:
    attempts = view.record.gang_attempts + 1
    not_before = view.now + queue.stand_aside_seconds(attempts)
    aside = with_record(view, gang_attempts=attempts, not_before=not_before)
    gives_back = _lacks(view, missing, JobFact.LACKS_NODES_AND_GIVES_BACK)
    return change_state(aside, JobEvent.SENT_BACK, msgspec.structs.replace(gives_back, seconds=GANG_PATIENCE_SECONDS))


def _next_fleet(view: JobView) -> FleetName | None:
    """Return the next fleet of the user's list that accepts the job. None if the job has held nodes in its fleet."""
    ring = view.spec.fleets
    if view.record.issued_generation or view.seen.assigned or view.spec.fleet not in ring:
        return None
    here = ring.index(view.spec.fleet)
    return next((fleet for fleet in (*ring[here + 1 :], *ring[:here]) if fleet in view.seen.open_fleets), None)


def _change_fleet(view: JobView, fleet: FleetName, missing: int) -> Decision:
    """Move the job to the queue of another fleet. After each round of all fleets, the job waits longer."""
    ring = view.spec.fleets
    record = view.record
    what, seconds = JobFact.LACKS_NODES_AND_CHANGES_FLEET, 0.0
    if ring.index(fleet) < ring.index(view.spec.fleet):
        rounds = record.gang_attempts + 1
        record = replace(record, gang_attempts=rounds, not_before=view.now + capacity.pause_seconds(rounds))
        seconds = capacity.pause_seconds(rounds)
        what = JobFact.LACKS_NODES_AND_CHANGES_FLEET_LATER
    goes = msgspec.structs.replace(_lacks(view, missing, what), name=fleet, seconds=seconds)
    return replace(change_state(replace(view, record=record), JobEvent.SENT_BACK, goes), fleet=fleet)


def _paused(view: JobView) -> JobNote:
    if view.record.started_at is None:
        return JobNote(what=JobFact.IS_PAUSED_BEFORE_START)
    return JobNote(what=JobFact.IS_PAUSED, checkpoint_step=durable_step(view))


def _queued(view: JobView) -> JobReason:
    not_before = view.record.not_before
    if not_before is not None and view.now < not_before:
        is_store = view.record.store_wait is not None
        return JobNote(what=JobFact.STANDS_ASIDE_FROM_STORE if is_store else JobFact.STANDS_ASIDE, at=not_before)
    return view.seen.queue_words
