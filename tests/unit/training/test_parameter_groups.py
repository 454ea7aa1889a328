"""A script changes the parameter groups of its optimizer. A fresh script restores them, or the snapshot names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from everstep.training.adapters.plain import PlainAdapter
from everstep.training.errors import CannotResume
from everstep.training.script import Environment
from everstep.training.state import RankState, Stateful
from tests.unit.training.saved import carry

Optimizer = torch.optim.Optimizer


class Script:
    """A model whose optimizer trains only the last layer at first."""

    def __init__(
        self,
        seed: int = 0,
        schedule: Callable[[Optimizer], Any] | None = None,
        named: bool = False,
        kind: type[Optimizer] = torch.optim.AdamW,
    ) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3))
        self.model[:2].requires_grad_(False)
        last = self.model[2].named_parameters(prefix="2") if named else self.model[2].parameters()
        self.optimizer = kind(last, lr=0.1)  # type: ignore[call-arg]
        objects: dict[str, Stateful] = {"scheduler": schedule(self.optimizer)} if schedule is not None else {}
        self.scheduler: Any = objects.get("scheduler")
        self.state = RankState(
            [PlainAdapter({"": self.model}, {"own": self.optimizer})], objects, {}, Environment.read({})
        )

    def train(self, steps: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(4)
        for _ in range(steps):
            self.model(torch.randn(5, 3, generator=generator)).square().sum().backward()
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.optimizer.zero_grad()
            self.state.end_step()
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def unfreeze(self, number: int, **options: Any) -> None:
        self.model[number].requires_grad_(True)
        self.optimizer.add_param_group({"params": list(self.model[number].parameters()), **options})


def names(script: Script) -> list[list[str]]:
    called = {id(parameter): name for name, parameter in script.model.named_parameters()}
    return [[called[id(parameter)] for parameter in group["params"]] for group in script.optimizer.param_groups]


def options(script: Script) -> list[dict[str, Any]]:
    return [{key: group[key] for key in group if key != "params"} for group in script.optimizer.param_groups]


def check_equal(script: Script, restored: Script) -> None:
    """Check that both scripts have the same groups, and train alike from here on."""
    assert names(script) == names(restored)
    assert all(map(torch.equal, script.train(3), restored.train(3)))
    one, two = script.state.observe(), restored.state.observe()
    assert [item.name for item in one.tensors] == [item.name for item in two.tensors]
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(one.tensors, two.tensors, strict=True))
    assert options(script) == options(restored)
    assert len(script.optimizer.state) == len(restored.optimizer.state)


@pytest.mark.parametrize("trained", [0, 2])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adamax])
def test_a_group_that_the_script_adds_is_added_again(kind: type[Optimizer], trained: int) -> None:
    script, restored = Script(kind=kind), Script(1, kind=kind)
    script.train(2)
    script.unfreeze(1, lr=0.01)
    script.train(trained)
    script.unfreeze(0, lr=0.003)
    carry(script.state, restored.state)
    assert [group["lr"] for group in restored.optimizer.param_groups] == [0.1, 0.01, 0.003]
    check_equal(script, restored)


def test_named_parameters_keep_the_names_of_the_script() -> None:
    script, restored = Script(named=True), Script(1, named=True)
    script.model[1].requires_grad_(True)
    script.optimizer.add_param_group({"params": list(script.model[1].named_parameters(prefix="first"))})
    for key in ("params", "param_names"):
        del script.optimizer.param_groups[0][key][0]
    carry(script.state, restored.state)
    assert restored.optimizer.param_groups[0]["param_names"] == ["2.bias"]
    assert restored.optimizer.param_groups[1]["param_names"] == ["first.weight", "first.bias"]
    check_equal(script, restored)


def grow(script: Script) -> None:
    script.model[1].requires_grad_(True)
    script.optimizer.param_groups[0]["params"] += list(script.model[1].parameters())


def shrink(script: Script) -> None:
    del script.optimizer.param_groups[0]["params"][1]


def divide(script: Script) -> None:
    """Move a parameter to another group. The order of all parameters stays the same."""
    weight, bias = script.optimizer.param_groups[0]["params"]
    script.optimizer.param_groups[0]["params"] = [weight]
    script.optimizer.add_param_group({"params": [bias], "lr": 0.01})


def replace_groups(script: Script) -> None:
    first = script.optimizer.param_groups[0]
    script.model[0].requires_grad_(True)
    script.optimizer.param_groups = [{**first, "params": list(script.model[0].parameters()), "lr": 0.02}, first]


def empty(script: Script) -> None:
    script.model[0].requires_grad_(True)
    script.unfreeze(1)
    del script.optimizer.param_groups[:]
    script.optimizer.add_param_group({"params": list(script.model[0].parameters())})


@pytest.mark.parametrize("change", [grow, shrink, divide, replace_groups, empty])
def test_changed_groups_come_back(change: Callable[[Script], None]) -> None:
    script, restored = Script(), Script(1)
    script.train(2)
    before = script.state.revision
    change(script)
    script.train(1)
    carry(script.state, restored.state)
    assert script.state.revision > before
    check_equal(script, restored)


def test_a_restore_of_an_earlier_step_takes_a_group_away() -> None:
    script, restored = Script(named=True), Script(1, named=True)
    script.train(1)
    restored.model[0].requires_grad_(True)
    restored.optimizer.add_param_group({"params": list(restored.model[0].named_parameters(prefix="0"))})
    for key in ("params", "param_names"):
        del restored.optimizer.param_groups[0][key][0]
    restored.train(1)
    carry(script.state, restored.state)
    check_equal(script, restored)


def test_a_parameter_that_returns_has_its_state() -> None:
    script, restored = Script(), Script(1)
    script.train(2)
    bias = script.optimizer.param_groups[0]["params"].pop()
    script.train(1)
    carry(script.state, restored.state)
    for each in (script, restored):
        each.optimizer.param_groups[0]["params"].append(each.model[2].bias)
    assert bias in script.optimizer.state
    check_equal(script, restored)


def test_an_optimizers_new_parameters_are_copied_in_the_background_and_those_that_left_are_not() -> None:
    script = Script()
    script.model[0].requires_grad_(True)

    def at_once() -> list[str]:
        tensors = script.state.observe().tensors
        return [item.name for item in tensors if item.name.startswith("model/") and not item.is_deferred]

    assert at_once() == ["model/0.weight", "model/0.bias"]
    script.optimizer.add_param_group({"params": list(script.model[0].parameters())})
    assert at_once() == []
    del script.optimizer.param_groups[0]
    assert at_once() == ["model/2.weight", "model/2.bias"]


@pytest.mark.parametrize("is_added_first", [True, False])
def test_gradients_from_before_the_growth_are_kept(is_added_first: bool) -> None:
    script, restored = Script(), Script(1)
    script.train(1)
    script.model[1].requires_grad_(True)
    inputs = torch.ones(2, 3)
    script.model(inputs).sum().backward()
    if is_added_first:
        script.unfreeze(1)
        script.optimizer.step()
    else:
        script.optimizer.step()
        script.unfreeze(1)
    script.state.end_step()
    carry(script.state, restored.state)
    gradient = script.model[1].weight.grad
    assert gradient is not None
    expected = torch.zeros_like(gradient) if is_added_first else gradient
    assert torch.equal(restored.model[1].weight.grad, expected)


@pytest.mark.parametrize("is_within", [True, False])
def test_a_parameter_that_init_did_not_see_ends_the_snapshots_by_name(is_within: bool) -> None:
    script = Script()
    foreign = nn.Parameter(torch.zeros(7))
    if is_within:
        script.optimizer.param_groups[0]["params"][1] = foreign
    else:
        script.optimizer.add_param_group({"params": [foreign]})
    place = "1 of group 0" if is_within else "0 of group 1"
    for _ in range(2):
        with pytest.raises(CannotResume, match=rf"^optimizer/own: parameter {place}, of shape \[7\], is not"):
            script.state.observe()
        script.state.end_step()
    if is_within:
        script.optimizer.param_groups[0]["params"][1] = script.model[2].bias
    else:
        del script.optimizer.param_groups[1]
    script.state.observe()


def test_the_revision_grows_with_each_change_and_not_with_steps() -> None:
    script = Script()
    script.train(1)
    script.state.observe()
    begun = script.state.revision
    script.train(1)
    script.state.observe()
    assert script.state.revision == begun
    script.model[0].requires_grad_(True)
    script.state.observe()
    unfrozen = script.state.revision
    assert unfrozen > begun
    script.unfreeze(1)
    script.state.observe()
    added = script.state.revision
    assert added > unfrozen
    script.model[0] = nn.Linear(3, 4)
    script.state.observe()
    assert script.state.revision > added


def halved(optimizer: Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def stepped(optimizer: Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2)


def chained(optimizer: Optimizer) -> Any:
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [stepped(optimizer), halved(optimizer)], [9])


def test_a_scheduler_with_values_per_group_comes_back() -> None:
    script, restored = Script(schedule=stepped), Script(1, schedule=stepped)
    script.train(1)
    script.unfreeze(1, lr=0.01, initial_lr=0.01)
    script.scheduler.base_lrs.append(0.01)
    script.train(2)
    carry(script.state, restored.state)
    assert restored.scheduler.base_lrs == [0.1, 0.01]
    check_equal(script, restored)


@pytest.mark.parametrize("schedule", [halved, chained])
def test_functions_of_a_scheduler_that_change_end_the_snapshots_by_name(
    schedule: Callable[[Optimizer], Any],
) -> None:
    script = Script(schedule=schedule)
    script.train(1)
    script.unfreeze(1, lr=0.01)
    lambdas = (script.scheduler if schedule is halved else script.scheduler._schedulers[1]).lr_lambdas
    lambdas.append(lambda step: 0.9**step)
    with pytest.raises(CannotResume, match=r"^scheduler: lr_lambdas has other functions"):
        script.state.observe()
