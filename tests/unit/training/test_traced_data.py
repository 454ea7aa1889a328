"""Tracing calls a dataset twice, and leaves generators and samples as after a single call."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import torch
from torch.utils.data import Dataset

from everstep.training.determinism.traced_data import Fetched, TracedCollate, TracedDataset, untraced

OUTSIDE = SimpleNamespace(generator=random.Random(1))


class Noisy(Dataset[torch.Tensor]):
    """Samples that draw from a generator of each kind. `draws_outside` adds a generator that the dataset hides."""

    def __init__(self, *, draws_outside: bool = False) -> None:
        self.generator = torch.Generator().manual_seed(2)
        self.draws_outside = draws_outside

    def __getitem__(self, index: int) -> torch.Tensor:
        outside = OUTSIDE.generator.random() if self.draws_outside else 0.0
        drawn = torch.rand(3, generator=self.generator) + torch.rand(3) + float(np.random.rand()) + random.random()
        return drawn + index + outside


def traced(dataset: Noisy) -> TracedDataset:
    return TracedDataset(dataset, None, lambda item: item)


def seeded() -> None:
    torch.manual_seed(3)
    np.random.seed(4)
    random.seed(5)


def test_a_traced_dataset_returns_and_leaves_what_a_single_call_does() -> None:
    seeded()
    plain = Noisy()
    expected = [plain[index] for index in (4, 7, 1, 2)]
    drawn = (torch.rand(()).item(), np.random.rand(), random.random(), plain.generator.get_state())
    seeded()
    dataset = Noisy()
    first, second = traced(dataset).__getitems__([4, 7]), TracedDataset(dataset, None, int).__getitem__(1)
    third = traced(dataset).__getitems__([2])
    found = [*first.content, second.content, *third.content]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert drawn[:3] == (torch.rand(()).item(), np.random.rand(), random.random())
    assert torch.equal(drawn[3], dataset.generator.get_state())
    assert (first.repeats, second.repeats) == ((True, True), (True,))


def test_a_dataset_that_draws_from_outside_does_not_repeat() -> None:
    assert traced(Noisy(draws_outside=True)).__getitems__([4, 7]).repeats == (False, False)


def test_the_trace_distinguishes_order_samples_and_batch() -> None:
    samples = [torch.ones(2), torch.zeros(2)]
    fetched = Fetched(samples, "order", ("one", "zero"), (True, True))
    batch, trace = untraced(TracedCollate(torch.stack)(fetched))
    other, other_trace = untraced(TracedCollate(lambda given: torch.stack(given) + 1)(fetched))
    assert trace is not None
    assert other_trace is not None
    assert torch.equal(batch, torch.stack(samples))  # type: ignore[arg-type]
    assert (trace.order, trace.samples) == (other_trace.order, other_trace.samples) == ("order", ("one", "zero"))
    assert trace.batch != other_trace.batch
    assert untraced((batch, other)) == ((batch, other), None)
