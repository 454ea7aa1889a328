from __future__ import annotations

import torch
from torch import nn

from everstep.training.adapters.plain import PlainAdapter
from everstep.training.script import Environment
from everstep.training.state import RankState
from tests.unit.training.saved import carry


def state_of(*models: nn.Module) -> RankState:
    return RankState([PlainAdapter({str(number): model for number, model in enumerate(models)}, {})], {}, {}, Environment.read({}))


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
