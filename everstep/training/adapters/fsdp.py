"""FSDP2 (`fully_shard`), tensor parallelism (`parallelize_module`), or both: each rank's state is the local part of its DTensors.

Invariant: tensors are reached through `param_groups` and the parameters listed before the first forward; after an
evaluation `named_parameters()` shows gathered ones instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
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


def is_unreduced(group: FSDPParamGroup) -> bool:
    """Say whether a group of parameters holds gradients that fully_shard has not summed over ranks yet.

    Args:
        group: of torch's own; its fields are private, and read here alone.

    Returns:
        True between a backward without synchronization and the next one with it.
    """
    if group._partial_reduce_output is not None:
        return True
    return any(
        parameter.unsharded_accumulated_grad is not None
        or (hasattr(parameter, "_unsharded_param") and parameter._unsharded_param.grad is not None)
        for parameter in group.fsdp_params
    )


class FSDPAdapter(PlainAdapter):
    """Modules whose parameters are DTensors, with any torch optimizer that works element by element."""

    kind = "fsdp2"

    def __init__(
        self, models: Mapping[str, torch.nn.Module], optimizers: Mapping[str, Optimizer], trusted: Sequence[type] = ()
    ) -> None:
        for name, optimizer in optimizers.items():
            if type(optimizer).__name__ in REFUSED_OPTIMIZERS:
                raise CannotResume(
                    f"optimizer/{name}" if name else "optimizer",
                    f"{type(optimizer).__name__} with fully_shard or tensor parallel parameters is not known to "
                    "come back",
                )
        super().__init__(models, optimizers, trusted)
        self._groups = [
            (f"model/{name}.{path}".rstrip(".") if name else f"model/{path}".rstrip("/"), group)
            for name, model in models.items()
            for path, module in model.named_modules()
            if isinstance(module, FSDPModule)
            for group in module._get_fsdp_state()._fsdp_param_groups
        ]

    def check(self) -> None:
        super().check()
        for name, group in self._groups:
            if is_unreduced(group):
                raise CannotResume(
                    name,
                    "gradients are accumulated across a step before ranks have summed them "
                    "(set_requires_gradient_sync(False) or set_requires_all_reduce(False)), where no snapshot reaches "
                    "them. Call boundary() only behind a backward that synchronizes gradients; "
                    "with batches() use accumulate=",
                )

    local = staticmethod(_local)

    def rewrap(self, parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            return local
        # not from_local(): that copies to the mesh's device what a CPUOffloadPolicy keeps in host memory
        spec = parameter._spec.shallow_copy_with_tensor_meta(
            TensorMeta(parameter.shape, parameter.stride(), local.dtype)
        )
        return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def check_gradient(self, name: str, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        placed = [tensor.placements for tensor in (parameter, gradient) if isinstance(tensor, DTensor)]
        if len(set(placed)) > 1:  # of a part that each rank has for itself: as if it were whole, it would be another
            raise CannotResume(
                f"gradient/{name}",
                f"accumulated across a step as {placed[1]}, where its parameter is {placed[0]}; use accumulate=",
            )
