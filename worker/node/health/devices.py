"""Reads the state of this node's network cards and file systems from the kernel.

Invariant: this module judges nothing. Values that cannot be read are omitted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from everstep.doctor.node_facts import CLASS_INFINIBAND
from worker.core.node_health import DiskFacts, DiskQueue, LinkFacts

CLASS_NET = Path("/sys/class/net")
BLOCK_DEVICES = Path("/sys/dev/block")
_FINISHED, _WAITING = (0, 4, 11, 15), 8
"""Columns of a block device's `stat` file: finished reads, writes, discards and flushes; requests in flight.

Older kernels lack discards and flushes. Source: Documentation/block/stat.rst of Linux.
"""
_DOWN = frozenset({"down", "lowerlayerdown", "notpresent"})
_ERRORS = ("rx_errors", "tx_errors")
_CARD_BYTES = ("rx_bytes", "tx_bytes")
_EFA_BYTES = ("rx_bytes", "tx_bytes", "rdma_read_bytes", "rdma_write_bytes")
"""Byte counters of an EFA adapter, which its network card does not count. Older drivers lack those of RDMA."""
LEAST_DISK_BYTES = 256 * 1024 * 1024
LEAST_SHARE = 0.01


def links(class_net: Path = CLASS_NET, class_infiniband: Path = CLASS_INFINIBAND) -> tuple[LinkFacts, ...]:
    """Return the state of this node's network cards and of the ports of its adapters, sorted by name."""
    # Omit bridges, tunnels and loopback, because other software activates and deactivates them.
    cards = [_card(card) for card in _folders(class_net) if (card / "device").exists()]
    ports = [_port(adapter, port) for adapter in _folders(class_infiniband) for port in _folders(adapter / "ports")]
    return tuple(link for link in (*cards, *ports) if link is not None)


def disk(path: Path, block_devices: Path = BLOCK_DEVICES) -> DiskFacts | None:
    """Return the free space and state of the file system that contains `path`; None if it does not exist."""
    try:
        # Only read, because a write to a hung volume would block.
        facts = os.statvfs(path)
    except OSError:
        return None
    is_read_only = bool(facts.f_flag & os.ST_RDONLY)
    free_bytes = facts.f_bavail * facts.f_frsize
    return DiskFacts(
        path=str(path),
        is_read_only=is_read_only,
        free_bytes=free_bytes,
        least_bytes=min(LEAST_DISK_BYTES, int(facts.f_blocks * facts.f_frsize * LEAST_SHARE)),
        queue=queue(path, block_devices),
    )


def queue(path: Path, block_devices: Path = BLOCK_DEVICES) -> DiskQueue | None:
    """Return the finished and pending requests of the volume that holds `path`. None without a block device."""
    try:
        device = os.stat(path).st_dev
        columns = [
            int(word)
            for word in (block_devices / f"{os.major(device)}:{os.minor(device)}" / "stat").read_text().split()
        ]
        return DiskQueue(
            finished_count=sum(columns[at] for at in _FINISHED if at < len(columns)), waiting_count=columns[_WAITING]
        )
    except (OSError, ValueError, IndexError):
        return None


def _card(card: Path) -> LinkFacts | None:
    try:
        state = (card / "operstate").read_text().strip()
        errors = sum(int((card / "statistics" / name).read_text()) for name in _ERRORS)
    except (OSError, ValueError):
        return None
    return LinkFacts(
        name=card.name,
        is_up=state not in _DOWN,
        error_count=errors,
        byte_count=_count(card / "statistics", _CARD_BYTES),
    )


def _port(adapter: Path, port: Path) -> LinkFacts | None:
    with contextlib.suppress(OSError):
        is_up = (port / "state").read_text().strip().endswith("ACTIVE")
        return LinkFacts(
            name=f"{adapter.name}/{port.name}", is_up=is_up, byte_count=_count(port / "hw_counters", _EFA_BYTES)
        )
    return None


def _count(folder: Path, names: Sequence[str]) -> int | None:
    """Return the sum of the kernel's counters in the files `names` that exist in `folder`; None if none exists."""
    found = []
    for name in names:
        with contextlib.suppress(OSError, ValueError):
            found.append(int((folder / name).read_text()))
    return sum(found) if found else None


def _folders(folder: Path) -> Iterable[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return ()
