"""Report of a dashboard benchmark run: limits and measured values. Pure except for `write`."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.document import BenchmarkRun, caveats, judged, opening, table, unless_busy, verdict, write_figures
from benchmarks.measures import percentile
from control_plane.contract.markdown import wrap

COMMAND: Final = "make bench-dashboard"
INTERACTIVE_SECONDS: Final = 1.5
SHOWN_SECONDS: Final = 0.5
FRAME_MS: Final = 1000 / 30
"""Limit of the 95th percentile of frame times, in milliseconds: 30 frames per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(BenchmarkRun):
    """Measured values of one run."""

    chromium: str
    jobs: int
    nodes: int
    lines: int
    interactive_seconds: Sequence[float]
    shown_seconds: Sequence[float]
    frames_ms: dict[str, Sequence[float]]
    """Frame times in milliseconds, by the name of the scrolled element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured value with its limit."""

    what: str
    measured: float
    limit: float
    unit: str
    count: int
    spread: str
    is_inconclusive: bool = False

    @property
    def falls_short(self) -> bool:
        """Whether the value misses its limit."""
        return not self.is_inconclusive and self.measured > self.limit


def rows(run: Run) -> list[Row]:
    """Return the rows of all measured values."""
    found = [
        _row(f"list of {run.jobs:,} jobs answers, median", run.interactive_seconds, 0.5, INTERACTIVE_SECONDS, "s"),
        _row("a fault is on the page after its event was stored, 95 %", run.shown_seconds, 0.95, SHOWN_SECONDS, "s"),
    ]
    found += [
        _row(f"a frame while {what} scrolls, 95 %", frames, 0.95, FRAME_MS, "ms")
        for what, frames in run.frames_ms.items()
    ]
    return unless_busy(run, found)


def _row(what: str, values: Sequence[float], share: float, limit: float, unit: str) -> Row:
    digits = 1 if unit == "ms" else 3
    spread = f"median {statistics.median(values):.{digits}f}, {min(values):.{digits}f} to {max(values):.{digits}f}"
    return Row(what=what, measured=percentile(values, share), limit=limit, unit=unit, count=len(values), spread=spread)


def write(run: Run, figures: Path, document: Path) -> None:
    """Write the report.

    Args:
        run: the measured values.
        figures: path of the JSON file.
        document: path of the Markdown file.
    """
    write_figures(figures, dataclasses.asdict(run) | {"rows": judged(rows(run))})
    document.write_text(wrap(render(run)))


def render(run: Run) -> str:
    """Return the Markdown document."""
    machine = run.machine
    lines = [
        *opening(run, "# How fast the dashboard is", COMMAND, "dashboard.json"),
        f"- Machine: {machine.words()}, {run.chromium}, drawing without a graphics card. Load average "
        f"before the run: {machine.load}.",
        "- Browser, server and simulated fleet share the machine; server and fleet share one process.",
        f"- {run.jobs:,} jobs in the list; one of them on {run.nodes} nodes, with {run.nodes} shards; its "
        f"log has {run.lines:,} lines.",
        "- A page *answers* when a filter that was typed has narrowed its list, counted from asking for the "
        "page, by somebody who is signed in, "
        "with nothing in the browser's cache.",
        "- A fault is *on the page* when the card of the incident is in the document; it is *stored* when "
        "the transaction that made the incident "
        "has been committed.",
        "- *Smooth* is a frame in at most 33.3 ms for 95 % of the frames, while something is scrolled in "
        "every frame for 4 s "
        "and the page goes on asking.",
    ]
    lines += caveats(machine, is_quick=run.is_quick)
    head = ("what", "measured", "to reach", "spread", "n", "verdict")
    body = [
        [
            row.what,
            f"**{row.measured:.{1 if row.unit == 'ms' else 2}f}** {row.unit}",
            f"≤ {row.limit:.{1 if row.unit == 'ms' else 2}f} {row.unit}",
            f"{row.spread} {row.unit}",
            str(row.count),
            verdict(row),
        ]
        for row in rows(run)
    ]
    return "\n".join([*lines, "", table(head, body)]) + "\n"
