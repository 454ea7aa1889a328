"""Where pages of new slots lie on a node with several NUMA nodes: near the GPU that will fill them.

A page that a thread gives a file on tmpfs comes from where the thread's memory policy says. GPUs are listed by the
driver's own folder here, and by NVML in `worker.node.health.gpus`: this is read once, before the agent serves anybody,
when NVML may be missing or hang for as long as a sick driver does; what health needs (Xids, memory errors, clocks) only
NVML tells, in a thread that may hang.

Invariant: on a node with one NUMA node or without GPUs, in a thread whose policy somebody has set already, and where
the kernel refuses, nothing is changed; and nothing stays changed.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

GPUS = Path("/proc/driver/nvidia/gpus")
"""A folder for each GPU, named by its address on the bus: in NVML's order, which is CUDA's too where they are all alike."""
PCI_DEVICES = Path("/sys/bus/pci/devices")
MEMORY_NODES = Path("/sys/devices/system/node")
UNKNOWN = -1
"""The kernel's own word for a device that is near no node, or whose node nobody told it."""
DEFAULT, PREFERRED = 0, 1
"""Memory policies: pages come from where the thread runs; from one node as long as it has some.

Source: linux/mempolicy.h.
"""
_WORD_BITS = 64
_SET_GET = {"x86_64": (238, 239), "aarch64": (237, 236)}.get(platform.machine())
"""Numbers of set_mempolicy and get_mempolicy; libc has no functions for them."""

Policy = Callable[[int | None], int | None]
"""Called with a node, makes it the calling thread's preferred one; with None, sets the default; returns the mode before, None where it is refused."""


def gpu_nodes(gpus: Path = GPUS, pci_devices: Path = PCI_DEVICES, memory_nodes: Path = MEMORY_NODES) -> tuple[int, ...]:
    """Return the NUMA node of each GPU.

    Args:
        gpus: where NVIDIA's driver lists them.
        pci_devices: where the kernel lists devices.
        memory_nodes: where it lists NUMA nodes.

    Returns:
        By the GPU's number, `UNKNOWN` where the kernel does not know; empty without GPUs or with one NUMA node.
    """
    try:
        if len(list(memory_nodes.glob("node[0-9]*"))) < 2:
            return ()
        return tuple(_node(pci_devices / gpu.name / "numa_node") for gpu in sorted(gpus.iterdir()))
    except OSError:
        return ()


def _node(path: Path) -> int:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return UNKNOWN


def set_policy(node: int | None) -> int | None:
    """Set the calling thread's memory policy (see `Policy`); one that is not the default is left as it is."""
    if _SET_GET is None:
        return None
    setting, getting = _SET_GET
    call: Any = ctypes.CDLL(None).syscall
    mode = ctypes.c_int(DEFAULT)
    if call(ctypes.c_long(getting), ctypes.byref(mode), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0)):
        return None
    if node is None:
        done = call(ctypes.c_long(setting), ctypes.c_int(DEFAULT), None, ctypes.c_ulong(0))
    elif mode.value == DEFAULT:
        words = (ctypes.c_ulong * (node // _WORD_BITS + 1))()
        words[-1] = 1 << node % _WORD_BITS
        done = call(ctypes.c_long(setting), ctypes.c_int(PREFERRED), words, ctypes.c_ulong(len(words) * _WORD_BITS + 1))
    else:
        done = 0
    return None if done else mode.value


@contextmanager
def near(node: int | None, policy: Policy = set_policy) -> Iterator[None]:
    """Have the calling thread's new pages come from a NUMA node, as long as it has some.

    Args:
        node: its number; None: nothing is changed.
        policy: sets the thread's.

    Yields:
        Nothing.
    """
    is_set = node is not None and policy(node) == DEFAULT
    try:
        yield
    finally:
        if is_set:
            policy(None)
