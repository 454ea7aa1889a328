"""Small training scripts, each with one kind of state, and what Everstep does about this state.

    right      a killed script resumes bit-identically
    refused    no snapshot is captured, or `init` raises; the message names the object
    found      a rehearsal differs and names the variable

`test_resume_scenarios.py` checks each script.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler, swa_utils
from torch.utils import data as torch_data

import everstep.training
from tests.integration.training import replayed
from tests.integration.training.faults import reach
from tests.integration.training.scripts import digest

WIDTH, SAMPLES, BATCH = 16, 48, 8
"""An epoch has six batches."""


class Kind(StrEnum):
    """What Everstep does about a scenario's state."""

    RIGHT = "right"
    REFUSED = "refused"
    FOUND = "found"


@dataclass
class Job:
    """A script: its objects, and one step of training."""

    model: nn.Module = field(default_factory=lambda: network())
    optimizer: Any = None
    """An optimizer, a dictionary of optimizers, or None for AdamW."""
    data: Any = None
    """A loader, a dictionary of loaders, or None for a shuffled one."""
    registered: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `init`."""
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    step: Callable[[Any, Any], torch.Tensor] | None = None
    """A whole step, given the batch and the session; None for `loss`, backward, update and `after`."""
    after: Callable[[int], object] | None = None
    """Called after each update with the number of finished steps."""
    kept: Callable[[], Mapping[str, Any]] = dict
    """Returns tensors that the resumed script must have, besides the registered state."""
    accumulate: int = 1

    def __post_init__(self) -> None:
        self.optimizer = self.optimizer or optim.AdamW(self.model.parameters(), lr=0.01)
        self.data = loader_of() if self.data is None else self.data
        self.count = 0

    def train(self, batch: Any, session: Any) -> torch.Tensor:
        if self.step is not None:
            return self.step(batch, session)
        inputs, targets = batch
        loss = self.loss(inputs, targets) if self.loss else F.mse_loss(self.model(inputs), targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.after is not None:
            self.after(session.step)
        return loss.detach()


@dataclass(frozen=True)
class Scenario:
    """A script with what Everstep must do."""

    kind: Kind
    build: Callable[[], Job]
    told: str = ""
    """A part of the refusal, or of a variable's name that the rehearsal must report."""
    world: int = 1
    is_free: bool = False
    """True if the test cannot plan which step is captured, or which steps the ranks have finished at the kill.

    A snapshot can be abandoned when a tensor first changes outside of an optimizer's step. Ranks that do not wait for
    each other in each step can be some steps apart.
    """


SCENARIOS: dict[str, Scenario] = {}


def scenario(kind: Kind, told: str = "", *, is_free: bool = False) -> Callable[[Callable[[], Job]], Callable[[], Job]]:
    def add(build: Callable[[], Job]) -> Callable[[], Job]:
        SCENARIOS[build.__name__] = Scenario(kind, build, told, is_free=is_free)
        return build

    return add


right = scenario(Kind.RIGHT)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 1))


class Numbers(torch_data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random samples. `change` alters the inputs of a sample when it is read."""

    def __init__(self, count: int = SAMPLES, change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs, self.targets = (torch.randn(count, width, generator=generator) for width in (WIDTH, 1))
        self.change = change

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.change(self.inputs[index]), self.targets[index]


def noisy(inputs: torch.Tensor) -> torch.Tensor:
    return inputs + 0.1 * torch.randn(WIDTH) + float(np.random.rand()) + random.random()


def loader_of(dataset: Any = None, *, sampler: Any = None, **options: Any) -> torch_data.DataLoader[Any]:
    dataset = Numbers() if dataset is None else dataset
    is_shuffled = sampler is None and not isinstance(dataset, torch_data.IterableDataset)
    options = {"batch_size": BATCH, "shuffle": is_shuffled, **options}
    return torch_data.DataLoader(dataset, sampler=sampler, **options)


# -- optimizers and schedulers

OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "adamw_amsgrad": lambda model: optim.AdamW(model.parameters(), amsgrad=True),
    "adam_fused": lambda model: optim.Adam(model.parameters(), fused=True),
    "adam_foreach": lambda model: optim.Adam(model.parameters(), foreach=True),
    "adamw_tensor_rate": lambda model: optim.AdamW(model.parameters(), lr=torch.tensor(1e-2)),
    "adamax": lambda model: optim.Adamax(model.parameters()),
    "adafactor": lambda model: optim.Adafactor(model.parameters()),
    "asgd": lambda model: optim.ASGD(model.parameters(), t0=3),
    "rprop": lambda model: optim.Rprop(model.parameters()),
    "rmsprop_centered": lambda model: optim.RMSprop(model.parameters(), centered=True, momentum=0.9),
    "muon": lambda model: optim.Muon([each for each in model.parameters() if each.ndim == 2]),
    "sgd_nesterov": lambda model: optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True),
    "sgd_maximize": lambda model: optim.SGD(model.parameters(), lr=0.01, maximize=True, weight_decay=0.1),
}
SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=500),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, 0.01, 0.1, step_size_up=3, cycle_momentum=False, scale_fn=lambda x: 1 / (2 ** (x - 1))
    ),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.1, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.1, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "multiplicative": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.95),
    "warm_restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3, 2),
}


def with_optimizer(maker: Callable[[nn.Module], optim.Optimizer], *, is_trusted: bool = False) -> Job:
    optimizer = maker(model := network())
    return Job(model, optimizer, registered={"trusted_optimizers": (type(optimizer),)} if is_trusted else {})


def with_scheduler(name: str) -> Job:
    model = network()
    rate = torch.tensor(0.1) if name in ("cyclic", "multiplicative") else 0.1
    optimizer = optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99))
    scheduler = SCHEDULERS[name](optimizer)
    return Job(model, optimizer, registered={"scheduler": scheduler}, after=lambda _: scheduler.step())


SCENARIOS |= {
    f"optimizer_{name}": Scenario(Kind.RIGHT, partial(with_optimizer, OPTIMIZERS[name])) for name in OPTIMIZERS
}
SCENARIOS |= {f"scheduler_{name}": Scenario(Kind.RIGHT, partial(with_scheduler, name)) for name in SCHEDULERS}


@right
def plateau_scheduler() -> Job:
    optimizer = optim.SGD((model := network()).parameters(), lr=0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found = F.mse_loss(model(inputs), targets)
        losses.append(found.item())
        return found

    losses: list[float] = []
    return Job(
        model, optimizer, registered={"scheduler": scheduler}, loss=loss, after=lambda _: scheduler.step(losses.pop())
    )


@right
def rate_by_hand() -> Job:
    optimizer = optim.AdamW((model := network()).parameters(), lr=0.1)

    def after(_: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    return Job(model, optimizer, after=after)


@right
def shared_tensor_rate() -> Job:
    model, rate = network(), torch.tensor(0.05)
    groups = [{"params": model[0].parameters()}, {"params": model[3].parameters()}]
    return Job(model, optim.AdamW(groups, lr=rate), after=lambda _: rate.mul_(0.9))


@right
def lbfgs() -> Job:
    model = nn.Linear(WIDTH, 1)
    optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=3, line_search_fn="strong_wolfe")

    def step(batch: Any, _: Any) -> torch.Tensor:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(batch[0]), batch[1])
            loss.backward()
            return loss

        return torch.as_tensor(float(optimizer.step(closure)))

    return Job(model, optimizer, step=step)


@right
def two_optimizers_in_turn() -> Job:
    model = network()
    optimizers = {
        "first": optim.AdamW(model.parameters(), lr=0.01),
        "second": optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    }

    def step(batch: Any, session: Any) -> torch.Tensor:
        optimizer = optimizers["first" if session.step < 10 else "second"]
        loss = F.mse_loss(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Job(model, optimizers, step=step)


@right
def gradient_scaler() -> Job:
    optimizer = optim.AdamW((model := network()).parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)

    def step(batch: Any, _: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(batch[0]), batch[1])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Job(model, optimizer, registered={"extra": {"scaler": scaler}}, step=step)


class Soap(optim.Optimizer):
    """An optimizer whose states are not shaped like the parameters, and not contiguous."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.ndim == 2:
                state = self.state[parameter]
                if not state:
                    state |= {"left": torch.eye(len(parameter)), "basis": torch.eye(len(parameter))}
                state["left"].lerp_(parameter.grad @ parameter.grad.T, 0.1)
                state["basis"] = torch.linalg.qr(state["left"] @ state["basis"])[0]
                parameter.sub_(0.1 * (state["basis"] @ (state["basis"].T @ parameter.grad).tanh()))


class Momenta(optim.Optimizer):
    """An optimizer that keeps a list of gradients for each parameter."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            history = self.state[parameter].setdefault("history", [])
            history.append(parameter.grad.clone())
            self.state[parameter]["history"] = history[-3:]
            parameter.sub_(0.01 * sum(history[-3:]))


class Flat(optim.Optimizer):
    """An optimizer whose states are views of one tensor."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})
        own = self.param_groups[0]["params"]
        self.flat, begin = torch.zeros(sum(each.numel() for each in own)), 0
        for parameter in own:
            self.state[parameter]["momentum"] = self.flat[begin : begin + parameter.numel()].view_as(parameter)
            begin += parameter.numel()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum"].mul_(0.9).add_(parameter.grad)
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.1 * self.state[parameter]["momentum"] / (self.flat.norm() + 1))


for _trusted in (Soap, Momenta, Flat):
    SCENARIOS[f"optimizer_{_trusted.__name__.lower()}"] = Scenario(
        Kind.RIGHT, partial(with_optimizer, lambda model, kind=_trusted: kind(model.parameters()), is_trusted=True)
    )


# -- gradients


def accumulated(parts: int, *, is_one_step: bool) -> Job:
    optimizer = optim.AdamW((model := network()).parameters(), lr=0.01)
    count = itertools.count(1)

    def step(batch: Any, session: Any) -> torch.Tensor:
        loss = F.mse_loss(model(batch[0]), batch[1]) / parts
        loss.backward()
        if (next(count) if is_one_step else session.step) % parts == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return Job(model, optimizer, step=step, accumulate=parts if is_one_step else 1)


SCENARIOS["accumulated_gradients"] = Scenario(Kind.RIGHT, partial(accumulated, 3, is_one_step=True))
SCENARIOS["gradients_across_steps"] = Scenario(Kind.RIGHT, partial(accumulated, 3, is_one_step=False))


def decayed(*, before: float, after: float) -> Job:
    optimizer = optim.SGD((model := network()).parameters(), lr=0.001)

    def step(batch: Any, _: Any) -> torch.Tensor:
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        torch._foreach_mul_(gradients, before) if gradients else None
        loss = F.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        torch._foreach_mul_([each.grad for each in model.parameters() if each.grad is not None], after)
        return loss.detach()

    return Job(model, optimizer, step=step)


SCENARIOS["gradients_never_cleared"] = Scenario(Kind.RIGHT, partial(decayed, before=1.0, after=1.0))
SCENARIOS["gradients_decayed_before_backward"] = Scenario(Kind.RIGHT, partial(decayed, before=0.5, after=1.0))
SCENARIOS["gradients_decayed_after_the_update"] = Scenario(Kind.RIGHT, partial(decayed, before=1.0, after=0.5))


def sharpness_aware(*, has_fence: bool) -> Job:
    optimizer = optim.SGD((model := network()).parameters(), lr=0.01, momentum=0.9)

    def step(batch: Any, session: Any) -> torch.Tensor:
        loss = F.mse_loss(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        if has_fence:
            session.fence()
        own = [*model.parameters()]
        moves = [0.05 * each.grad for each in own if each.grad is not None]
        with torch.no_grad():
            torch._foreach_add_(own, moves)
        optimizer.zero_grad()
        F.mse_loss(model(batch[0]), batch[1]).backward()
        with torch.no_grad():
            torch._foreach_sub_(own, moves)
        optimizer.step()
        return loss.detach()

    return Job(model, optimizer, step=step)


SCENARIOS["sharpness_aware_with_a_fence"] = Scenario(Kind.RIGHT, partial(sharpness_aware, has_fence=True))
SCENARIOS["sharpness_aware"] = Scenario(Kind.RIGHT, partial(sharpness_aware, has_fence=False), is_free=True)


@scenario(Kind.RIGHT, is_free=True)
def update_by_hand() -> Job:
    model = network()

    def step(batch: Any, _: Any) -> torch.Tensor:
        loss = F.mse_loss(model(batch[0]), batch[1])
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.01 * parameter.grad)
        return loss.detach()

    return Job(model, "none", step=step)


# -- modules


class Wrapped(nn.Module):
    """A linear layer with something before it."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)
        self.change = change

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(self.change(inputs))


class Noise(Wrapped):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs + 0.1 * torch.randn(inputs.shape, generator=self.generator))


class Recurrent(nn.Module):
    """Keeps its hidden state in an attribute or a buffer."""

    def __init__(self, *, is_buffer: bool) -> None:
        super().__init__()
        self.cell, self.linear = nn.GRUCell(WIDTH, 8), nn.Linear(8, 1)
        self.hidden: torch.Tensor | None
        if is_buffer:
            self.register_buffer("hidden", None, persistent=False)
        else:
            self.hidden = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.cell(inputs, torch.zeros(len(inputs), 8) if self.hidden is None else self.hidden)
        self.hidden = hidden.detach()
        return self.linear(hidden)


class Experts(nn.Module):
    """Uses a random one of its layers, so others have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers[int(torch.randint(0, 6, ()))](inputs)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.second.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(torch.tanh(self.first(inputs))))


class Views(nn.Module):
    """Parameters and buffers that are complex, scalar, transposed, views, or of small types."""

    def __init__(self) -> None:
        super().__init__()
        self.complex = nn.Parameter(torch.randn(WIDTH, 4, dtype=torch.cfloat))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.transposed = nn.Parameter(torch.randn(4, WIDTH).t())
        self.strided = nn.Parameter(torch.randn(8, WIDTH)[::2].t())
        self.register_buffer("integers", torch.zeros(3, dtype=torch.int8))
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("whole", torch.arange(12.0).view(3, 4).t())
        self.register_buffer("part", self.whole[1:3])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.integers += 1
        self.flags ^= True
        self.part.mul_(1.01)
        parts = (inputs.cfloat() @ self.complex).abs() * self.scalar, inputs @ self.transposed, inputs @ self.strided
        return sum(each.sum(1, keepdim=True) for each in parts) * self.whole.mean()  # type: ignore[return-value]


class SharedBuffers(nn.Module):
    """Two buffers with one tensor, until the module replaces one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)
        self.register_buffer("first", shared := torch.zeros(4))
        self.register_buffer("second", shared)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.first.add_(1.0)
        if self.first[0] > 4:
            self.second = self.second * 2 + 1
        return self.linear(inputs) + self.second.mean() * 0.01


class BufferOfParameter(nn.Module):
    """A buffer that is a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)
        self.register_buffer("view", self.linear.weight.detach()[0, :4])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) + self.view.sum()


class Normed(nn.Module):
    """An embedding that rescales its rows when they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(20, WIDTH, max_norm=0.5), nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embedding(torch.randint(0, 20, (len(inputs),))) + inputs)


def quantized() -> nn.Module:
    from torch.ao import quantization

    layers = (quantization.QuantStub(), nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, 1), quantization.DeQuantStub())
    model = nn.Sequential(*layers)
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(model.train(), inplace=True)


def reparametrized() -> nn.Module:
    of = nn.utils.parametrizations
    return nn.Sequential(
        *(of.weight_norm(nn.Linear(WIDTH, 24)), nn.ReLU(), of.spectral_norm(nn.Linear(24, 8))),
        *(of.orthogonal(nn.Linear(8, 8)), nn.Linear(8, 1)),
    )


def renormed() -> nn.Module:
    of = nn.utils
    return nn.Sequential(
        of.weight_norm(nn.Linear(WIDTH, 24)), nn.ReLU(), of.spectral_norm(nn.Linear(24, 8)), nn.Linear(8, 1)
    )


def pruned() -> nn.Module:
    from torch.nn.utils import prune

    prune.random_unstructured((model := network())[0], "weight", amount=0.5)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "noise_with_its_generator": Noise,
    "hidden_state_in_an_attribute": partial(Recurrent, is_buffer=False),
    "hidden_state_in_a_buffer": partial(Recurrent, is_buffer=True),
    "experts": Experts,
    "tied_weights": Tied,
    "views": Views,
    "shared_buffers": SharedBuffers,
    "buffer_of_a_parameter": BufferOfParameter,
    "max_norm": Normed,
    "quantized": quantized,
    "reparametrized": reparametrized,
    "renormed": renormed,
    "pruned": pruned,
}
SCENARIOS |= {
    f"model_{name}": Scenario(Kind.RIGHT, lambda maker=maker: Job(maker()), is_free=maker is Normed)
    for name, maker in MODELS.items()
}


def sparse(maker: Callable[[Any], optim.Optimizer], *, sets_none: bool) -> Job:
    embedding = nn.Embedding(20, WIDTH, sparse=True)
    optimizer = maker(embedding.parameters())

    def step(batch: Any, _: Any) -> torch.Tensor:
        loss = (embedding(torch.randint(0, 20, (len(batch[0]),))) - batch[0]).pow(2).mean()
        optimizer.zero_grad(set_to_none=sets_none)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Job(embedding, optimizer, step=step)


SCENARIOS["sparse_adam"] = Scenario(Kind.RIGHT, partial(sparse, optim.SparseAdam, sets_none=False))
SCENARIOS["sparse_adagrad"] = Scenario(Kind.RIGHT, partial(sparse, optim.Adagrad, sets_none=True))


@right
def dropout_rate_that_grows() -> Job:
    model = network()

    def after(_: int) -> None:
        model[2].p = min(0.9, model[2].p + 0.02)

    return Job(model, after=after)


@right
def momentum_of_batch_norm_changes() -> Job:
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 1))
    return Job(model, after=lambda step: setattr(model[1], "momentum", 0.3) if step == 5 else None)


@right
def layers_frozen_for_a_while() -> Job:
    model = network()

    def after(step: int) -> None:
        if step in (3, 10):
            model[0].requires_grad_(step == 10)
            model[0].zero_grad()

    return Job(model, after=after)


@scenario(Kind.RIGHT, is_free=True)
def momentum_encoder() -> Job:
    model = nn.ModuleDict({"query": network(), "key": network().requires_grad_(False)})

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for key, query in zip(model["key"].parameters(), model["query"].parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1
        found = model["query"](inputs)
        return F.mse_loss(found, model["key"](inputs)) + F.mse_loss(found, targets)

    return Job(model, optim.AdamW(model["query"].parameters(), lr=0.05), loss=loss)


class WithTarget(nn.Module):
    """A network and its target network."""

    def __init__(self) -> None:
        super().__init__()
        self.own = network()
        self.target = copy.deepcopy(self.own).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.own(inputs) + 0.1 * self.target(inputs)


def with_target(renew: Callable[[WithTarget], None]) -> Job:
    model = WithTarget()
    optimizer = optim.AdamW(model.own.parameters(), lr=0.05)
    return Job(model, optimizer, after=lambda step: renew(model) if step % 2 == 0 else None)


def replace_target(model: WithTarget) -> None:
    model.target = copy.deepcopy(model.own).requires_grad_(False)


def assign_target(model: WithTarget) -> None:
    state = {name: tensor.clone() for name, tensor in model.own.state_dict().items()}
    model.target.load_state_dict(state, assign=True)
    model.target.requires_grad_(False)


SCENARIOS["target_network_is_replaced"] = Scenario(Kind.RIGHT, partial(with_target, replace_target))
SCENARIOS["target_network_is_assigned"] = Scenario(Kind.RIGHT, partial(with_target, assign_target))


@right
def frozen_parameter_is_replaced() -> Job:
    model = Wrapped()
    model.scale = nn.Parameter(torch.ones(1), requires_grad=False)
    model.change = lambda inputs: inputs * model.scale

    def after(_: int) -> None:
        model.scale = nn.Parameter(model.scale.detach() * 0.9, requires_grad=False)

    return Job(model, optim.AdamW(model.linear.parameters(), lr=0.05), after=after)


@scenario(Kind.REFUSED, "model/4: this module was added after init()")
def module_is_added() -> Job:
    optimizer = optim.AdamW((model := network()).parameters(), lr=0.01)

    def after(step: int) -> None:
        if step == 2:
            model.append(nn.Linear(1, 1))
            optimizer.add_param_group({"params": model[-1].parameters()})

    return Job(model, optimizer, after=after)


@scenario(Kind.REFUSED, "model/4: this module was added after init()")
def frozen_module_is_added() -> Job:
    model = network()
    return Job(model, after=lambda step: model.append(nn.Linear(1, 1).requires_grad_(False)) if step == 2 else None)


@scenario(Kind.REFUSED, "model/0.weight: this parameter was added, removed, or tied")
def pruning_becomes_permanent() -> Job:
    from torch.nn.utils import prune

    model: Any = pruned()
    return Job(model, after=lambda step: prune.remove(model[0], "weight") if step == 2 else None)


@scenario(Kind.REFUSED, "model/0.weight: this parameter has another shape or dtype")
def parameters_become_double() -> Job:
    model = network()

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(inputs.to(model[0].weight.dtype)), targets.to(model[0].weight.dtype))

    optimizer = optim.SGD(model.parameters(), lr=0.1)
    return Job(model, optimizer, loss=loss, after=lambda step: model.double() if step == 2 else None)


class Drawing(nn.Module):
    """Multiplies its inputs by numbers that a function draws."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * float(self.draw())


def drawing(draw: Callable[[], float]) -> Job:
    return Job(nn.Sequential(nn.Linear(WIDTH, 24), Drawing(draw), nn.Linear(24, 1)))


def of_closure() -> Callable[[], float]:
    generator = random.Random(3)
    return lambda: generator.random()


SCENARIOS["generator_in_a_closure_of_the_model"] = Scenario(Kind.RIGHT, lambda: drawing(of_closure()))
SCENARIOS["method_of_a_generator"] = Scenario(Kind.RIGHT, lambda: drawing(np.random.default_rng(3).random))


class OwnGenerator(nn.Module):
    """Multiplies its inputs by numbers of a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)
        self.generator = random.Random(0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) * self.generator.random()


@right
def generator_of_the_model_is_replaced() -> Job:
    model = OwnGenerator()
    return Job(model, after=lambda step: setattr(model, "generator", random.Random(step)) if step % 3 == 0 else None)


# -- data

Sampler = torch_data.Sampler[int]


class ShuffledInPlace(Sampler):
    """Shuffles its own list at each epoch."""

    def __init__(self) -> None:
        self.indexes = list(range(SAMPLES))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.indexes)
        return iter(self.indexes)

    def __len__(self) -> int:
        return len(self.indexes)


class OwnEpoch(Sampler):
    """Counts its epochs itself."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        return iter(torch.randperm(SAMPLES, generator=generator).tolist())

    def __len__(self) -> int:
        return SAMPLES


class CountsItsReads(Numbers):
    """Its samples depend on the number of earlier reads."""

    count = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.count += 1
        return self.inputs[index] * (1 + self.count / 1000), self.targets[index]


class Scale(nn.Module):
    """A transform with a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * torch.rand((), generator=self.generator)


class Deep:
    """A transform with a generator inside a list inside a dictionary."""

    def __init__(self) -> None:
        self.held = {"list": [{"generator": random.Random(3)}]}

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.held["list"][0]["generator"].random()


class OfClass(Numbers):
    """A dataset whose generator is an attribute of its class."""

    generator = np.random.default_rng(5)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index] * self.generator.random(), self.targets[index]


def scaled(generator: Any, factor: float, inputs: torch.Tensor) -> torch.Tensor:
    return inputs * factor * float(generator.random())


def times(draw: Callable[[], float], inputs: torch.Tensor) -> torch.Tensor:
    return inputs * draw()


def nested() -> torch_data.Dataset[Any]:
    parts = [Numbers(16, partial(scaled, np.random.default_rng(seed), 1.0)) for seed in range(3)]
    inner = torch_data.ConcatDataset(parts[:2])
    return torch_data.ConcatDataset([torch_data.Subset(inner, range(30)), parts[2]])


class Stream(torch_data.IterableDataset[Any]):
    """Draws its samples."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = np.random.default_rng(0)
        for _ in range(40):
            yield torch.randn(WIDTH) + float(generator.normal()), torch.randn(1)


class OwnPosition:
    """A loader with a state of its own, whose `__iter__` starts at the first batch."""

    def __init__(self) -> None:
        self.position = 0
        self.loader = loader_of()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def __iter__(self) -> Iterator[Any]:
        skipped, self.position = self.position, 0
        for batch in self.loader:
            self.position += 1
            if self.position > skipped:
                yield batch
        self.position = 0


def of_nodes() -> Any:
    import torchdata.nodes as tn

    dataset = Numbers()
    sampler = torch_data.RandomSampler(dataset, generator=torch.Generator().manual_seed(2))
    samples = tn.ParallelMapper(tn.SamplerWrapper(sampler), dataset.__getitem__, num_workers=2, method="thread")
    batches = tn.Mapper(tn.Batcher(samples, batch_size=BATCH), torch_data.default_collate)
    return tn.Loader(tn.Prefetcher(batches, prefetch_factor=2))


LOADERS: dict[str, Callable[[], Any]] = {
    "own_position": OwnPosition,
    "torchdata_nodes": of_nodes,
    "shuffled_in_place": lambda: loader_of(sampler=ShuffledInPlace()),
    "sampler_with_its_epoch": lambda: loader_of(sampler=OwnEpoch()),
    "dataset_counts_its_reads": lambda: loader_of(CountsItsReads()),
    "weights_and_workers": lambda: loader_of(
        Numbers(change=noisy),
        sampler=torch_data.WeightedRandomSampler(torch.rand(SAMPLES).tolist(), 30),
        num_workers=2,
        persistent_workers=True,
    ),
    "generator_and_a_worker": lambda: loader_of(Numbers(24), generator=torch.Generator().manual_seed(7), num_workers=1),
    "iterable_with_workers": lambda: loader_of(Stream(), num_workers=2),
    "deep_generator": lambda: loader_of(Numbers(change=Deep())),
    "generator_of_a_class": lambda: loader_of(OfClass()),
    "generator_of_a_transform": lambda: loader_of(Numbers(change=nn.Sequential(Scale()))),
    "generators_of_nested_datasets": lambda: loader_of(nested()),
    "method_of_a_python_generator": lambda: loader_of(Numbers(change=partial(times, random.Random(4).random))),
    "generator_in_a_partial": lambda: loader_of(Numbers(change=partial(scaled, np.random.RandomState(4), 2.0))),
}
SCENARIOS |= {
    f"loader_{name}": Scenario(Kind.RIGHT, lambda maker=maker: Job(data=maker())) for name, maker in LOADERS.items()
}


@right
def two_loaders() -> Job:
    model = network()

    def step(batch: Any, _: Any) -> torch.Tensor:
        loss = sum(F.mse_loss(model(inputs), targets) for inputs, targets in batch.values())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
        return loss.detach()  # type: ignore[union-attr]

    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    other = loader_of(Numbers(24, noisy), batch_size=4, num_workers=1)
    return Job(model, optimizer, {"first": loader_of(Numbers(40)), "second": other}, step=step)


class Curriculum(Sampler):
    """Yields more samples in later epochs, as the script decides."""

    def __init__(self) -> None:
        self.count = 24  # Step 8, which is captured, is the second of three steps of its epoch.

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.count).tolist())

    def __len__(self) -> int:
        return self.count


@right
def sampler_changes_for_the_next_epoch() -> Job:
    sampler = Curriculum()
    return Job(data=loader_of(sampler=sampler), after=lambda step: setattr(sampler, "count", 40) if step == 8 else None)


@scenario(Kind.REFUSED, "data: the dataset has ")
def dataset_grows_within_an_epoch() -> Job:
    dataset = Numbers()

    def after(_: int) -> None:
        dataset.inputs = torch.cat([dataset.inputs, dataset.inputs[:1]])
        dataset.targets = torch.cat([dataset.targets, dataset.targets[:1]])

    return Job(data=loader_of(dataset), after=after)


@scenario(Kind.REFUSED, "numpy SeedSequence")
def spawned_seeds() -> Job:
    seeds = np.random.SeedSequence(3)
    return Job(data=loader_of(Numbers(change=lambda x: x * np.random.default_rng(seeds.spawn(1)[0]).random())))


# -- objects that the script registers in `extra`


class Kept:
    """Returns its own tensor, and keeps the tensor that it is given."""

    def __init__(self, tensor: torch.Tensor | None = None) -> None:
        self.tensor: Any = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


@right
def registered_average() -> Job:
    model = network()
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    after = lambda _: average.update_parameters(model)  # noqa: E731
    return Job(model, registered={"extra": {"average": average}}, after=after, kept=average.state_dict)


@right
def averaged_weights_with_their_scheduler() -> Job:
    optimizer = optim.SGD((model := network()).parameters(), lr=0.1)
    average, scheduler = swa_utils.AveragedModel(model), swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=5)

    def after(step: int) -> None:
        if step > 3:
            average.update_parameters(model)
            scheduler.step()

    registered = {"scheduler": scheduler, "extra": {"average": average}}
    return Job(model, optimizer, registered=registered, after=after, kept=average.state_dict)


@right
def extra_that_is_changed_in_place() -> Job:
    model, extra = network(), Kept(torch.zeros(600))

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        extra.tensor.mul_(0.9).add_(inputs.mean())
        return F.mse_loss(model(inputs), targets) + extra.tensor[3] * model[0].weight.sum()

    return Job(model, registered={"extra": {"extra": extra}}, loss=loss, kept=extra.state_dict)


@scenario(Kind.FOUND, "extra")
def extra_of_live_parameters() -> Job:
    model, extra = network(), Kept()

    def after(step: int) -> None:
        if step == 1:
            extra.tensor = {name: parameter.detach() for name, parameter in model.named_parameters()}

    return Job(model, registered={"extra": {"extra": extra}}, after=after)


@right
def extra_that_is_not_contiguous() -> Job:
    model, extra = nn.Linear(64, 64), Kept(torch.linalg.qr(torch.randn(64, 64))[0])

    def loss(inputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return (model(inputs.repeat(1, 4)) @ extra.tensor).pow(2).mean()

    def after(_: int) -> None:
        extra.tensor = torch.linalg.qr(extra.tensor + 0.01 * model.weight.detach())[0]

    return Job(model, registered={"extra": {"extra": extra}}, loss=loss, after=after)


# -- state that `init` cannot see


class Noisy(Numbers):
    """Adds noise from a generator that `set_epoch` seeds, or that the dataset replaces."""

    def __init__(self, *, is_replaced: bool, every: int = 0) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(1)
        self.is_replaced, self.every, self.read_count = is_replaced, every, 0

    def set_epoch(self, epoch: int) -> None:
        if self.is_replaced:
            self.noise = torch.Generator().manual_seed(epoch + 7)
        else:
            self.noise.manual_seed(epoch + 7)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read_count += 1
        if self.every and self.read_count % self.every == 0:
            self.noise = torch.Generator().manual_seed(self.read_count)
        inputs, targets = super().__getitem__(index)
        return inputs + torch.randn(WIDTH, generator=self.noise), targets


@right
def dataset_seeds_its_generator_per_epoch() -> Job:
    return Job(network(), data=loader_of(Noisy(is_replaced=False)))


@right
def dataset_replaces_its_generator_per_epoch() -> Job:
    return Job(network(), data=loader_of(Noisy(is_replaced=True)))


@right
def dataset_replaces_its_generator_within_an_epoch() -> Job:
    return Job(network(), data=loader_of(Noisy(is_replaced=False, every=11)))


@scenario(Kind.FOUND, "average")
def average_that_is_not_registered() -> Job:
    model = network()
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    return Job(model, after=lambda _: average.update_parameters(model))


@scenario(Kind.FOUND, "generator")
def generator_of_the_loss() -> Job:
    model, generator = network(), np.random.default_rng(3)

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(inputs + torch.from_numpy(generator.normal(size=inputs.shape)).float()), targets)

    return Job(model, loss=loss)


@scenario(Kind.FOUND, "scale")
def scale_of_the_loss() -> Job:
    model, scale = network(), {"average": 1.0}

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found = F.mse_loss(model(inputs), targets)
        scale["average"] = 0.9 * scale["average"] + 0.1 * found.item()
        return found / scale["average"]

    return Job(model, loss=loss)


@scenario(Kind.FOUND, "buffer")
def replay_buffer() -> Job:
    model, buffer = network(), deque[Any](maxlen=20)

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        buffer.extend(zip(inputs, targets, strict=True))
        drawn = random.sample(list(buffer), 4)
        return F.mse_loss(model(torch.stack([x for x, _ in drawn])), torch.stack([y for _, y in drawn]))

    return Job(model, loss=loss)


@scenario(Kind.FOUND, "slow")
def lookahead() -> Job:
    model = network()
    slow = [each.detach().clone() for each in model.parameters()]

    def after(_: int) -> None:
        with torch.no_grad():
            for parameter, average in zip(model.parameters(), slow, strict=True):
                parameter.copy_(average.lerp_(parameter, 0.5))

    return Job(model, after=after)


class Counted(torch.autograd.Function):
    """A function that counts its calls in its class."""

    count = 0

    @staticmethod
    def forward(_: Any, inputs: torch.Tensor) -> torch.Tensor:
        Counted.count += 1
        return inputs * (1 + Counted.count / 1000)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@scenario(Kind.FOUND, "Counted.count")
def counter_of_an_autograd_function() -> Job:
    model = network()
    return Job(model, loss=lambda inputs, targets: F.mse_loss(Counted.apply(model(inputs)), targets))


# -- several ranks


def distributed(
    model: nn.Module | None = None,
    optimizer: Callable[[nn.Module], Any] = lambda model: optim.AdamW(model.parameters(), lr=0.01),
    *,
    job: Callable[[nn.Module, Any], Mapping[str, Any]] = lambda *_: {},
    dataset: Any = None,
    workers: Mapping[str, Any] | None = None,
    **options: Any,
) -> Job:
    """Return the script of one of several ranks with DDP.

    Args:
        model: the module inside DDP.
        optimizer: makes the optimizer of the DDP module.
        job: makes further arguments of `Job` of the DDP module and the optimizer.
        dataset: the dataset, which all ranks divide.
        workers: options of the loader.
        **options: options of DDP.
    """
    wrapped = DistributedDataParallel(model or network(), **options)
    own = optimizer(wrapped)
    return Job(wrapped, own, shared_loader(dataset, **(workers or {})), **job(wrapped, own))


def shared_loader(dataset: Any = None, **options: Any) -> torch_data.DataLoader[Any]:
    dataset = Numbers() if dataset is None else dataset
    return loader_of(dataset, sampler=torch_data.DistributedSampler(dataset), batch_size=4, **options)


def across_steps(model: Any, optimizer: Any, *, parts: int = 3, synchronizes: bool, sets_none: bool = True) -> Any:
    """Return the step of a script that updates after every `parts` steps, and has gradients at most boundaries."""

    def step(batch: Any, session: Any) -> torch.Tensor:
        is_last = session.step % parts == 0
        with contextlib.nullcontext() if synchronizes or is_last else model.no_sync():
            loss = F.mse_loss(model(batch[0]), batch[1]) / parts
            loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=sets_none)
        return loss.detach()

    return {"step": step}


def frozen_at_step_two(model: Any, _: Any) -> Mapping[str, Any]:
    def after(step: int) -> None:
        if step == 2:
            model.module[0].requires_grad_(False)
            model.module[0].zero_grad()

    return {"after": after}


def wrapped_again(model: Any, _: Any) -> Mapping[str, Any]:
    wrapped = [model]

    def after(step: int) -> None:
        if step == 2:
            wrapped[0] = DistributedDataParallel(model.module)

    return {"after": after, "loss": lambda inputs, targets: F.mse_loss(wrapped[0](inputs), targets)}


def with_a_hook() -> Job:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    def hooked(model: Any, _: Any) -> Mapping[str, Any]:
        model.register_comm_hook(None, fp16_compress_hook)
        return {}

    return distributed(job=hooked)


def local_sgd() -> Job:
    optimizer = optim.SGD((model := network()).parameters(), lr=0.01, momentum=0.9)

    def step(batch: Any, session: Any) -> torch.Tensor:
        loss = F.mse_loss(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if session.step % 3 == 0:
            session.fence()
            with torch.no_grad():
                for parameter in model.parameters():
                    dist.all_reduce(parameter)
                    parameter.div_(dist.get_world_size())
        return loss.detach()

    return Job(model, optimizer, shared_loader(), step=step)


def fully_sharded(*, has_average: bool) -> Job:
    from torch.distributed.fsdp import fully_shard

    model, average = network(), network()
    average.load_state_dict(model.state_dict())
    average.requires_grad_(False)
    for module in (model[0], model[3], model, average):
        fully_shard(module)

    def after(_: int) -> None:
        if has_average:
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.1)

    registered = {"model": {"model": model, "average": average}} if has_average else {}
    return Job(model, optim.AdamW(model.parameters(), lr=0.01), shared_loader(), registered, after=after)


def zero_redundancy(*, is_trusted: bool) -> Job:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def make(model: nn.Module) -> Any:
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=optim.AdamW, lr=0.01)

    trusted = {"registered": {"trusted_optimizers": (ZeroRedundancyOptimizer,)}} if is_trusted else {}
    return distributed(optimizer=make, job=lambda *_: trusted)


def update_in_the_backward_pass() -> Job:
    model = network()
    optimizers = {name.replace(".", "_"): optim.AdamW([each], lr=0.01) for name, each in model.named_parameters()}
    for parameter, optimizer in zip(model.parameters(), optimizers.values(), strict=True):

        def update(_: torch.Tensor, optimizer: optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)

    def step(batch: Any, _: Any) -> torch.Tensor:
        loss = F.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        return loss.detach()

    return Job(model, optimizers, shared_loader(), step=step)


def batch_norm_of_each_rank() -> Job:
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    return distributed(model, broadcast_buffers=False)


def in_buckets(**options: Any) -> Job:
    return distributed(job=partial(across_steps, **options), gradient_as_bucket_view=True, bucket_cap_mb=0.0005)


RANKS: dict[str, tuple[int, Callable[[], Job]]] = {
    "ddp": (3, distributed),
    "ddp_gradients_in_buckets": (3, lambda: in_buckets(synchronizes=True)),
    "ddp_zeros_in_buckets": (3, lambda: in_buckets(parts=1, synchronizes=True, sets_none=False)),
    "ddp_without_synchronization": (3, partial(distributed, job=partial(across_steps, synchronizes=False))),
    "ddp_unused_experts": (3, lambda: distributed(Experts(), find_unused_parameters=True)),
    "ddp_batch_norm_of_each_rank": (3, batch_norm_of_each_rank),
    "ddp_frozen": (3, partial(distributed, job=frozen_at_step_two, find_unused_parameters=True)),
    "ddp_wrapped_again": (3, partial(distributed, job=wrapped_again, bucket_cap_mb=0.0003)),
    "ddp_hook": (2, with_a_hook),
    "ddp_noise_of_workers": (
        3,
        lambda: distributed(dataset=Numbers(change=noisy), workers={"num_workers": 2, "persistent_workers": True}),
    ),
    "local_sgd": (3, local_sgd),
    "fully_sharded": (3, partial(fully_sharded, has_average=False)),
    "fully_sharded_average": (3, partial(fully_sharded, has_average=True)),
    "update_in_the_backward_pass": (3, update_in_the_backward_pass),
}
_REFUSED_RANKS = {
    "zero_redundancy": (partial(zero_redundancy, is_trusted=False), "ZeroRedundancyOptimizer"),
    "zero_redundancy_trusted": (partial(zero_redundancy, is_trusted=True), "init() was not given this optimizer"),
}
SCENARIOS |= {f"ranks_{name}": Scenario(Kind.REFUSED, build, told, 2) for name, (build, told) in _REFUSED_RANKS.items()}
_FREE_RANKS = ("ddp_without_synchronization", "local_sgd", "update_in_the_backward_pass")
SCENARIOS |= {
    f"ranks_{name}": Scenario(Kind.RIGHT, build, "", world, is_free=name in _FREE_RANKS)
    for name, (world, build) in RANKS.items()
}


# -- the ranks of the tests


def run(directory: str, arguments: dict[str, Any]) -> int:
    """Train a scenario as a rank that a test may kill."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    _train(arguments["options"]["name"], Path(directory), rank, arguments["until"], arguments.get("points", {}))
    return 0


def rehearse(name: str, directory: str, until: int) -> int:
    """Train a scenario as a rank whose rehearsals restart it."""
    rank = int(os.environ["RANK"])
    return replayed.run(lambda: _train(name, Path(directory), rank, until, {}), Path(directory))


def _train(name: str, directory: Path, rank: int, until: int, points: dict[str, Any]) -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    job = SCENARIOS[name].build()
    torch.manual_seed(100 + rank)
    np.random.seed(200 + rank)
    random.seed(300 + rank)
    registered = {"model": job.model, "optimizer": job.optimizer, "data": job.data, **job.registered}
    if job.optimizer == "none":
        del registered["optimizer"]
    session = everstep.training.init(**registered)
    begun = session.restore()
    events = []
    for batch in session.batches(until_step=until, accumulate=job.accumulate):
        loss = job.train(batch, session)
        session.log(loss=loss)
        events.append([session.step, float(loss).hex()])
        if len(events) % job.accumulate == 0:
            reach(rank, session.step, points)
    kept = {name: tensor.flatten().tolist() for name, tensor in job.kept().items()}
    draws = [float(torch.rand(()).item()).hex(), float(np.random.rand()).hex(), random.random().hex()]
    result = {"begun": begun, "events": events, "digest": digest(session), "draws": draws, "kept": kept}
    session.close()
    (directory / f"result-{rank}.json").write_text(json.dumps(result))
