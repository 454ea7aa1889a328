"""The session refuses a step of an optimizer that was not passed to `init`. It permits all other updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.optimizer import Optimizer

import everstep.training
from everstep.training import CannotResume, TrainingSession

Init = Callable[..., TrainingSession]


@pytest.fixture
def init() -> Iterator[Init]:
    """Return a function that creates sessions, which are closed at the end of the test."""
    sessions: list[TrainingSession] = []

    def make(**registered: Any) -> TrainingSession:
        sessions.append(everstep.training.init(**registered))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "plain": adam,
    "fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    "foreach": lambda model: torch.optim.SGD(model.parameters(), foreach=True),
    "of a flat view": lambda model: torch.optim.SGD([next(model.parameters()).detach().view(-1).requires_grad_()]),
    "of one parameter": lambda model: torch.optim.Adagrad([next(model.parameters())]),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("is_made_late", [False, True])
def test_a_step_by_an_optimizer_that_init_was_not_given_is_refused(init: Init, kind: str, is_made_late: bool) -> None:
    model = nn.Linear(3, 1)
    forgotten = None if is_made_late else OPTIMIZERS[kind](model)
    init(model=model)
    forgotten = forgotten or OPTIMIZERS[kind](model)
    before = model.weight.detach().clone()
    backward(model)
    for group in forgotten.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    kind_name = type(forgotten).__qualname__
    with pytest.raises(CannotResume, match=rf"{kind_name} updates model/weight.*init\(\.\.\., optimizer=optimizer\)"):
        forgotten.step()
    assert torch.equal(model.weight, before)


def test_a_second_optimizer_that_init_was_not_given_is_refused(init: Init) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    first, second = adam(model[0]), adam(model[1])
    init(model=model, optimizer=first)
    backward(model)
    first.step()
    with pytest.raises(CannotResume, match=r"updates model/1\.weight"):
        second.step()


def test_an_optimizer_that_takes_up_a_registered_parameter_later_is_refused(init: Init) -> None:
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    unrelated = adam(other)
    init(model=model, optimizer=adam(model))
    backward(other)
    unrelated.step()
    unrelated.add_param_group({"params": list(model.parameters())})
    with pytest.raises(CannotResume, match="updates model/weight"):
        unrelated.step()


def test_an_optimizer_in_the_closure_of_another_is_refused(init: Init) -> None:
    model = nn.Linear(3, 1)
    registered, forgotten = torch.optim.LBFGS(model.parameters()), adam(model)
    init(model=model, optimizer=registered)

    def closure() -> float:
        backward(model)
        forgotten.step()
        return 0.0

    with pytest.raises(CannotResume, match="AdamW"):
        registered.step(closure)  # type: ignore[no-untyped-call]


class Wrapper:
    """An optimizer that calls the `step` of an inner optimizer, as Accelerate's wrapper does."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


class SharedState(torch.optim.AdamW):
    """An optimizer that shares the state and groups of another optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups[0]["params"])
        self.state, self.param_groups = optimizer.state, optimizer.param_groups


def test_registered_and_unrelated_optimizers_are_left_alone(init: Init) -> None:
    model, other, kept = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)
    registered, by_itself, unrelated = adam(model), adam(kept), adam(other)
    session = init(model={"model": model, "kept": kept}, optimizer=registered, extra={"by_itself": by_itself})
    for module in (model, other, kept):
        backward(module)
    for optimizer in (registered, by_itself, unrelated, Wrapper(registered), SharedState(registered)):
        optimizer.step()
    torch.amp.GradScaler("cpu", enabled=False).step(registered)
    session.close()
    adam(model).step()  # the session has ended, so any optimizer may update the parameters


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=9),
    "CosineAnnealingWarmRestarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, T_0=3),
    "SequentialLR": lambda optimizer: SequentialLR(optimizer, [LinearLR(optimizer), LinearLR(optimizer)], [1]),
    "ChainedScheduler": lambda optimizer: ChainedScheduler([LinearLR(optimizer), LinearLR(optimizer)]),
    "ReduceLROnPlateau": lambda optimizer: ReduceLROnPlateau(optimizer),
    "SWALR": lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.1),
}


def step(scheduler: Any) -> None:
    scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("is_made_late", [False, True])
def test_a_step_by_a_scheduler_that_init_was_not_given_is_refused(init: Init, kind: str, is_made_late: bool) -> None:
    model = nn.Linear(3, 1)
    optimizer = adam(model)
    scheduler = None if is_made_late else SCHEDULERS[kind](optimizer)
    init(model=model, optimizer=optimizer)
    scheduler = scheduler or SCHEDULERS[kind](optimizer)
    rate = optimizer.param_groups[0]["lr"]
    backward(model)
    optimizer.step()
    with pytest.raises(CannotResume, match=rf"{kind} changes the learning rate of model/weight.*=scheduler\)"):
        step(scheduler)
    assert optimizer.param_groups[0]["lr"] == rate


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("argument", ["scheduler", "extra"])
def test_a_step_by_a_registered_scheduler_is_left_alone(init: Init, kind: str, argument: str) -> None:
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer, unrelated = adam(model), adam(other)
    scheduler = SCHEDULERS[kind](optimizer)
    init(model=model, optimizer=optimizer, **{argument: {"kept": scheduler}})
    for each in (scheduler, SCHEDULERS[kind](unrelated)):
        backward(model)
        optimizer.step()
        unrelated.step()
        step(each)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_registered_scheduler_of_another_optimizer_is_refused(init: Init, kind: str) -> None:
    model = nn.Linear(3, 1)
    scheduler = SCHEDULERS[kind](adam(model))
    with pytest.raises(
        CannotResume, match=rf"^scheduler: .*{kind} belongs to torch.optim.*AdamW, which is not registered with init"
    ):
        init(model=model, optimizer=torch.optim.SGD(model.parameters()), scheduler=scheduler)


def test_a_step_by_a_gradient_scaler_that_init_was_not_given_is_refused(init: Init) -> None:
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer, unrelated = adam(model), adam(other)
    scaler, kept = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    init(model=model, optimizer=optimizer, extra={"scaler": kept})
    for used, stepped in ((scaler, unrelated), (kept, optimizer)):
        used.scale(model(torch.ones(2, 3)).sum() + other(torch.ones(2, 3)).sum()).backward()
        used.step(stepped)
        used.update()
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    with pytest.raises(CannotResume, match=r"GradScaler scales the gradients of model/weight.*'scaler': scaler"):
        scaler.step(optimizer)


def test_nothing_stays_wrapped_behind_the_last_session() -> None:
    kinds: tuple[type, ...] = (LRScheduler, ReduceLROnPlateau, torch.amp.GradScaler)
    steps = [vars(kind)["step"] for kind in kinds]
    sessions = [everstep.training.init(model=nn.Linear(1, 1)) for _ in range(2)]
    assert vars(LRScheduler)["step"] is not steps[0]
    for session in sessions:
        session.close()
        session.close()
    assert [vars(kind)["step"] for kind in kinds] == steps
