from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

from everstep.protocol.parts import TensorPart, whole
from everstep.training.adapters import plain
from everstep.training.adapters.base import NamedOptimizer, plain_local, plain_rewrap
from everstep.training.adapters.fsdp import Boxes, FSDPAdapter
from everstep.training.adapters.plain import GRADIENT_BOUNDARIES, PlainAdapter
from everstep.training.arena import Arena
from everstep.training.capture import CapturePlan, StateTensor
from everstep.training.errors import CannotResume, SessionMisuse
from everstep.training.module_tree import canonical_name
from everstep.training.registration import _adapters
from everstep.training.sources import Sources
from everstep.training.state_tree import Tree, decode, encode
from tests.unit.training.saved import Saved


def make(
    seed: int = 0, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    return model, optimizer(model.parameters(), **{"lr": 0.1, **options})  # type: ignore[call-arg]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3, generator=generator)).square().sum().backward()
        optimizer.step()


def load(adapter: PlainAdapter, tensors: Mapping[str, torch.Tensor], values: Tree) -> None:
    saved = Saved(tensors)
    adapter.load(saved, values)
    saved.finish()


def carry(source: PlainAdapter, target: PlainAdapter) -> None:
    source.end_step()
    state = source.observe()
    load(target, {item.name: item.tensor.detach().clone() for item in state.tensors}, copy.deepcopy(state.values))


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.1), "foreach": False}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.1}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adadelta, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.Rprop, {}),
    ],
)
def test_an_optimizers_state_comes_back(optimizer: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    model, own = make(optimizer=optimizer, **copy.deepcopy(options))
    adapter = PlainAdapter({"": model}, {"": own})
    train(model, own, 3)
    own.param_groups[0]["weight_decay"] = 0.3
    other_model, other = make(1, optimizer=optimizer, **copy.deepcopy(options))
    twin = PlainAdapter({"": other_model}, {"": other})
    carry(adapter, twin)
    train(model, own, 3)
    train(other_model, other, 3)
    one, two = adapter.observe(), twin.observe()
    assert [item.name for item in one.tensors] == [item.name for item in two.tensors]
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(one.tensors, two.tensors, strict=True))
    assert all(
        a.tensor.dtype == b.tensor.dtype and a.tensor.stride() == b.tensor.stride()
        for a, b in zip(one.tensors, two.tensors, strict=True)
    )


def test_lbfgs_keeps_lists_of_tensors() -> None:
    model, own = make(optimizer=torch.optim.LBFGS)
    adapter = PlainAdapter({"": model}, {"": own})
    values = adapter.observe().values
    assert isinstance(values, dict)
    assert values["optimizers"][""]["plain"] == {}


def test_loading_writes_in_place() -> None:
    model, own = make()
    train(model, own, 2)
    adapter = PlainAdapter({"": model}, {"": own})
    addresses = [item.tensor.data_ptr() for item in adapter.observe().tensors]
    other, other_optimizer = make(1)
    train(other, other_optimizer, 1)
    carry(PlainAdapter({"": other}, {"": other_optimizer}), adapter)
    assert [item.tensor.data_ptr() for item in adapter.observe().tensors] == addresses


def test_a_buffer_of_another_shape_comes_back_where_it_was() -> None:
    model, twin = nn.Linear(2, 2), nn.Linear(2, 2)
    for name, live in [("grown", torch.zeros(2)), ("new", None)]:
        model.register_buffer(name, torch.ones(3))
        twin.register_buffer(name, live)
    adapter, other = PlainAdapter({"": model}, {}), PlainAdapter({"": twin}, {})
    twin.grown = torch.zeros(2, device="meta")
    carry(adapter, other)
    assert twin.grown.device.type == "meta", "the device of the one before, not that of the parameters"
    assert twin.new.tolist() == [1.0, 1.0, 1.0]


class Late(nn.Module):
    """A module whose first forward registers a new buffer and replaces a buffer.

    At first, three buffers are names of the same tensor. After the first forward, one of them is a different tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        one = torch.zeros(1)
        self.register_buffer("a", one)
        self.register_buffer("b", one)
        self.register_buffer("c", one)
        self.inner = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self.inner, "mean"):
            self.inner.register_buffer("mean", x.mean(), persistent=False)
        self.a = self.a + x
        return self.inner(x)


def test_a_buffer_that_appears_after_init_is_kept_and_one_that_has_parted_from_another_too() -> None:
    model, twin = Late(), Late()
    adapter, other = PlainAdapter({"x": model}, {}), PlainAdapter({"x": twin}, {})
    carry(adapter, other)
    assert twin.a is twin.b is twin.c, "as before the first forward"
    names = [item.name for item in adapter.observe().tensors]
    assert names == ["model/x.inner.weight", "model/x.inner.bias", "model/x.a"], "one tensor is copied once"
    model(torch.ones(1))
    for _ in range(2):  # load the state twice, because a script may do so
        carry(adapter, other)
    assert (twin.a.item(), twin.b.item(), twin.inner.mean.item()) == (1.0, 0.0, 1.0)
    assert twin.b is twin.c is not twin.a
    assert twin.state_dict().keys() == model.state_dict().keys(), "no more of it is persistent"
    assert [item.name for item in other.observe().tensors] == [item.name for item in adapter.observe().tensors]
    del model.inner.mean
    carry(adapter, other)
    assert twin.inner.mean is None


def test_a_buffer_that_appears_while_another_goes_is_kept() -> None:
    model, twin = Late(), Late()
    adapter, other = PlainAdapter({"": model}, {}), PlainAdapter({"": twin}, {})
    del model.b
    model(torch.ones(1))
    carry(adapter, other)
    assert twin.b is None
    assert twin.inner.mean.item() == 1.0


class Scale(nn.Module):
    """A module without parameters, so that no parameter shows its device."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("peak", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.peak = x.max()
        self.register_buffer("seen", x.sum())
        self.register_buffer("count", torch.ones(1))
        return x


def test_a_buffer_that_is_made_anew_lies_where_it_lay() -> None:
    model, twin = Scale(), Scale()
    adapter, other = PlainAdapter({"": model}, {}), PlainAdapter({"": twin}, {})
    model(torch.ones(1, device="meta"))
    state = adapter.observe()
    load(other, {item.name: torch.ones(item.tensor.shape) for item in state.tensors}, state.values)
    assert {name: buffer.device.type for name, buffer in twin.named_buffers()} == {
        "peak": "meta",
        "seen": "meta",
        "count": "cpu",
    }


def test_the_buffers_of_a_module_that_two_models_share_come_back() -> None:
    def make(value: float) -> tuple[nn.Module, PlainAdapter]:
        shared = nn.Linear(1, 1)
        shared.register_buffer("mean", torch.full((1,), value))
        return shared, PlainAdapter({"actor": nn.Sequential(shared), "critic": nn.Sequential(shared)}, {})

    (_, adapter), (twin, other) = make(1), make(0)
    carry(adapter, other)
    assert twin.mean.item() == 1.0


def wrapped(model: nn.Module) -> nn.Module:
    """Return a module that contains the model as torch.compile and DDP would."""
    return nn.ModuleDict({"_orig_mod": nn.ModuleDict({"module": model})})


class Outer(nn.Module):
    """A module that calls an inner module as wrappers do and registers a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("mean", x.mean())
        return self.module(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("around", [lambda model: model, wrapped])
@pytest.mark.parametrize("around_twin", [lambda model: model, wrapped])
def test_a_buffer_that_appears_after_init_finds_its_owner_whatever_is_around_the_model(
    around: Callable[[nn.Module], nn.Module], around_twin: Callable[[nn.Module], nn.Module]
) -> None:
    (model, outer), (twin, outer_twin) = (Late(), Outer()), (Late(), Outer())
    adapter = PlainAdapter({"x": around(model), "y": around(outer)}, {})
    model(torch.ones(1))
    outer(torch.ones(1))
    carry(adapter, PlainAdapter({"x": around_twin(twin), "y": around_twin(outer_twin)}, {}))
    assert (twin.a.item(), twin.inner.mean.item(), outer_twin.mean.item()) == (1.0, 1.0, 1.0)
    assert "mean" not in dict(outer_twin.module.named_buffers())


def test_what_was_made_in_inference_mode_is_written_to_when_it_comes_back() -> None:
    def make() -> nn.Module:
        model = nn.ModuleDict({"student": nn.Linear(2, 2)})
        with torch.inference_mode():
            model["teacher"] = nn.Linear(2, 2).requires_grad_(False)
            model.register_buffer("mean", torch.rand(4))
        return model

    model, twin = make(), make()
    carry(PlainAdapter({"": model}, {}), PlainAdapter({"": twin}, {}))
    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in model.state_dict().items())
    assert twin["student"].weight.requires_grad
    twin["student"](torch.ones(1, 2)).sum().backward()


def test_an_expanded_buffer_comes_back_and_an_expanded_parameter_is_refused() -> None:
    model, twin = nn.Linear(2, 2), nn.Linear(2, 2)
    for one, value in ((model, 3.0), (twin, 0.0)):
        one.register_buffer("mask", torch.full((1, 4), value).expand(3, 4), persistent=False)
    carry(PlainAdapter({"": model}, {}), PlainAdapter({"": twin}, {}))
    assert torch.equal(twin.mask, torch.full((3, 4), 3.0))
    twin.weight = nn.Parameter(torch.ones(1, 2).expand(2, 2))
    with pytest.raises(CannotResume, match="model/weight: an expanded tensor"):
        PlainAdapter({"": twin}, {})


@pytest.mark.parametrize(
    "view", [torch.ones(2, dtype=torch.complex64).conj(), torch._neg_view(torch.ones(2))], ids=["conj", "neg"]
)
def test_a_tensor_whose_bytes_are_not_its_values_is_refused(view: torch.Tensor) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("table", view)
    for name, module in (("weight", nn.ParameterDict({"weight": nn.Parameter(view)})), ("table", model)):
        with pytest.raises(CannotResume, match=f"^model/{name}: a conjugate or negative view"):
            PlainAdapter({"": module}, {})


@pytest.mark.parametrize(
    "buffer",
    [
        torch.eye(2).to_sparse(),
        TwoTensor(torch.ones(2), torch.ones(2)),
        nn.UninitializedBuffer(),
        torch.ones(2, device="meta"),
    ],
    ids=["sparse", "composed", "lazy", "meta"],
)
def test_a_buffer_that_cannot_be_copied_as_bytes_is_refused(buffer: torch.Tensor) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("table", buffer)
    with pytest.raises(CannotResume, match=r"^model/net\.0\.table: a (lazy )?tensor"):
        PlainAdapter({"net": model}, {})


@pytest.mark.parametrize(
    ("key", "options", "device"),
    [
        ("step", {}, "cpu"),
        ("mu_product", {}, "cpu"),
        ("mu_product", {"capturable": True}, "meta"),
        ("step", {"fused": True}, "meta"),
        ("flat", {}, "meta"),
    ],
)
def test_state_that_is_not_there_yet_is_made_where_a_step_makes_it(
    key: str, options: dict[str, bool], device: str
) -> None:
    parameter = nn.Parameter(torch.empty(2, 2, device="meta"))
    optimizer = torch.optim.SGD([parameter], lr=1)
    named = NamedOptimizer("", optimizer, [("weight", parameter)], plain_local, plain_rewrap)
    optimizer.param_groups[0].update(options)
    saved = Saved({f"optimizer/weight/{key}": torch.ones(())})
    named.load(saved, {"groups": [dict(options)], "plain": {}, "shared": {}})
    assert optimizer.state[parameter][key].device.type == device


class Shared(torch.optim.SGD):
    """An optimizer with one state shared by all parameters."""

    def step(self, closure: Any = None) -> Any:
        shared = self.state["shared"]
        shared["count"] = shared.get("count", 0) + 1
        shared["sum"] = shared.get("sum", torch.zeros(2)) + 1
        return super().step(closure)


def test_state_that_belongs_to_no_parameter_comes_back() -> None:
    model, own = make(optimizer=Shared, momentum=0.9)
    twin, other = make(1, optimizer=Shared, momentum=0.9)
    adapter, restored = (
        PlainAdapter({"": model}, {"": own}, (Shared,)),
        PlainAdapter({"": twin}, {"": other}, (Shared,)),
    )
    other.state["stale"] = {"count": 4}
    for steps in (2, 1):
        train(model, own, steps)
        carry(adapter, restored)
        assert other.state["shared"]["count"] == own.state["shared"]["count"]
        assert torch.equal(other.state["shared"]["sum"], own.state["shared"]["sum"])
    assert "stale" not in other.state
    assert len(other.state) == len(own.state)


def test_state_that_the_snapshot_lacks_is_dropped() -> None:
    fresh, fresh_optimizer = make()
    model, own = make(1)
    train(model, own, 2)
    carry(PlainAdapter({"": fresh}, {"": fresh_optimizer}), PlainAdapter({"": model}, {"": own}))
    assert own.state == {}


def test_who_is_deferred() -> None:
    model = nn.ModuleDict(
        {"in": nn.Linear(2, 2, bias=False), "frozen": nn.Linear(2, 2, bias=False), "loose": nn.Linear(2, 2, bias=False)}
    )
    model["frozen"].requires_grad_(False)
    model.register_buffer("count", torch.zeros(1))
    adapter = PlainAdapter({"": model}, {"": torch.optim.SGD(model["in"].parameters(), lr=1)})
    assert {item.name: item.is_deferred for item in adapter.observe().tensors} == {
        "model/in.weight": True,
        "model/frozen.weight": True,
        "model/loose.weight": False,
        "model/count": False,
    }


def test_parameters_without_gradients_are_declared_frozen_until_they_require_gradients() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    model[0].requires_grad_(False)
    adapter = PlainAdapter({"": model}, {"": torch.optim.SGD(model.parameters(), lr=1)})

    def frozen() -> list[str]:
        return [item.name for item in adapter.observe().tensors if item.is_frozen]

    assert frozen() == ["model/0.weight"]
    model[0].requires_grad_(True)
    model[1].requires_grad_(False)
    assert frozen() == ["model/1.weight"]


def test_ties_and_parameters_without_a_module_have_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    alone = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([*model.parameters(), alone], lr=1)
    adapter = PlainAdapter({"": model}, {"": optimizer})
    assert [item.name for item in adapter.observe().tensors] == ["model/0.weight", "model/group0.1"]
    assert adapter.facts()["tie model/1.weight"] == "0.weight"


def test_facts_tell_algorithms_apart() -> None:
    def facts(**options: Any) -> dict[str, str]:
        model, optimizer = make(**options)
        return PlainAdapter({"": model}, {"": optimizer}).facts()

    assert facts() == facts(lr=0.7), "a schedule may change the rate"
    assert facts() != facts(amsgrad=True)
    assert facts() != facts(foreach=True)
    assert facts() != facts(optimizer=torch.optim.Adam)


@pytest.mark.parametrize("accumulates", [True, False])
def test_gradients_that_are_still_accumulating_are_state(accumulates: bool) -> None:
    model, own = make()
    adapter = PlainAdapter({"": model}, {"": own})
    model(torch.randn(5, 3)).sum().backward()
    if not accumulates:
        own.step()
    adapter.end_step()
    names = [item.name for item in adapter.observe().tensors if item.name.startswith("gradient/")]
    assert bool(names) == accumulates
    other, other_optimizer = make(1)
    twin = PlainAdapter({"": other}, {"": other_optimizer})
    carry_without_step = adapter.observe()
    load(
        twin,
        {item.name: item.tensor.detach().clone() for item in carry_without_step.tensors},
        carry_without_step.values,
    )
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert torch.equal(two.grad, one.grad if accumulates else torch.zeros_like(one.grad))


def test_memory_is_set_aside_for_the_gradients_that_lie_in_it_and_for_no_others(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def noting(size: int) -> Arena:
        sizes.append(size)
        return Arena(size)

    monkeypatch.setattr(plain, "Arena", noting)
    # In this test, meta tensors replace tensors in device memory. The check would refuse them.
    monkeypatch.setattr(plain, "check_parameter", lambda *_: None)
    parts: dict[str, torch.Tensor] = {
        "sharded": distribute_tensor(torch.ones(4, 16), mesh, [Shard(0)]),
        "turned": torch.ones(4, 8).t(),
        "idle": torch.ones(64),
        "away": torch.ones(64, device="meta"),
    }
    model = nn.ParameterDict(parts)
    adapter = FSDPAdapter({"": model}, {})
    for name, parameter in model.items():
        parameter.grad = None if name == "idle" else torch.zeros_like(parameter)
    carry(adapter, adapter)
    assert sizes == [2 * 16 * 4], "a rank makes its own part"
    assert [name for name, parameter in model.items() if parameter.grad is None] == ["idle"]


def gradients(adapter: PlainAdapter) -> list[str]:
    return [item.name for item in adapter.observe().tensors if item.name.startswith("gradient/")]


def test_a_step_that_was_skipped_does_not_make_gradients_state_for_ever() -> None:
    model, own = make(optimizer=torch.optim.SGD)
    adapter = PlainAdapter({"": model}, {"": own})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    found = []
    for step in range(2 * GRADIENT_BOUNDARIES):
        own.zero_grad()
        scaler.scale(model(torch.randn(5, 3)).sum()).backward()
        if step == 2:
            next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        scaler.step(own)
        scaler.update()
        adapter.end_step()
        found.append(bool(gradients(adapter)))
    assert found[:2] == [False, False]
    assert all(found[2 : 2 + GRADIENT_BOUNDARIES])
    assert not any(found[2 + GRADIENT_BOUNDARIES :])


@pytest.mark.parametrize(
    ("clear", "adds_up"),
    [
        (lambda model, own: None, True),
        (lambda model, own: [parameter.grad.mul_(0.5) for parameter in model.parameters()], True),
        (lambda model, own: own.zero_grad(), False),
        (lambda model, own: own.zero_grad(set_to_none=False), False),
        (lambda model, own: model.zero_grad(), False),
    ],
    ids=["never", "by half", "to None", "to zero", "by the model"],
)
def test_gradients_that_the_script_does_not_clear_are_state(
    clear: Callable[[nn.Module, torch.optim.Optimizer], object], adds_up: bool
) -> None:
    model, own = make(optimizer=torch.optim.SGD)
    adapter = PlainAdapter({"": model}, {"": own})
    found = []
    for step in range(GRADIENT_BOUNDARIES + 4):
        if step:
            clear(model, own)
        model(torch.randn(5, 3)).sum().backward()
        own.step()
        adapter.end_step()
        found.append(bool(gradients(adapter)))
    assert found[2:] == [adds_up] * (GRADIENT_BOUNDARIES + 2)


def test_a_gradient_that_was_sparse_is_sparse_again() -> None:
    model, twin = (nn.Embedding(6, 3, sparse=True) for _ in range(2))
    own, other = (torch.optim.SparseAdam(list(each.parameters())) for each in (model, twin))
    adapters = [PlainAdapter({"": model}, {"": own}), PlainAdapter({"": twin}, {"": other})]
    model(torch.tensor([1, 2])).sum().backward()
    own.step()
    carry(*adapters)
    assert twin.weight.grad is not None
    assert twin.weight.grad.is_sparse
    other.zero_grad(set_to_none=False)
    twin(torch.tensor([1, 2])).sum().backward()
    other.step()


@pytest.mark.parametrize("is_summed", [True, False])
@pytest.mark.parametrize("is_used", [True, False])
def test_a_sparse_gradient_stays_sparse_while_others_add_up(is_used: bool, is_summed: bool) -> None:
    models, adapters = [], []
    for _ in range(2):
        model = nn.ModuleDict({"words": nn.Embedding(90, 9, sparse=True), "last": nn.Linear(9, 1)})
        own = torch.optim.SparseAdam(model["words"].parameters())
        adapters.append(PlainAdapter({"": model}, {"words": own, "last": torch.optim.SGD(model["last"].parameters())}))
        models.append(model)
    words = torch.tensor([1, 2, 2, 3] * 20)
    models[0]["last"](models[0]["words"](words)).square().sum().backward()
    gradient = models[0]["words"].weight.grad
    if is_summed:
        gradient = models[0]["words"].weight.grad = gradient.coalesce()
    if is_used:
        adapters[0].optimizers()["words"].step()
    carry(*adapters)
    restored = models[1]["words"].weight.grad
    assert restored.is_sparse
    assert torch.equal(models[1]["last"].weight.grad, models[0]["last"].weight.grad)
    if is_used:
        assert not restored.to_dense().any()
    else:
        assert restored.is_coalesced() == is_summed
        assert torch.equal(restored._indices(), gradient._indices())
        assert torch.equal(restored._values(), gradient._values())


def test_the_state_of_an_optimizer_comes_back_in_its_order() -> None:
    model, twin = (nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3)) for _ in range(2))
    own, other = (torch.optim.AdamW(each.parameters()) for each in (model, twin))
    adapters = [PlainAdapter({"": model}, {"": own}), PlainAdapter({"": twin}, {"": other})]
    for used in (2, 0, 1):
        own.zero_grad()
        model[used](torch.ones(1)).backward()
        own.step()
    carry(*adapters)
    places = {id(parameter): number for number, parameter in enumerate(twin.parameters())}
    assert [places[id(parameter)] for parameter in other.state] == [2, 0, 1]


@pytest.mark.parametrize("every", [2, 3, 3 * GRADIENT_BOUNDARIES])
def test_accumulating_across_boundaries_keeps_one_plan(every: int) -> None:
    model, own = make(optimizer=torch.optim.SGD)
    adapter = PlainAdapter({"": model}, {"": own})
    found = []
    for step in range(4 * every):
        model(torch.randn(5, 3)).sum().backward()
        if step % every == every - 1:
            own.step()
            own.zero_grad()
        adapter.end_step()
        found.append(len(gradients(adapter)))
    assert set(found) == {len(list(model.parameters()))}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sharded_tensor_is_made_over_the_memory_it_is_given(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    parameter = distribute_tensor(torch.ones(3, 4), mesh, [Shard(0)])
    local = torch.full((2, 4), 7.0, dtype=dtype)
    # simulate parameters in host memory whose mesh consists of GPUs
    monkeypatch.setattr(mesh, "_device_type", "meta")
    made = FSDPAdapter({}, {}).rewrap(parameter, local)
    assert isinstance(made, DTensor)
    assert made._local_tensor is local
    assert not made.requires_grad
    assert made._spec.tensor_meta == TensorMeta(parameter.shape, parameter.stride(), dtype)
    assert made.placements == parameter.placements


class Foreign(torch.optim.SGD):
    """An optimizer that counts its steps outside of `state`."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


class Known(torch.optim.SGD):
    """An unknown class that keeps all state where a snapshot finds it."""


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(lambda: closure())


def test_unknown_classes_are_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CannotResume, match=r"^optimizer: Everstep does not know whether .*\.Foreign restores"):
        PlainAdapter({"": model}, {"": Foreign(model.parameters(), lr=1)})
    PlainAdapter({"": model}, {"": Foreign(model.parameters(), lr=1)}, trusted=(Foreign,))
    with pytest.raises(CannotResume, match="could not make a step: TypeError"):
        PlainAdapter({"": model}, {"": NeedsClosure(model.parameters(), lr=1)})


def test_a_class_that_a_trial_accepts_stays_as_it_was() -> None:
    model = nn.Linear(2, 2)
    optimizer = Known(model.parameters(), lr=1, momentum=0.9)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before, draws = [each.clone() for each in model.parameters()], torch.get_rng_state()
    PlainAdapter({"": model}, {"": optimizer})
    assert all(map(torch.equal, model.parameters(), before))
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), draws)


def test_masters_that_an_optimizer_keeps_elsewhere_are_refused() -> None:
    fused = type("FusedAdam", (torch.optim.SGD,), {"__module__": "apex.optimizers.fused_adam"})
    model = nn.Linear(2, 2)
    optimizer = fused(model.parameters(), lr=1)
    optimizer.master_weights = False
    PlainAdapter({"": model}, {"": optimizer})
    optimizer.master_weights = True
    with pytest.raises(
        CannotResume, match=r"^optimizer: apex\.optimizers\.fused_adam\.FusedAdam with master_weights=True"
    ):
        PlainAdapter({"": model}, {"": optimizer}, trusted=(fused,))


def test_models_that_cannot_come_back_are_refused_by_name() -> None:
    with pytest.raises(CannotResume, match="DataParallel"):
        _adapters({"": nn.DataParallel(nn.Linear(2, 2))}, {}, {}, ())
    with pytest.raises(CannotResume, match="lazy"):
        _adapters({"": nn.LazyLinear(2)}, {}, {}, ())
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))
    with pytest.raises(CannotResume, match=r"^model/weight: a tensor of class .*\.TwoTensor consists of other tensors"):
        _adapters({"": model}, {}, {}, ())
    with pytest.raises(SessionMisuse, match="needs a model"):
        _adapters({}, {}, {}, ())


def test_gradients_that_are_still_to_be_summed_are_refused_as_state(mesh: DeviceMesh) -> None:
    weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    model = nn.ParameterDict({"weight": weight})
    adapter = FSDPAdapter({"": model}, {"": torch.optim.SGD([weight], lr=1)})
    for placement in (Replicate(), Partial()):
        weight.grad = DTensor.from_local(torch.ones(4), mesh, [placement], run_check=False)
        adapter.end_step()
        if placement.is_replicate():
            assert gradients(adapter) == ["gradient/weight"]
        else:
            with pytest.raises(
                CannotResume, match=r"^gradient/weight: the gradient is accumulated across a step as \(Partial"
            ):
                adapter.observe()


def test_parameters_that_are_sharded_need_no_wrapper(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sharded = parallelize_module(model, mesh, {"0": ColwiseParallel()})
    (adapter,) = _adapters({"": sharded}, {"": torch.optim.SGD(model.parameters(), lr=1)}, {}, ())
    assert [(type(item.tensor), list(item.tensor.shape)) for item in adapter.observe().tensors] == [
        (torch.Tensor, [2, 4]),
        (torch.Tensor, [2]),
        (nn.Parameter, [4, 4]),
        (nn.Parameter, [4]),
    ]
    watched = Sources(list(enumerate(adapter.observe().tensors)))
    marks = watched.marks()
    with torch.no_grad():
        model[0].bias.add_(1)
    assert watched.moved(marks) == ["model/0.bias"], "torch counts it in the DTensor alone"
    with pytest.raises(CannotResume, match=r"Adafactor with fully_shard or tensor parallel"):
        _adapters({}, {"": torch.optim.Adafactor(model.parameters())}, {}, ())


@pytest.mark.parametrize(
    ("raw", "name"),
    [("_orig_mod.module.a.weight", "a.weight"), ("a._checkpoint_wrapped_module.b", "a.b"), ("modules.a", "modules.a")],
)
def test_wrappers_leave_names_alone(raw: str, name: str) -> None:
    assert canonical_name(raw) == name


class OwnModule(nn.Module):
    """A module that names its inner module `module`, as wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.BatchNorm1d(2)
        self.weight = nn.Parameter(torch.full((2,), 5.0))
        self.register_buffer("running_mean", torch.full((2,), 6.0))
        self.again = self.module


@pytest.mark.parametrize(
    "wrap", [lambda module: module, lambda module: nn.ModuleDict({"module": module})], ids=["alone", "wrapped"]
)
def test_tensors_that_would_be_called_alike_keep_their_own_names(wrap: Callable[[nn.Module], nn.Module]) -> None:
    inner, other = OwnModule(), OwnModule()
    model, twin = wrap(inner), wrap(other)
    with torch.no_grad():
        other.weight.zero_()
        other.running_mean.zero_()
    adapter = PlainAdapter({"": model}, {"": torch.optim.SGD(model.parameters(), lr=1)})
    names = [item.name for item in adapter.observe().tensors]
    assert len(set(names)) == len(names) == 7
    assert adapter.facts().keys() >= {"tie model/again.weight", "tensor model/bias"}
    carry(adapter, PlainAdapter({"": twin}, {"": torch.optim.SGD(twin.parameters(), lr=1)}))
    assert other.weight.tolist() == [5.0, 5.0]
    assert other.running_mean.tolist() == [6.0, 6.0]
    assert other.module.weight.tolist() == [1.0, 1.0]


class Scaled(nn.Linear):
    """A layer with state outside its parameters and buffers, as 8-bit float layers have."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.history: Any = {"largest": [torch.zeros(500)], "calls": 0}
        self.weights_seen: list[float] = []

    def get_extra_state(self) -> Any:
        return self.history

    def set_extra_state(self, state: Any) -> None:
        self.history = state
        self.weights_seen = self.weight.detach().flatten().tolist()


class Giving(nn.Linear):
    def get_extra_state(self) -> Any:
        return {}


def test_the_extra_state_of_modules_comes_back_behind_their_tensors() -> None:
    model, twin = nn.Sequential(Scaled()), nn.Sequential(Scaled())
    model[0].history = {"largest": [torch.arange(500.0), torch.ones(1)], "calls": 3}
    adapter, other = PlainAdapter({"": model}, {}), PlainAdapter({"": twin}, {})
    observed = adapter.observe()
    values = encode(observed.values, "")
    assert [name for name, _ in values.tensors] == ["/extra_states/0.extra_state/largest/0"]
    saved = Saved({item.name: item.tensor.detach().clone() for item in observed.tensors})
    tensors = {name: tensor.clone() for name, tensor in values.tensors}
    model[0].history["calls"] = 4
    other.load(saved, decode(values.data, tensors.__getitem__))
    assert twin[0].history["calls"] == 0, "its weights are not there yet"
    saved.finish()
    other.synchronize()
    assert twin[0].history["calls"] == 3
    assert [tensor.tolist() for tensor in twin[0].history["largest"]] == [list(range(500)), [1.0]]
    assert twin[0].weights_seen == model[0].weight.detach().flatten().tolist()
    assert "extra state model/0.extra_state" in adapter.facts()


def test_extra_state_that_cannot_come_back_is_refused() -> None:
    scaled = Scaled()
    scaled.history["recipe"] = object()
    with pytest.raises(CannotResume, match=r"^model/0\.extra_state/recipe: a value of type builtins\.object"):
        PlainAdapter({"": nn.Sequential(scaled)}, {})
    with pytest.raises(
        CannotResume, match=r"^model/net\.extra_state: .*Giving has get_extra_state but no set_extra_state"
    ):
        PlainAdapter({"net": Giving(1, 1)}, {})


def test_names_do_not_tell_a_wrapped_launch_from_another() -> None:
    model, _ = make()
    plain, wrapped = (
        PlainAdapter({"": module}, {})
        for module in (model, nn.ModuleDict({"_orig_mod": nn.ModuleDict({"module": model})}))
    )
    assert [item.name for item in plain.observe().tensors] == [item.name for item in wrapped.observe().tensors]


def test_two_tensors_of_one_name_are_refused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    with pytest.raises(CannotResume, match=r"^model/a\.weight: two tensors have this name"):
        PlainAdapter({"": model, "a": nn.Linear(2, 2)}, {})
    loose = nn.ParameterDict({"group0": nn.ParameterDict({"0": nn.Parameter(torch.ones(1))})})
    with pytest.raises(CannotResume, match=r"^model/group0\.0: two tensors have this name"):
        PlainAdapter({"": loose}, {"": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)})


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: torch.optim.Adam(parameters),
        lambda parameters: torch.optim.AdamW(parameters, amsgrad=True, fused=True),
        lambda parameters: torch.optim.NAdam(parameters),
        lambda parameters: torch.optim.RAdam(parameters),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.Adagrad(parameters),
    ],
    ids=["Adam", "AdamW", "NAdam", "RAdam", "momentum", "SGD", "Adagrad"],
)
def test_what_is_foreseen_is_what_the_first_step_brings(make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1, dtype=torch.float64).requires_grad_(False)
    )
    own = make_optimizer(model.parameters())
    adapter = PlainAdapter({"": model}, {"": own})
    foreseen = adapter.forecast()
    assert foreseen is not None
    plan = CapturePlan.make(foreseen.tensors)
    model[1](model[0](torch.randn(5, 3))).sum().backward()
    own.step()
    assert plan.fits(adapter.observe().tensors)


def test_an_optimizer_that_nobody_knows_is_not_foreseen() -> None:
    model = nn.Linear(3, 1)
    own = torch.optim.Rprop(model.parameters())
    adapter = PlainAdapter({"": model}, {"": own})
    assert adapter.forecast() is None
    assert not adapter.expect_restore()
    model(torch.randn(5, 3)).sum().backward()
    own.step()
    assert adapter.forecast() is not None, "now it has a state to look at"


def test_lists_are_the_same_objects_until_a_tensor_is_another() -> None:
    model, own = make()
    adapter = PlainAdapter({"": model}, {"": own})
    model(torch.randn(5, 3)).sum().backward()
    own.step()
    first = adapter.observe()
    own.step()
    second = adapter.observe()
    assert all(one is other for one, other in zip(first.lists, second.lists, strict=True))
    state = own.state[next(iter(model.parameters()))]
    key = next(key for key, value in state.items() if value.numel() > 1)
    state[key] = state[key].clone()
    third = adapter.observe()
    assert third.lists[0] is first.lists[0]
    assert third.lists[1] is not first.lists[1]
    assert [item.tensor for item in third.lists[1] if item.tensor is state[key]]
    next(iter(model.parameters())).requires_grad_(False)
    assert adapter.observe().lists[0] is not first.lists[0]


def test_a_restore_makes_new_state_in_the_memory_set_aside() -> None:
    model, own = make()
    adapter = PlainAdapter({"": model}, {"": own})
    model(torch.randn(5, 3)).sum().backward()
    own.step()
    saved = adapter.observe()
    tensors = {item.name: item.tensor.detach().clone() for item in saved.tensors}
    fresh_model, fresh_own = make()
    fresh = PlainAdapter({"": fresh_model}, {"": fresh_own})
    (arena,) = fresh.expect_restore()
    arena.prefault()
    load(fresh, tensors, saved.values)
    loaded = {item.name: item.tensor for item in fresh.observe().tensors}
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    begin = torch.frombuffer(arena._map, dtype=torch.uint8).data_ptr()
    moments = [
        tensor for name, tensor in loaded.items() if name.startswith("optimizer/") and not name.endswith("/step")
    ]
    assert moments
    assert all(begin <= tensor.data_ptr() < begin + len(arena._map) for tensor in moments)
    assert not fresh._optimizers[0].arenas


@pytest.mark.parametrize("shape", [(5, 3), (1, 4), (3, 2)])
def test_the_boxes_of_all_ranks_cover_a_sharded_tensor_once(shape: tuple[int, int]) -> None:
    """Two dimensions of a tensor are sharded unevenly over 2 × 2 ranks, and some ranks have no element.

    The described boxes of all ranks cover each element exactly once.
    """
    taken = torch.zeros(shape, dtype=torch.int64)
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        try:
            tensor = distribute_tensor(torch.zeros(shape), init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)])
            boxes = Boxes()
            parts = boxes.of("model/weight", tensor, tuple(tensor._local_tensor.shape))
            assert boxes.of("model/weight", tensor, (9, 9)) == ()
            assert [part.name for part in boxes.of("other", tensor, tuple(tensor._local_tensor.shape))] == [
                "other" for _ in parts
            ], "a second tensor of this shape and placement has the same box under its own name"
        finally:
            dist.destroy_process_group()
        assert sum(part.elements for part in parts) == tensor._local_tensor.numel()
        for part in parts:
            assert (part.name, part.shape, part.start) == ("model/weight", shape, 0)
            taken[tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))] += 1
    assert taken.eq(1).all()


def test_a_tied_parameter_has_both_names_and_a_buffer_that_is_not_persistent_has_none() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("cache", torch.ones(2), persistent=False)
    model.register_buffer("mean", torch.ones(2))
    adapter = PlainAdapter({"": model}, {"": torch.optim.SGD(model.parameters(), lr=1)})
    parts = adapter.parts(adapter.observe().tensors)
    assert parts == {
        "model/0.weight": (whole("model/0.weight", (3, 3)), whole("model/1.weight", (3, 3))),
        "model/cache": (),
    }


def test_boxes_that_do_not_fit_a_tensor_leave_it_without_boxes() -> None:
    state = StateTensor("optimizer/w/odd", torch.ones(4), True)
    good = TensorPart("a", (4,), (0,), (3,), 1)
    for parts, expected in (((good,), (good,)), ((good, TensorPart("b", (9,), (0,), (2,), 0)), ())):
        plan = CapturePlan.make([state], {state.name: parts})
        assert plan.entries[0].parts == expected
