"""Jobs of the benchmarks on a local cluster, through the public API alone."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.begin import pause
from benchmarks.errors import BenchmarkFailed
from infra.local_cloud.up import FLEET, LocalCluster

Json = dict[str, Any]

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "scripts"
POLL_SECONDS = 0.05
"""Where a moment is looked for.

Asking costs the asker and the control plane a twentieth of a core together, on the cores that are measured.
"""
QUIET_POLL_SECONDS = 1.0
"""Where steps are timed meanwhile: as somebody would who watches."""
EVERY_STEP = 1.0
"""What snapshots may cost: so much that none is put off, as peers put none off.

By default steps of 50 ms are proposed every second or third time.
"""
CONNECT_SECONDS = 120.0
ENDED = ("Completed", "Stopped", "Failed")
PATIENCE_SECONDS = 150.0
"""Without any progress; a run on a busy machine is slow, not stuck."""


@dataclass(frozen=True)
class Bench:
    """What all benchmarks share."""

    cluster: LocalCluster
    client: Any
    """`everstep.client()` of the cluster."""
    directory: Path
    """For what jobs leave; emptied before the run."""
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
        """Submit a job of one rank per node.

        `max_slowdown`: what snapshots may cost it; None: what the service takes.
        """
        self.client.create_training_job(
            TrainingJobName=name,
            Source=self.client.upload_source(Directory=source),
            EntryPoint=entry_point,
            HyperParameters={key: str(value) for key, value in hyperparameters.items()},
            NodeCount=nodes,
            Protection={"Copies": copies, **({} if max_slowdown is None else {"MaxSlowdown": max_slowdown})},
            **more,
        )
        return BenchJob(self, name, nodes)

    def wait_until_warm(self, count: int) -> None:
        """Wait until so many nodes are connected, and all that are can start ranks warm: imports would run beside what is measured.

        Raises:
            BenchmarkFailed: one does not get there.
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
        """Return the char-GPT example with the script beside it that writes down its boundaries."""
        source = self.directory / "traced-char-gpt"
        if not source.exists():
            shutil.copytree(
                ROOT / "examples" / "char_gpt", source, ignore=shutil.ignore_patterns("__pycache__", "output")
            )
            shutil.copy(SCRIPTS / "traced.py", source)
        return source


@dataclass(frozen=True)
class BenchJob:
    """One job that was submitted."""

    bench: Bench
    name: str
    ranks: int

    def describe(self) -> Json:
        """What the API says of it."""
        return self.bench.client.describe_training_job(TrainingJobName=self.name)

    def wait(self, what: str, arrived: Callable[[Json], bool], poll_seconds: float = POLL_SECONDS) -> Json:
        """Poll until `arrived` says so, and return the description that it liked.

        Args:
            what: is waited for, in words.
            arrived: given each description.
            poll_seconds: from one question to the next.

        Raises:
            BenchmarkFailed: the job ended before, or nothing has moved for `PATIENCE_SECONDS`.
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
                    f"job {self.name} has not moved for {PATIENCE_SECONDS:.0f} s while waiting for {what}: "
                    f"{seen['Reason']}"
                )
            pause(poll_seconds)
        return seen

    def completed(self) -> Json:
        """Wait for the undisturbed end.

        Raises:
            BenchmarkFailed: it ended otherwise, or was launched more than once: then its figures are of something else.
        """
        seen = self.wait("its end", lambda seen: seen["TrainingJobStatus"] == "Completed", QUIET_POLL_SECONDS)
        if seen["Generation"] != 1:
            raise BenchmarkFailed(f"job {self.name} was disturbed: it took {seen['Generation']} launches")
        return seen

    def outputs(self, name: str) -> list[Any]:
        """Return what every rank left under this name."""
        directory = self.bench.directory / "outputs" / self.name
        self.bench.client.download_outputs(TrainingJobName=self.name, Directory=directory)
        return [json.loads((directory / f"rank={rank}" / name).read_text()) for rank in range(self.ranks)]
