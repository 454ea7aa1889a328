"""Drills: something of a job is broken on purpose, once, and what becomes of it is followed to the end.

    REQUESTED ──▶ STRUCK ──▶ RECOVERED   an incident came of it, and is closed
        │            └─────▶ ABSORBED    none did: training went on
        └──────────────────▶ NOT_DONE    the job did not train in time

That a drill strikes is stored before it does: it strikes once or never, whatever dies in between.

Invariant: pure. A drill speaks against nobody: what it breaks is no failure of the node or the job.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from control_plane.core.incidents import Fault
from control_plane.core.observed import Cause, DrillKind, DrillObserved, DrillState, FailureRecord, JobRecord
from control_plane.core.states import ENDED_JOBS, JobState
from everstep.protocol.ids import NodeId
from everstep.protocol.plan import GenerationPlan, Timeouts

PATIENCE_TIMES = 2
"""A drill waits this many times T_max: to strike, and for an incident to come of it. A lost instance is noticed within one."""


class Course(StrEnum):
    """What a pass does about a drill. STRIKE: it happens now."""

    WAIT = "wait"
    STRIKE = "strike"


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A drill after a pass."""

    drill: DrillObserved
    course: Course = Course.WAIT


def follow(drill: DrillObserved, record: JobRecord, plan: GenerationPlan | None, now: float, timeouts: Timeouts) -> Followed:
    """Return how a drill goes on.

    Called in every pass over a job that has an open one.

    Args:
        drill: as stored, not ended.
        record: of the job, after this pass's decision.
        plan: of its newest generation.
        now: Unix seconds.
        timeouts: the ladder.

    Returns:
        The drill as it is to be stored, and whether it strikes once that is done.
    """
    patience = PATIENCE_TIMES * timeouts.exclude_seconds
    if drill.state is DrillState.REQUESTED:
        is_there = plan is not None and any(node.node_id == drill.node_id for node in plan.nodes)
        if record.state is JobState.RUNNING and record.incident is None and is_there and not record.taken_over_by:
            struck = replace(drill, state=DrillState.STRUCK, struck_at=now, generation=record.generation)
            return Followed(drill=struck, course=Course.STRIKE)
        if record.state in ENDED_JOBS or now - drill.requested_at > patience:
            return Followed(drill=_ended(drill, DrillState.NOT_DONE, now, "the job did not train undisturbed"))
        return Followed(drill=drill)
    struck_at = drill.struck_at
    assert struck_at is not None  # STRUCK
    if record.incident is not None and drill.incident_id == "" and record.incident.cause is Cause.DRILL:
        drill = replace(drill, incident_id=record.incident.id)
    if drill.incident_id and (record.incident is None or record.incident.id != drill.incident_id):
        return Followed(drill=_ended(drill, DrillState.RECOVERED, now, "training is where it was before"))
    if not drill.incident_id and (record.state in ENDED_JOBS or now - struck_at > patience):
        return Followed(drill=_ended(drill, DrillState.ABSORBED, now, "no generation ended by it"))
    return Followed(drill=drill)


def attributed(
    drill: DrillObserved | None, generation: int, found: tuple[Fault, ...], failure: FailureRecord | None
) -> tuple[tuple[Fault, ...], FailureRecord | None]:
    """Return the faults of a generation that ends, and what the breakers remember, with what a drill has done told as such.

    Args:
        drill: the job's open one.
        generation: that ends.
        found: why; not empty.
        failure: for the breakers.

    Returns:
        Both as they are where the drill has nothing to do with it.
    """
    if drill is None or drill.struck_at is None or drill.generation != generation:
        return found, failure
    nodes = {fault.node_id for fault in found} | {fault.implicates.node_id for fault in found if fault.implicates is not None}
    if drill.node_id not in nodes and (failure is None or failure.node_id != drill.node_id):
        return found, failure
    told = Fault(cause=Cause.DRILL, evidence=in_words(drill), at=min(fault.at for fault in found), seen_on=(drill.node_id,))
    spared = tuple(replace(fault, implicates=None) if fault.implicates is not None and _is_of(fault, drill.node_id) else fault for fault in found)
    return (*spared, told), None if failure is not None and failure.node_id == drill.node_id else failure


def in_words(drill: DrillObserved) -> str:
    """Return what an incident says of the drill that it came of."""
    what = f"rank {drill.rank} on {drill.node_id}" if drill.kind is DrillKind.KILL_RANK else drill.node_id
    return f"a drill ({drill.id}): {drill.requested_by} had {drill.kind} done to {what}"


def _is_of(fault: Fault, node_id: NodeId) -> bool:
    return fault.implicates is not None and fault.implicates.node_id == node_id


def _ended(drill: DrillObserved, state: DrillState, now: float, outcome: str) -> DrillObserved:
    return replace(drill, state=state, ended_at=now, outcome=outcome)
