"""Lets torchtitan train on a machine without a GPU, for a trial. Import it before torchtitan.

torchtitan 0.3 supports accelerators only. With a GPU, the import of this module changes nothing. Without a GPU, the
import replaces three parts of torchtitan that need CUDA: the type of the device, the functions of `torch.cuda`, and the
Triton kernels of `minimal_async_ep`, an expert parallelism. It also adds `torch.distributed.set_timeout`, which torch
2.13 lacks and torchtitan 0.3 calls.
"""

import sys
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

set_factor = FSDPModule.set_gradient_divide_factor


class Kernels(ModuleType):
    """Replaces the module of Triton kernels. Its attributes are None, because no model on the CPU calls a kernel."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


def set_factor_and_sum(module, factor):
    """Set the factor by which FSDP2 divides gradients, and make FSDP2 reduce them by a plain sum, as gloo requires."""
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
