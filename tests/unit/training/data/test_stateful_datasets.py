"""Tests DataLoaders over iterable datasets with a state, with and without workers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from everstep.training import rng
from everstep.training.data import DataStream, ShuffledBlocks
from everstep.training.errors import CannotRelayout, CannotResume, SessionMisuse
from everstep.training.state_tree import is_same
from tests.unit.training.data.runs import Run, check, check_each_step


class Counting(IterableDataset[Any]):
    """A dataset that counts to its length, divides its items among workers, and adds random numbers.

    Its state after the last item is a position at the end. The next `iter` then starts anew.
    """

    def __init__(self, count: int = 13, *, uneven: bool = False) -> None:
        self.count = count
        self.uneven = uneven
        self.own = random.Random(3)
        self.epoch = 0
        self.position = 0
        self.loaded: int | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["position"]

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        start, self.loaded = self.loaded or 0, None
        count = self.count // (worker + 1) if self.uneven else self.count
        for number in range(start, count):
            self.position = number + 1
            if number % workers == worker or self.uneven:
                draws = torch.rand(()).item(), float(np.random.rand()), random.random(), self.own.random()
                yield [self.epoch, worker, number, *draws]


class Continuing(Counting):
    """A dataset whose state after the last item is that of a new epoch, and which counts its epochs itself."""

    def __init__(self, count: int = 13) -> None:
        super().__init__(count)
        self.passes = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.passes = state["position"], state["passes"]

    def __iter__(self) -> Iterator[Any]:
        while self.position < self.count:
            self.position += 1
            yield [self.passes, self.position, random.random()]
        self.position, self.passes = 0, self.passes + 1


def collate(samples: list[Any]) -> list[Any]:
    return [*samples, random.random()]


def loader(kind: type[DataLoader[Any]] = DataLoader, dataset: Any = None, **options: Any) -> DataLoader[Any]:
    options = {"batch_size": 2, "collate_fn": collate, **options}
    return kind(Counting() if dataset is None else dataset, **options)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([Counting, Continuing]),
    st.integers(0, 9),
    st.one_of(st.none(), st.integers(1, 4)),
    st.booleans(),
    st.sets(st.integers(0, 25), min_size=1, max_size=3),
)
def test_a_resumed_run_reads_what_the_undisturbed_run_reads(
    kind: Any, count: int, batch_size: int | None, drop_last: bool, cuts: set[int]
) -> None:
    count += batch_size or 1
    options = {"batch_size": batch_size} if batch_size is None else {"batch_size": batch_size, "drop_last": drop_last}
    check(lambda: loader(dataset=kind(count), **options), cuts)


@pytest.mark.parametrize("kind", [Counting, Continuing])
def test_a_run_that_is_killed_after_every_step_reads_the_same(kind: Any) -> None:
    check_each_step(lambda: loader(dataset=kind()), 20)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.integration)])
def test_a_loader_of_torchdata_is_resumed_like_one_of_torch(kind: Any, workers: int) -> None:
    check(lambda: loader(kind, num_workers=workers), [0, 1, 3, 6, 7, 8])


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("own", [False, True])
def test_workers_of_different_length_continue_in_their_order(own: bool) -> None:
    """A resumed run reads the batches in the same order, even if some workers have no batch left.

    The workers have 7, 3 and 2 batches. The runs are interrupted before and after the end of each worker.
    """

    def make() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5) if own else None
        return loader(dataset=Counting(uneven=True), num_workers=3, generator=generator)

    batches = check(make, [1, 2, 5, 7, 10, 12, 13, 14], behind=15)
    assert [batch[0][1] for batch in batches[:12]] == [0, 1, 2, 0, 1, 2, 0, 1, 0, 0, 0, 0]
    assert len({batch[0][3] for batch in batches}) == len(batches), "each worker and epoch has other random numbers"


@pytest.mark.integration
def test_a_worker_init_fn_gets_the_workers_index_in_the_undisturbed_run() -> None:
    check(lambda: loader(num_workers=2, worker_init_fn=shift), [3, 4])


def shift(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Counting)
    assert info.id == worker
    info.dataset.epoch += 100 * worker


def test_nothing_is_read_again() -> None:
    class Strict(Counting):
        def __iter__(self) -> Iterator[Any]:
            for item in super().__iter__():
                read.append(item[2])
                yield item

    read: list[int] = []
    run = Run(loader(dataset=Strict()))
    run.steps(3)
    state = run.save()
    read.clear()
    resumed = Run(loader(dataset=Strict()))
    resumed.load(state)
    resumed.step()
    assert read == [6, 7]


def test_another_number_of_workers_is_refused() -> None:
    state = Run(loader(num_workers=2)).save()
    with pytest.raises(CannotResume, match=r"data: num_workers was 2, is 0\. .*ShardedFiles"):
        Run(loader()).load(state)


def test_another_number_of_ranks_is_refused() -> None:
    stream = DataStream("data", loader(), 1)
    with pytest.raises(CannotRelayout, match=r"ShardedFiles for streams"):
        stream.relaid(stream.state_dict(), is_same_rank=False)


def test_workers_that_persist_are_refused() -> None:
    with pytest.raises(CannotResume, match="Omit persistent_workers"):
        DataStream("data", loader(num_workers=1, persistent_workers=True), 1)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 3), st.sets(st.integers(0, 25), min_size=1, max_size=3))
def test_shuffled_blocks_are_resumed_exactly(count: int, block: int, batch_size: int, cuts: set[int]) -> None:
    check(lambda: loader(dataset=ShuffledBlocks(Counting(count), block), batch_size=batch_size), cuts)


@pytest.mark.integration
def test_shuffled_blocks_are_resumed_exactly_in_workers() -> None:
    check(lambda: loader(dataset=ShuffledBlocks(Counting(30), 5), num_workers=2, batch_size=3), [2, 5, 10, 11, 12])


def test_shuffled_blocks_permute_the_samples_of_each_block_in_each_epoch() -> None:
    def numbers(seed: int, epoch: int) -> list[int]:
        data = ShuffledBlocks(Counting(12), 4, seed)
        data.set_epoch(epoch)
        return [sample[2] for sample in data]

    orders = [numbers(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(
        sorted(order[begin : begin + 4]) == list(range(begin, begin + 4)) for order in orders for begin in (0, 4, 8)
    )
    assert len({tuple(order) for order in orders}) == 4
    assert [number % 4 for number in orders[0][:4]] != [number % 4 for number in orders[0][4:8]]


def test_shuffled_blocks_leave_the_random_generators_alone() -> None:
    before = rng.observe()
    list(ShuffledBlocks(Continuing(0), 4))
    assert is_same(rng.observe(), before)


@pytest.mark.parametrize(("dataset", "block"), [([1, 2], 2), (Counting(), 0)])
def test_shuffled_blocks_need_a_dataset_with_a_state(dataset: Any, block: int) -> None:
    with pytest.raises(SessionMisuse, match="with state_dict and load_state_dict"):
        ShuffledBlocks(dataset, block)
