"""Plain values and counters of a script continue after a restart."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from torch import nn

import everstep.training
from everstep.training.adapters.plain import PlainAdapter
from everstep.training.script import Environment
from everstep.training.state import RankState
from everstep.training.values import Values
from tests.unit.training.saved import carry


def state_with(**extra: Any) -> RankState:
    model = nn.Linear(2, 1)
    adapter = PlainAdapter({"": model}, {"": torch.optim.SGD(model.parameters(), lr=0.1)})
    return RankState([adapter], extra, {}, Environment.read({}))


def test_numbers_come_back_under_their_names() -> None:
    before, after = Values(best=float("inf"), name=None), Values(best=float("inf"), name=None)
    before["best"], before["name"] = 0.25, "step 7"
    carry(state_with(extra=before), state_with(extra=after))
    assert after == {"best": 0.25, "name": "step 7"}


def test_collections_and_tensors_are_restored_in_place() -> None:
    history, buffer, table = [1.0], deque([torch.ones(2)], maxlen=3), {"a": 1}
    seen, mean, array = {3}, torch.tensor([5.0]), np.array([6.0])
    before = Values(history=history, buffer=buffer, table=table, seen=seen, mean=mean, array=array)
    own: dict[str, Any] = {
        "history": [],
        "buffer": deque(maxlen=3),
        "table": {"b": 2},
        "seen": set(),
        "mean": torch.zeros(1),
        "array": np.zeros(1),
    }
    carry(state_with(extra=before), state_with(extra=Values(own)))
    assert own["array"].tolist() == [6.0]
    assert (own["history"], own["table"], own["seen"], own["mean"].item()) == ([1.0], {"a": 1}, {3}, 5.0)
    assert (own["buffer"].maxlen, [each.tolist() for each in own["buffer"]]) == (3, [[1.0, 1.0]])


def test_a_tensor_of_another_shape_is_replaced() -> None:
    after = Values(batch=torch.zeros(1))
    carry(state_with(extra=Values(batch=torch.ones(2))), state_with(extra=after))
    assert after["batch"].tolist() == [1.0, 1.0]


def test_a_counter_continues() -> None:
    before, after = everstep.training.counter(3), everstep.training.counter(3)
    assert [next(before), next(before)] == [3, 4]
    carry(state_with(rounds=before), state_with(rounds=after))
    assert next(iter(after)) == 5


def test_init_takes_plain_values_and_objects_with_a_state() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    extra = {"best": 1.0, "rounds": everstep.training.counter(), "observation": np.zeros(2)}
    session = everstep.training.init(model=model, optimizer=optimizer, extra=extra)
    assert sorted(session.extra) == ["best", "observation"]
    session.close()
