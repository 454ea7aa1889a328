"""Defines the results and the documentation page of the GPU benchmark. Pure except for `earlier`.

All values were measured on one device, with one version of torch, one revision of Everstep and one set of sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.device.parts import CAPTURE, GIB, GPT, GRAPH, PARTS, RESTORE, Sizes
from benchmarks.device.rows import LEAST_RATE_RATIO, MOST_SLOWDOWN_RATIO, broken, of_part
from benchmarks.machine import Machine
from benchmarks.measures import LEAST_COMMITS_RATIO
from benchmarks.page import BenchmarkRun, Page, load
from benchmarks.rows import Row, limits

TITLES = {
    CAPTURE: "Capture",
    RESTORE: "Restore",
    GRAPH: "A captured graph",
    GPT: "A real GPT, every step kept",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one part: its measurements, or why it failed."""

    found: Mapping[str, Any] | None
    """None if the part failed before it measured any."""
    failure: str = ""
    at: str = ""
    """UTC start of the part, as text."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(BenchmarkRun):
    """The results of all parts, also from earlier runs on the same device."""

    device: Mapping[str, Any]
    """Facts as `rank/probe.py` printed them."""
    sizes: Sizes
    outcomes: Mapping[str, Outcome]


def rows(run: Run) -> list[Row]:
    """Return the rows of all parts that ran."""
    return [row for part in PARTS if part in run.outcomes for row in rows_of(part, run.outcomes[part])]


def rows_of(part: str, outcome: Outcome) -> list[Row]:
    """Return a part's rows. Without readable measurements, one row names the reason."""
    if outcome.found is None:
        return [broken(part, outcome.failure)]
    try:
        return of_part(part, outcome.found)
    # If this part of the benchmark ended early, any of its values may be missing.
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        return [broken(part, f"what it left cannot be read ({type(error).__name__}: {error})")]


def earlier(
    results: Path, device: Mapping[str, Any], sizes: Sizes, machine: Machine, *, is_quick: bool
) -> dict[str, Outcome]:
    """Return the outcomes of an earlier run that the page may show beside this run's.

    Empty if device, torch, sizes, revision or `is_quick` differ.
    """
    try:
        run: Run = load(PAGE, results)
    except (OSError, ValueError):  # no earlier results, or results in an unknown format
        return {}
    kept = (run.device, run.sizes, run.machine.revision, run.is_quick)
    return dict(run.outcomes) if kept == (dict(device), sizes, machine.revision, is_quick) else {}


def values(run: Run) -> dict[str, str | None]:
    """Return the text for each placeholder of the template of this benchmark's page."""
    device = run.device
    texts: dict[str, str | None] = {
        "machine": run.machine.words(),
        "device": device["name"],
        "memory": str(device["memory_gib"]),
        "driver": device["driver"],
        "generation": str(device["pcie_generation"]),
        "lanes": str(device["pcie_lanes"]),
        "cuda": device["cuda"],
        "torch": device["torch"],
        "least_rate": f"{LEAST_RATE_RATIO:g}",
        "most_slowdown": f"{MOST_SLOWDOWN_RATIO:.0%}",
        "least_commits": str(LEAST_COMMITS_RATIO),
        "missing": ", ".join(TITLES[part] for part in PARTS if part not in run.outcomes) or None,
    }
    for part in PARTS:
        outcome = run.outcomes.get(part)
        texts[part] = limits(rows_of(part, outcome)) if outcome else None
        texts[f"{part}_measured"] = f"Measured {outcome.at}, {outcome.seconds:.0f} s." if outcome else None
        texts[f"{part}_state"] = _state(outcome.found or {}) if outcome else None
    return texts | {"model": _model(run.outcomes[GPT].found or {}) if GPT in run.outcomes else None}


def _state(found: Mapping[str, Any]) -> str:
    if "payload_bytes" not in found:
        return ""
    size = f"{found['payload_bytes'] / GIB:.2f} GiB in {found['tensors']:,} tensors"
    return f"The state has {size}: fp32 parameters and Adam's moments, with a thousand small parameters."


def _model(found: Mapping[str, Any]) -> str:
    if "parameters" not in found:
        return "no model was built"
    return (
        f"{found['parameters'] / 1e6:.0f} M parameters in fp32 under Adam, {found['state_bytes'] / GIB:.2f} GiB, "
        f"{found['tokens']:,} tokens per step"
    )


PAGE = Page(name="device", command="make bench-device", run=Run, values=values, rows=rows)
