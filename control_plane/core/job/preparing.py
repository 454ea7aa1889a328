"""Handles a job in state PREPARING: every member promises to obey no older generation, then the plan is stored."""

from __future__ import annotations

from dataclasses import replace

from control_plane.core import faults, incidents, launch, recovery
from control_plane.core.actions import Decision, JobAction, Send
from control_plane.core.job.outcome import LAUNCH_SECONDS, change_state, end_job, stay
from control_plane.core.job.progress import with_unstored_outputs
from control_plane.core.job.resizing import shrink, smaller_size, with_size, with_vacancy
from control_plane.core.job.roster import (
    NODE_LOSS_CAUSES,
    with_faulty,
    with_late_reports,
    with_promise_deadlines,
    without_departing,
    without_lost,
    without_suspects,
    without_unreachable,
)
from control_plane.core.job.ruling import with_ruling
from control_plane.core.job.sources import repeat_choice, step_left_in_s3
from control_plane.core.job.store_wait import await_store, release
from control_plane.core.job.view import (
    JobView,
    agents_before,
    watched_seconds,
    with_capacity_wait,
    with_record,
)
from control_plane.core.observed.incidents import PausesWithoutNodes
from control_plane.core.observed.reasons import AwaitsConsent, GaveUp, JobFact, JobNote, Waits
from control_plane.core.observed.steps import RepeatedWork
from control_plane.core.states import IncidentEvent, JobEvent
from everstep.protocol.agent_messages import Prepare
from everstep.protocol.ids import FIRST_STEP, Generation
from everstep.protocol.plan import ARGUMENTS_SINCE_MINOR


def prepare(view: JobView) -> Decision:
    """Request every member's promise to join the next generation, select the members, then store the plan."""
    if (stopped := _stop_without_ranks(view)) is not None:
        return stopped
    seen_generation = launch.highest_seen(view.seen, view.spec.run, view.now)
    if seen_generation > view.record.issued_generation:
        number = Generation(seen_generation + 1)
        reason = JobNote(what=JobFact.NUMBER_IN_USE, generation=seen_generation)
        return change_state(with_record(view, issued_generation=number, asked=()), JobEvent.FAULTED, reason)
    view = with_unstored_outputs(with_late_reports(view))
    # Store the committed step now. Agents read this step from the memory pages that they share with the ranks, and the
    # next message (Load) clears these pages. The step can be newer than every boundary that agents have reported, for
    # example if they lost the connection to the control plane. All ranks have finished a committed step, so the
    # boundary rises to it. The highest boundary is never lowered, so it rises only to what two nodes name.
    committed = launch.committed_of(view.spec, view.seen, view.record, view.now)
    confirmed = launch.confirmed_of(view.spec, view.seen, view.record, committed)
    if committed > view.record.boundary:
        view = with_record(view, boundary=committed, boundary_at=None)  # no agent reported when ranks finished the step
    view = with_record(view, committed=committed, max_boundary=max(view.record.max_boundary, confirmed))
    # Each rule depends on the changes of the rules before it, so their order matters.
    view = with_faulty(view)
    view = without_lost(view)
    view = with_promise_deadlines(view)
    view = without_unreachable(view)
    view = without_suspects(view)
    view = without_departing(view)
    view, gives_up = with_ruling(view)
    record, spec = view.record, view.spec
    roll = launch.call_roll(spec, view.seen, record, view.policy)
    request = Prepare(
        job=spec.job, run=spec.run, generation=record.issued_generation, parent=launch.parent_of(view.seen)
    )
    asks: list[JobAction] = [Send(node_id, request) for node_id in roll.late if view.nodes[node_id].is_connected]
    if gives_up:
        return end_job(view, JobEvent.GAVE_UP, GaveUp(because=gives_up))
    if roll.is_complete:
        return await_store(view, roll) or _store_plan(view, roll)
    view = with_vacancy(view, roll)
    if (smaller := shrink(view, roll)) is not None:
        return smaller
    if (paused := _pause_without_nodes(view, roll)) is not None:
        return paused
    waits = Waits(
        missing_count=roll.vacancy_count,
        lack_reasons=view.seen.lack_reasons if roll.vacancy_count else (),
        late=roll.late,
        unreachable=roll.unreachable,
        consent=None if view.record.repeat is None else _consent(view, view.record.repeat),
        smaller=smaller_size(view, roll) if roll.vacancy_count else None,
        stop=view.wants_stop,
    )
    view = with_capacity_wait(view, roll.vacancy_count)
    return stay(view, waits, tuple(asks), requeue=LAUNCH_SECONDS)


def _stop_without_ranks(view: JobView) -> Decision | None:
    """End a job that should stop while none of its ranks run, or return None while only memory has a committed step.

    The job ends without that step `blind_wait_seconds` after the request to stop.
    """
    record = view.record
    if view.wants_stop is None:
        return None
    left, lost = step_left_in_s3(view, launch.call_roll(view.spec, view.seen, record, view.policy))
    asked_at = record.state_since if record.stop_requested_at is None else record.stop_requested_at
    if lost and watched_seconds(view, asked_at) <= view.policy.timeouts.blind_wait_seconds:
        return None
    what, why = JobFact.STOPPED_WITHOUT_RANKS, view.wants_stop
    stopped = JobNote(what=what, stop=why, checkpoint_step=left, lost_step_count=lost)
    return end_job(view, JobEvent.HALTED, stopped)


def _consent(view: JobView, choice: RepeatedWork) -> AwaitsConsent:
    return AwaitsConsent(choice=choice, job=view.spec.job, limit_minutes=view.spec.max_repeated_minutes)


def _pause_without_nodes(view: JobView, roll: launch.Roll) -> Decision | None:
    """Pause a job that waits for a missing node, if a pause was requested, and release the nodes that it has.

    If the release would lose a committed step, the job first waits for `blind_wait_seconds`.
    """
    record = view.record
    if record.pause_requested_at is None or not roll.vacancy_count or roll.late or record.exclusions:
        return None
    left, lost = step_left_in_s3(view, roll)
    if repeat_choice(view, left) is not None:
        return None
    if (
        lost
        and view.now - max(record.pause_requested_at, record.state_since) <= view.policy.timeouts.blind_wait_seconds
    ):
        return None
    return release(view, left, PausesWithoutNodes(step=left, lost_step_count=lost))


def _store_plan(view: JobView, roll: launch.Roll) -> Decision:
    script = view.spec.script
    if script.arguments or script.module or script.kept_files:
        earlier, unknown = agents_before(view, filter(None, roll.places), ARGUMENTS_SINCE_MINOR)
        if lacking := earlier + unknown:
            return stay(view, JobNote(what=JobFact.AWAITS_AGENTS, node_ids=lacking), requeue=LAUNCH_SECONDS)
    plan, restore = launch.make_plan(view.spec, view.seen, view.record, roll, view.policy, view.now)
    if (choice := repeat_choice(view, restore.base_step)) is not None:
        return stay(with_record(view, repeat=choice), _consent(view, choice), requeue=LAUNCH_SECONDS)
    if view.spec.initial_checkpoint and restore.base_step == FIRST_STEP:
        if any(each.is_wrong and each.verify_requested_at is not None for each in view.seen.checkpoints):
            waits = JobNote(what=JobFact.AWAITS_VERIFICATION, name=view.spec.initial_checkpoint)
            return stay(view, waits, requeue=LAUNCH_SECONDS)
        lost = JobNote(what=JobFact.INITIAL_STATE_LOST, name=view.spec.initial_checkpoint)
        return end_job(view, JobEvent.GAVE_UP, lost)
    incident = view.record.incident
    source = restore.farthest
    what = JobFact.STARTS_ANEW if source is None else JobFact.RESTORES
    reason = JobNote(what=what, step=plan.base_step, name=source or "")
    if incident is not None:
        before = [node.node_id for node in view.plan.nodes]
        launched = [node.node_id for node in plan.nodes]
        # A second failure can lose a replacement. The incident then no longer lists this node as a replacement.
        named = dict.fromkeys(
            [*incident.replacement_instance_ids, *(node_id for node_id in launched if node_id not in before)]
        )
        incident = incidents.moved(incident, IncidentEvent.NODES_THERE, view.now)
        is_held = view.record.committed > FIRST_STEP
        if incident.cause in NODE_LOSS_CAUSES and is_held and not (view.record.refused or view.record.failed_reads):
            incident = incidents.with_faults(incident, faults.memory_loss(restore.forgotten, incident.failed_at))
        incident = replace(
            incident,
            generation_after=plan.generation,
            from_step=plan.base_step,
            restore_source=recovery.farther(incident.restore_source, source) if source is not None else None,
            replacement_instance_ids=tuple(node_id for node_id in named if node_id in launched),
            kept_instance_ids=(
                *incident.kept_instance_ids,
                *(move.node_id for move in view.record.moves if move.is_faulty and move.is_kept),
            ),
        )
    view = with_size(with_record(view, incident=incident), plan)
    moved = with_record(
        view,
        generation=plan.generation,
        base_step=plan.base_step,
        committed=min(view.record.committed, plan.base_step),
        boundary=plan.base_step,
        boundary_at=None,
        stepped_at=None,
        moves=(),
        impairments=(),
    )
    return replace(change_state(moved, JobEvent.PLANNED, reason), plan=plan)
