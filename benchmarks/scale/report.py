"""Report of a scale benchmark run: values as JSON, a document with tables. Pure except for `write`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from benchmarks.document import BenchmarkRun, caveats, judged, opening, table, unless_busy, verdict, write_figures
from benchmarks.measures import Summary
from benchmarks.scale.placement import DOMAIN_NODES, LOST_DOMAINS, LOST_NODES, DomainFigure, Known, PlanFigure
from benchmarks.scale.rounds import ROUNDS, RoundFigure
from control_plane.contract.markdown import wrap

COMMAND = "make bench-scale"
LIMIT_SECONDS = 1.0
"""Limit for the slowest call. The design goal is well below one second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(BenchmarkRun):
    """Measured values of one run."""

    plans: Sequence[PlanFigure]
    """Placement without failure domains, for at least one number of nodes."""
    domains: Sequence[DomainFigure]
    """Placement over failure domains, for at least one number of nodes."""
    known: Sequence[Known]
    rounds: Sequence[RoundFigure]

    @property
    def falls_short(self) -> bool:
        """Whether a call is too slow, or a probability differs from its published value."""
        return any(row.falls_short for row in rows(self)) or any(known.falls_short for known in self.known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One timed function with its limit."""

    what: str
    seconds: float
    """Duration of the slowest call."""
    median_seconds: float
    count: int
    """Number of calls."""
    is_inconclusive: bool = False

    @property
    def falls_short(self) -> bool:
        """Whether the slowest call exceeds the limit."""
        return not self.is_inconclusive and self.seconds >= LIMIT_SECONDS


def rows(run: Run) -> list[Row]:
    """Return the rows for the largest measured number of nodes."""
    most = max(figure.nodes for figure in run.plans)
    plans = [figure for figure in run.plans if figure.nodes == most]
    domains = [figure for figure in run.domains if figure.nodes == most]
    lost = max(lost for figure in plans for lost in figure.odds)
    timed = {
        f"`placement.plan` of {most:,} nodes": (figure.plan_seconds for figure in plans),
        f"the same over failure domains of {DOMAIN_NODES} nodes": (figure.plan_seconds for figure in domains),
        f"exact odds of recovery for {most:,} nodes, up to {lost:,} of them lost": (
            figure.odds_seconds for figure in plans
        ),
        f"exact odds for {most:,} nodes, {_either(LOST_DOMAINS)} domains lost": (
            figure.odds_seconds for figure in domains
        ),
    }
    return unless_busy(
        run, [_row(what, [each for calls in seconds for each in calls]) for what, seconds in timed.items()]
    )


def _row(what: str, seconds: Sequence[float]) -> Row:
    summary = Summary.of(seconds)
    return Row(what=what, seconds=summary.maximum, median_seconds=summary.median, count=summary.count)


def write(run: Run, figures: Path, document: Path) -> None:
    """Write the report.

    Args:
        run: the measured values.
        figures: path of the JSON file.
        document: path of the Markdown file.
    """
    found = run.with_found(
        rows=judged(rows(run)),
        known=judged(run.known),
        plans=[dataclasses.asdict(figure) for figure in run.plans],
        domains=[dataclasses.asdict(figure) for figure in run.domains],
        rounds=[dataclasses.asdict(figure) for figure in run.rounds],
    )
    write_figures(figures, found)
    document.write_text(wrap(render(run)))


def render(run: Run) -> str:
    """Return the Markdown document."""
    return (
        "\n\n".join([_head(run), _reached(run), _known(run), _plans(run), _domains(run), _rounds(run), _limits()])
        + "\n"
    )


def _head(run: Run) -> str:
    machine = run.machine
    lines = [
        *opening(run, "# Placement and rounds of many nodes", COMMAND, "scale.json"),
        f"- Machine: {machine.words()}. Load average before the run: {machine.load}.",
        "- Placement: `placement.plan`, and what says how probable recovery is; "
        f"each was called {len(run.plans[0].plan_seconds)} times and timed one by one.",
        "- Rounds: the agents' own parts, a rank each, in one process over socket pairs. A rank votes as "
        "soon as it hears of a step; "
        f"means of {ROUNDS} rounds.",
    ]
    return "\n".join(lines + caveats(machine, is_quick=run.is_quick))


def _reached(run: Run) -> str:
    to_reach = f"< {LIMIT_SECONDS:g} s"
    body = [
        [row.what, f"**{row.seconds:.3f}** s", f"{row.median_seconds:.4f} s", to_reach, str(row.count), verdict(row)]
        for row in rows(run)
    ]
    return f"## What was to be reached\n\n{table(('what', 'slowest', 'median', 'to reach', 'n', 'verdict'), body)}"


def _known(run: Run) -> str:
    body = [[known.what, f"{known.found:.4f}", f"{known.expected:.4f}", verdict(known)] for known in run.known]
    return (
        f"## Odds that are known\n\n{table(('every shard survives', 'Everstep', 'known', 'verdict'), body)}\n\n"
        "Known by trying every set of lost nodes; from 32 nodes on by the paper's Corollary 1, which is "
        "exact for so few losses. For the ring the "
        "paper has 0.600, which counts some sets twice; Everstep plans no ring of sixteen."
    )


def _plans(run: Run) -> str:
    head = ("nodes", "copies", "plan, ms", *(f"{lost:,} nodes lost" for lost in LOST_NODES), "slowest of these, ms")
    body = [
        [
            f"{figure.nodes:,}",
            str(figure.copies),
            _slowest(figure.plan_seconds),
            *(f"{figure.odds[lost]:.6g}" if lost in figure.odds else "" for lost in LOST_NODES),
            _slowest(figure.odds_seconds),
        ]
        for figure in run.plans
    ]
    return (
        "## Placement\n\nHow probable it is that every shard survives, all sets of so many nodes equally "
        f"likely.\n\n{table(head, body)}"
    )


def _domains(run: Run) -> str:
    lost = [f"{count} lost" for count in LOST_DOMAINS]
    head = (
        "nodes",
        "copies",
        "domains",
        "plan, ms",
        *lost,
        *(f"blind plan: {each}" for each in lost),
        "slowest of these, ms",
    )
    body = [
        [
            f"{figure.nodes:,}",
            str(figure.copies),
            f"{figure.domains:,}",
            _slowest(figure.plan_seconds),
            *(f"{odds[count]:.6g}" for odds in (figure.odds, figure.blind_odds) for count in LOST_DOMAINS),
            _slowest(figure.odds_seconds),
        ]
        for figure in run.domains
    ]
    return (
        f"## Placement over failure domains\n\nThe same for whole domains of {DOMAIN_NODES} nodes, and for "
        "a plan that does not know of them.\n\n"
        f"{table(head, body)}"
    )


def _rounds(run: Run) -> str:
    columns = ("on their own, ms", "on one core, ms", "the coordinator's part, ms", "reports it takes")
    trees = [figure.arity for figure in run.rounds if not figure.is_flat]
    head = ["agents", *(f"flat: {column}" for column in columns)]
    if trees:
        head += [*(f"{trees[0]}-ary tree: {column}" for column in columns), "levels"]
    body = []
    for agents, found in groupby(run.rounds, key=lambda figure: figure.agents):
        shapes = {figure.is_flat: figure for figure in found}
        tree = shapes.get(False)
        cells = [f"{agents:,}", *_round(shapes[True])]
        if trees:
            cells += [*_round(tree), str(tree.depth)] if tree else ["the same", "", "", "", "1"]
        body.append(cells)
    return (
        f"## Rounds\n\n{table(head, body)}\n\n"
        "*On their own*: the processor time of the busiest agent of each level, summed, which is what a "
        "round takes where every agent has a machine "
        "of its own, the wire aside. *On one core*: the time between two commits here, where one core does "
        "the work of all."
    )


def _round(figure: RoundFigure) -> list[str]:
    return [f"{figure.path_ms:.2f}", f"{figure.round_ms:.2f}", f"{figure.root_ms:.2f}", f"{figure.root_messages:.0f}"]


def _limits() -> str:
    return (
        "## What this does not say\n\n"
        "No wire lies between these agents, and no rank computes beside them. A round here is one that "
        "nothing holds up: a cluster's waits for its "
        "slowest rank to capture and for its slowest link to carry. Odds are of losses that come all at "
        "once, every set equally likely."
    )


def _slowest(seconds: Sequence[float]) -> str:
    return f"{max(seconds) * 1000:.2f}"


def _either(counts: Iterable[int]) -> str:
    return " or ".join(map(str, counts))
