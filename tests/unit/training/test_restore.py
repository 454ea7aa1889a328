from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from everstep.protocol.ids import Step
from everstep.training.errors import RestoreMismatch
from everstep.training.restore import agree, encode_facts


def test_the_layout_hash_is_of_the_facts_in_any_order() -> None:
    assert encode_facts({"a": "1", "b": "2"}) == encode_facts({"b": "2", "a": "1"})
    assert encode_facts({"a": "1"})[1] != encode_facts({"a": "2"})[1]


def test_one_rank_alone_agrees_with_itself() -> None:
    agree(Step(4), "")
    with pytest.raises(RestoreMismatch, match="a torn slot"):
        agree(Step(4), "a torn slot")


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Replace torch's process group. The test adds the values of the other ranks to the returned list."""
    words: list[list[int]] = []

    def all_reduce(tensor: torch.Tensor, op: Any) -> None:
        assert op == dist.ReduceOp.MAX
        tensor.copy_(torch.stack([tensor, *(torch.tensor(word) for word in words)]).max(dim=0).values)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return words


def test_ranks_that_agree_go_on(others: list[list[int]]) -> None:
    others += [[0, 7, -7], [0, 7, -7]]
    agree(Step(7), "")


def test_anothers_problem_is_everybodys(others: list[list[int]]) -> None:
    others += [[0, 7, -7], [1, 7, -7]]
    with pytest.raises(RestoreMismatch, match="another rank cannot restore"):
        agree(Step(7), "")


@pytest.mark.parametrize(
    ("backend", "on_device"),
    [("gloo", False), ("nccl", True), ("cuda:nccl", True), ("cpu:gloo,cuda:nccl", False), ("undefined", False)],
)
def test_words_lie_where_the_group_can_reach_them(
    others: list[list[int]], backend: str, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, tensor = [], torch.tensor

    def noting(values: list[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(device)
        return tensor(values, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch, "tensor", noting)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    agree(Step(7), "")
    assert made == [torch.device("cuda", 3) if on_device else torch.device("cpu")]


@pytest.mark.parametrize("other", [0, 6, 8])
def test_different_steps_are_refused(others: list[list[int]], other: int) -> None:
    others += [[0, 7, -7], [0, other, -other]]
    with pytest.raises(RestoreMismatch, match="given different steps"):
        agree(Step(7), "")
