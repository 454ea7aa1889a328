"""Options that a restored step replaces are found, and the script's values are applied where it names them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer

from everstep.protocol.options import MAX_OPTION_CHARACTERS, MAX_OPTIONS
from everstep.training import SessionMisuse
from everstep.training.options import ScriptOptions

Schedule = Callable[[Optimizer], Any]


class Launch:
    """One launch of a script: an optimizer, a scheduler, and their options.

    Args:
        lr: learning rate of the script.
        schedule: creates the scheduler; None for a script without one.
        from_script: as for `ScriptOptions`.
        others: further options of the optimizer.
    """

    def __init__(
        self, lr: Any = 0.1, schedule: Schedule | None = None, from_script: Sequence[str] = (), **others: Any
    ) -> None:
        parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        groups: list[dict[str, Any]] = [{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.5}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, **others)
        self.scheduler: Any = schedule and schedule(self.optimizer)
        named = {} if self.scheduler is None else {"scheduler": self.scheduler}
        self.options = ScriptOptions({"optimizer": self.optimizer}, named, from_script)

    def train(self, steps: int) -> Launch:
        for _ in range(steps):
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
        return self

    def restore(self, other: Launch) -> Launch:
        """Restore the state of another launch, as a session does."""
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        if self.scheduler is not None:
            self.scheduler.load_state_dict(copy.deepcopy(other.scheduler.state_dict()))
        self.options.load(other.options.state)
        return self

    @property
    def lrs(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def kept(self) -> dict[str, tuple[str, str]]:
        return {each.name: (each.script, each.kept) for each in self.options.kept}


def halving(optimizer: Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def warmup_then_cosine(optimizer: Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 8)]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


SCHEDULES = (None, halving, warmup_then_cosine, lambda optimizer: lr_scheduler.StepLR(optimizer, 2))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_restart_of_the_same_script_reports_nothing(schedule: Schedule | None) -> None:
    first = Launch(schedule=schedule).train(3)
    second = Launch(schedule=schedule).restore(first)
    assert second.options.kept == ()
    assert second.lrs == first.lrs
    assert second.options.state == first.options.state


def test_other_options_are_reported_and_the_restored_ones_stay() -> None:
    first = Launch(0.1).train(3)
    second = Launch(0.02, betas=(0.8, 0.9)).restore(first)
    of_groups = {
        f"optimizer{number}.{name}": value
        for number in ("", "[1]")
        for name, value in {"lr": ("0.02", "0.1"), "betas": ("[0.8, 0.9]", "[0.9, 0.999]")}.items()
    }
    assert second.kept == of_groups
    assert second.lrs == [0.1, 0.1]
    assert Launch(0.02, betas=(0.8, 0.9)).restore(second.train(2)).kept == of_groups, "each launch reports it"
    assert Launch(0.1).restore(second).kept == {}


@pytest.mark.parametrize("schedule", [halving, warmup_then_cosine])
def test_a_learning_rate_is_compared_before_its_schedule(schedule: Schedule) -> None:
    second = Launch(0.02, schedule).restore(Launch(0.1, schedule).train(3))
    assert second.kept == {f"optimizer{number}.lr": ("0.02", "0.1") for number in ("", "[1]")}


def test_the_settings_of_a_scheduler_are_reported() -> None:
    first = Launch(schedule=lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10)).train(3)
    second = Launch(schedule=lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20)).restore(first)
    assert second.kept == {"scheduler.T_max": ("20", "10")}
    applied = Launch(
        schedule=lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20), from_script=["T_max"]
    ).restore(first)
    assert (applied.kept, applied.scheduler.T_max) == ({}, 20)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("is_tensor", [False, True])
def test_the_scripts_learning_rate_continues_in_the_restored_schedule(
    schedule: Schedule | None, is_tensor: bool
) -> None:
    def lr(value: float) -> Any:
        return torch.tensor(value) if is_tensor else value

    first = Launch(lr(0.1), schedule).train(5)
    second = Launch(lr(0.02), schedule, ["lr"]).restore(first)
    assert second.kept == {}
    whole = Launch(lr(0.02), schedule).train(5)
    assert second.lrs == pytest.approx(whole.lrs)
    assert second.train(4).lrs == pytest.approx(whole.train(4).lrs)
    third = Launch(lr(0.02), schedule, ["lr"]).restore(second)
    assert third.lrs == second.lrs, "applied once"


def test_only_named_options_are_applied() -> None:
    first = Launch(0.1).train(1)
    second = Launch(0.02, from_script=["betas"], betas=(0.8, 0.9)).restore(first)
    assert set(second.kept) == {"optimizer.lr", "optimizer[1].lr"}
    assert [group["betas"] for group in second.optimizer.param_groups] == [(0.8, 0.9)] * 2
    assert second.lrs == [0.1, 0.1]


def test_a_learning_rate_of_zero_is_replaced() -> None:
    assert Launch(0.02, from_script=["lr"]).restore(Launch(0.0).train(1)).lrs == [0.02, 0.02]


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SessionMisuse, match=r"names learning_rate; .* options .*betas, .*lr, .*weight_decay"):
        Launch(from_script=["learning_rate"])


def test_a_report_is_bounded() -> None:
    def launch(value: str) -> ScriptOptions:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2)) for _ in range(40)], lr=0.1)
        group = optimizer.param_groups[0]
        group |= {f"option{number}": value for number in range(40)}
        return ScriptOptions({"optimizer": optimizer}, {})

    second = launch("a" * 1_000)
    second.load(launch("b" * 1_000).state)
    assert len(second.kept) == MAX_OPTIONS
    assert {len(each.script) for each in second.kept} == {MAX_OPTION_CHARACTERS}


def test_options_without_plain_values_are_left_out() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups[0] |= {"closure": len, "mask": torch.ones(3)}
    assert b"closure" not in ScriptOptions({"optimizer": optimizer}, {}).state
