"""The lifecycle of an incident, from the first fault until training again reaches the step before the failure.

    failed_at ── detect ── opened_at ── replace ── replaced_at ── restore ── restored_at ── rework ── closed_at

Invariant: the phases are the intervals between five ordered times, so their lengths add up to the interruption.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

from control_plane.core.observed.facts import ControlPlaneAbsent, Fact
from control_plane.core.observed.incidents import IncidentRecord, Response
from control_plane.core.observed.nodes import Cause, Implication
from control_plane.core.states import INCIDENT_TRANSITIONS, IncidentEvent, IncidentState, advance
from everstep.protocol.ids import Generation, NodeId, Rank, RunId, Step

_GRAVITY = tuple(Cause)
PHASES = ("detect", "replace", "restore", "rework")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault that ends a generation."""

    cause: Cause
    evidence: Fact
    at: float
    """Unix seconds, by the best estimate."""
    node_id: NodeId | None = None
    seen_on: tuple[NodeId, ...] = ()
    """Nodes whose ranks, agents or connections showed the fault, whether or not these nodes are lost."""
    implicates: Implication | None = None
    """The entry for the fault history of the node involved, whether or not the node is lost."""
    rank: Rank | None = None
    unreached: NodeId | None = None
    """A node that other members could not reach, but that may be alive."""


def incident_id(run: RunId, generation: Generation) -> str:
    """Return the id of a generation's incident, which is the same on all control-plane servers."""
    return f"inc-{run[:12]}-{generation}"


def opened(
    run: RunId,
    generation: Generation,
    faults: tuple[Fault, ...],
    *,
    decision: Response,
    reached: Step,
    now: float,
    earliest: float = 0.0,
) -> IncidentRecord:
    """Return a new incident in the state REPLACING, which failed at the earliest fault, but not before `earliest`."""
    now = max(now, earliest)  # The clock may have stepped back.
    incident = IncidentRecord(
        id=incident_id(run, generation),
        state=IncidentState.REPLACING,
        cause=faults[0].cause,
        evidence=(),
        decision=decision,
        generation_before=generation,
        failed_at=now,
        opened_at=now,
        reached_step=reached,
        earliest_failure_at=earliest,
    )
    return with_faults(incident, faults)


def with_faults(incident: IncidentRecord, faults: tuple[Fault, ...]) -> IncidentRecord:
    """Return the incident with the evidence and the nodes of further faults, and with the most severe cause."""
    for fault in faults:
        where = (*(() if fault.node_id is None else (fault.node_id,)), *fault.seen_on)
        left = () if fault.node_id is None or fault.node_id in incident.instance_ids else (fault.node_id,)
        incident = replace(
            incident,
            cause=max(incident.cause, fault.cause, key=_GRAVITY.index),
            evidence=incident.evidence if fault.evidence in incident.evidence else (*incident.evidence, fault.evidence),
            instance_ids=(*incident.instance_ids, *left),
            faulted_instance_ids=tuple(dict.fromkeys((*incident.faulted_instance_ids, *where))),
            lost_node_count=incident.lost_node_count + (len(left) if fault.cause.takes_nodes else 0),
        )
        incident = with_failure_at(incident, fault.at)
    return incident


def with_failure_at(incident: IncidentRecord, at: float) -> IncidentRecord:
    """Return the incident with the earlier of its failure time and `at`, but not before `earliest_failure_at`."""
    return replace(incident, failed_at=max(incident.earliest_failure_at, min(incident.failed_at, at)))


def ended_by_failure(incident: IncidentRecord, failed_at: float) -> IncidentRecord:
    """Return the incident, closed at the latest at `failed_at`, the failure that opens the job's next incident."""
    if incident.state is not IncidentState.CLOSED:
        incident = moved(incident, IncidentEvent.JOB_ENDED, failed_at)
    restored_at, closed_at = incident.restored_at, incident.closed_at
    # Without the ranks' time stamps, the end of the recovery is the arrival of a report, which can follow the next
    # failure.
    return replace(
        incident,
        is_given_up=False,  # Training ran again, and the next incident measures the rest of the recovery.
        restored_at=None if restored_at is None else min(restored_at, failed_at),
        closed_at=None if closed_at is None else min(closed_at, failed_at),
    )


def with_absence(incident: IncidentRecord, unwatched: tuple[float, float] | None) -> IncidentRecord:
    """Return the incident, with a note if no control plane was active between the failure and its detection."""
    if unwatched is None:
        return incident
    since, until = unwatched
    away = min(until, incident.opened_at) - max(since, incident.failed_at)
    if away < 1:
        return incident
    others = (each for each in incident.evidence if not isinstance(each, ControlPlaneAbsent))
    return replace(incident, evidence=(*others, ControlPlaneAbsent(seconds=round(away), until=until)))


def absent_seconds(evidence: Iterable[Fact]) -> float | None:
    """Return the seconds after the failure without an active control plane, or None."""
    return next((each.seconds for each in evidence if isinstance(each, ControlPlaneAbsent)), None)


def moved(incident: IncidentRecord, event: IncidentEvent, now: float) -> IncidentRecord:
    """Return the incident in its next state after `event`, with the time of the transition in Unix seconds.

    Raises InvalidTransition if the incident's state has no transition for this event.
    """
    story = tuple(type(each).__name__ for each in incident.evidence)
    state = advance(INCIDENT_TRANSITIONS, f"incident {incident.id}", incident.state, event, story)
    match event:
        case IncidentEvent.NODES_THERE:
            return replace(incident, state=state, replaced_at=now)
        case IncidentEvent.TRAINING_AGAIN:
            return replace(incident, state=state, restored_at=now)
        case IncidentEvent.FAILED_AGAIN:
            return replace(incident, state=state, replaced_at=None, restored_at=None)
        case IncidentEvent.CAUGHT_UP | IncidentEvent.JOB_ENDED:
            return replace(incident, state=state, closed_at=now, is_given_up=event is IncidentEvent.JOB_ENDED)


def moment_of(
    step: Step, before: tuple[Step, float | None], after: tuple[Step, float | None], *, earliest: float, now: float
) -> float:
    """Return the estimated Unix time at which a step was finished, from the times of an earlier and a later step.

    `earliest` and `now` bound the result, because the known times come from other machines' clocks.
    """
    (low, low_at), (high, high_at) = before, after
    if high_at is None:
        return now
    # Agents report once a second, and steps may be much shorter.
    is_between = low_at is not None and low < step < high and low_at < high_at
    at = low_at + (high_at - low_at) * (step - low) / (high - low) if is_between and low_at is not None else high_at
    return max(earliest, min(now, at))


def lost_steps(incident: IncidentRecord) -> int | None:
    """Return the number of steps that training repeats. None until the control plane has chosen the step to restore."""
    return None if incident.from_step is None else max(0, incident.reached_step - incident.from_step)


def runs_of(sources: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Return the source of each rank's shard, in the order of ranks, run-length encoded."""
    return tuple((source, sum(1 for _ in same)) for source, same in groupby(sources))


class Interruption(Protocol):
    """The five times that delimit an incident's phases, in Unix seconds. The end of an unfinished phase is None."""

    @property
    def failed_at(self) -> float:
        """Unix seconds."""
        ...

    @property
    def opened_at(self) -> float:
        """Detection of the failure."""
        ...

    @property
    def replaced_at(self) -> float | None:
        """All nodes for the restart are ready."""
        ...

    @property
    def restored_at(self) -> float | None:
        """All ranks have restored their state, and a rank has completed a new step."""
        ...

    @property
    def closed_at(self) -> float | None:
        """Training has caught up, or the job ended."""
        ...


def phase_moments(incident: Interruption, now: float) -> tuple[float, ...]:
    """Return the five ordered times that delimit an incident's phases, in Unix seconds.

    A time that is missing or later counts as `now`, or as the end of a closed incident.
    """
    moments = [incident.failed_at]
    end = incident.closed_at if incident.closed_at is not None else now
    for moment in (incident.opened_at, incident.replaced_at, incident.restored_at, incident.closed_at):
        moments.append(max(moments[-1], min(end, end if moment is None else moment)))
    return tuple(moments)


def phase_seconds(incident: IncidentRecord, now: float) -> Mapping[str, float]:
    """Return the length of each phase by `<phase>_seconds`."""
    moments = phase_moments(incident, now)
    return {
        f"{phase}_seconds": later - earlier for phase, earlier, later in zip(PHASES, moments, moments[1:], strict=False)
    }
