"""Tests many kinds of training loops. A loop that is resumed after any step must end bit for bit like the original."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from everstep.training import rng
from everstep.training.adapters.fsdp import FSDPAdapter
from everstep.training.adapters.plain import GRADIENT_BOUNDARIES, PlainAdapter
from everstep.training.errors import CannotResume
from everstep.training.registration import _adapters
from everstep.training.script import Environment
from everstep.training.state import RankState
from tests.unit.training.saved import carry

STEPS = 6


class Loop:
    """A training loop with a model of two modules. The module `unused` has a gradient in odd steps only."""

    def __init__(self, optimizers: Callable[[Loop], dict[str, torch.optim.Optimizer]]) -> None:
        torch.manual_seed(3)
        self.model: Any = nn.ModuleDict(
            {"used": nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), "unused": nn.Linear(3, 3)}
        )
        self.optimizers = optimizers(self)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        adapters = _adapters({"": self.model}, self.optimizers, {}, ())
        self.state = RankState(adapters, {"scaler": self.scaler}, {}, Environment.read({}))
        self.number = 0

    @property
    def optimizer(self) -> Any:
        return next(iter(self.optimizers.values()))

    def loss(self) -> torch.Tensor:
        inputs = torch.randn(2, 3, generator=torch.Generator().manual_seed(self.number))
        outputs = self.model["used"](inputs)
        return (self.model["unused"](outputs) if self.number % 2 else outputs).square().mean()

    def run(self, step: Callable[[Loop], None], until: int) -> Loop:
        while self.number < until:
            step(self)
            self.number += 1
            self.state.end_step()
        return self

    def result(self) -> dict[str, Any]:
        tensors = {item.name: item.tensor.detach().clone() for item in self.state.observe().tensors}
        weights = {name: tensor for name, tensor in tensors.items() if not name.startswith(("gradient/", "value/"))}
        return {**weights, "draw": torch.rand(3)}


def all_of(kind: type[torch.optim.Optimizer], **options: Any) -> Callable[[Loop], dict[str, torch.optim.Optimizer]]:
    return lambda loop: {"": kind(loop.model.parameters(), lr=0.1, **options)}  # type: ignore[call-arg]


def of_used(loop: Loop) -> dict[str, torch.optim.Optimizer]:
    return {"": torch.optim.AdamW(loop.model["used"].parameters(), lr=0.1)}


def one_each(loop: Loop) -> dict[str, torch.optim.Optimizer]:
    parts = loop.model.items()
    return {name: torch.optim.AdamW(part.parameters(), lr=0.1) for name, part in parts}


def one_per_parameter(loop: Loop) -> dict[str, torch.optim.Optimizer]:
    optimizers = {name: torch.optim.AdamW([parameter], lr=0.1) for name, parameter in loop.model.named_parameters()}

    def step_of(optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
        def step(parameter: torch.Tensor) -> None:
            optimizer.step()
            parameter.grad = None

        return step

    for name, parameter in loop.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(step_of(optimizers[name]))
    return optimizers


def ordinary(loop: Loop, set_to_none: bool = True) -> None:
    loop.optimizer.zero_grad(set_to_none=set_to_none)
    loop.loss().backward()
    loop.optimizer.step()


def cleared_behind(loop: Loop, set_to_none: bool = True) -> None:
    loop.loss().backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=set_to_none)


def cleared_by_the_model(loop: Loop) -> None:
    loop.loss().backward()
    loop.optimizer.step()
    loop.model.zero_grad(set_to_none=False)


def delayed(loop: Loop, set_to_none: bool = True) -> None:
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=set_to_none)
    loop.loss().backward()


def delayed_cleared_by_hand(loop: Loop) -> None:
    loop.optimizer.step()
    for parameter in loop.model.parameters():
        parameter.grad = None
    loop.loss().backward()


def changed_behind(loop: Loop) -> None:
    """Run a step that keeps half of each gradient for the next step."""
    loop.loss().backward()
    loop.optimizer.step()
    for parameter in loop.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def accumulated(loop: Loop) -> None:
    loop.loss().backward()
    if loop.number % 3 == 2:
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def accumulated_within(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    for _ in range(3):
        loop.loss().backward()
    loop.optimizer.step()


def two_optimizers(loop: Loop) -> None:
    """Run a step of a loop in which the second optimizer steps every third time."""
    loop.loss().backward()
    used, unused = loop.optimizers.values()
    used.step()
    used.zero_grad()
    if loop.number % 3 == 1:
        unused.step()
        unused.zero_grad()


def alternately_frozen(loop: Loop) -> None:
    """Run a step that freezes one part of the model and trains the other. The gradients of both parts are kept."""
    for number, part in enumerate(loop.model.values()):
        part.requires_grad_(loop.number % 2 == number or loop.number % 2 == 1)
    loop.loss().backward()
    if loop.number % 2:
        for optimizer in loop.optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        loop.model["unused"].requires_grad_(False)


def by_closure(loop: Loop) -> None:
    drawn = rng.observe()

    def closure() -> torch.Tensor:
        rng.restore(drawn)
        loop.optimizer.zero_grad()
        loss = loop.loss()
        loss.backward()
        return loss

    loop.optimizer.step(closure)


def clipped_with_ownerless(loop: Loop) -> None:
    """Run a step that also clips the gradients of parameters without an optimizer, and never clears these gradients."""
    loop.optimizer.zero_grad()
    loop.loss().backward()
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
    loop.optimizer.step()


def ownerless_by_hand(loop: Loop) -> None:
    """Run a step of a loop that updates some parameters without an optimizer, from gradients of several steps."""
    loop.optimizer.zero_grad()
    loop.loss().backward()
    loop.optimizer.step()
    if loop.number % 3 == 2:
        with torch.no_grad():
            for parameter in loop.model["unused"].parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None


def scaled(loop: Loop) -> None:
    """Run a step of a loop whose gradient scaler skips one step."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    if loop.number == 2:
        loop.model["used"][0].weight.grad.fill_(float("inf"))
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()


def in_backward(loop: Loop) -> None:
    loop.loss().backward()


ADAM, SGD = all_of(torch.optim.AdamW), all_of(torch.optim.SGD, momentum=0.9)

SHAPES: dict[str, tuple[Callable[[Loop], None], Callable[[Loop], dict[str, torch.optim.Optimizer]]]] = {
    "ordinary": (ordinary, ADAM),
    "ordinary, zeros": (lambda loop: ordinary(loop, set_to_none=False), ADAM),
    "cleared behind the step": (cleared_behind, ADAM),
    "cleared behind the step, zeros": (lambda loop: cleared_behind(loop, set_to_none=False), ADAM),
    "cleared by the model, zeros": (cleared_by_the_model, ADAM),
    "delayed": (delayed, ADAM),
    "delayed, zeros": (lambda loop: delayed(loop, set_to_none=False), ADAM),
    "delayed, cleared by hand": (delayed_cleared_by_hand, SGD),
    "changed behind the step": (changed_behind, SGD),
    "accumulated across boundaries": (accumulated, ADAM),
    "accumulated within a step": (accumulated_within, ADAM),
    "two optimizers": (two_optimizers, one_each),
    "alternately frozen": (alternately_frozen, one_each),
    "by closure": (by_closure, all_of(torch.optim.LBFGS, max_iter=3)),
    "clipped with parameters that have no optimizer": (clipped_with_ownerless, of_used),
    "parameters without an optimizer stepped by hand": (ownerless_by_hand, of_used),
    "scaled, one step skipped": (scaled, ADAM),
    "steps inside backward": (in_backward, one_per_parameter),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_loop_that_is_resumed_behind_any_boundary_ends_where_the_undisturbed_loop_ends(name: str) -> None:
    step, optimizers = SHAPES[name]
    undisturbed = Loop(optimizers).run(step, STEPS).result()
    source = Loop(optimizers)
    for boundary in range(1, STEPS):
        source.run(step, boundary)
        drawn = rng.observe()
        resumed = Loop(optimizers)
        rng.restore(drawn)  # reset the generators, because a new process has new ones
        carry(source.state, resumed.state)
        resumed.number = boundary
        check_equal(resumed.run(step, STEPS).result(), undisturbed, f"resumed behind boundary {boundary}")
        rng.restore(drawn)
    check_equal(source.run(step, STEPS).result(), undisturbed, "observed at every boundary")


def check_equal(one: dict[str, Any], other: dict[str, Any], what: str) -> None:
    assert one.keys() == other.keys(), what
    assert [name for name in one if not torch.equal(one[name], other[name])] == [], what


ORDINARY = ("ordinary", "cleared behind the step", "cleared behind the step, zeros", "steps inside backward")


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_loop_keeps_no_gradients(name: str) -> None:
    step, optimizers = SHAPES[name]
    loop = Loop(optimizers)
    for number in range(1, STEPS):
        loop.run(step, number)
        assert not [item.name for item in loop.state.observe().tensors if item.name.startswith("gradient/")]


def test_a_gradient_that_replaces_a_used_one_is_state() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    adapter = PlainAdapter({"": nn.ParameterDict({"weight": weight})}, {"": optimizer})
    for replaced in (False, True):
        weight.grad = torch.ones(2)
        optimizer.step()
        if replaced:
            # the new gradient is another tensor with the same version number, so its version does not show the change
            weight.grad = torch.full((2,), 3.0)
        adapter.end_step()
        assert ("gradient/weight" in [item.name for item in adapter.observe().tensors]) == replaced


def test_gradients_of_a_step_are_freed_when_the_script_frees_them() -> None:
    """The adapter keeps no gradient in memory after the script has freed it.

    In the test, the optimizer steps inside backward, so that it never needs all gradients at the same time.
    """
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    PlainAdapter({"": nn.ParameterDict({"weight": weight})}, {"": optimizer})
    weight.grad = torch.ones(2)
    storage = torch.multiprocessing.reductions.StorageWeakRef(weight.grad.untyped_storage())
    optimizer.step()
    weight.grad = None
    assert storage.expired()


@pytest.fixture
def sharded() -> Iterator[nn.Sequential]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    yield model
    dist.destroy_process_group()


def test_gradients_that_fully_shard_has_not_summed_yet_are_refused_at_a_boundary(sharded: Any) -> None:
    adapter = FSDPAdapter({"": sharded}, {"": torch.optim.SGD(sharded.parameters(), lr=0.1)})
    for is_summed in (True, False, False, True):
        sharded.set_requires_gradient_sync(is_summed)
        sharded(torch.ones(2, 4)).sum().backward()
        adapter.end_step()
        adapter.observe()
        if is_summed:
            adapter.check()
        else:
            with pytest.raises(CannotResume, match=r"^model/0: gradients are accumulated .* use accumulate="):
                adapter.check()


@pytest.mark.parametrize("name", ["delayed", "delayed, cleared by hand", "accumulated across boundaries"])
def test_gradients_that_are_needed_for_long_keep_their_place(name: str) -> None:
    step, optimizers = SHAPES[name]
    loop = Loop(optimizers)
    for number in range(1, 3 * GRADIENT_BOUNDARIES):
        loop.run(step, number)
        assert [item.name for item in loop.state.observe().tensors if item.name.startswith("gradient/")]
