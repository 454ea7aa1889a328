"""Command of the benchmark of blocked times, slowdown and recovery times: `make bench-first`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from benchmarks import command
from benchmarks.cluster_jobs import started_bench
from benchmarks.command import Begun
from benchmarks.first import recovery, slowdown, snapshot_blocking
from benchmarks.first.report import PAGE, Results
from benchmarks.first.snapshot_blocking import Shape
from everstep.protocol.plan import DEFAULT_MAX_SLOWDOWN
from infra.local_cloud.up import ClusterOptions

NODES, SPARES = 4, 1
PARTS = ("blocking", "slowdown", "budget", "recovery")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """State sizes, and numbers of steps, launches and failures."""

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
        """Two slots for each of two shards of the largest state, and a reserve."""
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


def measure(begun: Begun) -> dict[str, Any]:
    """Measure the parts that `--only` names."""
    sizes = QUICK if begun.is_quick else Sizes()
    options = ClusterOptions(nodes=NODES, spares=SPARES, node_memory_bytes=sizes.node_memory_bytes)
    found: dict[str, Any] = {}
    with started_bench(begun.home, begun.say, options) as bench:
        if "blocking" in begun.parts:
            shapes = [Shape(state_mib=size, nodes=nodes) for size in sizes.states_mib for nodes in (1, 2)]
            found["blocking"] = snapshot_blocking.measure(
                bench, shapes, snapshots=sizes.snapshots, floor_steps=sizes.floor_steps
            )
        if "slowdown" in begun.parts:
            found["slowdown"] = slowdown.measure(bench, order=sizes.slowdown_order, steps=sizes.slowdown_steps)
        if "budget" in begun.parts:
            found["budget"] = slowdown.measure(
                bench,
                order=sizes.budget_order,
                steps=sizes.budget_steps,
                settle_steps=sizes.budget_settle_steps,
                max_slowdown=DEFAULT_MAX_SLOWDOWN,
            )
        if "recovery" in begun.parts:
            found["recovery"] = recovery.measure(bench, kills=sizes.kills, steps_between=sizes.steps_between)
    return {"results": Results(**found)}


if __name__ == "__main__":
    sys.exit(command.run(PAGE, measure, parts=PARTS))
