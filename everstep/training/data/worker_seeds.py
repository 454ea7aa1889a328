"""Seeds the random generators of DataLoader workers for every batch of a map-style dataset.

A batch's seed depends on (user's seed, epoch, rank, batch index) only. The rank is the sampler's, so ranks that read
the same samples (tensor parallelism) get the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import cast

import xxhash
from torch.utils.data import Dataset, get_worker_info

from everstep.training import rng
from everstep.training.determinism.traced_data import TracedDataset


@dataclass(frozen=True, slots=True)
class Seeding:
    """The values from which the seed of a batch is computed."""

    seed: int
    rank: int
    """Index among the ranks that divide the data; 0 if the sampler has no rank."""

    def of(self, epoch: int, batch: int, begin: int = 0) -> int:
        """Return a batch's seed. `begin` is the position from which batches are counted."""
        place = f"{batch}/{begin}" if begin else f"{batch}"
        return xxhash.xxh3_64_intdigest(f"{self.seed}/{epoch}/{self.rank}/{place}".encode())


@dataclass(frozen=True, slots=True)
class SeededItem:
    """An item of the user's sampler for a worker, with the seed of its batch."""

    item: object
    seed: int


class WorkerDataset(Dataset[object]):
    """Wraps the user's dataset in a worker, and seeds the generators of dataset and `collate` per batch."""

    def __init__(self, inner: Dataset[object], collate: object = None) -> None:
        self.inner = inner
        self._collate = collate
        self.generators: list[rng.Generator] | None = None

    def __len__(self) -> int:
        return len(cast(Sized, self.inner))

    def __getitem__(self, seeded: SeededItem) -> object:
        self._seed(seeded.seed)
        return self.inner[seeded.item]

    def __getitems__(self, seeded: SeededItem) -> object:
        self._seed(seeded.seed)
        indices = cast("list[object]", seeded.item)
        fetch = getattr(self.inner, "__getitems__", None)
        return fetch(indices) if callable(fetch) else [self.inner[index] for index in indices]

    def _seed(self, number: int) -> None:
        assert get_worker_info() is not None
        rng.seed(number)
        if self.generators is None:
            self.generators = rng.find_generators([self.inner, self._collate])
        for generator in self.generators:
            rng.seed_generator(generator, number)


def plain_index(item: object) -> object:
    """Return the item of the user's sampler, without the seed."""
    return item.item if isinstance(item, SeededItem) else item


@dataclass(frozen=True, slots=True)
class WorkerBegin:
    """Makes `get_worker_info()` return the user's dataset, which a `worker_init_fn` may change."""

    user_init: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        # Use `object.__setattr__`, because torch forbids a plain assignment of this attribute.
        object.__setattr__(info, "dataset", cast("WorkerDataset | TracedDataset", info.dataset).inner)
        if self.user_init is not None:
            self.user_init(worker_id)
