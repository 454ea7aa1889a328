"""Measures Everstep's checkpoint strategies with the same job, whose rank 1 is killed at the same step.

The job trains on a local cluster of two nodes, whose S3 is a fake, the library moto. The script is `rank.strategy_job`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.cluster_jobs import Bench
from benchmarks.errors import BenchmarkFailed
from benchmarks.traces import whole_rows

NODES = 2
STEPS, KILL_AT = 100, 60
STEP_SECONDS = 0.1
STRAWMAN_SECONDS = 4
"""Seconds between two checkpoints of the strategy Strawman, in place of its usual three hours.

The rank is killed between two checkpoints.
"""
EVERSTEP_EVERY = 50
"""Steps between two checkpoints that the strategy Everstep stores in S3."""
NONE, STRAWMAN, HIGH_FREQ, CHECK_FREQ, EVERSTEP = "None", "Strawman", "HighFreq", "CheckFreq", "Everstep"
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    NONE: {},
    STRAWMAN: {"IntervalInSeconds": STRAWMAN_SECONDS},
    HIGH_FREQ: {},
    CHECK_FREQ: {},
    EVERSTEP: {"EverySteps": EVERSTEP_EVERY},
}
"""Fields of the job's `CheckpointConfig` for each strategy, without the strategy's name."""
SCRIPT = Path(__file__).parent / "rank" / "strategy_job.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyJob:
    """The measurements of one job in which one rank was killed."""

    strategy: str
    steps: int
    """Number of steps that the job trains."""
    seconds: float
    """Seconds from the end of the first step until the end of the last step, over both launches."""
    lost_steps: int
    """Number of steps that the ranks repeated after the kill."""
    blocked_seconds: float
    """Seconds for which the session blocked rank 0, over both launches."""
    step_seconds: float
    """Median seconds per step, without the steps of the recovery."""


@dataclass(frozen=True, slots=True)
class Line:
    """One finished step in the trace of a rank."""

    generation: int
    step: int
    at: float
    blocked_seconds: float


def parse(text: str) -> list[Line]:
    """Return the finished steps in the text of a rank's trace, without an incomplete last line."""
    return [
        Line(int(generation), int(step), float(at), float(blocked))
        for generation, step, at, blocked in whole_rows(text)
    ]


def judge(strategy: str, trace: Sequence[Line]) -> StrategyJob:
    """Compute a job's measurements from the trace of rank 0.

    Raises:
        BenchmarkFailed: the trace does not have exactly one launch before the kill and one launch after it.
    """
    launches = {line.generation for line in trace}
    if launches != {1, 2}:
        raise BenchmarkFailed(
            f"the job with the strategy {strategy} trained in the launches {sorted(launches)} and not in 1 and 2; "
            "read its events for the cause"
        )
    first, second = ([line for line in trace if line.generation == number] for number in (1, 2))
    durations = [later.at - earlier.at for part in (first, second) for earlier, later in pairwise(part)]
    return StrategyJob(
        strategy=strategy,
        steps=second[-1].step,
        seconds=second[-1].at - first[0].at,
        lost_steps=first[-1].step - second[0].step + 1,
        blocked_seconds=sum(line.blocked_seconds for line in trace),
        step_seconds=sorted(durations)[len(durations) // 2],
    )


def measure(bench: Bench, *, rounds: int) -> Iterator[StrategyJob]:
    """Run jobs with each checkpoint strategy, in which one rank is killed. The order of the strategies rotates.

    Args:
        bench: the local cluster.
        rounds: number of jobs with each strategy.

    Raises:
        BenchmarkFailed: a job failed, or was launched more than twice.
    """
    source = bench.directory / "strategies"
    source.mkdir()
    shutil.copy(SCRIPT, source / "train.py")
    names = list(STRATEGIES)
    for number in range(rounds):
        for strategy in names[number % len(names) :] + names[: number % len(names)]:
            trace = bench.directory / "traces" / f"{strategy}-{number}"
            trace.mkdir(parents=True)
            job = bench.submit(
                f"strategy-{strategy.lower()}-{number}",
                source,
                "train.py",
                nodes=NODES,
                copies=2 if strategy == EVERSTEP else 1,
                hyperparameters={"steps": STEPS, "kill_at": KILL_AT, "step_seconds": STEP_SECONDS},
                Environment={"BENCH_TRACE": str(trace)},
                CheckpointConfig={"Strategy": strategy, **STRATEGIES[strategy]},
            )
            job.wait("its end", lambda seen: seen["TrainingJobStatus"] == "Completed")
            yield judge(strategy, parse((trace / "rank0").read_text()))
        bench.say("trained with each strategy")
