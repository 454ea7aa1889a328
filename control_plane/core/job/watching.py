"""Handles a job whose ranks run: a job in state RUNNING, PAUSING or STOPPING."""

from __future__ import annotations

from dataclasses import replace

from control_plane.core import accounting, checkpoints, faults, hangs, launch, moves, rehearsal
from control_plane.core.actions import Decision, JobAction, Send
from control_plane.core.evidence import NodeDisposition, is_silent, progress_without
from control_plane.core.job.ending import finish, pause, stop
from control_plane.core.job.leaving import departure, leave
from control_plane.core.job.losses import reported_besides, with_departures
from control_plane.core.job.outcome import LAUNCH_SECONDS, WATCH_SECONDS, change_state, end_job, stay, with_actions
from control_plane.core.job.progress import with_progress
from control_plane.core.job.resizing import give_back, grow, has_asked_to_grow, trains, with_growth
from control_plane.core.job.restart import start_new_generation
from control_plane.core.job.view import JobView, agents_before, has_agreed_stop, has_finished, is_in_phase, with_record
from control_plane.core.observed.reasons import AwaitsFirstStep, JobFact, JobNote, JobReason, Unclear
from control_plane.core.states import JobEvent, JobState
from everstep.protocol.agent_messages import MemberPhase, Rehearse, TakeCheckpoint, TakeStacks
from everstep.protocol.ids import FIRST_STEP, NO_STEP


def watch(view: JobView) -> Decision:
    """Respond to the first finding about a running job. Every decision also writes due manifests of checkpoints."""
    view = _with_rehearsal(with_progress(view))
    record, plan = view.record, view.plan
    puts: tuple[JobAction, ...] = checkpoints.due(
        plan,
        view.reports,
        view.seen.lineage,
        view.seen.checkpoints,
        view.seen.dropped_checkpoints,
        committed=view.record.committed,
    )
    if (fault := faults.permanent(view.reports, has_trained=record.max_boundary > FIRST_STEP)) is not None:
        return end_job(view, JobEvent.GAVE_UP, fault.message)
    is_moving = record.state is JobState.RUNNING and (bool(moves.asked(record.moves)) or has_asked_to_grow(record))
    if not (is_moving and has_agreed_stop(view)) and all(has_finished(view, node.node_id) for node in plan.nodes):
        return with_actions(finish(view, is_durable=not puts), puts)
    silences = {silence.node_id: silence for silence in record.silences if not view.seen.is_fleet_blind}
    others = progress_without(view.reports, plan.coordinator)
    found = (
        *faults.of_nodes(plan, view.verdicts, view.nodes, view.now),
        *faults.of_loads(plan, view.reports, view.now),
        *faults.of_ranks(view.reports),
        *faults.of_agents(plan, view.spec.run, view.nodes, view.now),
        *faults.of_coordinator(plan, silences.get(plan.coordinator), others.committed, view.now, view.policy.timeouts),
        *faults.of_cut_off_members(plan, view.reports, view.now, view.policy.timeouts),
    )
    if record.state is JobState.STOPPING:
        return with_actions(stop(view, found, is_durable=not puts), puts)
    if found:
        found = (*found, *reported_besides(view, found))
        failure = faults.failure_of_loads(plan, view.reports, record.max_boundary, view.now)
        failure = failure or faults.failure_of_ranks(plan, view.reports, record.max_boundary)
        return with_actions(start_new_generation(view, found, failure), puts)
    if view.wants_stop:
        return with_actions(
            change_state(
                with_record(view, suspicion=None, moves=(), growth=None),
                JobEvent.STOP_ASKED,
                JobNote(what=JobFact.STOPS, stop=view.wants_stop),
            ),
            puts,
        )
    watched = _watch_clocks(view)
    if watched.faults:
        failure = hangs.failure(plan, view.reports, record.max_boundary, view.now, stuck=watched.stuck)
        ended = with_actions(start_new_generation(view, watched.faults, failure), puts)
        return replace(ended, events=(*watched.events, *ended.events))
    view = with_record(view, suspicion=watched.suspicion)
    if record.state is JobState.PAUSING:
        return with_actions(pause(view, is_durable=not puts), puts)
    view = with_departures(view)
    if (left := leave(view)) is not None:
        return with_actions(left, (*puts, *_wanted_checkpoint(view)))
    view = _with_notices(view)
    puts = (*puts, *_wanted_checkpoint(view))
    view = with_growth(view)
    if (grown := grow(view)) is not None:
        return with_actions(grown, puts)
    if (pause_reason := view.wants_pause) is not None:
        pausing = with_record(view, moves=(), growth=None)
        return with_actions(change_state(pausing, JobEvent.PAUSE_ASKED, pause_reason), puts)
    if (returning := give_back(view)) is not None:
        return with_actions(returning, puts)
    looks: tuple[JobAction, ...] = tuple(
        Send(
            node_id,
            TakeStacks(
                job=view.spec.job, run=view.spec.run, generation=plan.generation, number=watched.suspicion.number
            ),
        )
        for node_id in watched.ask
        if watched.suspicion is not None
    )
    if watched.still is not None:
        waiting = stay(
            view,
            watched.still,
            (*puts, *looks),
            requeue=LAUNCH_SECONDS if watched.ask else WATCH_SECONDS,
        )
        return replace(waiting, events=(*watched.events, *waiting.events))
    if view.record.moves:
        moving = departure(JobFact.MOVES_OFF, view.record.moves)
        waiting = stay(view, moving, puts, requeue=WATCH_SECONDS)
        return replace(waiting, events=(*watched.events, *waiting.events))
    is_stepping = accounting.is_stepping(view.record)
    unclear = [verdict.evidence for verdict in view.verdicts.values() if verdict.disposition is NodeDisposition.UNCLEAR]
    reason: JobReason = trains(view) if is_stepping else _awaits_first_step(view)
    if unclear:
        silent = sorted(node.node_id for node in view.nodes.values() if is_silent(node, view.policy.timeouts))
        doing = trains(view) if is_stepping else launch.starting(view.plan, view.reports)
        reason = Unclear(doing=doing, silent=tuple(silent), because=() if silent else tuple(unclear))
    elif view.record.rehearsal.is_under_way:
        reason = JobNote(what=JobFact.REHEARSES)
    elif rehearsal.is_due(view.spec, view.record, is_local=view.policy.is_local) and _may_rehearse(view):
        view = _with_order(view)
    stayed = stay(view, reason, (*puts, *_rehearse(view)), requeue=WATCH_SECONDS)
    return replace(stayed, events=(*watched.events, *stayed.events))


def _with_rehearsal(view: JobView) -> JobView:
    before, record = view.seen.record, view.record
    record, events = rehearsal.followed(view.spec, before, record, view.plan, view.reports, view.now)
    return replace(view, record=record, events=(*view.events, *events))


def _may_rehearse(view: JobView) -> bool:
    is_quiet = view.record.incident is None and view.record.growth is None
    return is_quiet and is_in_phase(view, view.plan.coordinator, MemberPhase.RUNNING)


def _with_order(view: JobView) -> JobView:
    """Order a rehearsal if the agents of all nodes support it. Otherwise, refuse a person's request."""
    # An earlier agent anywhere in the tree would drop fields from the messages that it forwards. The ranks would then
    # wait for each other until the limit of their phase.
    earlier, unknown = agents_before(view, (node.node_id for node in view.plan.nodes), Rehearse.since_minor)
    if earlier and rehearsal.is_asked(view.record):
        record, events = rehearsal.refused(view.spec, view.record, view.plan.node(earlier[0]), view.now)
        return replace(view, record=record, events=(*view.events, *events))
    if earlier or unknown:
        return view
    return with_record(view, rehearsal=rehearsal.ordered(view.record, view.reports))


def _rehearse(view: JobView) -> tuple[JobAction, ...]:
    order, coordinator = view.seen.record.rehearsal, view.reports.get(view.plan.coordinator)
    status = coordinator.round if coordinator is not None else None
    is_stored = order.is_open and order.generation == view.plan.generation and view.record.rehearsal.is_open
    if not is_stored or status is None or status.rehearsal_number >= order.number or view.record.rehearsal.is_under_way:
        return ()
    message = Rehearse(
        job=view.spec.job,
        run=view.spec.run,
        generation=order.generation,
        number=order.number,
        steps=view.spec.rehearsal_steps,
    )
    return (Send(view.plan.coordinator, message),)


def _awaits_first_step(view: JobView) -> JobReason:
    return launch.starting(view.plan, view.reports) or AwaitsFirstStep(step=view.plan.base_step)


def _with_notices(view: JobView) -> JobView:
    """Record that new notices from AWS require one checkpoint, of at least step `notice_wanted`."""
    record = view.record
    announced = tuple(move.node_id for move in record.moves if move.is_announced)
    is_new = bool(set(announced) - set(record.noticed))
    if is_new and view.spec.checkpoint_on_notice and record.committed > FIRST_STEP:
        return with_record(view, noticed=announced, notice_wanted=record.committed)
    return with_record(view, noticed=tuple(node_id for node_id in record.noticed if node_id in announced))


def _wanted_checkpoint(view: JobView) -> tuple[JobAction, ...]:
    """Return the order to upload a checkpoint that a user or a notice requires, until it is in S3."""
    wanted, plan = max(view.record.checkpoint_wanted, view.record.notice_wanted), view.plan
    if wanted < 0 or not is_in_phase(view, plan.coordinator, MemberPhase.RUNNING):
        return ()
    newest = checkpoints.newest_restorable(view.seen.checkpoints, view.seen.lineage, plan.generation)
    if newest is not None and newest.step >= wanted:
        return ()
    is_announced = view.record.notice_wanted > (newest.step if newest is not None else NO_STEP)
    order = TakeCheckpoint(
        job=view.spec.job, run=view.spec.run, generation=plan.generation, step=wanted, ends_exports=is_announced
    )
    return (Send(plan.coordinator, order),)


def _watch_clocks(view: JobView) -> hangs.Watched:
    has_all_reports = all(
        node.node_id in view.reports
        and view.nodes[node.node_id].is_connected
        and not is_silent(view.nodes[node.node_id], view.policy.timeouts)
        for node in view.plan.nodes
    )
    return hangs.watch(
        view.now,
        view.reports,
        view.record.pace,
        view.record.suspicion,
        view.policy.timeouts,
        has_all_reports=has_all_reports,
    )
