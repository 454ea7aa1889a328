"""Command of the first benchmarks on one local cluster: `make bench-first`.

    python -m benchmarks.first [--quick] [--only blocking|slowdown|budget|recovery …]

`--quick` takes few and small samples to test the harness; the report says so. The report omits parts that were not run.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks import recovery, report, slowdown, snapshot_blocking
from benchmarks.begin import begin
from benchmarks.cluster_jobs import ROOT, Bench
from benchmarks.errors import BenchmarkFailed
from benchmarks.snapshot_blocking import Shape
from everstep import failures
from everstep.errors import EverstepError
from everstep.protocol.plan import DEFAULT_MAX_SLOWDOWN
from infra.local_cloud.errors import LocalCloudError
from infra.local_cloud.up import ClusterOptions, LocalCluster

HOME = ROOT / ".everstep" / "bench"
NODES, SPARES = 4, 1
PARTS = ("blocking", "slowdown", "budget", "recovery")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes and counts of a run."""

    states_mib: tuple[int, ...] = (64, 256)
    snapshots: int = 30
    floor_steps: int = 12
    slowdown_order: str = "ABBAABBA"
    slowdown_steps: int = 190
    budget_order: str = "ABBAABBA"
    budget_steps: int = 900
    budget_settle_steps: int = 600
    kills: int = 3
    steps_between: int = 25

    @property
    def node_memory_bytes(self) -> int:
        """Memory for the largest state on a node: two slots for each of two shards, and a reserve."""
        return 4 * max(self.states_mib) * 1024**2 * 5 // 4 + 64 * 1024**2


QUICK = Sizes(
    states_mib=(16,),
    snapshots=6,
    floor_steps=5,
    slowdown_order="AB",
    slowdown_steps=130,
    budget_order="AB",
    budget_steps=80,
    budget_settle_steps=40,
    kills=1,
    steps_between=10,
)


def main() -> int:
    """Run the benchmark, write the report, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first", description="Seconds blocked per snapshot, slowdown, seconds per recovery."
    )
    parser.add_argument("--quick", action="store_true", help="few and small samples, to try the harness")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="leave the others out")
    parser.add_argument("--json", type=Path, default=HOME / "first.json", help="where the figures go")
    parser.add_argument(
        "--document",
        type=Path,
        default=ROOT / "docs" / "benchmarks.md",
        help="where the tables go, with a picture beside them",
    )
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else Sizes()
    begun = begin(is_patient=not arguments.quick)
    machine, say = begun.machine, begun.say
    home = HOME / "first"  # other benchmarks keep their files in the same folder
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)

    cluster = LocalCluster(home / "cluster")
    say(
        f"load average {machine.load_average[0]:.2f} on {machine.cores} cores; starting {NODES} nodes and "
        f"{SPARES} spare"
    )
    try:
        with cluster:
            cluster.up(ClusterOptions(nodes=NODES, spares=SPARES, node_memory_bytes=sizes.node_memory_bytes))
            with closing(cluster.client()) as client, failures.translated():
                results = measure(Bench(cluster, client, home, say), sizes, arguments.only)
    except (BenchmarkFailed, LocalCloudError, EverstepError, OSError) as error:
        print(
            f"the benchmark failed: {error}\nlogs: {cluster.logs}/*.log, {cluster.nodes_directory}/*/", file=sys.stderr
        )
        return 1
    run = report.Run(machine=machine, results=results, is_quick=arguments.quick, seconds=begun.seconds)
    report.write(run, arguments.json, arguments.document)
    say(f"written: {arguments.json} and {arguments.document}")
    return 0


def measure(bench: Bench, sizes: Sizes, parts: tuple[str, ...]) -> report.Results:
    """Run the requested parts."""
    shapes = (
        [Shape(state_mib=size, nodes=nodes) for size in sizes.states_mib for nodes in (1, 2)]
        if "blocking" in parts
        else []
    )
    return report.Results(
        blocking=snapshot_blocking.measure(bench, shapes, snapshots=sizes.snapshots, floor_steps=sizes.floor_steps),
        slowdown=slowdown.measure(bench, order=sizes.slowdown_order, steps=sizes.slowdown_steps)
        if "slowdown" in parts
        else None,
        budget=slowdown.measure(
            bench,
            order=sizes.budget_order,
            steps=sizes.budget_steps,
            settle_steps=sizes.budget_settle_steps,
            max_slowdown=DEFAULT_MAX_SLOWDOWN,
        )
        if "budget" in parts
        else None,
        recovery=recovery.measure(bench, kills=sizes.kills, steps_between=sizes.steps_between)
        if "recovery" in parts
        else None,
    )


if __name__ == "__main__":
    sys.exit(main())
