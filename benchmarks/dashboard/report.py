"""Computes the table rows, verdicts and page of the dashboard benchmark. The functions are pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.measures import percentile
from benchmarks.page import BenchmarkRun, Page
from benchmarks.rows import Row, limits, number, without_verdicts

INTERACTIVE_SECONDS: Final = 1.5
WEEK_SECONDS: Final = 2.0
"""Limit until the page of a job with a week of history is complete."""
SHOWN_SECONDS: Final = 0.5
FRAME_MS: Final = 1000 / 30
"""Limit of the 95th percentile: 30 frames per second."""
METRICS_MB: Final = 5.0
"""Megabytes per hour of an open Metrics tab."""
SHIFT: Final = 0.05
"""Limit of the cumulative layout shift: half of web.dev's limit for good."""
FIRST_LOAD_KB: Final = 250.0
METRICS_TAB: Final = "an open Metrics tab"
"""The only page in `Run.bytes_per_hour` with a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(BenchmarkRun):
    """Measured values of one run."""

    chromium: str
    jobs: int
    nodes: int
    lines: int
    interactive_seconds: Sequence[float]
    week_seconds: Sequence[float] = ()
    """Seconds until a job's page with a week of history (`tests.dashboard.many`), by load. Empty for older runs."""
    shown_seconds: Sequence[float]
    frames_ms: dict[str, Sequence[float]]
    """Frame times by scrolled element."""
    bytes_per_hour: dict[str, tuple[float, float]]
    """Bytes by page: measured, and if responses were complete and without compression."""
    shifts: dict[str, float]
    """Cumulative layout shift of the first load, by path."""
    first_load_bytes: dict[str, int]
    """Compressed bytes by path."""


def rows(run: Run) -> list[Row]:
    """Return one table row per measured value, with limit and verdict."""
    found = [*_times(run), *_sizes(run)]
    return without_verdicts(found) if run.is_busy else found


def _times(run: Run) -> list[Row]:
    return [
        _row(f"the list of {run.jobs:,} jobs answers, median", run.interactive_seconds, 0.5, INTERACTIVE_SECONDS, "s"),
        *(
            [_row("the job page after a week shows all, median", run.week_seconds, 0.5, WEEK_SECONDS, "s")]
            if run.week_seconds
            else []
        ),
        _row("a stored fault is on the page, p95", run.shown_seconds, 0.95, SHOWN_SECONDS, "s"),
        *(
            _row(f"a frame while {what} scrolls, p95", frames, 0.95, FRAME_MS, "ms")
            for what, frames in run.frames_ms.items()
        ),
    ]


def _sizes(run: Run) -> list[Row]:
    """Return the rows of traffic, layout shift and first load. They do not depend on the speed of the machine."""
    found = []
    for page, (received, plain) in run.bytes_per_hour.items():
        against = f"{plain / 1e6:,.0f} MB without compression and changes"
        row = Row(what=f"{page} receives per hour", value=received / 1e6, unit="MB", against=against)
        found.append(replace(row, limit=METRICS_MB).judged() if page == METRICS_TAB else row)
    for what, by_page, limit, unit in (
        ("layout shift", run.shifts, SHIFT, ""),
        ("first load", {page: size / 1e3 for page, size in run.first_load_bytes.items()}, FIRST_LOAD_KB, "kB"),
    ):
        worst = max(by_page, key=lambda page: by_page[page])
        row = Row(what=f"largest {what}: {worst}", value=by_page[worst], unit=unit, n=len(by_page), limit=limit)
        found.append(row.judged())
    return found


def _row(what: str, samples: Sequence[float], share: float, limit: float, unit: str) -> Row:
    return Row(what=what, value=percentile(samples, share), limit=limit, unit=unit, n=len(samples)).judged()


def values(run: Run) -> dict[str, str | None]:
    """Return the text per placeholder of the page's template.

    None omits its paragraph, item or section (`benchmarks.page`).
    """
    week = [run.week_seconds] if run.week_seconds else []
    samples = [run.interactive_seconds, *week, run.shown_seconds, *run.frames_ms.values()]
    judged = rows(run)
    times, sizes = judged[: len(samples)], judged[len(samples) :]
    spreads = {
        row.what: f"{number(statistics.median(each))}, {number(min(each))} to {number(max(each))} {row.unit}"
        for row, each in zip(times, samples, strict=True)
    }
    return {
        "machine": run.machine.words(),
        "chromium": run.chromium,
        "jobs": f"{run.jobs:,}",
        "nodes": str(run.nodes),
        "lines": f"{run.lines:,}",
        "limits": limits(times, ("what", "median, range"), lambda row: (row.what, spreads[row.what])),
        "sizes": limits(sizes),
        "missing": None if week else "The job page after a week is not measured yet.",
    }


PAGE: Final = Page(name="dashboard", command="make bench-dashboard", run=Run, values=values, rows=rows)
