"""FSDP2 (`fully_shard`): each rank's state is the local part of its DTensors.

Invariant: tensors are reached through `param_groups` and the parameters listed before the first forward; after an evaluation
`named_parameters()` shows gathered ones instead.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from everstep.training.adapters.plain import PlainAdapter


class FSDPAdapter(PlainAdapter):
    """Modules that `fully_shard` was applied to, with any torch optimizer that works element by element."""

    kind = "fsdp2"

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        # not to_local(): that is a view of autograd's
        return tensor._local_tensor if isinstance(tensor, DTensor) else tensor

    def rewrap(self, parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            return local
        return DTensor.from_local(
            local, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
