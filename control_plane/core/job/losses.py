"""Updates a job's record when the job loses or gives up nodes: excluded nodes, incident, and nodes' histories."""

from __future__ import annotations

from dataclasses import replace

from control_plane.core import breakers, drills, faults, incidents, moves, remedies
from control_plane.core.evidence import NodeDisposition, NodeVerdict
from control_plane.core.incidents import Fault
from control_plane.core.job.view import JobView, highest, reached, with_record
from control_plane.core.observed.incidents import FailureRecord, IncidentRecord, LeavesNodes, Response, RestartsRanks
from control_plane.core.observed.jobs import Departure, Exclusion, JobRecord
from control_plane.core.observed.nodes import Cause, Remedy
from everstep.protocol.ids import NodeId
from everstep.protocol.plan import GenerationPlan

UNEXPLAINED_LOSSES = (Cause.AGENT_LOST, Cause.NODE_UNREACHABLE)
EXPLAINED_LOSSES = (Cause.NODE_FAULT, Cause.INSTANCE_TERMINATED)
"""Causes that AWS or the node's own agent reports. A job cannot be the cause of such a loss."""


def exclusions_with(view: JobView, record: JobRecord, fresh: tuple[NodeVerdict, ...]) -> tuple[Exclusion, ...]:
    """Return the nodes that the job will not use again: those of `record`, and the assigned ones of `fresh`."""
    added = [
        Exclusion(
            node_id=verdict.node_id,
            evidence=verdict.evidence,
            may_terminate=verdict.may_terminate,
            remedy=verdict.remedy,
        )
        for verdict in fresh
        if verdict.node_id in view.seen.assigned
    ]
    return (*record.exclusions, *added)


def loss_faults(view: JobView, verdict: NodeVerdict) -> tuple[Fault, ...]:
    """Return the fault of a lost node, in a tuple that is empty if the newest plan does not contain the node."""
    if view.seen.plan is None or all(node.node_id != verdict.node_id for node in view.seen.plan.nodes):
        return ()
    at = faults.lost_at(verdict, view.nodes, view.now)
    line = faults.implied(verdict, view.now)
    return (Fault(cause=verdict.cause, evidence=verdict.evidence, at=at, node_id=verdict.node_id, implicates=line),)


def with_losses(view: JobView, lost: tuple[Fault, ...]) -> JobView:
    """Add lost nodes to the open incident, with Everstep's response unless the job gave all of them up as planned."""
    incident, plan = view.record.incident, view.seen.plan
    fresh = tuple(fault for fault in lost if incident is not None and fault.node_id not in incident.instance_ids)
    if incident is None or plan is None or not fresh:
        return view
    fresh, _ = drills.attributed(view.seen.drill, plan.generation, fresh)
    updated_incident = incidents.with_faults(drills.recast(view.seen.drill, incident, fresh), fresh)
    is_lost = any(not fault.cause.is_planned for fault in fresh)
    planned = [move.evidence for move in moves.asked(view.record.moves)]
    is_planned = all(fact in planned for fact in updated_incident.evidence)
    # If the job gave up these nodes as planned, after all ranks had stopped at one step, the incident already has its
    # `decision`, and other nodes hold copies of the last step.
    if not is_planned:
        updated_incident = with_group_loss(updated_incident, plan)
        updated_incident = replace(
            updated_incident, decision=response(updated_incident.cause, updated_incident.instance_ids)
        )
    failures = breakers.forgiven(view.record.failures, plan.generation) if is_lost else view.record.failures
    return with_implications(with_record(view, incident=updated_incident, failures=failures), fresh, updated_incident)


def with_group_loss(incident: IncidentRecord, plan: GenerationPlan) -> IncidentRecord:
    """Return the incident, with evidence about each shard whose holders are all lost. A drill stays the cause."""
    lost = faults.group_loss(plan, incident.instance_ids, incident.failed_at)
    return incidents.with_faults(
        incident, tuple(replace(fault, cause=Cause.DRILL) if incident.cause is Cause.DRILL else fault for fault in lost)
    )


def with_implications(view: JobView, found: tuple[Fault, ...], incident: IncidentRecord) -> JobView:
    """Add each fault to a node's fault history, or count it against the job. The job gives up new lemons."""
    view, found = _with_own_loss(view, found)
    lines = [replace(fault.implicates, incident_id=incident.id) for fault in found if fault.implicates is not None]
    view = replace(view, implications=(*view.implications, *lines))
    left = {move.node_id for move in view.record.moves if not move.has_left} | {
        exclusion.node_id for exclusion in view.record.exclusions
    }
    for line in lines:
        node = view.nodes.get(line.node_id)
        history = [*(node.history if node is not None else ()), line]
        why = remedies.lemon(line.node_id, history, view.now)
        if why is not None and line.node_id not in left:
            remedy = remedies.of_lemon(history, view.now)
            move = Departure(
                node_id=line.node_id,
                evidence=why,
                cause=Cause.NODE_FAULT,
                remedy=remedy,
                may_terminate=remedy is Remedy.REPLACE,
                is_history=True,
            )
            left.add(line.node_id)
            view = with_record(view, moves=(*view.record.moves, move))
    return view


def _with_own_loss(view: JobView, found: tuple[Fault, ...]) -> tuple[JobView, tuple[Fault, ...]]:
    """Record that the job lost a node without a known cause, at most once per generation."""
    lost = [fault.implicates for fault in found if fault.cause in UNEXPLAINED_LOSSES and fault.implicates is not None]
    plan, failures = view.seen.plan, view.record.failures
    if plan is None or not lost or any(fault.cause in EXPLAINED_LOSSES for fault in found):
        return view, found
    boundary = reached(view)
    loss = FailureRecord(
        generation=plan.generation,
        step=boundary,
        exit_class=None,
        code=0,
        at=view.now,
        max_boundary=highest(view, boundary),
        is_node_loss=True,
        node_id=lost[0].node_id,
        base_step=plan.base_step,
    )
    if not any(failure.is_node_loss and failure.generation == plan.generation for failure in failures):
        failures = breakers.remembered(failures, loss, view.spec)
    # Without a new step, the job itself may have ended the agent, so the loss counts against the job.
    is_own = any(failure.generation == plan.generation for failure in breakers.own_losses(failures))
    left = tuple(fault for fault in found if fault.implicates not in lost) if is_own else found
    return with_record(view, failures=failures), left


def reported_besides(view: JobView, found: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """Return the faults that members report about their own nodes, which may have caused the faults in `found`."""
    known = {fault.node_id for fault in found}
    # The faulty node is not marked as lost, because the job may still need its shards.
    return tuple(
        Fault(cause=verdict.cause, evidence=verdict.evidence, at=view.now, seen_on=(node_id,))
        for node_id, verdict in view.verdicts.items()
        if verdict.disposition is NodeDisposition.IMPAIRED
        and verdict.may_terminate
        and node_id not in known
        and node_id in view.reports
    )


def with_departures(view: JobView) -> JobView:
    """Store which nodes a running job should give up at a stop. Unusable nodes without ranks leave at once."""
    record = view.record
    found = moves.wanted(
        record.moves, view.seen.assigned, view.verdicts, view.nodes, now=view.now, not_before=record.moves_after
    )
    lent = moves.lent(view.plan, view.seen.assigned)
    free = set(lent) - {exclusion.node_id for exclusion in record.exclusions}
    useless = tuple(moves.verdict(move) for move in found if move.node_id in free)
    return with_record(
        view,
        moves=tuple(move for move in found if move.node_id not in lent),
        exclusions=exclusions_with(view, record, useless),
    )


def response(cause: Cause, lost: tuple[NodeId, ...]) -> Response:
    """Return Everstep's response to a failure."""
    if lost and cause.is_planned:
        return LeavesNodes(node_ids=lost, is_return=cause is Cause.RETURNED)
    return RestartsRanks(replaced=lost)
