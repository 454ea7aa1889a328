"""Network cards and file systems of this node, as the kernel shows them.

Invariant: only facts; what cannot be read is left out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from worker.core.node_health import DiskFacts, DiskQueue, LinkFacts

CLASS_NET = Path("/sys/class/net")
CLASS_INFINIBAND = Path("/sys/class/infiniband")
BLOCK_DEVICES = Path("/sys/dev/block")
_FINISHED, _WAITING = (0, 4, 11, 15), 8
"""Columns of a block device's `stat`: reads, writes, discards and flushes finished (older kernels count no flushes, or no discards); in flight.

Source: Documentation/block/stat.rst of Linux.
"""
_DOWN = frozenset({"down", "lowerlayerdown", "notpresent"})
_ERRORS = ("rx_errors", "tx_errors")
_CARD_BYTES = ("rx_bytes", "tx_bytes")
_EFA_BYTES = ("rx_bytes", "tx_bytes", "rdma_read_bytes", "rdma_write_bytes")
"""An EFA adapter's own: what passes it is not in its card's; older drivers have no counters of RDMA."""
LEAST_DISK_BYTES = 256 * 1024 * 1024
LEAST_SHARE = 0.01
LEAST_TMPFS_BYTES = 1024 * 1024
"""A tmpfs of the node's own is made to be filled with slots; pages of ranks need this much beside them."""


def links(class_net: Path = CLASS_NET, class_infiniband: Path = CLASS_INFINIBAND) -> tuple[LinkFacts, ...]:
    """Return the network cards, and the ports of EFA and InfiniBand adapters; no bridges, tunnels or loopback: others take these up and down.

    Args:
        class_net: where the kernel lists cards.
        class_infiniband: where it lists adapters.

    Returns:
        By name.
    """
    cards = [_card(card) for card in _folders(class_net) if (card / "device").exists()]
    ports = [_port(adapter, port) for adapter in _folders(class_infiniband) for port in _folders(adapter / "ports")]
    return tuple(link for link in (*cards, *ports) if link is not None)


def disk(path: Path, least_bytes: int | None = None, block_devices: Path = BLOCK_DEVICES) -> DiskFacts | None:
    """Return the file system that holds `path`. Nothing is written: a volume that hangs would hold up who does.

    Args:
        path: a folder.
        least_bytes: what counts as full; None: the smaller of `LEAST_DISK_BYTES` and `LEAST_SHARE`.
        block_devices: where the kernel lists block devices by number.

    Returns:
        The facts; None when the folder is not there.
    """
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    least = (
        min(LEAST_DISK_BYTES, int(facts.f_blocks * facts.f_frsize * LEAST_SHARE))
        if least_bytes is None
        else least_bytes
    )
    is_read_only = bool(facts.f_flag & os.ST_RDONLY)
    free_bytes = facts.f_bavail * facts.f_frsize
    return DiskFacts(
        path=str(path),
        is_read_only=is_read_only,
        free_bytes=free_bytes,
        least_bytes=least,
        queue=queue(path, block_devices),
    )


def queue(path: Path, block_devices: Path = BLOCK_DEVICES) -> DiskQueue | None:
    """Return what the volume that holds `path` has finished and still has to do.

    Args:
        path: a folder.
        block_devices: where the kernel lists block devices by number.

    Returns:
        The counts; None of what is no block device of this node: tmpfs, overlays, network file systems, btrfs.
    """
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
    """Return the sum of those counters that are there; None without any."""
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
