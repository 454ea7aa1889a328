"""Reads facts about this node's memory from /proc and the memory cgroup (v1 and v2).

Invariant: this module judges nothing, and returns None for a value that cannot be read.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from worker.core.memory_ends import KillCounts

_NO_LIMIT_BYTES = 1 << 60
"""Limits from this value on mean "no limit", because cgroup v1 shows a number near 2^63."""
_RECORD_BYTES = 16 * 1024
"""Buffer for one read of the kernel's log, which returns one shorter record."""
_OVERWRITTEN_READS = 16


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Size and availability of memory in bytes."""

    total_bytes: int
    """Memory of the machine, or the cgroup's limit if the limit is lower."""
    available_bytes: int
    """Memory that processes could allocate now without swapping."""
    limit_bytes: int | None = None
    """The cgroup's limit if it is lower than the machine's memory, otherwise None."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Resident memory of one process in bytes. Pages shared with other processes count in full."""

    resident_bytes: int
    peak_bytes: int
    """The highest resident memory since the process started."""


def memory_facts(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup"), process: str = "self"
) -> MemoryFacts:
    """Read how much memory a process (a pid, or `self`) can use, by the lowest limit of its cgroups."""
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    total = _kib(fields["MemTotal"])
    available = _kib(fields["MemAvailable"])
    lower = None
    for group in _with_parents(_memory_cgroup(proc, cgroups, process), cgroups):
        limit = _number(group / "memory.max") or _number(group / "memory.limit_in_bytes")
        used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes")
        # A cgroup's usage includes cached file pages. Inactive ones count as available, because the kernel reclaims
        # them before it kills a process. Source: the working set of kubelet's eviction signal `memory.available`.
        if limit is not None and limit < _NO_LIMIT_BYTES:
            lower = limit if limit < total else lower
            total = min(total, limit)
            available = min(available, limit - min(limit, max(0, (used or 0) - _inactive_file_bytes(group))))
    return MemoryFacts(total, available, lower)


def process_memory(pid: int, proc: Path = Path("/proc")) -> ProcessMemory | None:
    """Read a process's resident memory. None once the process has ended or its memory is being freed."""
    try:
        fields = dict(line.partition(":")[::2] for line in (proc / str(pid) / "status").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if "VmRSS" not in fields or "VmHWM" not in fields:
        return None
    return ProcessMemory(_kib(fields["VmRSS"]), _kib(fields["VmHWM"]))


def oom_kill_count(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Read the number of out-of-memory kills in this process's cgroup, or of the machine if the cgroup counts none.

    Only the difference between two readings is meaningful. None if the kernel has no such counter.
    """
    counts = kill_counts(proc, cgroups)
    return counts.node if counts.cgroup is None else counts.cgroup


def kill_counts(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup"), process: str = "self"
) -> KillCounts:
    """Read the out-of-memory kills of a process's cgroup (None for the root cgroup) and of the machine."""
    own = _memory_cgroup(proc, cgroups, process)
    of_group = group_kill_count(own) if own is not None and own != cgroups / "memory" else None
    return KillCounts(cgroup=of_group, node=_counts(proc / "vmstat").get("oom_kill"))


def group_kill_count(group: Path) -> int | None:
    """Read the number of out-of-memory kills in a cgroup. None if the cgroup does not account memory."""
    counts = (_counts(group / name).get("oom_kill") for name in ("memory.events", "memory.oom_control"))
    return next((count for count in counts if count is not None), None)


def kernel_log(path: Path = Path("/dev/kmsg")) -> str:
    """Read the kernel's log, one record per line; empty if it may not be read."""
    # The open needs CAP_SYSLOG if `kernel.dmesg_restrict` is 1.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    parts = []
    try:
        while part := _record(descriptor):
            parts.append(part)
    finally:
        os.close(descriptor)
    return b"".join(parts).decode(errors="replace")


def _record(descriptor: int) -> bytes:
    for _ in range(_OVERWRITTEN_READS):
        try:
            return os.read(descriptor, _RECORD_BYTES)
        except OSError as error:
            # EPIPE: the kernel has overwritten this record. The next read returns a later record.
            if error.errno != errno.EPIPE:
                return b""
    return b""


def _with_parents(group: Path | None, cgroups: Path) -> Iterator[Path]:
    """Yield the folders of a cgroup and its parents below the mount point `cgroups`, the cgroup's own folder first."""
    while group is not None and group.is_relative_to(cgroups) and group != cgroups:
        yield group
        group = group.parent


def _memory_cgroup(proc: Path, cgroups: Path, process: str) -> Path | None:
    """Return the folder of a process's memory cgroup, or None if it is not visible."""
    unified = None
    try:
        lines = (proc / process / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            found = cgroups / "memory" / path.lstrip("/")
            return found if found.is_dir() else None
        if not controllers:
            unified = cgroups / path.lstrip("/")
    return unified if unified is not None and (unified / "memory.events").is_file() else None


def _inactive_file_bytes(group: Path) -> int:
    counts = _counts(group / "memory.stat")
    return counts.get("total_inactive_file", counts.get("inactive_file", 0))


def _counts(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(" ") for line in lines)
    return {name: int(value) for name, _, value in pairs if value.isdecimal()}


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _kib(text: str) -> int:
    return int(text.split()[0]) * 1024
