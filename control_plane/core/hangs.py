"""Hangs: rules that decide when agents read the stacks of ranks that stand still, and when a hang ends a generation.

docs/design.md#failures explains the rules.

    limit of a phase        max(a minimum, `FACTOR` × the phase's longest time without progress at this world size)
    first limit             the phase's limit: agents read all stacks, the user gets a warning, time counts as stalled
    second limit            agents read the stacks again, then every `stall_seconds`; a fault if the stacks prove a hang
    last limit              from here on, unchanged stacks prove a hang even if ranks use CPU or GPU

`limits` derives the second and the last limit from the first. A *phase* is what a rank does at the moment: start,
restore, a step, or a phase that the script declares. A script may declare the limit of a phase (`session.phase`), for
ranks that wait on purpose.

Stacks prove a hang in these cases:

    a rank is stopped by a signal                         SIGSTOP, a debugger: it cannot continue by itself
    every live rank is asleep                             same stacks as in the previous reading, idle CPU and GPU
    a rank is asleep, others are two steps ahead          the others train without this rank, so it alone is stuck
    no rank's stack has changed up to the last limit      covers ranks that wait in NCCL, which uses CPU and GPU

If ranks are in different phases, the longest limit of these phases applies to all ranks, because ranks wait for each
other.

Invariant: pure. A rank that advances or changes its stack never counts as hung, nor does a rank that computes before
the last limit. The rules report no fault while a node is silent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from control_plane.core.actions import EventDraft
from control_plane.core.incidents import Fault
from control_plane.core.observed.incidents import FailureRecord
from control_plane.core.observed.jobs import Pace, Suspicion
from control_plane.core.observed.nodes import Cause
from everstep.protocol.agent_messages import FIRST_STEP_PHASE, MemberReport, RankStacks, RankStatus
from everstep.protocol.ids import NodeId, Rank, Step
from everstep.protocol.plan import GenerationPlan, Timeouts

FACTOR = 5.0
"""First limit of a rank's time without progress, as a multiple of the longest such time that the job has had.

A healthy step rarely takes this many times the longest earlier step, snapshots and garbage collection included.
"""
_SECOND = 1.5
_LAST = 3.0
DOWNLOADING = frozenset({"start", "restore"})
"""Phases of a rank's start whose duration depends on caches and downloads.

The durations of earlier starts are therefore poor estimates.
"""
CLOSING = "close"
"""Phase of a rank that calls `close()` at the end of training.

The rank waits until all other ranks have finished training.
"""
IDLE_SHARE = 0.02
"""Share of one CPU's time below which a rank counts as idle."""
LEFT_BEHIND_BOUNDARIES = 2
MAX_GROUPS = 8
"""Maximum number of different stacks that one event or message about a hang lists."""
TRAINS = "trains; "
"""First words of the text that says what a running job does (`JobRecord.reason`), if a rank makes no progress.

A clause about this rank follows. While a hang is suspected, `shown` replaces these words by the time without progress.
"""
PROVEN = "RanksHang"
"""Type of the event in the event history that stores the full stacks of a proven hang."""
_MAX_FRAMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """Limits for a rank's time without progress, in seconds.

    After `first`, agents read the ranks' stacks. After `second`, stacks can prove a hang. After `last`, unchanged
    stacks prove a hang even if ranks use CPU or GPU.
    """

    first: float
    second: float
    last: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The result of `watch`: what one check for hangs found, and what the job loop does next."""

    suspicion: Suspicion | None
    ask: tuple[NodeId, ...] = ()
    """Nodes whose agents the job loop now asks for the stacks of their ranks.

    These agents have not answered the newest request yet.
    """
    faults: tuple[Fault, ...] = ()
    stuck: NodeId | None = None
    """The node for which all other nodes wait. None if the stacks do not identify one node."""
    events: tuple[EventDraft, ...] = ()
    words: str = ""
    """Words about the ranks without progress, for the job's reason text.

    The words contain no elapsed times. Empty if every rank makes progress.
    """


def learned(pace: Pace, world_size: int, reports: Mapping[NodeId, MemberReport]) -> Pace:
    """Return the pace (longest times without progress), updated from the ranks' reports.

    The function drops earlier times that were measured with more or fewer than `world_size` ranks.
    """
    longest = dict(pace.longest) if pace.world_size == world_size else {}
    for report in reports.values():
        for phase, seconds in report.longest.items():
            longest[phase] = max(longest.get(phase, 0.0), seconds)
    return Pace(world_size=world_size, longest=longest)


def limits(phase: str, pace: Pace, timeouts: Timeouts, declared: float = 0.0) -> HangLimits:
    """Return how long a rank may spend in a phase without progress.

    Args:
        phase: the phase, as ranks report it.
        pace: the job's longest times without progress so far.
        timeouts: `stall_seconds`, `hang_seconds` and `new_phase_seconds` are lower bounds of the limits.
        declared: the limit that the script declared for the phase, in seconds. 0 without a declaration.

    Returns:
        The three limits in seconds (see `HangLimits`), with `first` < `second` ≤ `last`.
    """
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

    The job loop calls this function whenever it decides about a running job.

    Args:
        now: Unix seconds.
        reports: the members' reports, of the newest generation.
        pace: the job's longest times without progress so far.
        suspicion: the suspected hang that the job's record contains, or None.
        timeouts: the lower bounds of all limits.
        has_all_reports: whether every member is connected and reports. If not, the result contains no fault, because
            `core.evidence` judges silent members.

    Returns:
        The suspicion to store, requests for stacks, faults and events.
    """
    living = {
        rank.rank: (node, rank)
        for node, report in sorted(reports.items())
        for rank in report.ranks
        if rank.exit is None
    }
    if not has_all_reports:
        return Watched(suspicion=suspicion)
    limit = _common(living, pace, timeouts)
    overdue = {rank: status for rank, (_, status) in living.items() if status.still_seconds > limit.first}
    if any(status.phase != CLOSING for _, status in living.values()):
        overdue = {rank: status for rank, status in overdue.items() if status.phase != CLOSING}
    if not overdue:
        over = (
            EventDraft(
                type="RanksMoveAgain", message=f"every rank makes progress again, after {now - suspicion.since:.0f} s"
            )
            if suspicion
            else None
        )
        return Watched(suspicion=None, events=(over,) if over is not None else (), words=_waits(living, timeouts))
    still = max(status.still_seconds for status in overdue.values())
    if suspicion is None:
        suspicion = Suspicion(since=now - still, began_at=now, number=1, asked_at=now)
    elif suspicion.is_answered and _is_due(now, still, suspicion, limit, timeouts):
        suspicion = replace(suspicion, number=suspicion.number + 1, asked_at=now, is_answered=False)
    suspicion = replace(suspicion, limit_seconds=limit.second)
    words = (
        f"{_named(overdue, living)} made no progress in {_phases(overdue)} for longer than {limit.first:g} s; the "
        "stacks are in the job's events"
    )
    if suspicion.is_answered:
        return Watched(suspicion=suspicion, words=words)
    looks = {
        look.rank: look for report in reports.values() for look in report.stacks if look.number >= suspicion.number
    }
    missing = tuple(dict.fromkeys(node for rank, (node, _) in living.items() if rank not in looks))
    if missing and now - suspicion.asked_at <= timeouts.prepare_deadline_seconds:
        return Watched(suspicion=suspicion, ask=missing, words=words)
    answered = replace(suspicion, is_answered=True)
    proof = _proof(living, overdue, looks, still, limit) if suspicion.number > 1 else ""
    if suspicion.number > 1 and not proof:
        return Watched(suspicion=answered, words=words)
    odd, where = _odd_ones(living, looks)
    standstill = (
        f"{_named(overdue, living)} made no progress in {_phases(overdue)} for {still:.0f} s, the limit is "
        f"{limit.first:g} s"
    )
    event = EventDraft(
        type=PROVEN if proof else "RanksStandStill",
        message="; ".join(part for part in (standstill, proof, where) if part),
        node_id=odd,
        detail={"stacks": _kept(looks)},
    )
    if not proof:
        return Watched(suspicion=answered, events=(event,), words=words)
    evidence = [f"hang: {standstill}: {proof}", where, *_in_brief(looks)]
    # If the stacks identify no single stuck node (`odd`), the fault names no node.
    seen_on = () if odd is None else (odd,)
    # A rank may wait for as long as the script declared. The hang begins only after this time.
    since = suspicion.since + max(status.limit_seconds for status in overdue.values())
    faults = tuple(
        Fault(cause=Cause.HANG, evidence=sentence, at=since, seen_on=seen_on) for sentence in evidence if sentence
    )
    return Watched(suspicion=answered, faults=faults, stuck=odd, events=(event,), words=words)


def shown(reason: str, suspicion: Suspicion | None, now: float) -> str:
    """Return a job's reason text for the API, with the age and limit of a suspected hang.

    The stored reason contains no elapsed time. Otherwise it would change, and be stored again, every second.

    Args:
        reason: the job's reason as stored, without a duration.
        suspicion: the stored suspicion, or None.
        now: Unix seconds.

    Returns:
        One sentence.
    """
    if suspicion is None or not suspicion.limit_seconds:
        return reason
    still = f"no progress for {max(now - suspicion.since, 0.0):.0f} s (limit {suspicion.limit_seconds:.0f} s)"
    return f"{still}: {reason.removeprefix(TRAINS)}"


def stands_still(reports: Mapping[NodeId, MemberReport], pace: Pace, timeouts: Timeouts) -> bool:
    """Return whether any rank has made no progress for so long that agents read its stacks (the first limit).

    Such a rank probably cannot agree with the other ranks on a step at which all stop.
    """
    living = {rank.rank: (node, rank) for node, report in reports.items() for rank in report.ranks if rank.exit is None}
    limit = _common(living, pace, timeouts)
    return any(status.still_seconds > limit.first and status.phase != CLOSING for _, status in living.values())


def promised_seconds(reports: Mapping[NodeId, MemberReport]) -> float:
    """Return the longest limit, in seconds, that the script declared for a phase in which a live rank is now.

    0 without a declaration.
    """
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
    """Return a hang as a failure of the job, which `core.breakers` counts towards MaxAttempts.

    Args:
        plan: the plan of the generation.
        reports: the reports of its members.
        max_boundary: the newest step that any generation has finished.
        at: Unix seconds.
        stuck: the node for which all other nodes wait, or None. `core.breakers` may replace this node.

    Returns:
        A failure at the newest step that all ranks have finished.
    """
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
        first=max((limit.first for limit in each), default=0.0),
        second=max((limit.second for limit in each), default=0.0),
        last=max((limit.last for limit in each), default=0.0),
    )


def _waits(living: Mapping[Rank, tuple[NodeId, RankStatus]], timeouts: Timeouts) -> str:
    """Return a sentence about ranks that wait within a limit that the script or the checkpoint strategy declared.

    Empty while every such wait is shorter than `stall_seconds`.
    """
    at_gate = {
        rank: status
        for rank, (_, status) in living.items()
        if status.limit_seconds and status.still_seconds > timeouts.stall_seconds
    }
    if not at_gate:
        return ""
    limit = max(status.limit_seconds for status in at_gate.values())
    waits = "waits" if len(at_gate) == 1 else "wait"
    return f"{_named(at_gate, living)} {waits} deliberately (phase {_phases(at_gate)}), for at most {limit:g} s"


def _is_due(now: float, still: float, suspicion: Suspicion, limit: HangLimits, timeouts: Timeouts) -> bool:
    return still > limit.second if suspicion.number == 1 else now - suspicion.asked_at > timeouts.stall_seconds


def _proof(
    living: Mapping[Rank, tuple[NodeId, RankStatus]],
    overdue: Mapping[Rank, RankStatus],
    looks: Mapping[Rank, RankStacks],
    still: float,
    limit: HangLimits,
) -> str:
    """Return a clause that says how the stacks prove a hang, that is, that the ranks cannot continue by themselves.

    Return an empty string if the stacks prove nothing.
    """
    stopped = sorted(rank for rank in overdue if rank in looks and looks[rank].is_stopped)
    if stopped:
        return f"{_named(stopped, living)} stopped by a signal"
    asleep = {rank for rank, look in looks.items() if not look.error and _is_idle(look)}
    if asleep >= living.keys():
        return "no stack changed between two stack dumps, and the ranks used neither CPU nor GPU"
    furthest = max(status.boundary for _, status in living.values())
    behind = sorted(
        rank for rank in overdue if rank in asleep and furthest >= overdue[rank].boundary + LEFT_BEHIND_BOUNDARIES
    )
    if behind:
        return f"{_named(behind, living)} asleep with unchanged stacks while other ranks reached step {furthest}"
    unchanged = {rank for rank, look in looks.items() if look.same_seconds > 0 and (not look.error or _is_idle(look))}
    if still > limit.last and unchanged >= living.keys():
        return (
            f"no stack has changed for longer than {limit.last:g} s, although ranks use CPU or GPU: they wait "
            "for each other"
        )
    return ""


def _is_idle(look: RankStacks) -> bool:
    return look.same_seconds > 0 and look.cpu_seconds <= IDLE_SHARE * look.same_seconds and not look.gpu_percent


def _odd_ones(
    living: Mapping[Rank, tuple[NodeId, RankStatus]], looks: Mapping[Rank, RankStacks]
) -> tuple[NodeId | None, str]:
    """Return the node for which all other nodes wait, and a sentence about this node.

    The ranks of such a node are stopped, have finished fewer steps, or have another stack than the majority. Return
    None and an empty sentence if no single node can be identified.
    """
    stopped = [rank for rank, look in looks.items() if look.is_stopped]
    boundaries = {rank: status.boundary for rank, (_, status) in living.items()}
    slowest = [rank for rank, boundary in boundaries.items() if boundary < max(boundaries.values())]
    groups = sorted(_groups(looks).values(), key=len, reverse=True)
    minority = [rank for group in groups[1:] for rank in group] if groups and 2 * len(groups[0]) > len(living) else []
    for odd, how in (
        (stopped, "stopped"),
        (slowest, "at an earlier step than the other ranks"),
        (minority, "at another place in the code than the other ranks"),
    ):
        nodes = {living[rank][0] for rank in odd if rank in living}
        if len(nodes) == 1 and len(odd) < len(living):
            node = nodes.pop()
            return (
                node,
                f"{node} alone is stuck: its rank{'s' if len(odd) > 1 else ''} {_list(odd)} "
                f"{'are' if len(odd) > 1 else 'is'} {how}",
            )
    return None, ""


def _groups(looks: Mapping[Rank, RankStacks]) -> dict[str, list[Rank]]:
    """Return the ranks by the stack of their main thread, so that ranks with equal stacks share one entry."""
    groups: dict[str, list[Rank]] = {}
    for rank, look in sorted(looks.items()):
        groups.setdefault(_main(look) or look.error, []).append(rank)
    return groups


def _main(look: RankStacks) -> str:
    lines = look.text.splitlines()
    end = next((number for number, line in enumerate(lines[1:], 1) if not line.startswith(" ")), len(lines))
    return "\n".join(lines[:end])


def _in_brief(looks: Mapping[Rank, RankStacks]) -> tuple[str, ...]:
    groups = sorted(_groups(looks).items(), key=lambda item: (-len(item[1]), item[1]))[:MAX_GROUPS]
    return tuple(f"{_rank_word(ranks)} {_list(ranks)}: {_frames(place)}" for place, ranks in groups)


def _frames(place: str) -> str:
    lines = place.splitlines()
    frames = [line.strip() for line in lines[1:]]
    if not frames:
        return place or "no Python stack"
    return " < ".join([*frames[:_MAX_FRAMES], *(["…"] if len(frames) > _MAX_FRAMES else [])])


def _kept(looks: Mapping[Rank, RankStacks]) -> list[dict[str, object]]:
    """Return the full stacks for the event about a hang, as JSON values."""
    kept: dict[str, list[Rank]] = {}
    for rank, look in sorted(looks.items()):
        kept.setdefault(look.text or f"(not read: {look.error})", []).append(rank)
    most = sorted(kept.items(), key=lambda item: (-len(item[1]), item[1]))[:MAX_GROUPS]
    return [{"ranks": [int(rank) for rank in ranks], "text": text} for text, ranks in most]


def _named(ranks: Mapping[Rank, RankStatus] | Sequence[Rank], living: Mapping[Rank, tuple[NodeId, RankStatus]]) -> str:
    if len(ranks) == len(living) and len(ranks) > 1:
        return f"all {len(ranks)} ranks"
    nodes = dict.fromkeys(living[rank][0] for rank in sorted(ranks))
    return f"{_rank_word(ranks)} {_list(sorted(ranks))} on {', '.join(nodes)}"


def _rank_word(ranks: Mapping[Rank, RankStatus] | Sequence[Rank]) -> str:
    return "rank" if len(ranks) == 1 else "ranks"


def _list(ranks: Sequence[Rank]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))


def _phases(overdue: Mapping[Rank, RankStatus]) -> str:
    return ", ".join(sorted({status.phase.replace("_", " ") for status in overdue.values()}))
