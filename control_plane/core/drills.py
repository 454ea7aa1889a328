"""Drills: on a person's order, Everstep injects one fault into a job ("strikes") and observes the recovery.

    REQUESTED ──▶ STRUCK ──▶ RECOVERED       an incident followed, and training has caught up
        │            ├─────▶ NOT_RECOVERED   the job ended, paused or failed again first
        │            └─────▶ ABSORBED        no incident followed, training continued
        └──────────────────▶ NOT_DONE        the job did not train in time, so no fault was injected

Invariant: pure. Faults that follow from a drill count neither as failures of the job nor in the history of a node. An
independent fault during the drill's incident keeps its own cause, and the incident then counts in MTTF and MTTR.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from control_plane.core.incidents import Fault
from control_plane.core.observed.drills import DrillKind, DrillObserved, DrillOutcome, DrillState
from control_plane.core.observed.facts import DrillOrdered
from control_plane.core.observed.incidents import FailureRecord, IncidentRecord
from control_plane.core.observed.jobs import JobRecord
from control_plane.core.observed.nodes import Cause
from control_plane.core.states import ENDED_JOBS, JobState
from everstep.protocol.agent_messages import ExitClass, MemberReport
from everstep.protocol.ids import NodeId
from everstep.protocol.plan import GenerationPlan, Timeouts

PATIENCE_TIMES = 2
"""Limit of a drill's wait for its strike and of its wait for an incident, in T_max (`exclude_seconds`)."""

_TRAINS = frozenset({JobState.RUNNING, JobState.PAUSING, JobState.STOPPING, JobState.COMPLETED})
_OF_AGENT = frozenset({Cause.AGENT_LOST, Cause.NODE_UNREACHABLE})
EXPLAINS: Mapping[DrillKind, frozenset[Cause]] = {
    DrillKind.KILL_RANK: frozenset({Cause.RANK_EXIT}),
    DrillKind.KILL_AGENT: _OF_AGENT,
    DrillKind.TERMINATE_INSTANCE: frozenset({Cause.RANK_EXIT, Cause.INSTANCE_TERMINATED}) | _OF_AGENT,
}
"""Causes of faults that each kind of drill can produce on the struck node."""


class DrillCourse(StrEnum):
    """The action that the job loop takes for a drill now. STRIKE: inject the fault."""

    WAIT = "wait"
    STRIKE = "strike"


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """The drill to store, and the action that the job loop takes for it."""

    drill: DrillObserved
    course: DrillCourse = DrillCourse.WAIT


def follow(
    drill: DrillObserved, record: JobRecord, plan: GenerationPlan | None, now: float, timeouts: Timeouts
) -> Followed:
    """Return the next state of an open drill, and whether the job loop injects its fault now."""

    def ended(state: DrillState, outcome: DrillOutcome) -> Followed:
        return Followed(drill=replace(drill, state=state, ended_at=now, outcome=outcome))

    patience = PATIENCE_TIMES * timeouts.exclude_seconds
    if drill.state is DrillState.REQUESTED:
        is_there = plan is not None and any(node.node_id == drill.node_id for node in plan.nodes)
        if record.state is JobState.RUNNING and record.incident is None and is_there and not record.taken_over_by:
            # The control plane stores STRUCK before it injects the fault, so a drill strikes at most once, even after a
            # crash.
            struck = replace(drill, state=DrillState.STRUCK, struck_at=now, generation=record.generation)
            return Followed(drill=struck, course=DrillCourse.STRIKE)
        if record.state in ENDED_JOBS or now - drill.requested_at > patience:
            return ended(DrillState.NOT_DONE, DrillOutcome.NOT_TRAINING)
        return Followed(drill=drill)
    struck_at = drill.struck_at
    assert struck_at is not None  # A drill in the state STRUCK always has a `struck_at`.
    if record.incident is not None and drill.incident_id == "" and ordered(drill) in record.incident.evidence:
        drill = replace(drill, incident_id=record.incident.id)
    has_trained_on = record.incident is None and record.state in _TRAINS
    if drill.incident_id and (record.incident is None or record.incident.id != drill.incident_id):
        if has_trained_on:
            return ended(DrillState.RECOVERED, DrillOutcome.TRAINED_ON)
        return ended(DrillState.NOT_RECOVERED, _what_came(record))
    if not drill.incident_id and (record.state in ENDED_JOBS or now - struck_at > patience):
        if record.state in ENDED_JOBS and not has_trained_on:
            return ended(DrillState.NOT_RECOVERED, _what_came(record))
        return ended(DrillState.ABSORBED, DrillOutcome.NO_LAUNCH_ENDED)
    return Followed(drill=drill)


def attributed(
    drill: DrillObserved | None,
    generation: int,
    found: tuple[Fault, ...],
    failure: FailureRecord | None = None,
    *,
    reports: Mapping[NodeId, MemberReport] = MappingProxyType({}),
) -> tuple[tuple[Fault, ...], FailureRecord | None]:
    """Return the faults that ended a generation, with the cause DRILL for each consequence of a drill.

    `failure`, which counts towards MaxAttempts, becomes None if the drill directly ended a rank.
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
        # The drill killed the node that held the only copy of the shard, so the drill also caused the loss of the
        # shard.
        followed = set(range(len(found)))
    updated_faults = tuple(
        replace(fault, cause=Cause.DRILL, implicates=None) if number in followed else fault
        for number, fault in enumerate(found)
    )
    drill_fault = Fault(
        cause=Cause.DRILL,
        evidence=ordered(drill),
        at=min(found[number].at for number in followed),
        seen_on=(drill.node_id,),
    )
    is_own = any(fault.cause is Cause.RANK_EXIT and number in at_node for number, fault in enumerate(found))
    return (*updated_faults, drill_fault), None if is_own else failure


def has_struck_rank_ended(drill: DrillObserved, reports: Mapping[NodeId, MemberReport]) -> bool:
    """Return whether an agent reports the end of the rank that the drill killed, not by a halt or with success."""
    report = reports.get(drill.node_id) if drill.kind is DrillKind.KILL_RANK else None
    exits = [rank.exit for rank in report.ranks if rank.rank == drill.rank] if report is not None else []
    return any(each is not None and each.exit_class not in (ExitClass.SUCCESS, ExitClass.HALTED) for each in exits)


def recast(drill: DrillObserved | None, incident: IncidentRecord, found: tuple[Fault, ...]) -> IncidentRecord:
    """Return the incident, with the cause DRILL if the faults from `attributed` show that the drill caused it."""
    # The exit of another rank can open the incident before the struck node reports its own fault.
    if drill is None or incident.generation_before != drill.generation or ordered(drill) in incident.evidence:
        return incident
    if all(fault.cause is not Cause.DRILL for fault in found):
        return incident
    is_of_it = incident.cause is Cause.RANK_EXIT and Cause.RANK_EXIT in EXPLAINS[drill.kind]
    # If the rank ended before the drill injected its fault, the drill is not the cause.
    if drill.kind is DrillKind.KILL_RANK:
        is_of_it = is_of_it and drill.struck_at is not None and incident.failed_at >= drill.struck_at
    return replace(incident, cause=Cause.DRILL) if is_of_it else incident


def ordered(drill: DrillObserved) -> DrillOrdered:
    """Return the evidence that names a drill as the cause of an incident."""
    return DrillOrdered(
        drill_id=drill.id, by=drill.requested_by, drill=drill.kind, node_id=drill.node_id, rank=drill.rank
    )


def _is_explained(drill: DrillObserved, fault: Fault, *, is_struck: bool, has_struck_rank: bool) -> bool:
    """Return whether a fault is the consequence of a drill on the struck node."""
    # AWS may report the end of the drill's instance several generations later.
    if fault.cause not in EXPLAINS[drill.kind] or not (is_struck or drill.kind is DrillKind.TERMINATE_INSTANCE):
        return False
    if fault.cause is Cause.RANK_EXIT and drill.kind is DrillKind.KILL_RANK:
        assert drill.struck_at is not None  # `attributed` ignores drills that have not struck.
        return has_struck_rank and (fault.rank == drill.rank or fault.at >= drill.struck_at)
    if fault.cause is Cause.RANK_EXIT:
        return is_struck and drill.node_id in fault.seen_on
    if fault.unreached == drill.node_id:
        return is_struck
    return _node_of(fault) == drill.node_id


def _node_of(fault: Fault) -> NodeId | None:
    return fault.node_id or (fault.implicates.node_id if fault.implicates is not None else None)


def _what_came(record: JobRecord) -> DrillOutcome:
    if record.state in ENDED_JOBS:
        return DrillOutcome(f"job_{record.state}")
    return DrillOutcome.JOB_PAUSED if record.incident is None else DrillOutcome.OTHER_INCIDENT
