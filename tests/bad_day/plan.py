"""The plan of a bad day: the kind, time and target of each fault, all derived from one seed.

A target is a role, such as "job 0 node 3". The role becomes an instance when the fault is due. `script` converts a plan
to a fault script, which `everstep local fault play` plays.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from infra.local_cloud.fault_kinds import (
    LASTING,
    AnyFault,
    FailStatus,
    KillAgent,
    KillControlPlane,
    KillRank,
    Partition,
    StaleView,
    Terminate,
    Throttle,
    ZoneDisruption,
    name_of,
)
from infra.local_cloud.fault_script import Moment

FIRST_SECONDS: Final = 4.0
LAST_SECONDS: Final = 12.0
"""Seconds at the end of the day in which no new fault begins."""
ROUND: Final = (
    "ranks",
    "ranks",
    "agents",
    "agents",
    "instances",
    "groups",
    "control plane",
    "links",
    "links",
    "checks",
)
"""Kinds of the faults in each period of two minutes. Their order is random."""
SERVER_ROUND: Final = ("freeze", "database")
"""Kinds of faults that are added to each period of two minutes if the control plane has two servers and PostgreSQL."""
AWS_ROUND: Final = ("stale view", "zone", "throttle")
"""Kinds of faults that are added to each period of two minutes: faults of AWS's API, which stop no instance."""
ROUND_SECONDS: Final = 120.0
FOLLOWERS: Final = ("ranks", "agents", "control plane", "ranks")
"""Kinds of faults that hit a recovery that has just begun. Each entry occurs once in each period of two minutes."""
FOLLOWS_AFTER: Final = (0.4, 2.5)
LASTS: Final = {
    "links": (2.0, 9.0),
    "checks": (5.0, 12.0),
    "throttle": (8.0, 15.0),
    "stale view": (10.0, 15.0),
    "zone": (8.0, 15.0),
    "control plane": (0.0, 3.0),
    "freeze": (8.0, 16.0),
}
"""Minimum and maximum duration in seconds of a lasting fault, by kind."""
THROTTLED_SHARE: Final = 0.4
OMITTED_SHARE: Final = 0.2
"""Share of the instances that each answer of DescribeInstances omits during the fault `stale view`.

The fault also has a second effect: EC2's Describe operations show new and changed instances only after AWS's longest
delay (`AwsAnswers.visibility_seconds`).
"""
HIT_SECONDS: Final = 12.0
"""Longest time that a due fault waits for an instance or rank that it may hit."""
FOLLOW_SECONDS: Final = 2.0
"""Longest time that a due fault that must hit a recovery waits for its target. It is short, as recoveries are."""
SERVER_SECONDS: Final = 60.0
"""Longest time that the freeze of a server, or a fault of the database, waits until all servers run.

The restart of a killed server takes 20 s on a busy machine.
"""
LINES_CUT: Final = ("rest", "rest", "control-plane", "peers")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One planned fault, or two planned faults at the same time."""

    at_seconds: float
    """Planned time, in seconds after the start of the day."""
    kind: str
    """A kind of `facts.Strike`, or `pair`, which terminates one instance of each of two jobs at the same time."""
    pick: int
    """Chooses the target: the index among the possible targets, modulo their number."""
    lasts_seconds: float = 0.0
    cut_from: str = "rest"
    server: Literal["control-plane", "standby"] = "control-plane"
    """The server that a kill or a freeze hits."""
    follows: bool = False
    """True if the fault hits the same job as the fault of the previous line, if possible."""


def plan(*, seed: int, minutes: float, has_links: bool, has_servers: bool = False) -> list[Line]:
    """Make a plan.

    Args:
        seed: equal arguments give equal plans.
        minutes: length of the day.
        has_links: True if links can be cut.
        has_servers: True if the control plane has two servers and PostgreSQL.

    Returns: The planned faults in order of time. The first one terminates an instance of each of two jobs.
    """
    chance = random.Random(f"{seed}/{minutes}/{has_links}")
    ends = minutes * 60 - LAST_SECONDS
    kinds: list[str] = []
    follows: list[str] = []
    for _ in range(max(1, round(minutes * 60 / ROUND_SECONDS))):
        some = [kind for kind in ROUND if has_links or kind != "links"]
        some += [*AWS_ROUND, *(SERVER_ROUND if has_servers else ())]
        kinds += chance.sample(some, len(some))
        follows += chance.sample(FOLLOWERS, len(FOLLOWERS))
    lines = [Line(at_seconds=FIRST_SECONDS, kind="pair", pick=chance.randrange(1 << 16))]
    span = (ends - FIRST_SECONDS) / len(kinds)
    leaders = [place for place, kind in enumerate(kinds) if kind in ("instances", "groups", "links")]
    for place, kind in enumerate(kinds):
        at = FIRST_SECONDS + span * (place + chance.uniform(0.55, 1.0))
        lines.append(_line(chance, at, kind))
        if place in leaders and follows:
            lines.append(
                msgspec.structs.replace(_line(chance, at + chance.uniform(*FOLLOWS_AFTER), follows.pop()), follows=True)
            )
    if has_servers:
        lines = [msgspec.structs.replace(line, server=("control-plane", "standby")[line.pick % 2]) for line in lines]
    return sorted(lines, key=lambda line: line.at_seconds)


def faults(line: Line) -> tuple[AnyFault, ...]:
    """Return the faults of a plan line: two faults for a pair, otherwise one. Each fault has a role as its target.

    The kinds of `SERVER_ROUND` raise ValueError, because they are no faults of the local cloud.
    """
    place = line.pick // 7 % 60  # 60 is divisible by 1 to 6, so each of up to six targets is equally likely
    node, shard = (
        f"{'last job' if line.follows else f'job {line.pick % 6}'} {part} {place}" for part in ("node", "shard")
    )
    match line.kind:
        case "ranks":
            return (KillRank(target=node),)
        case "agents":
            return (KillAgent(target=node),)
        case "instances":
            return (Terminate(target=node),)
        case "pair":
            return tuple(Terminate(target=f"job {number} node {place}") for number in range(2))
        case "groups":
            return (Terminate(target=shard),)
        case "control plane":
            return (KillControlPlane(down=line.lasts_seconds, server=line.server),)
        case "links":
            return (Partition(target=node, separate_from=line.cut_from),)
        case "checks":
            return (FailStatus(target=node),)
        case "throttle":
            return (Throttle(share=THROTTLED_SHARE),)
        case "stale view":
            return (StaleView(omit=OMITTED_SHARE),)
        case "zone":
            return (ZoneDisruption(),)
        case unknown:
            raise ValueError(unknown)


def patience_seconds(line: Line) -> float:
    """Return how many seconds a due fault waits at most for an instance, a rank or a server that it may hit."""
    if line.kind in SERVER_ROUND:
        return SERVER_SECONDS
    return FOLLOW_SECONDS if line.follows else HIT_SECONDS


def script(lines: Iterable[Line]) -> list[Moment]:
    """Return a plan as a fault script.

    Args:
        lines: the lines of the plan, in order.

    Returns:
        The lines of the script (`Moment`), in order. The last line clears lasting faults.
    """
    moments = [
        Moment(
            at_seconds=line.at_seconds,
            fault=fault,
            within_seconds=patience_seconds(line),
            lasts_seconds=line.lasts_seconds if name_of(fault) in LASTING else None,
        )
        for line in lines
        for fault in faults(line)
    ]
    ends = max(moment.at_seconds + moment.within_seconds + (moment.lasts_seconds or 0.0) for moment in moments)
    return [*moments, Moment(at_seconds=round(ends, 1))]


def temptation(what: str, *, seed: int) -> list[Line]:
    """Make a plan of one minute that tests a single safeguard of the control plane.

    The faults of the plan do harm only if the control plane lacks the safeguard.

    Args:
        what: the safeguard: lease, contract or evidence.
        seed: determines the targets.

    Returns:
        The lines in order of time.
    """
    chance = random.Random(f"{what}/{seed}")
    kinds = {
        "lease": [
            (0, "ranks", 0.0),
            (8, "agents", 0.0),
            (16, "instances", 0.0),
            (28, "ranks", 0.0),
            (36, "instances", 0.0),
        ],
        "contract": [(0, "checks", 30.0), (20, "checks", 30.0)],
        "evidence": [(0, "links", 8.0), (15, "links", 8.0), (30, "links", 8.0)],
    }
    return [
        Line(
            at_seconds=FIRST_SECONDS + at,
            kind=kind,
            pick=chance.randrange(1 << 16),
            lasts_seconds=lasts,
            cut_from="control-plane",
        )
        for at, kind, lasts in kinds[what]
    ]


def _line(chance: random.Random, at: float, kind: str) -> Line:
    lasts = round(chance.uniform(*LASTS[kind]), 1) if kind in LASTS else 0.0
    return Line(
        at_seconds=round(at, 1),
        kind=kind,
        pick=chance.randrange(1 << 16),
        lasts_seconds=lasts,
        cut_from=chance.choice(LINES_CUT),
    )
