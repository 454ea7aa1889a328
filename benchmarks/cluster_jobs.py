"""Submits and observes the benchmarks' jobs on a local cluster. The benchmarks use the public API only."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command import pause
from benchmarks.errors import BenchmarkFailed
from benchmarks.machine import ROOT
from everstep import failures
from infra.local_cloud.up import FLEET, ClusterOptions, LocalCluster

Json = dict[str, Any]

SCRIPTS = Path(__file__).parent / "scripts"
POLL_SECONDS = 0.05
"""Interval while a benchmark measures the time of an event. Client and control plane use 5 % of a core."""
QUIET_POLL_SECONDS = 1.0
"""Interval while step times are measured. Users poll about as rarely."""
EVERY_STEP = 1.0
"""`MaxSlowdown` for a snapshot at every step, as the compared systems take. The default skips steps of 50 ms."""
CONNECT_SECONDS = 120.0
ENDED = ("Completed", "Stopped", "Failed")
PATIENCE_SECONDS = 150.0
"""Longest time without progress, not in total, because a job on a busy machine is slow but works."""


@dataclass(frozen=True)
class Bench:
    """The cluster, client and folder that all measurements of a benchmark use."""

    cluster: LocalCluster
    client: Any
    """Client from `everstep.client()`."""
    directory: Path
    """Folder for the jobs' output; emptied before the run."""
    say: Callable[[str], None]

    def submit(
        self,
        name: str,
        source: Path,
        entry_point: str,
        *,
        nodes: int,
        copies: int,
        hyperparameters: Mapping[str, object],
        max_slowdown: float | None = None,
        **more: Any,
    ) -> BenchJob:
        """Submit a job with one rank per node. `max_slowdown` None uses the service's default."""
        self.client.create_training_job(
            TrainingJobName=name,
            Source=self.client.upload_source(Directory=source),
            EntryPoint=entry_point,
            HyperParameters={key: str(value) for key, value in hyperparameters.items()},
            NodeCount=nodes,
            Protection={"Copies": copies, **({} if max_slowdown is None else {"MaxSlowdown": max_slowdown})},
            **{"Rehearsal": {"Mode": "Off"}, **more},
        )
        return BenchJob(self, name, nodes)

    def wait_until_warm(self, count: int) -> None:
        """Wait until `count` nodes are connected, and all have imported the libraries of a rank.

        Raises BenchmarkFailed if late.
        """
        self.cluster.wait_for_nodes(count, timeout_seconds=CONNECT_SECONDS)
        deadline = time.monotonic() + CONNECT_SECONDS
        while cold := [
            node["NodeId"]
            for node in self.client.list_nodes(FleetName=FLEET)["Nodes"]
            if node["Connected"] and not node["Warm"]
        ]:
            if time.monotonic() > deadline:
                raise BenchmarkFailed(
                    f"{', '.join(cold)} cannot start ranks warm after {CONNECT_SECONDS:.0f} s; see logs/shim.log there"
                )
            pause(POLL_SECONDS)

    def traced_source(self) -> Path:
        """Return a folder with the char-GPT example's script and `traced.py`, which records its boundaries."""
        source = self.directory / "traced-char-gpt"
        if not source.exists():
            shutil.copytree(
                ROOT / "examples" / "char_gpt", source, ignore=shutil.ignore_patterns("__pycache__", "output")
            )
            shutil.copy(SCRIPTS / "traced.py", source)
        return source


@contextmanager
def started_bench(directory: Path, say: Callable[[str], None], options: ClusterOptions) -> Iterator[Bench]:
    """Start a local cluster in `directory/cluster`, yield it as a `Bench`, and end it after the `with` block."""
    say(f"starting {options.nodes} nodes and {options.spares} spares")
    with LocalCluster(directory / "cluster") as cluster:
        cluster.up(options)
        with closing(cluster.client()) as client, failures.translated():
            yield Bench(cluster, client, directory, say)


@dataclass(frozen=True)
class BenchJob:
    bench: Bench
    name: str
    ranks: int

    def describe(self) -> Json:
        """Return the answer of DescribeTrainingJob for this job."""
        return self.bench.client.describe_training_job(TrainingJobName=self.name)

    def wait(self, what: str, arrived: Callable[[Json], bool], poll_seconds: float = POLL_SECONDS) -> Json:
        """Poll the job until `arrived` is True for its description, and return it. `what` is for error messages.

        Raises BenchmarkFailed if the job ended early, or made no progress for `PATIENCE_SECONDS`.
        """
        last, moved_at = None, time.monotonic()
        while not arrived(seen := self.describe()):
            if seen["TrainingJobStatus"] in ENDED:
                raise BenchmarkFailed(
                    f"job {self.name} is {seen['TrainingJobStatus']} while waiting for {what}: {seen['Reason']}"
                )
            now = (seen["SecondaryStatus"], seen["Generation"], seen["Boundary"], seen["Reason"])
            if now != last:
                last, moved_at = now, time.monotonic()
            elif time.monotonic() - moved_at > PATIENCE_SECONDS:
                raise BenchmarkFailed(
                    f"job {self.name} made no progress for {PATIENCE_SECONDS:.0f} s; the benchmark waits for {what}: "
                    f"{seen['Reason']}"
                )
            pause(poll_seconds)
        return seen

    def completed(self) -> Json:
        """Wait until the job completes.

        Raises BenchmarkFailed after a failure or a restart, which invalidates measurements.
        """
        seen = self.wait("its end", lambda seen: seen["TrainingJobStatus"] == "Completed", QUIET_POLL_SECONDS)
        if seen["Generation"] != 1:
            raise BenchmarkFailed(
                f"job {self.name} needed {seen['Generation']} launches, so its measurements do not count"
            )
        return seen

    def outputs(self, name: str) -> list[Any]:
        """Return the parsed JSON output file with this name of every rank."""
        directory = self.bench.directory / "outputs" / self.name
        self.bench.client.download_outputs(TrainingJobName=self.name, Directory=directory)
        return [json.loads((directory / f"rank={rank}" / name).read_text()) for rank in range(self.ranks)]
