"""Trimmed means and medians of durations, with their standard errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# A median would hide an effect in fewer than half of the iterations. An outlier would distort a plain mean.
TRIMMED_RATIO = 0.1
"""Fraction of the values, rounded up, that the trimmed mean ignores at each end."""
_MEDIAN_ERROR = 1.2533 * 1.4826
"""Factor for the standard error of a median of n normal values; multiplied by the median absolute deviation / √n."""


def median_error(values: Sequence[float]) -> float:
    """Estimate the standard error of the median of `values`, in their unit. At least one value is required."""
    middle = statistics.median(values)
    spread = statistics.median(abs(value - middle) for value in values)
    return _MEDIAN_ERROR * spread / math.sqrt(len(values))


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean of `values`, which must not be empty, without the smallest and the largest tenth."""
    cut = _cut(values)
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def trimmed_error(values: Sequence[float]) -> float:
    """Estimate the standard error of `trimmed_mean(values)`; 0 if the mean ignores all values except one.

    `values` must not be empty. The estimate is s · √n / h. s is the standard deviation of the n winsorized values, h
    the number of values that are not ignored. Source: Tukey and McLaughlin 1963, https://www.jstor.org/stable/25049278.
    """
    cut, ordered = _cut(values), sorted(values)
    left = ordered[cut : len(values) - cut]
    if len(left) < 2:
        return 0.0
    winsorized = [left[0]] * cut + left + [left[-1]] * cut
    mean, count = statistics.fmean(winsorized), len(winsorized)
    # This formula is ten times faster than `statistics.variance`.
    variance = math.fsum((value - mean) ** 2 for value in winsorized) / (count - 1)
    return math.sqrt(variance * count) / len(left)


def _cut(values: Sequence[float]) -> int:
    return min(math.ceil(TRIMMED_RATIO * len(values)), (len(values) - 1) // 2)
