"""Reads facts about processes from /proc, and kills whole process trees. Linux only.

The pair (pid, start ticks) identifies a process. Invariant: this module signals only the process that the caller named,
its descendants and members of its session.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_MAX_PASSES = 16
"""Maximum number of passes in which `kill_tree` stops processes. Each pass finds forks of the previous one."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One process's entry in /proc/<pid>/stat."""

    pid: int
    parent: int
    session: int
    start_ticks: int
    is_zombie: bool


def find(pid: int) -> RankProcess | None:
    """Return the process with this pid, even if it is a zombie, or None."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            data = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name is in parentheses and may contain any character, so fields count from the last parenthesis.
    fields = data[data.rindex(b")") + 2 :].split()
    return RankProcess(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
        is_zombie=fields[0] in (b"Z", b"X", b"x"),
    )


def is_alive(pid: int, start_ticks: int) -> bool:
    """Return whether the process with this pid and start time (in clock ticks) runs; False for a zombie."""
    process = find(pid)
    return process is not None and process.start_ticks == start_ticks and not process.is_zombie


def is_there(pid: int, start_ticks: int) -> bool:
    """Return whether the process with this pid and start time (in clock ticks) exists, even as a zombie."""
    process = find(pid)
    return process is not None and process.start_ticks == start_ticks


def snapshot() -> dict[int, RankProcess]:
    """Return all processes that are visible in /proc, by pid."""
    found = (find(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {process.pid: process for process in found if process is not None}


def tree(root: int, processes: Mapping[int, RankProcess]) -> set[int]:
    """Return the pids of `root` and of the session that it leads, with their descendants and zombies."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    found = {root} if root in processes else set()
    queue = [root, *(process.pid for process in processes.values() if process.session == root)]
    found.update(queue[1:])
    while queue:
        for child in children.get(queue.pop(), ()):
            if child not in found:
                found.add(child)
                queue.append(child)
    return found


def kill_tree(root: int) -> frozenset[RankProcess]:
    """Kill a process, its descendants and its session, and return them, without a wait for their end.

    The caller must ensure that the pid still belongs to this process.
    """
    frozen: dict[int, RankProcess] = {}
    for _ in range(_MAX_PASSES):
        processes = snapshot()
        found = {
            pid: processes[pid] for pid in tree(root, processes) if pid not in frozen and not processes[pid].is_zombie
        }
        if not found:
            break
        # Stop all processes first, so that no child gets another parent and is missed.
        send(found, signal.SIGSTOP)
        frozen |= found
    send(frozen, signal.SIGKILL)
    return frozenset(frozen.values())


def send(pids: Iterable[int], number: int) -> None:
    """Send the signal `number` to each process. Skip processes that have ended or belong to another user (`sudo`)."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def children(parent: int) -> set[int]:
    """Return the pids of a process's direct children, including zombies."""
    return {process.pid for process in snapshot().values() if process.parent == parent}


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Resource use of a process and its descendants."""

    cpu_seconds: float
    """User and system time, including reaped descendants."""
    is_stopped: bool


def tree_usage(root: int) -> ProcessUsage:
    """Return the accumulated resource use of a process tree; zero if the process does not exist."""
    ticks, state = 0, b""
    for pid in tree(root, snapshot()):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                data = file.read()
        except (FileNotFoundError, ProcessLookupError):
            continue
        fields = data[data.rindex(b")") + 2 :].split()
        ticks += sum(int(field) for field in fields[11:15])
        state = fields[0] if pid == root else state
    return ProcessUsage(cpu_seconds=ticks / os.sysconf("SC_CLK_TCK"), is_stopped=state == b"T")


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if the process does not exist."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def initial_environment() -> dict[str, str]:
    """Return the environment with which this process was started. Python changes `os.environ` at start (PEP 538)."""
    with open("/proc/self/environ", "rb") as file:
        pairs = (entry.partition(b"=") for entry in file.read().split(b"\0") if entry)
        return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def close_inherited(keep: Iterable[int]) -> None:
    """Close all descriptors above 2 that this process inherited, except those in `keep`."""
    kept = set(keep)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:  # `os.listdir` opened this descriptor, and has already closed it.
                continue


def become_subreaper() -> None:
    """Make this process the parent of its orphaned descendants. Raises OSError if the kernel refuses."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends. Forks do not inherit this. Raises OSError."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def set_title(words: Iterable[str]) -> None:
    """Show `words`, cut to the length of the last exec's arguments, as this process's command line (proc(5))."""
    with open("/proc/self/stat", "rb") as file:
        data = file.read()
    fields = data[data.rindex(b")") + 2 :].split()
    begin, end = int(fields[45]), int(fields[46])
    title = b"\0".join(os.fsencode(word) for word in words)[: max(0, end - begin - 1)]
    ctypes.memmove(begin, title.ljust(end - begin, b"\0"), end - begin)


def set_name(name: str) -> None:
    """Set the name that `ps` and `top` show for this thread, cut to 15 bytes. Raises OSError if the kernel refuses."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int | ctypes.c_char_p) -> None:
    argument = ctypes.c_ulong(value) if isinstance(value, int) else value
    if _libc.prctl(option, argument, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
