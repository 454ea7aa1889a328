"""Computes idle spans: the times in each iteration at which training does not use the network. Pure.

Invariant: the result contains spans only if most iterations have the same number of spans.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence

from everstep.protocol.rank_messages import IdleSpan

SHORTEST_RATIO = 0.01
"""Shortest span, as a fraction of the iteration. A shorter span is useless for transfers."""
AGREEING_RATIO = 0.5
"""Smallest fraction of the iterations that must have the same number of spans."""

_NORMAL = 1.4826
"""A normal distribution's standard deviation, divided by its median absolute deviation."""

Interval = tuple[float, float]
"""Start and end, in seconds of one clock."""


def idle_spans(busy: Sequence[Interval], boundaries: Sequence[float]) -> tuple[IdleSpan, ...]:
    """Return the spans in order of time, in seconds since the previous iteration; empty without use or a pattern.
    `busy` intervals may overlap, in any order. `boundaries` ascend. One delayed iteration would shift the averages that
    GEMINI (Wang et al., SOSP '23, section 5.4) uses, so the result uses medians.
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
    """Estimate the standard deviation of normally distributed values, hardly changed by a few outliers."""
    middle = statistics.median(values)
    return _NORMAL * statistics.median(abs(value - middle) for value in values)


def _gaps(busy: Sequence[Interval], begin: float, end: float, shortest: float) -> list[Interval]:
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
