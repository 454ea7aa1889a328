"""Metrics of scripts and nodes as points over steps. The older the steps, the more steps one point covers.

    width    steps per point: 1 for values as logged, then FOLD, FOLD² …
    chunk    the points of one width with the same quotient step ÷ (POINTS_PER_CHUNK × width), stored together

Each width keeps its newest `kept_chunks` chunks. The points of an older chunk are joined to points of the next width.
Invariant: each step counts in at most one point of a metric, and no point spans two chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from statistics import median

from control_plane.core.breakdowns import Breakdown, averaged, broken_down
from everstep.protocol.ids import NodeId

FOLD = 8
POINTS_PER_CHUNK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A summary of the values logged in a span of steps."""

    step: int
    last_step: int
    at: float
    """Unix seconds of the last value."""
    count: int
    finite_count: int
    minimum: float
    """`minimum`, `mean` and `maximum` are NaN if no value is finite."""
    mean: float
    maximum: float
    last: float
    """Finite or not."""
    least_on: str = ""
    """The node with the minimum. Empty for values that a script logs."""
    most_on: str = ""
    breakdown: Breakdown | None = None
    """The values (means for several steps) by node for Everstep's metrics, by rank for a script's, or None."""


def logged(step: int, at: float, value: float, by_rank: Mapping[int, float] | None = None) -> Point:
    """Return a point with the value of rank 0, and with the last values of other ranks (`by_rank`) as breakdown."""
    finite = value if math.isfinite(value) else math.nan
    return Point(
        step=step,
        last_step=step,
        at=at,
        count=1,
        finite_count=int(math.isfinite(value)),
        minimum=finite,
        mean=finite,
        maximum=finite,
        last=value,
        breakdown=broken_down({str(rank): each for rank, each in {**by_rank, 0: value}.items()}) if by_rank else None,
    )


def across(step: int, at: float, values: Mapping[NodeId, float]) -> Point | None:
    """Return a point that summarizes the values of several nodes at one step, or None if no value is finite."""
    ordered = sorted((value, node) for node, value in values.items() if math.isfinite(value))
    if not ordered:
        return None
    (least, least_on), (most, most_on) = ordered[0], ordered[-1]
    # The median is mean and last value, so that a single outlier changes only the minimum or maximum.
    middle = median(value for value, _ in ordered)
    count = len(ordered)
    return Point(
        step=step,
        last_step=step,
        at=at,
        count=count,
        finite_count=count,
        minimum=least,
        mean=middle,
        maximum=most,
        last=middle,
        least_on=least_on,
        most_on=most_on,
        breakdown=broken_down({node: value for value, node in ordered}),
    )


def joined(points: Sequence[Point]) -> Point:
    """Return several points, not empty and sorted by step, joined to one point."""
    finite = [point for point in points if point.finite_count]
    total = sum(point.finite_count for point in finite)
    least = min(finite, key=lambda point: point.minimum, default=points[0])
    most = max(finite, key=lambda point: point.maximum, default=points[0])
    return Point(
        step=points[0].step,
        last_step=points[-1].last_step,
        at=points[-1].at,
        count=sum(point.count for point in points),
        finite_count=total,
        minimum=least.minimum,
        mean=math.fsum(point.mean * (point.finite_count / total) for point in finite) if finite else math.nan,
        maximum=most.maximum,
        last=points[-1].last,
        least_on=least.least_on,
        most_on=most.most_on,
        breakdown=averaged((point.breakdown, point.count) for point in points),
    )


def chunk_of(step: int, width: int) -> int:
    """Return the index of the chunk of a step, at `width` steps per point."""
    return step // (width * POINTS_PER_CHUNK)


def first_step(chunk: int, width: int) -> int:
    """Return the first step of a chunk, at `width` steps per point."""
    return chunk * width * POINTS_PER_CHUNK


def kept_chunks(width: int) -> int:
    """Return the number of chunks of one width that the control plane stores of one metric."""
    return 32 if width == 1 else 8


def folded(points: Iterable[Point], width: int) -> tuple[Point, ...]:
    """Return the sorted points, joined to points that start at multiples of `width` steps."""
    return _by(points, lambda point: point.step // width)


def replaced(held: Iterable[Point], fresh: Iterable[Point]) -> tuple[Point, ...]:
    """Return the stored points, replaced by new points with the same first step and extended, sorted by step."""
    by_step = {point.step: point for point in held} | {point.step: point for point in fresh}
    return tuple(by_step[step] for step in sorted(by_step))


def until(points: Iterable[Point], step: int) -> tuple[Point, ...]:
    """Return those of a metric's points that contain no step after `step`."""
    return tuple(point for point in points if point.last_step <= step)


def resampled(
    points: Sequence[Point], limit: int, *, steps: int | None = None, seconds: float | None = None
) -> tuple[Point, ...]:
    """Join sorted points to points of so many steps or seconds each, doubled until at most `limit` points remain."""
    if seconds is not None:
        while len(found := _by(points, partial(_period, seconds))) > limit:
            seconds *= 2
        return found
    if steps is None and len(points) <= limit:
        return tuple(points)
    # A power of two seldom changes while a metric grows.
    width = steps or span_of(points[0].step, points[-1].last_step, limit)
    while len(found := folded(points, width)) > limit:
        width *= 2
    return found


def span_of(first_step: int, last_step: int, limit: int) -> int:
    """Return a power of two as steps per point, so that about `limit` points cover a range of steps."""
    return 1 << max(0, (last_step - first_step) // limit).bit_length()


def _period(seconds: float, point: Point) -> int:
    return int(point.at // seconds)


def _by(points: Iterable[Point], key: Callable[[Point], int]) -> tuple[Point, ...]:
    groups = (tuple(group) for _, group in groupby(points, key))
    return tuple(group[0] if len(group) == 1 else joined(group) for group in groups)
