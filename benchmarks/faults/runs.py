"""Runs one case: a job of two ranks trains before, during and after the fault, while the API is polled."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cluster_jobs import EVERY_STEP, SCRIPTS, BenchJob
from benchmarks.errors import BenchmarkFailed
from benchmarks.faults.cases import Case, Place
from benchmarks.faults.figures import WHOLE, Boundary, Observed, Span, parse

RANKS, COPIES = 2, 2
LOOK_SECONDS = 0.25
"""Seconds between two API requests, constant, so that they slow all cases equally."""
TOLD_SECONDS = 60.0
"""Longest wait for one state of the job."""
SETTLE_STEPS = 40
"""First steps that are not measured: Everstep audits snapshots and profiles iterations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the state, and numbers and durations of steps."""

    steps: int = 40
    """Least number before, during and after the fault."""
    state_mib: int = 64
    span_seconds: float = 0.15
    """Shortest wait in place of forward and backward."""


QUICK = Sizes(steps=12)


@dataclass(slots=True)
class Running:
    """A running job with its traces and its reported protection states."""

    job: BenchJob
    trace: Path
    word: str = ""
    """Protection state that the API reported last."""
    told: list[tuple[float, str, str]] = field(default_factory=list)
    """Time, protection state and reason of each answer that differs from the one before."""

    def boundaries(self) -> tuple[tuple[Boundary, ...], ...]:
        """Return the traces' boundaries."""
        paths = [self.trace / f"rank{rank}" for rank in range(RANKS)]
        return tuple(parse(path.read_text()) if path.exists() else () for path in paths)

    def look(self) -> str:
        """Read the protection state from the API, record a change, and return it."""
        seen = self.job.bench.client.describe_protection(TrainingJobName=self.job.name)
        word, reason = str(seen["ProtectionState"]), str(seen["Reason"])
        if not self.told or self.told[-1][1:] != (word, reason):
            self.told.append((time.monotonic(), word, reason))
        self.word = word
        return word

    def wait(self, what: str, arrived: Callable[[], bool]) -> float:
        """Poll until the condition holds; return the monotonic time.

        Raises BenchmarkFailed if late, or if the job ended.
        """
        deadline = time.monotonic() + TOLD_SECONDS

        def looked(_: object) -> bool:
            self.look()
            if time.monotonic() > deadline:
                raise BenchmarkFailed(
                    f"job {self.job.name}: waited {TOLD_SECONDS:.0f} s for {what}; the API reported {self.told[-3:]}"
                )
            return arrived()

        self.job.wait(what, looked, LOOK_SECONDS)
        return time.monotonic()

    def wait_steps(self, count: int) -> Span:
        """Wait until all ranks have finished `count` more steps. Return their span."""
        begin = time.monotonic()
        end = self.wait(
            f"{count} steps",
            lambda: all(sum(each.at > begin for each in passed) > count for passed in self.boundaries()),
        )
        return Span(begin, end)

    def wait_whole(self) -> float:
        """Wait until the API reports Protected. Return the monotonic time."""
        return self.wait("protection", lambda: self.word == WHOLE)


def run_case(place: Place, case: Case, sizes: Sizes) -> Observed:
    """Run one case: a job with steps before, during and after the fault.

    Raises BenchmarkFailed if the fault had no effect, the API did not report it or its end, or the job was disturbed.
    """
    running = _submitted(place, case, sizes)
    running.wait_whole()
    running.wait_steps(SETTLE_STEPS)
    before = running.wait_steps(sizes.steps)
    heard = len(running.told)
    with case.strike(place.of(running.job.describe())) as struck:
        told_at = running.wait("protection that is not whole", lambda: running.word != WHOLE)
        during = Span(struck.at, running.wait_steps(sizes.steps).end)
        told = running.told[heard:]
    healed_at = running.wait_whole()
    after = running.wait_steps(sizes.steps)
    (running.trace / "finish").touch()
    running.job.completed()
    unsound = [(word, reason) for _, word, reason in told if word != WHOLE]
    if not (unsound and all(reason for _, reason in unsound)):
        raise BenchmarkFailed(
            f"job {running.job.name}: the API did not report the lost protection with a reason; it reported {told}"
        )
    copied, span = (running.trace / "copy0").read_text().split()
    return Observed(
        name=case.name,
        ranks=running.boundaries(),
        before=before,
        during=during,
        after=after,
        healed_at=healed_at,
        told_at=told_at,
        word=unsound[-1][0] if unsound else WHOLE,
        reasons=tuple(dict.fromkeys(reason for _, reason in unsound)),
        did=struck.did,
        span_seconds=float(span),
        copy_seconds=float(copied),
        state_mib=sizes.state_mib,
    )


def _submitted(place: Place, case: Case, sizes: Sizes) -> Running:
    name = re.sub(r"\W+", "-", case.name).strip("-")
    trace = place.bench.directory / "traces" / name
    trace.mkdir(parents=True)
    job = place.bench.submit(
        name,
        SCRIPTS,
        "steady.py",
        nodes=RANKS,
        copies=COPIES,
        hyperparameters={"state_mib": sizes.state_mib, "span_seconds": sizes.span_seconds},
        max_slowdown=EVERY_STEP,
        Environment={"BENCH_TRACE": str(trace)},
    )
    return Running(job, trace)
