"""Tests the state of a DeepSpeed engine, and of objects that a script registers beside the engine.

Fake engines with the class name of DeepSpeed's engine replace real ones.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from everstep.protocol.ids import Step
from everstep.training.adapters import deepspeed
from everstep.training.capture import CapturePlan, StateTensor
from everstep.training.earlier import EarlierState
from everstep.training.errors import CannotRelayout, CannotResume, SessionMisuse
from everstep.training.registration import _adapters
from everstep.training.script import Environment
from everstep.training.state import RankState
from tests.unit.training.saved import carry
from tests.unit.training.test_deepspeed_refusals import STAGE_1, STAGE_3, engine


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "deepspeed_version", lambda: "0")
    monkeypatch.setattr(deepspeed, "gather_stage_1_and_2", lambda _: None)
    monkeypatch.setattr(deepspeed, "gather_stage_3", lambda _: None)


def make(
    module: nn.Module | None = None, held: list[nn.Parameter] | None = None, stage: int = 1, **changes: Any
) -> Any:
    """Return an engine of a single rank. Its optimizer holds all parameters or some of them."""
    module = nn.Linear(2, 2) if module is None else module
    held = list(module.parameters()) if held is None else held
    master = nn.Parameter(torch.zeros(sum(parameter.numel() for parameter in held)))
    own = {"optimizer": torch.optim.SGD([master], lr=1), "loss_scaler": SimpleNamespace()}
    if stage == 3:
        zero = STAGE_3(fp32_partitioned_groups_flat=[master], fp16_groups=[held], **own)
    else:
        zero = STAGE_1(single_partition_of_fp32_groups=[master], bit16_groups=[held], **own)
    made = engine(
        optimizer=lambda: zero,
        zero_optimization_stage=stage,
        gradient_accumulation_steps=4,
        managed_gradient_accumulation=True,
    )
    counters = {
        "global_steps": 0,
        "global_samples": 0,
        "micro_steps": 0,
        "skipped_steps": 0,
        "_is_gradient_accumulation_boundary": None,
        "mpu": None,
        "autotp_size": lambda: 1,
    }
    vars(made).update({"module": module, "lr_scheduler": None, **counters, **changes})
    return made


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def names(*given: Any) -> list[str]:
    return [item.name for adapter in _adapters(*given, ()) for item in adapter.observe().tensors]


def test_an_optimizer_beside_an_engine_is_kept_and_the_engines_own_is_kept_once() -> None:
    actor, critic = make(), nn.Linear(2, 1, bias=False)
    kept = [
        "model/actor.master0",
        "model/weight",
        "optimizer/weight/step",
        "optimizer/weight/exp_avg",
        "optimizer/weight/exp_avg_sq",
    ]
    assert names({"": critic}, {"": stepped(critic)}, {"actor": actor}) == kept
    for own in (actor.optimizer, actor.optimizer.optimizer):
        assert names({}, {"": own}, {"": actor}) == ["model/master0"]
        assert names({"actor": actor, "": critic}, {"actor": own, "": stepped(critic)}, {}) == kept


def test_what_steps_an_engines_parameters_beside_it_is_refused() -> None:
    actor = make()
    with pytest.raises(CannotResume, match="optimizer: it contains parameters of engine actor"):
        _adapters({}, {"": torch.optim.SGD(actor.module.parameters(), lr=1)}, {"actor": actor}, ())


def partly_held(stage: int, value: float) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return an engine whose optimizer holds only one of three parameters.

    Also return this rank's part of the other two parameters, by name.
    """
    module = nn.ParameterDict({name: nn.Parameter(torch.full((4,), value)) for name in ("held", "left", "frozen")})
    module["frozen"].requires_grad_(False)
    if stage == 3:
        for parameter in module.values():
            parameter.ds_tensor = torch.full((2,), value)
    parts = {name: module[name].ds_tensor if stage == 3 else module[name] for name in ("left", "frozen")}
    return make(module, [module["held"]], stage), parts


@pytest.mark.parametrize("stage", [1, 3])
def test_a_trainable_parameter_that_the_optimizer_does_not_hold_is_kept_at_the_boundary(stage: int) -> None:
    (one, parts), (other, twins) = partly_held(stage, 3.0), partly_held(stage, 0.0)
    (adapter,), (twin,) = _adapters({}, {}, {"": one}, ()), _adapters({}, {}, {"": other}, ())
    assert {
        item.name: (item.tensor is parts.get(item.name.removeprefix("model/")), item.is_deferred, item.is_frozen)
        for item in adapter.observe().tensors
    } == {
        "model/master0": (False, True, False),
        "model/left": (True, False, False),
        "model/frozen": (True, True, True),
    }
    assert adapter.facts()["tensor model/left"] == f"float32[{len(parts['left'])}]"
    carry(RankState([adapter], {}, {}, Environment.read({})), RankState([twin], {}, {}, Environment.read({})))
    assert all(part.eq(3).all() for part in twins.values())


class Cached(nn.Module):
    def __init__(self, cosines: torch.Tensor, seen: torch.Tensor | None) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("seen", seen)


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        (torch.ones(16), torch.zeros(8)),
        (torch.ones(1), torch.zeros(8)),
        (torch.full((8,), 1 + 2**-12), torch.zeros(8, dtype=torch.bfloat16)),
    ],
)
def test_an_engines_buffer_comes_back_as_it_was(saved: torch.Tensor, live: torch.Tensor) -> None:
    one, other = make(Cached(live.clone(), None)), make(Cached(live.clone(), None))
    state, twin = (RankState(_adapters({}, {}, {"": made}, ()), {}, {}, Environment.read({})) for made in (one, other))
    one.module.cosines, one.module.seen = saved, torch.ones(1)
    one.module.inner.eval()
    carry(state, twin)
    assert torch.equal(other.module.cosines, saved)
    assert other.module.cosines.dtype == saved.dtype
    assert other.module.seen.tolist() == [1.0]
    assert [module.training for module in other.module.modules()] == [True, False]


def test_an_engine_and_what_is_beside_it_have_names() -> None:
    critic = nn.Linear(2, 1)
    for models, optimizers in (({"": critic}, {}), ({"critic": critic}, {"": stepped(critic)}), ({"": make()}, {})):
        with pytest.raises(SessionMisuse, match="have the same name ''"):
            _adapters(models, optimizers, {"": make()}, ())
    many = [f"net{number}" for number in range(9, 0, -1)]
    # The message must name the same model in every launch and on every rank: the first in alphabetical order.
    with pytest.raises(SessionMisuse, match="have the same name 'net1'"):
        _adapters(dict.fromkeys(many, critic), {}, {name: make() for name in many}, ())


@pytest.mark.parametrize(
    ("micro_steps", "changes", "is_kept"),
    [
        (4, {}, True),
        (5, {}, False),
        (5, {"_is_gradient_accumulation_boundary": False}, True),
        (5, {"managed_gradient_accumulation": lambda: False}, True),
    ],
)
def test_half_summed_gradients_are_no_state(micro_steps: int, changes: dict[str, Any], is_kept: bool) -> None:
    one = make(**changes)
    (adapter,) = _adapters({}, {}, {"": one}, ())
    one.micro_steps = micro_steps
    if is_kept:
        adapter.check()
    else:
        with pytest.raises(
            CannotResume,
            match="engine: a boundary between the 4 micro-batches of a step cannot be saved; use accumulate=4",
        ):
            adapter.check()


def test_a_state_that_has_no_element_per_element_of_the_master_has_no_box() -> None:
    """An optimizer state with another number of elements than its parameters gets no box (position in the parameters).

    The box would not fit the state, and no reader would accept the slot.
    """
    made = make()
    adapter = deepspeed.DeepSpeedAdapter("", made)
    master = made.optimizer.single_partition_of_fp32_groups[0]
    for parameter, begin in zip(made.module.parameters(), (0, 4), strict=True):
        address = (
            SimpleNamespace(start=0, numel=parameter.numel()),
            SimpleNamespace(start=begin, numel=parameter.numel()),
        )
        parameter._hp_mapping = SimpleNamespace(
            lp_fragment_address=address[0], hp_fragment_address=address[1], param_group_index=0
        )
    tensors = {"step": torch.ones(()), "same": torch.ones(6), "table": torch.ones(256)}
    states = [StateTensor(f"optimizer/master0/{key}", tensor, True) for key, tensor in tensors.items()]
    parts = adapter.parts([StateTensor("model/engine.master0", master, True), *states])
    names = ("weight", "bias")
    assert [part.name for part in parts["optimizer/master0/step"]] == [f"optimizer/{name}/step" for name in names]
    assert [part.start for part in parts["optimizer/master0/same"]] == [0, 4]
    assert parts["optimizer/master0/table"] == ()


@pytest.mark.parametrize("changes", [{"mpu": object()}, {"tensor_parallel": 2}])
def test_slices_of_tensor_parallelism_in_deepspeed_have_no_boxes(changes: dict[str, Any]) -> None:
    made = make(mpu=changes.get("mpu"))
    made.autotp_size = lambda: changes.get("tensor_parallel", 1)
    adapter = deepspeed.DeepSpeedAdapter("", made)
    assert set(adapter.parts(adapter.observe().tensors).values()) == {()}


def earlier_values(adapter: Any, step: int, **others: Any) -> EarlierState:
    """Return the adapter's values as an `EarlierState`, which a launch with another layout reads."""
    return EarlierState(Step(step), adapter.facts(), adapter.observe().values, {"objects": others})


def test_an_engine_foresees_the_state_after_its_first_step_if_its_optimizer_is_of_a_known_class() -> None:
    engine = make()
    master = engine.optimizer.single_partition_of_fp32_groups[0]
    engine.optimizer.optimizer = torch.optim.Adam([master])
    (adapter,) = _adapters({}, {}, {"": engine}, ())
    foreseen = adapter.forecast()
    assert foreseen is not None
    plan = CapturePlan.make(foreseen.tensors)
    assert not plan.fits(adapter.observe().tensors)
    master.grad = torch.ones_like(master)
    engine.optimizer.optimizer.step()
    assert plan.fits(adapter.observe().tensors)
    engine.optimizer.optimizer = torch.optim.Rprop([master])
    (unforeseen,) = _adapters({}, {}, {"": engine}, ())
    assert unforeseen.forecast() is None


def test_an_engine_counts_its_micro_batches_anew_when_its_accumulation_changes() -> None:
    before = make(global_steps=5, micro_steps=20, global_samples=80)
    after = make(train_batch_size=lambda: 16)
    after.gradient_accumulation_steps = lambda: 3
    (one,), (other,) = _adapters({}, {}, {"": before}, ()), _adapters({}, {}, {"": after}, ())
    translated: Any = other.translate(earlier_values(one, 5))
    assert translated["engine"] == {"global_steps": 5, "micro_steps": 15, "global_samples": 80, "skipped_steps": 0}


def test_an_engine_continues_the_steps_of_torch() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    (one,) = _adapters({"": model}, {"": optimizer}, {}, ())
    (other,) = _adapters({}, {}, {"": make(train_batch_size=lambda: 16)}, ())
    translated: Any = other.translate(earlier_values(one, 5))
    assert translated["engine"] == {"global_steps": 5, "micro_steps": 20, "global_samples": 80, "skipped_steps": 0}
    assert translated["optimizer"]["groups"][0]["lr"] == 0.25


def test_a_scheduler_that_the_engine_has_no_place_for_is_refused() -> None:
    before = make(lr_scheduler=SimpleNamespace(state_dict=lambda: {"last": 3}))
    (one,), (other,) = _adapters({}, {}, {"": before}, ()), _adapters({}, {}, {"": make()}, ())
    with pytest.raises(CannotRelayout, match="scheduler: the earlier launch had a scheduler"):
        other.translate(earlier_values(one, 5))


def test_torch_continues_the_groups_of_an_engine() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    before = make()
    before.optimizer.optimizer.param_groups[0]["lr"] = 0.125
    (one,), (other,) = _adapters({}, {}, {"": before}, ()), _adapters({"": model}, {"": optimizer}, {}, ())
    translated: Any = other.translate(earlier_values(one, 5))
    assert translated["optimizers"][""]["groups"][0]["lr"] == 0.125
    assert translated["gradients"] == bytes(2)
