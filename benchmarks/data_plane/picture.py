"""Picture of one run as SVG: a panel per metric, a bar per system, the floor as a line. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from benchmarks.data_plane.rows import EVERSTEP, Figure, LaunchFloor

PANELS = (
    ("training blocked per snapshot", "blocked", ("memcpy",)),
    ("on both nodes, both directions at once", "commit", ("both_ways", "digest")),
    ("restore into the model, own node", "restore_local", ("memcpy",)),
    ("restore into the model, from the peer", "restore_peer", ("one_way", "digest")),
)
OWN_METRIC = {"blocked": "blocked_p50"}
WIDTH, LEFT, RIGHT, ROW, BAR = 900, 230, 90, 22, 14
FONT = 'font-family="system-ui, sans-serif" font-size="12"'
OWN_COLOUR, PEER_COLOUR, FLOOR_COLOUR = "#1f6f54", "#9aa5ad", "#c0392b"


def draw(figures: Sequence[Figure], floors: Mapping[int, Mapping[str, LaunchFloor]]) -> str:
    """Return the SVG document for the largest measured state.

    Args:
        figures: rows of the whole run.
        floors: floors in ms per GiB, by state size in MiB.
    """
    sizes = sorted(floors)
    body: list[str] = []
    y = 20
    for size in sizes:
        for title, metric, made_of in PANELS:
            bars = [
                each
                for each in figures
                if each.state_mib == size
                and each.metric == (OWN_METRIC.get(metric, metric) if each.system == EVERSTEP else metric)
                and each.n
            ]
            if bars:
                body += _panel(
                    f"{title}, {size} MiB, ms/GiB",
                    bars,
                    sum(floors[size][name].median for name in made_of),
                    " + ".join(made_of),
                    y,
                )
                y += ROW * (len(bars) + 2)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" '
            'aria-label="Milliseconds per GiB by system">',
            f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>',
            *body,
            "</svg>\n",
        ]
    )


def _panel(title: str, bars: Sequence[Figure], floor: float, made_of: str, top: int) -> list[str]:
    scale = (WIDTH - LEFT - RIGHT) / max(floor, *(bar.value for bar in bars))
    drawn = [f'<text x="8" y="{top + 12}" {FONT} font-weight="600" fill="#222">{escape(title)}</text>']
    for row, bar in enumerate(bars, start=1):
        y = top + row * ROW
        colour = OWN_COLOUR if bar.system == EVERSTEP else PEER_COLOUR
        drawn.append(
            f'<text x="{LEFT - 8}" y="{y + 12}" {FONT} fill="#222" text-anchor="end">{escape(bar.system)}</text>'
        )
        drawn.append(
            f'<rect x="{LEFT}" y="{y}" width="{max(1.0, bar.value * scale):.1f}" height="{BAR}" fill="{colour}"/>'
        )
        drawn.append(
            f'<text x="{LEFT + bar.value * scale + 6:.1f}" y="{y + 12}" {FONT} fill="#222">{bar.value:.1f}</text>'
        )
    x, height = LEFT + floor * scale, ROW * len(bars)
    drawn.append(
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top + ROW - 4}" y2="{top + ROW + height - 4}" '
        f'stroke="{FLOOR_COLOUR}" stroke-dasharray="4 3"/>'
    )
    drawn.append(
        f'<text x="{WIDTH - 8}" y="{top + 12}" {FONT} fill="{FLOOR_COLOUR}" text-anchor="end">floor: '
        f"{escape(made_of)} {floor:.0f}</text>"
    )
    return drawn
