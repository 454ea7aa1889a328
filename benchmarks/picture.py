"""Draws measured values as SVG: horizontal bars of coloured parts, with an optional line for a lower bound. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = ("#c0392b", "#e08e0b", "#2471a3", "#7d8a93", "#b6bcc2")
OWN_COLOUR, PEER_COLOUR, FLOOR_COLOUR = "#1f6f54", "#9aa5ad", "#c0392b"
WIDTH, LEFT, RIGHT, ROW, BAR = 900, 230, 150, 24, 15
TEAR = 5
"""Half the gap in a bar longer than the picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A horizontal bar of coloured parts."""

    label: str
    parts: Sequence[tuple[float, str]]
    """Length, in the unit of the values, and colour, from left to right."""
    text: str
    """Text to the right of the bar."""
    interval: tuple[float, float] | None = None

    @property
    def value(self) -> float:
        """The sum of the parts."""
        return sum(value for value, _ in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Bars with a heading and a common scale."""

    title: str
    bars: Sequence[Bar]
    floor: float | None = None
    """Dashed line across all bars."""
    floor_label: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Legend: colour by text."""


def panels(title: str, drawn: Sequence[Panel], *, most: float | None = None) -> str:
    """Return an SVG document of panels one below the other, with `title` for screen readers.

    A bar longer than `most` is drawn with a gap. None: each panel fits its longest bar.
    """
    body: list[str] = []
    y = 10
    for panel in drawn:
        body += _panel(panel, y, most)
        y += ROW * (len(panel.bars) + 1) + 10
    return svg(title, y, body)


def svg(title: str, height: int, body: Iterable[str]) -> str:
    """Return an SVG document with a white background."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-label="{escape(title)}">',
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            *body,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, *, anchor: str = "start", colour: str = "#222", weight: int = 400) -> str:
    """Return an SVG element with one line of text from the base line (x, y). `anchor` is start or end."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-family="system-ui, sans-serif" font-size="12" fill="{colour}" '
        f'font-weight="{weight}" text-anchor="{anchor}">{escape(words)}</text>'
    )


def _panel(panel: Panel, top: int, most: float | None) -> list[str]:
    ends = [max(bar.value, bar.interval[1] if bar.interval else 0.0) for bar in panel.bars]
    longest = min(most or math.inf, max([panel.floor or 0.0, *ends])) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / longest
    drawn = [text(8, top + 12, panel.title, weight=600)]
    for position, (name, colour) in enumerate(panel.keys.items()):
        start = LEFT + position * 110
        drawn.append(f'<rect x="{start}" y="{top + 2}" width="12" height="12" fill="{colour}"/>')
        drawn.append(text(start + 17, top + 12, name))
    for row, bar in enumerate(panel.bars, start=1):
        drawn += _bar(bar, top + row * ROW, scale, longest)
    if panel.floor is not None:
        x, height = LEFT + panel.floor * scale, ROW * len(panel.bars)
        drawn.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top + ROW - 4}" y2="{top + ROW + height - 4}" '
            f'stroke="{FLOOR_COLOUR}" stroke-dasharray="4 3"/>'
        )
        drawn.append(text(WIDTH - 8, top + 12, panel.floor_label, anchor="end", colour=FLOOR_COLOUR))
    return drawn


def _bar(bar: Bar, y: int, scale: float, longest: float) -> list[str]:
    x = float(LEFT)
    drawn = [text(LEFT - 8, y + 12, bar.label, anchor="end")]
    for value, colour in bar.parts:
        width = min(value * scale, LEFT + longest * scale - x)
        drawn.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
        x += width
    if bar.value > longest:
        middle = LEFT + 0.9 * longest * scale
        edge = " ".join(f"{middle + (TEAR if step % 2 else -TEAR):.1f},{y + step * BAR / 4:.1f}" for step in range(5))
        drawn.append(f'<polyline points="{edge}" fill="none" stroke="#ffffff" stroke-width="4"/>')
    if bar.interval is not None:
        low, high = (LEFT + bound * scale for bound in bar.interval)
        drawn.append(
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + BAR / 2}" y2="{y + BAR / 2}" stroke="#111" '
            'stroke-width="2"/>'
        )
        x = max(x, high)
    return [*drawn, text(x + 6, y + 12, bar.text)]
