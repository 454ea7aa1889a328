"""Snapshots contain what a framework's objects change besides the trained model, or an error names it."""

from __future__ import annotations

import copy
import random
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from everstep.integrations.companions import MAX_ITEMS, Companions
from everstep.training import CannotResume
from everstep.training.state_tree import decode, encode


class Callback:
    """A callback of the script, with one attribute per kind of state."""

    def __init__(self) -> None:
        self.count = 0
        self.values: Any = defaultdict(lambda: defaultdict(list))
        self.newest = deque([1.0], maxlen=2)
        self.shadow = {"weight": torch.zeros(2)}
        self.table = np.zeros(3)
        self.generator = torch.Generator().manual_seed(1)
        self.second = nn.Linear(2, 2).requires_grad_(requires_grad=False)
        self.made: Any = None
        self.is_open = False


class Trainer:
    """A trainer with its trained model."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = nn.Linear(2, 2)
        self.callback = Callback()
        self.companions = Companions(lambda: {"callback": self.callback}, lambda: (self.model,), ())


def begun() -> Trainer:
    trainer = Trainer()
    trainer.companions.apply()
    return trainer


def resumed(state: dict[str, Any], begin: Callable[[Trainer], object] = lambda _: None) -> Trainer:
    """Return the trainer of a restarted script, which has restored a state as bytes."""
    encoded = encode(state, "")
    tensors = {path: tensor.clone() for path, tensor in encoded.tensors}
    trainer = Trainer()
    trainer.companions.load_state_dict(decode(encoded.data, tensors.__getitem__))  # type: ignore[arg-type]
    begin(trainer)
    trainer.companions.apply()
    return trainer


def test_nothing_is_kept_that_a_script_builds_itself() -> None:
    trainer = begun()
    trainer.model.weight.data.add_(1)
    assert trainer.companions.state_dict() == {}


def count(callback: Callback) -> object:
    callback.count += 3
    return callback.count


def collect(callback: Callback) -> object:
    callback.values["train"]["loss"].append(0.5)
    callback.values["train"]["kl"].append(torch.ones(()))
    return {mode: {key: list(map(float, each)) for key, each in of.items()} for mode, of in callback.values.items()}


def append(callback: Callback) -> object:
    callback.newest.append(2.0)
    callback.newest.append(3.0)
    return list(callback.newest), callback.newest.maxlen


def average(callback: Callback) -> object:
    callback.shadow["weight"].data.add_(2)
    return callback.shadow["weight"].tolist()


def fill(callback: Callback) -> object:
    callback.table[1] = 4
    return callback.table.tolist()


def draw(callback: Callback) -> object:
    torch.rand(5, generator=callback.generator)
    return callback.generator.get_state().tolist()


def follow(callback: Callback) -> object:
    callback.second.weight.data.mul_(0.5)
    return callback.second.weight.tolist()


def write_one_element(callback: Callback) -> object:
    with torch.no_grad():
        callback.second.weight[0, 1] = 9  # neither the first, the middle nor the last element
    return callback.second.weight.tolist()


def replace_a_parameter(callback: Callback) -> object:
    callback.second.weight = nn.Parameter(torch.full((2, 2), 3.0))
    return callback.second.weight.tolist()


def swap(callback: Callback) -> object:
    callback.second = nn.Linear(2, 2)
    return callback.second.weight.tolist()


def add(callback: Callback) -> object:
    vars(callback)["late"] = {"steps": [1, 2]}
    return vars(callback)["late"]


@pytest.mark.parametrize(
    "change", [count, collect, append, average, fill, draw, follow, write_one_element, replace_a_parameter, swap, add]
)
def test_what_training_changes_is_restored_and_stays_in_later_snapshots(change: Callable[[Callback], object]) -> None:
    trainer = begun()
    before = random.getstate()
    expected = change(trainer.callback)
    saved = trainer.companions.state_dict()
    assert saved
    assert random.getstate() == before
    again = resumed(saved)
    assert again.companions.state_dict().keys() == saved.keys()
    third = resumed(again.companions.state_dict())
    for one in (again, third):
        assert vars(one.callback).keys() == vars(trainer.callback).keys()
        for name, value in vars(trainer.callback).items():
            assert repr(shown(vars(one.callback)[name])) == repr(shown(value)), name
    assert expected is not None


def shown(value: Any) -> object:
    """Return a value in a form in which equal values have equal texts."""
    if isinstance(value, nn.Module):
        return {name: each.tolist() for name, each in value.state_dict().items()}
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    return {key: shown(each) for key, each in value.items()} if isinstance(value, dict) else value


def test_a_container_keeps_its_class_and_its_identity() -> None:
    trainer = begun()
    collect(trainer.callback)
    holders: list[Any] = []

    def begin(one: Trainer) -> None:
        one.callback.values["eval"]["stale"].append(1.0)
        holders.append(one.callback.values)

    again = resumed(trainer.companions.state_dict(), begin)
    assert again.callback.values is holders[0]
    assert list(again.callback.values) == ["train"]
    again.callback.values["train"]["entropy"].append(1.0)
    assert again.callback.values["train"]["loss"] == [0.5]


def test_an_average_that_a_hook_builds_from_the_restored_model_is_kept_before_its_first_update() -> None:
    def build(trainer: Trainer) -> None:
        trainer.callback.made = copy.deepcopy(trainer.model)
        vars(trainer.callback)["first"] = trainer.model.weight.detach().clone()
        vars(trainer.callback)["began"] = float(trainer.model.weight.detach().sum())

    trainer = Trainer()
    build(trainer)
    trainer.companions.apply()
    trainer.model.weight.data.add_(1)
    saved = trainer.companions.state_dict()

    def begin(one: Trainer) -> None:
        one.model.weight.data.add_(1)  # the restored weights
        build(one)

    again = resumed(saved, begin)
    assert torch.equal(again.callback.made.weight, trainer.callback.made.weight)
    assert torch.equal(vars(again.callback)["first"], vars(trainer.callback)["first"])
    assert vars(again.callback)["began"] == vars(trainer.callback)["began"]


def test_an_object_that_training_creates_is_refused_by_name() -> None:
    trainer = begun()
    trainer.callback.made = copy.deepcopy(trainer.model)
    with pytest.raises(CannotResume, match=r"^callback\.made: training has created this object"):
        trainer.companions.state_dict()
    trainer = begun()
    trainer.callback.made = [Callback()]
    with pytest.raises(CannotResume, match=r"^callback\.made\[0\]"):
        trainer.companions.state_dict()


def test_a_flag_of_an_object_that_cannot_be_kept_is_not_kept_either(tmp_path: Path) -> None:
    """A restarted script must open its file again, so it must not find the flag that says that it is open."""
    trainer = begun()
    with (tmp_path / "log").open("w") as file:
        trainer.callback.made, trainer.callback.is_open, trainer.callback.count = file, True, 5
        assert trainer.companions.state_dict() == {"callback.count": 5}


def test_tensors_of_the_trained_model_are_in_no_second_model() -> None:
    trainer = Trainer()
    trainer.callback.made = nn.Sequential(trainer.model, nn.Linear(2, 2))
    trainer.companions = Companions(lambda: {"callback": trainer.callback}, lambda: (trainer.model,), ())
    trainer.companions.apply()
    trainer.model.weight.data.add_(1)
    assert trainer.companions.state_dict() == {}
    trainer.callback.made[1].weight.data.add_(1)
    assert trainer.companions.state_dict().keys() == {"callback.made:1.weight", "callback.made:1.bias"}


def test_a_second_apply_changes_nothing() -> None:
    trainer = begun()
    count(trainer.callback)
    trainer.companions.apply()
    assert trainer.companions.state_dict() == {"callback.count": 3}


def test_a_value_that_is_too_large_for_a_copy_is_in_each_snapshot() -> None:
    trainer = Trainer()
    trainer.callback.table = np.zeros(MAX_ITEMS + 1)
    trainer.companions = Companions(lambda: {"callback": trainer.callback}, lambda: (trainer.model,), ())
    trainer.companions.apply()
    assert trainer.companions.state_dict().keys() == {"callback.table"}


def test_a_later_update_of_a_replaced_parameter_is_kept() -> None:
    trainer = begun()
    replace_a_parameter(trainer.callback)
    trainer.companions.state_dict()
    trainer.callback.second.weight.data.add_(1)
    replace_a_parameter(trainer.callback)
    trainer.callback.second.weight.data.add_(1)
    again = resumed(trainer.companions.state_dict())
    assert again.callback.second.weight.tolist() == [[4.0, 4.0], [4.0, 4.0]]


def test_a_rehearsal_compares_neither_times_nor_texts() -> None:
    trainer = begun()
    vars(trainer.callback).update(count=4, began=0.25, at=1_700_000_000, note="12:30", loss=torch.ones(2))
    assert trainer.companions.compared_state().keys() == {"callback.count", "callback.loss"}
