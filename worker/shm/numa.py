"""Allocates the pages of new slots on the NUMA node of the GPU that will fill them.

The kernel allocates a page of shared memory according to the memory policy of the allocating thread. The agent reads
the NUMA nodes of GPUs from the driver's folder in /proc and not from NVML, because NVML may be missing or hang with a
faulty driver.

Invariant: the module changes no memory policy on a machine with one NUMA node or without GPUs, or in a thread that
already has a policy. Every change is undone.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

GPUS = Path("/proc/driver/nvidia/gpus")
"""Folder with one subfolder per GPU, named by PCI address.

The order of the names is the order of GPUs in NVML. For identical GPUs, it is also the order in CUDA.
"""
PCI_DEVICES = Path("/sys/bus/pci/devices")
MEMORY_NODES = Path("/sys/devices/system/node")
UNKNOWN = -1
"""The kernel's value for a device whose NUMA node is unknown."""
DEFAULT, PREFERRED = 0, 1
"""Memory policies: allocate on the thread's own node, or on a given node while it has free memory.

Source: linux/mempolicy.h.
"""
_WORD_BITS = 64
_SET_GET = {"x86_64": (238, 239), "aarch64": (237, 236)}.get(platform.machine())
"""Numbers of the system calls set_mempolicy and get_mempolicy, which libc does not wrap."""

Policy = Callable[[int | None], int | None]
"""Function that sets the calling thread's preferred NUMA node; None sets the default policy.

It returns the previous policy, or None if the kernel refused the change.
"""


def gpu_nodes(gpus: Path = GPUS, pci_devices: Path = PCI_DEVICES, memory_nodes: Path = MEMORY_NODES) -> tuple[int, ...]:
    """Return the NUMA node of each GPU.

    Args:
        gpus: folder in which NVIDIA's driver lists the GPUs.
        pci_devices: folder in which the kernel lists PCI devices.
        memory_nodes: folder in which the kernel lists NUMA nodes.

    Returns:
        NUMA nodes by GPU number, `UNKNOWN` if the kernel reports none. Empty without GPUs, or if the machine has only
            one NUMA node.
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
    """Set the NUMA node on which the kernel allocates the calling thread's new memory (see `Policy`).

    If the thread has a policy other than the default, for example from numactl, only None changes it. None sets the
    default policy. Return the previous policy, or None if the kernel refused.
    """
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
    """Allocate the calling thread's new pages on a NUMA node while the context is open.

    If this NUMA node has no free memory, the kernel allocates the pages on other NUMA nodes.

    Args:
        node: number of the NUMA node; None changes nothing.
        policy: sets the calling thread's NUMA policy and returns the previous policy; see `Policy`.

    Yields:
        Nothing.
    """
    is_set = node is not None and policy(node) == DEFAULT
    try:
        yield
    finally:
        if is_set:
            policy(None)
