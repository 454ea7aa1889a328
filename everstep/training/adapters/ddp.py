"""Adapter for DistributedDataParallel (DDP). It fixes the layout of gradient buckets before the first step.

After its first backward pass, DDP rebuilds its buckets in the order in which gradients arrived. An all-reduce over
three or more ranks then sums in a different order. A launch that restores step 100 would run step 101 with the initial
layout, and differ in the last bits.

Invariant: the first step of every launch uses the same bucket layout as all later steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import starmap
from typing import cast

import torch
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from everstep.training.adapters.base import AdapterState, qualified_name
from everstep.training.adapters.plain import PlainAdapter
from everstep.training.capture import StateTensor
from everstep.training.errors import CannotResume
from everstep.training.saved_tensors import SavedTensors
from everstep.training.state_tree import Tree


class DDPAdapter(PlainAdapter):
    """Adapter for models of which at least one is wrapped in DistributedDataParallel. Raises CannotResume if
    `PlainAdapter` rejects an object, DDP uses a static graph over three or more ranks, or a communication hook keeps
    state.
    """

    kind = "ddp"

    def __init__(
        self, models: Mapping[str, torch.nn.Module], optimizers: Mapping[str, Optimizer], trusted: Sequence[type] = ()
    ) -> None:
        super().__init__(models, optimizers, trusted)
        self._wrapped = [
            (f"model/{name}" if name else "model", module)
            for name, model in models.items()
            for module in model.modules()
            if isinstance(module, DistributedDataParallel)
        ]
        for name, module in self._wrapped:
            _check(name, module)
        self._trainable = {id(parameter) for parameter in self._parameters.values() if parameter.requires_grad}
        self._checked_revision = self.revision
        self._unaveraged = ""
        """An unfrozen parameter whose gradients DDP does not average."""
        # DDP divides a view by the number of ranks, and multiplies any other gradient by the inverse, which can round
        # differently. A restored gradient must be a view again.
        self._views: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def check(self) -> None:
        super().check()
        if self._checked_revision != self.revision:
            self._checked_revision = self.revision
            self._unaveraged = next(filter(None, starmap(self._find_unaveraged, self._wrapped)), "")
        if self._unaveraged:
            raise CannotResume(
                self._unaveraged,
                "DDP does not average its gradients over the ranks, because it was frozen when DDP wrapped the model. "
                "A new wrapper after init() is missing after a restart. Wrap the model with all parameters trainable "
                "and find_unused_parameters=True, and freeze them afterwards",
            )

    def _find_unaveraged(self, name: str, model: DistributedDataParallel) -> str:
        later = {
            path: parameter
            for path, parameter in model.module.named_parameters()
            if parameter.requires_grad and id(parameter) not in self._trainable
        }
        buckets = model.reducer._get_zeros_like_grad_buckets() if later else []
        averaged = {id(parameter) for bucket in buckets for parameter in bucket.parameters()}
        return next((f"{name}/{path}" for path, each in later.items() if id(each) not in averaged), "")

    def prepare(self) -> None:
        for _, module in self._wrapped:
            fix_buckets(module)
            self._views += bucket_views(module)

    def _state(self, of_optimizers: Sequence[list[StateTensor]], values: Mapping[str, Tree]) -> AdapterState:
        state = super()._state(of_optimizers, values)
        are_views = [_is_view(parameter.grad, view) for parameter, view in self._views]
        return replace(state, values={**cast("dict[str, Tree]", state.values), "bucket_views": bytes(are_views)})

    @torch.no_grad()
    def load(self, tensors: SavedTensors, values: Tree) -> None:
        super().load(tensors, values)
        # Values of a launch with another kind of training have no views.
        are_views = cast("dict[str, bytes]", values).get("bucket_views", b"")
        for (parameter, view), is_view in zip(self._views, are_views, strict=False):
            if is_view and parameter.grad is not None:
                parameter.grad = view.copy_(parameter.grad)


def _check(name: str, model: DistributedDataParallel) -> None:
    # Reject a static graph over three or more ranks. `fix_buckets` cannot fix its bucket layout, so the first step
    # after a restore would sum the gradients of the ranks in a different order. With two ranks, both orders give the
    # same sum.
    group = model.process_group
    if model.static_graph and group is not None and group.size() > 2:
        raise CannotResume(
            name,
            "DDP with static_graph=True over three or more ranks does not restore bit-identically; omit static_graph",
        )
    for _, state in model._comm_hooks:
        if state is not None and not isinstance(state, ProcessGroup):
            raise CannotResume(
                name,
                f"a DDP communication hook has its own state ({qualified_name(type(state))}); Everstep does not know "
                "whether it restores bit-identically",
            )


def fix_buckets(model: DistributedDataParallel) -> None:
    """Make DDP rebuild its buckets now, before the first forward pass. Collective. All launches get the same layout,
    from artificial gradients in the reverse order of registration. Source: measurements with 3 and 4 ranks, in which
    only restarts with this call were bit-identical.
    """
    parameters = [p for p in model.module.parameters() if p.requires_grad]
    if not parameters or model.static_graph or model.find_unused_parameters:
        return  # With find_unused_parameters, DDP never rebuilds its buckets.
    gradients = [p.grad for p in parameters]
    _send_zeros(model, parameters)
    model.reducer._rebuild_buckets()
    _put_back(parameters, gradients)


def bucket_views(model: DistributedDataParallel) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Return each parameter with the view of its bucket that is its gradient. Collective, after `fix_buckets`. Empty
    without `gradient_as_bucket_view`, or with a static graph, which `fix_buckets` omits.
    """
    parameters = [p for p in model.module.parameters() if p.requires_grad]
    if not parameters or not model.gradient_as_bucket_view or model.static_graph:
        return []
    gradients = [p.grad for p in parameters]
    _put_back(parameters, [None] * len(parameters))
    _send_zeros(model, parameters)
    found = [(p, p.grad) for p in parameters if p.grad is not None]
    _put_back(parameters, gradients)
    return found


def _send_zeros(model: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter]) -> None:
    with torch.enable_grad():
        # Create this tensor on the parameters' device. Autograd runs one thread per device, so hooks on two devices
        # would run in no fixed order.
        end = torch.zeros((), device=parameters[0].device, requires_grad=True)
        for parameter in parameters:
            end = _Arrive.apply(end, parameter)  # type: ignore[no-untyped-call]
        model.reducer.prepare_for_backward([end] if model.find_unused_parameters else [])
        end.backward()  # type: ignore[no-untyped-call]


def _is_view(gradient: torch.Tensor | None, view: torch.Tensor) -> bool:
    return gradient is not None and not gradient.is_sparse and gradient.is_set_to(view)


def _put_back(parameters: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


class _Arrive(torch.autograd.Function):
    """Gives a parameter a zero gradient. A chain of them determines in which order gradients arrive."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, number: torch.Tensor, parameter: torch.Tensor
    ) -> torch.Tensor:
        ctx.parameter = parameter.detach()  # type: ignore[attr-defined]
        return number.clone()

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return gradients[0], torch.zeros_like(ctx.parameter)  # type: ignore[attr-defined]
