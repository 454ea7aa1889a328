"""Command of the interruption benchmark of Everstep, torchrun and torchft: `make bench-recovery`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.cluster_jobs import Bench, started_bench
from benchmarks.command import HOME, Begun
from benchmarks.data_plane.systems import PEERS, install
from benchmarks.interruption import elastic
from benchmarks.interruption.contenders import (
    RANKS,
    SPARES,
    UnderEverstep,
    UnderTorchft,
    UnderTorchrun,
    running,
    source,
)
from benchmarks.interruption.elastic import Shrink
from benchmarks.interruption.faults import Blackout, Silence, blackout, interrupt, repeated, silence
from benchmarks.interruption.outcomes import Fault, Interruption, Job, Rehearsed
from benchmarks.interruption.report import PAGE
from infra.local_cloud.up import ClusterOptions

ENVIRONMENTS = HOME / "venvs"
PARTS = ("everstep", "torchrun", "torchft", "elastic")
RACED = ("everstep", "torchrun", "torchft")
"""Their systems take turns on one cluster."""
DETECTION_SECONDS = 3.0
BLACKOUT_SECONDS = 3.0
BLOCKS = 2
"""Launches of each system: A B … Z, then Z … B A."""


class Race:
    """Measures all systems and faults in turn, and collects the results."""

    def __init__(self, bench: Bench, *, per_block: int, parts: Sequence[str]) -> None:
        self.interruptions: list[Interruption] = []
        self.silences: list[Silence] = []
        self.blackouts: list[Blackout] = []
        self.rehearsals: list[Rehearsed] = []
        self._bench = bench
        self._count = per_block
        self._parts = parts
        self._launches = 0

    def run(self) -> None:
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
        contender.settle()
        for is_first in (True, False):
            self.rehearsals.append(contender.rehearse(is_first=is_first))
            self._bench.say(f"  {job}: a rehearsal of {self.rehearsals[-1].seconds:.1f} s")
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


def measure(begun: Begun) -> dict[str, Any]:
    """Measure the elastic job on a cluster of its own, then all systems in turn on another."""
    per_block = 1 if begun.is_quick else begun.arguments.per_block
    shrinks: list[Shrink] = []
    if "elastic" in begun.parts:
        few = ClusterOptions(nodes=elastic.NODES, spares=0)
        with started_bench(begun.home / "elastic", begun.say, few) as bench:
            bench.wait_until_warm(elastic.NODES)
            shrinks = list(elastic.measure(bench, per_block))
    race = _race(begun, per_block) if set(begun.parts) & set(RACED) else None
    return {
        "interruptions": race.interruptions if race else (),
        "silences": race.silences if race else (),
        "blackouts": race.blackouts if race else (),
        "rehearsals": race.rehearsals if race else (),
        "shrinks": shrinks,
    }


def _race(begun: Begun, per_block: int) -> Race:
    peers = tuple(peer for peer in PEERS if peer.package == "torchft" and "torchft" in begun.parts)
    install(peers, ENVIRONMENTS, begun.say)
    options = ClusterOptions(nodes=RANKS, spares=SPARES, detection_seconds=DETECTION_SECONDS)
    with started_bench(begun.home, begun.say, options) as bench:
        race = Race(bench, per_block=per_block, parts=begun.parts)
        race.run()
    return race


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--per-block", type=int, default=5, help="faults of each kind per launch; default: 5")


if __name__ == "__main__":
    sys.exit(command.run(PAGE, measure, parts=PARTS, options=options))
