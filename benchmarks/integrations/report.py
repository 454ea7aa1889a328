"""Computes the table rows, verdicts and page of the benchmark of the integration with transformers. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.integrations.jobs import EVERSTEP, LIBRARY, LM_RESILIENCY, NODES, OWN_SAVES, PARTS, PLAIN, TrainerLaunch
from benchmarks.measures import FLOOR_TOLERANCE_RATIO, LEAST_COMMITS_RATIO, moved_ratio
from benchmarks.page import BenchmarkRun, Page
from benchmarks.rows import Row, limits, number, table, without_verdicts

MOST_OF_SAVES = 0.5
"""Added time per step, relative to Trainer's own save."""
MOST_OF_LIBRARY = 1.0
"""Added time per step, relative to lm-resiliency."""
MOST_OF_STEP = 0.01
"""Time of Trainer's loop state and data position, relative to a step without Everstep."""
MIB = 1 << 20
NAMES = {
    PLAIN: ("no saves", "all"),
    EVERSTEP: ("Everstep, each step on two nodes", "≤ 1"),
    OWN_SAVES: ("Trainer's own saves, `save_steps=1`, on one node's disk", "≤ 1; all with the node"),
    LM_RESILIENCY: (f"{LIBRARY.replace('==', ' ')}, each step on two nodes", "≤ 1"),
}
"""Name on the page, and the steps that a failure loses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(BenchmarkRun):
    """Measured values of one run of the integration benchmark."""

    launches: Sequence[TrainerLaunch]
    """Launches in their order."""


def rows(run: Run) -> list[Row]:
    """Return the rows of Everstep's added time per step, and of the fraction of steps with a snapshot."""
    own = _of(run, EVERSTEP)
    plain = [statistics.median(each.step_seconds) for each in _of(run, PLAIN)]
    moved = moved_ratio(min(plain), max(plain))
    doubt = f"steps without saves differ by {moved:.0%}" if moved > FLOOR_TOLERANCE_RATIO else ""
    added = _step_seconds(run, EVERSTEP) - _step_seconds(run, PLAIN)
    found = []
    for system, words, limit in (
        (OWN_SAVES, "Trainer's own save of each step", MOST_OF_SAVES),
        (LM_RESILIENCY, "lm-resiliency", MOST_OF_LIBRARY),
    ):
        other = _step_seconds(run, system) - _step_seconds(run, PLAIN)
        row = Row(
            what=f"time that Everstep adds to a step ÷ that of {words}",
            value=max(added, 0.0) / other if other > 0 else 0.0,
            n=len(own),
            limit=limit,
            floor_moved_ratio=moved,
        )
        found.append(row.judged(doubt or ("" if other > 0 else f"{words} added no time")))
    state = _part_seconds(run, "loop state") + _part_seconds(run, "data position")
    found.append(
        Row(
            what="loop state and data position ÷ step without saves",
            value=state / _step_seconds(run, PLAIN),
            n=len(own),
            limit=MOST_OF_STEP,
        ).judged(doubt)
    )
    kept = Row(
        what="snapshots ÷ steps with Everstep",
        value=min(each.snapshots_ratio for each in own),
        n=len(own),
        limit=LEAST_COMMITS_RATIO,
        is_least=True,
    ).judged()
    return without_verdicts([*found, kept]) if run.is_busy else [*found, kept]


def values(run: Run) -> dict[str, str | None]:
    """Return the text for each placeholder of the template of this benchmark's page."""
    return {
        "machine": run.machine.words("torch"),
        "nodes": str(NODES),
        "state": f"{number(run.launches[0].state_bytes / MIB)} MiB",
        "steps": str(len(run.launches[0].step_seconds)),
        "launches": str(len(_of(run, EVERSTEP))),
        "limits": limits(rows(run)),
        "systems": _systems(run),
        "parts": _parts(run),
    }


def _systems(run: Run) -> str:
    plain = _step_seconds(run, PLAIN)
    body = [
        [
            words,
            lost,
            number(1000 * _step_seconds(run, system)),
            "" if system == PLAIN else number(1000 * (_step_seconds(run, system) - plain)),
            "" if system == PLAIN else f"{_step_seconds(run, system) / plain - 1:+.1%}",
        ]
        for system, (words, lost) in NAMES.items()
    ]
    return table(("system", "steps lost", "step, ms, median", "added, ms", "added ÷ step"), body)


def _parts(run: Run) -> str:
    added = _step_seconds(run, EVERSTEP) - _step_seconds(run, PLAIN)
    parts = {name: _part_seconds(run, name) for name in PARTS}
    rest = added - sum(parts.values())
    body = [[name, number(1000 * seconds)] for name, seconds in parts.items()]
    body.append(["copies and transfers that share the cores, the rest", number(1000 * rest)])
    return table(("part", "ms per step, median"), body)


def _of(run: Run, system: str) -> list[TrainerLaunch]:
    return [each for each in run.launches if each.system == system]


def _step_seconds(run: Run, system: str) -> float:
    return statistics.median(step for each in _of(run, system) for step in each.step_seconds)


def _part_seconds(run: Run, name: str) -> float:
    return statistics.median(value for each in _of(run, EVERSTEP) for value in each.part_seconds[name])


PAGE = Page(name="integrations", command="make bench-integrations", run=Run, values=values, rows=rows)
