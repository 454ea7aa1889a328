"""Robust averages of durations, and the standard errors of these averages.

An iteration is the training work from one finished optimizer step to the next. The agent averages iteration times with
a trimmed mean: the mean of the values without the smallest and the largest tenth. A median would not show an effect in
fewer than half of the iterations. A single outlier would distort a plain mean. `worker.core.budget` compares the
averages to limit the cost of snapshots. `worker.core.pacing_trial` uses `median_error` to decide whether training is
faster with paced snapshots, which are sent only in idle network time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

TRIMMED_RATIO = 0.1
"""Fraction of the values that the trimmed mean ignores at each end: the smallest tenth and the largest tenth.

The number of ignored values is rounded up. From three or more values, at least one is ignored at each end.
"""
_MEDIAN_ERROR = 1.2533 * 1.4826
"""Factor for the standard error of a median of n normally distributed values.

The standard error is this factor times the median absolute deviation, divided by √n.
"""


def median_error(values: Sequence[float]) -> float:
    """Estimate the standard error of the median of `values`, in their unit. At least one value is required."""
    middle = statistics.median(values)
    spread = statistics.median(abs(value - middle) for value in values)
    return _MEDIAN_ERROR * spread / math.sqrt(len(values))


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean of `values` without the smallest and the largest tenth. At least one value is required."""
    cut = _cut(values)
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def trimmed_error(values: Sequence[float]) -> float:
    """Estimate the standard error of the trimmed mean of `values` (`trimmed_mean`).

    The estimate is s · √n / h. h is the number of values that the trimmed mean does not ignore. s is the standard
    deviation of the n winsorized values, in which the nearest remaining value replaces each ignored value. The estimate
    has the unit of the values, and is 0 if only one value remains. `values` must not be empty.

    Source: Tukey and McLaughlin 1963, https://www.jstor.org/stable/25049278.
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
