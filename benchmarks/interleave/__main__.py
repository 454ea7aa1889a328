"""Command of the interleave benchmark, after GEMINI's Figure 16: `make bench-interleave`. It needs root."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from benchmarks import command
from benchmarks.command import Begun
from benchmarks.errors import BenchmarkFailed
from benchmarks.interleave.report import PAGE
from benchmarks.interleave.runs import run_case
from benchmarks.interleave.schemes import Case, Scheme
from benchmarks.interleave.verdicts import judge
from benchmarks.rows import line
from infra.local_cloud.network import obstacle

FIGURE_16 = Case(name="figure 16", schemes=tuple(Scheme), blocks=12)
CASES = (
    FIGURE_16,
    Case(name="2 nodes", nodes=2),
    Case(  # This case halves the link's rate, so that the cores of a small machine do not limit eight nodes.
        name="8 nodes",
        nodes=8,
        idle_seconds=(0.09, 0.032, 0.044, 0.032, 0.07, 0.052),
        collective_seconds=0.08,
        link_megabits=100,
    ),
    Case(name="smaller state", state_kib=1152),
    Case(name="larger state", state_kib=1920),
    Case(name="m = 3", copies=3, state_kib=768),
    Case(
        name="too little idle time",
        schemes=(Scheme.NONE, Scheme.EVERSTEP),
        idle_seconds=(0.02, 0.004, 0.006, 0.004, 0.01, 0.006),
        collective_seconds=0.06,
        blocks=8,
        block_iterations=25,
        is_crowded=True,
        settle_iterations=200,
    ),
)


def measure(begun: Begun) -> dict[str, Any]:
    """Run the requested cases. Raises BenchmarkFailed without network namespaces, or if a case failed."""
    if (reason := obstacle()) is not None:
        raise BenchmarkFailed(reason)
    figures = []
    for case in CASES:
        if case.name not in begun.parts:
            continue
        begun.say(f"{case.name}: {case.nodes} nodes, m = {case.copies}, {case.state_kib} KiB")
        settle = min(case.settle_iterations, 10)
        quick = replace(case, blocks=2, block_iterations=3, settle_iterations=settle)
        figures.append(run_case(quick if begun.is_quick else case, begun.home / case.name.replace(" ", "-")))
        begun.say(line(judge(figures[-1])))
    return {"figures": figures}


if __name__ == "__main__":
    sys.exit(command.run(PAGE, measure, parts=[case.name for case in CASES]))
