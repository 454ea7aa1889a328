"""Command of the interleave benchmark: `make bench-interleave`.

It measures snapshots that share training's network, after GEMINI's Figure 16.

    sudo python -m benchmarks.interleave [--quick] [--only CASE …]

Exit code 1: a case missed its limit.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.begin import begin
from benchmarks.errors import BenchmarkFailed
from benchmarks.interleave import report
from benchmarks.interleave.network import obstacle
from benchmarks.interleave.runs import ROOT, run_case
from benchmarks.interleave.schemes import Case, Scheme
from benchmarks.interleave.verdicts import Verdict, judge

HOME = ROOT / ".everstep" / "bench" / "interleave"
FIGURE_16 = Case(name="figure 16", schemes=tuple(Scheme), blocks=12)
CASES = (
    FIGURE_16,
    Case(name="2 nodes", nodes=2),
    Case(  # half the rate, so that eight nodes on a small machine are not limited by its cores
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


def main() -> int:
    """Run the benchmark, write the report, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.interleave", description="What snapshots cost training on a shared network."
    )
    parser.add_argument("--quick", action="store_true", help="few samples, to try the harness")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="leave the others out")
    parser.add_argument("--json", type=Path, default=HOME.with_suffix(".json"), help="where the figures go")
    parser.add_argument(
        "--document",
        type=Path,
        default=ROOT / "docs" / "benchmarks-interleave.md",
        help="where the tables go, a picture beside them",
    )
    arguments = parser.parse_args()
    reason = obstacle()
    if reason is not None:
        print(f"the benchmark cannot run: {reason}", file=sys.stderr)
        return 2
    begun = begin(is_patient=not arguments.quick)
    machine, say = begun.machine, begun.say
    shutil.rmtree(HOME, ignore_errors=True)
    cases = [case for case in CASES if arguments.only is None or case.name in arguments.only]
    if arguments.quick:
        cases = [
            replace(case, blocks=2, block_iterations=3, settle_iterations=min(case.settle_iterations, 10))
            for case in cases
        ]
    figures = []
    for case in cases:
        say(f"{case.name}: {case.nodes} nodes, m = {case.copies}, {case.state_kib} KiB")
        try:
            figure = run_case(case, HOME / case.name.replace(" ", "-"))
        except BenchmarkFailed as error:
            print(f"the benchmark failed: {error}", file=sys.stderr)
            return 1
        figures.append(figure)
        for row in figure.rows:
            print(
                f"          {row.scheme.title:30} {row.seconds * 1000:6.1f} ms {row.slowdown:+7.2%} "
                f"[{row.low:+.2%}, {row.high:+.2%}]",
                flush=True,
            )
        print(f"          {judge(figure).verdict}: {judge(figure).reason}", flush=True)
    run = report.Run(machine=machine, figures=figures, is_quick=arguments.quick, seconds=begun.seconds)
    report.write(run, arguments.json, arguments.document)
    say(f"{arguments.document}, {arguments.json}")
    return (
        1
        if any(report.judgement(run, figure).verdict is Verdict.FALLS_SHORT for figure in figures)
        else 3
        if run.is_busy
        else 0
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
