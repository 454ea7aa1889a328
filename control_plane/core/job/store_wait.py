"""A restore that S3, IAM or KMS prevents: the job waits and keeps its nodes until its patience ends.

    a node repeats its load by itself     the generation goes on, and the other nodes keep what they have loaded
    a load failed                         a new generation loads again after a pause: older agents, ranks in a relayout

Invariant: no failed read of a store counts against the job, a node or a checkpoint.
"""

from __future__ import annotations

from dataclasses import replace

from control_plane.core import faults, incidents, launch
from control_plane.core.actions import Decision
from control_plane.core.incidents import Fault
from control_plane.core.job.outcome import LAUNCH_SECONDS, change_state, stay
from control_plane.core.job.sources import step_left_in_s3
from control_plane.core.job.view import JobView, durable_step, with_record
from control_plane.core.observed.incidents import AwaitsStore, PausesWithoutNodes, StoreWaitStage
from control_plane.core.states import IncidentEvent, JobEvent
from control_plane.core.verification import Blocked, blocked
from everstep.protocol.agent_messages import Obstacle
from everstep.protocol.ids import FIRST_STEP, Step

LONGEST_PAUSE_SECONDS = 10.0
"""Longest pause between two attempts to load while the store is out of reach."""
STAND_ASIDE_SECONDS = 600.0
"""Time for which a job without patience left stays in the queue before its next attempt."""


def after_loads(view: JobView) -> Blocked | None:
    """Return the job's wait for a store after its newest loads, or None. A load that failed otherwise ends the wait."""
    before, plan = view.record.store_wait, view.plan
    found = faults.blocked_loads(plan, view.reports)
    if found:
        fault = found[0][1]
        words = f"{found[0][0]}: {fault.message}"
        obstacle = fault.obstacle or Obstacle.NO_ANSWER
        return blocked(before, obstacle, words, view.now, longest_seconds=LONGEST_PAUSE_SECONDS)
    if before is None or faults.of_loads(plan, view.reports, view.now):
        return None
    return replace(before, is_probed=False)  # The wait goes on until the nodes of a later generation have loaded.


def hold(view: JobView) -> JobView:
    """Record since when the nodes of a generation repeat their loads, or that none does any more."""
    wait, held = view.record.store_wait, faults.held_loads(view.reports)
    if not held:
        return with_record(view, store_wait=None) if wait is not None and wait.is_probed else view
    node_id, fault = held[0]
    obstacle = fault.obstacle or Obstacle.NO_ANSWER
    if wait is not None and wait.is_probed and wait.obstacle is obstacle:
        return view
    begun = Blocked(
        obstacle=obstacle,
        since=view.now if wait is None else wait.since,
        attempt_count=1 if wait is None else wait.attempt_count + 1,
        next_attempt_at=view.now,
        detail=f"{node_id}: {fault.message}",
        is_probed=True,
    )
    return with_record(view, store_wait=begun)


def hold_reason(view: JobView) -> AwaitsStore | None:
    """Return what the nodes of a generation wait for while they repeat their loads, or None if no node does."""
    wait = view.record.store_wait
    if wait is None or not wait.is_probed:
        return None
    return AwaitsStore(stage=StoreWaitStage.LOADS, wait=wait, until=_until(view, wait) if _is_stored(view) else None)


def end_hold(view: JobView) -> tuple[JobView, tuple[Fault, ...]] | None:
    """Return the faults that end a generation whose nodes repeat their loads, or None if the nodes continue."""
    wait, record = view.record.store_wait, view.record
    if wait is None or not wait.is_probed:
        return None
    is_over = record.pause_requested_at is not None or view.now >= _until(view, wait)
    # A generation that restores a step which S3 does not have ends only for a stop.
    if not view.wants_stop and not (is_over and _is_stored(view)):
        return None
    held = dict(faults.held_loads(view.reports))
    later = replace(wait, is_probed=False, next_attempt_at=view.now + LONGEST_PAUSE_SECONDS)
    return with_record(view, store_wait=later), faults.of_nodes_without_load(held, view.reports, view.now)


def _is_stored(view: JobView) -> bool:
    return view.plan.base_step <= max(durable_step(view), FIRST_STEP)


def await_store(view: JobView, roll: launch.Roll) -> Decision | None:
    """Keep a prepared job from its next attempt to load, or return None if the attempt is due.

    If the patience ends, the job releases its nodes unless only their memory has committed steps.
    """
    wait, record = view.record.store_wait, view.record
    if wait is None or view.now >= wait.next_attempt_at:
        return None
    left, lost = step_left_in_s3(view, roll)
    if not lost and record.pause_requested_at is not None:
        return release(with_record(view, store_wait=None), left, AwaitsStore(stage=StoreWaitStage.PAUSES, wait=wait))
    if not lost and view.now >= _until(view, wait):
        aside = with_record(view, not_before=view.now + STAND_ASIDE_SECONDS)
        gives_up = AwaitsStore(stage=StoreWaitStage.GIVES_UP, wait=wait, step=left)
        return release(aside, left, gives_up)
    waits = AwaitsStore(stage=StoreWaitStage.RETRIES, wait=wait, until=None if lost else _until(view, wait))
    return stay(view, waits, requeue=LAUNCH_SECONDS)


def release(view: JobView, left: Step, response: PausesWithoutNodes | AwaitsStore) -> Decision:
    """Return a prepared job to the queue without its nodes. `left` is the step that S3 can restore."""
    incident = view.record.incident
    if incident is not None:
        incident = replace(incidents.moved(incident, IncidentEvent.JOB_ENDED, view.now), decision=response)
    free = with_record(
        view,
        asked=(),
        silences=(),
        impairments=(),
        moves=(),
        no_pause_before=None,
        incident=incident,
        committed=min(view.record.committed, left),
    )
    return change_state(free, JobEvent.PAUSED, response)


def _until(view: JobView, wait: Blocked) -> float:
    return wait.since + view.spec.store_patience_seconds
