"""Tests `SeededDataset` and `SeededCollator`: draws depend on the seed, the epoch and the index only."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler, Subset

from everstep.training import rng
from everstep.training.data import DataStream, SeededCollator, SeededDataset
from everstep.training.errors import SessionMisuse
from everstep.training.state_tree import is_same
from tests.unit.training.data import runs
from tests.unit.training.data.runs import check, plain


class Noisy(Dataset[list[float]]):
    """A dataset that draws from the process's generators and from its own."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.own = np.random.default_rng(4)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> list[float]:
        return [index, torch.rand(()).item(), float(np.random.rand()), random.random(), float(self.own.random())]


def mask(samples: list[Any]) -> list[Any]:
    return [*samples, random.random(), torch.rand(()).item()]


def loader(workers: int = 0, ranks: int = 1, rank: int = 0, **options: Any) -> DataLoader[Any]:
    data = SeededDataset(Noisy(10), seed=7)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=ranks, rank=rank)
    collate = SeededCollator(mask, data)
    return DataLoader(data, batch_size=2, sampler=sampler, collate_fn=collate, num_workers=workers, **options)


def epochs(made: DataLoader[Any], count: int = 2) -> list[list[Any]]:
    stream = DataStream("data", made, seed=random.getrandbits(20))
    return [[plain(batch) for batch in stream] for _ in range(count)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize(("workers", "persistent"), [(1, False), (2, True), (3, False)])
def test_batches_depend_on_neither_workers_nor_time(workers: int, persistent: bool) -> None:
    expected = epochs(loader())
    random.random()
    assert epochs(loader(workers, persistent_workers=persistent)) == expected
    assert expected[0] != expected[1]


@settings(max_examples=15, deadline=None)
@given(st.sets(st.integers(0, 12), min_size=1, max_size=3))
def test_a_resumed_run_draws_what_the_undisturbed_run_draws(cuts: set[int]) -> None:
    check(loader, cuts)


@pytest.mark.parametrize("ranks", [2, 3])
def test_samples_do_not_depend_on_the_number_of_ranks(ranks: int) -> None:
    def samples(world_size: int) -> dict[int, Any]:
        batches = [batch for rank in range(world_size) for batch in epochs(loader(0, world_size, rank), 1)[0]]
        return {sample[0]: sample for batch in batches for sample in batch[:-2]}

    assert samples(ranks) == samples(1)


def test_seed_epoch_and_index_give_other_draws() -> None:
    datasets = [SeededDataset(Noisy(10), seed) for seed in (0, 1)]
    seen = []
    for data in datasets:
        for epoch in (0, 1):
            data.set_epoch(epoch)
            seen += [tuple(data[index][1:]) for index in (0, 1)]  # type: ignore[index]
    assert len(set(seen)) == 8
    assert datasets[0].dataset.epoch == 1, "the dataset inside gets the epoch too"  # type: ignore[attr-defined]


def test_the_generators_of_the_process_and_the_dataset_are_left_as_they_were() -> None:
    inner = Noisy(4)
    data = SeededDataset(inner)
    states = rng.observe(), rng.generator_state(inner.own)
    SeededCollator(mask, data)(data.__getitems__([1, 2]))
    assert is_same(rng.observe(), states[0])
    assert is_same(rng.generator_state(inner.own), states[1])


@pytest.mark.parametrize("index", [np.int64(3), torch.tensor(3)])
def test_an_index_of_numpy_or_torch_is_the_same_index(index: Any) -> None:
    data = SeededDataset(Noisy(10))
    assert data[index][1:] == data[3][1:]  # type: ignore[index]


def test_keys_are_indices_too() -> None:
    data = SeededDataset({"one": 1, "two": 2})  # type: ignore[arg-type]
    assert data["one"] == 1


def test_the_collator_refuses_samples_whose_indices_it_does_not_know() -> None:
    data = SeededDataset(Noisy(4))
    with pytest.raises(SessionMisuse, match="other samples than its SeededDataset returned last"):
        SeededCollator(mask, data)([1, 2])
    around: ConcatDataset[Any] = ConcatDataset([data, SeededDataset(Noisy(4))])
    subset: Subset[Any] = Subset(data, [3, 1, 2])
    assert len(next(iter(DataLoader(subset, batch_size=3, collate_fn=SeededCollator(mask, data))))) == 5
    with pytest.raises(SessionMisuse, match="around all other datasets"):
        list(DataLoader(around, batch_size=4, collate_fn=SeededCollator(mask, data)))


def test_the_collator_needs_a_seeded_dataset() -> None:
    with pytest.raises(SessionMisuse, match="got a Noisy"):
        SeededCollator(mask, Noisy(3))  # type: ignore[arg-type]


def test_a_loader_without_batches_gives_single_samples_to_the_collator() -> None:
    data = SeededDataset(Noisy(3))
    made = DataLoader(data, batch_size=None, collate_fn=SeededCollator(lambda sample: [sample, random.random()], data))
    assert runs.plain(list(made)) == runs.plain(list(made))


def test_a_collators_draws_differ_by_seed_epoch_and_indices() -> None:
    def drawn(seed: int, epoch: int, indices: list[int]) -> float:
        data = SeededDataset(Noisy(10), seed)
        data.set_epoch(epoch)
        batch: Any = SeededCollator(mask, data)(data.__getitems__(indices))
        return float(batch[-1])

    keys = [(seed, epoch, indices) for seed in (0, 1) for epoch in (0, 1) for indices in ([1, 2], [1, 3])]
    assert len({drawn(*key) for key in keys}) == len(keys)
    assert drawn(0, 1, [1, 3]) == drawn(0, 1, [1, 3])
