"""Decides whether a rank ended because it ran out of memory, from evidence of the kernel and of the rank.

    evidence                                                        certain    source
    the kernel's log reports a kill of this process                 yes        kernel_log
    the kill counter of the rank's memory cgroup rose               yes        cgroup
    the kill counter of the node rose                               no         node
    the rank's last exception reports a lack of memory              yes        exception

The first three count only if SIGKILL, not requested by the agent, ended the rank or a DataLoader worker of it.
Invariant: a value that was not measured is None, never estimated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from everstep.protocol.agent_messages import MemoryEnd, MemoryKind, MemorySource

MAX_WORDS = 300
_TRACEBACK = "Traceback (most recent call last):"
_GPU_EXCEPTIONS = re.compile(
    r"torch\.(?:cuda\.)?OutOfMemoryError\b|(?:RuntimeError|torch\.AcceleratorError): CUDA(?: error)?: out of memory\b"
)
_HOST_EXCEPTIONS = re.compile(
    r"(?:MemoryError|numpy\.(?:_?core\._exceptions\.)?_?ArrayMemoryError)(?::|\s*$)"
    r"|RuntimeError: .*DefaultCPUAllocator: (?:can't allocate memory|not enough memory)"
    r"|OSError: \[Errno 12\] "
)
_LOST_LOADERS = re.compile(
    r"RuntimeError: DataLoader worker \(pid(?:\(s\))? (?P<pids>\d+(?:, \d+)*)\) "
    r"(?:is killed by signal: Killed\b|exited unexpectedly\s*$)"
)
"""Matches the exception of a DataLoader whose workers were killed or have exited.

Source: torch/csrc/DataLoader.cpp and torch/utils/data/dataloader.py, torch 2.13.
"""
_KILLED = re.compile(
    r"Killed process (?P<pid>\d+) \(.*?\) total-vm:\d+kB, anon-rss:(?P<anon>\d+)kB, file-rss:(?P<file>\d+)kB"
    r"(?:, shmem-rss:(?P<shared>\d+)kB)?"
)
_RECORD = re.compile(r"^\d+,\d+,(?P<microseconds>\d+),[^;]*;(?P<text>.*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class KillCounts:
    """Counters of kernel kills for lack of memory. A value is None if the counter cannot be read."""

    cgroup: int | None = None
    """Kills in the rank's cgroup; None if this cgroup is the whole machine."""
    node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Memory in use shortly before a rank ended, in bytes. A value is None if it was not measured."""

    rank_bytes: int | None = None
    used_bytes: int | None = None
    """Used memory of the rank's cgroup if that cgroup has a limit, otherwise of the node."""
    total_bytes: int | None = None
    """Limit of the memory that `used_bytes` counts."""


UNMEASURED = MemoryUse()


@dataclass(frozen=True, slots=True)
class LostLoaders:
    """DataLoader workers whose end caused the last exception of their rank."""

    pids: tuple[int, ...]
    words: str


def lost_loaders(last_lines: str) -> LostLoaders | None:
    """Return the DataLoader workers whose end caused the last exception in a rank's last lines of stderr, or None."""
    line = _last_exception(last_lines)
    found = _LOST_LOADERS.match(line)
    return LostLoaders(tuple(map(int, found["pids"].split(", "))), line[:MAX_WORDS]) if found is not None else None


def end_of_killed(
    before: KillCounts, after: KillCounts, use: MemoryUse, logged_bytes: int | None, loaders: LostLoaders | None = None
) -> MemoryEnd | None:
    """Return the strongest evidence that the kernel killed a process for lack of memory, or None.

    `before` and `after` are counters from before and after its end. `logged_bytes` is its memory in the kernel's log
    (`logged_kill`). `loaders` are the workers that ended instead of the rank. Both may be None.
    """
    if logged_bytes is not None:
        source = MemorySource.KERNEL_LOG
    elif _has_risen(before.cgroup, after.cgroup):
        source = MemorySource.CGROUP
    elif _has_risen(before.node, after.node):
        source = MemorySource.NODE
    else:
        return None
    return MemoryEnd(
        source=source,
        kind=MemoryKind.HOST,
        rank_bytes=logged_bytes or (use.rank_bytes if loaders is None else None),
        used_bytes=use.used_bytes,
        total_bytes=use.total_bytes,
        words=loaders.words if loaders is not None else "",
    )


def end_of_raised(last_lines: str, use: MemoryUse) -> MemoryEnd | None:
    """Return the evidence that a lack of memory caused the exception in a rank's last lines of stderr, or None."""
    line = _last_exception(last_lines)
    if _GPU_EXCEPTIONS.match(line):
        return MemoryEnd(source=MemorySource.EXCEPTION, kind=MemoryKind.GPU, words=line[:MAX_WORDS])
    if _HOST_EXCEPTIONS.match(line):
        return MemoryEnd(
            source=MemorySource.EXCEPTION,
            kind=MemoryKind.HOST,
            rank_bytes=use.rank_bytes,
            used_bytes=use.used_bytes,
            total_bytes=use.total_bytes,
            words=line[:MAX_WORDS],
        )
    return None


def logged_kill(log: str, pid: int, since_seconds: float) -> int | None:
    """Return the resident bytes of a process that the kernel killed for lack of memory; None without a log record.

    `log` has records of /dev/kmsg, one per line. `since_seconds` is the start of the process since boot; an older
    record is about an earlier process.
    """
    found = None
    for line in log.splitlines():
        record = _RECORD.match(line)
        if record is None or int(record["microseconds"]) / 1_000_000 < since_seconds:
            continue
        killed = _KILLED.search(record["text"])
        if killed is not None and int(killed["pid"]) == pid:
            found = 1024 * sum(int(killed[part] or 0) for part in ("anon", "file", "shared"))
    return found


def _has_risen(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def _last_exception(text: str) -> str:
    _, found, rest = text.rpartition(_TRACEBACK)
    if not found:
        return ""
    return next((line for line in rest.splitlines() if line and not line[0].isspace()), "")
