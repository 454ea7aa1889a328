"""Lists the RDMA devices of this node (EFA, InfiniBand, RoCE), as the kernel names them."""

from __future__ import annotations

from pathlib import Path

CLASS_INFINIBAND = Path("/sys/class/infiniband")


def rdma_devices(folder: Path = CLASS_INFINIBAND) -> tuple[str, ...]:
    """List the RDMA devices of this node.

    Args:
        folder: folder in which the kernel lists the devices. EFA devices appear there too.

    Returns:
        The names of the devices, sorted; empty if the kernel has no RDMA driver.
    """
    try:
        return tuple(sorted(each.name for each in folder.iterdir()))
    except OSError:
        return ()
