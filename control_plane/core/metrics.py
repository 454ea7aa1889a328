"""What a script logged, and what was measured on its nodes, as points over steps: fine where they are recent, coarse where they are old.

    width    steps per point: 1 as it was logged, then FOLD, FOLD² …
    chunk    the points of one width whose steps divided by POINTS_PER_CHUNK × width are the same number: stored and replaced as a whole

Of each width the newest `kept_chunks` stay; the oldest one beyond that is folded into the next width. So a metric takes
at most a fixed number of points per width, and there is one more width for each FOLD times as many steps.

Invariant: a step counts in one point of a metric at most, and a point never spans two chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from statistics import median

from everstep.protocol.ids import NodeId

FOLD = 8
POINTS_PER_CHUNK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What was logged in a span of steps."""

    step: int
    """The first step with a value."""
    last_step: int
    at: float
    """When the last value was logged, Unix time."""
    count: int
    """Values."""
    finite_count: int
    minimum: float
    """Of the finite values, as the mean and the maximum; NaN where there are none."""
    mean: float
    maximum: float
    last: float
    """The last value, finite or not."""
    least_on: str = ""
    """The node of the least, where it was measured on several; empty for what a script logs."""
    most_on: str = ""


def logged(step: int, at: float, value: float) -> Point:
    """Return one logged value as a point."""
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
    )


def across(step: int, at: float, values: Mapping[NodeId, float]) -> Point | None:
    """Return what several nodes measured at one step as a point.

    Args:
        step: at which.
        at: Unix seconds.
        values: by node.

    Returns:
        The median in place of the mean and of the last value: one node that is far from all others moves the least or
        the most alone. None where no value is finite.
    """
    ordered = sorted((value, node) for node, value in values.items() if math.isfinite(value))
    if not ordered:
        return None
    (least, least_on), (most, most_on) = ordered[0], ordered[-1]
    middle = median(value for value, _ in ordered)
    count = len(ordered)
    return Point(
        step=step, last_step=step, at=at, count=count, finite_count=count, minimum=least, mean=middle, maximum=most, last=middle, least_on=least_on,
        most_on=most_on,
    )  # fmt: skip


def joined(points: Sequence[Point]) -> Point:
    """Return several points, at least one, in order of steps, as one."""
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
    )


def chunk_of(step: int, width: int) -> int:
    """Return the number of the chunk that a step belongs to."""
    return step // (width * POINTS_PER_CHUNK)


def first_step(chunk: int, width: int) -> int:
    """Return the first step that a chunk may have."""
    return chunk * width * POINTS_PER_CHUNK


def kept_chunks(width: int) -> int:
    """Return how many chunks of a width a metric keeps: 4,096 steps as they were logged, then 1,024 points of each width."""
    return 32 if width == 1 else 8


def folded(points: Iterable[Point], width: int) -> tuple[Point, ...]:
    """Return points joined so that each spans at most `width` steps, aligned to it.

    Args:
        points: of smaller widths that divide it, in order of steps.
        width: steps per point.

    Returns:
        The points, in order of steps.
    """
    return _by(points, lambda point: point.step // width)


def replaced(held: Iterable[Point], fresh: Iterable[Point]) -> tuple[Point, ...]:
    """Return points by step; of those that begin at the same step, the fresh one."""
    by_step = {point.step: point for point in held} | {point.step: point for point in fresh}
    return tuple(by_step[step] for step in sorted(by_step))


def until(points: Iterable[Point], step: int) -> tuple[Point, ...]:
    """Return the points that say nothing of later steps.

    One that spans the step goes: what it says cannot be told apart any more.
    """
    return tuple(point for point in points if point.last_step <= step)


def resampled(
    points: Sequence[Point], limit: int, *, steps: int | None = None, seconds: float | None = None
) -> tuple[Point, ...]:
    """Return at most `limit` points.

    Args:
        points: in order of steps.
        limit: at least 1.
        steps: that each point is to span; None: as few as the limit allows.
        seconds: instead, that each point is to span.

    Returns:
        Points that span what was asked for, or twice that, four times, … where there would be more of them than the
        limit.
    """
    if seconds is not None:
        while len(found := _by(points, partial(_period, seconds))) > limit:
            seconds *= 2
        return found
    if steps is None and len(points) <= limit:
        return tuple(points)
    width = steps or max(1, (points[-1].last_step - points[0].step + 1) // limit)
    while len(found := folded(points, width)) > limit:
        width *= 2
    return found


def _period(seconds: float, point: Point) -> int:
    return int(point.at // seconds)


def _by(points: Iterable[Point], key: Callable[[Point], int]) -> tuple[Point, ...]:
    return tuple(joined(tuple(group)) for _, group in groupby(points, key))
