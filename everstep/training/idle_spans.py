"""Computes idle spans: the times in each iteration at which training does not use the network.

Pure. The input consists of the recorded times at which the network was in use.

Invariant: the result contains spans only if most iterations have the same number of spans.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence

from everstep.protocol.rank_messages import IdleSpan

SHORTEST_RATIO = 0.01
"""Shortest idle time that counts as a span, as a fraction of the iteration. A shorter span is useless for transfers."""
AGREEING_RATIO = 0.5
"""Smallest fraction of the iterations that must have the same number of spans.

Below this fraction, there is no result.
"""

_NORMAL = 1.4826
"""Ratio of a normal distribution's standard deviation to its median absolute deviation."""

Interval = tuple[float, float]
"""Start and end, in seconds of one clock."""


def idle_spans(busy: Sequence[Interval], boundaries: Sequence[float]) -> tuple[IdleSpan, ...]:
    """Return the time spans of a typical iteration in which training does not use the network.

    The result uses medians. The paper GEMINI (Wang et al., SOSP '23, section 5.4) uses averages. However, one delayed
    iteration would shift the averages of all later spans and inflate their deviations.

    Args:
        busy: intervals in which the network was in use, in any order. They may overlap.
        boundaries: times at which iterations ended, ascending, on the same clock.

    Returns:
        Spans in order of time, in seconds since the end of the previous iteration. Empty if the network was never used
        or no pattern repeats.
    """
    iterations = list(itertools.pairwise(boundaries))
    if not iterations or not busy:
        return ()
    shortest = SHORTEST_RATIO * statistics.median(end - begin for begin, end in iterations)
    merged = _merged(busy)
    found = [_gaps(merged, begin, end, shortest) for begin, end in iterations]
    (count, agreeing), *_ = Counter(len(gaps) for gaps in found).most_common(1)
    if agreeing < AGREEING_RATIO * len(iterations):
        return ()
    alike = [gaps for gaps in found if len(gaps) == count]
    return tuple(_usual([gaps[index] for gaps in alike]) for index in range(count))


def _usual(gaps: Sequence[Interval]) -> IdleSpan:
    begins, ends = zip(*gaps, strict=True)
    begin = statistics.median(begins)
    return IdleSpan(begin, max(0.0, statistics.median(ends) - begin), max(_deviation(begins), _deviation(ends)))


def _deviation(values: Sequence[float]) -> float:
    """Return an estimate of the standard deviation of normally distributed values.

    A few outliers hardly change the estimate.
    """
    middle = statistics.median(values)
    return _NORMAL * statistics.median(abs(value - middle) for value in values)


def _gaps(busy: Sequence[Interval], begin: float, end: float, shortest: float) -> list[Interval]:
    """Return the idle intervals of one iteration, in seconds since the end of the previous step."""
    gaps, free_from = [], begin
    for one, other in (*busy, (end, end)):
        if other < begin:
            continue
        if min(one, end) - free_from >= shortest:
            gaps.append((free_from - begin, min(one, end) - begin))
        free_from = max(free_from, other)
        if one >= end:
            break
    return gaps


def _merged(busy: Sequence[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(busy):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
