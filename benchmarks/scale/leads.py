"""Compares the commits with the adaptive lead (`worker.core.proposal_lead`) and with constant leads, by simulation.

One proposal with a lead of k steps takes k steps, and commits unless it is late. Each further step divides the
probability of a late one by ten. In some phases, a lead of one step is always late.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from worker.core.proposal_lead import Lead

STEPS = 20_000
PHASE_STEPS = 1_000
"""Length of a phase."""
CONSTANT_LEADS = (1, 2, 3)
SEED = 1


@dataclass(frozen=True, slots=True)
class Load:
    """The frequency of late proposals."""

    name: str
    lateness: float
    """Probability with a lead of one step."""
    phases: Sequence[int] = (1,)
    """Least lead that can be in time per phase, repeated."""


LOADS = (
    Load("no proposal is late", 0.0),
    Load("one proposal in a hundred is late", 0.01),
    Load("one proposal in ten is late", 0.1),
    Load("a lead of one is always late", 0.0, (2,)),
    Load("a lead of one is always late in every second phase", 0.0, (1, 2)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadFigure:
    """Commits per step with one load."""

    load: str
    adaptive: float
    constant: dict[int, float]
    """Commits per step by lead in steps."""

    @property
    def ratio(self) -> float:
        """Adaptive ÷ best constant lead."""
        return self.adaptive / max(self.constant.values())


def lead_figures(loads: Sequence[Load] = LOADS) -> list[LeadFigure]:
    """Simulate each load with the adaptive and each constant lead."""
    return [
        LeadFigure(
            load=load.name,
            adaptive=_commits_per_step(load, None),
            constant={steps: _commits_per_step(load, steps) for steps in CONSTANT_LEADS},
        )
        for load in loads
    ]


def _commits_per_step(load: Load, constant: int | None) -> float:
    chance = random.Random(SEED)
    lead, commits, step = Lead(), 0, 0
    while step < STEPS:
        steps = lead.steps if constant is None else constant
        least = load.phases[step // PHASE_STEPS % len(load.phases)]
        step += steps
        if steps < least or chance.random() < load.lateness / 10 ** (steps - 1):
            lead = lead.late()
        else:
            commits, lead = commits + 1, lead.clean()
    return commits / step
