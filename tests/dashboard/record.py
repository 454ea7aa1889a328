"""Records the five incidents of the dashboard's tests from real runs: `python -m tests.dashboard.record [STORY …]`.

A *story* causes one incident. It has its own local cloud, a training job, and real `everstep local fault` commands. The
recording is made when the incident has ended, or for the capacity shortage while the job still waits. Afterwards, the
job must complete. A story takes about a minute, and the shortage about 9 minutes. The story of the network partition
needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from control_plane.db.session import Database
from infra.local_cloud.fault_kinds import EFFECT
from infra.local_cloud.faults import Conditions
from infra.local_cloud.processes import exit_when_asked
from infra.local_cloud.up import CONTROL_PLANE, FLEET, MAX_NODES, ClusterOptions, LocalCluster
from tests.dashboard.recording import FOLDER, Recording, Strike, rows_of, write
from tests.e2e.jobs import ENDED, PATIENCE_SECONDS, wait_until
from tests.warm_parent import ROOT

SCRIPTS: Final = Path(__file__).parent / "scripts"
JOB: Final = "recorded-job"
NODES: Final = 3
CONNECT_SECONDS: Final = 300.0
BOOT_SECONDS: Final = 4.0
NODE_MEMORY_BYTES: Final = 64 * 1024**2
PRICE_USD_PER_HOUR: Final = 55.04
CHECKPOINT_STEPS: Final = 20
STEPS_BEFORE: Final = 45
"""Number of steps that must be committed before the first fault."""
STEPS_AFTER: Final = 25
"""Number of steps that the job commits after the incident's end, before the recording is made."""
FAILED_LAUNCHES: Final = 5
"""Failed launches of instances before the shortage is recorded. The pause before the next launch is then 8 min."""
SHORTAGE_SECONDS: Final = 600.0
"""Maximum time until `FAILED_LAUNCHES` launches have failed."""
BROKEN_STEP: Final = 33
DOWN_SECONDS: Final = 45.0
"""Time for which the control plane is down."""
Json = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """The local cloud in which one incident is caused and recorded, with a client of its control plane."""

    cluster: LocalCluster
    client: Any
    strikes: list[Strike] = field(default_factory=list)

    def submit(self, nodes: int = NODES, **parameters: object) -> None:
        """Start the job that the incident will hit."""
        self.client.create_training_job(
            TrainingJobName=JOB,
            Source=self.client.upload_source(Directory=SCRIPTS),
            EntryPoint="train.py",
            HyperParameters={key: str(value) for key, value in parameters.items()},
            NodeCount=nodes,
            Protection={"Copies": 2},
            CheckpointConfig={"EverySteps": CHECKPOINT_STEPS},
            Rehearsal={"Mode": "Off"},
        )

    def train(self) -> str:
        """Start the job and wait until steps are committed and protected.

        Return a node of the job that is neither the first nor the coordinator.
        """
        self.submit()
        seen = self.wait(
            f"committed step {STEPS_BEFORE}", lambda seen: seen["CommittedStep"] >= STEPS_BEFORE and self.is_protected()
        )
        return str(next(node for node in seen["NodeIds"][1:] if node != seen["CoordinatorNodeId"]))

    def begin(self, *words: str) -> subprocess.Popen[str]:
        """Start the command `everstep local fault WORDS` in the background."""
        command = [str(Path(sys.executable).with_name("everstep")), "local", "fault", *words, "--output", "json"]
        environment = {
            **self.cluster.environment(),
            "EVERSTEP_STATE_DIR": str(self.cluster.state_dir),
            "PATH": "/usr/bin:/bin",
        }
        return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE)

    def end(self, running: subprocess.Popen[str], *words: str) -> None:
        """Wait until a started fault command exits, and store the effect that it printed."""
        said, _ = running.communicate(timeout=120)
        assert running.returncode == 0, said
        did = EFFECT.decode(said).did if words[0] != "clear" else "; ".join(json.loads(said)["Cleared"])
        self.strikes.append(Strike(command=" ".join(("everstep", "local", "fault", *words)), did=did))

    def strike(self, *words: str) -> None:
        """Run the command `everstep local fault WORDS`, and store the effect that it printed."""
        self.end(self.begin(*words), *words)

    def describe(self) -> Json:
        """Return the API's description of the job."""
        seen: Json = self.client.describe_training_job(TrainingJobName=JOB)
        return seen

    def incidents(self) -> list[Json]:
        """Return all incidents of the job."""
        return list(self.client.get_paginator("list_incidents").paginate(TrainingJobName=JOB).search("Incidents[]"))

    def is_protected(self) -> bool:
        """Return True if every shard has as many copies as the job requests."""
        return bool(self.client.describe_protection(TrainingJobName=JOB)["ProtectionState"] == "Protected")

    def wait(self, what: str, arrived: Callable[[Json], Any], patience_seconds: float = PATIENCE_SECONDS) -> Json:
        """Wait until `arrived` accepts the job's description. Fail if the job ends first."""

        def look() -> Json | None:
            seen = self.describe()
            if arrived(seen):
                return seen
            assert seen["TrainingJobStatus"] not in ENDED, f"the job ended while waiting for {what}: {seen}"
            return None

        answer: Json = wait_until(what, look, self.describe, patience_seconds)
        return answer

    def recovered(self) -> None:
        """Wait until all incidents are closed and the job has committed further steps."""
        self.wait(
            "the incident to be over",
            lambda _: bool(self.incidents()) and all("ClosedAt" in each for each in self.incidents()),
        )
        further = self.describe()["CommittedStep"] + STEPS_AFTER
        self.wait(f"committed step {further}", lambda seen: seen["CommittedStep"] >= further and self.is_protected())


def bad_gpu(stage: Stage) -> Iterator[None]:
    """A GPU falls off the bus."""
    stage.strike("xid", stage.train(), "--code", "79", "--gpu", "5")
    stage.recovered()
    yield


def capacity_shortage(stage: Stage) -> Iterator[None]:
    """An instance ends, and AWS lacks capacity for so long that the next launch is minutes away."""
    victim = stage.train()
    stage.strike("capacity", "--count", str(NODES - 1))
    stage.strike("terminate", victim)
    stage.wait(
        "the job to wait for capacity",
        lambda seen: seen.get("CapacityWait", {}).get("FailedAttemptCount") == FAILED_LAUNCHES,
        SHORTAGE_SECONDS,
    )
    yield
    stage.strike("clear", "capacity")
    stage.recovered()


def network_partition(stage: Stage) -> Iterator[None]:
    """A node loses its connection to the rest of the cluster."""
    stage.strike("partition", stage.train())
    stage.recovered()
    yield


def crash_loop(stage: Stage) -> Iterator[None]:
    """The script fails at the same step in each launch."""
    stage.submit(nodes=2, unlabelled_after=BROKEN_STEP)
    wait_until("the job to fail", lambda: stage.describe()["TrainingJobStatus"] == "Failed", stage.describe)
    yield


def frozen_control_plane(stage: Stage) -> Iterator[None]:
    """An instance ends while the control plane is down."""
    victim = stage.train()
    down = ("kill-control-plane", "--down", f"{DOWN_SECONDS:g}")
    away = stage.begin(*down)
    wait_until(
        "the control plane to be away",
        lambda: not any(part.is_alive for part in stage.cluster.status() if part.name == CONTROL_PLANE),
    )
    stage.strike("terminate", victim)
    stage.end(away, *down)
    stage.strikes.reverse()  # list the faults in the order in which they started
    stage.recovered()
    yield


@dataclass(frozen=True, kw_only=True)
class Story:
    """A script for one recorded incident: the function that causes the incident, and the size of the cluster."""

    happens: Callable[[Stage], Iterator[None]]
    """Generator that causes the incident.

    It yields when the recording must be made, and is then continued to the job's end.
    """
    spares: int = 1
    has_namespaces: bool = False


STORIES: Final[Mapping[str, Story]] = {
    "bad-gpu": Story(happens=bad_gpu),
    "capacity-shortage": Story(happens=capacity_shortage, spares=0),
    "network-partition": Story(happens=network_partition, has_namespaces=True),
    "crash-loop": Story(happens=crash_loop),
    "frozen-control-plane": Story(happens=frozen_control_plane),
}


def record(name: str, folder: Path = FOLDER) -> Path:
    """Cause one incident (run its story), and write the rows and logs that the control plane stored.

    Args:
        name: name of the story.
        folder: where the recording is written.

    Returns:
        The written file. It replaces an earlier recording of the same story.
    """
    story = STORIES[name]
    options = ClusterOptions(
        nodes=NODES,
        spares=story.spares,
        max_nodes=MAX_NODES,
        conditions=Conditions(boot_delay_seconds=BOOT_SECONDS),
        node_memory_bytes=NODE_MEMORY_BYTES,
        connect_seconds=CONNECT_SECONDS,
        has_namespaces=story.has_namespaces,
    )
    with (
        tempfile.TemporaryDirectory(prefix="everstep-record-") as directory,
        LocalCluster(Path(directory) / "cluster") as cluster,
    ):
        cluster.up(options)
        with contextlib.closing(cluster.client()) as client:
            client.update_fleet(FleetName=FLEET, PriceUsdPerHour=PRICE_USD_PER_HOUR, HoldFailedInstances=True)
            stage = Stage(cluster, client)
            happening = story.happens(stage)
            next(happening)
            recording = _taken(name, stage)
            for _ in happening:
                raise AssertionError("a story is recorded once")
    path = folder / f"{name}.json"
    write(_anonymous(recording, Path(directory)), path)
    return path


def _taken(name: str, stage: Stage) -> Recording:
    with contextlib.closing(
        Database(f"sqlite:///{stage.cluster.state_dir / CONTROL_PLANE / 'everstep.db'}")
    ) as database:
        (job,) = rows_of(database)["job"]
        objects = _logs(stage, job["spec"]["log_uri"])  # read the logs first, so that no line is later than `ended_at`
        ended_at, tables = datetime.now(UTC), rows_of(database)
    return Recording(story=name, ended_at=ended_at, strikes=tuple(stage.strikes), tables=tables, objects=objects)


def _logs(stage: Stage, uri: str) -> dict[str, str]:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    with contextlib.closing(stage.cluster.aws("s3")) as s3:
        keys = [
            each["Key"]
            for each in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix).search("Contents[]")
            if each
        ]
        return {key: s3.get_object(Bucket=bucket, Key=key)["Body"].read().decode() for key in keys}


def _anonymous(recording: Recording, directory: Path) -> Recording:
    """Return a recording in which names and folders of this machine are replaced.

    Args:
        recording: the original recording.
        directory: folder of the local cloud.

    Returns:
        The recording with the folders of a node on AWS.

    Raises:
        ValueError: the result still contains a name or a folder of this machine.
    """
    text = msgspec.json.encode(recording).decode()
    for here, there in (
        (f"{directory}/cluster", "/var/lib/everstep"),
        (str(ROOT), "/opt/everstep"),
        (sys.base_prefix, "/usr"),
        (sys.prefix, "/usr"),
    ):
        text = text.replace(here, there)
    left = re.search(
        "|".join(map(re.escape, (f'"{socket.gethostname()}', f"{tempfile.gettempdir()}/", f"{Path.home()}/"))), text
    )
    if left is not None:
        raise ValueError(
            f"a recording would tell of this machine: … {text[max(0, left.start() - 80) : left.end() + 80]} …"
        )
    return msgspec.json.decode(text, type=Recording)


def main() -> None:
    """Record the incidents (stories) that the command line names, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.dashboard.record", description=__doc__)
    parser.add_argument("stories", nargs="*", metavar="STORY", help=f"{', '.join(STORIES)} [default: all]")
    given = parser.parse_args()
    unknown = sorted(set(given.stories) - STORIES.keys())
    if unknown:
        parser.error(f"no such story: {', '.join(unknown)}")
    # exit by SystemExit, which also ends the local cloud of the story
    exit_when_asked(with_parent=False)
    for name in given.stories or STORIES:
        sys.stdout.write(f"{record(name)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
