"""Computes statistics of repeated timings. The functions are pure.

The functions compute medians and spreads, and decide whether the machine was stable enough to judge a
value by its limit.

Benchmarks compare a timing with a *floor*: a time below which no system can get on this machine, such as the time of a
plain memcpy. A floor that changes during the measurement shows an unstable machine.
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
"""Largest relative change of a floor from the start to the end of a measurement.

If a floor (a time that no system can beat) changes more, the measurement is inconclusive.
"""
BOOTSTRAP_ROUNDS = 1000
CONFIDENCE = 0.95
BUSY_LOAD_RATIO = 0.5
"""Load average per core above which a machine counts as busy."""
LEAST_COMMITS_RATIO = 0.95
"""Smallest ratio of committed steps to all steps at which a benchmark reports that every step was kept."""
Sample = TypeVar("Sample")


class Verdict(StrEnum):
    """Result of the comparison of a measured value with its limit.

    - PASS: the value is within its limit.
    - SHORT: the value misses its limit.
    - INCONCLUSIVE: the measurement does not show whether the value meets its limit.
    - NONE: the value has no limit.
    """

    PASS = "pass"
    SHORT = "falls short"
    INCONCLUSIVE = "inconclusive"
    NONE = ""


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of repeated timings, in seconds unless the field that holds the summary names a different unit."""

    count: int
    minimum: float
    median: float
    p99: float
    """99th percentile by nearest rank. With fewer than 100 timings, this is the largest timing."""
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Return the summary of these values.

        Raises:
            ValueError: there are no values.
        """
        return cls(len(values), min(values), statistics.median(values), percentile(values, 0.99), max(values))


@dataclass(frozen=True, slots=True)
class Floor:
    """Timings of an operation that no system can beat. They were measured before and after the timings of a system."""

    before: Summary
    after: Summary

    @property
    def median(self) -> float:
        """Mean of the medians of `before` and `after`."""
        return (self.before.median + self.after.median) / 2

    @property
    def moved_ratio(self) -> float:
        """Difference between the medians of `before` and `after`, relative to the lower median."""
        return moved_ratio(self.before.median, self.after.median)

    @property
    def stood_still(self) -> bool:
        """True if the operation's median time before and after the system's measurement is nearly equal.

        The two medians then differ by at most `FLOOR_TOLERANCE_RATIO`."""
        return self.moved_ratio <= FLOOR_TOLERANCE_RATIO


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed (nearest rank).

    Args:
        values: at least one, in any order.
        share: fraction of the values, above 0, at most 1.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def bootstrap_interval(
    statistic: Callable[[Sequence[Sequence[Sample]]], float], *samples: Sequence[Sample], seed: int = 0
) -> tuple[float, float]:
    """Return a confidence interval of a statistic by the percentile bootstrap.

    Args:
        statistic: computes the value from one list of numbers per sample, in the order of `samples`.
        samples: lists with at least one value each. Each list is resampled independently of the other lists.
        seed: the same seed and samples give the same interval.

    Returns:
        The lower and the upper bound, between which `CONFIDENCE` of the resampled statistics lie.

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
    """Return the difference of two positive values, relative to the lower value."""
    low, high = sorted((one, other))
    return high / low - 1 if low > 0 else math.inf


def is_busy(load_average: float, cores: int) -> bool:
    """Return True if a machine with this load average over one minute counts as busy."""
    return load_average / cores > BUSY_LOAD_RATIO


def paired_ratios(order: str, values: Sequence[float]) -> list[float]:
    """Return the relative excess of A over B for each pair in a sequence such as ABBA.

    The comparison uses pairs, because drift of the machine affects both values of a pair.

    Args:
        order: A and B in the order of measurement. Each pair consists of one A and one B, in any order.
        values: the positive values in that order.

    Returns:
        A ÷ B − 1 for each pair.

    Raises:
        ValueError: a pair has two A or two B.
    """
    ratios = []
    for position in range(0, len(order) - 1, 2):
        pair = dict(zip(order[position : position + 2], values[position : position + 2], strict=True))
        if set(pair) != {"A", "B"}:
            raise ValueError(f"{order[position : position + 2]} is no pair")
        ratios.append(pair["A"] / pair["B"] - 1)
    return ratios
