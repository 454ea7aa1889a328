"""Picture of one run as SVG: a strip per case, a point per step, a shaded area for the fault. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from benchmarks.faults.figures import Observed

WIDTH, LEFT, RIGHT, STRIP, GAP, TOP = 900, 60, 20, 90, 34, 24
MOST_RATIO = 2.0
"""Upper edge of a strip, as a multiple of the median step time. Longer steps are drawn at the edge."""
FONT = 'font-family="system-ui, sans-serif" font-size="12"'


def draw(observed: Sequence[Observed]) -> str:
    """Return the SVG document.

    Args:
        observed: the cases, in order.
    """
    height = TOP + (STRIP + GAP) * len(observed)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="Step times around each fault">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, each in enumerate(observed):
        drawn += _strip(each, TOP + (STRIP + GAP) * number)
    return "\n".join([*drawn, "</svg>"]) + "\n"


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
        f'<text x="{LEFT}" y="{top - 6}" {FONT} font-weight="600" fill="#222">{escape(observed.name)}</text>',
        _shade(x(observed.during.begin), x(observed.during.end), top, "#f5b7b1"),
        _shade(x(observed.during.end), x(healed), top, "#fdebd0"),
        f'<path d="M{LEFT} {top + STRIP}H{WIDTH - RIGHT}" stroke="#999"/>',
        f'<path d="M{LEFT} {y(middle):.1f}H{WIDTH - RIGHT}" stroke="#999" stroke-dasharray="3 3"/>',
        f'<text x="{LEFT - 6}" y="{y(middle) + 4:.1f}" {FONT} fill="#222" '
        f'text-anchor="end">{1000 * middle:.0f} ms</text>',
        *(f'<circle cx="{x(at):.1f}" cy="{y(seconds):.1f}" r="1.6" fill="#1f6f54"/>' for at, seconds in steps),
        f'<text x="{WIDTH - RIGHT}" y="{top + STRIP + 14}" {FONT} fill="#222" '
        f'text-anchor="end">{end - begin:.0f} s</text>',
    ]


def _shade(begin: float, end: float, top: int, colour: str) -> str:
    return (
        f'<rect x="{begin:.1f}" y="{top}" width="{max(0.0, end - begin):.1f}" height="{STRIP}" '
        f'fill="{colour}" fill-opacity="0.6"/>'
    )
