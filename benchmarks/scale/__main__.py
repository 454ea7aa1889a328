"""Command of the scale benchmark: `make bench-scale`.

    python -m benchmarks.scale [--quick]

Exit code 2: a value missed its limit. Exit code 3: the machine was busy, so that no value counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.begin import begin
from benchmarks.scale import placement, report, rounds

ROOT = Path(__file__).parents[2]
QUICK_NODES, QUICK_AGENTS = (16, 128), (2, 32)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, write the report, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description="Placement and rounds of many nodes."
    )
    parser.add_argument("--quick", action="store_true", help="few nodes, to try the harness")
    parser.add_argument(
        "--json", type=Path, default=ROOT / ".everstep" / "bench" / "scale.json", help="where the figures go"
    )
    parser.add_argument(
        "--document", type=Path, default=ROOT / "docs" / "benchmarks-scale.md", help="where the tables go"
    )
    chosen = parser.parse_args(arguments)
    begun = begin(is_patient=not chosen.quick)
    shapes = [
        (count, copies) for count in (QUICK_NODES if chosen.quick else placement.NODES) for copies in placement.COPIES
    ]
    plans = [placement.plan_figure(count, copies) for count, copies in shapes]
    domains = [placement.domain_figure(count, copies) for count, copies in shapes if count > placement.DOMAIN_NODES]
    begun.say("placement and its odds are measured")
    found = rounds.measure_all(QUICK_AGENTS if chosen.quick else rounds.COUNTS, begun.say)
    run = report.Run(
        machine=begun.machine,
        is_quick=chosen.quick,
        seconds=begun.seconds,
        plans=plans,
        domains=domains,
        known=placement.known_figures(),
        rounds=found,
    )
    report.write(run, chosen.json, chosen.document)
    begun.say(f"{chosen.document}, {chosen.json}")
    return 2 if run.falls_short else 3 if run.is_busy else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
