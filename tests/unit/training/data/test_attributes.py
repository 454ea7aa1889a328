"""Samplers, datasets and iterables of a script that keep a position, an epoch or a count in their attributes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from tests.unit.training.data.runs import check


class Numbers(Dataset[float]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return float(index)


class Counting(Numbers):
    """Each sample depends on the number of samples before it, which a transform inside the dataset counts."""

    class Transform:
        count = 0

        def __call__(self, value: float) -> float:
            self.count += 1
            return value + self.count / 1000

    def __init__(self) -> None:
        self.transform = self.Transform()

    def __getitem__(self, index: int) -> float:
        return self.transform(float(index))


class ShuffledInPlace(Sampler[int]):
    def __init__(self, length: int) -> None:
        self.indexes = list(range(length))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.indexes)
        return iter(self.indexes)

    def __len__(self) -> int:
        return len(self.indexes)


class OwnEpoch(Sampler[int]):
    def __init__(self, dataset: Dataset[float], length: int) -> None:
        self.dataset, self.length, self.epoch = dataset, length, 0

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        return iter(torch.randperm(self.length, generator=generator).tolist())

    def __len__(self) -> int:
        return self.length


class OwnEpochStream(IterableDataset[int]):
    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        for number in range(12):
            yield number * self.epoch


class PlainStream:
    """Counts what it has yielded over all epochs."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(6):
            self.count += 1
            yield self.count


def own_epoch_beside_a_counting_dataset() -> DataLoader[float]:
    dataset = Counting()
    return DataLoader(dataset, batch_size=2, sampler=OwnEpoch(dataset, 12))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Numbers(), batch_size=2, sampler=ShuffledInPlace(12)),
        lambda: DataLoader(Numbers(), batch_size=2, sampler=OwnEpoch(Numbers(), 12)),
        lambda: DataLoader(Counting(), batch_size=2, shuffle=True),
        own_epoch_beside_a_counting_dataset,
        lambda: DataLoader(OwnEpochStream(), batch_size=2),
        PlainStream,
    ],
    ids=["list", "epoch", "dataset", "both", "stream", "iterable"],
)
def test_what_they_keep_comes_back_inside_an_epoch_and_between_two(make: Callable[[], Iterable[object]]) -> None:
    check(make, [1, 5, 6, 8, 12, 13])
