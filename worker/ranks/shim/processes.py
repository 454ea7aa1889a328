"""Reads facts about processes from /proc, and kills whole process trees. Linux only.

The pair (pid, start ticks) identifies a process. The kernel reuses pids, but never the same pair.

Invariant: this module signals only the process that the caller named, its descendants and members of its session.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_MAX_PASSES = 16
"""Maximum number of passes in which `kill_tree` stops the processes of a tree, before it kills them.

Each pass finds the processes that were forked during the previous pass. The caller checks whether processes remain.
"""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One process's parent, session, start time and state (zombie or not), read from /proc/<pid>/stat."""

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
    """Return whether the process with this pid and start time (in clock ticks) exists. A zombie exists, too."""
    process = find(pid)
    return process is not None and process.start_ticks == start_ticks


def snapshot() -> dict[int, RankProcess]:
    """Return all processes that are visible in /proc, by pid."""
    found = (find(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {process.pid: process for process in found if process is not None}


def tree(root: int, processes: Mapping[int, RankProcess]) -> set[int]:
    """Return the pids of `root`, its descendants and the session that `root` leads, with their descendants.

    Pure. The result includes zombies.
    """
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
    """Kill a process, all its descendants and its session with SIGKILL.

    The call blocks for some milliseconds. It neither waits for the end of the processes nor reaps them. All processes
    are stopped before they are killed, so that no child gets another parent and is missed.

    Args:
        root: pid of the tree's first process. The caller must ensure that the pid still belongs to this process.

    Returns:
        The processes that were signalled.
    """
    frozen: dict[int, RankProcess] = {}
    for _ in range(_MAX_PASSES):
        processes = snapshot()
        found = {
            pid: processes[pid] for pid in tree(root, processes) if pid not in frozen and not processes[pid].is_zombie
        }
        if not found:
            break
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
    """User and system time, including descendants that have ended and were reaped."""
    is_stopped: bool
    """True if a signal has stopped the process itself."""


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
    """Return the environment with which this process was started.

    `os.environ` may differ, because the interpreter changes it at start (PEP 538).
    """
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
    """Make this process a subreaper, the parent of its orphaned descendants.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends; forks do not inherit this setting.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def set_title(words: Iterable[str]) -> None:
    """Show `words` as this process's command line, so that users and tools find a rank by its script.

    The text overwrites the memory in which the kernel stored the arguments of the last exec, and is cut to its length.
    Python has its own copy of the arguments.

    Source: proc(5), stat fields 48 and 49.
    """
    with open("/proc/self/stat", "rb") as file:
        data = file.read()
    fields = data[data.rindex(b")") + 2 :].split()
    begin, end = int(fields[45]), int(fields[46])
    title = b"\0".join(os.fsencode(word) for word in words)[: max(0, end - begin - 1)]
    ctypes.memmove(begin, title.ljust(end - begin, b"\0"), end - begin)


def set_name(name: str) -> None:
    """Set the name that `ps` and `top` show for this thread.

    Args:
        name: the new name, of which the kernel stores 15 bytes.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int | ctypes.c_char_p) -> None:
    argument = ctypes.c_ulong(value) if isinstance(value, int) else value
    if _libc.prctl(option, argument, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
