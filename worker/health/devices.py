"""Network cards and file systems of this node, as the kernel shows them.

Invariant: only facts; what cannot be read is left out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from worker.core.node_health import DiskFacts, LinkFacts

CLASS_NET = Path("/sys/class/net")
CLASS_INFINIBAND = Path("/sys/class/infiniband")
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


def disk(path: Path, least_bytes: int | None = None) -> DiskFacts | None:
    """Return the file system that holds `path`.

    Args:
        path: a folder.
        least_bytes: what counts as full; None: the smaller of `LEAST_DISK_BYTES` and `LEAST_SHARE`.

    Returns:
        The facts; None when the folder is not there.
    """
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    least = min(LEAST_DISK_BYTES, int(facts.f_blocks * facts.f_frsize * LEAST_SHARE)) if least_bytes is None else least_bytes
    is_read_only = bool(facts.f_flag & os.ST_RDONLY)
    return DiskFacts(path=str(path), is_read_only=is_read_only, free_bytes=facts.f_bavail * facts.f_frsize, least_bytes=least)


def _card(card: Path) -> LinkFacts | None:
    try:
        state = (card / "operstate").read_text().strip()
        errors = sum(int((card / "statistics" / name).read_text()) for name in _ERRORS)
    except (OSError, ValueError):
        return None
    return LinkFacts(name=card.name, is_up=state not in _DOWN, error_count=errors, byte_count=_count(card / "statistics", _CARD_BYTES))


def _port(adapter: Path, port: Path) -> LinkFacts | None:
    with contextlib.suppress(OSError):
        is_up = (port / "state").read_text().strip().endswith("ACTIVE")
        return LinkFacts(name=f"{adapter.name}/{port.name}", is_up=is_up, byte_count=_count(port / "hw_counters", _EFA_BYTES))
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
