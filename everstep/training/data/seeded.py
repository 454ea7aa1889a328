"""Provides datasets and collators whose random numbers depend on the sample, and not on the process that loads it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence, Sized
from typing import cast

import torch
from torch.utils.data import Dataset

from everstep.training import rng
from everstep.training.data.file_order import derive
from everstep.training.data.protocols import set_epoch
from everstep.training.errors import SessionMisuse


class SeededDataset(Dataset[object]):
    """A map-style dataset whose random draws depend on (seed, epoch, index of the sample) only.

        data = SeededDataset(images, seed=1)
        loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data), num_workers=4)

    A sample is the same with any number of workers and ranks. Before the inner dataset loads a sample, this class seeds
    the process's CPU generators, and the generators inside the dataset, for this sample. Afterwards it restores their
    earlier states.

    Args:
        dataset: the dataset with random augmentation.
        seed: the seed. Ranks that share samples pass the same seed.
    """

    def __init__(self, dataset: Dataset[object], seed: int = 0) -> None:
        self.dataset = dataset
        self.seed = seed
        # Use shared memory, from which persistent workers read the current epoch.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._generators: list[rng.Generator] | None = None
        self._fetched: list[object] = []
        self._single: object = None

    @property
    def epoch(self) -> int:
        """Index of the epoch, from 0."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also for the loader's workers. The session calls this before each epoch."""
        self._epoch.fill_(epoch)
        set_epoch(self.dataset, epoch)

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def __getitem__(self, index: object) -> object:
        (self._single,) = self.__getitems__([index])
        return self._single

    def __getitems__(self, indices: Sequence[object]) -> list[object]:
        if self._generators is None:
            self._generators = rng.find_generators([self.dataset])
        self._fetched, self._single = [_plain(index) for index in indices], None
        with rng.kept(self._generators):
            return [self._sample(index) for index in indices]

    def fetched(self, samples: object) -> list[object] | None:
        """Return the indices of the samples that this process fetched last; None if they are not `samples`."""
        if self._single is None:
            return self._fetched if self._fetched and len(cast(Sized, samples)) == len(self._fetched) else None
        return self._fetched if samples is self._single else None

    def _sample(self, index: object) -> object:
        number = derive(self.seed, self.epoch, "sample", repr(_plain(index)))
        rng.seed_on_host(number, cast("list[rng.Generator]", self._generators))
        return self.dataset[index]


class SeededCollator:
    """A `collate_fn` whose random draws depend on (seed, epoch, indices of the batch's samples) only.

        data = SeededDataset(texts, seed=1)
        loader = DataLoader(data, batch_size=8, collate_fn=SeededCollator(mask_tokens, data))

    If the number of ranks changes, batches contain other samples, so `collate_fn` draws other numbers. The draws of the
    dataset stay the same.

    Args:
        collate_fn: the function with random draws, for example one that masks tokens.
        dataset: the loader's dataset. The collator uses its seed and epoch.

    Raises:
        SessionMisuse: the dataset is not a `SeededDataset`.
    """

    def __init__(self, collate_fn: Callable[..., object], dataset: SeededDataset) -> None:
        if not isinstance(dataset, SeededDataset):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SessionMisuse(
                f"SeededCollator got a {type(dataset).__name__}. Pass the SeededDataset of the same loader, which "
                "records the indices of each batch"
            )
        self.collate_fn = collate_fn
        self.dataset = dataset
        self._generators: list[rng.Generator] | None = None

    def __call__(self, samples: object) -> object:
        """Combine the samples that this process fetched last. Raises SessionMisuse if they are other samples."""
        if self._generators is None:
            self._generators = rng.find_generators([self.collate_fn])
        indices = self.dataset.fetched(samples)
        if indices is None:
            raise SessionMisuse(
                "SeededCollator got other samples than its SeededDataset returned last. Use the SeededDataset as the "
                "loader's dataset, around all other datasets"
            )
        number = derive(self.dataset.seed, self.dataset.epoch, "batch", repr(indices))
        with rng.kept(self._generators):
            rng.seed_on_host(number, self._generators)
            return self.collate_fn(samples)


def _plain(index: object) -> object:
    try:
        return operator.index(index)  # type: ignore[arg-type]
    except TypeError:
        return index
