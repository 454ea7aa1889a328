"""Checks whether this machine can run a local cloud, before any of its processes is started."""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path
from typing import Final

from everstep.protocol.rank_messages import unordered_machine
from infra.local_cloud import network
from infra.local_cloud.errors import PreflightFailed

MEMORY_BYTES_PER_NODE: Final = 576 * 1024**2
"""Memory for an agent, a small rank with its slots, and the warm process with torch, which shares some pages with the
rank.
"""
MEMORY_BYTES_AT_ALL: Final = 1024**3
"""Memory for the local AWS, the control plane and the user's other programs."""
SHARE_FOR_SLOTS: Final = 0.5
NEEDED: Final = {"control_plane": "server", "worker": "worker", "moto": "local"}


def check(node_count: int, *, has_namespaces: bool = False) -> None:
    """Raise PreflightFailed, with a remedy, if this machine cannot run `node_count` nodes, spares included."""
    if platform.system() != "Linux":
        raise PreflightFailed(
            f"the local cloud needs Linux (memfd, pidfd); this is {platform.system()}: use a Linux container"
        )
    if reason := unordered_machine(platform.machine()):
        raise PreflightFailed(reason)
    if has_namespaces and (obstacle := network.obstacle()):
        raise PreflightFailed(f"--network namespaces cannot work here: {obstacle}; use --network loopback")
    for module, extra in NEEDED.items():
        if importlib.util.find_spec(module) is None:
            raise PreflightFailed(f"{module} is not installed: pip install 'everstep[local]' (extra {extra})")
    needed, available = MEMORY_BYTES_AT_ALL + node_count * MEMORY_BYTES_PER_NODE, available_memory_bytes()
    if available < needed:
        raise PreflightFailed(
            f"{_mib(available)} MiB of memory are available; {node_count} nodes need about {_mib(needed)} MiB: "
            "use fewer nodes"
        )


def memory_bytes_per_node(node_count: int) -> int:
    """Return the default memory for slots of one node: an equal part of half the available memory."""
    return int(SHARE_FOR_SLOTS * available_memory_bytes() / node_count)


def available_memory_bytes() -> int:
    """Return the available memory of the machine or the container, whichever is lower."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            available = min(available, int(Path(limit).read_text()) - int(Path(used).read_text()))
        # The machine has another cgroup version, or the cgroup has no limit and its file contains "max".
        except (OSError, ValueError):
            continue
    return available


def _mib(count: int) -> int:
    return count // 1024**2
