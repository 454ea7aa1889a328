"""Measures Everstep's slowdown of the char-GPT: step times in a job (A), and in the same script without an agent (B).

The launches run in the order ABBA. Each pair gives one ratio, so that drift affects both values. In one measurement,
every step has a snapshot, and medians are compared. In the other, a budget (`Protection.MaxSlowdown`) leaves only a few
snapshots, so means are compared.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster_jobs import PATIENCE_SECONDS, Bench
from benchmarks.errors import BenchmarkFailed
from benchmarks.measures import FLOOR_TOLERANCE_RATIO, Summary, moved_ratio, paired_ratios
from benchmarks.traces import read_trace, step_seconds

RANKS = 2
WARM_UP_STEPS = 110
"""Uncounted first steps: Everstep profiles the network, and its longest trial of sending rates ends
(`worker.core.pacing_trial`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Step times in launches with and without an agent."""

    order: str
    """A (agent) or B per launch."""
    step_seconds: tuple[Summary, ...]
    """Step times per launch, without its first `settle_steps`."""
    ratios: tuple[float, ...]
    """A ÷ B − 1 per pair, of medians, or of means with a budget."""
    blocked: Summary
    """Seconds per snapshot of all launches with an agent, also of uncounted and audited ones."""
    snapshots_ratio: float
    """Snapshots ÷ counted steps with an agent."""
    settle_steps: int = WARM_UP_STEPS
    max_slowdown: float | None = None
    """The job's budget. None: every step has a snapshot."""

    @property
    def plain_moved_ratio(self) -> float:
        """Relative difference between the slowest and the fastest launch without an agent."""
        return self._moved("B")

    @property
    def noise_ratio(self) -> float:
        """The larger spread of launches with or without an agent: slowest relative to fastest."""
        return max(self._moved("A"), self._moved("B"))

    def _moved(self, kind: str) -> float:
        medians = [summary.median for each, summary in zip(self.order, self.step_seconds, strict=True) if each == kind]
        return moved_ratio(min(medians), max(medians))

    @property
    def plain_count(self) -> int:
        """Launches without an agent."""
        return self.order.count("B")

    @property
    def is_conclusive(self) -> bool:
        """Whether several launches without an agent agree."""
        return self.plain_count > 1 and self.plain_moved_ratio <= FLOOR_TOLERANCE_RATIO


def measure(
    bench: Bench, *, order: str, steps: int, settle_steps: int = WARM_UP_STEPS, max_slowdown: float | None = None
) -> Slowdown:
    """Launch the model once per letter of `order`, such as ABBA. The first `settle_steps` of `steps` do not count.

    `max_slowdown` None: every step has a snapshot. Raises BenchmarkFailed if a launch failed.
    """
    name, center = ("slowdown", statistics.median) if max_slowdown is None else ("budget", statistics.fmean)
    summaries, centers, blocked, snapshots = [], [], [], 0
    for number, kind in enumerate(order, start=1):
        bench.say(
            f"char-GPT on {RANKS} ranks {'under an agent' if kind == 'A' else 'alone'}, launch {number} of {len(order)}"
        )
        trace = bench.directory / "traces" / f"{name}-{number}"
        trace.mkdir(parents=True)
        if kind == "A":
            blocked += _under_agent(bench, f"{name}-{number}", steps, trace, max_slowdown)
        else:
            _alone(bench, f"{name}-{number}", steps, trace)
        ranks = read_trace(trace, RANKS)
        snapshots += sum(passed[-1].snapshots - passed[settle_steps].snapshots for passed in ranks)
        counted = step_seconds(ranks[0])[settle_steps:]
        summaries.append(Summary.of(counted))
        centers.append(center(counted))
        bench.say(f"  {'median' if max_slowdown is None else 'mean'} step {1000 * centers[-1]:.1f} ms")
    return Slowdown(
        order=order,
        step_seconds=tuple(summaries),
        ratios=tuple(paired_ratios(order, centers)),
        blocked=Summary.of(blocked),
        snapshots_ratio=snapshots / (order.count("A") * (steps - 1 - settle_steps) * RANKS),
        settle_steps=settle_steps,
        max_slowdown=max_slowdown,
    )


def _under_agent(bench: Bench, name: str, steps: int, trace: Path, max_slowdown: float | None) -> list[float]:
    """Run one launch with an agent. Return the blocked seconds of each snapshot."""
    job = bench.submit(
        name,
        bench.traced_source(),
        "traced.py",
        nodes=RANKS,
        copies=2,
        hyperparameters={"steps": steps},
        max_slowdown=max_slowdown,
        Environment={"BENCH_TRACE": str(trace)},
    )
    job.completed()
    return [seconds for rank in job.outputs("blocked.json") for seconds in rank]


def _alone(bench: Bench, name: str, steps: int, trace: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "EVERSTEP_HYPERPARAMETERS": json.dumps({"steps": str(steps)}),
        "BENCH_TRACE": str(trace),
    }
    logs = [bench.directory / f"{name}-alone-rank{rank}.log" for rank in range(RANKS)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            own = {"RANK": str(rank), "GROUP_RANK": str(rank), "EVERSTEP_OUTPUT_DIR": str(log.with_suffix(".output"))}
            with log.open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "traced.py"],
                        cwd=bench.traced_source(),
                        env={**environment, **own},
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
        codes = [process.wait(timeout=PATIENCE_SECONDS + steps) for process in processes]
    except subprocess.TimeoutExpired as error:
        raise BenchmarkFailed(f"the char-GPT without an agent did not end in time; see {logs[0]}") from error
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise BenchmarkFailed(f"char-GPT alone ended with {codes}; see {logs[0]}")
