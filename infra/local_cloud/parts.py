"""Starts and stops the long-lived processes (parts) of a local cloud, and records each process in a file.

Invariant: a command can find each started process, even after a crash of any process of the cloud. Either the process's
record contains its pid and start time, or the process's environment contains the cloud's state directory.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from infra.local_cloud.errors import StartFailed
from infra.local_cloud.processes import Process, end, identify

READY_POLL_SECONDS: Final = 0.05
GRACE_SECONDS: Final = 10.0
LOG_LINES_SHOWN: Final = 12


class PartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The file that records one process, so that other commands find the process."""

    name: str
    pid: int
    start_ticks: int
    log: str

    @property
    def process(self) -> Process:
        """The process that this file records, by its pid and its start time. It may have ended."""
        return Process(self.pid, self.start_ticks)


_PART_RECORD = msgspec.json.Decoder(PartRecord)


class Parts:
    """Starts, records and ends the parts (long-lived processes) of one local cloud.

    Args:
        directory: directory for the records of the processes, one file per process.
        logs: directory for the output of the processes.
    """

    def __init__(self, directory: Path, logs: Path) -> None:
        self._directory = directory
        self._logs = logs
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> PartRecord:
        """Start `python -P -m module arguments` as a process of the local cloud, in its own session, and record it."""
        for directory in (self._directory, self._logs):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.ready_file(name).unlink(missing_ok=True)
        log = self._logs / f"{name}.log"
        with open(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as output:
            child = subprocess.Popen(
                [*_interpreter(), "-m", module, *arguments],
                env=dict(environment),
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children[name] = child
        # identify() finds the child even if it has ended, because its entry in /proc exists until this process waits
        # for it.
        process = identify(child.pid)
        assert process is not None
        record = PartRecord(name=name, pid=process.pid, start_ticks=process.start_ticks, log=str(log))
        write_private(self._directory / f"{name}.json", msgspec.json.encode(record))
        return record

    def ready_file(self, name: str) -> Path:
        """Return the path of the file that a part (long-lived process) writes once it accepts requests."""
        return self._directory / f"{name}.ready.json"

    def wait_ready(self, record: PartRecord, *, timeout_seconds: float) -> dict[str, str]:
        """Wait until a part has written its ready file, and return the file's content.

        Args:
            record: the result of `start`.
            timeout_seconds: maximum time to wait.

        Returns:
            The fields of the ready file, at least `url`.

        Raises:
            StartFailed: the part ended or did not write the file in time. The message ends with the last lines of the
                part's log.
        """
        deadline = time.monotonic() + timeout_seconds
        waiter = _Waiter(record.process)
        try:
            while not self.ready_file(record.name).exists():
                if waiter.has_ended(READY_POLL_SECONDS):
                    raise StartFailed(
                        f"{record.name} ended while it started; its log, {record.log}, ends "
                        f"with:\n{tail(Path(record.log))}"
                    )
                if time.monotonic() > deadline:
                    raise StartFailed(
                        f"{record.name} was not ready after {timeout_seconds:.0f} s; its log, {record.log}, "
                        f"ends with:\n{tail(Path(record.log))}"
                    )
        finally:
            waiter.close()
        content: dict[str, str] = json.loads(self.ready_file(record.name).read_text())
        return content

    def ready(self, name: str) -> dict[str, str] | None:
        """Return the content of the file that a long-lived process (part) writes once it accepts requests.

        None before the process has written it.
        """
        try:
            content: dict[str, str] = json.loads(self.ready_file(name).read_text())
        except FileNotFoundError:
            return None
        return content

    def record(self, name: str) -> PartRecord | None:
        """Return the record of a part (long-lived process).

        None if the part was never started, or if `end` has ended it.
        """
        try:
            return _PART_RECORD.decode((self._directory / f"{name}.json").read_bytes())
        except FileNotFoundError:
            return None

    def is_alive(self, name: str) -> bool:
        """Return whether a part (long-lived process) was started and is alive."""
        record = self.record(name)
        return record is not None and record.process.is_alive

    def end(self, name: str, *, grace_seconds: float = GRACE_SECONDS) -> None:
        """End a part and delete its record. Idempotent.

        The method first sends SIGTERM to the part. After the grace period, it kills the part with all its descendants.
        """
        record = self.record(name)
        if record:
            end(record.process, grace_seconds=grace_seconds)
        child = self._children.pop(name, None)
        if child:
            child.wait()
        for file in (self._directory / f"{name}.json", self.ready_file(name)):
            file.unlink(missing_ok=True)


class _Waiter:
    """Waits for the end of a process through a pidfd, without polling."""

    def __init__(self, process: Process) -> None:
        self._poller = select.poll()
        self._pidfd: int | None
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self._pidfd = None
        else:
            self._poller.register(self._pidfd, select.POLLIN)

    def has_ended(self, timeout_seconds: float) -> bool:
        return self._pidfd is None or bool(self._poller.poll(timeout_seconds * 1000))

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically. Only its owner can read it, from its creation on."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    draft.replace(path)


def tail(log: Path) -> str:
    """Return the last lines of a process's log, indented for an error message."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(f"  {line}" for line in lines[-LOG_LINES_SHOWN:]) or "  (nothing)"


def _interpreter() -> list[str]:
    # Without -P, Python would import a `worker.py` of the working directory in place of Everstep's package `worker`.
    return [sys.executable, "-P"]
