"""Starts and stops the long-lived processes (parts) of a local cloud, and records each process in a file.

Invariant: a command can find each process, even after a crash: by its record, or by the state directory in its
environment.
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
    """Records one process for other commands."""

    name: str
    pid: int
    start_ticks: int
    log: str

    @property
    def process(self) -> Process:
        """The recorded process, which may have ended."""
        return Process(self.pid, self.start_ticks)


_PART_RECORD = msgspec.json.Decoder(PartRecord)


class Parts:
    """Starts, records and ends the parts of one local cloud."""

    def __init__(self, directory: Path, logs: Path) -> None:
        self._directory = directory
        self._logs = logs
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> PartRecord:
        """Start `python -P -m module arguments` in its own session, and record it."""
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
        """Return the file that a part writes once it accepts requests."""
        return self._directory / f"{name}.ready.json"

    def wait_ready(self, record: PartRecord, *, timeout_seconds: float) -> dict[str, str]:
        """Wait until a started part has written its ready file, and return its fields, at least `url`.

        Raises StartFailed, with the end of its log, if the part ended or did not write the file in time.
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
        """Return the content of a part's ready file, or None before the part has written it."""
        try:
            content: dict[str, str] = json.loads(self.ready_file(name).read_text())
        except FileNotFoundError:
            return None
        return content

    def record(self, name: str) -> PartRecord | None:
        """Return the record of a part. None before its start and after `end`."""
        try:
            return _PART_RECORD.decode((self._directory / f"{name}.json").read_bytes())
        except FileNotFoundError:
            return None

    def is_alive(self, name: str) -> bool:
        """Return whether a part was started and is alive."""
        record = self.record(name)
        return record is not None and record.process.is_alive

    def end(self, name: str, *, grace_seconds: float = GRACE_SECONDS) -> None:
        """End a part with SIGTERM, after the grace period kill it with its descendants, and delete its record.

        Idempotent.
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
    """Waits for the end of a process through a pidfd."""

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
    """Write a file atomically, readable only by its owner from its creation on."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    draft.replace(path)


def tail(log: Path) -> str:
    """Return the last lines of a log, indented for an error message."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(f"  {line}" for line in lines[-LOG_LINES_SHOWN:]) or "  (nothing)"


def _interpreter() -> list[str]:
    # Without -P, Python would import a `worker.py` of the working directory in place of Everstep's package `worker`.
    return [sys.executable, "-P"]
