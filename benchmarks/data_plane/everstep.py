"""Measures Everstep: one job on two nodes of the local cloud, whose ranks the benchmark kills and Everstep restores.

    first launch ─▶ kill rank 0: both ranks restore from their own node, several times
                 ─▶ corrupt rank 1's own slots and kill rank 0: rank 1 restores from its peer, several times
    after the job: restores into a rank that already waits for its state (`arrivals`)

Everstep runs unchanged. Times come from the script's output, the rank's page and the agents' logs.
"""

from __future__ import annotations

import json
import mmap
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster_jobs import ENDED, PATIENCE_SECONDS, POLL_SECONDS, Bench, BenchJob, Json
from benchmarks.command import pause
from benchmarks.data_plane.arrivals import Arrival, run_arrivals
from benchmarks.data_plane.launches import RANKS, tmpfs_folder
from benchmarks.data_plane.rank.memory import private_bytes
from benchmarks.data_plane.rank.repeats import Repeats
from benchmarks.errors import BenchmarkFailed
from everstep.protocol.slot import HEADER_BYTES
from infra.local_cloud.instance_init import memory_directory
from infra.local_cloud.processes import descendants, is_agent, memory_of

NODES, COPIES = 2, 2
ATTEMPTS = 30
"""`MaxAttempts`, high because all kills count as repetitions of one failure."""
RESTORED = re.compile(r"rank (\d+): step \d+ restored from (\w+) in ([\d.]+) s")
SCRIPT = Path(__file__).parent / "rank" / "everstep_job.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """One rank's restore after a kill, with its source and durations."""

    rank: int
    source: str
    agent_seconds: float
    """Seconds until a slot on the agent's node contained the verified state."""
    rank_seconds: float
    """Seconds from the call of `restore` until the model contained the state."""
    verified: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EverstepLaunch:
    """All measurements of one Everstep job."""

    ranks: list[Json]
    """JSON output of the first launch."""
    restored: list[Restored]
    arrived: list[Arrival]
    """Restores after the job (`arrivals`)."""
    memory_ratio: float
    """Host memory that the job added on all nodes ÷ bytes of the ranks' state."""
    agent_bytes: float
    """Private memory of an idle agent, not part of `memory_ratio`."""


def run_everstep(
    bench: Bench, name: str, *, state_mib: int, repeats: Repeats, beside: Callable[[], None] = lambda: None
) -> EverstepLaunch:
    """Run one job on two nodes, kill its ranks, and measure snapshots, restores and memory.

    `beside` measures the floors before each restore, while the job waits. Raises BenchmarkFailed if the job ended
    early, or a rank restored from another source than intended.
    """
    directory = bench.directory / name
    source = directory / "source"
    source.mkdir(parents=True)
    shutil.copy(SCRIPT, source / "train.py")
    agents = agents_of(bench)
    agents_before = private_bytes(*agents)
    with tmpfs_folder() as dumps:
        job = bench.submit(
            name,
            source,
            "train.py",
            nodes=NODES,
            copies=COPIES,
            hyperparameters={"state_mib": state_mib, **asdict(repeats)},
            Environment={"BENCH_DIRECTORY": str(directory), "BENCH_DUMPS": str(dumps)},
            RetryStrategy={"MaxAttempts": ATTEMPTS},
        )
        try:
            first = _results(job, directory, generation=1)
            nodes = job.describe()["NodeIds"]
            slots = [path for node in nodes for path in memory_of(memory_directory(node)).values()]
            taken = sum(path.stat().st_blocks * 512 for path in slots) + private_bytes(*agents) - agents_before
            taken += sum(rank["private_after_bytes"] - rank["private_before_bytes"] for rank in first)
            restored: list[Restored] = []
            for number in range(repeats.local_restores + repeats.peer_restores):
                beside()
                restored += _restore(
                    bench, job, directory, nodes, generation=number + 2, from_peer=number >= repeats.local_restores
                )
            (directory / "finish").touch()
            job.wait("its end", lambda seen: seen["TrainingJobStatus"] == "Completed")
        except BenchmarkFailed:
            _stop(bench, job)
            raise
    return EverstepLaunch(
        ranks=first,
        restored=restored,
        arrived=run_arrivals(directory / "arrivals", state_mib=state_mib, count=repeats.peer_restores),
        memory_ratio=taken / sum(rank["state_bytes"] for rank in first),
        agent_bytes=agents_before / len(agents),
    )


def _restore(
    bench: Bench, job: BenchJob, directory: Path, nodes: list[str], *, generation: int, from_peer: bool
) -> list[Restored]:
    """Kill rank 0, and read the source and duration of every rank's restore."""
    logs = [bench.cluster.nodes_directory / node / "console.log" for node in nodes]
    marks = [log.stat().st_size for log in logs]
    if from_peer:
        for name, path in memory_of(memory_directory(nodes[1])).items():
            if "/rank-1.slot-" in name:
                _spoil(path)
    bench.cluster.kill_rank(nodes[0], 0)
    ranks = _results(job, directory, generation=generation)
    told = {
        int(match[1]): match
        for log, mark in zip(logs, marks, strict=True)
        for match in RESTORED.finditer(log.read_bytes()[mark:].decode())
    }
    expected = ["local", "peer" if from_peer else "local"]
    if [told[rank][2] for rank in sorted(told)] != expected:
        raise BenchmarkFailed(
            f"restores came from {[match[2] for match in told.values()]}, expected {expected}; see {logs[0]}"
        )
    return [
        Restored(
            rank=rank,
            source=told[rank][2],
            agent_seconds=float(told[rank][3]),
            rank_seconds=ranks[rank]["restore_seconds"],
            verified=ranks[rank]["verified"],
        )
        for rank in range(RANKS)
    ]


def _spoil(slot: Path) -> None:
    """Overwrite a slot's tensor bytes, so that every chunk fails verification."""
    with slot.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        zeros = bytes(1 << 20)
        for start in range(HEADER_BYTES, len(memory), len(zeros)):
            memory[start : start + len(zeros)] = zeros[: len(memory) - start]


def _results(job: BenchJob, directory: Path, *, generation: int) -> list[Json]:
    paths = [directory / f"rank{rank}.gen{generation}.json" for rank in range(RANKS)]
    deadline, asked_at = time.monotonic() + PATIENCE_SECONDS, time.monotonic()
    while not all(path.exists() for path in paths):
        pause(POLL_SECONDS)
        if time.monotonic() - asked_at > 5.0:
            asked_at, seen = time.monotonic(), job.describe()
            if seen["TrainingJobStatus"] in ENDED or seen["Generation"] > generation:
                raise BenchmarkFailed(
                    f"job {job.name} is {seen['TrainingJobStatus']} in launch {seen['Generation']}: {seen['Reason']}"
                )
        if time.monotonic() > deadline:
            raise BenchmarkFailed(
                f"launch {generation} of job {job.name} wrote no results within {PATIENCE_SECONDS:.0f} s: "
                f"{job.describe()['Reason']}"
            )
    return [json.loads(path.read_text()) for path in paths]


def _stop(bench: Bench, job: BenchJob) -> None:
    """Stop a failed job, and wait until its nodes are free."""
    if job.describe()["TrainingJobStatus"] not in ENDED:
        bench.client.stop_training_job(TrainingJobName=job.name)
    job.wait("its end", lambda seen: seen["TrainingJobStatus"] in ENDED)


def agents_of(bench: Bench) -> list[int]:
    """Return the pids of all nodes' agents."""
    inits: dict[str, Any] = bench.cluster.instances()
    return [process.pid for init in inits.values() for process in descendants(init) if is_agent(process.pid)]
