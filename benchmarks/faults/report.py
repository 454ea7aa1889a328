"""Computes the table rows, verdicts and page of the fault benchmark. The functions are pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.faults.cases import LIMITED, UNLIMITED
from benchmarks.faults.figures import FULL_SPEED_RATIO, WHOLE, Figure, Observed, evaluate
from benchmarks.faults.picture import draw
from benchmarks.measures import Verdict
from benchmarks.page import BenchmarkRun, Page
from benchmarks.rows import BUSY, Row, table, verdict_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(BenchmarkRun):
    """Measured values of one run of the fault benchmark."""

    observed: Sequence[Observed]
    """Observations of at least one case."""


def figures(run: Run) -> list[Figure]:
    """Return the values of every fault. On a busy machine, every verdict is inconclusive."""
    found = [evaluate(each) for each in run.observed]
    if not run.is_busy:
        return found
    return [dataclasses.replace(each, verdict=Verdict.INCONCLUSIVE, told=f"{BUSY}; {each.told}") for each in found]


def row(figure: Figure) -> Row:
    return Row(
        what=figure.name,
        value=figure.ratio,
        low=figure.low,
        high=figure.high,
        n=figure.during.count,
        limit=None if figure.name == UNLIMITED else FULL_SPEED_RATIO,
        verdict=Verdict.NONE if figure.name == UNLIMITED else figure.verdict,
        reason="for comparison only" if figure.name == UNLIMITED else figure.told,
    )


def rate_limit(run: Run) -> Row | None:
    """Return the row of steps with and without the rate limit on a slow link; None without both cases."""
    found = {figure.name: figure for figure in figures(run)}
    if not found.keys() >= {LIMITED, UNLIMITED}:
        return None
    ratio = found[LIMITED].during.median / found[UNLIMITED].during.median
    judged = Row(
        what="median step with the rate limit ÷ without it", value=ratio, n=found[LIMITED].during.count, limit=1.0
    ).judged()
    return dataclasses.replace(judged, verdict=Verdict.INCONCLUSIVE, reason=BUSY) if run.is_busy else judged


def values(run: Run) -> dict[str, str | None]:
    """Return the text for each placeholder of the template of this benchmark's page."""
    fewest = min(run.observed, key=lambda each: each.span_seconds / each.copy_seconds)
    return {
        "machine": run.machine.words("torch"),
        "state_mib": str(run.observed[0].state_mib),
        "span_ms": f"{1000 * fewest.span_seconds:.0f}",
        "copies": f"{fewest.span_seconds / fewest.copy_seconds:.0f}",
        "speed": _speed(run),
        "full_speed": str(FULL_SPEED_RATIO),
        "rate_limit": None if (row := rate_limit(run)) is None else f"**{row.value:.2f}** ({verdict_of(row)})",
        "protection": _protection(run),
    }


def _speed(run: Run) -> str:
    rows = [
        [
            figure.name,
            f"{1000 * figure.before.median:.1f}",
            f"{1000 * figure.during.median:.1f}",
            f"{1000 * figure.after.median:.1f}",
            f"**{figure.ratio:.3f}**",
            f"{figure.low:.3f} to {figure.high:.3f}",
            f"{1000 * figure.longest_seconds:.0f}",
            f"{figure.lost_seconds:+.2f}",
            f"{1000 * figure.held_p99_seconds:.1f}",
            str(figure.during.count),
            verdict_of(row(figure)),
        ]
        for figure in figures(run)
    ]
    head = (
        "fault",
        "step before, ms",
        "during",
        "after",
        "during ÷ before",
        "95 %",
        "longest, ms",
        "lost, s",
        "held p99, ms",
        "n",
        "verdict",
    )
    return table(head, rows)


def _protection(run: Run) -> str:
    rows = [
        [
            figure.name,
            figure.did,
            f"{figure.commits_before:.2f}, {figure.commits_during:.2f}, {figure.commits_after:.2f}",
            figure.word,
            "" if figure.told_seconds is None else f"{figure.told_seconds:.1f}",
            "" if figure.word == WHOLE else f"{figure.healed_seconds:.1f}",
            figure.reasons[-1] if figure.reasons else "",
        ]
        for figure in figures(run)
    ]
    head = (
        "fault",
        "what was done",
        "commits ÷ steps before, during, after",
        "reported",
        "after, s",
        "Protected again after, s",
        "last reported reason",
    )
    return table(head, rows)


PAGE = Page(
    name="faults",
    command="make bench-faults",
    run=Run,
    values=values,
    rows=lambda run: [*map(row, figures(run)), *filter(None, [rate_limit(run)])],
    draw=lambda run: draw(run.observed),
    picture="Step times of each case, with the fault and the healing shaded",
)
