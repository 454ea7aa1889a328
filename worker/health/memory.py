"""Facts about this node's memory, read from /proc and the memory cgroup; cgroup v1 and v2.

Invariant: only facts; what follows from them is decided elsewhere. What cannot be read is said to be unknown, never guessed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2^63."""


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """How much memory there is, bytes."""

    total_bytes: int
    """Of the machine, or of the cgroup where that has a lower limit."""
    available_bytes: int
    """What could be allocated now without swapping."""


def memory_facts(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> MemoryFacts:
    """Read how much memory this process and its children can have.

    What a cgroup uses holds the pages of files that it has read. Those that were not used again count as available, as in MemAvailable: the kernel
    takes them back before it kills.
    Source: the working set of kubelet's eviction signal `memory.available`.

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
    if group is not None:
        limit = _number(group / "memory.max") or _number(group / "memory.limit_in_bytes")
        used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes")
        if limit is not None and limit < _NO_LIMIT_BYTES:
            total = min(total, limit)
            available = min(available, limit - min(limit, max(0, (used or 0) - _inactive_file_bytes(group))))
    return MemoryFacts(total, available)


def tmpfs_free_bytes(folder: Path) -> int:
    """Return what can still be written below a folder by this user."""
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def slot_memory_bytes(slots: Path, *, beside_bytes: int) -> int:
    """Return what slots in a folder may take: what there is room for, and no more than half of the memory, ranks need some too.

    Slots that an earlier agent has left there count as room: they are the next one's. So every agent of a node says the same.

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


def oom_kill_count(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Read how often the kernel has killed for want of memory: in this process's cgroup if that counts, else on the machine.

    The supervisor compares two readings; the number itself means nothing.

    Args:
        proc: where procfs is mounted.
        cgroups: where cgroups are mounted.

    Returns:
        The count, or None if nobody counts.
    """
    group = _memory_cgroup(proc, cgroups)
    files = [group / "memory.events", group / "memory.oom_control"] if group is not None else []
    counts = (_counts(path).get("oom_kill") for path in (*files, proc / "vmstat"))
    return next((count for count in counts if count is not None), None)


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
