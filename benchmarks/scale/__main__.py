"""Command of the scale benchmark: `make bench-scale`. `benchmarks.command` documents options and exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import command
from benchmarks.command import Begun
from benchmarks.scale import leads, placement, rounds
from benchmarks.scale.report import PAGE

QUICK_NODES, QUICK_AGENTS = (16, 128), (2, 32)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, write its page of results, and return the exit code."""
    return command.run(PAGE, measure, argv)


def measure(begun: Begun) -> dict[str, Any]:
    """Measure the duration of placement and of a round, and simulate adaptive and constant leads."""
    counts = QUICK_NODES if begun.is_quick else placement.NODES
    shapes = [(count, copies) for count in counts for copies in placement.COPIES]
    plans = [placement.plan_figure(count, copies) for count, copies in shapes]
    domains = [placement.domain_figure(count, copies) for count, copies in shapes if count > placement.DOMAIN_NODES]
    begun.say("measured placement and its odds")
    return {
        "plans": plans,
        "domains": domains,
        "known": placement.known_figures(),
        "leads": leads.lead_figures(),
        "rounds": rounds.measure_all(QUICK_AGENTS if begun.is_quick else rounds.COUNTS, begun.say),
    }


if __name__ == "__main__":
    sys.exit(main())
