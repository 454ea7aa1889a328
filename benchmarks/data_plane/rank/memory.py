"""Measures the memory that processes and folders use. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path


def private_bytes(*pids: int) -> int:
    """Return the anonymous memory of processes together. A shared page counts once, an ended process as 0."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:"))
    return total


def own_tree() -> list[int]:
    """Return the pids of this process and its descendants."""
    found, queue = [], [os.getpid()]
    while queue:
        found.append(queue.pop())
        try:
            tasks = list(Path(f"/proc/{found[-1]}/task").iterdir())
            queue += [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except OSError:
            continue
    return found


def tmpfs_bytes() -> int:
    """Return the used bytes of /dev/shm, with unlinked files."""
    found = os.statvfs("/dev/shm")
    return (found.f_blocks - found.f_bfree) * found.f_frsize
