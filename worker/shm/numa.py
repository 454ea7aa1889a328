"""Allocates the pages of new slots on the NUMA node of the GPU that will fill them.

The kernel allocates shared memory by the memory policy of the allocating thread. Invariant: the module changes no
policy on a machine with one NUMA node or without GPUs, or in a thread that already has a policy. Every change is
undone.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# The driver's folder is read, because NVML may be missing or hang with a faulty driver. For identical GPUs, the order
# is also that of CUDA.
GPUS = Path("/proc/driver/nvidia/gpus")
"""Folder with one subfolder per GPU, named by PCI address, in NVML's order."""
PCI_DEVICES = Path("/sys/bus/pci/devices")
MEMORY_NODES = Path("/sys/devices/system/node")
UNKNOWN = -1
"""The kernel's value for a device whose NUMA node is unknown."""
DEFAULT, PREFERRED = 0, 1
"""Policies: allocate on the thread's own node, or on a node while it has free memory. Source: linux/mempolicy.h."""
_WORD_BITS = 64
_SET_GET = {"x86_64": (238, 239), "aarch64": (237, 236)}.get(platform.machine())
"""Numbers of the system calls set_mempolicy and get_mempolicy, which libc does not wrap."""

Policy = Callable[[int | None], int | None]
"""Sets the calling thread's preferred NUMA node (None: the default). Returns the previous policy, None if refused."""


def gpu_nodes(gpus: Path = GPUS, pci_devices: Path = PCI_DEVICES, memory_nodes: Path = MEMORY_NODES) -> tuple[int, ...]:
    """Return the NUMA node of each GPU, or `UNKNOWN`. Empty without GPUs or with a single NUMA node."""
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

    If the thread has a policy other than the default, for example from numactl, only None changes it.
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
    """Allocate the calling thread's new pages on a NUMA node, if it has free memory, while the context is open."""
    is_set = node is not None and policy(node) == DEFAULT
    try:
        yield
    finally:
        if is_set:
            policy(None)
