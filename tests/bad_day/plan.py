"""What is done to the cluster, when, and to whom by role: made from a seed alone.

Who has a role is settled when the time has come.

The same as a fault script (`script`) is what anybody can play: `everstep local fault play`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Final

import msgspec

from infra.local_cloud.fault_kinds import (
    LASTING,
    AnyFault,
    FailStatus,
    KillAgent,
    KillControlPlane,
    KillRank,
    Partition,
    Terminate,
    Throttle,
    name_of,
)
from infra.local_cloud.fault_script import Moment

FIRST_SECONDS: Final = 4.0
LAST_SECONDS: Final = 12.0
"""Nothing is done so shortly before the end."""
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
"""Each comes once in a round, in an order of its own; a round is what two minutes hold."""
ROUND_SECONDS: Final = 120.0
FOLLOWERS: Final = ("ranks", "agents", "control plane", "ranks")
"""What hits a recovery that has just begun; a round has one of each."""
FOLLOWS_AFTER: Final = (0.4, 2.5)
LASTS: Final = {"links": (2.0, 9.0), "checks": (5.0, 12.0), "throttle": (8.0, 15.0), "control plane": (0.0, 3.0)}
"""Seconds."""
THROTTLED_SHARE: Final = 0.4
HIT_SECONDS: Final = 12.0
"""How long somebody is looked for who can be hit."""
FOLLOW_SECONDS: Final = 2.0
"""The same for what is to hit a recovery: later would be too late."""
LINES_CUT: Final = ("rest", "rest", "control-plane", "peers")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a bad day's script."""

    at_seconds: float
    """After the start of the play."""
    kind: str
    """As of `facts.Strike`; `pair`: an instance of each of two jobs."""
    pick: int
    """Which of those that can be hit, counted around."""
    lasts_seconds: float = 0.0
    cut_from: str = "rest"
    follows: bool = False
    """It hits whoever the line before has hit, as far as that can be."""


def plan(*, seed: int, minutes: float, has_links: bool) -> list[Line]:
    """Make a script.

    Args:
        seed: equal arguments give equal scripts.
        minutes: how long it goes on.
        has_links: lines can be cut.

    Returns:
        Its lines, in order. The first takes a node from two jobs in the same second.
    """
    chance = random.Random(f"{seed}/{minutes}/{has_links}")
    ends = minutes * 60 - LAST_SECONDS
    kinds: list[str] = []
    follows: list[str] = []
    for number in range(max(1, round(minutes * 60 / ROUND_SECONDS))):
        some = [kind for kind in ROUND if has_links or kind != "links"]
        kinds += chance.sample([*some, *(("throttle",) if number % 2 else ())], len(some) + number % 2)
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
    return sorted(lines, key=lambda line: line.at_seconds)


def faults(line: Line) -> tuple[AnyFault, ...]:
    """Return what a line does, and to whom by role.

    Args:
        line: of a plan.

    Returns:
        One fault; of a pair two.
    """
    place = line.pick // 7 % 60  # whoever has up to six of something is as likely as the others
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
            return (KillControlPlane(down=line.lasts_seconds),)
        case "links":
            return (Partition(target=node, separate_from=line.cut_from),)
        case "checks":
            return (FailStatus(target=node),)
        case "throttle":
            return (Throttle(share=THROTTLED_SHARE),)
        case unknown:
            raise ValueError(unknown)


def patience_seconds(line: Line) -> float:
    """Return how long somebody is looked for whom a line can hit."""
    return FOLLOW_SECONDS if line.follows else HIT_SECONDS


def script(lines: Iterable[Line]) -> list[Moment]:
    """Return a plan as a fault script.

    Args:
        lines: of the plan, in order.

    Returns:
        What happens, in order; the last line clears what lasts.
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
    """Make a minute's script that a control plane without a safeguard will not stand, and that harms nobody who has it.

    Args:
        what: the safeguard: lease, contract or evidence.
        seed: of whom it hits.

    Returns:
        Its lines, in order.
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
