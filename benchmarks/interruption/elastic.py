"""Measures how long a job without a spare stands still when it continues on one node fewer.

The demo's job (`examples/char_gpt` with ZeRO-3) runs on four nodes. AWS launches no replacement until the measurement
is over. Then the job grows back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.cluster_jobs import ENDED, Bench, BenchJob
from benchmarks.errors import BenchmarkFailed
from benchmarks.traces import first_beyond, highest_step, read_trace
from infra.local_cloud.fault_kinds import Capacity, Terminate

NODES = 4
FIRST_STEPS = 5
"""Steps that a launch commits before the next measurement."""
BATCH, GLOBAL_BATCH = 2, 24
"""Samples of a rank at once, and of all ranks per step: divisible by 4 and by 3 ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrink:
    """One loss of a node."""

    verdict_seconds: float
    """Seconds from the termination until the incident opened."""
    seconds: float
    """Seconds from the incident until every rank of the smaller job had finished a new step."""
    lost_steps: int


def measure(bench: Bench, count: int) -> Iterator[Shrink]:
    """Let one job shrink and grow back `count` times. Raises BenchmarkFailed if it did not."""
    trace = bench.directory / "traces" / "elastic"
    trace.mkdir(parents=True)
    job = bench.submit(
        "elastic",
        bench.traced_source(),
        "traced.py",
        nodes=NODES,
        copies=2,
        hyperparameters={"steps": 1_000_000, "batch": BATCH, "global_batch": GLOBAL_BATCH},
        Environment={"BENCH_TRACE": str(trace)},
        ElasticConfig={"MinNodeCount": NODES - 1, "PatienceInSeconds": 0},
    )
    for number in range(count):
        generation = _settled(job)
        bench.cluster.inject(Capacity(count=NODES - 1))
        hurt_at = time.time()
        bench.cluster.inject(Terminate(target=str(job.describe()["NodeIds"][-1])))
        _settled(job, NODES - 1, above=generation)
        incident = _incidents(bench, job)[-1]
        if (incident["Cause"], "ClosedAt" in incident) != ("shrunk", True):
            raise BenchmarkFailed(f"job {job.name} has not shrunk: {incident['Verdict']}")
        ranks = read_trace(trace, NODES)
        began = first_beyond(ranks[:-1], generation, highest_step(ranks, generation))
        assert began is not None, "steps after the failure are committed"
        verdict_at = incident["OpenedAt"].timestamp()
        yield Shrink(
            verdict_seconds=verdict_at - hurt_at,
            seconds=began + (time.time() - time.monotonic()) - verdict_at,
            lost_steps=incident["LostSteps"],
        )
        bench.say(f"  {number + 1} of {count}: a job without a spare continued on {NODES - 1} of {NODES} nodes")
        bench.cluster.clear_faults("capacity")
    bench.client.stop_training_job(TrainingJobName=job.name)
    job.wait("its end", lambda seen: seen["TrainingJobStatus"] in ENDED)


def _settled(job: BenchJob, nodes: int = NODES, above: int = 0) -> int:
    """Wait until a launch on `nodes` nodes after generation `above` has committed steps, and return its generation."""

    def trains(seen: dict[str, Any]) -> bool:
        is_wanted = seen["Generation"] > above and seen.get("GenerationNodeCount") == nodes
        return is_wanted and seen["SecondaryStatus"] == "Training"

    seen = job.wait(f"training on {nodes} nodes", trains)
    base = seen["Boundary"]
    job.wait("undisturbed steps", lambda later: trains(later) and later["CommittedStep"] >= base + FIRST_STEPS)
    return int(seen["Generation"])


def _incidents(bench: Bench, job: BenchJob) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = bench.client.list_incidents(TrainingJobName=job.name)["Incidents"]
    return [bench.client.describe_incident(IncidentId=each["IncidentId"]) for each in found]
