"""Measures recoveries after killed ranks and terminated instances, in a job that trains the char-GPT with ZeRO-3.

The job has 4 nodes and a spare. Three independent clocks measure each recovery:

- the incident's four phases
- the job's step in the API, which the benchmark polls every few milliseconds
- the traces in which the ranks record their boundaries

The interruption lasts from the kill to the first step beyond the highest earlier step. The measured time therefore
includes repeated steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.cluster_jobs import CONNECT_SECONDS, ENDED, Bench, BenchJob, Json
from benchmarks.errors import BenchmarkFailed
from benchmarks.measures import Floor, Summary
from benchmarks.traces import Passed, first_beyond, highest_step, read_trace, step_seconds

NODES, SPARES, COPIES = 4, 1, 2
MANY_STEPS = 1_000_000
"""Number of steps of the job, larger than the benchmark needs. The benchmark stops the job after its measurements."""
CLOCKS_TOLERANCE_SECONDS, CLOCKS_TOLERANCE_RATIO = 1.0, 0.2
"""Two clocks disagree if their durations differ by more than both limits: in seconds, and relative to the duration.

The limit in seconds exists because the API receives step numbers only once per second.
"""
PHASES = ("detect", "replace", "restore", "rework")
VICTIMS = (2, 1, 0, 3)
"""Ranks to kill, in this order. Rank 0 is included, because its node has more tasks than other nodes."""

Kind = Literal["rank_exit", "instance_terminated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One failure of the job, with the duration of its recovery and its lost steps."""

    cause: Kind
    restore_source: str
    phases: dict[str, float]
    """Seconds of each phase of the incident."""
    lost_steps: int
    """Lost steps as the incident states them: highest boundary that the ranks had reported − restored step."""
    rank_lost_steps: int
    """Lost steps in the ranks' traces: highest boundary that any rank had passed − restored step."""
    api_seconds: float
    """Seconds from the kill until the API showed a step that no rank had reached before the kill."""
    rank_seconds: float
    """Seconds from the kill until every rank had passed a boundary that no rank had reached before the kill."""

    @property
    def incident_seconds(self) -> float:
        """Seconds of all phases of the incident together."""
        return sum(self.phases.values())

    @property
    def clocks_agree(self) -> bool:
        """True if the incident's duration agrees with the duration that the benchmark measured through the API."""
        apart = abs(self.incident_seconds - self.api_seconds)
        return apart <= max(CLOCKS_TOLERANCE_SECONDS, CLOCKS_TOLERANCE_RATIO * self.api_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRun:
    """All measured recoveries of one job, and its step times without a failure."""

    recoveries: tuple[Recovery, ...]
    step: Floor
    """Step times without a failure, before the first failure and after the last failure."""

    def of_cause(self, cause: Kind) -> list[Recovery]:
        """Return the recoveries from failures with this cause."""
        return [recovery for recovery in self.recoveries if recovery.cause == cause]


def measure(bench: Bench, *, kills: int, steps_between: int) -> RecoveryRun:
    """Kill `kills` ranks one after the other, then terminate as many instances, and measure each recovery.

    Before each failure, the job trains `steps_between` steps without a failure.

    Raises:
        BenchmarkFailed: the job ended, or an incident has a different cause than the benchmark's failure.
    """
    trace = bench.directory / "traces" / "recovery"
    trace.mkdir(parents=True)
    job = bench.submit(
        "recovery",
        bench.traced_source(),
        "traced.py",
        nodes=NODES,
        copies=COPIES,
        hyperparameters={"steps": MANY_STEPS},
        Environment={"BENCH_TRACE": str(trace)},
    )
    ec2 = bench.cluster.aws("ec2")

    def kill_rank(rank: int, node: str) -> None:
        bench.cluster.kill_rank(node, rank)

    def terminate(_: int, node: str) -> None:
        ec2.terminate_instances(InstanceIds=[node])

    def look() -> list[list[Passed]]:
        return read_trace(trace, NODES)

    job.wait("the first steps", lambda seen: seen["CommittedStep"] >= 2 * steps_between)
    before = undisturbed(look())
    faults: list[tuple[Kind, Callable[[int, str], None]]] = [
        ("rank_exit", kill_rank),
        ("instance_terminated", terminate),
    ]
    recoveries: list[Recovery] = []
    for cause, hurt in faults:
        for number in range(kills):
            bench.say(f"recovery {len(recoveries) + 1} of {len(faults) * kills}: {cause}")
            recovery = recover(bench, job, look, cause, hurt, VICTIMS[number % len(VICTIMS)], steps_between)
            bench.say(f"  {recovery.incident_seconds:.2f} s by the incident, {recovery.api_seconds:.2f} s from outside")
            recoveries.append(recovery)
    bench.cluster.wait_for_nodes(NODES + SPARES, timeout_seconds=CONNECT_SECONDS)
    reached = job.describe()["Boundary"]
    job.wait("the last steps", lambda seen: seen["Boundary"] >= reached + 2 * steps_between)
    after = undisturbed(look(), since=reached)
    bench.client.stop_training_job(TrainingJobName=job.name)
    job.wait("its end", lambda seen: seen["TrainingJobStatus"] in ENDED)
    return RecoveryRun(recoveries=tuple(recoveries), step=Floor(before, after))


def recover(
    bench: Bench,
    job: BenchJob,
    look: Callable[[], list[list[Passed]]],
    cause: Kind,
    hurt: Callable[[int, str], None],
    rank: int,
    steps_between: int,
) -> Recovery:
    """Wait for steps without a failure, cause a failure, and poll until every rank has finished a new step.

    Raises:
        BenchmarkFailed: the job ended, the incident has a different cause, or another failure followed.
    """
    # Wait until the spare is warm. In a real fleet, a spare has usually been ready for hours before a failure.
    bench.wait_until_warm(NODES + SPARES)
    settled = job.describe()
    seen = job.wait("undisturbed steps", lambda seen: seen["CommittedStep"] >= settled["Boundary"] + steps_between)
    generation, number = seen["Generation"], seen["IncidentCount"]
    killed_at = time.monotonic()
    hurt(rank, seen["NodeIds"][rank])
    watched: list[tuple[float, int, int]] = []

    def is_over(seen: Json) -> bool:
        watched.append((time.monotonic(), seen["Generation"], seen["Boundary"]))
        if seen["IncidentCount"] <= number or seen["Generation"] <= generation:
            return False
        reached = highest_step(look(), generation)
        return seen["Boundary"] > reached and first_beyond(look(), generation, reached) is not None

    job.wait("the next new step", is_over)
    incident = _closed(bench, job, number)
    if incident["Cause"] != cause or incident["GenerationAfter"] != job.describe()["Generation"]:
        raise BenchmarkFailed(
            f"incident {incident['IncidentId']} has the cause {incident['Cause']}, but the benchmark caused {cause}, "
            "or another failure followed"
        )
    ranks = look()
    reached = highest_step(ranks, generation)
    resumed_at = first_beyond(ranks, generation, reached)
    assert resumed_at is not None, "is_over saw it"
    return Recovery(
        cause=cause,
        restore_source=incident["RestoreSource"],
        phases={phase: float(incident[f"{phase.title()}Seconds"]) for phase in PHASES},
        lost_steps=incident["LostSteps"],
        rank_lost_steps=reached - incident["FromStep"],
        api_seconds=next(at for at, newer, boundary in watched if newer > generation and boundary > reached)
        - killed_at,
        rank_seconds=resumed_at - killed_at,
    )


def undisturbed(ranks: Sequence[Sequence[Passed]], since: int = 0) -> Summary:
    """Return a summary of rank 0's step times in its newest generation.

    Args:
        ranks: each rank's trace.
        since: boundary after which steps count. 0: all steps count except the first ten, which warm up.
    """
    newest = ranks[0][-1].generation
    steps = step_seconds([each for each in ranks[0] if each.generation == newest and each.step > since])
    return Summary.of(steps[0 if since else 10 :])


def _closed(bench: Bench, job: BenchJob, number: int) -> Json:
    """Wait until the job's incident of this number is closed, and return the incident."""
    found: list[Json] = []

    def is_closed(_: Json) -> bool:
        found[:] = bench.client.list_incidents(TrainingJobName=job.name)["Incidents"]
        return "ClosedAt" in found[number]

    job.wait("the incident to be closed", is_closed)
    return found[number]
