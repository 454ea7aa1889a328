"""What Everstep costs a real model: the char-GPT's step under an agent (A) and as the same script alone (B), launch by launch in the order ABBA.

The machine's drift falls on both sides of a pair; each pair gives one ratio. Alone means without agent, replicas, rounds and reports; the cluster's
own processes stand idle beside it, as they do in A.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster_jobs import PATIENCE_SECONDS, Bench
from benchmarks.errors import BenchmarkFailed
from benchmarks.measures import FLOOR_TOLERANCE_RATIO, Summary, moved_ratio, paired_ratios
from benchmarks.traces import read_trace, step_seconds

RANKS = 2
WARM_UP_STEPS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """One sequence of launches."""

    order: str
    """A under an agent, B alone."""
    step_seconds: tuple[Summary, ...]
    """Of each launch, its first `WARM_UP_STEPS` steps not counted."""
    ratios: tuple[float, ...]
    """A ÷ B − 1 of the median step, pair by pair."""
    blocked: Summary
    """Seconds per snapshot of all launches under an agent, warm-up and audits included."""
    snapshots_ratio: float
    """Snapshots ÷ steps of those launches: 1 where every step was kept."""

    @property
    def plain_moved_ratio(self) -> float:
        """By how much the slowest launch alone was slower than the fastest: the noise that a ratio must stand out from."""
        plain = [summary.median for kind, summary in zip(self.order, self.step_seconds, strict=True) if kind == "B"]
        return moved_ratio(min(plain), max(plain))

    @property
    def plain_count(self) -> int:
        """Launches alone."""
        return self.order.count("B")

    @property
    def is_conclusive(self) -> bool:
        """The script alone was launched more than once, and took the same time at every launch."""
        return self.plain_count > 1 and self.plain_moved_ratio <= FLOOR_TOLERANCE_RATIO


def measure(bench: Bench, *, order: str, steps: int) -> Slowdown:
    """Launch the model `len(order)` times.

    Args:
        bench: where.
        order: such as ABBA.
        steps: of each launch, warm-up included.

    Raises:
        BenchmarkFailed: a launch ended otherwise.
    """
    summaries, blocked = [], []
    for number, kind in enumerate(order, start=1):
        bench.say(f"char-GPT on {RANKS} ranks {'under an agent' if kind == 'A' else 'alone'}, launch {number} of {len(order)}")
        trace = bench.directory / "traces" / f"slowdown-{number}"
        trace.mkdir(parents=True)
        if kind == "A":
            blocked += _under_agent(bench, number, steps, trace)
        else:
            _alone(bench, number, steps, trace)
        summaries.append(Summary.of(step_seconds(read_trace(trace, RANKS)[0])[WARM_UP_STEPS:]))
        bench.say(f"  median step {1000 * summaries[-1].median:.1f} ms")
    ratios = paired_ratios(order, [summary.median for summary in summaries])
    return Slowdown(
        order=order,
        step_seconds=tuple(summaries),
        ratios=tuple(ratios),
        blocked=Summary.of(blocked),
        snapshots_ratio=len(blocked) / (order.count("A") * steps * RANKS),
    )


def _under_agent(bench: Bench, number: int, steps: int, trace: Path) -> list[float]:
    """Return the seconds that each snapshot of each rank held its training thread."""
    job = bench.submit(
        f"slowdown-{number}",
        bench.traced_source(),
        "traced.py",
        nodes=RANKS,
        copies=2,
        hyperparameters={"steps": steps},
        Environment={"BENCH_TRACE": str(trace)},
    )
    job.completed()
    return [seconds for rank in job.outputs("blocked.json") for seconds in rank]


def _alone(bench: Bench, number: int, steps: int, trace: Path) -> None:
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
    logs = [bench.directory / f"alone-{number}-rank{rank}.log" for rank in range(RANKS)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            own = {"RANK": str(rank), "GROUP_RANK": str(rank), "EVERSTEP_OUTPUT_DIR": str(log.with_suffix(".output"))}
            with log.open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "traced.py"], cwd=bench.traced_source(), env={**environment, **own}, stdout=file, stderr=subprocess.STDOUT
                    )
                )
        codes = [process.wait(timeout=PATIENCE_SECONDS + steps) for process in processes]
    except subprocess.TimeoutExpired as error:
        raise BenchmarkFailed(f"char-GPT alone does not end; see {logs[0]}") from error
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise BenchmarkFailed(f"char-GPT alone ended with {codes}; see {logs[0]}")
