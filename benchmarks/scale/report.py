"""Computes the table rows, verdicts and page of the scale benchmark. The functions are pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from benchmarks.measures import Verdict
from benchmarks.page import BenchmarkRun, Page
from benchmarks.rows import Row, limits, number, table, verdict_of, without_verdicts
from benchmarks.scale.leads import CONSTANT_LEADS, PHASE_STEPS, STEPS, LeadFigure
from benchmarks.scale.placement import DOMAIN_NODES, LOST_DOMAINS, LOST_NODES, DomainFigure, Known, PlanFigure
from benchmarks.scale.rounds import ROUNDS, RoundFigure

LIMIT_SECONDS = 1.0
"""Limit of the slowest call of a placement function."""
LEAD_LIMIT = 0.85
"""Adaptive ÷ best constant lead, in commits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(BenchmarkRun):
    """Measured values of one run of the scale benchmark."""

    plans: Sequence[PlanFigure]
    """Placement without failure domains, at least one number of nodes."""
    domains: Sequence[DomainFigure]
    """Placement over failure domains, at least one number of nodes."""
    known: Sequence[Known]
    rounds: Sequence[RoundFigure]
    leads: Sequence[LeadFigure]


def rows(run: Run) -> list[Row]:
    """Return a row per placement function (most nodes), recovery probability, and load of the adaptive lead."""
    limit = LIMIT_SECONDS * 1000
    found = [
        Row(what=what, value=max(seconds) * 1000, unit="ms", n=len(seconds), limit=limit).judged()
        for what, seconds in _calls(run).items()
    ]
    return [*(without_verdicts(found) if run.is_busy else found), *map(_odds, run.known), *map(_lead, run.leads)]


def _calls(run: Run) -> dict[str, list[float]]:
    """Return the seconds of every call of a placement function, for the most nodes."""
    most = max(figure.nodes for figure in run.plans)
    plans = [figure for figure in run.plans if figure.nodes == most]
    domains = [figure for figure in run.domains if figure.nodes == most]
    lost = max(lost for figure in plans for lost in figure.odds)
    over = " or ".join(map(str, LOST_DOMAINS))
    return {
        f"`placement.plan` of {most:,} nodes": [each for figure in plans for each in figure.plan_seconds],
        f"the same over failure domains of {DOMAIN_NODES} nodes": [
            each for figure in domains for each in figure.plan_seconds
        ],
        f"exact odds of recovery for {most:,} nodes, up to {lost:,} nodes lost": [
            each for figure in plans for each in figure.odds_seconds
        ],
        f"exact odds of recovery for {most:,} nodes, {over} domains lost": [
            each for figure in domains for each in figure.odds_seconds
        ],
    }


def _odds(known: Known) -> Row:
    verdict = Verdict.SHORT if known.falls_short else Verdict.PASS
    return Row(what=known.what, value=known.found, n=1, against=f"{known.expected:.4f}", verdict=verdict)


def _lead(figure: LeadFigure) -> Row:
    what = f"commits with the adaptive lead ÷ those with the best constant lead: {figure.load}"
    return Row(what=what, value=figure.ratio, n=1, limit=LEAD_LIMIT, is_least=True).judged()


def values(run: Run) -> dict[str, str | None]:
    """Return the text for each placeholder of the template of this benchmark's page."""
    known = [[each.what, f"{each.found:.4f}", f"{each.expected:.4f}", verdict_of(_odds(each))] for each in run.known]
    return {
        "machine": run.machine.words(),
        "calls": str(len(run.plans[0].plan_seconds)),
        "rounds": str(ROUNDS),
        "limits": limits(
            [row for row in rows(run) if row.what in _calls(run)],
            ("slowest call of", "median, ms"),
            lambda row: (row.what, number(statistics.median(_calls(run)[row.what]) * 1000)),
        ),
        "known": table(("every shard survives", "Everstep", "published", "verdict"), known),
        "plans": _plans(run),
        "domain_nodes": str(DOMAIN_NODES),
        "domains": _domains(run),
        "table_of_rounds": _rounds(run),
        "lead_steps": f"{STEPS:,}",
        "phase_steps": f"{PHASE_STEPS:,}",
        "leads": _leads(run),
    }


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
    return table(head, body)


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
    return table(head, body)


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
    return table(head, body)


def _leads(run: Run) -> str:
    head = ("load", "adaptive", *(f"constant: {steps}" for steps in CONSTANT_LEADS), "ratio to the best", "verdict")
    body = [
        [
            figure.load,
            f"{figure.adaptive:.3f}",
            *(f"{figure.constant[steps]:.3f}" for steps in CONSTANT_LEADS),
            f"{figure.ratio:.2f}",
            verdict_of(_lead(figure)),
        ]
        for figure in run.leads
    ]
    return table(head, body)


def _round(figure: RoundFigure) -> list[str]:
    return [f"{figure.path_ms:.2f}", f"{figure.round_ms:.2f}", f"{figure.root_ms:.2f}", f"{figure.root_messages:.0f}"]


def _slowest(seconds: Sequence[float]) -> str:
    return f"{max(seconds) * 1000:.2f}"


PAGE = Page(name="scale", command="make bench-scale", run=Run, values=values, rows=rows)
