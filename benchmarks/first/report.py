"""Computes the values, page and picture of the benchmark of blocked times, slowdown and recovery times. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.first.recovery import (
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
from benchmarks.first.slowdown import RANKS, WARM_UP_STEPS, Slowdown
from benchmarks.first.snapshot_blocking import BlockingRow
from benchmarks.measures import Summary
from benchmarks.page import BenchmarkRun, Page
from benchmarks.picture import COLOURS, Bar, Panel, panels
from benchmarks.rows import table

KINDS: tuple[tuple[Kind, str], ...] = (("rank_exit", "rank killed"), ("instance_terminated", "instance terminated"))
PICTURE = "Seconds of each recovery by phase"


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Results of the parts. Parts that were not measured are empty."""

    blocking: Sequence[BlockingRow] = ()
    slowdown: Slowdown | None = None
    budget: Slowdown | None = None
    """Slowdown of a job with `MaxSlowdown`."""
    recovery: RecoveryRun | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(BenchmarkRun):
    """Results of one run of `make bench-first`."""

    results: Results


def values(run: Run) -> dict[str, str | None]:
    """Return the text for each placeholder of the template of this benchmark's page."""
    found = run.results
    return {
        "machine": run.machine.words(*run.machine.versions),
        "blocking": _blocking(found.blocking) if found.blocking else None,
        **(_slowdown(found.slowdown) if found.slowdown else {"slowdown": None}),
        **(_budget(found.budget) if found.budget else {"budget": None}),
        **(_recovery(found.recovery) if found.recovery else {"recovery": None}),
    }


def _blocking(rows: Sequence[BlockingRow]) -> str:
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
    return table(head, [_blocking_row(row) for row in rows])


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


def _slowdown(slowdown: Slowdown) -> dict[str, str]:
    blocked = slowdown.blocked
    return {
        "ranks": str(RANKS),
        "slowdown_order": slowdown.order,
        "warm_up": str(WARM_UP_STEPS),
        "slowdown_verdict": _slowdown_verdict(slowdown),
        "blocked": f"{_ms(blocked.median)} ms (median of {blocked.count}; p99 {_ms(blocked.p99)} ms, worst "
        f"{_ms(blocked.maximum)} ms)",
        "slowdown_snapshots": f"{slowdown.snapshots_ratio:.2f}",
        "slowdown": _launches(slowdown),
    }


def _slowdown_verdict(slowdown: Slowdown) -> str:
    ratios = Summary.of(slowdown.ratios)
    return (
        f"The step under an agent took **{ratios.median:+.1%}** (median of {ratios.count} pairs; "
        f"{ratios.minimum:+.1%} to {ratios.maximum:+.1%})."
        if slowdown.is_conclusive
        else f"**Inconclusive**: {slowdown.plain_count} launch{'es' if slowdown.plain_count > 1 else ''} of the "
        "script alone, "
        f"{slowdown.plain_moved_ratio:.0%} between the fastest and the slowest. "
        f"Pairs: {', '.join(f'{ratio:+.1%}' for ratio in slowdown.ratios)}."
    )


def _budget(budget: Slowdown) -> dict[str, str]:
    return {
        "max_slowdown": f"{budget.max_slowdown:g}",
        "budget_order": budget.order,
        "settle": str(budget.settle_steps),
        "budget_verdict": _budget_verdict(budget),
        "budget_snapshots": f"{budget.snapshots_ratio:.3f}",
        "budget": _launches(budget),
    }


def _budget_verdict(budget: Slowdown) -> str:
    allowed = budget.max_slowdown or 0.0
    ratios = Summary.of(budget.ratios)
    pairs = f"median of {ratios.count} pairs; {ratios.minimum:+.1%} to {ratios.maximum:+.1%}"
    measured = f"**{ratios.median:+.1%}** ({pairs}), budget {allowed:.0%}"
    if ratios.maximum <= allowed:
        return f"The mean step under an agent took {measured}: pass."
    if budget.is_conclusive and ratios.minimum > allowed + budget.noise_ratio:
        return f"The mean step under an agent took {measured}: **falls short**."
    return f"**Inconclusive**: {measured}; launches of the same kind differ by up to {budget.noise_ratio:.0%}."


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


def _recovery(recovery: RecoveryRun) -> dict[str, str]:
    step = recovery.step
    moved = (
        f" (moved by {step.moved_ratio:.0%})"
        if step.stood_still
        else f": **inconclusive**, because it moved by {step.moved_ratio:.0%}"
    )
    return {
        "nodes": str(NODES),
        "spares": str(SPARES),
        "shard_copies": str(COPIES),
        "clocks_ratio": f"{CLOCKS_TOLERANCE_RATIO:.0%}",
        "clocks_seconds": f"{CLOCKS_TOLERANCE_SECONDS:g}",
        "step_before": _ms(step.before.median),
        "step_after": _ms(step.after.median),
        "step_moved": moved,
        "recovery": _recoveries(recovery),
    }


def _recoveries(recovery: RecoveryRun) -> str:
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
    return table(head, rows + spread)


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


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f}" if seconds < 0.01 else f"{seconds * 1000:.1f}"


def draw(run: Run) -> str | None:
    """Return the SVG document of all recoveries; None without recoveries."""
    if run.results.recovery is None:
        return None
    keys = dict(zip(PHASES, COLOURS, strict=False))
    bars = [
        Bar(
            label=f"{title} {number}",
            parts=[(each.phases[phase], colour) for phase, colour in keys.items()],
            text=f"{each.incident_seconds:.2f} s",
        )
        for cause, title in KINDS
        for number, each in enumerate(run.results.recovery.of_cause(cause), start=1)
    ]
    return panels(PICTURE, [Panel(title="", bars=bars, keys=keys)])


PAGE = Page(
    name="first",
    command="make bench-first",
    run=Run,
    values=values,
    draw=draw,
    picture=PICTURE,
    is_section=True,
)
