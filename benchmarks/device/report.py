"""Report of the GPU benchmark: measurements of each part with their time as JSON, and a document with a table per part.

Pure except for `write` and `earlier`.

Invariant: all reported values were measured on one device with one version of torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.device.parts import CAPTURE, GIB, GPT, GRAPH, PARTS, RESTORE
from benchmarks.device.rows import LEAST_RATE_RATIO, MOST_SLOWDOWN_RATIO, Row, broken, of_part
from benchmarks.document import caveats, table, write_figures
from benchmarks.errors import BenchmarkFailed
from benchmarks.machine import Machine
from benchmarks.measures import FLOOR_TOLERANCE_RATIO, LEAST_COMMITS_RATIO, Verdict
from control_plane.contract.markdown import wrap

COMMAND = "make bench-device"
TITLES = {
    CAPTURE: "Capture",
    RESTORE: "Restore",
    GRAPH: "A captured graph",
    GPT: "A real GPT, every step kept",
}
VERIFIED = {None: "", True: "yes", False: "**no**"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of one part."""

    found: Mapping[str, Any] | None
    """The part's measurements; None if the part failed before it measured any."""
    failure: str = ""
    at: str = ""
    """Time at which the part started, UTC."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All reported parts, from this run and from earlier runs on the same device."""

    machine: Machine
    device: Mapping[str, Any]
    """The probe's identification of the device."""
    outcomes: Mapping[str, Outcome]
    is_quick: bool

    @property
    def rows(self) -> list[Row]:
        """Rows of all parts."""
        return [row for part in PARTS if part in self.outcomes for row in rows_of(part, self.outcomes[part])]

    @property
    def falls_short(self) -> bool:
        """Whether any row misses its limit."""
        return any(row.verdict is Verdict.SHORT for row in self.rows)


def rows_of(part: str, outcome: Outcome) -> list[Row]:
    """Return a part's rows. A part without readable measurements gets one row with the reason."""
    if outcome.found is None:
        return [broken(part, outcome.failure)]
    try:
        return of_part(part, outcome.found)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:  # a part that ended early may lack any value
        return [broken(part, f"what it left cannot be read ({type(error).__name__}: {error})")]


def earlier(figures: Path, device: Mapping[str, Any], *, is_quick: bool) -> dict[str, Outcome]:
    """Return the parts of an earlier run on the same device with the same version of torch.

    Return nothing if the device, the version or `is_quick` differ.

    Args:
        figures: path of the earlier run's JSON file.
        device: the current identification of the device, from the probe.
        is_quick: whether this run is a quick run.
    """
    try:
        content = json.loads(figures.read_text())
        if content["device"] != dict(device) or content["is_quick"] is not is_quick:
            return {}
        return {part: Outcome(**outcome) for part, outcome in content["parts"].items() if part in PARTS}
    except (OSError, ValueError, KeyError, TypeError):  # no file, or a file of another version of this benchmark
        return {}


def write(run: Run, figures: Path, document: Path) -> None:
    """Write the report.

    Args:
        run: the measured values.
        figures: path of the JSON file.
        document: path of the Markdown file.

    Raises:
        BenchmarkFailed: a part did not run on a device.
    """
    for part, outcome in run.outcomes.items():
        if outcome.found is not None and outcome.found.get("device") != "cuda":
            raise BenchmarkFailed(
                f"the part {part} ran on {outcome.found.get('device')}: its figures say nothing of a device, "
                "and are not reported"
            )
    content = {
        "machine": dataclasses.asdict(run.machine),
        "device": dict(run.device),
        "is_quick": run.is_quick,
        "parts": {part: dataclasses.asdict(outcome) for part, outcome in run.outcomes.items()},
        "rows": [dataclasses.asdict(row) for row in run.rows],
    }
    write_figures(figures, content)
    document.parent.mkdir(parents=True, exist_ok=True)
    document.write_text(wrap(render(run)))


def render(run: Run) -> str:
    """Return the Markdown document."""
    rows = run.rows
    parts = [
        _part(part, run.outcomes[part], [row for row in rows if row.part == part])
        for part in PARTS
        if part in run.outcomes
    ]
    missing = [TITLES[part] for part in PARTS if part not in run.outcomes]
    return (
        "\n\n".join([_head(run), *parts, *([f"Not measured: {', '.join(missing)}."] if missing else []), _limits()])
        + "\n"
    )


def line(row: Row) -> str:
    """Return a row as one line for a terminal."""
    limit = "" if row.limit is None else f" ({'≥' if row.is_least else '≤'} {number(row.limit)})"
    reason = f": {row.reason}" if row.reason else ""
    return f"{row.verdict:>12}  {row.part}: {row.title} {number(row.value)} {row.unit}{limit}{reason}"


def _head(run: Run) -> str:
    device, machine = run.device, run.machine
    lines = [
        "# On a GPU",
        "",
        f"Written by `{COMMAND}`; every figure is in `.everstep/bench/device.json`.",
        "",
        f"- Device: {device['name']}, {device['memory_gib']} GiB, driver {device['driver']}, PCIe "
        f"generation {device['pcie_generation']} with "
        f"{device['pcie_lanes']} lanes by the driver's word; CUDA {device['cuda']}, torch {device['torch']}. "
        "**Every figure on this page was measured on it.**",
        f"- Machine: {machine.words()}. Load average before the run: {machine.load}.",
        "- The floor of a copy is what plain torch moves between the device and pinned memory in the same "
        "process, in turn with what is held against "
        f"it (ABBA). **inconclusive**: a row's floor moved by more than {FLOOR_TOLERANCE_RATIO:.0%} between "
        "the first half of the run and the "
        "second, or its interval has the limit in it. Intervals are 95 % percentile bootstraps. A row "
        "without anything to reach has no verdict.",
        "- *verified*: bytes were compared, without any digest.",
    ]
    return "\n".join(lines + caveats(machine, is_quick=run.is_quick))


def _part(part: str, outcome: Outcome, rows: Sequence[Row]) -> str:
    head = ("", "measured", "95 %", "n", "to reach", "floor moved", "verified", "verdict")
    lines = [
        [
            row.title,
            f"**{number(row.value)}** {row.unit}",
            "" if row.low is None or row.high is None else f"{number(row.low)} to {number(row.high)}",
            str(row.n),
            _limit(row),
            "" if row.floor_moved_ratio is None else f"{row.floor_moved_ratio:.0%}",
            VERIFIED[row.verified],
            _verdict(row).replace("|", "\\|").replace("\n", " "),
        ]
        for row in rows
    ]
    return f"## {TITLES[part]}\n\n{_about(part, outcome)}\n\n{table(head, lines)}"


def _about(part: str, outcome: Outcome) -> str:
    measured = f"Measured {outcome.at}, {outcome.seconds:.0f} s." if outcome.at else ""
    found = outcome.found or {}
    if part in (CAPTURE, RESTORE) and "payload_bytes" in found:
        size = f"{found['payload_bytes'] / GIB:.2f} GiB in {found['tensors']:,} tensors"
        state = f"A state of {size}: fp32 parameters and Adam's moments, a thousand small parameters among them."
    else:
        state = ""
    what = {
        CAPTURE: "The product's plan, copier and slot, into a file on tmpfs; the state changes before each capture. "
        "To reach: "
        f"{LEAST_RATE_RATIO:g} of the floor by the median.",
        RESTORE: "By the way of the session: the slot is mapped and its pages are brought near in the background "
        "while tensor after tensor is copied "
        "out of them, by the driver's own staging, for they are not registered; optimizer state is made "
        "anew. There is nothing to reach.",
        GRAPH: "A training step is captured with `torch.cuda.graph` while another thread, the copier's, copies a "
        "state through the bounce ring and "
        "registers a slot; then it is replayed, with a snapshot behind every other replay that the next one "
        "waits for on the device. A replay calls "
        "no hooks: the wait is the script's `fence`.",
        GPT: _model(found),
    }[part]
    return " ".join(text for text in (measured, state, what) if text)


def _model(found: Mapping[str, Any]) -> str:
    size = (
        f"{found['parameters'] / 1e6:.0f} M parameters in fp32 under Adam, {found['state_bytes'] / GIB:.2f} "
        f"GiB, {found['tokens']:,} tokens a step"
        if "parameters" in found
        else "no model was built"
    )
    return (
        f"The char-GPT of `examples/`, larger: {size}, bf16 autocast. Two nodes on loopback, two copies; "
        "the rank that is measured has the device to "
        "itself, the other one, on the holder, keeps step on the host. In one process, blocks of steps with "
        "a boundary each (every step proposed, "
        "`MaxSlowdown` 1) stand in turn with blocks in which the session is not called; a step ends where "
        "an event on the training stream says. The "
        "interval is over pairs of blocks. No step reads a number off the device, and torch's own watch "
        "says whether a call waited. Then steps are "
        "cloned on the device at their boundaries, and all bytes that the holder had of each compared with "
        "the clone. To reach: at most "
        f"{MOST_SLOWDOWN_RATIO:.0%} by the upper end of the interval, at least {LEAST_COMMITS_RATIO} "
        "commits a step, none torn."
    )


def _limits() -> str:
    return (
        "Not said by these figures: several devices, NCCL, a network between nodes, NUMA. The holder is a "
        "process of the same machine; the blocks "
        "that are timed are not the steps that are compared, but of the same loop. What a restore would "
        "gain from registered pages is not tried."
    )


def _limit(row: Row) -> str:
    if row.limit is None:
        return row.against
    return f"{'≥' if row.is_least else '≤'} {number(row.limit)}{f', {row.against}' if row.against else ''}"


def _verdict(row: Row) -> str:
    told = "**falls short**" if row.verdict is Verdict.SHORT else str(row.verdict)
    return f"{told}: {row.reason}" if told and row.reason else told or row.reason


def number(value: float) -> str:
    """Return a value as text with about three digits."""
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:.0f}"
    return (
        f"{value:.1f}"
        if size >= 10
        else f"{value:.2f}"
        if size >= 0.1
        else f"{value:.4f}"
        if size >= 0.001
        else f"{value:.1e}"
    )
