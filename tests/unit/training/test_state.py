from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from everstep.training.adapters import deepspeed
from everstep.training.adapters.plain import PlainAdapter
from everstep.training.data import DataStream
from everstep.training.errors import CannotResume
from everstep.training.registration import _adapters
from everstep.training.restore import SlotValues
from everstep.training.script import Environment
from everstep.training.state import FORMAT, RankState
from everstep.training.state_tree import decode
from tests.unit.training.saved import carry, snapshot_of
from tests.unit.training.test_deepspeed_adapter import make as make_engine


def state_of(*models: nn.Module) -> RankState:
    return RankState(
        [PlainAdapter({str(number): model for number, model in enumerate(models)}, {})], {}, {}, Environment.read({})
    )


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def test_modules_that_were_put_into_evaluation_stay_there() -> None:
    model, twin = small(), small()
    state, restored = state_of(model), state_of(twin)
    model[1].eval()  # type: ignore[index]
    carry(state, restored)
    assert [module.training for module in twin.modules()] == [True, True, False, True]
    model.train()
    carry(state, restored)
    assert all(module.training for module in twin.modules())


def test_a_wrapper_around_one_model_leaves_modes_to_the_other() -> None:
    models, twins = [small(), small()], [small(), nn.ModuleDict({"module": small()})]
    for model in models:
        model.eval()
    carry(state_of(*models), state_of(*twins))
    assert [twin.training for twin in twins] == [False, True]


def test_modes_and_generators_are_those_that_were_kept_until_the_next_boundary() -> None:
    model, twin = small(), small()
    state, restored = state_of(model), state_of(twin)
    state.keep_passing()
    model.eval()
    drawn = torch.rand(3)
    state.keep_passing()
    carry(state, restored)
    assert twin.training
    assert torch.equal(torch.rand(3), drawn)
    state.end_step()
    carry(state, restored)
    assert not twin.training


def test_a_buffer_that_comes_late_and_cannot_be_kept_ends_the_snapshots_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deepspeed, "deepspeed_version", lambda: "0")
    engine, model = make_engine(), small()
    for module, adapters in (
        (model, _adapters({"": model}, {}, {}, ())),
        (engine.module, _adapters({}, {}, {"": engine}, ())),
    ):
        state = RankState(adapters, {}, {}, Environment.read({}))
        module.register_buffer("table", torch.eye(2).to_sparse())
        for _ in range(2):  # observe the state twice, because a session observes it after every step
            with pytest.raises(CannotResume, match=r"^model/table: a tensor of layout torch\.sparse_coo"):
                state.observe()
        assert "model/table" in [item.name for item in adapters[0].observe().tensors], (
            "results can be written all the same"
        )
        module.table = torch.eye(2)
        state.observe()


def test_what_is_kept_is_of_its_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values and the structure of a saved state are those of its format number.

    If you change the values or the structure, raise the number. A library refuses a state with another number, and
    would otherwise misread it.
    """
    monkeypatch.setattr(deepspeed, "deepspeed_version", lambda: "0")
    state = RankState(_adapters({"beside": small()}, {}, {"": make_engine()}, ()), {}, {}, Environment.read({}))
    values = msgspec.msgpack.decode(state.observe().values, type=SlotValues)
    of_adapters, others = (decode(data, torch.empty) for data in (values.adapters, values.others))  # type: ignore[arg-type]
    engine, plain = of_adapters  # type: ignore[misc]
    assert FORMAT == 8
    assert set(DataStream("data", [1], 0).state_dict()) == {
        "epoch",
        "consumed",
        "source",
        "fingerprint",
        "samples_per_step",
        "batch",
        "ahead",
    }
    assert [set(tree) for tree in (plain, engine, others)] == [
        {"optimizers", "groups", "buffers", "gradients", "sparse_gradients", "requires_grad", "extra_states"},
        {"optimizer", "buffers", "extra_states", "engine", "zero", "scaler", "scheduler"},
        {"objects", "data", "modes", "attributes", "generators", "rng", "options"},
    ]
    assert [set(tree) for tree in (plain["buffers"], engine["optimizer"])] == [
        {"late", "ties", "device", "elsewhere"},
        {"groups", "plain", "shared"},
    ]


def test_a_snapshot_without_values_for_an_adapter_is_not_loaded() -> None:
    adapters = [PlainAdapter({name: small()}, {}) for name in ("student", "teacher")]
    saved = snapshot_of(RankState(adapters[:1], {}, {}, Environment.read({})))
    with pytest.raises(ValueError, match="shorter"):
        RankState(adapters, {}, {}, Environment.read({})).load(saved)


def test_a_loader_that_makes_seeds_of_a_seed_sequence_ends_the_snapshots_by_name() -> None:
    class Seeded(Dataset[float]):
        seeds = np.random.SeedSequence(3)

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> float:
            return float(np.random.default_rng(self.seeds.spawn(1)[0]).random())

    stream = DataStream("data", DataLoader(Seeded()), 0)
    state = RankState([PlainAdapter({"": small()}, {})], {}, {"data": stream}, Environment.read({}))
    stream.next()
    state.keep_passing()  # never fails, because the script's loop has just ended
    with pytest.raises(CannotResume, match=r"^data: the loader calls spawn\(\) of a numpy SeedSequence"):
        state.observe()


class Failing:
    """A registered object whose `state_dict` fails."""

    def state_dict(self) -> object:
        raise AttributeError("no engine")

    def load_state_dict(self, state: object) -> None:
        """Restore nothing."""


def test_an_object_whose_state_dict_fails_is_refused_by_name() -> None:
    adapters = [PlainAdapter({"": small()}, {})]
    with pytest.raises(CannotResume, match=r"^extra/it: state_dict\(\) of .*Failing failed: AttributeError"):
        RankState(adapters, {"extra/it": Failing()}, {}, Environment.read({}))
