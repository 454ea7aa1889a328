"""What repeated timings say: median and spread, and whether the machine stood still enough for them to say anything.

Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

FLOOR_TOLERANCE_RATIO = 0.2
"""A floor that moves by more between the beginning and the end of a run makes the run inconclusive."""
BOOTSTRAP_ROUNDS = 1000
CONFIDENCE = 0.95
BUSY_LOAD_RATIO = 0.5
"""Load average per core above which a machine has other things to do."""
LEAST_COMMITS_RATIO = 0.95
"""Commits ÷ steps without which nothing passes that claims every step."""


class Verdict(StrEnum):
    """PASS: reached. SHORT: not reached. INCONCLUSIVE: the run cannot say. NONE: there is nothing to reach."""

    PASS = "pass"
    SHORT = "falls short"
    INCONCLUSIVE = "inconclusive"
    NONE = ""


@dataclass(frozen=True, slots=True)
class Summary:
    """Repeated timings of one thing, seconds unless said otherwise."""

    count: int
    minimum: float
    median: float
    p99: float
    """By nearest rank: with fewer than 100 timings, the worst one."""
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Return the summary of at least one value.

        Raises:
            ValueError: there is none.
        """
        return cls(len(values), min(values), statistics.median(values), percentile(values, 0.99), max(values))


@dataclass(frozen=True, slots=True)
class Floor:
    """What cannot be beaten, measured before and after what it is held against, in the same processes."""

    before: Summary
    after: Summary

    @property
    def median(self) -> float:
        """The middle of the two medians."""
        return (self.before.median + self.after.median) / 2

    @property
    def moved_ratio(self) -> float:
        """By how much the later median differs from the earlier one, as a part of the lower of the two."""
        return moved_ratio(self.before.median, self.after.median)

    @property
    def stood_still(self) -> bool:
        """The machine was the same before and after."""
        return self.moved_ratio <= FLOOR_TOLERANCE_RATIO


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed (nearest rank).

    Args:
        values: at least one, in any order.
        share: above 0, at most 1.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def bootstrap_interval(
    statistic: Callable[[Sequence[Sequence[float]]], float], *samples: Sequence[float], seed: int = 0
) -> tuple[float, float]:
    """Return between which bounds a statistic lies (percentile bootstrap): each sample is drawn again from itself, many times.

    Args:
        statistic: of all samples together, in the order given.
        samples: at least one value each; drawn independently of each other.
        seed: the same samples give the same bounds.

    Returns:
        (low, high), which hold `CONFIDENCE` of the drawn statistics.

    Raises:
        ValueError: a sample is empty.
    """
    if not samples or not all(samples):
        raise ValueError("no values")
    random = Random(seed)
    drawn = sorted(
        statistic([random.choices(sample, k=len(sample)) for sample in samples]) for _ in range(BOOTSTRAP_ROUNDS)
    )
    tail = (1 - CONFIDENCE) / 2
    return drawn[int(tail * BOOTSTRAP_ROUNDS)], drawn[math.ceil((1 - tail) * BOOTSTRAP_ROUNDS) - 1]


def moved_ratio(one: float, other: float) -> float:
    """Return the distance of two positive figures as a part of the lower one."""
    low, high = sorted((one, other))
    return high / low - 1 if low > 0 else math.inf


def is_busy(load_average: float, cores: int) -> bool:
    """Say whether a machine with this load average (1 minute) had other things to do."""
    return load_average / cores > BUSY_LOAD_RATIO


def paired_ratios(order: str, values: Sequence[float]) -> list[float]:
    """Return how much larger A is than B, pair by pair, in a sequence such as ABBA: drift of the machine falls on both sides of a pair.

    Args:
        order: A and B, in the order in which they were measured; each neighbouring two are one of each.
        values: of each, positive.

    Returns:
        A ÷ B − 1 for each pair.

    Raises:
        ValueError: a pair holds two of the same.
    """
    ratios = []
    for position in range(0, len(order) - 1, 2):
        pair = dict(zip(order[position : position + 2], values[position : position + 2], strict=True))
        if set(pair) != {"A", "B"}:
            raise ValueError(f"{order[position : position + 2]} is no pair")
        ratios.append(pair["A"] / pair["B"] - 1)
    return ratios
