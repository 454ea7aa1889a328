"""When training leaves the network alone, from when it used it. Pure: times in, spans out.

Invariant: a span is reported only where most iterations agree that there is one; what differs from iteration to
iteration is no pattern.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence

from everstep.protocol.rank_messages import IdleSpan

SHORTEST_RATIO = 0.01
"""Gaps below this part of an iteration are counted as busy: nothing worth sending fits."""
AGREEING_RATIO = 0.5
"""Part of the iterations that must show the same number of spans."""

_NORMAL = 1.4826
"""Standard deviation over median absolute deviation, of the normal distribution."""

Interval = tuple[float, float]
"""From, to; seconds on one clock."""


def idle_spans(busy: Sequence[Interval], boundaries: Sequence[float]) -> tuple[IdleSpan, ...]:
    """Return the idle spans of a usual iteration.

    Medians, where GEMINI averages (section 5.4): one iteration that something else held up moves the mean of every span
    behind it, and makes its deviation useless.

    Args:
        busy: when the network was in use, in any order, overlapping or not.
        boundaries: between which the iterations lie, ascending, on the same clock.

    Returns:
        Spans after the boundary in order of time; none where the network was never used, or where no pattern repeats.
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
    """Return the standard deviation, if the values are normal; a few that are not hardly change it."""
    middle = statistics.median(values)
    return _NORMAL * statistics.median(abs(value - middle) for value in values)


def _gaps(busy: Sequence[Interval], begin: float, end: float, shortest: float) -> list[Interval]:
    """Return what an iteration leaves free, counted from its boundary."""
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
