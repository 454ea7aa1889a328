"""Report of the first benchmarks: values as JSON, a document with tables, and one picture.

Invariant: the document names the machine, its load, the number of samples and the command. A row whose floor changed is
marked as inconclusive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chart import stacked_bars
from benchmarks.document import BUSY, BenchmarkRun, caveats, opening, table, with_section, write_figures
from benchmarks.measures import FLOOR_TOLERANCE_RATIO, Summary
from benchmarks.recovery import (
    CLOCKS_TOLERANCE_RATIO,
    CLOCKS_TOLERANCE_SECONDS,
    COPIES,
    NODES,
    PHASES,
    SPARES,
    Kind,
    Recovery,
    RecoveryRun,
)
from benchmarks.slowdown import RANKS, WARM_UP_STEPS, Slowdown
from benchmarks.snapshot_blocking import BlockingRow
from control_plane.contract.markdown import wrap

COMMAND = "make bench-first"
KINDS: tuple[tuple[Kind, str], ...] = (("rank_exit", "rank killed"), ("instance_terminated", "instance terminated"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Results of the measurements. Parts that were not run are empty."""

    blocking: Sequence[BlockingRow] = ()
    slowdown: Slowdown | None = None
    budget: Slowdown | None = None
    """Slowdown of a job with `MaxSlowdown`, which limits the cost of snapshots."""
    recovery: RecoveryRun | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(BenchmarkRun):
    """Measured values of one run."""

    results: Results


def write(run: Run, figures: Path, document: Path) -> None:
    """Write the report.

    Args:
        run: the measured values.
        figures: path of the JSON file.
        document: path of the Markdown file; the picture gets the same name with another suffix.
    """
    write_figures(figures, dataclasses.asdict(run))
    picture = document.with_suffix(".svg")
    before = document.read_text() if document.exists() else ""
    document.write_text(wrap(with_section(before, COMMAND, render(run, picture.name))))
    if run.results.recovery is not None:
        picture.write_text(draw(run.results.recovery))


def render(run: Run, picture: str) -> str:
    """Return the Markdown document.

    Args:
        run: the measured values.
        picture: file name of the picture, in the document's folder.
    """
    sections = [_head(run)]
    if run.results.blocking:
        sections.append(_blocking(run.results.blocking))
    if run.results.slowdown is not None:
        sections.append(_slowdown(run.results.slowdown))
    if run.results.budget is not None:
        sections.append(_budget(run.results.budget))
    if run.results.recovery is not None:
        sections.append(_recovery(run.results.recovery, picture))
    sections.append(_limits())
    return "\n\n".join(sections) + "\n"


def draw(recovery: RecoveryRun) -> str:
    """Return the SVG document of all recoveries."""
    bars = [
        (f"{title} {number}", {phase: each.phases[phase] for phase in PHASES})
        for cause, title in KINDS
        for number, each in enumerate(recovery.of_cause(cause), start=1)
    ]
    return stacked_bars("Seconds of each recovery by phase", bars, "s")


def _head(run: Run) -> str:
    machine = run.machine
    lines = [
        *opening(run, "## First measurements", COMMAND, "first.json"),
        f"- Machine: {machine.words(*machine.versions)}.",
        f"- Load average before the run (1, 5, 15 minutes): {machine.load}.",
        "- Everything runs on this one machine: all nodes with their agents and ranks, the control plane "
        "and the local AWS share its cores, its "
        "memory and one loopback. More cores and a network per node change every figure; ratios to a floor "
        "of the same run are what carries over.",
        "- A floor is measured before and after what stands beside it. Where the two differ by more than "
        f"{FLOOR_TOLERANCE_RATIO:.0%} the row says "
        "**inconclusive**: the machine changed, and the figure says nothing.",
    ]
    quick = "This was a quick run with few and small samples: it tries the harness and measures nothing."
    lines += caveats(machine, is_quick=run.is_quick, quick=quick, busy=f"{BUSY}. These are no results: run it again.")
    return "\n".join(lines)


def _blocking(rows: Sequence[BlockingRow]) -> str:
    text = (
        "### Seconds blocked per snapshot\n\n"
        "How long one snapshot holds the training thread: the copy at the boundary and what the guard waits "
        "before the optimizer's step, as the "
        "session counts it. The state is fp32 parameters shaped like a transformer's with Adam's two "
        "moments, one rank per node, one thread. "
        "Forward and backward are a timed wait (the processor is free) or real matrix products (it is not), "
        "each about three copies long. "
        "Milliseconds; ranks taken together; with fewer than 100 samples p99 is the worst. *Mean by the "
        "script* is all that boundaries and guards "
        "took by the script's own clock, boundaries without a snapshot included, per snapshot: what the "
        "session itself does not count is in it.\n\n"
        "The first snapshots of a launch are audited: copied whole at the boundary and compared byte by "
        "byte. Floors: *memcpy* is the copy of the "
        "same tensors into warm shared memory by one thread, what a blocking snapshot costs at least; *step "
        "without* is the same loop without a "
        "session."
    )
    head = (
        "state per rank",
        "nodes × copies",
        "compute",
        "memcpy",
        "first",
        "audited",
        "**median**",
        "p99",
        "worst",
        "mean",
        "mean by the script",
        "n",
        "median ÷ memcpy",
        "step without",
        "step with",
        "steps per snapshot",
        "floors moved",
    )
    return f"{text}\n\n{table(head, [_blocking_row(row) for row in rows])}"


def _blocking_row(row: BlockingRow) -> list[str]:
    ratio = f"{row.blocked.median / row.memcpy.median:.2f}" if row.memcpy.stood_still else "inconclusive"
    return [
        f"{row.state_bytes / 1024**2:.0f} MiB",
        f"{row.shape.nodes} × {row.shape.copies}",
        row.compute,
        _ms(row.memcpy.median),
        "" if row.first_blocked is None else _ms(row.first_blocked),
        "" if row.audited_blocked is None else _ms(row.audited_blocked.median),
        f"**{_ms(row.blocked.median)}**",
        _ms(row.blocked.p99),
        _ms(row.blocked.maximum),
        _ms(row.mean_blocked),
        _ms(row.mean_held),
        str(row.blocked.count),
        ratio,
        _ms(row.plain_step.median),
        _ms(row.step.median),
        f"{row.steps_per_snapshot:.1f}",
        f"{row.memcpy.moved_ratio:.0%}, {row.plain_step.moved_ratio:.0%}"
        + ("" if row.is_conclusive else " **inconclusive**"),
    ]


def _slowdown(slowdown: Slowdown) -> str:
    ratios = Summary.of(slowdown.ratios)
    verdict = (
        f"The step under an agent took **{ratios.median:+.1%}** (median of {ratios.count} pairs; "
        f"{ratios.minimum:+.1%} to {ratios.maximum:+.1%})."
        if slowdown.is_conclusive
        else f"**Inconclusive**: {slowdown.plain_count} launch{'es' if slowdown.plain_count > 1 else ''} of the "
        "script alone, "
        f"{slowdown.plain_moved_ratio:.0%} between the fastest and the slowest. "
        f"Pairs: {', '.join(f'{ratio:+.1%}' for ratio in slowdown.ratios)}."
    )
    text = (
        "### What it costs a real model\n\n"
        f"`examples/char_gpt/train.py`, unchanged, DeepSpeed ZeRO-3 on {RANKS} ranks: under Everstep, every "
        "shard on 2 nodes (A), and the same "
        f"script alone (B), launched in the order {slowdown.order}. Step time of rank 0, the first "
        f"{WARM_UP_STEPS} steps of a launch not counted. "
        f"The agents' own work (digests, replicas, rounds) runs on the ranks' cores here.\n\n{verdict}\n\n"
        f"A snapshot held the training thread for {_ms(slowdown.blocked.median)} ms (median of "
        f"{slowdown.blocked.count}; p99 "
        f"{_ms(slowdown.blocked.p99)} ms, worst {_ms(slowdown.blocked.maximum)} ms); snapshots ÷ steps "
        f"{slowdown.snapshots_ratio:.2f}."
    )
    return f"{text}\n\n{_launches(slowdown)}"


def _budget(budget: Slowdown) -> str:
    """Return the section on the job with `MaxSlowdown`."""
    allowed = budget.max_slowdown or 0.0
    ratios = Summary.of(budget.ratios)
    pairs = f"median of {ratios.count} pairs; {ratios.minimum:+.1%} to {ratios.maximum:+.1%}"
    told = f"**{ratios.median:+.1%}** of the {allowed:.0%} that it allows ({pairs})"
    if ratios.maximum <= allowed:
        verdict = f"The mean step under an agent took {told}: pass."
    elif budget.is_conclusive and ratios.minimum > allowed + budget.noise_ratio:
        verdict = f"The mean step under an agent took {told}: **falls short**."
    else:
        verdict = f"**Inconclusive**: {told}; launches of the same kind differ by up to {budget.noise_ratio:.0%}."
    text = (
        "### What it costs under a budget\n\n"
        f"The same under `Protection.MaxSlowdown` {allowed:g}, which the service takes where a job says "
        f"nothing, in the order {budget.order}. "
        "Steps are proposed less often until what they cost is allowed for. The mean step of rank 0, the first "
        f"{budget.settle_steps} steps of a launch not counted, in which the cost is learnt.\n\n{verdict}\n\n"
        f"Snapshots ÷ steps {budget.snapshots_ratio:.3f}."
    )
    return f"{text}\n\n{_launches(budget)}"


def _launches(slowdown: Slowdown) -> str:
    head = ("launch", "", "median step ms", "p99", "fastest", "n")
    rows = [
        [
            str(number),
            "under an agent" if kind == "A" else "alone",
            _ms(each.median),
            _ms(each.p99),
            _ms(each.minimum),
            str(each.count),
        ]
        for number, (kind, each) in enumerate(zip(slowdown.order, slowdown.step_seconds, strict=True), start=1)
    ]
    return table(head, rows)


def _recovery(recovery: RecoveryRun, picture: str) -> str:
    step = recovery.step
    text = (
        "### Seconds per recovery\n\n"
        f"The same model on {NODES} nodes and {SPARES} spare, every shard on {COPIES} nodes. Ranks are "
        "killed with SIGKILL, instances terminated "
        "through the EC2 API, each time with a spare that has booted and can start ranks warm. Waiting for "
        "a replacement is no part of this.\n\n"
        "The four phases are the incident's own. *From outside* is from the kill until the API showed the "
        "first step beyond the highest one "
        "reached before it; *by the ranks* until every rank had written that step down itself. Neither "
        "knows of the incident's clock, which "
        "begins when the failure is dated. Lost steps are counted from the step that was restored to the "
        "highest boundary that was reported "
        "(incident), or that any rank had written down. An incident ends when that boundary is reached "
        "again, one step before the other two. "
        f"**Disagrees**: sum and *from outside* differ by more than {CLOCKS_TOLERANCE_RATIO:.0%} and "
        f"{CLOCKS_TOLERANCE_SECONDS:g} s; then believe the outside.\n\n"
        f"Undisturbed step: {_ms(step.before.median)} ms before, {_ms(step.after.median)} ms after all failures"
        + (
            f" ({step.moved_ratio:.0%} moved)."
            if step.stood_still
            else f": **inconclusive**, it moved by {step.moved_ratio:.0%}."
        )
    )
    head = (
        "failure",
        "restored from",
        *(f"{phase} s" for phase in PHASES),
        "sum s",
        "from outside s",
        "by the ranks s",
        "lost steps",
        "by the ranks",
    )
    rows = [
        _recovery_row(f"{title} {number}", each)
        for cause, title in KINDS
        for number, each in enumerate(recovery.of_cause(cause), start=1)
    ]
    spread = [
        row
        for cause, title in KINDS
        if (found := recovery.of_cause(cause))
        for row in (
            [f"**{title}, median**", *_spread(found, "median")],
            [f"{title}, min to max", *_spread(found, "range")],
        )
    ]
    return f"{text}\n\n{table(head, rows + spread)}\n\n![Seconds of each recovery by phase]({picture})"


def _recovery_row(title: str, each: Recovery) -> list[str]:
    figures = (*(each.phases[phase] for phase in PHASES), each.incident_seconds, each.api_seconds, each.rank_seconds)
    told = [f"{figure:.2f}" for figure in figures]
    if not each.clocks_agree:
        told[len(PHASES)] += " **disagrees**"
    return [title, each.restore_source, *told, str(each.lost_steps), str(each.rank_lost_steps)]


def _spread(found: Sequence[Recovery], which: str) -> list[str]:
    columns: list[list[float]] = [[each.phases[phase] for each in found] for phase in PHASES]
    columns += [
        [each.incident_seconds for each in found],
        [each.api_seconds for each in found],
        [each.rank_seconds for each in found],
    ]
    summaries = [Summary.of(column) for column in columns]
    lost = [Summary.of([each.lost_steps for each in found]), Summary.of([each.rank_lost_steps for each in found])]
    if which == "median":
        return [
            f"n = {len(found)}",
            *(f"**{summary.median:.2f}**" for summary in summaries),
            *(f"**{summary.median:g}**" for summary in lost),
        ]
    return [
        "",
        *(f"{summary.minimum:.2f} to {summary.maximum:.2f}" for summary in summaries),
        *(f"{summary.minimum:g} to {summary.maximum:g}" for summary in lost),
    ]


def _limits() -> str:
    return (
        "### What this does not say\n\n"
        "No GPU, no second machine, no network: copies over PCIe and replicas over a real link are not "
        "measured here. Losses of a whole group and "
        "restores from S3 are not timed. States are small beside real ones."
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f}" if seconds < 0.01 else f"{seconds * 1000:.1f}"
