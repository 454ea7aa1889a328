"""Verdicts on the measured cases. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from benchmarks.interleave.figures import Figure
from benchmarks.interleave.schemes import MAX_SLOWDOWN, Scheme

SLOWDOWN_LIMIT = 0.015
"""Limit of Everstep's slowdown where the snapshot fits into the idle time. The interval's upper bound must meet it."""
BLOCKING_COST = 0.10
"""Smallest slowdown by the scheme BLOCKING for a verdict. Below it, the case cannot show a difference."""
KEPT_RATIO = 0.95
LEAST_KEPT = 3
"""Fewest kept snapshots in a case where the budget selects steps (`Case.is_crowded`).

A scheme that keeps fewer snapshots has a small slowdown for this reason alone, so the case misses its limit.
"""


class Verdict(StrEnum):
    """PASS, FALLS_SHORT, or INCONCLUSIVE if the noise is too large or the case cannot show a difference."""

    PASS = "pass"
    FALLS_SHORT = "falls short"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict with its explanation."""

    verdict: Verdict
    reason: str


def judge(figure: Figure) -> Judgement:
    """Return the verdict on one case."""
    ours = figure.row(Scheme.EVERSTEP)
    if figure.case.is_crowded:
        told = f"{ours.kept} snapshots in {ours.iterations} steps"
        if ours.kept < LEAST_KEPT:
            return Judgement(Verdict.FALLS_SHORT, f"{told}, at least {LEAST_KEPT} to reach")
        return _within(
            ours.low, ours.high, MAX_SLOWDOWN, f"at most {ours.high:+.2%} of {MAX_SLOWDOWN:.0%} (max_slowdown), {told}"
        )
    blocking = figure.row(Scheme.BLOCKING)
    if blocking.slowdown < BLOCKING_COST:
        return Judgement(Verdict.INCONCLUSIVE, f"blocking costs {blocking.slowdown:.1%}, less than {BLOCKING_COST:.0%}")
    bound = _within(
        ours.low,
        ours.high,
        SLOWDOWN_LIMIT,
        f"at most {ours.high:+.2%} of {SLOWDOWN_LIMIT:.1%}, where blocking costs {blocking.slowdown:+.1%}",
    )
    if bound.verdict is Verdict.PASS and ours.kept_ratio < KEPT_RATIO:
        return Judgement(Verdict.FALLS_SHORT, f"{ours.kept_ratio:.2f} snapshots kept per step, {KEPT_RATIO} to reach")
    return bound


def _within(low: float, bound: float, limit: float, sentence: str) -> Judgement:
    if bound <= limit:
        return Judgement(Verdict.PASS, sentence)
    return Judgement(Verdict.FALLS_SHORT if low > limit else Verdict.INCONCLUSIVE, sentence)


def beats_uniform(figure: Figure) -> bool:
    """Return True if the interval of Everstep's slowdown is entirely below the interval of uniform pacing."""
    return figure.row(Scheme.EVERSTEP).high < figure.row(Scheme.UNIFORM).low
