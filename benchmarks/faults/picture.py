"""Draws the step times of one run as SVG: a strip per case, a point per step, a shaded area during the fault. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from benchmarks.faults.figures import Observed
from benchmarks.picture import WIDTH, svg, text

LEFT, RIGHT, STRIP, GAP, TOP = 60, 20, 90, 34, 24
MOST_RATIO = 2.0
"""Upper edge of a strip, as a multiple of the median. Longer steps are drawn there."""


def draw(observed: Sequence[Observed]) -> str:
    """Return the picture of the measured faults, from top to bottom, as SVG."""
    body = [part for number, each in enumerate(observed) for part in _strip(each, TOP + (STRIP + GAP) * number)]
    return svg("Step times around each fault", TOP + (STRIP + GAP) * len(observed), body)


def _strip(observed: Observed, top: int) -> list[str]:
    spans = (observed.before, observed.during, observed.after)
    begin, end = min(span.begin for span in spans), max(span.end for span in spans)
    steps = [
        (later.at, later.at - earlier.at)
        for earlier, later in pairwise(observed.ranks[0])
        if begin <= earlier.at and later.at <= end
    ]
    middle = sorted(seconds for _, seconds in steps)[len(steps) // 2]
    scale = (WIDTH - LEFT - RIGHT) / (end - begin)

    def x(at: float) -> float:
        return LEFT + (at - begin) * scale

    def y(seconds: float) -> float:
        return top + STRIP * (1 - min(seconds / middle, MOST_RATIO) / MOST_RATIO)

    healed = max(observed.healed_at, observed.during.end)
    return [
        text(LEFT, top - 6, observed.name, weight=600),
        _shade(x(observed.during.begin), x(observed.during.end), top, "#f5b7b1"),
        _shade(x(observed.during.end), x(healed), top, "#fdebd0"),
        f'<path d="M{LEFT} {top + STRIP}H{WIDTH - RIGHT}" stroke="#999"/>',
        f'<path d="M{LEFT} {y(middle):.1f}H{WIDTH - RIGHT}" stroke="#999" stroke-dasharray="3 3"/>',
        text(LEFT - 6, y(middle) + 4, f"{1000 * middle:.0f} ms", anchor="end"),
        *(f'<circle cx="{x(at):.1f}" cy="{y(seconds):.1f}" r="1.6" fill="#1f6f54"/>' for at, seconds in steps),
        text(WIDTH - RIGHT, top + STRIP + 14, f"{end - begin:.0f} s", anchor="end"),
    ]


def _shade(begin: float, end: float, top: int, colour: str) -> str:
    return (
        f'<rect x="{begin:.1f}" y="{top}" width="{max(0.0, end - begin):.1f}" height="{STRIP}" '
        f'fill="{colour}" fill-opacity="0.6"/>'
    )
