"""Results, limits and page of the dashboard benchmark, as pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.measures import percentile
from benchmarks.page import BenchmarkRun, Page
from benchmarks.rows import Row, limits, number, without_verdicts

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


def rows(run: Run) -> list[Row]:
    """Return the rows of all measured values."""
    found = [
        _row(f"the list of {run.jobs:,} jobs answers, median", run.interactive_seconds, 0.5, INTERACTIVE_SECONDS, "s"),
        _row("a stored fault is on the page, p95", run.shown_seconds, 0.95, SHOWN_SECONDS, "s"),
        *(
            _row(f"a frame while {what} scrolls, p95", frames, 0.95, FRAME_MS, "ms")
            for what, frames in run.frames_ms.items()
        ),
    ]
    return without_verdicts(found) if run.is_busy else found


def _row(what: str, samples: Sequence[float], share: float, limit: float, unit: str) -> Row:
    return Row(what=what, value=percentile(samples, share), limit=limit, unit=unit, n=len(samples)).judged()


def values(run: Run) -> dict[str, str | None]:
    """Return the texts that replace the placeholders of the page's template, by placeholder.

    If a text is None, the page omits the paragraph, item or section with this placeholder (`benchmarks.page`).
    """
    samples = [run.interactive_seconds, run.shown_seconds, *run.frames_ms.values()]
    spreads = {
        row.what: f"{number(statistics.median(each))}, {number(min(each))} to {number(max(each))} {row.unit}"
        for row, each in zip(rows(run), samples, strict=True)
    }
    return {
        "machine": run.machine.words(),
        "chromium": run.chromium,
        "jobs": f"{run.jobs:,}",
        "nodes": str(run.nodes),
        "lines": f"{run.lines:,}",
        "limits": limits(rows(run), ("what", "median, range"), lambda row: (row.what, spreads[row.what])),
    }


PAGE: Final = Page(name="dashboard", command="make bench-dashboard", run=Run, values=values, rows=rows)
