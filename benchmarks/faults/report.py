"""Report of a fault benchmark run: values as JSON, a document with a table, one picture. Pure except for `write`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.document import BUSY, BenchmarkRun, caveats, opening, table, write_figures
from benchmarks.faults.figures import FULL_SPEED_RATIO, WHOLE, Figure, Observed, evaluate
from benchmarks.faults.picture import draw
from benchmarks.measures import FLOOR_TOLERANCE_RATIO, Verdict
from control_plane.contract.markdown import wrap

COMMAND = "make bench-faults"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(BenchmarkRun):
    """Observations of one run."""

    observed: Sequence[Observed]
    """Observations of each case, at least one."""

    @property
    def figures(self) -> list[Figure]:
        """Measured values of every case. On a busy machine, they have no verdicts."""
        found = [evaluate(each) for each in self.observed]
        return (
            [dataclasses.replace(each, verdict=Verdict.INCONCLUSIVE, told=f"{BUSY}; {each.told}") for each in found]
            if self.is_busy
            else found
        )

    @property
    def falls_short(self) -> bool:
        """Whether a case slowed training down."""
        return any(figure.verdict is Verdict.SHORT for figure in self.figures)


def write(run: Run, figures: Path, document: Path) -> None:
    """Write the report.

    Args:
        run: the observations.
        figures: path of the JSON file.
        document: path of the Markdown file; the picture gets the same name with another suffix.
    """
    write_figures(figures, run.with_found(cases=[dataclasses.asdict(figure) for figure in run.figures]))
    picture = document.with_suffix(".svg")
    document.write_text(wrap(render(run, picture.name)))
    picture.write_text(draw(run.observed))


def render(run: Run, picture: str) -> str:
    """Return the Markdown document.

    Args:
        run: the observations.
        picture: file name of the picture, in the document's folder.
    """
    return "\n\n".join([_head(run), _speed(run, picture), _protection(run), _limits()]) + "\n"


def _head(run: Run) -> str:
    machine = run.machine
    lines = [
        *opening(run, "# What faults of the data plane cost training", COMMAND, "faults.json"),
        f"- Machine: {machine.words('torch')}. Load average before the run: {machine.load}.",
        "- A job of two ranks, each on a node of its own in a network namespace of its own, a state of "
        f"{run.observed[0].state_mib} MiB each. Every step is proposed (`MaxSlowdown` 1), two copies. A "
        "step is a **timed wait**, which leaves the "
        f"processor free as a job on a GPU does, {_copies(run)}; one collective of a single number; and an "
        "optimizer step that changes every byte of "
        "the state.",
        "- Faults are struck from outside, at processes, lines and memory of what runs; nothing of the "
        "product is replaced. Steps are timed by the "
        "script. The API is asked for the job's protection four times a second in all parts of a case alike.",
        "- *Before* and *after* are steps under whole protection. Where memory is taken from the start "
        "there is no before: the steps after it has "
        "healed stand for it, and the ones behind these for after.",
    ]
    return "\n".join(lines + caveats(machine, is_quick=run.is_quick))


def _copies(run: Run) -> str:
    fewest = min(run.observed, key=lambda each: each.span_seconds / each.copy_seconds)
    times = fewest.span_seconds / fewest.copy_seconds
    return f"{1000 * fewest.span_seconds:.0f} ms, in which the state could be copied {times:.0f} times at least"


def _speed(run: Run, picture: str) -> str:
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
            f"**{figure.verdict}**: {figure.told}",
        ]
        for figure in run.figures
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
    return (
        f"## Full speed\n\n{table(head, rows)}\n\n"
        f"To reach: at most {FULL_SPEED_RATIO} by the upper end of the interval, a percentile bootstrap of "
        "the ratio of medians. Inconclusive: the "
        "limit lies in the interval, or steps before and after differ by more than "
        f"{FLOOR_TOLERANCE_RATIO:.0%}. *Longest* and *lost*, the time by "
        "which all steps together took longer than as many median ones before, are of the steps from the "
        "strike until protection was whole again; "
        "nothing is judged by them. *Held* is what the session held a rank for in a step.\n\n"
        f"![Step times, the fault shaded, healing behind it]({picture})"
    )


def _protection(run: Run) -> str:
    rows = [
        [
            figure.name,
            figure.did,
            f"{figure.commits_before:.2f}, {figure.commits_during:.2f}, {figure.commits_after:.2f}",
            figure.word,
            "" if figure.told_seconds is None else f"{figure.told_seconds:.1f}",
            "" if figure.word == WHOLE else f"{figure.healed_seconds:.1f}",
            figure.reasons[-1].replace("|", "\\|") if figure.reasons else "",
        ]
        for figure in run.figures
    ]
    head = (
        "fault",
        "what was done",
        "commits ÷ steps before, during, after",
        "told",
        "after, s",
        "Protected again after, s",
        "the last reason told",
    )
    return (
        f"## Protection\n\n{table(head, rows)}\n\n"
        "*Told*: what DescribeProtection said, and how long after the strike; *Protected again*: how long "
        "after the fault's end. A commit counts if "
        "its rank has heard of it by the next boundary. Ranks are not restarted: a case whose job was "
        "launched twice has no figures."
    )


def _limits() -> str:
    return (
        "## What this does not say\n\n"
        "Left out, because nobody can cause them from outside: a chunk that is corrupt on its way, and huge "
        "pages that the kernel refuses; tests "
        "have both. Connections are reset at moments of the clock, not at chosen positions of a chunk. The "
        "collective is a single number, so that "
        "only replicas are in its way on a slow line: a job that moves gradients over a line at 1 % is slow "
        "without Everstep. The nodes share one "
        "machine's cores, and rounds and transfers take time of them that a fault gives back: a ratio below 1 is that."
    )
