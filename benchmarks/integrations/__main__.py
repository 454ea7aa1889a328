"""Command of the benchmark of the integration with transformers: `make bench-integrations`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import command
from benchmarks.cluster_jobs import started_bench
from benchmarks.command import Begun
from benchmarks.integrations import jobs
from benchmarks.integrations.report import PAGE
from infra.local_cloud.up import ClusterOptions

ROUNDS, STEPS, SETTLE_STEPS = 3, 60, 60
"""Launches of each system, and counted and uncounted steps of each."""
QUICK_ROUNDS, QUICK_STEPS, QUICK_SETTLE_STEPS = 1, 10, 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, write its page of results, and return the exit code."""
    return command.run(PAGE, measure, argv)


def measure(begun: Begun) -> dict[str, Any]:
    """Measure training under transformers with each system, in turn on one local cluster."""
    rounds, steps, settle_steps = (
        (QUICK_ROUNDS, QUICK_STEPS, QUICK_SETTLE_STEPS) if begun.is_quick else (ROUNDS, STEPS, SETTLE_STEPS)
    )
    options = ClusterOptions(nodes=jobs.NODES, spares=0)
    with started_bench(begun.home, begun.say, options) as bench:
        bench.wait_until_warm(jobs.NODES)
        found = list(jobs.measure(bench, rounds=rounds, steps=steps, settle_steps=settle_steps))
    return {"launches": found}


if __name__ == "__main__":
    sys.exit(main())
