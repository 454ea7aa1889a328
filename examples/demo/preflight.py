"""Checks whether this machine can run the demo, before the set-up. Uses only the standard library."""

import os
import platform
import shutil
import sys
from pathlib import Path

NEEDED_MEMORY_BYTES = 8 * 1024**3
NEEDED_DISK_BYTES = 2 * 1024**3


def obstacles() -> list[str]:
    """Return the missing requirements, one sentence each; empty if the demo can run."""
    if platform.system() != "Linux":
        return [f"Everstep needs Linux (memfd, pidfd); this is {platform.system()}. Use a Linux machine or container."]
    found = []
    if sys.version_info < (3, 11):  # noqa: UP036 -- an older Python may run this script, before the set-up
        found.append(f"Python 3.11 or newer is needed; this is {platform.python_version()}.")
    memory = {
        name: int(rest.split()[0]) * 1024
        for name, rest in (line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    }
    if memory["MemAvailable"] < NEEDED_MEMORY_BYTES:
        found.append(
            f"{memory['MemAvailable'] >> 20} MiB of memory are available; the demo needs "
            f"{NEEDED_MEMORY_BYTES >> 20} MiB."
        )
    if shutil.disk_usage(".").free < NEEDED_DISK_BYTES:
        found.append(
            f"{shutil.disk_usage('.').free >> 20} MiB of disk are free here; set-up needs "
            f"{NEEDED_DISK_BYTES >> 20} MiB (torch and DeepSpeed)."
        )
    if not hasattr(os, "pidfd_open"):
        found.append("This Python was built without pidfd support (Linux 5.3 or newer is needed).")
    return found


if __name__ == "__main__":
    problems = obstacles()
    for problem in problems:
        print(f"cannot run the demo: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)
