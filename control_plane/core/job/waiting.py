"""Handles a job in state QUEUED or ALLOCATING: the job waits for its turn in the queue, then for all of its nodes.

A job receives all of its nodes together. If the nodes do not arrive within `patience_seconds`, an elastic job starts
with fewer nodes. Any other job stands aside (waits outside the queue for a while), or tries the next fleet of the
user's list.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from control_plane.core import capacity, elastic, launch, queue
from control_plane.core.actions import Decision
from control_plane.core.job.outcome import change_state, end_job, stay
from control_plane.core.job.view import JobView, durable_words, waiting_words, with_capacity_wait, with_record
from control_plane.core.states import JobEvent, JobState
from control_plane.core.timeouts import GANG_PATIENCE_SECONDS
from everstep.protocol.ids import FleetName, Generation


def wait_for_nodes(view: JobView) -> Decision:
    """Admit a job from the queue, then wait until it has all of its nodes."""
    view = _with_vacancy(view)
    record, spec = view.record, view.spec
    if view.wants_stop:
        words = "stopped before it started" if record.started_at is None else "stopped while it was paused"
        return end_job(view, JobEvent.HALTED, f"{words}: {view.wants_stop}")
    if record.pause_requested_at is not None:
        if record.state is JobState.QUEUED:
            return stay(view, _paused_words(view))
        return change_state(view, JobEvent.SENT_BACK, _paused_words(view))
    if record.state is JobState.QUEUED:
        if not view.seen.is_admitted:
            return stay(view, _queue_words(view))
        # These nodes remain from before the job's return to the queue. The fleet removes them before it assigns new
        # nodes.
        if view.seen.assigned:
            return stay(view, "admitted; waits until its former nodes have returned to the fleet")
        waiting = with_capacity_wait(view, spec.node_count)
        return change_state(waiting, JobEvent.ADMITTED, _gang_words(view, spec.node_count))
    if view.seen.gives_way_to:
        return change_state(view, JobEvent.SENT_BACK, f"gives way to {view.seen.gives_way_to} before it started")
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
        return stay(with_capacity_wait(view, missing), _gang_words(view, missing))
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
    size = f"starts on {count} of {spec.node_count} nodes; " if missing > 0 else ""
    return change_state(ready, JobEvent.GANG_ASSIGNED, f"{size}asks its nodes to prepare")


def _with_vacancy(view: JobView) -> JobView:
    """Record the time since which the job waits for nodes, or None if a person has requested a pause."""
    since = view.record.vacant_since
    is_paused = view.record.pause_requested_at is not None
    return with_record(view, vacant_since=None if is_paused else view.now if since is None else since)


def _may_start_smaller(view: JobView) -> bool:
    """Return whether the job has its minimum of nodes, and has waited `patience_seconds` for the other nodes."""
    smaller_from = elastic.smaller_from(view.spec, view.record)
    is_enough = len(view.seen.assigned) >= max(1, view.spec.least_node_count)
    return is_enough and smaller_from is not None and view.now >= smaller_from


def _gang_words(view: JobView, missing: int) -> str:
    return "; ".join(words for words in (waiting_words(view, missing), elastic.start_words(view.spec)) if words)


def _stand_aside(view: JobView, missing: int) -> Decision:
    """Release the nodes of a job that still lacks nodes, so that the job delays no other jobs for a while."""
    attempts = view.record.gang_attempts + 1
    not_before = view.now + queue.stand_aside_seconds(attempts)
    aside = with_record(view, gang_attempts=attempts, not_before=not_before)
    words = f"{waiting_words(view, missing)}; none came for {GANG_PATIENCE_SECONDS:g} s: gives its nodes back"
    return change_state(aside, JobEvent.SENT_BACK, words)


def _next_fleet(view: JobView) -> FleetName | None:
    """Return the next fleet of the user's list that accepts the job.

    Return None if the job already had a generation or holds a node, because such a job stays in its fleet.
    """
    ring = view.spec.fleets
    if view.record.issued_generation or view.seen.assigned or view.spec.fleet not in ring:
        return None
    here = ring.index(view.spec.fleet)
    return next((fleet for fleet in (*ring[here + 1 :], *ring[:here]) if fleet in view.seen.open_fleets), None)


def _change_fleet(view: JobView, fleet: FleetName, missing: int) -> Decision:
    """Move the job to the queue of another fleet.

    After the job has tried all of its fleets, it waits before it tries the first fleet again, longer each time.
    """
    ring = view.spec.fleets
    record, pause = view.record, ""
    if ring.index(fleet) < ring.index(view.spec.fleet):
        rounds = record.gang_attempts + 1
        record = replace(record, gang_attempts=rounds, not_before=view.now + capacity.pause_seconds(rounds))
        pause = f", after {capacity.pause_seconds(rounds):g} s: every fleet that the job names was asked"
    words = f"{waiting_words(view, missing)}; goes to the fleet {fleet}{pause}"
    return replace(change_state(replace(view, record=record), JobEvent.SENT_BACK, words), fleet=fleet)


def _paused_words(view: JobView) -> str:
    if view.record.started_at is None:
        return "paused by a user before it started; ResumeTrainingJob puts it back into the queue"
    return f"paused by a user; ResumeTrainingJob resumes it: {durable_words(view)}"


def _queue_words(view: JobView) -> str:
    not_before = view.record.not_before
    if not_before is not None and view.now < not_before:
        why = "its nodes did not come" if view.record.store_wait is None else "a store was out of reach"
        return f"stands aside until {datetime.fromtimestamp(not_before, UTC):%H:%M:%S} UTC: {why}"
    return view.seen.queue_words
