"""Launches two rank processes of a compared system, or two processes that measure floors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from benchmarks.cluster_jobs import POLL_SECONDS
from benchmarks.command import pause
from benchmarks.data_plane.rank.peer import Launch
from benchmarks.data_plane.rank.repeats import Repeats
from benchmarks.data_plane.systems import System
from benchmarks.errors import BenchmarkFailed
from benchmarks.machine import ROOT
from tests.ports import ReservedPort

RANKS = 2
FLOOR_ROUNDS = 4
MEMORY = Path("/dev/shm")


def run_peer(
    system: System, environments: Path, home: Path, *, state_mib: int, repeats: Repeats, timeout_seconds: float
) -> list[dict[str, Any]]:
    """Launch the two rank processes of a compared system once, and return each rank's `loop.Samples`.

    `home` gets logs, results and state dumps. Raises BenchmarkFailed with the path of the log if a rank failed.
    """
    home.mkdir(parents=True)
    with tmpfs_folder() as memory, closing(ReservedPort()) as meeting, closing(ReservedPort()) as group:
        launches = [
            Launch(
                adapter=system.adapter,
                offers=list(system.metrics),
                rank=rank,
                state_mib=state_mib,
                repeats=asdict(repeats),
                meeting_port=meeting.number,
                group_port=group.number,
                memory=str(memory),
                dumps=str(memory),
                result=str(home / f"rank{rank}.json"),
            )
            for rank in range(RANKS)
        ]
        python = str(system.python(environments))
        commands = [["-m", "benchmarks.data_plane.rank.peer", launch.to_json()] for launch in launches]
        _run_to_the_end(
            system.name, [[python, *command] for command in commands], home, {"TMPDIR": str(home)}, timeout_seconds
        )
    return [json.loads(Path(launch.result).read_text()) for launch in launches]


def _run_to_the_end(
    name: str, commands: list[list[str]], home: Path, environment: Mapping[str, str], timeout_seconds: float
) -> None:
    python = next(Path(word) for word in commands[0] if Path(word).name.startswith("python"))
    # Add the environment's programs to PATH, because DeepSpeed searches PATH for the build tool ninja.
    path = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    with processes(commands, home, {**environment, **path}) as started:
        deadline = time.monotonic() + timeout_seconds
        # Stop waiting if one rank fails, because the other rank would wait for it. Leaving the block ends both ranks.
        while None in (codes := [process.poll() for process in started]) and not any(codes):
            if time.monotonic() > deadline:
                raise BenchmarkFailed(f"{name} has not ended after {timeout_seconds:.0f} s; see {home}/rank*.log")
            pause(POLL_SECONDS)
    if any(codes):
        raise BenchmarkFailed(f"{name} ended with {codes}; see {home}/rank*.log")


class FloorPair:
    """Two processes that measure floors on request, until the end of the context."""

    def __init__(self, home: Path, mebibytes: int) -> None:
        self._home = home
        self._mebibytes = mebibytes
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self._home.mkdir(parents=True, exist_ok=True)
        port = self._stack.enter_context(closing(ReservedPort()))
        program = [sys.executable, "-m", "benchmarks.data_plane.rank.floors"]
        commands = [[*program, str(rank), str(port.number), str(self._mebibytes)] for rank in range(RANKS)]
        self._processes = self._stack.enter_context(processes(commands, self._home, {}, is_talking=True))
        self._answers()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, rounds: int = FLOOR_ROUNDS) -> dict[str, list[float]]:
        """Let both processes measure all floors `rounds` times. Return the seconds by operation."""
        found: dict[str, list[float]] = {}
        for _ in range(rounds):
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(b"\n")
                process.stdin.flush()
            for answer in self._answers():
                for name, seconds in answer.items():
                    found.setdefault(name, []).append(seconds)
        return found

    def _answers(self) -> list[dict[str, float]]:
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise BenchmarkFailed(f"a process that measures floors ended; see {self._home}")
            answers.append(json.loads(line))
        return answers


@contextmanager
def tmpfs_folder() -> Iterator[Path]:
    """Yield a folder on tmpfs, and remove it with other leftovers of the launch."""
    # From a disk, the kernel would write the files back during the next measurement.
    before = set(MEMORY.iterdir())
    folder = MEMORY / f"everstep-bench-{os.getpid()}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        # Remove the files that DLRover leaves, and the files that torch leaves when a rank is killed.
        for left in set(MEMORY.iterdir()) - before:
            if left.name.startswith(("bench", "checkpoint_shm", "torch_")) and left.is_file():
                left.unlink(missing_ok=True)
        for left in Path("/tmp/ckpt_sock").glob(f"bench{os.getpid()}-*"):
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def processes(
    commands: list[list[str]], home: Path, environment: Mapping[str, str], *, is_talking: bool = False
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start each process in a new session, and kill those that still run at the end."""
    started: list[subprocess.Popen[bytes]] = []
    pipe = subprocess.PIPE if is_talking else subprocess.DEVNULL
    try:
        for rank, command in enumerate(commands):
            with (home / f"rank{rank}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        command,
                        cwd=home,
                        env={**os.environ, **environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                        stdin=pipe,
                        stdout=pipe if is_talking else log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        yield started
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
            process.wait()


class Talk:
    """A process that answers each line on stdin with a line on stdout."""

    def __init__(self, process: subprocess.Popen[bytes], home: Path) -> None:
        self._process = process
        self._home = home

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, words: object) -> None:
        """Write one command as a line of JSON."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Return the decoded next line of the process. Raises BenchmarkFailed with the log's folder if it ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkFailed(f"a process of the measurement ended; see the logs in {self._home}")
        return json.loads(line)

    def ask(self, words: object) -> Any:
        """Send one command to the process, and return its decoded answer."""
        self.say(words)
        return self.answer()
