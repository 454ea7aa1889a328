"""Measures the cost of copying every step of the char-GPT example to another node, with DDP and with ZeRO-3.

In each launch, blocks of steps under Everstep, under lm-resiliency and without protection take turns.
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path

from benchmarks.cluster_jobs import EVERY_STEP, Bench, Json
from benchmarks.data_plane.everstep import agents_of
from benchmarks.data_plane.launches import RANKS
from benchmarks.data_plane.rows import EVERSTEP, Figure
from benchmarks.data_plane.systems import PEERS
from benchmarks.machine import ROOT
from benchmarks.measures import FLOOR_TOLERANCE_RATIO, LEAST_COMMITS_RATIO, Verdict, bootstrap_interval, moved_ratio

SCRIPT = Path(__file__).parent / "rank" / "char_gpt.py"
EXAMPLE = ROOT / "examples" / "char_gpt"
KINDS = {"ddp": "DDP", "zero3": "ZeRO-3"}
NOBODY, OWN, LM_RESILIENCY = "none", "everstep", "lm_resiliency"
NAMES = {EVERSTEP: OWN, "lm-resiliency": LM_RESILIENCY}
LAUNCHES, CYCLES = 6, 24
SKIPPED_STEPS, COUNTED_STEPS = 1, 4
"""Untimed steps of a block, in which the previous system may finish its work, and timed steps."""
WARM_UP_STEPS = 120
"""Steps before the first block: Everstep's profile of the network and its longest trial of a sending rate
(`worker.core.pacing_trial`).
"""
GIB = 1024**3

Cycle = Mapping[str, Json]
"""Rank 0's measurements of one block per system. The CPU time covers all ranks and agents."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Measurements of one launch of two ranks."""

    cycles: list[Cycle]
    kept_ratio: Mapping[str, float]
    """Steps that were complete on both nodes ÷ all steps, by system."""
    verified: Mapping[str, bool | None]
    """Whether the copies of all ranks' last step equal the state, by system. None without protection."""
    state_bytes: int
    """Bytes of all ranks together."""

    @classmethod
    def of(cls, ranks: Sequence[Json]) -> Launch:
        """Return the measurements in both ranks' output."""
        first, size = ranks[0]["blocks"], len({block["system"] for block in ranks[0]["blocks"]})
        blocks = [
            {**block, "cpu_seconds": sum(rank["blocks"][number]["cpu_seconds"] for rank in ranks)}
            for number, block in enumerate(first)
        ]
        cycles = [
            {block["system"]: block for block in blocks[start : start + size]} for start in range(0, len(blocks), size)
        ]

        def kept_ratio(system: str) -> float:
            own = [[block for block in rank["blocks"] if block["system"] == system] for rank in ranks]
            return min(
                sum(block["kept_count"] for block in blocks) / sum(len(block["numbers"]) for block in blocks)
                for blocks in own
            )

        verified = {
            system: None if None in (seen := [rank["verified"][system] for rank in ranks]) else all(seen)
            for system in ranks[0]["verified"]
        }
        return cls(
            cycles,
            {system: kept_ratio(system) for system in verified},
            verified,
            sum(rank["state_bytes"] for rank in ranks),
        )


def measure(bench: Bench, environments: Path, kind: str, *, with_peer: bool) -> list[Launch]:
    """Launch the model (ddp or zero3) a few times, with blocks of steps under each system in turn.

    Raises BenchmarkFailed if a launch failed.
    """
    systems = (NOBODY, OWN, *((LM_RESILIENCY,) if with_peer else ()))
    found = []
    for number in range(LAUNCHES):
        directory = bench.directory / f"char-gpt-{kind}-{number}"
        source = directory / "source"
        source.mkdir(parents=True)
        shutil.copy(SCRIPT, source / "train.py")
        job = bench.submit(
            directory.name,
            source,
            "train.py",
            nodes=RANKS,
            copies=2,
            hyperparameters={
                "kind": kind,
                "warm_up": WARM_UP_STEPS,
                "skipped": SKIPPED_STEPS,
                "counted": COUNTED_STEPS,
                "blocks": " ".join(order_of(systems)),
            },
            max_slowdown=EVERY_STEP,
            Environment={
                "BENCH_DIRECTORY": str(directory),
                "BENCH_EXAMPLE": str(EXAMPLE),
                "BENCH_AGENTS": " ".join(str(pid) for pid in agents_of(bench)),
                "BENCH_LM_RESILIENCY": str(_packages(environments)) if with_peer else "",
            },
        )
        job.completed()
        found.append(Launch.of([json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(RANKS)]))
        told = ", ".join(f"{system} {1000 * _median(found[-1], system):.1f}" for system in systems)
        bench.say(f"char-GPT, {KINDS[kind]}, launch {number + 1} of {LAUNCHES}, ms a step: {told}")
    return found


def order_of(systems: Sequence[str]) -> list[str]:
    """Return the system of each block. The order changes, so that no system always follows the same one."""
    orders = list(permutations(systems))
    return [system for number in range(CYCLES) for system in orders[number % len(orders)]]


def _packages(environments: Path) -> Path:
    (peer,) = (system for system in PEERS if system.name == "lm-resiliency")
    (packages,) = peer.python(environments).parent.parent.glob("lib/python*/site-packages")
    return packages


def _median(launch: Launch, system: str) -> float:
    return statistics.median(cycle[system]["seconds"] for cycle in launch.cycles)


def figures(kind: str, launches: Sequence[Launch], versions: Mapping[str, str]) -> list[Figure]:
    """Return rows of the step time without protection, and of slowdown and CPU time of every system.

    Only Everstep's rows have limits.
    """
    medians = [_median(launch, NOBODY) for launch in launches]
    moved = moved_ratio(min(medians), max(medians)) if len(medians) > 1 else None
    measured = {name: system for name, system in NAMES.items() if system in launches[0].verified}

    def figure(name: str, metric: str, unit: str, of: Callable[[Cycle, str], float], reason: str = "") -> Figure:
        system = measured.get(name, NOBODY)
        samples = [of(cycle, system) for launch in launches for cycle in launch.cycles]
        low, high = _interval(samples)
        seen = [launch.verified.get(system) for launch in launches]
        return Figure(
            system=name,
            version=versions.get(name, ""),
            metric=f"char_gpt_{kind}_{metric}",
            what=f"{name}: char_gpt_{kind}_{metric}",
            state_mib=round(launches[0].state_bytes / RANKS / 1024**2),
            value=statistics.median(samples),
            unit=unit,
            n=len(samples),
            low=low,
            high=high,
            verified=None if None in seen else all(seen),
            floor_moved_ratio=moved,
            reason=reason,
        )

    commits = {system: min(launch.kept_ratio[system] for launch in launches) for system in measured.values()}
    slowdowns = {
        name: figure(name, "slowdown", "%", slowdown, f"commits ÷ steps {commits[system]:.2f}")
        for name, system in measured.items()
    }
    slowdowns[EVERSTEP] = _judged(slowdowns[EVERSTEP], slowdowns.get("lm-resiliency"), launches, commits)

    def cpu(cycle: Cycle, system: str) -> float:
        kept_gib = launches[0].state_bytes / GIB * commits[system]
        return float((cycle[system]["cpu_seconds"] - cycle[NOBODY]["cpu_seconds"]) / max(kept_gib, 1e-9))

    alone = figure("nobody", "step", "ms", lambda cycle, system: float(1000 * cycle[system]["seconds"]))
    return [alone, *slowdowns.values(), *(figure(name, "cpu", "cpu s/GiB", cpu) for name in measured)]


def slowdown(cycle: Cycle, system: str) -> float:
    """Return the extra step time under a system, relative to unprotected steps."""
    return float(cycle[system]["seconds"] / cycle[NOBODY]["seconds"] - 1)


def _interval(samples: Sequence[float]) -> tuple[float, float]:
    return bootstrap_interval(lambda drawn: statistics.median(drawn[0]), samples)


def _judged(own: Figure, peer: Figure | None, launches: Sequence[Launch], commits: Mapping[str, float]) -> Figure:
    told, moved = own.reason, own.floor_moved_ratio
    if own.verified is False:
        return replace(own, verdict=Verdict.SHORT, reason=f"{told}; the bytes differ from the owner's")
    if moved is None or moved > FLOOR_TOLERANCE_RATIO:
        why = "the model was launched once" if moved is None else f"the model alone moved by {moved:.0%}"
        return own.judged(f"{told}; {why}")
    if peer is None:
        return own.judged(f"{told}; no other system that replicates was measured")
    own = replace(own, limit=peer.value, against="lm-resiliency's")
    if commits[OWN] < LEAST_COMMITS_RATIO:
        return own.judged(f"{told}: not the same interval")
    if commits[LM_RESILIENCY] < LEAST_COMMITS_RATIO:
        why = f"lm-resiliency's {commits[LM_RESILIENCY]:.2f}: not the same interval"
        return own.judged(f"{told}; {why}")
    more = [slowdown(cycle, OWN) - slowdown(cycle, LM_RESILIENCY) for launch in launches for cycle in launch.cycles]
    low, high = _interval(more)
    verdict = Verdict.PASS if high <= 0 else Verdict.SHORT if low > 0 else Verdict.INCONCLUSIVE
    beside = (
        f"{100 * statistics.median(more):+.1f} points beside lm-resiliency's ({100 * low:+.1f} to {100 * high:+.1f})"
    )
    return replace(own, verdict=verdict, reason=f"{told}; {beside}")
