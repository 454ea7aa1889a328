"""Command of the interruption benchmark of Everstep, torchrun and torchft: `make bench-recovery`.

    python -m benchmarks.interruption [--quick] [--only everstep torchrun torchft …]

Exit code 2: a value missed its limit.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from benchmarks.begin import begin
from benchmarks.cluster_jobs import ROOT, Bench
from benchmarks.data_plane.systems import PEERS, install
from benchmarks.errors import BenchmarkFailed
from benchmarks.interruption import report
from benchmarks.interruption.contenders import (
    RANKS,
    SPARES,
    UnderEverstep,
    UnderTorchft,
    UnderTorchrun,
    running,
    source,
)
from benchmarks.interruption.faults import Blackout, Silence, blackout, interrupt, repeated, silence
from benchmarks.interruption.outcomes import Fault, Interruption, Job
from everstep import failures
from everstep.errors import EverstepError
from infra.local_cloud.errors import LocalCloudError
from infra.local_cloud.up import ClusterOptions, LocalCluster

HOME = ROOT / ".everstep" / "bench" / "interruption"
ENVIRONMENTS = ROOT / ".everstep" / "bench" / "venvs"
PARTS = ("everstep", "torchrun", "torchft")
DETECTION_SECONDS = 3.0
BLACKOUT_SECONDS = 3.0
BLOCKS = 2
"""Number of launches of each system. The systems run in the order A B … Z, then Z … B A."""


class Race:
    """All measurements of one run."""

    def __init__(self, bench: Bench, *, per_block: int, parts: Sequence[str]) -> None:
        self.interruptions: list[Interruption] = []
        self.silences: list[Silence] = []
        self.blackouts: list[Blackout] = []
        self._bench = bench
        self._count = per_block
        self._parts = parts
        self._launches = 0

    def run(self) -> None:
        """Run all measurements, block by block."""
        ddp, zero3 = Job.DDP, Job.ZERO3
        turns: list[tuple[str, Callable[[], None]]] = [
            ("everstep", lambda: self._everstep(ddp, Fault.RANK, Fault.INSTANCE)),
            ("torchft", self._torchft),
            ("torchrun", lambda: self._torchrun(ddp, "torch_save", Fault.RANK, Fault.INSTANCE)),
            ("torchrun", lambda: self._torchrun(ddp, "dcp", Fault.RANK)),
            ("everstep", lambda: self._everstep(zero3, Fault.RANK)),
            ("torchrun", lambda: self._torchrun(zero3, "torch_save", Fault.RANK)),
        ]
        for block in range(BLOCKS):
            for part, turn in turns if block % 2 == 0 else turns[::-1]:
                if part in self._parts:
                    turn()

    def _folder(self, name: str) -> Path:
        self._launches += 1
        return self._bench.directory / "traces" / f"{name}-{self._launches}"

    def _everstep(self, job: Job, *faults: Fault) -> None:
        contender = UnderEverstep(self._bench, job, self._folder("everstep"))
        for fault in faults:
            self.interruptions += repeated(
                lambda fault=fault: interrupt(contender, fault), self._count, self._bench.say
            )  # type: ignore[misc]
        if job is Job.DDP:
            for _ in range(self._count):
                self.silences.append(silence(self._bench, contender, DETECTION_SECONDS))
                self._bench.say(f"  a silent node: a verdict after {self.silences[-1].verdict_seconds:.2f} s")
            for _ in range(self._count):
                self.blackouts.append(blackout(self._bench, contender, seconds=BLACKOUT_SECONDS))
                self._bench.say(
                    f"  the control plane gone for {self.blackouts[-1].seconds:.1f} s: "
                    f"{self.blackouts[-1].restarted_ranks} ranks restarted"
                )
        contender.stop()

    def _torchrun(self, job: Job, way: str, *faults: Fault) -> None:
        contender = UnderTorchrun(
            Path(sys.executable), job, way, self._folder("torchrun"), source(self._bench.directory)
        )
        with running(contender):
            for fault in faults:
                self.interruptions += repeated(
                    lambda fault=fault: interrupt(contender, fault), self._count, self._bench.say
                )  # type: ignore[misc]

    def _torchft(self) -> None:
        python = next(peer for peer in PEERS if peer.package == "torchft").python(ENVIRONMENTS)
        contender = UnderTorchft(python, self._folder("torchft"), source(self._bench.directory))
        with running(contender):
            self.interruptions += repeated(lambda: interrupt(contender, Fault.RANK), self._count, self._bench.say)


def main() -> int:
    """Run the benchmark, write the report, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.interruption", description="How long a failure holds training."
    )
    parser.add_argument("--quick", action="store_true", help="few samples, to try the harness")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="leave the others out")
    parser.add_argument(
        "--per-block", type=int, default=5, help="faults of a kind in each of the two launches of a system"
    )
    parser.add_argument("--json", type=Path, default=HOME.with_name("recovery.json"), help="where the figures go")
    parser.add_argument(
        "--document",
        type=Path,
        default=ROOT / "docs" / "benchmarks-recovery.md",
        help="where the tables go, a picture beside them",
    )
    arguments = parser.parse_args()
    begun = begin(is_patient=not arguments.quick)
    machine, say = begun.machine, begun.say

    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir(parents=True)
    try:
        install(
            tuple(peer for peer in PEERS if peer.package == "torchft" and "torchft" in arguments.only),
            ENVIRONMENTS,
            say,
        )
        with LocalCluster(HOME / "cluster") as cluster:
            say(f"a cluster of {RANKS} nodes and {SPARES} spare")
            cluster.up(ClusterOptions(nodes=RANKS, spares=SPARES, detection_seconds=DETECTION_SECONDS))
            with closing(cluster.client()) as client, failures.translated():
                race = Race(
                    Bench(cluster, client, HOME, say),
                    per_block=1 if arguments.quick else arguments.per_block,
                    parts=arguments.only,
                )
                race.run()
    except (BenchmarkFailed, EverstepError, LocalCloudError) as error:
        print(f"the benchmark failed: {error}", file=sys.stderr)
        return 1
    run = report.Run(
        machine=machine,
        interruptions=race.interruptions,
        silences=race.silences,
        blackouts=race.blackouts,
        is_quick=arguments.quick,
        seconds=begun.seconds,
    )
    report.write(run, arguments.json, arguments.document)
    say(f"{arguments.document}, {arguments.json}")
    return 2 if report.unmeasured(run) or any(row.falls_short for row in report.rows(run)) else 3 if run.is_busy else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
