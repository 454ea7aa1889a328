"""Ranks that stand still: when that is worth a look, and when it is a fault (docs/design.md#failures).

    a phase has a limit     max(a floor, `FACTOR` × the longest that this job has ever stood still in it at this world size)
    first limit             every rank's stacks are taken, the user is warned, time counts as stalled; nobody is touched
    second limit            another look, and then one every `stall_seconds`; a fault if the looks prove it

A script may tell a limit itself (`session.phase`): what stands still on purpose is no hang before it. It is a promise,
not a measure, so that no factor applies and nothing is learned from it.

A look proves a hang when

    a rank is stopped by a signal                                   SIGSTOP, a debugger: it will do nothing by itself
    every rank that lives is asleep                                 stacks as at the look before, CPU and GPU idle since
    a rank is asleep and others have passed two boundaries more     they do not wait for it, it waits for nobody
    no stack of any rank has changed up to the last limit           waiting can be busy: NCCL spins on CPU and GPU

The longest limit of all phases that ranks are in holds for all: while one evaluates, the others wait for it. Start and
restore happen once in a launch and depend on caches and downloads more than on the job, so their floor is that of a
phase never seen. The first step of a later generation is judged by the longest start, first step and step of the
earlier ones: a repeated hang is found as soon as the first one.

Invariant: pure; a rank that moves, computes or runs through different code is never a hang, and nothing is judged while
a node is silent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from control_plane.core.actions import EventDraft
from control_plane.core.incidents import Fault
from control_plane.core.observed.incidents import FailureRecord
from control_plane.core.observed.jobs import Pace, Suspicion
from control_plane.core.observed.nodes import Cause
from everstep.protocol.agent_messages import MemberReport, RankStacks, RankStatus
from everstep.protocol.ids import NodeId, Rank, Step
from everstep.protocol.plan import GenerationPlan, Timeouts

FACTOR = 5.0
"""A step five times as long as the longest so far is worth a look; a job's steps differ by less as a rule, saving and garbage included."""
_SECOND = 1.5
_LAST = 3.0
"""The second and the last limit, times the first."""
FIRST_STEP = "first_step"
DOWNLOADING = frozenset({"start", "restore"})
"""Phases of a launch whose length depends on caches and downloads."""
CLOSING = "close"
"""A rank that closes waits for all others, however long they train on."""
IDLE_SHARE = 0.02
"""A sleeping rank's own threads use less than this of one CPU."""
LEFT_BEHIND_BOUNDARIES = 2
MAX_GROUPS = 8
"""Of different stacks that are kept of a look; more differ in detail only."""
TRAINS = "trains; "
"""Begins the stored reason of a job that trains, where there is more to say."""
PROVEN = "RanksHang"
"""Type of the event that has the stacks which an incident's evidence tells in brief: they are kept there alone."""
_FRAMES_TOLD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a rank may stand still, seconds."""

    first: float
    second: float
    last: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What follows from a pass's look at the clocks."""

    suspicion: Suspicion | None
    ask: tuple[NodeId, ...] = ()
    """Who is to take the look `suspicion.number`."""
    faults: tuple[Fault, ...] = ()
    stuck: NodeId | None = None
    """The node that alone is stuck while the others wait for it, if it can be told."""
    events: tuple[EventDraft, ...] = ()
    words: str = ""
    """For the job's reason, without running figures; empty when nothing stands still."""


def learned(pace: Pace, world_size: int, reports: Mapping[NodeId, MemberReport]) -> Pace:
    """Return the pace with what ranks have reported; one of another world size says nothing about this one."""
    longest = dict(pace.longest) if pace.world_size == world_size else {}
    for report in reports.values():
        for phase, seconds in report.longest.items():
            longest[phase] = max(longest.get(phase, 0.0), seconds)
    return Pace(world_size=world_size, longest=longest)


def limits(phase: str, pace: Pace, timeouts: Timeouts, told: float = 0.0) -> Limits:
    """Return a phase's limits.

    Args:
        phase: as ranks report it.
        pace: what the job has shown so far.
        timeouts: the ladder: `stall_seconds`, `hang_seconds` and `new_phase_seconds` are the floors.
        told: what the script says that the phase may take, seconds; 0: it has not.

    Returns:
        Seconds; `first` < `second` ≤ `last`.
    """
    if told:
        first = max(timeouts.stall_seconds, told)
        return Limits(first=first, second=first + timeouts.hang_seconds, last=first + timeouts.new_phase_seconds)
    longest = pace.longest.get(phase)
    floor = timeouts.new_phase_seconds if longest is None or phase in DOWNLOADING else timeouts.stall_seconds
    if phase == FIRST_STEP and longest is not None:  # it compiles as the first generation did, and makes a step
        longest = max(longest, *(pace.longest.get(other, 0.0) for other in ("start", "train")))
    first = max(floor, FACTOR * (longest or 0.0))
    second = max(timeouts.hang_seconds, _SECOND * first)
    return Limits(first=first, second=second, last=max(timeouts.new_phase_seconds, _LAST * first))


def watch(
    now: float,
    reports: Mapping[NodeId, MemberReport],
    pace: Pace,
    suspicion: Suspicion | None,
    timeouts: Timeouts,
    *,
    is_heard: bool,
) -> Watched:
    """Return what is to be thought and done about ranks that stand still.

    Called at every pass over a running job.

    Args:
        now: Unix seconds.
        reports: of the members, of the newest generation.
        pace: what the job has shown so far.
        suspicion: as the pass before has left it.
        timeouts: the ladder.
        is_heard: every member is connected; what a silent one does is the evidence rules' business.

    Returns:
        The suspicion to store, and what follows from it.
    """
    living = {
        rank.rank: (node, rank)
        for node, report in sorted(reports.items())
        for rank in report.ranks
        if rank.exit is None
    }
    if not is_heard:
        return Watched(suspicion=suspicion)
    limit = _common(living, pace, timeouts)
    overdue = {rank: status for rank, (_, status) in living.items() if status.still_seconds > limit.first}
    if any(status.phase != CLOSING for _, status in living.values()):
        overdue = {rank: status for rank, status in overdue.items() if status.phase != CLOSING}
    if not overdue:
        over = (
            EventDraft(type="RanksMoveAgain", message=f"every rank moves again, after {now - suspicion.since:.0f} s")
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
        f"{_named(overdue, living)} stood still in {_phases(overdue)} for longer than {limit.first:g} s; "
        "the stacks are in the job's events"
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
    told = (
        f"{_named(overdue, living)} stood still in {_phases(overdue)} for {still:.0f} s, the limit is {limit.first:g} s"
    )
    event = EventDraft(
        type=PROVEN if proof else "RanksStandStill",
        message="; ".join(part for part in (told, proof, where) if part),
        node_id=odd,
        detail={"stacks": _kept(looks)},
    )
    if not proof:
        return Watched(suspicion=answered, events=(event,), words=words)
    evidence = [f"hang: {told}: {proof}", where, *_in_brief(looks)]
    # Of ranks that wait for one, that one says where; where nobody is odd it is everywhere, which is nowhere.
    seen_on = () if odd is None else (odd,)
    since = suspicion.since + max(
        status.limit_seconds for status in overdue.values()
    )  # so long the script had asked for
    faults = tuple(
        Fault(cause=Cause.HANG, evidence=sentence, at=since, seen_on=seen_on) for sentence in evidence if sentence
    )
    return Watched(suspicion=answered, faults=faults, stuck=odd, events=(event,), words=words)


def shown(reason: str, suspicion: Suspicion | None, now: float) -> str:
    """Return a job's reason as callers see it: with the age and the limit of a suspected hang.

    The stored reason has no running figure, so that a hang costs no write per pass.

    Args:
        reason: as stored.
        suspicion: as stored; None: no hang is suspected.
        now: Unix seconds.

    Returns:
        One sentence.
    """
    if suspicion is None or not suspicion.limit_seconds:
        return reason
    still = f"no progress for {max(now - suspicion.since, 0.0):.0f} s (limit {suspicion.limit_seconds:.0f} s)"
    return f"{still}: {reason.removeprefix(TRAINS)}"


def stands_still(reports: Mapping[NodeId, MemberReport], pace: Pace, timeouts: Timeouts) -> bool:
    """Say whether a rank has stood still for longer than its first limit: an agreed stop is not to be expected of it."""
    living = {rank.rank: (node, rank) for node, report in reports.items() for rank in report.ranks if rank.exit is None}
    limit = _common(living, pace, timeouts)
    return any(status.still_seconds > limit.first and status.phase != CLOSING for _, status in living.values())


def promised_seconds(reports: Mapping[NodeId, MemberReport]) -> float:
    """Return how long ranks that live may stand still on purpose, as their script says; 0 where none says so."""
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
    """Return what the breakers are to remember of a hang.

    Args:
        plan: of the generation.
        reports: of its members.
        max_boundary: the highest that any generation had reached.
        at: Unix seconds.
        stuck: the node that alone was stuck, if it could be told: it may be tried without.

    Returns:
        A failure where the slowest rank stood.
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


def _common(living: Mapping[Rank, tuple[NodeId, RankStatus]], pace: Pace, timeouts: Timeouts) -> Limits:
    each = [
        limits(phase, pace, timeouts, told)
        for phase, told in {(status.phase, status.limit_seconds) for _, status in living.values()}
    ]
    return Limits(
        first=max((limit.first for limit in each), default=0.0),
        second=max((limit.second for limit in each), default=0.0),
        last=max((limit.last for limit in each), default=0.0),
    )


def _waits(living: Mapping[Rank, tuple[NodeId, RankStatus]], timeouts: Timeouts) -> str:
    """Return who stands still by its script's own word; empty while that is no longer than any step might take."""
    at_gate = {
        rank: status
        for rank, (_, status) in living.items()
        if status.limit_seconds and status.still_seconds > timeouts.stall_seconds
    }
    if not at_gate:
        return ""
    limit = max(status.limit_seconds for status in at_gate.values())
    stand = "stands" if len(at_gate) == 1 else "stand"
    return (
        f"{_named(at_gate, living)} {stand} still in {_phases(at_gate)} on purpose, for at most {limit:g} s "
        "as the script says"
    )


def _is_due(now: float, still: float, suspicion: Suspicion, limit: Limits, timeouts: Timeouts) -> bool:
    return still > limit.second if suspicion.number == 1 else now - suspicion.asked_at > timeouts.stall_seconds


def _proof(
    living: Mapping[Rank, tuple[NodeId, RankStatus]],
    overdue: Mapping[Rank, RankStatus],
    looks: Mapping[Rank, RankStacks],
    still: float,
    limit: Limits,
) -> str:
    """Return what proves that the ranks will not go on by themselves, or nothing."""
    stopped = sorted(rank for rank in overdue if rank in looks and looks[rank].is_stopped)
    if stopped:
        return f"{_named(stopped, living)} stopped by a signal"
    asleep = {rank for rank, look in looks.items() if not look.error and _is_idle(look)}
    if asleep >= living.keys():
        return "no stack has changed between two looks and neither CPU nor GPU was used meanwhile"
    furthest = max(status.boundary for _, status in living.values())
    behind = sorted(
        rank for rank in overdue if rank in asleep and furthest >= overdue[rank].boundary + LEFT_BEHIND_BOUNDARIES
    )
    if behind:
        return f"{_named(behind, living)} asleep with unchanged stacks while others have reached step {furthest}"
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
    """Return the one node that is stuck while the others wait for it, if it can be told, and a sentence about it.

    Who is stopped, has passed fewer boundaries, or stands at another place than most, is waited for.
    """
    stopped = [rank for rank, look in looks.items() if look.is_stopped]
    boundaries = {rank: status.boundary for rank, (_, status) in living.items()}
    slowest = [rank for rank, boundary in boundaries.items() if boundary < max(boundaries.values())]
    groups = sorted(_groups(looks).values(), key=len, reverse=True)
    minority = [rank for group in groups[1:] for rank in group] if groups and 2 * len(groups[0]) > len(living) else []
    for odd, how in (
        (stopped, "stopped"),
        (slowest, "behind the others"),
        (minority, "at another place than the others"),
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
    """Return ranks by what their main thread does."""
    groups: dict[str, list[Rank]] = {}
    for rank, look in sorted(looks.items()):
        groups.setdefault(_main(look) or look.error, []).append(rank)
    return groups


def _main(look: RankStacks) -> str:
    lines = look.text.splitlines()
    end = next((number for number, line in enumerate(lines[1:], 1) if not line.startswith(" ")), len(lines))
    return "\n".join(lines[:end])


def _in_brief(looks: Mapping[Rank, RankStacks]) -> tuple[str, ...]:
    """Return a line for each place where ranks stand, most ranks first."""
    groups = sorted(_groups(looks).items(), key=lambda item: (-len(item[1]), item[1]))[:MAX_GROUPS]
    return tuple(f"{_rank_word(ranks)} {_list(ranks)}: {_frames(place)}" for place, ranks in groups)


def _frames(place: str) -> str:
    lines = place.splitlines()
    frames = [line.strip() for line in lines[1:]]
    if not frames:
        return place or "no Python stack"
    return " < ".join([*frames[:_FRAMES_TOLD], *(["…"] if len(frames) > _FRAMES_TOLD else [])])


def _kept(looks: Mapping[Rank, RankStacks]) -> list[dict[str, object]]:
    """Return whole stacks for the event, each once; JSON values only."""
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
