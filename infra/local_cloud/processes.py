"""Identifies, signals and ends processes and process trees on Linux. Standard library only.

The kernel reuses pids, so a process is identified by pid and start time, and signals go through a pidfd.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


MEMORY_PREFIX = "/memfd:everstep "
"""Beginning of the names of a node's files in memory in /proc."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process, identified by pid and start time."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/<pid>/stat: clock ticks from the machine's boot to the process's start."""

    @property
    def is_alive(self) -> bool:
        """Whether the process exists and is not a zombie."""
        stat = _stat(self.pid)
        return stat is not None and stat.start_ticks == self.start_ticks and stat.state not in "ZX"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process."""
        stat = _stat(self.pid)
        return stat is not None and stat.start_ticks == self.start_ticks and stat.state == "T"

    def send(self, number: signal.Signals) -> bool:
        """Send a signal. Return False if the process had ended."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.is_alive:
                return False
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(pidfd)
        return True


def identify(pid: int) -> Process | None:
    """Return the process that has this pid now, or None."""
    stat = _stat(pid)
    return Process(pid, stat.start_ticks) if stat else None


def rank_of(pid: int) -> int | None:
    """Return the rank that a process runs, or None. Forked ranks have it in their name, others in their environment."""
    with contextlib.suppress(OSError, ValueError):
        name, _, number = Path(f"/proc/{pid}/comm").read_text().strip().partition(" ")
        if name == "rank":
            return int(number)
        variables = dict(
            word.split(b"=", 1) for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in word
        )
        if b"EVERSTEP_AGENT_SOCKET" in variables:
            return int(variables[b"RANK"])
    return None


def is_agent(pid: int) -> bool:
    """Return whether a process is a node's agent, by its command line."""
    with contextlib.suppress(OSError):
        return b"\0-m\0worker\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def descendants(root_pid: int) -> list[Process]:
    """Return all living descendants, parents before children, without zombies."""
    children: dict[int, list[tuple[int, _Stat]]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _stat(int(entry))):
            children.setdefault(stat.parent_pid, []).append((int(entry), stat))
    found: list[Process] = []
    parents = [root_pid]
    while parents:
        for pid, stat in children.get(parents.pop(), ()):
            parents.append(pid)
            if stat.state not in "ZX":
                found.append(Process(pid, stat.start_ticks))
    return found


def kill_descendants(root_pid: int) -> int:
    """Stop and then kill all descendants of a process, so that none can fork in between, and return their number.

    Idempotent. Finds daemons if the root is a subreaper. Known limit: processes that fork and exit within the
    milliseconds of a read of /proc can delay the return.
    """
    killed: set[Process] = set()
    while True:
        frozen: set[Process] = set()
        while fresh := [process for process in descendants(root_pid) if process not in frozen]:
            for process in fresh:
                process.send(signal.SIGSTOP)
                frozen.add(process)
        if not frozen:
            return len(killed)
        for process in frozen:
            process.send(signal.SIGKILL)
        killed |= frozen
        wait_gone(frozen, timeout_seconds=5.0)


def wait_gone(processes: Iterable[Process], *, timeout_seconds: float) -> bool:
    """Wait until all processes have ended or are zombies. Return False after the timeout."""
    poller = select.poll()
    waiting: set[int] = set()
    try:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(process.pid)
                if process.is_alive:
                    waiting.add(pidfd)
                    poller.register(pidfd, select.POLLIN)
                else:
                    os.close(pidfd)
        deadline = time.monotonic() + timeout_seconds
        while waiting:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for pidfd, _ in poller.poll(left * 1000):
                poller.unregister(pidfd)
                os.close(pidfd)
                waiting.discard(pidfd)
        return True
    finally:
        for pidfd in waiting:
            os.close(pidfd)


def end(process: Process, *, grace_seconds: float) -> None:
    """End a process with SIGTERM, and after `grace_seconds` kill it with all its descendants. Idempotent."""
    if not process.send(signal.SIGTERM):
        return
    if wait_gone([process], timeout_seconds=grace_seconds):
        return
    # Stop the process before its children are killed. Otherwise, a supervisor would restart them forever.
    process.send(signal.SIGSTOP)
    kill_descendants(process.pid)
    process.send(signal.SIGKILL)
    wait_gone([process], timeout_seconds=5.0)


def marked_with(variable: str, value: str) -> list[Process]:
    """Return this user's living processes that were started with `variable=value`, except this one."""
    wanted = f"{variable}={value}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            variables = Path("/proc", entry, "environ").read_bytes().split(b"\0")
        except OSError:  # The process has ended, is a kernel thread, or belongs to another user.
            continue
        if wanted in variables and (process := identify(int(entry))) and process.is_alive:
            found.append(process)
    return found


@dataclass(frozen=True, slots=True)
class _Stat:
    state: str
    parent_pid: int
    start_ticks: int


def proportional_bytes(process: Process) -> int:
    """Return a process's share of the memory in use (Pss in proc(5)). 0 if it has ended."""
    try:
        fields = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(field.split()[1]) for field in fields if field.startswith("Pss:"))


def exit_when_asked(*, with_parent: bool) -> None:
    """Let SIGTERM and SIGHUP raise SystemExit in the main thread, so that `with` blocks end what they have started.

    `with_parent`: the end of the parent process, even by a kill, counts as SIGTERM.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if with_parent:
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before the call
            sys.exit(128 + signal.SIGTERM)


def memory_files(pid: int) -> dict[str, Path]:
    """Return the slots and pages that a process holds in memory, by name, with paths valid as long as it holds them."""
    found = {}
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(link)
                if target.startswith(MEMORY_PREFIX):
                    found[target.removeprefix(MEMORY_PREFIX).removesuffix(" (deleted)")] = link
    return found


def memory_of(sockets: Path) -> dict[str, Path]:
    """Return the files in memory of the node whose shim listens in a folder, as `memory_files` does."""
    word = os.fsencode(sockets / "shim.sock")
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                if word in (words := (folder / "cmdline").read_bytes().split(b"\0")) and b"worker.ranks.shim" in words:
                    return memory_files(int(folder.name))
    return {}


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path("/proc", str(pid), "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Split after the last parenthesis, because the process name may contain spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return _Stat(state=fields[0], parent_pid=int(fields[1]), start_ticks=int(fields[19]))
