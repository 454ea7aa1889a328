"""Processes by their facts in /proc: who is whose descendant, and how a whole tree is ended.

A process is named by (pid, start ticks): the kernel reuses pids, never both. Linux only.

Invariant: nothing here signals a process that was not found below, or in the session of, the one that the caller named.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_MAX_PASSES = 16
"""A tree that still grows after so many passes is killed as it stands; its owner looks again."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Process:
    """One line of /proc: the fields that place a process."""

    pid: int
    parent: int
    session: int
    start_ticks: int
    is_zombie: bool


def find(pid: int) -> Process | None:
    """Return the process with this pid, a zombie too, or None."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            data = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name stands in parentheses and may itself hold any character: fields count from the last one.
    fields = data[data.rindex(b")") + 2 :].split()
    return Process(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
        is_zombie=fields[0] in (b"Z", b"X", b"x"),
    )


def is_alive(pid: int, start_ticks: int) -> bool:
    """Say whether exactly this process still runs; a zombie does not."""
    process = find(pid)
    return process is not None and process.start_ticks == start_ticks and not process.is_zombie


def is_there(pid: int, start_ticks: int) -> bool:
    """Say whether exactly this process has not been reaped yet."""
    process = find(pid)
    return process is not None and process.start_ticks == start_ticks


def snapshot() -> dict[int, Process]:
    """Return all processes that can be seen, by pid."""
    found = (find(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {process.pid: process for process in found if process is not None}


def tree(root: int, processes: Mapping[int, Process]) -> set[int]:
    """Return `root`, its descendants, and whoever is in the session that `root` leads: pids, zombies included. Pure."""
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


def kill_tree(root: int) -> frozenset[Process]:
    """Kill a process, all its descendants and its session with SIGKILL.

    Blocks for some milliseconds; does not wait for the ends and reaps nothing. The tree is frozen before it is killed:
    a killed parent's children would move to another parent and out of sight.

    Args:
        root: the leader. The caller makes sure that this pid is still the process it means, or a zombie of it.

    Returns:
        Those that were signalled.
    """
    frozen: dict[int, Process] = {}
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
    """Send a signal to each of these processes; those that have ended meanwhile, or are another user's by now (`sudo`), are skipped."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def children(parent: int) -> set[int]:
    """Return the pids of the direct children of a process, zombies included."""
    return {process.pid for process in snapshot().values() if process.parent == parent}


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process and its descendants have used."""

    cpu_seconds: float
    """User and system time, of descendants that have ended and were reaped, too."""
    is_stopped: bool
    """The process itself is stopped by a signal."""


def tree_usage(root: int) -> Usage:
    """Return what a process and all below it have used so far; nothing when it is gone.

    Walks through /proc: some milliseconds.
    """
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
    return Usage(cpu_seconds=ticks / os.sysconf("SC_CLK_TCK"), is_stopped=state == b"T")


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def initial_environment() -> dict[str, str]:
    """Return the environment that this process was started with, before the interpreter or anybody else changed it (PEP 538 does)."""
    with open("/proc/self/environ", "rb") as file:
        pairs = (entry.partition(b"=") for entry in file.read().split(b"\0") if entry)
        return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def close_inherited(keep: Iterable[int]) -> None:
    """Close every descriptor above 2 that is not in `keep`: what the starter left open is not this process's business."""
    kept = set(keep)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:  # the one that listed the folder
                continue


def become_subreaper() -> None:
    """From now on orphaned descendants of this process become its children.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends. Not inherited by forks.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def set_title(words: Iterable[str]) -> None:
    """Show `words` as this process's command line: people and tools look for a rank by its script.

    What is too long for the area is cut.

    The area is the one that the kernel put the arguments of the last exec into; Python has its own copy of them.
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
        name: what is beyond 15 bytes is cut.

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
