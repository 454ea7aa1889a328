"""A story: a simulated cluster and what happens to it, as plain values that are drawn from a seed.

Each story draws which kinds of acts exist in it and how often each happens. Stories with few kinds reach states that
stories with all kinds seldom reach.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

ACT_COUNT: Final = 14
MAX_WAIT: Final = 12
"""Longest wait after an act, in ticks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One event of a story. `kind` is a key of `acts.KINDS`."""

    kind: str
    which: int = 0
    """Chooses the node or the job, modulo their number."""
    amount: int = 0
    """Chooses what the kind leaves open, modulo the number of its choices."""
    wait: int = 1
    """Ticks after the act, before the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """The settings of a simulated job."""

    nodes: int
    copies: int
    ranks_per_node: int = 1
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A cluster with one or two jobs, and the acts that follow."""

    seed: int
    jobs: tuple[JobShape, ...]
    spares: int = 1
    room: int = 4
    """Number of instances that the group may have beyond those of the jobs and the spares."""
    boot_seconds: float = 5.0
    domains: int = 0
    """Number of failure domains that AWS reports. 0: it reports none."""
    replacements_per_hour: int = 1000
    steps_per_tick: int = 1
    acts: tuple[Act, ...] = ()

    def encode(self) -> str:
        """Return the story as one line of JSON."""
        return msgspec.json.encode(self).decode()


def decode(line: str) -> Story:
    """Return the story of a line of JSON. Raises msgspec.MsgspecError for other text."""
    return msgspec.json.decode(line, type=Story)


def drawn(seed: int, kinds: dict[str, float], *, count: int = ACT_COUNT) -> Story:
    """Draw the story of a seed. `kinds` has the kinds of acts with their mean frequencies."""
    chance = random.Random(seed)
    chosen = {kind: weight * chance.choice((0, 0, 1, 1, 4)) for kind, weight in kinds.items()}
    if not any(chosen.values()):
        chosen = dict(kinds)
    acts = tuple(
        Act(
            kind=chance.choices(list(chosen), list(chosen.values()))[0],
            which=chance.randrange(64),
            amount=chance.randrange(1 << 16),
            wait=chance.choice((0, 1, 1, 2, 4, MAX_WAIT)),
        )
        for _ in range(count)
    )
    return Story(
        seed=seed,
        jobs=tuple(_drawn_job(chance) for _ in range(chance.choice((1, 2)))),
        spares=chance.randrange(3),
        room=chance.choice((1, 4, 8)),
        boot_seconds=chance.choice((2.0, 5.0, 20.0)),
        domains=chance.choice((0, 0, 2, 3, 6)),
        replacements_per_hour=chance.choice((1000, 1000, 2, 1)),
        steps_per_tick=chance.choice((1, 1, 3)),
        acts=acts,
    )


def _drawn_job(chance: random.Random) -> JobShape:
    nodes = chance.randrange(2, 5)
    settings: dict[str, Any] = {"max_attempts": 30, "priority": chance.randrange(2)}
    copies = min(nodes, chance.choice((1, 2, 2, 2, 3)))
    if chance.random() < 0.25:
        copies, settings["parity_group_size"] = 1, chance.randrange(2, nodes + 1)
    if chance.random() < 0.3:
        least = max(1, settings.get("parity_group_size", 1))
        settings |= {"min_node_count": chance.randrange(least, nodes + 1), "patience_seconds": chance.choice((3, 10))}
        settings["max_node_count"] = nodes + chance.randrange(2)
        settings["preemptible"] = settings["priority"] == 0
    if chance.random() < 0.3:
        settings |= {"rehearsal_mode": "On", "rehearsal_at_step": 3}
    return JobShape(nodes=nodes, copies=copies, ranks_per_node=chance.choice((1, 1, 2)), settings=settings)
