"""Moves a running job off a node: the ranks stop at an agreed step, and the job continues on another node."""

from __future__ import annotations

from dataclasses import replace

from control_plane.core import hangs, moves
from control_plane.core.actions import Decision, EventDraft
from control_plane.core.evidence import accusers, nodes_out_of_view, silent_in_rounds
from control_plane.core.incidents import incident_id
from control_plane.core.job.ending import ask_to_stop
from control_plane.core.job.outcome import LAUNCH_SECONDS, stay
from control_plane.core.job.restart import start_new_generation, with_incident
from control_plane.core.job.view import (
    JobView,
    durable_step,
    has_agreed_stop,
    last_movement_at,
    rank_exits,
    reached,
    with_record,
)
from control_plane.core.observed.incidents import CheckpointWait, CheckpointWaitKind, IncidentRecord, LeavesNodes
from control_plane.core.observed.jobs import Departure
from control_plane.core.observed.nodes import Cause
from control_plane.core.observed.reasons import JobFact, JobNote, StoppedToLeave
from control_plane.core.states import IncidentState
from everstep.protocol.ids import NodeId


def leave(view: JobView) -> Decision | None:
    """Give up nodes of a RUNNING job over several calls, or return None while no node is due to leave.

    All ranks stop at one step, it is stored in S3 if time suffices, and a new generation starts without the nodes.
    """
    record, plan, timeouts = view.record, view.plan, view.policy.timeouts
    leaving = moves.asked(record.moves)
    if not leaving:
        ready = moves.successors(plan, view.seen.assigned, view.nodes, view.now, timeouts)
        leaving = moves.due(record.moves, len(ready), record.upload_seconds, view.now, timeouts)
        return _ask_to_leave(view, leaving, ready) if leaving else None
    if not has_agreed_stop(view):
        if moves.is_stuck(leaving, last_movement_at(view), view.now, timeouts, hangs.promised_seconds(view.reports)):
            # Training makes no progress, so the ranks cannot agree on a stop. Start a new generation without one, and
            # withdraw the requests to stop (`asked_at`), except for nodes that the job returns to the fleet.
            unasked = tuple(move if move.is_returned else replace(move, asked_at=None) for move in record.moves)
            return start_new_generation(
                with_record(view, moves=unasked), tuple(moves.fault(move, view.now, view.now) for move in leaving), None
            )
        agrees = departure(JobFact.AGREES_TO_LEAVE, leaving)
        return stay(view, agrees, ask_to_stop(view), requeue=LAUNCH_SECONDS)
    stopped_at = min(max((each.at_seconds for each in rank_exits(view.reports)), default=view.now), view.now)
    found = tuple(moves.fault(move, stopped_at, view.now) for move in leaving)
    boundary = reached(view)
    closed: tuple[IncidentRecord, ...] = ()
    if record.incident is None or record.incident.state is not IncidentState.REPLACING:
        view, closed = with_incident(view, found, boundary)
    incident = view.record.incident
    assert incident is not None  # `with_incident` has added an open incident to the job's record.
    wait = _upload_wait(view, leaving, incident.opened_at)
    decision = LeavesNodes(
        node_ids=tuple(move.node_id for move in leaving),
        is_return=all(move.is_returned for move in leaving),
        wait=wait,
    )
    view = with_record(view, incident=replace(incident, reached_step=boundary, decision=decision))
    if wait.is_awaited:
        stayed = stay(view, StoppedToLeave(step=boundary, wait=wait), requeue=LAUNCH_SECONDS)
        return replace(stayed, incidents=(*closed, *stayed.incidents))
    moved = start_new_generation(_with_partners(view, leaving), found, None, decision=decision)
    return replace(moved, incidents=(*closed, *moved.incidents))


def _ask_to_leave(view: JobView, leaving: tuple[Departure, ...], ready: list[NodeId]) -> Decision:
    left = {move.node_id for move in leaving}
    known = tuple(replace(move, asked_at=view.now) if move.node_id in left else move for move in view.record.moves)
    message = departure(JobFact.TO_LEAVE_FOR if ready else JobFact.TO_LEAVE, leaving, tuple(ready[: len(leaving)]))
    draft = EventDraft(type="NodesToBeLeft", message=message, node_id=leaving[0].node_id)
    # The request is stored before it is sent. Otherwise, the job loop could treat the stopped ranks as a completed job.
    stayed = stay(with_record(view, moves=known), departure(JobFact.AGREES_TO_LEAVE, leaving), requeue=0.0)
    return replace(stayed, events=(*stayed.events, draft))


def departure(what: JobFact, leaving: tuple[Departure, ...], takers: tuple[NodeId, ...] = ()) -> JobNote:
    """Return a fact about the nodes that the job gives up, with the evidence against each."""
    names, because = tuple(move.node_id for move in leaving), tuple(move.evidence for move in leaving)
    return JobNote(what=what, node_ids=names, takers=takers, because=because)


def _upload_wait(view: JobView, leaving: tuple[Departure, ...], stopped_at: float) -> CheckpointWait:
    record, timeouts = view.record, view.policy.timeouts
    newest = durable_step(view)
    if record.committed <= 0:
        return CheckpointWait(why=CheckpointWaitKind.NO_STEP)
    if newest >= record.committed:
        return CheckpointWait(why=CheckpointWaitKind.IN_S3, step=newest)
    return moves.checkpoint_wait(
        moves.ends_at(leaving, view.nodes, view.now),
        is_announced=any(move.is_announced for move in leaving),
        stopped_at=stopped_at,
        upload_seconds=record.upload_seconds,
        is_replaceable=len(moves.successors(view.plan, view.seen.assigned, view.nodes, view.now, timeouts))
        >= len(leaving),
        is_held=moves.is_held_elsewhere(view.plan, view.reports, [move.node_id for move in leaving]),
        now=view.now,
        timeouts=timeouts,
    )


def _with_partners(view: JobView, leaving: tuple[Departure, ...]) -> JobView:
    """Record that a remaining and a departing node could not communicate: the remaining one may be faulty or lie."""
    lost = tuple(move for move in leaving if move.cause is Cause.NODE_UNREACHABLE)
    if not lost:
        return view
    # With parity, one unreachable member makes the shares of its whole group incomplete, so owners report all others.
    has_parity = view.spec.parity_group_size is not None
    suspected = silent_in_rounds(view.reports) if has_parity else nodes_out_of_view(view.reports)
    alone = accusers(view.reports, {move.node_id for move in lost})
    if len(alone) == 1 and not has_parity:
        suspected |= alone
    staying = suspected - {move.node_id for move in leaving}
    known_as = incident_id(view.spec.run, view.plan.generation)
    lines = tuple(moves.partner(node_id, lost, known_as, view.now) for node_id in sorted(staying))
    return replace(view, implications=(*view.implications, *lines))
