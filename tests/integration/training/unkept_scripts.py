"""Scripts that keep state outside of what they register. `plain` keeps none.

Each script is a function of the batch, the model and the step's number that returns the loss. What it keeps from step
to step is a variable of its maker.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everstep.training
from everstep.training import rehearsal
from tests.integration.training import replayed

WIDTH, SAMPLES = 8, 96
STEPS = 400
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Maker = Callable[[nn.Module, torch.optim.Optimizer], Loss]
UNKEPT: dict[str, Maker] = {}
SHARED = SimpleNamespace(scale=1.0, numpy=np.random.default_rng(3), python=random.Random(7), noise=0.0)


def unkept(maker: Maker) -> Maker:
    UNKEPT[maker.__name__] = maker
    return maker


@unkept
def running_mean(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    average = torch.zeros(1)

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal average
        now = F.mse_loss(model(inputs), targets)
        average = 0.5 * average + 0.5 * now.detach()
        return now * (1 + average).squeeze()

    return loss


@unkept
def scale_in_a_global(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        SHARED.scale *= 1.01
        return F.mse_loss(model(inputs), targets) * SHARED.scale

    return loss


@unkept
def numpy_generator(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    return lambda inputs, targets: F.mse_loss(model(inputs + float(SHARED.numpy.normal())), targets)


@unkept
def python_generator(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    return lambda inputs, targets: F.mse_loss(model(inputs + SHARED.python.random()), targets)


@unkept
def generator_in_a_closure(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    generator = torch.Generator().manual_seed(3)
    return lambda inputs, targets: F.mse_loss(model(inputs + torch.rand(inputs.shape, generator=generator)), targets)


@unkept
def averaged_weights(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    teacher = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        teacher.update_parameters(model)
        return F.mse_loss(model(inputs), targets) + F.mse_loss(model(inputs), teacher(inputs).detach())

    return loss


@unkept
def averaged_weights_beside(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    """Average the weights for an evaluation. No step uses the average."""
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        average.update_parameters(model)
        return F.mse_loss(model(inputs), targets)

    return loss


@unkept
def target_network(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    target, count = copy.deepcopy(model), 0

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        if count % 2 == 0:
            target.load_state_dict(model.state_dict())
        return F.mse_loss(model(inputs), targets + target(inputs).detach())

    return loss


@unkept
def replay_buffer(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    buffer: deque[torch.Tensor] = deque(maxlen=8)

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        buffer.append(inputs)
        return F.mse_loss(model(torch.cat(list(buffer)).mean(0) + inputs), targets)

    return loss


@unkept
def queue_of_keys(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    queue = torch.zeros(16, WIDTH)

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        queue.copy_(torch.cat([inputs, queue])[:16])
        return F.mse_loss(model(inputs + queue.mean(0)), targets)

    return loss


@unkept
def lookahead_weights(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    slow = [parameter.detach().clone() for parameter in model.parameters()]

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        everstep_fence()
        with torch.no_grad():
            for kept, parameter in zip(slow, model.parameters(), strict=True):
                kept += 0.5 * (parameter - kept)
                parameter.copy_(kept)
        return F.mse_loss(model(inputs), targets)

    return loss


class Counted(torch.autograd.Function):
    """A function that counts its calls in its class."""

    count = 0

    @staticmethod
    def forward(context: Any, inputs: torch.Tensor) -> torch.Tensor:
        Counted.count += 1
        return inputs * (1 + Counted.count / 100)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@unkept
def counter_in_a_class(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    return lambda inputs, targets: F.mse_loss(model(Counted.apply(inputs)), targets)  # type: ignore[no-untyped-call]


@unkept
def hidden_state(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    hidden = torch.zeros(WIDTH)

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal hidden
        hidden = torch.tanh(hidden + inputs.mean(0)).detach()
        return F.mse_loss(model(inputs + hidden), targets)

    return loss


@unkept
def worst_value(model: nn.Module, optimizer: torch.optim.Optimizer) -> Loss:
    worst = 0.0

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal worst
        now = F.mse_loss(model(inputs), targets)
        worst = max(worst, now.item())
        return now * worst

    return loss


@unkept
def loop_counter(model: nn.Module, optimizer: torch.optim.Optimizer) -> Loss:
    numbers = itertools.count()

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + next(numbers))
        return F.mse_loss(model(inputs), targets)

    return loss


@unkept
def changed_after_some_steps(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    count = 0

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return F.mse_loss(model(inputs), targets) * (2 if count > 3 else 1)

    return loss


@unkept
def loss_scaler(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    scaler = SimpleNamespace(scale=1.0, good_steps=0)

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scaler.good_steps += 1
        scaler.scale *= 1.001
        return F.mse_loss(model(inputs), targets) * scaler.scale

    return loss


@unkept
def cached_result(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    @functools.cache
    def first_mean(_: int) -> torch.Tensor:
        return next(model.parameters()).detach().mean()

    return lambda inputs, targets: F.mse_loss(model(inputs), targets) + (model(inputs) * first_mean(0)).mean()


@unkept
def second_iterator(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    generator = torch.Generator().manual_seed(9)
    others = itertools.cycle(torch.randn(37, WIDTH, generator=generator).unbind())
    return lambda inputs, targets: F.mse_loss(model(inputs + next(others)), targets)


@unkept
def history_in_a_dict(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    history: dict[str, list[float]] = {"losses": []}

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        now = F.mse_loss(model(inputs), targets)
        history["losses"].append(now.item())
        return now * (1 + sum(history["losses"][-4:]))

    return loss


def simulated_draws(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    """Draw from torch's generator as often as a generator of the script's own decides, as a simulator does."""

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        torch.rand(int(SHARED.numpy.integers(1, 1_000)))
        return F.mse_loss(model(inputs), targets)

    return loss


def plain(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    return lambda inputs, targets: F.mse_loss(model(inputs), targets)


class Loop:
    """The counter that ends the training of a script."""

    iter_num = 0


def ends_by_a_counter(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        Loop.iter_num += 1
        return F.mse_loss(model(inputs), targets)

    return loss


def best_value(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    """Keep the best of values that get worse, so that it never changes after the first."""
    best, value = 1e9, 1.0

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal best
        now = F.mse_loss(model(inputs), targets)
        best = min(best, value + everstep_step() // 2)
        return now

    return loss


def list_of_losses(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    history: list[float] = []

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        now = F.mse_loss(model(inputs), targets)
        history.append(now.item())
        return now

    return loss


def harmless(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    """Measure times, and use values that the script derives from the restored step."""
    began, begun, is_resumed = time.time(), everstep_step(), everstep_step() > 0
    timer = SimpleNamespace(at=began, seconds=0.0)
    count = begun

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        timer.seconds, timer.at = time.time() - timer.at, time.time()
        return F.mse_loss(model(inputs), targets) + 0 * (is_resumed + begun)

    return loss


NO_ROOM = "NO_ROOM"
"""Environment variable of a rank whose node has no memory for a second process."""


class Losses:
    """The losses of a test, which the search for the script's values does not find, because this class has slots."""

    __slots__ = ("by_step",)

    def __init__(self) -> None:
        self.by_step: dict[int, str] = {}


def clock(model: nn.Module, _: torch.optim.Optimizer) -> Loss:
    return lambda inputs, targets: F.mse_loss(model(inputs + time.time_ns() % 1_000_003 / 1e6), targets)


def no_room(*_: object) -> None:
    raise OSError("no room")


everstep_fence: Callable[[], None] = lambda: None  # noqa: E731 — `train` sets it
everstep_step: Callable[[], int] = lambda: 0  # noqa: E731 — `train` sets it


def batches(name: str, session: Any, is_restarted: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches as the script fetches them, and mark the boundaries of its steps."""
    if name == "prefetched_batch":
        following = session.data["data"].next()
        for _ in range(session.restore(), STEPS):
            batch, following = following, session.data["data"].next()
            yield batch
            if session.boundary().stop:
                return
    elif name == "prefetched_draw":
        following = torch.randn(4, WIDTH)
        for _ in range(session.restore(), STEPS):
            batch, following = following, torch.randn(4, WIDTH)
            yield batch, batch.sum(1, keepdim=True)
            if session.boundary().stop:
                return
    elif name == "ends_in_a_replay" and is_restarted:
        # A file that the first launch has left ends the script early.
        yield from session.batches(session.restore() + 1)
    else:
        yield from session.batches(STEPS)


def run(name: str, directory: str) -> int:
    return replayed.run(lambda: train(name, Path(directory)), Path(directory))


def train(name: str, directory: Path) -> None:
    global everstep_fence, everstep_step
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    started = directory / f"started-{rank}"
    if name == "starts_once" and started.exists():
        raise RuntimeError("the script starts only once")
    is_restarted = started.exists()
    if name == "hangs_in_a_replay":
        rehearsal.LIMIT_SECONDS = 0
        if is_restarted:
            signal.pause()
    started.touch()
    if NO_ROOM in os.environ:
        rehearsal.has_room = lambda *_: False
    if name == "no_memory":
        rehearsal._available_bytes = lambda: 0
    if name == "no_copy":
        rehearsal.keep = no_room
    if name == "no_second_copy":
        first = rehearsal.keep
        rehearsal.keep = lambda *given: (first(*given), setattr(rehearsal, "keep", no_room))[0]
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 1))
    if world > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(5))
    dataset = TensorDataset(samples, samples.sum(1, keepdim=True))
    sampler = DistributedSampler(dataset) if world > 1 else None
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, shuffle=None if sampler else True)
    session = everstep.training.init(
        model=model, optimizer=optimizer, data=None if name == "prefetched_draw" else loader
    )
    everstep_fence = session.fence
    if name == "harmless":
        session.restore()
    everstep_step = lambda: session.step  # noqa: E731
    name = "numpy_generator" if name == "generator_of_the_last_rank" and rank == world - 1 else name
    others = (clock, ends_by_a_counter, best_value, list_of_losses, harmless, simulated_draws)
    loss_of = {**UNKEPT, **{each.__name__: each for each in others}}.get(name, plain)(model, optimizer)
    losses = Losses()
    if name == "prefetched_batch":
        session.restore()
    for inputs, targets in batches(name, session, is_restarted):
        loss = loss_of(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss, second=time.time() if name == "logged_time" else 0.0)
        losses.by_step[session.step] = loss.item().hex()
    session.close()
    weights = [parameter.detach().flatten().tolist() for parameter in model.parameters()]
    (directory / f"result-{rank}.json").write_text(json.dumps({"losses": losses.by_step, "weights": weights}))
