"""Measures recoveries after killed ranks and terminated instances, in a job that trains the char-GPT with ZeRO-3.

Three clocks measure each recovery: the incident's phases, the job's step in the API, and the ranks' traces. It lasts
from the kill to the first step beyond the highest earlier one, so it includes repeated steps.
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
"""A number that no run reaches. The benchmark stops the job."""
CLOCKS_TOLERANCE_SECONDS, CLOCKS_TOLERANCE_RATIO = 1.0, 0.2
"""Two clocks disagree beyond both limits. The API receives step numbers only once per second."""
PHASES = ("detect", "replace", "restore", "rework")
VICTIMS = (2, 1, 0, 3)
"""Ranks in order. Rank 0's node has more tasks than others."""

Kind = Literal["rank_exit", "instance_terminated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One failure of the job."""

    cause: Kind
    restore_source: str
    phases: dict[str, float]
    """Seconds of each phase of the incident."""
    lost_steps: int
    """Lost steps by the incident: highest reported boundary − restored step."""
    rank_lost_steps: int
    """Lost steps by the traces: highest boundary of any rank − restored step."""
    api_seconds: float
    """Seconds from the kill until the API showed a new step."""
    rank_seconds: float
    """Seconds from the kill until every rank had passed a new boundary."""

    @property
    def incident_seconds(self) -> float:
        """Seconds of all phases."""
        return sum(self.phases.values())

    @property
    def clocks_agree(self) -> bool:
        """Whether the incident's duration agrees with that through the API."""
        apart = abs(self.incident_seconds - self.api_seconds)
        return apart <= max(CLOCKS_TOLERANCE_SECONDS, CLOCKS_TOLERANCE_RATIO * self.api_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRun:
    """All recoveries of one job."""

    recoveries: tuple[Recovery, ...]
    step: Floor
    """Step times without a failure, before the first and after the last one."""

    def of_cause(self, cause: Kind) -> list[Recovery]:
        return [recovery for recovery in self.recoveries if recovery.cause == cause]


def measure(bench: Bench, *, kills: int, steps_between: int) -> RecoveryRun:
    """Kill `kills` ranks, then terminate as many instances, each after `steps_between` steps, and measure recoveries.

    Raises BenchmarkFailed if the job ended, or an incident has another cause.
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
    """Wait for steps, cause a failure, and poll until every rank has finished a new step.

    Raises BenchmarkFailed if the job ended, the incident has another cause, or another failure followed.
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
    """Return a summary of rank 0's step times in its newest generation, after boundary `since` or ten warm-up steps."""
    newest = ranks[0][-1].generation
    steps = step_seconds([each for each in ranks[0] if each.generation == newest and each.step > since])
    return Summary.of(steps[0 if since else 10 :])


def _closed(bench: Bench, job: BenchJob, number: int) -> Json:
    """Wait until the job's incident of this number is closed, and return it."""
    found: list[Json] = []

    def is_closed(_: Json) -> bool:
        found[:] = bench.client.list_incidents(TrainingJobName=job.name)["Incidents"]
        return "ClosedAt" in found[number]

    job.wait("the incident to be closed", is_closed)
    return found[number]
