"""Copies of saved tensors are collected and then executed together, at the latest at the next flush."""

from __future__ import annotations

import torch

from tests.unit.training.saved import Saved


def numbered(*tensors: torch.Tensor) -> Saved:
    return Saved({str(number): tensor for number, tensor in enumerate(tensors)})


def test_nothing_is_missing_when_it_has_finished() -> None:
    tensors = [
        torch.arange(3.0),
        torch.tensor(4, dtype=torch.int64),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.empty(0),
    ]
    saved = numbered(*tensors)
    live = [torch.full_like(tensor, 9, requires_grad=tensor.is_floating_point()) for tensor in tensors]
    assert all(saved.bring(name, one) is one for name, one in zip(saved, live, strict=True))
    saved.finish()
    assert all(torch.equal(one, tensor) for one, tensor in zip(live, tensors, strict=True))


def test_what_comes_behind_the_end_takes_another() -> None:
    saved = numbered(torch.ones(1), torch.ones(1))
    first, second = torch.zeros(1), torch.zeros(1)
    saved.bring("0", first)
    saved.finish()
    first.zero_()
    saved.bring("1", second)
    saved.finish()
    assert (first.item(), second.item()) == (0, 1), "what was copied is not copied again"


def test_no_more_is_gathered_than_a_signal_may_wait_for() -> None:
    saved = Saved({str(number): torch.ones(2) for number in range(7)}, gathered_bytes=24)
    live = [torch.zeros(2) for _ in range(7)]
    copied = []
    for name, one in zip(saved, live, strict=True):
        saved.bring(name, one)
        copied.append(sum(int(other[0]) for other in live))
    assert copied == [0, 0, 3, 3, 3, 6, 6]
