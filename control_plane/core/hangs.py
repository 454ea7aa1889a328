"""Hangs: rules that decide when agents read the stacks of ranks that stand still, and when a hang ends a generation.

    limit of a phase        max(a minimum, `FACTOR` × the phase's longest time without progress at this world size)
    first limit             the phase's limit: agents read all stacks, the user gets a warning, time counts as stalled
    second limit            agents read the stacks again, then every `stall_seconds`; a fault if the stacks prove a hang
    last limit              from here on, unchanged stacks prove a hang even if ranks use CPU or GPU

Stacks prove a hang in these cases (docs/design.md#failures):

    a rank is stopped by a signal                         SIGSTOP, a debugger: it cannot continue by itself
    every live rank is asleep                             same stacks as in the previous reading, idle CPU and GPU
    a rank is asleep, others are two steps ahead          the others train without this rank, so it alone is stuck
    no rank's stack has changed up to the last limit      covers ranks that wait in NCCL, which uses CPU and GPU

Invariant: pure. A rank that advances or changes its stack never counts as hung, nor does a rank that computes before
the last limit. The rules report no fault while a node is silent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import inf

import msgspec

from control_plane.core.actions import EventDraft
from control_plane.core.incidents import Fault
from control_plane.core.observed.facts import AloneStuck, HangProof, Oddity, RanksOnNodes, SameStack, Standstill
from control_plane.core.observed.incidents import FailureRecord
from control_plane.core.observed.jobs import Pace, Suspicion
from control_plane.core.observed.nodes import Cause
from control_plane.core.observed.reasons import HangFound, JobFact, JobNote, StandsStill, WaitsDeliberately
from everstep.protocol.agent_messages import FIRST_STEP_PHASE, MemberReport, RankStacks, RankStatus
from everstep.protocol.ids import NodeId, Rank, Step
from everstep.protocol.plan import GenerationPlan, Timeouts

FACTOR = 5.0
"""A healthy step rarely takes this many times the longest earlier one, snapshots and garbage collection included."""
_SECOND = 1.5
_LAST = 3.0
DOWNLOADING = frozenset({"start", "restore"})
"""Phases whose duration depends on caches and downloads, so that earlier starts are poor estimates."""
CLOSING = "close"
"""Phase of a rank that calls `close()` and waits until all other ranks have finished training."""
REHEARSE = "rehearse"
"""Phase of a rank that repeats steps of a rehearsal. The rank declares a limit."""
IDLE_SHARE = 0.02
LEFT_BEHIND_BOUNDARIES = 2
MAX_GROUPS = 8
PROVEN = "RanksHang"
"""Type of the event that stores the full stacks of a proven hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """Limits for a rank's time without progress, in seconds."""

    first: float
    second: float
    last: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The result of one check for hangs, with the next actions of the job loop."""

    suspicion: Suspicion | None
    ask: tuple[NodeId, ...] = ()
    faults: tuple[Fault, ...] = ()
    stuck: NodeId | None = None
    """The node for which all other nodes wait. None if the stacks do not identify one node."""
    events: tuple[EventDraft, ...] = ()
    still: StandsStill | WaitsDeliberately | None = None
    """The ranks without progress, without elapsed times. None if every rank makes progress."""


def learned(pace: Pace, world_size: int, reports: Mapping[NodeId, MemberReport]) -> Pace:
    """Return the longest times without progress, updated from the reports, at this world size only."""
    longest = dict(pace.longest) if pace.world_size == world_size else {}
    for report in reports.values():
        for phase, seconds in report.longest.items():
            longest[phase] = max(longest.get(phase, 0.0), seconds)
    return Pace(world_size=world_size, longest=longest)


def limits(phase: str, pace: Pace, timeouts: Timeouts, declared: float = 0.0) -> HangLimits:
    """Return how long a rank may spend in a phase without progress."""
    if declared:
        first = max(timeouts.stall_seconds, declared)
        return HangLimits(first=first, second=first + timeouts.hang_seconds, last=first + timeouts.new_phase_seconds)
    longest = pace.longest.get(phase)
    floor = timeouts.new_phase_seconds if longest is None or phase in DOWNLOADING else timeouts.stall_seconds
    # The first step may compile the model. Its limit therefore follows from the longest time without progress in any
    # of three phases: start, first step and training.
    if phase == FIRST_STEP_PHASE and longest is not None:
        longest = max(longest, *(pace.longest.get(other, 0.0) for other in ("start", "train")))
    first = max(floor, FACTOR * (longest or 0.0))
    second = max(timeouts.hang_seconds, _SECOND * first)
    return HangLimits(first=first, second=second, last=max(timeouts.new_phase_seconds, _LAST * first))


def watch(
    now: float,
    reports: Mapping[NodeId, MemberReport],
    pace: Pace,
    suspicion: Suspicion | None,
    timeouts: Timeouts,
    *,
    has_all_reports: bool,
) -> Watched:
    """Check whether ranks stand still, and return the requests for stacks, faults and events that follow.

    Without `has_all_reports`, the result has no fault, because `core.evidence` judges silence.
    """
    living = {
        rank.rank: (node, rank)
        for node, report in sorted(reports.items())
        for rank in report.ranks
        if rank.exit is None
    }
    if not has_all_reports:
        return Watched(suspicion=suspicion)
    # Ranks wait for each other, so the longest limit of their phases applies to all.
    limit = _common(living, pace, timeouts)
    overdue = {rank: status for rank, (_, status) in living.items() if status.still_seconds > limit.first}
    if any(status.phase != CLOSING for _, status in living.values()):
        overdue = {rank: status for rank, status in overdue.items() if status.phase != CLOSING}
    if not overdue:
        over = (
            EventDraft(
                type="RanksMoveAgain",
                message=JobNote(what=JobFact.PROGRESSES_AGAIN, seconds=now - suspicion.since),
            )
            if suspicion
            else None
        )
        return Watched(suspicion=None, events=(over,) if over is not None else (), still=_waits(living, timeouts))
    still = max(status.still_seconds for status in overdue.values())
    if suspicion is None:
        suspicion = Suspicion(since=now - still, began_at=now, number=1, asked_at=now)
    elif suspicion.is_answered and _is_due(now, still, suspicion, limit, timeouts):
        suspicion = replace(suspicion, number=suspicion.number + 1, asked_at=now, is_answered=False)
    suspicion = replace(suspicion, limit_seconds=limit.second)
    stuck, phases = _ranks(overdue, living), _phases(overdue)
    disposition = StandsStill(stuck=stuck, phases=phases, limit_seconds=limit.first)
    if suspicion.is_answered:
        return Watched(suspicion=suspicion, still=disposition)
    looks = {
        look.rank: look for report in reports.values() for look in report.stacks if look.number >= suspicion.number
    }
    missing = tuple(dict.fromkeys(node for rank, (node, _) in living.items() if rank not in looks))
    if missing and now - suspicion.asked_at <= timeouts.prepare_deadline_seconds:
        return Watched(suspicion=suspicion, ask=missing, still=disposition)
    answered = replace(suspicion, is_answered=True)
    fact = Standstill(stuck=stuck, phases=phases, limit_seconds=limit.first, seconds=round(still))
    fact = _proven(fact, living, overdue, looks, still, limit) if suspicion.number > 1 else fact
    if suspicion.number > 1 and fact.proof is None:
        return Watched(suspicion=answered, still=disposition)
    alone = _alone(living, looks)
    event = EventDraft(
        type="RanksStandStill" if fact.proof is None else PROVEN,
        message=HangFound(fact=fact, alone=alone),
        node_id=None if alone is None else alone.node_id,
        detail={"stacks": _kept(looks)},
    )
    if fact.proof is None:
        return Watched(suspicion=answered, events=(event,), still=disposition)
    # If the stacks identify no single stuck node, the fault names no node.
    seen_on = () if alone is None else (alone.node_id,)
    evidence = (fact, *(() if alone is None else (alone,)), *_in_brief(looks))
    # A rank may wait for as long as the script declared. The hang begins only after this time.
    since = suspicion.since + max(status.limit_seconds for status in overdue.values())
    faults = tuple(Fault(cause=Cause.HANG, evidence=each, at=since, seen_on=seen_on) for each in evidence)
    return Watched(
        suspicion=answered,
        faults=faults,
        stuck=event.node_id,
        events=(event,),
        still=disposition,
    )


def stands_still(reports: Mapping[NodeId, MemberReport], pace: Pace, timeouts: Timeouts) -> bool:
    """Return whether any rank has passed the first limit. It probably cannot agree with the others on a stop."""
    living = {rank.rank: (node, rank) for node, report in reports.items() for rank in report.ranks if rank.exit is None}
    limit = _common(living, pace, timeouts)
    return any(status.still_seconds > limit.first and status.phase != CLOSING for _, status in living.values())


def promised_seconds(reports: Mapping[NodeId, MemberReport]) -> float:
    """Return the longest limit that the script declared for the phase of a live rank, in seconds, or 0."""
    return max(
        (rank.limit_seconds for report in reports.values() for rank in report.ranks if rank.exit is None), default=0.0
    )


def failure(
    plan: GenerationPlan,
    reports: Mapping[NodeId, MemberReport],
    max_boundary: Step,
    at: float,
    *,
    stuck: NodeId | None = None,
) -> FailureRecord:
    """Return a hang as a failure at the newest step that all ranks have finished, which counts towards MaxAttempts."""
    stood = min((rank.boundary for report in reports.values() for rank in report.ranks), default=Step(-1))
    return FailureRecord(
        generation=plan.generation,
        step=stood,
        exit_class=None,
        code=0,
        at=at,
        max_boundary=max_boundary,
        is_hang=True,
        node_id=stuck,
        base_step=plan.base_step,
    )


def _common(living: Mapping[Rank, tuple[NodeId, RankStatus]], pace: Pace, timeouts: Timeouts) -> HangLimits:
    each = [
        limits(phase, pace, timeouts, declared_seconds)
        for phase, declared_seconds in {(status.phase, status.limit_seconds) for _, status in living.values()}
    ]
    return HangLimits(
        first=max((limit.first for limit in each), default=inf),
        second=max((limit.second for limit in each), default=inf),
        last=max((limit.last for limit in each), default=inf),
    )


def _waits(living: Mapping[Rank, tuple[NodeId, RankStatus]], timeouts: Timeouts) -> WaitsDeliberately | None:
    at_gate = {
        rank: status
        for rank, (_, status) in living.items()
        if status.limit_seconds and status.still_seconds > timeouts.stall_seconds and status.phase != REHEARSE
    }
    if not at_gate:
        return None
    limit = max(status.limit_seconds for status in at_gate.values())
    return WaitsDeliberately(waiting=_ranks(at_gate, living), phases=_phases(at_gate), limit_seconds=limit)


def _is_due(now: float, still: float, suspicion: Suspicion, limit: HangLimits, timeouts: Timeouts) -> bool:
    return still > limit.second if suspicion.number == 1 else now - suspicion.asked_at > timeouts.stall_seconds


def _proven(
    fact: Standstill,
    living: Mapping[Rank, tuple[NodeId, RankStatus]],
    overdue: Mapping[Rank, RankStatus],
    looks: Mapping[Rank, RankStacks],
    still: float,
    limit: HangLimits,
) -> Standstill:
    """Return the standstill with the way in which the stacks prove a hang, or unchanged."""
    stopped = sorted(rank for rank in overdue if rank in looks and looks[rank].is_stopped)
    if stopped:
        return msgspec.structs.replace(fact, proof=HangProof.STOPPED, proven=_ranks(stopped, living))
    asleep = {rank for rank, look in looks.items() if not look.error and _is_idle(look)}
    if asleep >= living.keys():
        return msgspec.structs.replace(fact, proof=HangProof.ASLEEP)
    furthest = max(status.boundary for _, status in living.values())
    behind = sorted(
        rank for rank in overdue if rank in asleep and furthest >= overdue[rank].boundary + LEFT_BEHIND_BOUNDARIES
    )
    if behind:
        return msgspec.structs.replace(
            fact, proof=HangProof.LEFT_BEHIND, proven=_ranks(behind, living), reached_step=furthest
        )
    unchanged = {rank for rank, look in looks.items() if look.same_seconds > 0 and (not look.error or _is_idle(look))}
    if still > limit.last and unchanged >= living.keys():
        return msgspec.structs.replace(fact, proof=HangProof.UNCHANGED, last_limit_seconds=limit.last)
    return fact


def _is_idle(look: RankStacks) -> bool:
    return look.same_seconds > 0 and look.cpu_seconds <= IDLE_SHARE * look.same_seconds and not look.gpu_percent


def _alone(living: Mapping[Rank, tuple[NodeId, RankStatus]], looks: Mapping[Rank, RankStacks]) -> AloneStuck | None:
    """Return the one node whose ranks are stopped, behind, or elsewhere than the majority, or None."""
    stopped = [rank for rank, look in looks.items() if look.is_stopped]
    boundaries = {rank: status.boundary for rank, (_, status) in living.items()}
    slowest = [rank for rank, boundary in boundaries.items() if boundary < max(boundaries.values())]
    groups = sorted(_groups(looks).values(), key=len, reverse=True)
    minority = [rank for group in groups[1:] for rank in group] if groups and 2 * len(groups[0]) > len(living) else []
    for odd, how in ((stopped, Oddity.STOPPED), (slowest, Oddity.BEHIND), (minority, Oddity.ELSEWHERE)):
        nodes = {living[rank][0] for rank in odd if rank in living}
        if len(nodes) == 1 and len(odd) < len(living):
            return AloneStuck(node_id=nodes.pop(), ranks=tuple(sorted(odd)), how=how)
    return None


def _groups(looks: Mapping[Rank, RankStacks]) -> dict[str, list[Rank]]:
    groups: dict[str, list[Rank]] = {}
    for rank, look in sorted(looks.items()):
        groups.setdefault(_main(look) or look.error, []).append(rank)
    return groups


def _main(look: RankStacks) -> str:
    lines = look.text.splitlines()
    end = next((number for number, line in enumerate(lines[1:], 1) if not line.startswith(" ")), len(lines))
    return "\n".join(lines[:end])


def _in_brief(looks: Mapping[Rank, RankStacks]) -> tuple[SameStack, ...]:
    groups = sorted(_groups(looks).items(), key=lambda item: (-len(item[1]), item[1]))[:MAX_GROUPS]
    return tuple(SameStack(ranks=tuple(ranks), text=place) for place, ranks in groups)


def _kept(looks: Mapping[Rank, RankStacks]) -> list[dict[str, object]]:
    kept: dict[str, list[Rank]] = {}
    for rank, look in sorted(looks.items()):
        kept.setdefault(look.text or f"(not read: {look.error})", []).append(rank)
    most = sorted(kept.items(), key=lambda item: (-len(item[1]), item[1]))[:MAX_GROUPS]
    return [{"ranks": [int(rank) for rank in ranks], "text": text} for text, ranks in most]


def _ranks(ranks: Collection[Rank], living: Mapping[Rank, tuple[NodeId, RankStatus]]) -> RanksOnNodes:
    nodes = dict.fromkeys(living[rank][0] for rank in sorted(ranks))
    return RanksOnNodes(tuple(sorted(ranks)), tuple(nodes), are_all=len(ranks) == len(living) and len(ranks) > 1)


def _phases(overdue: Mapping[Rank, RankStatus]) -> tuple[str, ...]:
    return tuple(sorted({status.phase.replace("_", " ") for status in overdue.values()}))
