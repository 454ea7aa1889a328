"""Computes the verdicts, page and picture of the interleave benchmark. The functions are pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.interleave.figures import Figure
from benchmarks.interleave.figures import Row as SchemeRow
from benchmarks.interleave.network import CONGESTION
from benchmarks.interleave.schemes import BUFFER_BYTES, BUFFERS, KIB, MAX_SLOWDOWN, Scheme
from benchmarks.interleave.verdicts import (
    BLOCKING_COST,
    KEPT_RATIO,
    LEAST_KEPT,
    SLOWDOWN_LIMIT,
    beats_uniform,
    judge,
)
from benchmarks.page import BenchmarkRun, Page
from benchmarks.picture import OWN_COLOUR, PEER_COLOUR, Bar, Panel, panels
from benchmarks.rows import Row, table, verdict_of, without_verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(BenchmarkRun):
    """Measured values of one run of the interleave benchmark."""

    figures: Sequence[Figure]


def judged(run: Run, figure: Figure) -> Row:
    """Return the row of one case. On a busy machine, the verdict is inconclusive."""
    return without_verdicts([judge(figure)])[0] if run.is_busy else judge(figure)


def values(run: Run) -> dict[str, str | None]:
    """Return the text for each placeholder of the template of this benchmark's page."""
    first, case = run.figures[0], run.figures[0].case
    return {
        "machine": run.machine.words("torch"),
        "nodes": str(case.nodes),
        "megabits": str(case.link_megabits),
        "congestion": CONGESTION,
        "payload": f"{first.link_bytes_per_second / 1e6:.1f}",
        "collectives": str(len(case.idle_seconds)),
        "busy": f"{first.busy_ratio:.0%}",
        "spans": str(first.spans),
        "idle": f"{first.idle_seconds * 1000:.0f}",
        "state_kib": str(case.state_kib),
        "receivers": str(case.copies - 1),
        "load_ratio": f"{first.load_ratio:.0%}",
        "buffer_kib": str(BUFFER_BYTES // KIB),
        "buffers": str(BUFFERS),
        "verdict": f"**{judged(run, first).verdict}**: {judged(run, first).reason}",
        "beats": _comparison(first),
        "schemes": _schemes(first),
        "limit": f"{SLOWDOWN_LIMIT:.1%}",
        "kept_ratio": str(KEPT_RATIO),
        "blocking_cost": f"{BLOCKING_COST:.0%}",
        "cases": _cases(run) if len(run.figures) > 1 else None,
        "max_slowdown": f"{MAX_SLOWDOWN:.0%}",
        "crowded_limit": f"{MAX_SLOWDOWN:.0%}",
        "least_kept": str(LEAST_KEPT),
    }


def _comparison(figure: Figure) -> str:
    if Scheme.UNIFORM not in figure.case.schemes:
        return ""
    if beats_uniform(figure):
        return " Everstep's slowdown is smaller than that of uniform pacing: their intervals do not overlap."
    return " **Everstep's slowdown is not smaller than that of uniform pacing here**: their intervals overlap."


def _schemes(figure: Figure) -> str:
    rows = [
        [
            row.scheme.title,
            f"{row.seconds * 1000:.1f}",
            "" if row.scheme is Scheme.NONE else f"**{row.slowdown:+.2%}**",
            "" if row.scheme is Scheme.NONE else f"{row.low:+.2%} to {row.high:+.2%}",
            "" if row.scheme is Scheme.NONE else f"{row.kept_ratio:.2f}",
            "" if row.snapshot_seconds is None else f"{row.snapshot_seconds * 1000:.0f}",
            str(row.iterations),
        ]
        for row in figure.rows
    ]
    return table(("scheme", "iteration ms", "slowdown", "95 %", "kept ÷ steps", "snapshot ms", "n"), rows)


def _cases(run: Run) -> str:
    rows = [_case(run, figure) for figure in run.figures]
    head = (
        "case",
        "nodes",
        "m",
        "state KiB",
        "network busy",
        "idle ms",
        "load",
        "blocking",
        "uniform",
        "**Everstep**",
        "95 %",
        "kept ÷ steps",
        "verdict",
    )
    return table(head, rows)


def _case(run: Run, figure: Figure) -> list[str]:
    case = figure.case
    found: dict[Scheme, SchemeRow] = {row.scheme: row for row in figure.rows}
    ours = found[Scheme.EVERSTEP]
    return [
        case.name,
        str(case.nodes),
        str(case.copies),
        str(case.state_kib),
        f"{figure.busy_ratio:.0%}",
        f"{figure.idle_seconds * 1000:.0f}",
        f"{figure.load_ratio:.0%}",
        *(f"{found[scheme].slowdown:+.1%}" if scheme in found else "" for scheme in (Scheme.BLOCKING, Scheme.UNIFORM)),
        f"**{ours.slowdown:+.2%}**",
        f"{ours.low:+.2%} to {ours.high:+.2%}",
        f"{ours.kept_ratio:.2f}",
        verdict_of(judged(run, figure)),
    ]


def draw(run: Run) -> str:
    """Return the SVG document: a bar per scheme with its confidence interval."""
    figure = run.figures[0]
    base = figure.row(Scheme.NONE).seconds
    bars = []
    for row in figure.rows:
        is_base = row.scheme is Scheme.NONE
        bars.append(
            Bar(
                label=row.scheme.title,
                parts=[(row.seconds, OWN_COLOUR if row.scheme is Scheme.EVERSTEP else PEER_COLOUR)],
                text=f"{row.seconds * 1000:.0f}" + ("" if is_base else f"  ({row.slowdown:+.1%})"),
                interval=None if is_base else (base * (1 + row.low), base * (1 + row.high)),
            )
        )
    title = f"iteration time, ms; {figure.case.nodes} nodes, network busy {figure.busy_ratio:.0%}"
    return panels("Iteration time by scheme", [Panel(title=title, bars=bars, floor=base, floor_label="no checkpoint")])


PAGE = Page(
    name="interleave",
    command="make bench-interleave",
    run=Run,
    values=values,
    rows=lambda run: [judged(run, figure) for figure in run.figures],
    draw=draw,
    picture="Iteration time by scheme",
)
