"""Averages that a few strays do not move, and how well they are known.

A median sees nothing of what happens in two iterations of five; a mean makes one that something else held up the usual
case. Between them lies the mean of what is left when the least and the greatest are cut off.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

TRIMMED_RATIO = 0.1
"""Cut off at either end: one value at least, where there are three."""
_MEDIAN_ERROR = 1.2533 * 1.4826
"""Standard error of a median from the median absolute deviation, times the root of the count; both factors for normal noise."""


def median_error(values: Sequence[float]) -> float:
    """Estimate the standard error of a median.

    Args:
        values: at least one.

    Returns:
        In the unit of the values.
    """
    middle = statistics.median(values)
    spread = statistics.median(abs(value - middle) for value in values)
    return _MEDIAN_ERROR * spread / math.sqrt(len(values))


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean of all values but the least and the greatest tenth.

    Args:
        values: at least one.

    Returns:
        In the unit of the values.
    """
    cut = _cut(values)
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def trimmed_error(values: Sequence[float]) -> float:
    """Estimate the standard error of a trimmed mean, from the deviation of what is left with its ends repeated for what was cut off.

    Source: Tukey and McLaughlin 1963, https://www.jstor.org/stable/25049278.

    Args:
        values: at least one.

    Returns:
        In the unit of the values; 0 for a single one.
    """
    cut, ordered = _cut(values), sorted(values)
    left = ordered[cut : len(values) - cut]
    if len(left) < 2:
        return 0.0
    winsorized = [left[0]] * cut + left + [left[-1]] * cut
    mean, count = statistics.fmean(winsorized), len(winsorized)
    variance = math.fsum((value - mean) ** 2 for value in winsorized) / (
        count - 1
    )  # `statistics.variance` is exact, and takes ten times as long
    return math.sqrt(variance * count) / len(left)


def _cut(values: Sequence[float]) -> int:
    return min(math.ceil(TRIMMED_RATIO * len(values)), (len(values) - 1) // 2)
