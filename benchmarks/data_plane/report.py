"""Report of one run: rows as JSON, a section of docs/benchmarks.md, and a picture. Pure except for `write`.

Invariant: every row has its number of samples, its confidence interval, and the change of its floor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.data_plane.char_gpt import COUNTED_STEPS, CYCLES, KINDS, LAUNCHES, SKIPPED_STEPS, WARM_UP_STEPS
from benchmarks.data_plane.picture import draw
from benchmarks.data_plane.rows import EVERSTEP, GOALS, PEER_TOLERANCE_RATIO, Figure, LaunchFloor, moved_together
from benchmarks.document import BenchmarkRun, caveats, opening, table, with_section, write_figures
from benchmarks.measures import BUSY_LOAD_RATIO, FLOOR_TOLERANCE_RATIO, Verdict
from control_plane.contract.markdown import wrap

Seconds = Mapping[str, Sequence[float]]
"""Seconds that both processes measured, by name of the floor."""
Floors = dict[int, dict[str, LaunchFloor]]
"""Floors before and after Everstep's launches, by state size in MiB."""
COMMAND = "make bench-data-plane"
TITLES = {goal.metric + goal.suffix: goal.title for goal in GOALS} | {
    "launches": "all launches",
    "blocked_audited": "the first three snapshots of a launch, audited: copied whole at the boundary and compared",
    "blocked_tight": "training blocked per snapshot, spans of twice the copy",
    "restore_peer_fetch": "of a rank that waits: until all was verified on its own node",
    "restore_added": "fetch from the peer, and restore of a rank that comes when it is over",
    "first_commit": "first snapshot (audited, so compared when the next change is due) ÷ later ones (not audited), to "
    "the commit",
    "first_raw": "first snapshot (audited) ÷ later ones (not audited), blocked",
    "tight_commits": "commits ÷ steps, spans of twice the copy",
    "agent": "private memory of an agent while nothing runs: a baseline, not counted above",
    **{f"char_gpt_{kind}_step": f"char-GPT, {name}: a step that nobody keeps" for kind, name in KINDS.items()},
    **{f"char_gpt_{kind}_slowdown": f"char-GPT, {name}: slowdown of a step" for kind, name in KINDS.items()},
    **{f"char_gpt_{kind}_cpu": f"char-GPT, {name}: processor seconds per GiB kept" for kind, name in KINDS.items()},
}
PEER_TITLES = {
    "blocked": "blocked per snapshot",
    "blocked_tight": "the same, short spans",
    "commit": "on the peer",
    "restore_local": "restore, own node",
    "restore_peer": "restore, peer",
    "memory": "memory, bytes/byte",
    "first_raw": "first ÷ later",
}
VERIFIED = {None: "not compared", True: "yes", False: "**no**"}
FLOOR_TITLES = {
    "memcpy": "memcpy into warm shared memory",
    "digest": "xxh3-128",
    "one_way": "socket, one way",
    "both_ways": "sockets, both ways at once",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(BenchmarkRun):
    """Measured values of one run."""

    figures: Sequence[Figure]
    floors: Floors


def write(run: Run, figures: Path, document: Path) -> None:
    """Write the measured values, and replace the document's section and its picture.

    Args:
        run: the measured values.
        figures: path of the JSON file.
        document: path of the Markdown file; a missing section is appended.
    """
    write_figures(figures, [dataclasses.asdict(figure) for figure in run.figures])
    picture = document.with_name(f"{document.stem}-data-plane.svg")
    picture.write_text(draw(run.figures, run.floors))
    before = document.read_text() if document.exists() else ""
    document.write_text(wrap(with_section(before, COMMAND, render(run, picture.name))))


def render(run: Run, picture: str) -> str:
    """Return the Markdown section.

    Args:
        run: the figures.
        picture: file name of the picture, in the same folder.
    """
    parts = [
        _head(run),
        f"![Milliseconds per GiB, beside peers and floors]({picture})",
        _floors(run.floors),
        _goals(run.figures),
    ]
    if any(figure.system != EVERSTEP and not figure.metric.startswith("char_gpt") for figure in run.figures):
        parts.append(_peers(run.figures))
    if any(figure.metric.startswith("char_gpt") for figure in run.figures):
        parts.append(_model(run.figures))
    return "\n\n".join([*parts, _limits()])


def line(figure: Figure) -> str:
    """Return a row with its verdict as one line for a terminal."""
    limit = (
        ""
        if figure.limit is None
        else f" (to reach {_number(figure.limit)}{', ' + figure.against if figure.against else ''})"
    )
    reason = f": {figure.reason}" if figure.reason else ""
    return (
        f"{figure.verdict:>12}  {figure.state_mib} MiB  {figure.system}: {figure.metric} "
        f"{_number(figure.value)} {figure.unit}{limit}{reason}"
    )


def _head(run: Run) -> str:
    machine = run.machine
    lines = [
        *opening(run, "## The data plane, beside its peers", COMMAND, "data_plane.json"),
        f"- Machine: {machine.words(*machine.versions)}; load average before the run {machine.load_average[0]:.2f}. "
        "No GPU; both nodes share the cores and one loopback.",
        "- Two ranks on two nodes, each with a state of its own: fp32 parameters of a transformer's shapes "
        "and Adam's two moments, one thread. "
        "Forward and backward are **timed waits** that leave the processor free; the optimizer's step is "
        "real. All times are per GiB of state.",
        "- Every system is launched on the way out and on the way back, in the order A B C … Z, A B C, Z … "
        "C B A: Everstep and those that it is held "
        "against three times, the others twice. The floors are measured by two processes before and after "
        "every launch, and before each of "
        "Everstep's restores; those of the network are a bare pair of sockets as the kernel makes them, to "
        "which Everstep's, whose small buffers "
        "stay in the caches, may be superior. Of a large state only those are launched that Everstep is "
        "held against, and DLRover: the others would "
        "take minutes and decide no row.",
        "- Intervals are 95 % percentile bootstraps over the samples of all launches: what differs from "
        "launch to launch, of which there are few, is "
        "hardly in them. What is measured is judged, not the interval.",
        "- **inconclusive**: a row's floor (a sum, where its limit is one) moved by more than "
        f"{FLOOR_TOLERANCE_RATIO:.0%} between the lowest and "
        f"the highest launch, or a peer was more than {PEER_TOLERANCE_RATIO:.0%} away from what is known of "
        "it, scaled by the floors.",
        "- *verified*: after the run the bytes on the holder, or in the restored model, were compared with "
        "the owner's, without any digest.",
    ]
    quick = "A quick run with few samples: it tries the harness and measures nothing."
    busy = f"The machine was busy when the run began (more than {BUSY_LOAD_RATIO} per core). "
    busy += "These are no results, and nothing is judged: run it again."
    return "\n".join(lines + caveats(machine, is_quick=run.is_quick, quick=quick, busy=busy))


def _floors(floors: Floors) -> str:
    rows = [
        [
            f"{size} MiB",
            title,
            ", ".join(_number(launch.median) for launch in floor.launches),
            f"{moved_together([floor]):.0%}",
            ", ".join(str(launch.count) for launch in floor.launches),
        ]
        for size, found in floors.items()
        for name, title in FLOOR_TITLES.items()
        if (floor := found.get(name)) is not None
    ]
    return "### Floors\n\n" + table(("state", "floor, ms/GiB", "launch by launch", "moved", "n"), rows)


def _goals(figures: Sequence[Figure]) -> str:
    head = ("state", "Everstep", "measured", "95 %", "n", "to reach", "floor moved", "verified", "verdict")
    own = [figure for figure in figures if figure.system == EVERSTEP and not figure.metric.startswith("char_gpt")]
    rows = [
        [
            f"{figure.state_mib} MiB",
            TITLES.get(figure.metric, figure.metric),
            f"**{_number(figure.value)}** {figure.unit}",
            f"{_number(figure.low)} to {_number(figure.high)}",
            str(figure.n),
            _limit(figure),
            "" if figure.floor_moved_ratio is None else f"{figure.floor_moved_ratio:.0%}",
            VERIFIED[figure.verified] if figure.verified is not None else "",
            _verdict(figure),
        ]
        for figure in own
    ]
    text = (
        "The first three snapshots of a launch are audited on purpose, copied whole at the boundary and "
        "compared when the next change is due, so "
        "that the whole span is in their commit: first ÷ later ones, which are not audited, is shown and "
        "not judged. First ÷ second and third, of "
        "which all are audited, says what cold pages cost, and is judged."
    )
    return f"### What was to be reached\n\n{text}\n\n{table(head, rows)}"


def _peers(figures: Sequence[Figure]) -> str:
    text = (
        "Medians in ms per GiB; a system offers what has a figure. *Blocked* holds with long spans, "
        "snapshots at every step. Peers do not say what "
        "they have committed: the loop calls each at every step, and a call waits for what the one before "
        "still does (snapshots ÷ steps 1.00 by "
        "that, with short spans, too); only the last snapshot is compared. Restores end in the live model. "
        "What is not on the peer does not survive "
        "its node. ⚠ inconclusive, see below."
    )
    notes = [
        f"- {each.system}, {each.state_mib} MiB, a launch failed: {each.reason}"
        for each in figures
        if each.metric == "launches"
    ]
    rows = []
    own = {"blocked": "blocked_p50"}
    for size in sorted({figure.state_mib for figure in figures if figure.metric == "memory"}):
        at_size = [
            figure for figure in figures if figure.state_mib == size and not figure.metric.startswith("char_gpt")
        ]
        for system in dict.fromkeys(figure.system for figure in at_size):
            found = {figure.metric: figure for figure in at_size if figure.system == system}
            version = next(iter(found.values())).version
            cells = [found.get(own.get(metric, metric) if system == EVERSTEP else metric) for metric in PEER_TITLES]
            rows.append([f"{size} MiB", f"{system} {version}", *(_cell(figure) for figure in cells)])
            unsure = [
                each
                for each in cells
                if each is not None and each.verdict is Verdict.INCONCLUSIVE and system != EVERSTEP
            ]
            notes += [f"- {system}, {PEER_TITLES[each.metric]}, {size} MiB: {each.reason}" for each in unsure]
    return "\n\n".join(
        ["### Beside the peers", text, table(("state", "system", *PEER_TITLES.values()), rows), "\n".join(notes)]
    ).rstrip()


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return "–"
    mark = " ⚠" if figure.verdict is Verdict.INCONCLUSIVE and figure.system != EVERSTEP else ""
    return f"{_number(figure.value)}{'' if figure.verified is None or figure.verified else ' **wrong bytes**'}{mark}"


def _model(figures: Sequence[Figure]) -> str:
    text = (
        f"The char-GPT of `examples/`, larger, two ranks on the same cores, every step kept, {LAUNCHES} "
        "launches. In each all take turns, block by "
        f"block: {SKIPPED_STEPS + COUNTED_STEPS} steps that Everstep keeps, as many that lm-resiliency "
        "keeps, as many that nobody keeps, "
        f"{CYCLES} times in changing orders, behind a warm-up of {WARM_UP_STEPS}. Of a block the last "
        f"{COUNTED_STEPS} steps are "
        "counted: before them another system is still at work. Everstep's agents are there all the time, "
        "and idle when it is not their turn. "
        "A slowdown is the median over such triples; whether one is slowed down less is judged by the "
        "difference within each. Processor "
        "seconds are those of ranks and agents beyond the model's own. Commits are steps that were seen on "
        "the holder; *verified*: "
        "at the end of each launch the holder's bytes of either system's last step, of both ranks, were "
        "compared with the live model's."
    )
    rows = [
        [
            TITLES[figure.metric],
            f"{figure.system} {figure.version}".strip(),
            f"{figure.value:+.1%}" if figure.unit == "ratio" else f"{_number(figure.value)} {figure.unit}",
            f"{figure.low:+.1%} to {figure.high:+.1%}"
            if figure.unit == "ratio"
            else f"{_number(figure.low)} to {_number(figure.high)}",
            str(figure.n),
            VERIFIED[figure.verified],
            figure.reason,
            _told(figure.verdict),
        ]
        for figure in figures
        if figure.metric.startswith("char_gpt")
    ]
    return (
        "### What it costs a real model\n\n"
        + text
        + "\n\n"
        + table(("", "system", "measured", "95 %", "n", "verified", "", "verdict"), rows)
    )


def _limits() -> str:
    return (
        "Not said by these figures: a GPU, a second machine, a real network, EFA or NCCL. DLRover's "
        "replicas and lm-resiliency's restart do not work "
        "as shipped and are not measured. Peers with files on tmpfs keep nothing on another node."
    )


def _limit(figure: Figure) -> str:
    if figure.limit is None:
        return figure.against
    sign = "≥" if figure.metric == "commits" else "≤"
    return f"{sign} {_number(figure.limit)}{f', {figure.against}' if figure.against else ''}"


def _verdict(figure: Figure) -> str:
    told = _told(figure.verdict)
    return f"{told}: {figure.reason}" if told and figure.reason else told or figure.reason


def _told(verdict: Verdict) -> str:
    return {Verdict.SHORT: "**falls short**"}.get(verdict, str(verdict))


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
