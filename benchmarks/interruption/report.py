"""Report of an interruption benchmark run: limits, each system's values, Everstep's phases, one picture.

Pure except for `write`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chart import stacked_bars
from benchmarks.document import BenchmarkRun, caveats, judged, opening, table, unless_busy, verdict, write_figures
from benchmarks.interruption.faults import Blackout, Silence
from benchmarks.interruption.outcomes import Fault, Interruption, Job
from benchmarks.measures import bootstrap_interval
from control_plane.contract.markdown import wrap

COMMAND = "make bench-recovery"
STEP_SECONDS = 0.1
"""Minimal duration of a step: same value as in `rank/work.py`, which this module cannot import."""
PHASES = ("detect", "replace", "restore", "rework")
STOPPED_SECONDS = 0.1
LOST_STEPS = 2
VERDICT_MARGIN_SECONDS = 1.0
OURS = "Everstep"
MOST_DRAWN_SECONDS = 9.0
"""Length of the longest bar in the picture. A bar of a minute would make all other bars too short to see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(BenchmarkRun):
    """Measured values of one run."""

    interruptions: Sequence[Interruption]
    silences: Sequence[Silence]
    blackouts: Sequence[Blackout]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured value with its limit."""

    what: str
    measured: float
    limit: float
    unit: str
    count: int
    against: str
    """Origin of the limit."""
    is_inconclusive: bool = False
    """Whether the compared system's values are too few or too uncertain to define the limit."""

    @property
    def falls_short(self) -> bool:
        """Whether the value misses its limit."""
        return not self.is_inconclusive and self.measured > self.limit


def of(run: Run, system: str, job: Job, fault: Fault) -> list[Interruption]:
    """Return one system's interruptions by one kind of fault."""
    return [each for each in run.interruptions if (each.system, each.job, each.fault) == (system, job, fault)]


def median_seconds(found: Sequence[Interruption]) -> float:
    """Return the median interruption in seconds."""
    return statistics.median(each.seconds for each in found)


def rows(run: Run) -> list[Row]:
    """Return the rows of all measured values."""
    return unless_busy(run, [row for row in _goals(run).values() if row is not None])


def unmeasured(run: Run) -> list[str]:
    """Return the limits whose values are missing; empty if the whole benchmark was run."""
    return [what for what, row in _goals(run).items() if row is None]


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
    return dataclasses.replace(row, is_inconclusive=2 * back <= len(theirs) or low < row.measured < high)


def _row(
    what: str,
    samples: Sequence[float],
    limit: float,
    unit: str = "",
    against: str = "",
    *,
    of: Callable[[Sequence[float]], float] = statistics.median,
) -> Row | None:
    return (
        Row(what=what, measured=of(samples), limit=limit, unit=unit, count=len(samples), against=against)
        if samples
        else None
    )


def write(run: Run, figures: Path, document: Path) -> None:
    """Write the report.

    Args:
        run: the measured values.
        figures: path of the JSON file.
        document: path of the Markdown file; the picture gets the same name with another suffix.
    """
    write_figures(figures, dataclasses.asdict(run) | {"rows": judged(rows(run))})
    picture = document.with_suffix(".svg")
    document.write_text(wrap(render(run, picture.name)))
    picture.write_text(draw(run))


def render(run: Run, picture: str) -> str:
    """Return the Markdown document.

    Args:
        run: the measured values.
        picture: file name of the picture, in the document's folder.
    """
    return (
        "\n\n".join(
            [
                _head(run),
                f"![Seconds from a fault to the next new step]({picture})",
                _reached(run),
                _systems(run),
                _phases(run),
                _limits(),
            ]
        )
        + "\n"
    )


def _head(run: Run) -> str:
    machine = run.machine
    lines = [
        *opening(run, "# How long a failure holds training", COMMAND, "recovery.json"),
        f"- Machine: {machine.words('torch', 'deepspeed')}. Load average before the run: {machine.load}.",
        f"- A small GPT on two ranks, each on a node of its own; the same model and batches under every system. "
        f"No step takes less than {STEP_SECONDS:g} s: "
        "what its computing leaves of that is waited for, but not before a process's first step. The "
        "interruption is from the fault to "
        "the moment at which every rank had finished a step that none had finished before it (torchft: the "
        "surviving replica alone, which goes on "
        "without the other). Ranks wrote down each step themselves.",
        "- torchrun saves every 10 steps to memory that both ranks see, and is hurt right after a save. "
        "Where an instance goes, both torchrun "
        "agents are started anew in the same moment, on a free node that booted in no time: left alone, "
        "torch's rendezvous counts the dead agent in, "
        "waits for it for 60 s and gives up. torchft runs with a heartbeat "
        "timeout of 1 s, and a killed replica is started again at once.",
        "- Everstep keeps every step on both nodes; a spare has booted and can start ranks warm. "
        "`detection_seconds` is 3.",
        "- *Not back*: a peer that had made no new step after 60 s was started anew by hand; it counts with "
        "that time. Where half of a "
        "peer's runs or more did not come back its time is this patience, and the row is inconclusive, as "
        "is one whose limit's interval has the "
        "figure in it.",
        "- Every system is launched twice, in the order A B … Z Z … B A. Intervals are 95 % percentile "
        "bootstraps of the median.",
    ]
    lines += caveats(machine, is_quick=run.is_quick)
    return "\n".join(lines)


def _reached(run: Run) -> str:
    body = [
        [
            row.what,
            f"**{row.measured:.2f}** {row.unit}".strip(),
            f"≤ {row.limit:.2f} {row.unit}".strip(),
            row.against,
            str(row.count),
            verdict(row),
        ]
        for row in rows(run)
    ]
    missing = [f"**Not measured**: {', '.join(unmeasured(run))}."] if unmeasured(run) else []
    return "\n\n".join(
        [
            "## What was to be reached",
            *missing,
            table(("what", "measured", "to reach", "that is", "n", "verdict"), body),
        ]
    )


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
    return "## Every system\n\n" + table(head, body)


def _phases(run: Run) -> str:
    body = []
    for job, fault, system in _kinds(run):
        found = [each for each in of(run, system, job, fault) if each.phases]
        if found:
            medians = {phase: statistics.median(each.phases[phase] for each in found) for phase in PHASES}
            largest = max(medians, key=lambda phase: medians[phase])
            body.append([str(job), str(fault), *(f"{medians[phase]:.2f}" for phase in PHASES), f"**{largest}**"])
    return (
        "## Where Everstep's time goes\n\nMedians of the incidents' own phases, seconds. *Detect*: until "
        "the fault was known. *Replace*: until the "
        "nodes of the next launch stood. *Restore*: until every rank had its state again. *Rework*: until "
        "the highest step before the fault was "
        f"reached again.\n\n{table(('job', 'fault', *PHASES, 'largest'), body)}"
    )


def _limits() -> str:
    return (
        "## What this does not say\n\nOne machine: nodes share its cores, and a network is a loopback. "
        "Models of real size load longer, on all "
        "systems; a rank of Everstep's reads its own node's memory, the others a file system. torchft's "
        "time is that of the survivor, which trains "
        "with half of the batch until the other replica is back; Everstep's is that of the whole job, bit for bit."
    )


def draw(run: Run) -> str:
    """Return the SVG document: median interruptions by job and fault, a bar per system.

    Everstep's bars are split into phases.
    """
    bars: list[tuple[str, dict[str, float]]] = []
    group = ""
    for job, fault, system in _kinds(run):
        if group != (group := f"{job}: {fault}"):
            bars.append((group, {}))
        found = of(run, system, job, fault)
        with_phases = [each for each in found if each.phases]
        parts = dict.fromkeys((*PHASES, "in all"), 0.0)
        whole = median_seconds(found)
        if with_phases:
            medians = {phase: statistics.median(each.phases[phase] for each in with_phases) for phase in PHASES}
            scale = whole / (sum(medians.values()) or 1.0)
            parts |= {phase: value * scale for phase, value in medians.items()}
        else:
            parts["in all"] = whole
        bars.append((system, parts))
    return stacked_bars("Seconds from a fault to the next new step", bars, "s", most=MOST_DRAWN_SECONDS)
