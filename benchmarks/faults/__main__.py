"""Command of the fault benchmark: `make bench-faults`. Needs root, for network namespaces with shaped links."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.cluster_jobs import started_bench
from benchmarks.command import Begun
from benchmarks.errors import BenchmarkFailed
from benchmarks.faults import lines
from benchmarks.faults.cases import CASES, MIB, Case, Place
from benchmarks.faults.figures import Observed, evaluate
from benchmarks.faults.report import PAGE, row
from benchmarks.faults.runs import QUICK, RANKS, Sizes, run_case
from benchmarks.rows import line
from infra.local_cloud.network import obstacle
from infra.local_cloud.up import ClusterOptions

WITHOUT_RATE_LIMIT = Path(__file__).parent / "without_rate_limit"


def measure(begun: Begun) -> dict[str, Any]:
    """Run the cases that `--only` names. Raises BenchmarkFailed without network namespaces, or if a case failed."""
    if (reason := obstacle()) is not None:
        raise BenchmarkFailed(reason)
    sizes = QUICK if begun.is_quick else Sizes()
    cases = [case for case in CASES if case.name in begun.parts]
    observed = []
    for environment, alike in (
        ({}, [case for case in cases if case.has_rate_limit]),
        ({"PYTHONPATH": str(WITHOUT_RATE_LIMIT)}, [case for case in cases if not case.has_rate_limit]),
    ):
        if alike:
            observed += _observe(begun, sizes, alike, environment)
    return {"observed": observed}


def _observe(begun: Begun, sizes: Sizes, cases: Sequence[Case], environment: Mapping[str, str]) -> list[Observed]:
    """Run cases in one cluster, whose instances have these additional variables."""
    # A node stores the shards of both ranks, each in two slots. The memory of one further slot is a reserve.
    node_memory_bytes = (2 * RANKS + 1) * (sizes.state_mib + 16) * MIB
    options = ClusterOptions(
        nodes=RANKS, spares=0, node_memory_bytes=node_memory_bytes, has_namespaces=True, environment=environment
    )
    observed = []
    with started_bench(begun.home, begun.say, options) as bench:
        bench.wait_until_warm(RANKS)
        nodes = tuple(sorted(bench.cluster.instances()))
        place = Place(
            bench=bench,
            nodes=nodes,
            link_bytes_per_second=lines.bytes_per_second(bench.cluster, *nodes),
            node_memory_bytes=node_memory_bytes,
            state_mib=sizes.state_mib,
        )
        begun.say(f"a link carries {place.link_bytes_per_second / 1e6:,.0f} MB/s")
        for case in cases:
            observed.append(run_case(place, case, sizes))
            begun.say(line(row(evaluate(observed[-1]))))
    return observed


if __name__ == "__main__":
    sys.exit(command.run(PAGE, measure, parts=[case.name for case in CASES]))
