"""Modules that a script replaces or changes while it trains: a snapshot follows them, or names what it cannot keep."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from everstep.training.adapters import deepspeed
from everstep.training.adapters.fsdp import FSDPAdapter
from everstep.training.adapters.plain import PlainAdapter
from everstep.training.attributes import MAX_ATTRIBUTE_BYTES, Attributes
from everstep.training.errors import CannotResume
from everstep.training.parts import MAX_PARTS
from everstep.training.registration import _adapters
from everstep.training.script import Environment
from everstep.training.state import RankState
from tests.unit.training.saved import carry, snapshot_of
from tests.unit.training.test_deepspeed_adapter import make as make_engine


class Agent(nn.Module):
    """A network with a frozen copy, as in reinforcement learning."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.hidden: Any = None
        self.count = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.online(batch) + self.target(batch)  # type: ignore[no-any-return]


def state_of(model: nn.Module) -> RankState:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return RankState([PlainAdapter({"": model}, {"": torch.optim.SGD(trained)})], {}, {}, Environment.read({}))


def is_equal(model: nn.Module, twin: nn.Module) -> bool:
    twins = twin.state_dict()
    return all(torch.equal(value, twins[name]) for name, value in model.state_dict().items())


def fresh(model: Agent) -> None:
    """Give every tensor of a model another value, as training does."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)


def copied(model: Agent) -> None:
    model.target = copy.deepcopy(model.online).requires_grad_(False)


def assigned(model: Agent) -> None:
    values = {name: value.clone() for name, value in model.online.state_dict().items()}
    model.target.load_state_dict(values, assign=True)
    model.target.requires_grad_(False)


def reassigned(model: Agent) -> None:
    model.scale = nn.Parameter(model.scale * 3, requires_grad=False)


@pytest.mark.parametrize("change", [copied, assigned, reassigned])
def test_a_snapshot_holds_what_the_model_uses_now(change: Callable[[Agent], None]) -> None:
    model, twin = Agent(), Agent()
    state, restored = state_of(model), state_of(twin)
    for _ in range(2):
        fresh(model)
        change(model)
        fresh(model)
        carry(state, restored)
        assert is_equal(model, twin)
    model.target.eval()
    carry(state, restored)
    assert (twin.target.training, twin.online.training) == (False, True)


def test_a_module_that_was_replaced_has_its_own_buffers_and_extra_state() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = 0

        def get_extra_state(self) -> int:
            return self.seen

        def set_extra_state(self, state: int) -> None:
            self.seen = state

    model, twin = nn.Sequential(Counted()), nn.Sequential(Counted())
    state = RankState([PlainAdapter({"": model}, {})], {}, {}, Environment.read({}))
    restored = RankState([PlainAdapter({"": twin}, {})], {}, {}, Environment.read({}))
    model[0] = Counted()
    model[0].seen = 7
    model[0].register_buffer("late", torch.ones(2))
    carry(state, restored)
    assert twin[0].seen == 7
    assert torch.equal(twin[0].late, torch.ones(2))  # type: ignore[arg-type]


def added(model: Agent) -> None:
    model.online.append(nn.Linear(4, 4).requires_grad_(False))


def removed(model: Agent) -> None:
    del model.online[2]


def swapped(model: Agent) -> None:
    model.online[2] = nn.Identity()


def pruned(model: Agent) -> None:
    prune.random_unstructured(model.online[0], "weight", amount=0.5)  # type: ignore[no-untyped-call]


def tied(model: Agent) -> None:
    model.target[0].weight = model.online[0].weight


def trained(model: Agent) -> None:
    model.online[0].weight = nn.Parameter(model.online[0].weight.detach().clone())


def widened(model: Agent) -> None:
    model.scale = nn.Parameter(torch.ones(2), requires_grad=False)


def cast(model: Agent) -> None:
    model.scale = nn.Parameter(model.scale.double(), requires_grad=False)


def given(model: Agent) -> None:
    model.register_parameter("shift", nn.Parameter(torch.zeros(1), requires_grad=False))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (added, "model/online.3: this module was added after init"),
        (removed, "model/online.2: this module was removed after init"),
        (swapped, "model/online.2: this module was replaced by a Identity after init"),
        (pruned, "model/online.0.weight: this parameter was added, removed, or tied"),
        (tied, "model/target.0.weight: this parameter was added, removed, or tied"),
        (given, "model/shift: this parameter was added, removed, or tied"),
        (trained, "model/online.0.weight: this parameter was replaced after init"),
        (widened, "model/scale: this parameter was replaced after init"),
        (cast, "model/scale: this parameter was replaced after init"),
    ],
)
def test_what_no_restarted_script_would_build_ends_the_snapshots_by_name(
    change: Callable[[Agent], None], words: str
) -> None:
    model = Agent()
    state = state_of(model)
    change(model)
    for _ in range(2):
        with pytest.raises(CannotResume) as raised:
            state.observe()
        assert words in str(raised.value)


def test_snapshots_go_on_when_the_model_is_as_before() -> None:
    model = Agent()
    state, last = state_of(model), model.online[2]
    model.online[2] = nn.Identity()
    with pytest.raises(CannotResume):
        state.observe()
    model.online[2] = last
    state.observe()


def test_plain_values_and_tensors_that_modules_keep_come_back() -> None:
    model, twin = Agent(), Agent()
    state, restored = state_of(model), state_of(twin)
    model.online[2].p = 0.3
    model.online[1].momentum = None
    model.hidden = torch.full((2,), 3.0)
    model.count = 1000
    model.late = [(torch.ones(1), 2.5)]  # type: ignore[assignment]
    carry(state, restored)
    assert (twin.online[2].p, twin.online[1].momentum, twin.count) == (0.3, None, 1000)
    assert torch.equal(twin.hidden, model.hidden)
    ((one, number),) = twin.late  # type: ignore[misc]
    assert (one.item(), number) == (1.0, 2.5)
    model.hidden.add_(1)
    copied(model)
    carry(state, restored)
    assert torch.equal(twin.hidden, model.hidden)
    twin.hidden.add_(1)
    assert not torch.equal(twin.hidden, model.hidden)
    carry(restored, state)  # A restored rank knows what differs from its own `init`.
    assert torch.equal(twin.hidden, model.hidden)


def test_an_attribute_that_has_changed_back_is_as_at_init() -> None:
    model, twin = Agent(), Agent()
    state, restored = state_of(model), state_of(twin)
    model.hidden = 3
    state.observe()
    model.hidden = None
    carry(state, restored)
    assert twin.hidden is None


@pytest.mark.parametrize(
    "value",
    [
        object(),
        lambda model: model.online[0].weight.detach()[0],
        lambda model: (model.online[0].weight.detach()[0], 1),
        lambda model: model(torch.ones(2, 3)),
        lambda _: torch.empty(MAX_ATTRIBUTE_BYTES + 1, dtype=torch.uint8),
        lambda _: [0.5] * 65,
    ],
    ids=["an object", "a view of a parameter", "a tuple with a view", "a graph", "a large cache", "a long list"],
)
def test_an_attribute_that_is_no_state_of_its_own_is_left_alone(value: Any) -> None:
    model, twin = Agent(), Agent()
    state, restored = state_of(model), state_of(twin)
    model.hidden = value(model) if callable(value) else value
    carry(state, restored)
    assert twin.hidden is None


def test_attributes_of_wrappers_and_private_ones_of_libraries_are_left_alone() -> None:
    model, twin = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    wrapped, other = nn.DataParallel(model), nn.DataParallel(twin)
    states = [RankState([PlainAdapter({"": each}, {})], {}, {}, Environment.read({})) for each in (wrapped, other)]
    wrapped.dim = 7
    model[0]._flag = 0.5  # type: ignore[assignment]
    carry(*states)
    assert getattr(other, "dim", 0) == 0
    assert not hasattr(twin[0], "_flag")


@pytest.mark.parametrize(
    "make", [lambda: torch.Generator().manual_seed(3), lambda: np.random.default_rng(3)], ids=["torch", "numpy"]
)
def test_random_generators_of_modules_come_back(make: Callable[[], Any]) -> None:
    def draw(generator: Any) -> float:
        is_torch = isinstance(generator, torch.Generator)
        return float(torch.rand((), generator=generator) if is_torch else generator.random())

    models = [Agent(), Agent()]
    for model in models:
        model.noise = make()  # type: ignore[assignment]
    model, twin = models
    state, restored = state_of(model), state_of(twin)
    draw(model.noise)
    carry(state, restored)
    assert draw(model.noise) == draw(twin.noise)


class Keeper:
    """An object of the script with many kinds of attributes."""

    def __init__(self) -> None:
        self.number, self.flag, self.word = 1000, True, "a"
        self.tensor, self.pair = torch.zeros(2), (torch.zeros(1), 5)
        self.items = [1, 2, [3]]


def changed(keeper: Keeper, change: Callable[[Any], object]) -> dict[str, Any]:
    attributes = Attributes([("it", keeper)])
    change(keeper)
    found: dict[str, Any] = attributes.observe()  # type: ignore[assignment]
    return found.get("it", {})


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda it: None, set()),
        (lambda it: setattr(it, "number", int("1000")), set()),
        (lambda it: setattr(it, "number", 1001), {"number"}),
        (lambda it: setattr(it, "flag", 1), {"flag"}),
        (lambda it: setattr(it, "word", None), {"word"}),
        (lambda it: it.tensor.add_(1), {"tensor"}),
        (lambda it: setattr(it, "tensor", torch.zeros(2)), {"tensor"}),
        (lambda it: it.pair[0].add_(1), {"pair"}),
        (lambda it: setattr(it, "pair", (*it.pair, 6)), {"pair"}),
        (lambda it: it.items[2].append(4), {"items"}),
        (lambda it: setattr(it, "items", [1, 2, [3]]), set()),
        (lambda it: setattr(it, "items", (0.5,) * MAX_PARTS), {"items"}),
        (lambda it: setattr(it, "items", [1, object()]), set()),
        (lambda it: setattr(it, "later", 7), {"later"}),
        (lambda it: delattr(it, "word"), set()),
        (lambda it: (delattr(it, "word"), setattr(it, "later", 7)), {"later"}),
    ],
)
def test_only_what_has_changed_is_kept(change: Callable[[Any], object], names: set[str]) -> None:
    keeper = Keeper()
    found = changed(keeper, lambda it: (change(it), setattr(it, "other", 3)))
    assert found.keys() - {"other"} == names
    assert changed(Keeper(), change).keys() == names


def test_copies_do_not_change_with_the_object() -> None:
    keeper = Keeper()
    attributes = Attributes([("it", keeper)])
    keeper.items.append(9)
    keeper.tensor.add_(1)
    copies: Any = attributes.copy()
    keeper.items.append(10)
    keeper.tensor.add_(1)
    assert copies["it"]["items"] == [1, 2, [3], 9]
    assert copies["it"]["tensor"].tolist() == [1.0, 1.0]


def test_a_view_among_other_changed_attributes_is_left_alone() -> None:
    model, twin = Agent(), Agent()
    state, restored = state_of(model), state_of(twin)
    model.hidden = model.online[0].weight.detach()[0]
    model.count = 5
    carry(state, restored)
    assert (twin.hidden, twin.count) == (None, 5)


def test_attributes_inside_a_wrapper_and_of_a_replaced_module_are_kept() -> None:
    model, twin = Agent(), Agent()
    states = [
        RankState([PlainAdapter({"": nn.DataParallel(each)}, {})], {}, {}, Environment.read({}))
        for each in (model, twin)
    ]
    copied(model)
    carry(*states)
    model.target[2].p = 0.7
    carry(*states)
    assert twin.target[2].p == 0.7


def test_generators_of_a_modules_class_come_back() -> None:
    class Noise(nn.Module):
        generator = np.random.default_rng(4)

    model = Noise()
    state = RankState([PlainAdapter({"": model}, {})], {}, {}, Environment.read({}))
    values = snapshot_of(state)
    drawn = Noise.generator.random()
    state.load(values)
    state.complete(values)
    assert Noise.generator.random() == drawn


def test_an_evaluation_behind_the_loop_does_not_change_what_was_kept() -> None:
    model, twin = Agent(), Agent()
    state, restored = state_of(model), state_of(twin)
    model.hidden = [torch.ones(1)]
    state.keep_passing()
    model.hidden[0].add_(1)
    model.hidden.append(2)
    carry(state, restored)
    assert twin.hidden == [torch.ones(1)]


def test_a_module_that_fully_shard_may_hold_is_not_followed() -> None:
    model = Agent()
    adapter = FSDPAdapter({"": model}, {})
    adapter.observe()
    adapter.check()
    copied(model)
    adapter.observe()
    with pytest.raises(CannotResume, match=r"^model/target: this module was replaced after init"):
        adapter.check()


def test_a_module_that_an_engine_gets_later_ends_the_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "deepspeed_version", lambda: "0")
    engine = make_engine()
    state = RankState(_adapters({}, {}, {"": engine}, ()), {}, {}, Environment.read({}))
    engine.module.add_module("head", nn.Linear(1, 1))
    with pytest.raises(CannotResume, match="/head: this module was added after init"):
        state.observe()
