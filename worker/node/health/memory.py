"""Facts about this node's memory, read from /proc and the memory cgroup; cgroup v1 and v2.

Invariant: only facts; what follows from them is decided elsewhere. What cannot be read is said to be unknown, never
guessed.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from worker.core.memory_ends import KillCounts

_NO_LIMIT_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2^63."""
_RECORD_BYTES = 16 * 1024
"""A read of the kernel's log returns one record, which is shorter."""
_OVERWRITTEN_READS = 16


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """How much memory there is, bytes."""

    total_bytes: int
    """Of the machine, or of the cgroup where that has a lower limit."""
    available_bytes: int
    """What could be allocated now without swapping."""
    limit_bytes: int | None = None
    """Of the cgroup, where it is lower than what the machine has; None: the machine itself is the limit."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """What one process has in memory, in bytes. Pages that it shares with other processes count in full."""

    resident_bytes: int
    peak_bytes: int
    """The highest `resident_bytes` of its life."""


def memory_facts(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> MemoryFacts:
    """Read how much memory this process and its children can have.

    What a cgroup uses holds the pages of files that it has read. Those that were not used again count as available, as
    in MemAvailable: the kernel takes them back before it kills. Source: the working set of kubelet's eviction signal
    `memory.available`.

    Args:
        proc: where procfs is mounted.
        cgroups: where cgroups are mounted.

    Returns:
        The facts, the cgroup's limit taken into account.
    """
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    total = _kib(fields["MemTotal"])
    available = _kib(fields["MemAvailable"])
    group = _memory_cgroup(proc, cgroups)
    lower = None
    if group is not None:
        limit = _number(group / "memory.max") or _number(group / "memory.limit_in_bytes")
        used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes")
        if limit is not None and limit < _NO_LIMIT_BYTES:
            lower = limit if limit < total else None
            total = min(total, limit)
            available = min(available, limit - min(limit, max(0, (used or 0) - _inactive_file_bytes(group))))
    return MemoryFacts(total, available, lower)


def tmpfs_free_bytes(folder: Path) -> int:
    """Return what can still be written below a folder by this user."""
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def slot_memory_bytes(slots: Path, *, beside_bytes: int) -> int:
    """Return what slots in a folder may take: what there is room for, and no more than half of the memory, ranks need some too.

    Slots that an earlier agent has left there count as room: they are the next one's. So every agent of a node says the
    same.

    Args:
        slots: the folder, on tmpfs; it need not exist yet.
        beside_bytes: of a tmpfs of the folder's own, what is not for slots.

    Returns:
        Bytes.
    """
    if os.path.ismount(slots):
        facts = os.statvfs(slots)
        room = facts.f_blocks * facts.f_frsize - beside_bytes
    else:
        room = tmpfs_free_bytes(slots.parent) + sum(path.stat().st_blocks * 512 for path in slots.glob("*/*.slot-*"))
    return min(room, memory_facts().total_bytes // 2)


def process_memory(pid: int, proc: Path = Path("/proc")) -> ProcessMemory | None:
    """Read what a process has in memory. One small read; needs no privilege.

    Args:
        pid: of the process.
        proc: where procfs is mounted.

    Returns:
        None once the process has ended or its memory is being torn down.
    """
    try:
        fields = dict(line.partition(":")[::2] for line in (proc / str(pid) / "status").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if "VmRSS" not in fields or "VmHWM" not in fields:
        return None
    return ProcessMemory(_kib(fields["VmRSS"]), _kib(fields["VmHWM"]))


def oom_kill_count(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Read how often the kernel has killed for want of memory: in this process's cgroup if that counts, else on the machine.

    The node's health compares two readings; the number itself means nothing.

    Args:
        proc: where procfs is mounted.
        cgroups: where cgroups are mounted.

    Returns:
        The count, or None if nobody counts.
    """
    counts = kill_counts(proc, cgroups)
    return counts.node if counts.cgroup is None else counts.cgroup


def kill_counts(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> KillCounts:
    """Read both counters of kills for lack of memory: of this process's memory cgroup, which is that of its ranks, and of the machine.

    Args:
        proc: where procfs is mounted.
        cgroups: where cgroups are mounted.

    Returns:
        The counts. A cgroup that is the whole machine counts as none.
    """
    own = _memory_cgroup(proc, cgroups)
    of_group = group_kill_count(own) if own is not None and own != cgroups / "memory" else None
    return KillCounts(cgroup=of_group, node=_counts(proc / "vmstat").get("oom_kill"))


def group_kill_count(group: Path) -> int | None:
    """Read how often the kernel has killed for lack of memory in one cgroup.

    Args:
        group: the folder of the cgroup.

    Returns:
        The count, or None where that cgroup counts no memory.
    """
    counts = (_counts(group / name).get("oom_kill") for name in ("memory.events", "memory.oom_control"))
    return next((count for count in counts if count is not None), None)


def kernel_log(path: Path = Path("/dev/kmsg")) -> str:
    """Read what the kernel has logged and still keeps. Needs CAP_SYSLOG where `kernel.dmesg_restrict` is 1.

    Args:
        path: the kernel's log device, or a file with such records.

    Returns:
        One record per line; empty where the log may not be read.
    """
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
    """Read the next record of the kernel's log; empty at its end."""
    for _ in range(_OVERWRITTEN_READS):
        try:
            return os.read(descriptor, _RECORD_BYTES)
        except OSError as error:
            if (
                error.errno != errno.EPIPE
            ):  # EPIPE: the kernel has overwritten the record; the next read continues after it
                return b""
    return b""


def _memory_cgroup(proc: Path, cgroups: Path) -> Path | None:
    """Return this process's memory cgroup; None if it is not visible here (another namespace, not mounted)."""
    unified = None
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            found = cgroups / "memory" / path.lstrip("/")
            return found if found.is_dir() else None
        if not controllers:
            unified = cgroups / path.lstrip("/")
    return unified if unified is not None and (unified / "memory.events").is_file() else None


def _inactive_file_bytes(group: Path) -> int:
    """Return the pages of files in a cgroup and below that were not used again; cgroup v1 sums up under another name."""
    counts = _counts(group / "memory.stat")
    return counts.get("total_inactive_file", counts.get("inactive_file", 0))


def _counts(path: Path) -> dict[str, int]:
    """Read a file of names and numbers; one that is not there is empty."""
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
