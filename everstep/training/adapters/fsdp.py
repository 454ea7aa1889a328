"""FSDP2 (`fully_shard`), tensor parallelism (`parallelize_module`), or both: each rank's state is the local part of its DTensors.

Invariant: tensors are reached through `param_groups` and the parameters listed before the first forward; after an evaluation
`named_parameters()` shows gathered ones instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.optim.optimizer import Optimizer

from everstep.training.adapters.plain import PlainAdapter
from everstep.training.errors import CannotResume

REFUSED_OPTIMIZERS = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""Their state is not shaped and sharded like the parameter it belongs to."""


def _local(tensor: torch.Tensor) -> torch.Tensor:
    # not to_local(): that is a view of autograd's
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class FSDPAdapter(PlainAdapter):
    """Modules whose parameters are DTensors, with any torch optimizer that works element by element."""

    kind = "fsdp2"

    def __init__(self, models: Mapping[str, torch.nn.Module], optimizers: Mapping[str, Optimizer], trusted: Sequence[type] = ()) -> None:
        for name, optimizer in optimizers.items():
            if type(optimizer).__name__ in REFUSED_OPTIMIZERS:
                raise CannotResume(
                    f"optimizer/{name}" if name else "optimizer",
                    f"{type(optimizer).__name__} with fully_shard or tensor parallel parameters is not known to come back",
                )
        super().__init__(models, optimizers, trusted)

    local = staticmethod(_local)

    def rewrap(self, parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            return local
        # not from_local(): that copies to the mesh's device what a CPUOffloadPolicy keeps in host memory
        spec = parameter._spec.shallow_copy_with_tensor_meta(TensorMeta(parameter.shape, parameter.stride(), local.dtype))
        return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def check_gradient(self, name: str, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        placed = [tensor.placements for tensor in (parameter, gradient) if isinstance(tensor, DTensor)]
        if len(set(placed)) > 1:  # of a part that each rank has for itself: as if it were whole, it would be another
            raise CannotResume(f"gradient/{name}", f"accumulated across a step as {placed[1]}, where its parameter is {placed[0]}; use accumulate=")
