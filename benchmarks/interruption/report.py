"""Computes the table rows, page and picture of the interruption benchmark. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.interruption.elastic import NODES, Shrink
from benchmarks.interruption.faults import Blackout, Silence
from benchmarks.interruption.outcomes import Fault, Interruption, Job, Rehearsed
from benchmarks.measures import bootstrap_interval
from benchmarks.page import BenchmarkRun, Page
from benchmarks.picture import COLOURS, Bar, Panel, panels
from benchmarks.rows import Row, limits, table, without_verdicts

PICTURE = "Seconds from a fault to the next new step"
STEP_SECONDS = 0.1
"""Value of `rank/work.py`, which this module cannot import."""
PHASES = ("detect", "replace", "restore", "rework")
STOPPED_SECONDS = 0.1
LOST_STEPS = 2
VERDICT_MARGIN_SECONDS = 1.0
SHRINK_SECONDS = 10.0
"""Seconds from the incident's opening until a job without a spare makes a step on one node fewer."""
REHEARSAL_SHARE = 0.001
"""Share of the expected run, for an automatic rehearsal."""
OURS = "Everstep"
MOST_DRAWN_SECONDS = 9.0
"""Seconds of the longest bar. A bar for a minute would make all others too short to see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(BenchmarkRun):
    """Measured values of one run of the interruption benchmark."""

    interruptions: Sequence[Interruption]
    silences: Sequence[Silence]
    blackouts: Sequence[Blackout]
    shrinks: Sequence[Shrink] = ()
    rehearsals: Sequence[Rehearsed] = ()


def of(run: Run, system: str, job: Job, fault: Fault) -> list[Interruption]:
    return [each for each in run.interruptions if (each.system, each.job, each.fault) == (system, job, fault)]


def median_seconds(found: Sequence[Interruption]) -> float:
    return statistics.median(each.seconds for each in found)


def rows(run: Run) -> list[Row]:
    """Return one row per value with a limit."""
    found = [row for row in _goals(run).values() if row is not None]
    return without_verdicts(found) if run.is_busy else found


def unmeasured(run: Run) -> list[str]:
    """Return the values with a limit that were not measured."""
    return [
        *(what for what, row in _goals(run).items() if row is None),
        *([] if run.rehearsals else ["rehearsals"]),
    ]


def _goals(run: Run) -> dict[str, Row | None]:
    ours = [each for each in run.interruptions if each.system == OURS]
    stopped = [each.stopped_seconds for each in ours if each.fault is Fault.RANK and each.stopped_seconds is not None]
    verdicts = [each.verdict_seconds for each in run.silences]
    lost, blackouts = [float(each.lost_steps) for each in ours], run.blackouts
    most_silent = run.silences[0].detection_seconds + VERDICT_MARGIN_SECONDS if run.silences else 0.0
    beside = (
        (Job.DDP, Fault.RANK, "torchrun + torch.save", 5),
        (Job.DDP, Fault.RANK, "torchrun + DCP", 5),
        (Job.DDP, Fault.RANK, "torchft", 1),
        (Job.ZERO3, Fault.RANK, "torchrun + save_checkpoint", 5),
        (Job.DDP, Fault.INSTANCE, "torchrun + torch.save", 4),
    )
    return {
        **{f"{fault}, {job}, beside {peer}": _beside(run, job, fault, peer, part) for job, fault, peer, part in beside},
        "survivors": _row(
            "rank exit → all survivors stopped, median",
            [seconds * 1000 for seconds in stopped],
            STOPPED_SECONDS * 1000,
            "ms",
        ),
        "verdict": _row("node silent → verdict, median", verdicts, most_silent, "s", "detection_seconds + 1 s"),
        "elastic": _row(
            f"no spare, {NODES} → {NODES - 1} nodes: verdict → next new step, most",
            [each.seconds for each in run.shrinks],
            SHRINK_SECONDS,
            "s",
            of=max,
        ),
        "lost steps": _row("steps lost, most", lost, LOST_STEPS, of=max),
        "control plane, steps": _row(
            "control plane restarted: steps lost", [float(each.lost_steps) for each in blackouts], 0, of=sum
        ),
        "control plane, ranks": _row(
            "control plane restarted: ranks restarted", [float(each.restarted_ranks) for each in blackouts], 0, of=sum
        ),
    }


def _beside(run: Run, job: Job, fault: Fault, peer: str, part: int) -> Row | None:
    ours, theirs = [each.seconds for each in of(run, OURS, job, fault)], of(run, peer, job, fault)
    if not theirs:
        return None
    back = sum(each.came_back for each in theirs)
    against = f"{'' if part == 1 else f'1/{part} of '}{peer}'s {median_seconds(theirs):.2f} s"
    row = _row(
        f"{fault}, {job}, median",
        ours,
        median_seconds(theirs) / part,
        "s",
        against if back == len(theirs) else f"{against}; {back} of its {len(theirs)} came back by themselves",
    )
    if row is None:
        return None
    low, high = bootstrap_interval(
        lambda samples: statistics.median(samples[0]) / part, [each.seconds for each in theirs]
    )
    if 2 * back <= len(theirs):
        return row.judged(f"{len(theirs) - back} of {len(theirs)} runs of the peer did not come back")
    return row.judged("the interval of the limit contains the value" if low < row.value < high else "")


def _row(
    what: str,
    samples: Sequence[float],
    limit: float,
    unit: str = "",
    against: str = "",
    *,
    of: Callable[[Sequence[float]], float] = statistics.median,
) -> Row | None:
    if not samples:
        return None
    return Row(what=what, value=of(samples), limit=limit, unit=unit, n=len(samples), against=against).judged()


def values(run: Run) -> dict[str, str | None]:
    """Return the text for each placeholder of the template of this benchmark's page."""
    return {
        "machine": run.machine.words("torch", "deepspeed"),
        "step_seconds": f"{STEP_SECONDS:g}",
        "missing": ", ".join(unmeasured(run)) or None,
        "limits": limits(rows(run)),
        "systems": _systems(run),
        "phases": _phases(run),
        "shrinks": _shrinks(run),
        "rehearsals": _rehearsals(run),
    }


def _kinds(run: Run) -> list[tuple[Job, Fault, str]]:
    return sorted(
        {(each.job, each.fault, each.system) for each in run.interruptions},
        key=lambda kind: (kind[0], kind[1], kind[2] != OURS, kind[2]),
    )


def _systems(run: Run) -> str:
    body = []
    for job, fault, system in _kinds(run):
        found = of(run, system, job, fault)
        seconds = [each.seconds for each in found]
        low, high = bootstrap_interval(lambda samples: statistics.median(samples[0]), seconds)
        stopped = [each.stopped_seconds for each in found if each.stopped_seconds is not None]
        body.append(
            [
                str(job),
                str(fault),
                system,
                f"**{statistics.median(seconds):.2f}**",
                f"{low:.2f} to {high:.2f}",
                f"{min(seconds):.2f} to {max(seconds):.2f}",
                f"{statistics.median(stopped) * 1000:.0f}" if stopped else "",
                f"{statistics.median(each.lost_steps for each in found):g}",
                str(len(found)),
                str(sum(not each.came_back for each in found) or ""),
            ]
        )
    head = (
        "job",
        "fault",
        "system",
        "median s",
        "95 %",
        "min to max",
        "old ranks gone, ms",
        "steps made again",
        "n",
        "not back",
    )
    return table(head, body)


def _phases(run: Run) -> str | None:
    body = []
    for job, fault, system in _kinds(run):
        found = [each for each in of(run, system, job, fault) if each.phases]
        if found:
            medians = {phase: statistics.median(each.phases[phase] for each in found) for phase in PHASES}
            largest = max(medians, key=lambda phase: medians[phase])
            body.append([str(job), str(fault), *(f"{medians[phase]:.2f}" for phase in PHASES), f"**{largest}**"])
    return table(("job", "fault", *PHASES, "largest"), body) if body else None


def _shrinks(run: Run) -> str | None:
    """Return the table of jobs on fewer nodes, or None."""
    body = [[f"{each.verdict_seconds:.2f}", f"**{each.seconds:.2f}**", str(each.lost_steps)] for each in run.shrinks]
    return table(("loss → verdict, s", "verdict → next new step, s", "steps made again"), body) if body else None


def _rehearsals(run: Run) -> str | None:
    """Return the table of rehearsals, or None."""
    body = []
    kinds = {(each.job, each.is_first) for each in run.rehearsals}
    for job, is_first in sorted(kinds, key=lambda kind: (not kind[1], kind[0])):
        found = [each for each in run.rehearsals if (each.job, each.is_first) == (job, is_first)]
        seconds, steps = statistics.median(each.seconds for each in found), found[0].steps
        start, hours = seconds - steps * STEP_SECONDS, seconds / REHEARSAL_SHARE / 3600
        order = "first" if is_first else "second"
        body.append([str(job), order, f"**{seconds:.1f}**", f"{start:.1f}", f"{hours:.1f}", str(len(found))])
    head = ("job", "rehearsal", "median s", "without the repeated steps, s", "is 0.1 % of a run of, h", "n")
    return table(head, body) if body else None


def draw(run: Run) -> str:
    """Return the SVG of median interruptions by job and fault, a bar per system, Everstep's split into phases."""
    drawn: dict[str, list[Bar]] = {}
    for job, fault, system in _kinds(run):
        found = of(run, system, job, fault)
        whole, with_phases = median_seconds(found), [each for each in found if each.phases]
        parts = [(whole, COLOURS[len(PHASES)])]
        if with_phases:
            medians = [statistics.median(each.phases[phase] for each in with_phases) for phase in PHASES]
            scale = whole / (sum(medians) or 1.0)
            parts = [(median * scale, colour) for median, colour in zip(medians, COLOURS, strict=False)]
        bar = Bar(label=system, parts=parts, text=f"{whole:.2f} s")
        drawn.setdefault(f"{job}: {fault}", []).append(bar)
    keys = dict(zip((*PHASES, "in all"), COLOURS, strict=True))
    groups = [Panel(title=title, bars=bars, keys=keys) for title, bars in drawn.items()]
    return panels(PICTURE, groups, most=MOST_DRAWN_SECONDS)


PAGE = Page(
    name="recovery", command="make bench-recovery", run=Run, values=values, rows=rows, draw=draw, picture=PICTURE
)
