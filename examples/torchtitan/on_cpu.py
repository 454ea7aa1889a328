"""Lets torchtitan train on a machine without a GPU, for a trial. Import it before torchtitan.

torchtitan 0.3 supports accelerators only. With a GPU, the import changes nothing. Without one, it replaces what
torchtitan takes from CUDA: the type of the device, the functions of `torch.cuda`, and the Triton kernels of a kind of
expert parallelism. It also adds `torch.distributed.set_timeout`, which torch 2.13 lacks and torchtitan 0.3 calls.
"""

import sys
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

set_factor = FSDPModule.set_gradient_divide_factor


class Kernels(ModuleType):
    """Stands for the kernels, which no model on the CPU calls."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


def set_factor_and_sum(module, factor):
    """Set the factor by which FSDP2 divides gradients, and use a plain sum, because gloo has no other sum."""
    set_factor(module, factor)
    module.set_force_sum_reduction_for_comms(True)


if not torch.cuda.is_available():
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = Kernels("kernels")
    import torchtitan.tools.utils

    torchtitan.tools.utils.device_type = "cpu"
    torchtitan.tools.utils.device_module = SimpleNamespace(
        set_device=lambda _: None,
        current_device=lambda: 0,
        device_count=lambda: 1,
        synchronize=lambda: None,
        get_device_name=lambda _: "CPU",
        get_device_properties=lambda _: SimpleNamespace(total_memory=1 << 30),
        memory_stats=lambda _: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )
    FSDPModule.set_gradient_divide_factor = set_factor_and_sum
    dist.set_timeout = getattr(dist, "set_timeout", lambda *_: None)
