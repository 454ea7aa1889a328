"""Launches with different numbers of ranks divide the samples of one epoch: each launch continues the earlier one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from everstep.training.data.file_order import FileOrder
from everstep.training.data.sample_order import SampleOrder, rest_of

LAUNCHES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=4)
"""Launches as (number of ranks, batch size, number of batches that each rank receives)."""


def loaders(samples: int, replicas: int, batch: int, **options: bool) -> list[DataLoader[Any]]:
    data: Any = range(samples)
    samplers = [DistributedSampler[Any](data, replicas, rank, seed=3, **options) for rank in range(replicas)]
    return [DataLoader(data, batch_size=batch, sampler=sampler) for sampler in samplers]


@given(samples=st.integers(1, 30), launches=LAUNCHES, shuffle=st.booleans(), drop_last=st.booleans())
def test_each_launch_receives_the_samples_after_those_of_the_earlier_launch(
    samples: int, launches: list[tuple[int, int, int]], shuffle: bool, drop_last: bool
) -> None:
    epoch = [index for (index,) in loaders(samples, 1, 1, shuffle=shuffle)[0].batch_sampler]  # type: ignore[union-attr]
    begin = 0
    for replicas, batch, count in launches:
        ranks = loaders(samples, replicas, batch, shuffle=shuffle, drop_last=drop_last)
        order = SampleOrder.of(ranks[0])
        assert order is not None
        position = order.position(begin, count)
        assert position >= begin
        received: list[Any] = [list(rest_of(rank.batch_sampler, begin))[:count] for rank in ranks]  # type: ignore[arg-type]
        found = Counter(index for batches in received for indices in batches for index in indices)
        # At its end, an epoch repeats its first samples if the ranks do not divide it.
        assert found == Counter(epoch[number % samples] for number in range(begin, position))
        begin = position


ORDERS = [
    SampleOrder(samples=8, shuffle=True, seed=1, drop_last=False, replicas=2, batch=2),
    FileOrder("files", 8, lanes=2, batch=2, shuffle=True, block=1, seed=1, drop_last=False, replicas=2),
]
ANY_NUMBER_OF_RANKS = {SampleOrder: {"replicas", "batch"}, FileOrder: {"replicas"}}


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_order_differs_by_each_option_that_changes_the_order_of_samples(order: SampleOrder | FileOrder) -> None:
    assert order.differences(order.tree()) == ""
    for name, value in order.tree().items():
        other = f"other {value}" if isinstance(value, str) else not value if isinstance(value, bool) else value + 1  # type: ignore[operator]
        changed = dataclasses.replace(order, **cast("dict[str, Any]", {name: other}))
        assert bool(order.differences(changed.tree())) == (name not in ANY_NUMBER_OF_RANKS[type(order)]), name


class Reversed(DistributedSampler[Any]):
    """A sampler that yields the samples in another order than its base class."""

    def __iter__(self) -> Iterator[Any]:
        yield from reversed(list(super().__iter__()))


def test_a_sampler_with_its_own_order_has_no_order_over_all_ranks() -> None:
    data: Any = range(8)
    assert SampleOrder.of(DataLoader(data, sampler=Reversed(data, 2, 0))) is None
