"""Ends or pauses a job whose ranks stop: because the script finished, a user stopped the job, or the job pauses."""

from __future__ import annotations

from control_plane.core import accounting, hangs, incidents, moves, queue
from control_plane.core.actions import Decision, Send
from control_plane.core.incidents import Fault
from control_plane.core.job.outcome import LAUNCH_SECONDS, change_state, end_job, stay
from control_plane.core.job.restart import start_new_generation
from control_plane.core.job.view import (
    JobView,
    durable_step,
    halt,
    has_agreed_stop,
    has_finished,
    have_all_succeeded,
    is_in_phase,
    is_training_over,
    lacks_checkpoint,
    last_movement_at,
    last_progress_at,
    rank_exits,
    watched_seconds,
    with_record,
)
from control_plane.core.observed.facts import Fact, NotPaused, NotStopped
from control_plane.core.observed.nodes import Cause
from control_plane.core.observed.reasons import JobFact, JobNote
from control_plane.core.states import IncidentEvent, IncidentState, JobEvent, JobState
from everstep.protocol.agent_messages import MemberPhase, StopTraining
from everstep.protocol.ids import FIRST_STEP, NO_STEP
from everstep.protocol.plan import CHECK_VARIABLE

PAUSE_PATIENCE_TIMES = 5
"""Limit for the upload of the last checkpoint, while nodes are idle, as a multiple of `blind_wait_seconds`."""


def finish(view: JobView, *, is_durable: bool) -> Decision:
    """End or pause a job whose ranks all succeeded. `is_durable` is false while a manifest must be written."""
    record = view.record
    status = next((report.round for report in view.reports.values() if report.round is not None), None)
    was_stopped = record.state is not JobState.RUNNING and not (
        status is not None and status.finished and not status.stopped
    )
    if not was_stopped:
        if _awaits_checkpoint(view, is_durable=is_durable):
            return _stay_stopped(view, JobFact.AWAITS_LAST_CHECKPOINT)
        return end_job(_with_final_checkpoint(view), JobEvent.FINISHED, _completed(view))
    if record.state is JobState.PAUSING:
        return _complete_pause(view, is_durable=is_durable)
    if _awaits_checkpoint(view, is_durable=is_durable):
        return _stay_stopped(view, JobFact.AWAITS_CHECKPOINT_OF_STOP)
    return end_job(_with_final_checkpoint(view), JobEvent.HALTED, _stopped(view, JobFact.STOPPED))


def _stay_stopped(view: JobView, what: JobFact) -> Decision:
    return stay(view, JobNote(what=what, step=view.record.boundary), requeue=LAUNCH_SECONDS)


def _with_final_checkpoint(view: JobView) -> JobView:
    is_check = CHECK_VARIABLE in view.spec.script.environment
    if is_check or view.record.max_boundary <= FIRST_STEP:
        return view
    return with_record(view, final_checkpoint=durable_step(view))


def _completed(view: JobView) -> JobNote:
    record, final = view.record, _with_final_checkpoint(view).record.final_checkpoint
    if CHECK_VARIABLE in view.spec.script.environment:
        return JobNote(what=JobFact.CHECK_COMPLETED)
    if final is None:
        return JobNote(what=JobFact.COMPLETED_WITHOUT_STEPS)
    return JobNote(
        what=JobFact.COMPLETED,
        step=record.boundary,
        committed_step=record.committed,
        checkpoint_step=final,
        target_step=record.target,
    )


def _awaits_checkpoint(view: JobView, *, is_durable: bool) -> bool:
    if _awaits_manifest(view, is_durable=is_durable):
        return True
    if len(rank_exits(view.reports)) < view.plan.world_size or not lacks_checkpoint(view):
        return False
    return watched_seconds(view, _ended_at(view)) < view.policy.timeouts.final_round_seconds


def _awaits_manifest(view: JobView, *, is_durable: bool) -> bool:
    return not is_durable and watched_seconds(view, _ended_at(view)) < _upload_patience(view)


def _ended_at(view: JobView) -> float:
    exits = (each.at_seconds for each in rank_exits(view.reports))
    return min(max(view.record.state_since, last_progress_at(view), *exits), view.now)


def _upload_patience(view: JobView) -> float:
    expected = moves.UPLOAD_MARGIN * (view.record.upload_seconds or 0.0)
    return max(PAUSE_PATIENCE_TIMES * view.policy.timeouts.blind_wait_seconds, expected)


def stop(view: JobView, found: tuple[Fault, ...], *, is_durable: bool) -> Decision:
    """Request that all ranks stop at one agreed step. If the ranks cannot agree, kill them."""
    record, plan = view.record, view.plan
    is_over = is_training_over(view.reports, plan.world_size)
    if not found and have_all_succeeded(view.reports, plan.world_size):
        return _stay_stopped(view, JobFact.AWAITS_CHECKPOINT_OF_STOP)
    patience = _upload_patience(view) if is_over else _stop_patience(view)
    waited = (
        watched_seconds(view, _ended_at(view))
        if is_over
        else view.now - max(record.state_since, last_movement_at(view))
    )
    if not found and waited <= patience:
        if is_over:
            return _stay_stopped(view, JobFact.AWAITS_RANKS)
        return stay(view, _stopped(view, JobFact.STOPS), ask_to_stop(view), requeue=LAUNCH_SECONDS)
    because = found[0].evidence if found else NotStopped(seconds=patience, is_over=is_over)
    running = [node.node_id for node in plan.nodes if is_in_phase(view, node.node_id, MemberPhase.RUNNING)]
    # The order to kill also goes to the coordinator, which then orders the upload of the newest committed step.
    recipients = [*running, plan.coordinator] if is_in_phase(view, plan.coordinator, MemberPhase.EXITED) else running
    halts = tuple(halt(view, node_id, plan.generation, "the job stops") for node_id in recipients)
    if running:
        return stay(view, _stopped(view, JobFact.KILLS, because), halts, requeue=LAUNCH_SECONDS)
    if _awaits_checkpoint(view, is_durable=is_durable):
        waits = _stopped(view, JobFact.KILLED_AWAITS_CHECKPOINT, because)
        return stay(view, waits, halts, requeue=LAUNCH_SECONDS)
    killed = JobFact.KILLED if accounting.is_stepping(record) else JobFact.KILLED_EARLY
    what = JobFact.STOPPED_THEN_KILLED if is_over else killed
    return end_job(view, JobEvent.HALTED, _stopped(view, what, because))


def _stopped(view: JobView, what: JobFact, *because: Fact) -> JobNote:
    """Return a note whose `step` is the step at which all ranks stopped, if they did."""
    is_over = is_training_over(view.reports, view.plan.world_size)
    return JobNote(
        what=what,
        step=view.record.boundary if is_over else NO_STEP,
        checkpoint_step=durable_step(view),
        because=because,
        stop=view.wants_stop,
    )


def _stop_patience(view: JobView) -> float:
    """Return how long the ranks may take to stop at one step before they are killed, from their last completed step."""
    timeouts = view.policy.timeouts
    # Ranks agree between two steps, so ranks that hang cannot. Before the first new step, killing them loses nothing.
    loses_nothing = not accounting.is_stepping(view.record)
    is_hang = loses_nothing or hangs.stands_still(view.reports, view.record.pace, timeouts)
    rehearsal = hangs.promised_seconds(view.reports) if view.record.rehearsal.is_under_way else 0.0
    return timeouts.coordinator_deadline_seconds if is_hang else timeouts.blind_wait_seconds + rehearsal


def pause(view: JobView, *, is_durable: bool) -> Decision:
    """Request the agreed stop of a pausing job repeatedly. Ranks that do not stop in time are a fault."""
    record = view.record
    if has_agreed_stop(view):
        return _complete_pause(view, is_durable=is_durable)
    patience = view.policy.timeouts.blind_wait_seconds + hangs.promised_seconds(view.reports)
    if view.now - max(record.state_since, last_movement_at(view)) > patience:
        return _resume(view, Fault(cause=Cause.PAUSE_FAILED, evidence=NotPaused(seconds=patience), at=view.now))
    return stay(view, record.reason, ask_to_stop(view), requeue=LAUNCH_SECONDS)


def ask_to_stop(view: JobView) -> tuple[Send, ...]:
    """Return the message that asks the coordinator to stop all ranks at one agreed step, or nothing if no ranks run."""
    plan = view.plan
    if not is_in_phase(view, plan.coordinator, MemberPhase.RUNNING):
        return ()
    return (Send(plan.coordinator, StopTraining(job=view.spec.job, run=view.spec.run, generation=plan.generation)),)


def _complete_pause(view: JobView, *, is_durable: bool) -> Decision:
    """Pause a job whose ranks have all stopped, once its last step is in S3. Training resumes after a long wait."""
    record = view.record
    durable, patience = durable_step(view), _upload_patience(view)
    is_late = watched_seconds(view, _ended_at(view)) > patience
    if (
        is_durable
        and not lacks_checkpoint(view)
        and (is_late or all(has_finished(view, node.node_id) for node in view.plan.nodes))
    ):
        incident = record.incident
        # A pause also ends an open incident. The resumed job repeats the lost steps outside of an incident.
        if incident is not None and incident.state is not IncidentState.CLOSED:
            incident = incidents.moved(incident, IncidentEvent.JOB_ENDED, view.now)
        free = with_record(view, asked=(), exclusions=(), silences=(), no_pause_before=None, incident=incident)
        what = JobFact.PAUSED if record.pause_requested_at is None else JobFact.PAUSED_FOR_USER
        paused = JobNote(what=what, step=record.boundary, checkpoint_step=durable)
        return change_state(free, JobEvent.PAUSED, paused)
    if is_late:
        fact = NotPaused(seconds=patience, step=record.committed)
        return _resume(view, Fault(cause=Cause.PAUSE_FAILED, evidence=fact, at=view.now))
    return _stay_stopped(view, JobFact.AWAITS_CHECKPOINT_OF_PAUSE)


def _resume(view: JobView, why: Fault) -> Decision:
    return start_new_generation(with_record(view, no_pause_before=view.now + queue.PAUSE_AGAIN_SECONDS), (why,), None)
