"""The life of an incident: opened, made worse, replaced, restored, reworked, closed.

    failed_at ── detect ── opened_at ── replace ── replaced_at ── restore ── restored_at ── rework ── closed_at

Invariant: the four phases are the intervals between five moments in order, so they always add up to the interruption.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby

from control_plane.core.observed.incidents import IncidentRecord
from control_plane.core.observed.nodes import Cause, Implication
from control_plane.core.states import INCIDENT_TRANSITIONS, IncidentEvent, IncidentState, advance
from everstep.protocol.ids import Generation, NodeId, Rank, RunId, Step

_GRAVITY = tuple(Cause)
_ABSENCE = "no control plane was at work"
PHASES = ("detect", "replace", "restore", "rework")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that ends a generation."""

    cause: Cause
    evidence: str
    at: float
    """Unix seconds: when it happened, as well as anybody knows."""
    node_id: NodeId | None = None
    """The node that is lost; None when no node is."""
    seen_on: tuple[NodeId, ...] = ()
    """Where else it happened: the nodes whose ranks, agents or links showed it, whether or not they are lost by it."""
    implicates: Implication | None = None
    """The node that it speaks against, lost or not; its incident is named once there is one."""
    rank: Rank | None = None
    """The rank that ended; None where it is about none."""
    unreached: NodeId | None = None
    """The node that others could not reach, which may be as alive as they are."""


def incident_id(run: RunId, generation: Generation) -> str:
    """Return the id of the incident that ended a generation: the same for everybody who finds it."""
    return f"inc-{run[:12]}-{generation}"


def opened(
    run: RunId,
    generation: Generation,
    faults: tuple[Fault, ...],
    *,
    decision: str,
    reason: str,
    reached: Step,
    now: float,
) -> IncidentRecord:
    """Return a new incident.

    Args:
        run: of the job.
        generation: that failed.
        faults: what ended it; not empty.
        decision: what is done about it, a sentence.
        reason: why that, a sentence.
        reached: the highest boundary known.
        now: Unix seconds.

    Returns:
        REPLACING; it failed at the earliest of the faults, and the gravest one names it.
    """
    first = min(fault.at for fault in faults)
    incident = IncidentRecord(
        id=incident_id(run, generation),
        state=IncidentState.REPLACING,
        cause=faults[0].cause,
        evidence=(),
        decision=decision,
        reason=reason,
        generation_before=generation,
        failed_at=min(first, now),
        opened_at=now,
        reached_step=reached,
    )
    return with_faults(incident, faults)


def with_faults(incident: IncidentRecord, faults: tuple[Fault, ...]) -> IncidentRecord:
    """Add evidence found later; the gravest cause names the incident, each fact is told once, nodes are listed in the order found."""
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
            failed_at=min(incident.failed_at, fault.at),
        )
    return incident


def with_absence(incident: IncidentRecord, unwatched: tuple[float, float] | None) -> IncidentRecord:
    """Add that nobody was there to notice, and for how long between failure and detection; told anew where it failed earlier than thought."""
    since, until = unwatched or (0.0, 0.0)
    away = min(until, incident.opened_at) - max(since, incident.failed_at)
    if away < 1:
        return incident
    words = f"{_ABSENCE} for {away:.0f} s, until {datetime.fromtimestamp(until, UTC):%H:%M:%S} UTC"
    return replace(incident, evidence=(*(each for each in incident.evidence if not each.startswith(_ABSENCE)), words))


def moved(incident: IncidentRecord, event: IncidentEvent, now: float) -> IncidentRecord:
    """Return the incident after `event`, its moment noted.

    Args:
        incident: not closed.
        event: what has happened.
        now: Unix seconds, the moment that is noted.

    Returns:
        The incident in its next state.

    Raises:
        InvalidTransition: the incident is not in a state that the event can leave.
    """
    state = advance(INCIDENT_TRANSITIONS, f"incident {incident.id}", incident.state, event, incident.evidence)
    match event:
        case IncidentEvent.NODES_THERE:
            return replace(incident, state=state, replaced_at=now)
        case IncidentEvent.TRAINING_AGAIN:
            return replace(incident, state=state, restored_at=now)
        case IncidentEvent.FAILED_AGAIN:
            return replace(incident, state=state, replaced_at=None, restored_at=None)
        case IncidentEvent.CAUGHT_UP | IncidentEvent.JOB_ENDED:
            return replace(incident, state=state, closed_at=now)


def moment_of(
    step: Step, before: tuple[Step, float | None], after: tuple[Step, float | None], *, earliest: float, now: float
) -> float:
    """Return when a step was finished, as far as stamps of steps around it tell: reports come once a second, steps may take much less.

    Args:
        step: finished by now.
        before: a step that was told earlier, and when it was finished, Unix seconds; None: nobody knows.
        after: the newest, not below `step`, likewise.
        earliest: the moment cannot lie before it: stamps are of another machine's clock.
        now: nor after this; it stands where nobody knows better.

    Returns:
        Unix seconds, on the line between both where both are known.
    """
    (low, low_at), (high, high_at) = before, after
    if high_at is None:
        return now
    is_between = low_at is not None and low < step < high and low_at < high_at
    at = low_at + (high_at - low_at) * (step - low) / (high - low) if is_between and low_at is not None else high_at
    return max(earliest, min(now, at))


def lost_steps(incident: IncidentRecord) -> int | None:
    """Return how many steps are made twice: the highest boundary before the failure minus the base; None before the base is known."""
    return None if incident.from_step is None else max(0, incident.reached_step - incident.from_step)


def runs_of(sources: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Return where each rank's shard came from, by rank, run-length encoded: ten thousand ranks are a line, not a page."""
    return tuple((source, sum(1 for _ in same)) for source, same in groupby(sources))


def phase_moments(incident: IncidentRecord, now: float) -> tuple[float, ...]:
    """Return the five moments between which the phases lie, in order, Unix seconds; one that has not come yet counts as `now`."""
    moments = [incident.failed_at]
    end = incident.closed_at if incident.closed_at is not None else now
    for moment in (incident.opened_at, incident.replaced_at, incident.restored_at, incident.closed_at):
        moments.append(max(moments[-1], min(end, end if moment is None else moment)))
    return tuple(moments)


def phase_seconds(incident: IncidentRecord, now: float) -> Mapping[str, float]:
    """Return the length of each phase by `<phase>_seconds`; of one that has not begun, 0.

    They add up to the interruption so far.
    """
    moments = phase_moments(incident, now)
    return {
        f"{phase}_seconds": later - earlier for phase, earlier, later in zip(PHASES, moments, moments[1:], strict=False)
    }
