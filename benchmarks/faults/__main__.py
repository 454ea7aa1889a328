"""Command of the fault benchmark: `make bench-faults`.

    sudo python -m benchmarks.faults [--quick] [--only CASE …]

Exit code 1: a case slowed training down. Exit code 2: this machine cannot run network namespaces with shaped links.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from contextlib import closing
from pathlib import Path

from benchmarks.begin import begin
from benchmarks.cluster_jobs import ROOT, Bench
from benchmarks.errors import BenchmarkFailed
from benchmarks.faults import lines, report
from benchmarks.faults.cases import CASES, MIB, Place
from benchmarks.faults.figures import Figure, Observed, evaluate
from benchmarks.faults.runs import QUICK, RANKS, Sizes, run_case
from everstep import failures
from everstep.errors import EverstepError
from infra.local_cloud.errors import LocalCloudError
from infra.local_cloud.network import obstacle
from infra.local_cloud.up import ClusterOptions, LocalCluster

HOME = ROOT / ".everstep" / "bench" / "faults"


def main() -> int:
    """Run the benchmark, write the report, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults", description="What faults of the data plane cost training."
    )
    parser.add_argument("--quick", action="store_true", help="few steps, to try the harness")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="leave the others out")
    parser.add_argument("--json", type=Path, default=HOME.with_suffix(".json"), help="where the figures go")
    parser.add_argument(
        "--document",
        type=Path,
        default=ROOT / "docs" / "benchmarks-faults.md",
        help="where the tables go, a picture beside them",
    )
    arguments = parser.parse_args()
    reason = obstacle()
    if reason is not None:
        print(f"the benchmark cannot run: {reason}", file=sys.stderr)
        return 2
    sizes = QUICK if arguments.quick else Sizes()
    begun = begin(is_patient=not arguments.quick)
    machine, say = begun.machine, begun.say
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir(parents=True)
    cases = [case for case in CASES if arguments.only is None or case.name in arguments.only]
    # Two slots for each of two shards, and a reserve.
    node_memory_bytes = (2 * RANKS + 1) * (sizes.state_mib + 16) * MIB
    observed: list[Observed] = []

    cluster = LocalCluster(HOME / "cluster")
    say(
        f"load average {machine.load_average[0]:.2f} on {machine.cores} cores; starting {RANKS} nodes, each "
        "in a namespace"
    )
    try:
        with cluster:
            cluster.up(ClusterOptions(nodes=RANKS, spares=0, node_memory_bytes=node_memory_bytes, has_namespaces=True))
            with closing(cluster.client()) as client, failures.translated():
                bench = Bench(cluster, client, HOME, say)
                bench.wait_until_warm(RANKS)
                nodes = tuple(sorted(cluster.instances()))
                rate = lines.bytes_per_second(cluster, *nodes)
                place = Place(
                    bench=bench,
                    nodes=nodes,
                    link_bytes_per_second=rate,
                    node_memory_bytes=node_memory_bytes,
                    state_mib=sizes.state_mib,
                )
                say(f"a line carries {rate / 1e6:,.0f} MB/s")
                for case in cases:
                    observed.append(run_case(place, case, sizes))
                    say(in_a_line(evaluate(observed[-1])))
    except (BenchmarkFailed, LocalCloudError, EverstepError, OSError) as error:
        print(
            f"the benchmark failed: {error}\nlogs: {cluster.logs}/*.log, {cluster.nodes_directory}/*/", file=sys.stderr
        )
        return 1
    run = report.Run(machine=machine, observed=observed, is_quick=arguments.quick, seconds=begun.seconds)
    report.write(run, arguments.json, arguments.document)
    say(f"written: {arguments.json} and {arguments.document}")
    return 1 if run.falls_short else 3 if run.is_busy else 0


def in_a_line(figure: Figure) -> str:
    """Return a one-line summary of a finished case."""
    medians = ", ".join(f"{1000 * summary.median:.1f}" for summary in (figure.before, figure.during, figure.after))
    return f"{figure.name}: {figure.verdict}, {figure.told}; steps of {medians} ms; {figure.word}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
