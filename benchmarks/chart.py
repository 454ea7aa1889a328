"""Chart of recoveries as SVG: one horizontal bar per recovery, split into phases. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#c0392b", "#e08e0b", "#2471a3", "#7d8a93", "#b6bcc2")
WIDTH, LEFT, RIGHT, ROW, BAR, TOP = 860, 190, 110, 26, 16, 40
TEAR = 5
"""Half the width of the gap in a bar that is longer than the chart."""
FONT = 'font-family="system-ui, sans-serif" font-size="12"'


def stacked_bars(
    title: str, bars: Sequence[tuple[str, Mapping[str, float]]], unit: str, *, most: float | None = None
) -> str:
    """Return an SVG document.

    Args:
        title: text for screen readers.
        bars: label and parts of each bar, with the same parts in the same order. A bar without parts is a heading.
        unit: unit of the values.
        most: the largest total that fits; a longer bar is drawn with a gap. None: the chart fits its longest bar.
    """
    longest = min(most or math.inf, max((sum(parts.values()) for _, parts in bars), default=0.0)) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / longest
    height = TOP + ROW * len(bars) + 10
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    names = next((list(parts) for _, parts in bars if parts), [])
    for position, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
        start = LEFT + position * 110
        drawn.append(f'<rect x="{start}" y="12" width="12" height="12" fill="{colour}"/>')
        drawn.append(f'<text x="{start + 17}" y="22" {FONT} fill="#222">{escape(name)}</text>')
    for row, (label, parts) in enumerate(bars):
        y, x = TOP + row * ROW, float(LEFT)
        if not parts:
            drawn.append(f'<text x="{LEFT}" y="{y + 15}" {FONT} font-weight="bold" fill="#222">{escape(label)}</text>')
            continue
        drawn.append(f'<text x="{LEFT - 8}" y="{y + 13}" {FONT} fill="#222" text-anchor="end">{escape(label)}</text>')
        for value, colour in zip(parts.values(), COLOURS, strict=False):
            width = min(value * scale, LEFT + longest * scale - x)
            drawn.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
            x += width
        if sum(parts.values()) > longest:
            middle = LEFT + 0.9 * longest * scale
            edge = " ".join(
                f"{middle + (TEAR if step % 2 else -TEAR):.1f},{y + step * BAR / 4:.1f}" for step in range(5)
            )
            drawn.append(f'<polyline points="{edge}" fill="none" stroke="#ffffff" stroke-width="4"/>')
        drawn.append(
            f'<text x="{x + 6:.1f}" y="{y + 13}" {FONT} fill="#222">{sum(parts.values()):.2f} {escape(unit)}</text>'
        )
    return "\n".join([*drawn, "</svg>"]) + "\n"
