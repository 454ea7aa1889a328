"""Report of an interleave benchmark run: values as JSON, one document with tables, one picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from benchmarks.document import BUSY, BenchmarkRun, caveats, opening, table, write_figures
from benchmarks.interleave.figures import Figure, Row
from benchmarks.interleave.network import CONGESTION
from benchmarks.interleave.schemes import BUFFER_BYTES, BUFFERS, KIB, MAX_SLOWDOWN, Scheme
from benchmarks.interleave.verdicts import (
    BLOCKING_COST,
    KEPT_RATIO,
    LEAST_KEPT,
    SLOWDOWN_LIMIT,
    Judgement,
    Verdict,
    beats_uniform,
    judge,
)
from control_plane.contract.markdown import wrap

COMMAND = "make bench-interleave"
WIDTH, LEFT, RIGHT, ROW, BAR, TOP = 860, 220, 150, 30, 16, 40
FONT = 'font-family="system-ui, sans-serif" font-size="12"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(BenchmarkRun):
    """Measured values of one run."""

    figures: Sequence[Figure]


def write(run: Run, figures: Path, document: Path) -> None:
    """Write the report.

    Args:
        run: the measured values; its first case has all schemes.
        figures: path of the JSON file.
        document: path of the Markdown file; the picture gets the same name with another suffix.
    """
    write_figures(figures, run.with_found(cases=[_judged(run, figure) for figure in run.figures]))
    picture = document.with_suffix(".svg")
    document.write_text(wrap(render(run, picture.name)))
    picture.write_text(draw(run.figures[0]))


def _judged(run: Run, figure: Figure) -> dict[str, object]:
    return dataclasses.asdict(figure) | {"load_ratio": figure.load_ratio} | dataclasses.asdict(judgement(run, figure))


def judgement(run: Run, figure: Figure) -> Judgement:
    """Return the verdict on one case of a run. On a busy machine, the verdict is inconclusive."""
    found = judge(figure)
    return (
        dataclasses.replace(found, verdict=Verdict.INCONCLUSIVE, reason=f"{BUSY}; {found.reason}")
        if run.is_busy
        else found
    )


def render(run: Run, picture: str) -> str:
    """Return the Markdown document.

    Args:
        run: the measured values.
        picture: file name of the picture, in the document's folder.
    """
    first = run.figures[0]
    sections = [_head(run), _setting(first), _schemes(run, picture)]
    if len(run.figures) > 1:
        sections.append(_cases(run))
    return "\n\n".join([*sections, _limits()]) + "\n"


def _head(run: Run) -> str:
    machine = run.machine
    lines = [
        *opening(
            run,
            "# Snapshots between collectives",
            COMMAND,
            "interleave.json",
            preface="GEMINI's Figure 16 on one machine. ",
        ),
        f"- Machine: {machine.words('torch')}.",
        f"- Load average before the run (1, 5, 15 minutes): {machine.load}.",
    ]
    late = (
        "collectives and timers were late for reasons that have nothing to do with snapshots. These are no "
        "results: run it again."
    )
    return "\n".join(lines + caveats(machine, is_quick=run.is_quick, busy=f"{BUSY}: {late}"))


def _setting(figure: Figure) -> str:
    case = figure.case
    return (
        "## What runs\n\n"
        f"{case.nodes} nodes, each a network namespace of its own behind a link of {case.link_megabits} "
        "Mbit/s (tbf, both directions; TCP under "
        f"{CONGESTION}; payload as probed: {figure.link_bytes_per_second / 1e6:.1f} MB/s). Each has a rank "
        "and an agent. The rank's collectives are "
        f"real gloo all-reduces, {len(case.idle_seconds)} an iteration; its computation is a **timed "
        "wait**. Without checkpoint the network is in "
        f"use for {figure.busy_ratio:.0%} of an iteration, and torch's profiler, over 20 iterations, found "
        f"{figure.spans} idle spans of together "
        f"{figure.idle_seconds * 1000:.0f} ms. Every node sends its {case.state_kib} KiB to "
        f"{case.copies - 1} other and receives as much, "
        f"{figure.load_ratio:.0%} of the idle time.\n\n"
        "Of the product run the profiler, the pacers with the part of Algorithm 2 that finds a chunk's "
        "opening, and the sender of chunks, in the "
        "last of the other jobs also the budget and the trial whether pacing pays. The rest "
        "is the benchmark's own, and smaller: one TCP connection to each holder without a handshake, no "
        "copy at the boundary, no slots, no digests, "
        "no resumption, no round. A holder takes the bytes into memory and acknowledges a transfer once, "
        "when it has all of it: *kept* are such "
        "acknowledged snapshots, not commits.\n\n"
        "*Blocking* sends everything at the boundary while training waits. *One partition per span* and "
        "*many partitions, no pipeline* are "
        f"Algorithm 2 with one receive buffer (as large as the span, or {BUFFER_BYTES // KIB} KiB), which "
        "is copied out before the next chunk is "
        "sent; that copy is a timed wait at the link's rate, as GEMINI measured it, and training waits for "
        "what did not fit. (The paper's *one "
        "partition* runs out of GPU memory; a CPU does not.) *Uniform pacing* spreads the bytes over 0.8 of "
        "the iteration. *Everstep* fits chunks "
        f"into the profiled spans and receives in place; GEMINI's {BUFFERS} sub-buffers, which overlap that "
        "copy with the next chunk, are not needed "
        "for that."
    )


def _schemes(run: Run, picture: str) -> str:
    figure = run.figures[0]
    judged = judgement(run, figure)
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
    comparison = (
        ""  # the run measured only some of the cases
        if Scheme.UNIFORM not in figure.case.schemes
        else " Scheduling beats uniform pacing: their intervals do not meet."
        if beats_uniform(figure)
        else " **Scheduling does not beat uniform pacing here**: their intervals meet."
    )
    return (
        f"## The schemes\n\n**{judged.verdict}**: {judged.reason}.{comparison}\n\n"
        f"{table(('scheme', 'iteration ms', 'slowdown', '95 %', 'kept ÷ steps', 'snapshot ms', 'n'), rows)}\n\n"
        "The schemes take turns in blocks, in another order each round, the first iteration of a block not "
        "counted. A slowdown is that of all "
        "iterations against those without checkpoint at the same place of the same round; its interval is a "
        "bootstrap over these pairs. A snapshot "
        "counts as kept when every holder had every byte before the next boundary.\n\n"
        f"![Iteration time by scheme]({picture})"
    )


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
    return (
        "## Other jobs\n\n"
        f"To reach: at most {SLOWDOWN_LIMIT:.1%} by the upper end of Everstep's interval and {KEPT_RATIO} "
        "snapshots kept per step, where blocking "
        f"costs {BLOCKING_COST:.0%} or more. *Load* is the snapshots' part of the idle time. Inconclusive: "
        "the noise is wider than the limit.\n\n"
        f"{table(head, rows)}\n\n"
        "Where a snapshot is more than the idle time can hold (*too little idle time*), steps are proposed "
        "as far apart as the product's budget says "
        f"(`Traffic` with `Budget`, `max_slowdown` {MAX_SLOWDOWN:.0%}), from what the run measures and "
        "after a time in which it learns; snapshots "
        f"may take longer than a step. To reach: at most {MAX_SLOWDOWN:.0%} by the upper end of the "
        f"interval, and {LEAST_KEPT} snapshots kept."
    )


def _case(run: Run, figure: Figure) -> list[str]:
    case = figure.case
    found: dict[Scheme, Row] = {row.scheme: row for row in figure.rows}
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
        f"{judgement(run, figure).verdict}: {judgement(run, figure).reason}",
    ]


def _limits() -> str:
    return (
        "## What this does not say\n\n"
        "This is gloo over TCP on shaped virtual links, with computation that takes no processor. It says "
        "nothing about EFA, NCCL, GPUs, or the "
        "interference of copies with computation. The nodes share one machine's cores: a late timer of one "
        "node is an iteration of all of them."
    )


def draw(figure: Figure) -> str:
    """Return the SVG document: a bar per scheme, and a line for the bar's confidence interval."""
    base = figure.row(Scheme.NONE).seconds
    longest = max(max(row.seconds, base * (1 + row.high)) for row in figure.rows)
    scale = (WIDTH - LEFT - RIGHT) / longest
    height = TOP + ROW * len(figure.rows) + 10
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="Iteration time by scheme">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" {FONT} fill="#222">iteration time, ms; {figure.case.nodes} nodes, network '
        f"busy {figure.busy_ratio:.0%}</text>",
        f'<path d="M{LEFT + base * scale:.1f} {TOP - 6}V{height - 6}" stroke="#999" stroke-dasharray="3 3"/>',
    ]
    for position, row in enumerate(figure.rows):
        y = TOP + position * ROW
        colour = "#1e8449" if row.scheme is Scheme.EVERSTEP else "#7d8a93" if row.scheme is Scheme.NONE else "#2471a3"
        drawn.append(
            f'<text x="{LEFT - 8}" y="{y + 13}" {FONT} fill="#222" text-anchor="end">{escape(row.scheme.title)}</text>'
        )
        drawn.append(f'<rect x="{LEFT}" y="{y}" width="{row.seconds * scale:.1f}" height="{BAR}" fill="{colour}"/>')
        end = LEFT + row.seconds * scale
        if row.scheme is not Scheme.NONE:
            low, high = (LEFT + base * (1 + bound) * scale for bound in (row.low, row.high))
            drawn.append(
                f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + BAR / 2}" y2="{y + BAR / 2}" stroke="#111" '
                'stroke-width="2"/>'
            )
            end = max(end, high)
        label = f"{row.seconds * 1000:.0f}" + ("" if row.scheme is Scheme.NONE else f"  ({row.slowdown:+.1%})")
        drawn.append(f'<text x="{end + 6:.1f}" y="{y + 13}" {FONT} fill="#222">{escape(label)}</text>')
    return "\n".join([*drawn, "</svg>"]) + "\n"
