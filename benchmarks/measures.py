"""Computes statistics of repeated timings, and decides whether the machine was stable enough for a verdict. Pure.

Benchmarks compare a timing with a floor. A floor that changes during the measurement shows an unstable machine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import TypeVar

FLOOR_TOLERANCE_RATIO = 0.2
"""Largest change of a floor during a conclusive measurement."""
BOOTSTRAP_ROUNDS = 1000
CONFIDENCE = 0.95
BUSY_LOAD_RATIO = 0.5
"""Load per core above which a machine counts as busy."""
LEAST_COMMITS_RATIO = 0.95
"""Commits ÷ steps at which every step counts as kept."""
Sample = TypeVar("Sample")


class Verdict(StrEnum):
    """Result of the comparison of a value with its limit."""

    PASS = "pass"
    SHORT = "falls short"
    INCONCLUSIVE = "inconclusive"
    NONE = ""


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of repeated timings, in seconds unless the field names another unit."""

    count: int
    minimum: float
    median: float
    p99: float
    """Percentile by nearest rank; the largest of fewer than 100 timings."""
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Return the summary of values. Raises ValueError without any."""
        return cls(len(values), min(values), statistics.median(values), percentile(values, 0.99), max(values))


@dataclass(frozen=True, slots=True)
class Floor:
    """Timings of an operation that no system can beat, before and after a system's."""

    before: Summary
    after: Summary

    @property
    def median(self) -> float:
        """Mean of both medians."""
        return (self.before.median + self.after.median) / 2

    @property
    def moved_ratio(self) -> float:
        """Difference of both medians, relative to the lower one."""
        return moved_ratio(self.before.median, self.after.median)

    @property
    def stood_still(self) -> bool:
        """Whether both medians differ by at most `FLOOR_TOLERANCE_RATIO`."""
        return self.moved_ratio <= FLOOR_TOLERANCE_RATIO


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` (above 0, at most 1) of all values do not exceed (nearest rank).

    Raises ValueError without values.
    """
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def bootstrap_interval(
    statistic: Callable[[Sequence[Sequence[Sample]]], float], *samples: Sequence[Sample], seed: int = 0
) -> tuple[float, float]:
    """Return the bounds of `CONFIDENCE` of a statistic by the percentile bootstrap.

    `statistic` receives one list per sample, each resampled independently. The same seed gives the same interval.
    Raises ValueError if a sample is empty.
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
    """Return the difference of two positive values, relative to the lower."""
    low, high = sorted((one, other))
    return high / low - 1 if low > 0 else math.inf


def is_busy(load_average: float, cores: int) -> bool:
    """Return whether this load average over one minute counts as busy."""
    return load_average / cores > BUSY_LOAD_RATIO


def paired_ratios(order: str, values: Sequence[float]) -> list[float]:
    """Return A ÷ B − 1 for each pair in a sequence such as ABBA. Drift of the machine affects both values of a pair.

    Raises ValueError if a pair has two A or two B.
    """
    ratios = []
    for position in range(0, len(order) - 1, 2):
        pair = dict(zip(order[position : position + 2], values[position : position + 2], strict=True))
        if set(pair) != {"A", "B"}:
            raise ValueError(f"{order[position : position + 2]} is no pair")
        ratios.append(pair["A"] / pair["B"] - 1)
    return ratios
