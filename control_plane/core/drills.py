"""Drills: something of a job is broken on purpose, once, and what becomes of it is followed to the end.

    REQUESTED ──▶ STRUCK ──▶ RECOVERED       an incident came of it, and training is where it was before
        │            ├─────▶ NOT_RECOVERED   the job ended, was paused or was interrupted again before that
        │            └─────▶ ABSORBED        no incident came of it: training went on
        └──────────────────▶ NOT_DONE        the job did not train in time

That a drill strikes is stored before it does: it strikes once or never, whatever dies in between.

What follows from a drill has the cause DRILL; what fails by itself while its incident is open has a cause of its own,
and with that the incident is no drill's any more: it is a failure for MTTF and MTTR, and the nodes that it took, less
the one that was struck, ask for spares.

Who is heard first need not be who was struck: the other ranks end for want of the one that was killed, and members that
cannot reach a coordinator say so before AWS says that its instance has ended.

Invariant: pure. A drill speaks against nobody: what it breaks is no failure of the node or the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from control_plane.core.incidents import Fault
from control_plane.core.observed.drills import DrillKind, DrillObserved, DrillState
from control_plane.core.observed.incidents import FailureRecord, IncidentRecord
from control_plane.core.observed.jobs import JobRecord
from control_plane.core.observed.nodes import Cause
from control_plane.core.states import ENDED_JOBS, JobState
from everstep.protocol.agent_messages import ExitClass, MemberReport
from everstep.protocol.ids import NodeId
from everstep.protocol.plan import GenerationPlan, Timeouts

PATIENCE_TIMES = 2
"""A drill waits this many times T_max: to strike, and for an incident to come of it.

A lost instance is noticed within one.
"""

_TRAINS = frozenset({JobState.RUNNING, JobState.PAUSING, JobState.STOPPING, JobState.COMPLETED})
"""What a job without an incident is in once training has gone on."""
_OF_AGENT = frozenset({Cause.AGENT_LOST, Cause.NODE_UNREACHABLE})
EXPLAINS: Mapping[DrillKind, frozenset[Cause]] = {
    DrillKind.KILL_RANK: frozenset({Cause.RANK_EXIT}),
    DrillKind.KILL_AGENT: _OF_AGENT,
    DrillKind.TERMINATE_INSTANCE: frozenset({Cause.RANK_EXIT, Cause.INSTANCE_TERMINATED}) | _OF_AGENT,
}
"""What a drill brings about on the node that it strikes. A fault that the node reports of itself is none of it."""


class Course(StrEnum):
    """What a pass does about a drill. STRIKE: it happens now."""

    WAIT = "wait"
    STRIKE = "strike"


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A drill after a pass."""

    drill: DrillObserved
    course: Course = Course.WAIT


def follow(
    drill: DrillObserved, record: JobRecord, plan: GenerationPlan | None, now: float, timeouts: Timeouts
) -> Followed:
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
    if record.incident is not None and drill.incident_id == "" and in_words(drill) in record.incident.evidence:
        drill = replace(drill, incident_id=record.incident.id)
    has_trained_on = record.incident is None and record.state in _TRAINS
    if drill.incident_id and (record.incident is None or record.incident.id != drill.incident_id):
        if has_trained_on:
            return Followed(drill=_ended(drill, DrillState.RECOVERED, now, "training is where it was before"))
        return Followed(
            drill=_ended(
                drill, DrillState.NOT_RECOVERED, now, f"{_what_came(record)} before training was where it was before"
            )
        )
    if not drill.incident_id and (record.state in ENDED_JOBS or now - struck_at > patience):
        if record.state in ENDED_JOBS and not has_trained_on:
            return Followed(
                drill=_ended(
                    drill, DrillState.NOT_RECOVERED, now, f"{_what_came(record)} before it was known what came of it"
                )
            )
        return Followed(drill=_ended(drill, DrillState.ABSORBED, now, "no generation ended by it"))
    return Followed(drill=drill)


def attributed(
    drill: DrillObserved | None,
    generation: int,
    found: tuple[Fault, ...],
    failure: FailureRecord | None = None,
    *,
    reports: Mapping[NodeId, MemberReport] = MappingProxyType({}),
) -> tuple[tuple[Fault, ...], FailureRecord | None]:
    """Return the faults that end a generation, or are found of one that has ended, with what a drill has done told as such.

    Args:
        drill: the job's open one.
        generation: that they are faults of.
        found: why it ended; not empty.
        failure: for the breakers.
        reports: of the generation's members, where its ranks may have ended.

    Returns:
        Both as they are where the drill has nothing to do with it. What it has is of the cause DRILL, against nobody;
        the last fault says so.
    """
    if drill is None or drill.struck_at is None:
        return found, failure
    is_struck = drill.generation == generation
    has_struck_rank = is_struck and has_struck_rank_ended(drill, reports)
    at_node = {
        number
        for number, fault in enumerate(found)
        if _is_explained(drill, fault, is_struck=is_struck, has_struck_rank=has_struck_rank)
    }
    if not at_node:
        return found, failure
    followed = at_node | {
        number
        for number, fault in enumerate(found)
        if is_struck and _node_of(fault) is None and fault.cause in EXPLAINS[drill.kind]
    }
    if all(fault.cause is Cause.GROUP_LOST for number, fault in enumerate(found) if number not in followed):
        followed = set(range(len(found)))  # it alone held something
    told = tuple(
        replace(fault, cause=Cause.DRILL, implicates=None) if number in followed else fault
        for number, fault in enumerate(found)
    )
    said = Fault(
        cause=Cause.DRILL,
        evidence=in_words(drill),
        at=min(found[number].at for number in followed),
        seen_on=(drill.node_id,),
    )
    is_own = any(fault.cause is Cause.RANK_EXIT and number in at_node for number, fault in enumerate(found))
    return (*told, said), None if is_own else failure


def has_struck_rank_ended(drill: DrillObserved, reports: Mapping[NodeId, MemberReport]) -> bool:
    """Say whether the rank that a drill has killed is known to have ended by that: one that was halted, or is done, was not struck before."""
    report = reports.get(drill.node_id) if drill.kind is DrillKind.KILL_RANK else None
    exits = [rank.exit for rank in report.ranks if rank.rank == drill.rank] if report is not None else []
    return any(each is not None and each.exit_class not in (ExitClass.SUCCESS, ExitClass.HALTED) for each in exits)


def recast(drill: DrillObserved | None, incident: IncidentRecord, found: tuple[Fault, ...]) -> IncidentRecord:
    """Return an incident that began with a rank's exit as the drill's, once it is found that the drill had ended an instance or another rank by then.

    Args:
        drill: the job's open one.
        incident: the open one.
        found: attributed; what was found now.

    Returns:
        The incident, of the cause DRILL where the rank failed for want of what the drill had struck, else as it is.
    """
    if drill is None or incident.generation_before != drill.generation or in_words(drill) in incident.evidence:
        return incident  # where it was known already, the rank's exit was another failure
    if all(fault.cause is not Cause.DRILL for fault in found):
        return incident
    is_of_it = incident.cause is Cause.RANK_EXIT and Cause.RANK_EXIT in EXPLAINS[drill.kind]
    if drill.kind is DrillKind.KILL_RANK:  # a rank that had ended before did not end for want of this one
        is_of_it = is_of_it and drill.struck_at is not None and incident.failed_at >= drill.struck_at
    return replace(incident, cause=Cause.DRILL) if is_of_it else incident


def in_words(drill: DrillObserved) -> str:
    """Return what an incident says of the drill that it came of."""
    what = f"rank {drill.rank} on {drill.node_id}" if drill.kind is DrillKind.KILL_RANK else drill.node_id
    return f"a drill ({drill.id}): {drill.requested_by} had {drill.kind} done to {what}"


def _is_explained(drill: DrillObserved, fault: Fault, *, is_struck: bool, has_struck_rank: bool) -> bool:
    """Say whether a fault is the drill's at the node that it struck.

    An instance that is ended stays so: AWS may say it generations later.
    """
    if fault.cause not in EXPLAINS[drill.kind] or not (is_struck or drill.kind is DrillKind.TERMINATE_INSTANCE):
        return False
    if fault.cause is Cause.RANK_EXIT and drill.kind is DrillKind.KILL_RANK:
        assert drill.struck_at is not None  # it has struck
        return has_struck_rank and (fault.rank == drill.rank or fault.at >= drill.struck_at)
    if fault.cause is Cause.RANK_EXIT:
        return is_struck and drill.node_id in fault.seen_on
    if fault.unreached == drill.node_id:
        return is_struck
    return _node_of(fault) == drill.node_id


def _node_of(fault: Fault) -> NodeId | None:
    return fault.node_id or (fault.implicates.node_id if fault.implicates is not None else None)


def _what_came(record: JobRecord) -> str:
    """Return what cut a recovery short."""
    if record.state in ENDED_JOBS:
        return f"the job {record.state}"
    return "the job was paused" if record.incident is None else "another incident began"


def _ended(drill: DrillObserved, state: DrillState, now: float, outcome: str) -> DrillObserved:
    return replace(drill, state=state, ended_at=now, outcome=outcome)
