"""Adapter for FSDP2 (`fully_shard`) and tensor parallelism. It captures the local parts of DTensors.

Invariant: the adapter never calls `named_parameters()` after the first forward pass, because this method returns
gathered tensors after an evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.optimizer import Optimizer

from everstep.protocol.parts import TensorPart
from everstep.training.adapters.plain import PlainAdapter
from everstep.training.capture import StateTensor
from everstep.training.errors import CannotResume
from everstep.training.module_tree import ModuleTree, refusal

REFUSED_OPTIMIZERS = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""Optimizers whose state has a different shape or sharding than the parameter."""


def _local(tensor: torch.Tensor) -> torch.Tensor:
    # Read the private attribute, because to_local() returns a view with autograd history.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class Boxes:
    """Computes this rank's box of each DTensor, once per shape and placement. Create a new object for each use, because
    this rank may have a different position in a later process group.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def of(self, name: str, tensor: DTensor, local_shape: tuple[int, ...]) -> tuple[TensorPart, ...]:
        """Return this rank's box of a DTensor. Empty if this rank's part is empty, or if `local_shape` is not what the
        placement implies. This occurs for optimizer state with its own shape, and for two uneven shardings of one
        dimension.
        """
        shape = tuple(tensor.shape)
        key = (shape, tensor.device_mesh, tensor.placements)
        if key not in self._known:
            sizes, offsets = compute_local_shape_and_global_offset(*key)
            self._known[key] = tuple(sizes), tuple(offsets)
        sizes, offsets = self._known[key]
        part = TensorPart(name, shape, offsets, sizes, 0)
        return (part,) if part.elements and part.sizes == local_shape else ()


def is_unreduced(group: FSDPParamGroup) -> bool:
    """Return whether a parameter group holds gradients that FSDP has not yet reduced over the ranks."""
    # The group's fields are private in torch, and only this function reads them.
    if group._partial_reduce_output is not None:
        return True
    return any(
        parameter.unsharded_accumulated_grad is not None
        or (hasattr(parameter, "_unsharded_param") and parameter._unsharded_param.grad is not None)
        for parameter in group.fsdp_params
    )


class FSDPAdapter(PlainAdapter):
    """Adapter for modules whose parameters are DTensors, with any element-wise torch optimizer."""

    kind = "fsdp2"

    def __init__(
        self, models: Mapping[str, torch.nn.Module], optimizers: Mapping[str, Optimizer], trusted: Sequence[type] = ()
    ) -> None:
        for name, optimizer in optimizers.items():
            if type(optimizer).__name__ in REFUSED_OPTIMIZERS:
                raise CannotResume(
                    f"optimizer/{name}" if name else "optimizer",
                    f"Everstep does not know whether {type(optimizer).__name__} with fully_shard or tensor parallel "
                    "parameters restores bit-identically",
                )
        super().__init__(models, optimizers, trusted)
        self._groups = [
            (f"model/{name}.{path}".rstrip(".") if name else f"model/{path}".rstrip("/"), group)
            for name, model in models.items()
            for path, module in model.named_modules()
            if isinstance(module, FSDPModule)
            for group in module._get_fsdp_state()._fsdp_param_groups
        ]

    def _follow(self) -> CannotResume | None:
        """Return an error for a replaced module. Ignore parameters: torch itself replaces them by gathered ones."""
        return refusal("model", self._tree, ModuleTree(self._models), follows=False)

    def check(self) -> None:
        super().check()
        for name, group in self._groups:
            if is_unreduced(group):
                raise CannotResume(
                    name,
                    "gradients are accumulated across a step before ranks sum them "
                    "(set_requires_gradient_sync(False) or set_requires_all_reduce(False)), and a snapshot cannot "
                    "contain such gradients. Call boundary() only after a backward that synchronizes gradients; "
                    "with batches() use accumulate=",
                )

    def boxes(self, states: Sequence[StateTensor]) -> dict[str, tuple[TensorPart, ...]]:
        buffers = {name: owner._buffers.get(key) for name, owner, key in self._buffers.places}
        tensors = {**buffers, **self._parameters}
        found: dict[str, tuple[TensorPart, ...]] = {}
        boxes = Boxes()
        for state in states:
            owners = [split[0] for named in self._optimizers if (split := named.split_name(state.name)) is not None]
            owners += [state.name.removeprefix(kind) for kind in ("model/", "gradient/")]
            for owner in owners:
                tensor = state.wrapper if isinstance(state.wrapper, DTensor) else tensors.get(owner)
                if isinstance(tensor, DTensor) and state.tensor.dim():
                    # A scalar is not sharded: every rank holds the whole tensor.
                    found[state.name] = boxes.of(state.name, tensor, tuple(state.tensor.shape))
        return found

    local = staticmethod(_local)

    def rewrap(self, parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            return local
        # Create the DTensor directly. DTensor.from_local() would copy tensors that CPUOffloadPolicy keeps in host
        # memory to the mesh's device.
        spec = parameter._spec.shallow_copy_with_tensor_meta(
            TensorMeta(parameter.shape, parameter.stride(), local.dtype)
        )
        return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def check_gradient(self, name: str, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        placed = [tensor.placements for tensor in (parameter, gradient) if isinstance(tensor, DTensor)]
        # Reject a gradient of which each rank holds a partial sum, because a restore would treat it as the complete
        # gradient.
        if len(set(placed)) > 1:
            raise CannotResume(
                f"gradient/{name}",
                (
                    f"the gradient is accumulated across a step as {placed[1]}, but its parameter is "
                    f"{placed[0]}; use accumulate="
                ),
            )
