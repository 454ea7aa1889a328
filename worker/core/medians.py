"""How well a median is known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

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
