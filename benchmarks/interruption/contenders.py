"""Runs the compared systems Everstep, torchrun and torchft: one job each, with repeated faults."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.cluster_jobs import ENDED, EVERY_STEP, Bench, BenchJob
from benchmarks.command import pause
from benchmarks.errors import BenchmarkFailed
from benchmarks.interruption.outcomes import Fault, Job, Rehearsed
from benchmarks.machine import ROOT
from benchmarks.traces import Passed, parse
from infra.local_cloud.fault_kinds import Terminate
from infra.local_cloud.processes import descendants, wait_gone
from tests.ports import ReservedPort

RANKS, SPARES = 2, 1
SCRIPTS = Path(__file__).parent / "rank"
LOOK_SECONDS = 0.02
PATIENCE_SECONDS = 60.0
SAVE_EVERY = 10
"""Steps between torchrun's checkpoints. Faults follow right after one, so that it loses few steps."""
HEARTBEAT_MILLISECONDS = 1000
"""Milliseconds without a heartbeat, until torchft considers a replica group lost."""


class Contender(Protocol):
    """A compared system with its running job."""

    name: str
    job: Job
    is_relaunched: bool
    """Whether all ranks restart after a fault."""
    waited_for: Sequence[int]
    """Ranks that must finish a new step before the system has recovered."""

    def trace(self) -> list[list[Passed]]:
        """Return the steps in each rank's trace file."""

    def settle(self) -> None:
        """Wait until the system has recovered completely from the last fault."""

    def pids(self) -> list[int]:
        """Return the ranks' process ids."""

    def hurt(self, fault: Fault) -> None:
        """Inject the fault: end rank 1, or its node."""

    def phases(self) -> dict[str, float]:
        """Return the newest incident's seconds per phase; empty except for Everstep."""

    def revive(self) -> None:
        """Restart the job after a missing recovery. Raises BenchmarkFailed for Everstep, because that is a defect."""


def traced(folder: Path) -> list[list[Passed]]:
    """Return the steps in each rank's trace file; empty before its start."""
    files = [folder / f"rank{rank}" for rank in range(RANKS)]
    return [parse(file.read_text()) if file.exists() else [] for file in files]


def rank_pids(folder: Path) -> list[int]:
    """Return the process ids of the newest launch."""
    return [int((folder / f"rank{rank}.pid").read_text()) for rank in range(RANKS)]


def wait(what: str, arrived: Callable[[], bool], *, check: Callable[[], None] = lambda: None) -> None:
    """Poll until `arrived` is True, with `check` in each poll. Raises BenchmarkFailed after `PATIENCE_SECONDS`."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not arrived():
        check()
        if time.monotonic() > deadline:
            raise BenchmarkFailed(f"waited {PATIENCE_SECONDS:.0f} s for {what}")
        pause(LOOK_SECONDS)


class UnderEverstep:
    """Everstep: a job on two nodes of a local cluster with a spare. Both hold every step."""

    name = "Everstep"
    is_relaunched = True
    waited_for = tuple(range(RANKS))

    def __init__(self, bench: Bench, kind: Job, folder: Path) -> None:
        self.job = kind
        self._bench = bench
        self._folder = folder
        self._incidents = 0
        folder.mkdir(parents=True)
        self._job = bench.submit(
            f"interruption-{folder.name}",
            source(bench.directory),
            "under_everstep.py",
            nodes=RANKS,
            copies=2,
            hyperparameters={"kind": "zero3" if kind is Job.ZERO3 else "ddp"},
            max_slowdown=EVERY_STEP,
            Environment={"BENCH_TRACE": str(folder)},
            # The job rehearses only when `rehearse` asks for it.
            Rehearsal={"Mode": "On", "AtStep": 1_000_000_000},
        )

    @property
    def handle(self) -> BenchJob:
        """The submitted job."""
        return self._job

    def trace(self) -> list[list[Passed]]:
        return traced(self._folder)

    def settle(self) -> None:
        self._bench.wait_until_warm(RANKS + SPARES)
        seen = self._job.wait("the job trains", lambda seen: seen["SecondaryStatus"] == "Training")
        self._job.wait("undisturbed steps", lambda later: later["CommittedStep"] >= seen["Boundary"] + SAVE_EVERY)
        self._incidents = self._job.describe()["IncidentCount"]

    def pids(self) -> list[int]:
        return rank_pids(self._folder)

    def hurt(self, fault: Fault) -> None:
        node = self._job.describe()["NodeIds"][1] if fault is Fault.INSTANCE else ""
        if fault is Fault.RANK:
            os.kill(self.pids()[1], signal.SIGKILL)
        else:
            self._bench.cluster.inject(Terminate(target=node))

    def phases(self) -> dict[str, float]:
        def closed(_: object) -> bool:
            found = self._bench.client.list_incidents(TrainingJobName=self._job.name)["Incidents"]
            return len(found) > self._incidents and "ClosedAt" in found[self._incidents]

        self._job.wait("the incident to be closed", closed)
        incident = self._bench.client.list_incidents(TrainingJobName=self._job.name)["Incidents"][self._incidents]
        return {
            phase: float(incident[f"{phase.title()}Seconds"]) for phase in ("detect", "replace", "restore", "rework")
        }

    def rehearse(self, *, is_first: bool) -> Rehearsed:
        """Let the ranks rehearse. Raises BenchmarkFailed if the steps were not repeated exactly."""
        before = self._job.describe().get("RehearsalResult")
        self._bench.client.rehearse_training_job(TrainingJobName=self._job.name)
        seen = self._job.wait(
            "a rehearsal",
            lambda seen: not seen["IsRehearsalPending"] and seen.get("RehearsalResult", before) != before,
        )
        result = seen["RehearsalResult"]
        if result["Verdict"] != "Proven":
            raise BenchmarkFailed(f"the rehearsal of job {self._job.name} was {result['Verdict']}: {result['Message']}")
        return Rehearsed(self.job, is_first, result["Seconds"], result["Steps"])

    def revive(self) -> None:
        raise BenchmarkFailed(f"job {self._job.name} has not recovered from the fault")

    def stop(self) -> None:
        self._bench.client.stop_training_job(TrainingJobName=self._job.name)
        self._job.wait("its end", lambda seen: seen["TrainingJobStatus"] in ENDED)


class UnderTorchrun:
    """torchrun: two agents, as on two nodes, which meet through torch's rendezvous."""

    is_relaunched = True
    waited_for = tuple(range(RANKS))

    def __init__(self, python: Path, kind: Job, way: str, folder: Path, code: Path) -> None:
        self.name = (
            f"torchrun + {'save_checkpoint' if kind is Job.ZERO3 else {'torch_save': 'torch.save', 'dcp': 'DCP'}[way]}"
        )
        self.job = kind
        self._python, self._way, self._folder, self._code = python, way, folder, code
        self._saved = folder / "checkpoints"
        self._saved.mkdir(parents=True)
        self._port: ReservedPort
        self._launchers: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self._port = ReservedPort()
        self._launchers = [self._launch(), self._launch()]

    def _launch(self) -> subprocess.Popen[bytes]:
        """Start the agent of one node in a new process session, whose kill simulates the node's end."""
        rendezvous = [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self._port.number}",
            "--rdzv-id=bench",
            "--local-addr=127.0.0.1",
        ]
        restarts = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=1000", "--monitor-interval=0.1"]
        kind = "zero3" if self.job is Job.ZERO3 else "ddp"
        program = [str(self._code / "under_torchrun.py"), kind, self._way, str(self._saved), str(SAVE_EVERY)]
        with (self._folder / "torchrun.log").open("ab") as log:
            return subprocess.Popen(
                [str(self._python), "-m", "torch.distributed.run", *rendezvous, *restarts, *program],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "BENCH_TRACE": str(self._folder), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
                # Add the environment's programs to PATH, because DeepSpeed searches PATH for the build tool ninja.
                | {"PATH": f"{self._python.parent}{os.pathsep}{os.environ['PATH']}"},
                start_new_session=True,
            )

    def trace(self) -> list[list[Passed]]:
        return traced(self._folder)

    def settle(self) -> None:
        before = max((each.at for passed in self.trace() for each in passed), default=0.0)
        newest = self._saved / "newest"

        def steps_since(at: float) -> int:
            return min(sum(each.at > at for each in passed) for passed in self.trace())

        wait(f"{self.name} trains", lambda: steps_since(before) >= SAVE_EVERY, check=self._check)
        saved = newest.read_text() if newest.exists() else ""
        wait(f"{self.name} saves", lambda: newest.exists() and newest.read_text() != saved, check=self._check)

    def pids(self) -> list[int]:
        return rank_pids(self._folder)

    def hurt(self, fault: Fault) -> None:
        second = self._launchers[1]
        if fault is Fault.RANK:
            os.kill(next(pid for pid in self.pids() if _parent(pid) == second.pid), signal.SIGKILL)
            return
        # Restart both launchers: the surviving launcher would wait 60 s at its rendezvous for the dead one, and then
        # give up.
        self.revive()

    def revive(self) -> None:
        self.stop()
        self.start()

    def phases(self) -> dict[str, float]:
        return {}

    def _check(self) -> None:
        if any(launcher.poll() is not None for launcher in self._launchers):
            raise BenchmarkFailed(f"{self.name} ended by itself; see {self._folder}/torchrun.log")

    def stop(self) -> None:
        for launcher in reversed(self._launchers):
            _end(launcher)
        if self._launchers:
            self._port.close()


class UnderTorchft:
    """torchft: two replica groups and a lighthouse, which detects silent groups. A killed group restarts at once."""

    name = "torchft"
    job = Job.DDP
    is_relaunched = False
    waited_for = (0,)

    def __init__(self, python: Path, folder: Path, code: Path) -> None:
        self._python, self._folder, self._code = python, folder, code
        folder.mkdir(parents=True)
        self._lighthouse: subprocess.Popen[bytes] | None = None
        self._replicas: list[subprocess.Popen[bytes]] = []
        self._port: ReservedPort

    def start(self) -> None:
        self._port = ReservedPort()
        options = [
            "--min_replicas",
            "1",
            "--join_timeout_ms",
            "200",
            "--quorum_tick_ms",
            "50",
            "--heartbeat_timeout_ms",
            str(HEARTBEAT_MILLISECONDS),
        ]
        self._lighthouse = self._run(
            [str(self._python.with_name("torchft_lighthouse")), "--bind", f"127.0.0.1:{self._port.number}", *options]
        )
        self._replicas = [self._replica(rank) for rank in range(RANKS)]

    def _replica(self, rank: int) -> subprocess.Popen[bytes]:
        return self._run([str(self._python), str(self._code / "under_torchft.py"), str(rank)])

    def _run(self, command: list[str]) -> subprocess.Popen[bytes]:
        more = {
            "BENCH_TRACE": str(self._folder),
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self._port.number}",
            "OMP_NUM_THREADS": "1",
            "LOGLEVEL": "ERROR",
        }
        with (self._folder / "torchft.log").open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **more}, start_new_session=True
            )

    def trace(self) -> list[list[Passed]]:
        return traced(self._folder)

    def settle(self) -> None:
        before = max((each.at for passed in self.trace() for each in passed), default=0.0)
        wait(
            "torchft: both groups train",
            lambda: min(sum(each.at > before for each in passed) for passed in self.trace()) >= SAVE_EVERY,
        )

    def pids(self) -> list[int]:
        return rank_pids(self._folder)

    def hurt(self, fault: Fault) -> None:
        if fault is not Fault.RANK:
            raise BenchmarkFailed("torchft does not replace instances, so this fault cannot be measured")
        _end(self._replicas[1])
        self._replicas[1] = self._replica(1)

    def revive(self) -> None:
        self.stop()
        self.start()

    def phases(self) -> dict[str, float]:
        return {}

    def stop(self) -> None:
        for process in (*self._replicas, *([self._lighthouse] if self._lighthouse else [])):
            _end(process)
        if self._lighthouse:
            self._port.close()


def source(directory: Path) -> Path:
    """Return a folder with the scripts and their model, the same for all systems."""
    folder = directory / "interruption-source"
    if not folder.exists():
        shutil.copytree(SCRIPTS, folder, ignore=shutil.ignore_patterns("__pycache__", "__init__.py"))
        shutil.copy(ROOT / "examples" / "char_gpt" / "model.py", folder)
    return folder


@contextlib.contextmanager
def running(contender: UnderTorchrun | UnderTorchft) -> Iterator[None]:
    """Start a system, and end all its processes after the `with` block."""
    try:
        contender.start()
        yield
    finally:
        contender.stop()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with all its descendants, to simulate the loss of an instance."""
    below = descendants(process.pid)
    process.kill()
    for each in below:
        each.send(signal.SIGKILL)
    process.wait()
    wait_gone(below, timeout_seconds=10)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
