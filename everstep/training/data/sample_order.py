"""Describes the order in which a `DistributedSampler` distributes samples to ranks, and positions in this order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from everstep.training.data.protocols import Order


@dataclass(frozen=True, slots=True)
class SampleOrder(Order):
    """The order in which a `DistributedSampler` distributes the samples of an epoch to the ranks.

    The sampler assigns sample number p of an epoch to rank p mod `replicas`. The order of all samples does not depend
    on `replicas`, so a launch with a different number of ranks can continue at any position.
    """

    samples: int
    """Number of samples in the dataset."""
    shuffle: bool
    seed: int
    drop_last: bool
    """True if the sampler drops samples at the end of an epoch so that all ranks get equally many.

    False if it repeats some samples for the same purpose.
    """
    replicas: int
    """Number of ranks that divide the samples."""
    batch: int
    """Number of samples in one batch of one rank."""
    compared: ClassVar = ("samples", "shuffle", "seed", "drop_last")

    @classmethod
    def of(cls, loader: DataLoader[object]) -> SampleOrder | None:
        """Return the order in which a loader reads samples; None if its sampler is not a `DistributedSampler`."""
        sampler: object = loader.sampler
        if (batches := loader.batch_sampler) is not None:
            if type(batches) is not BatchSampler:
                return None
            sampler = batches.sampler
        if not isinstance(sampler, DistributedSampler) or type(sampler).__iter__ is not DistributedSampler.__iter__:
            return None
        return cls(
            samples=len(cast(Sized, sampler.dataset)),
            shuffle=sampler.shuffle,
            seed=sampler.seed,
            drop_last=sampler.drop_last,
            replicas=sampler.num_replicas,
            batch=1 if batches is None else batches.batch_size,
        )

    def position(self, begin: int, batch_count: int) -> int:
        """Return the position in the epoch's order after each rank has read `batch_count` batches.

        The ranks began to read at the position `begin`.
        """
        left = self.samples % self.replicas
        end = self.samples - left if self.drop_last else self.samples + (self.replicas - left if left else 0)
        return min(begin + batch_count * self.batch * self.replicas, max(begin, end))


class RestOfEpoch:
    """Sampler that yields what a `DistributedSampler` assigns to its rank, starting at a position of the epoch."""

    def __init__(self, sampler: DistributedSampler[object], begin: int) -> None:
        self.sampler = sampler
        self._begin = begin

    def __iter__(self) -> Iterator[object]:
        skip_count = max(0, -(-(self._begin - self.sampler.rank) // self.sampler.num_replicas))
        return itertools.islice(iter(self.sampler), skip_count, None)


def rest_of(items: Iterable[object], begin: int) -> Iterable[object]:
    """Return a sampler or batch sampler that starts at a position of the epoch's `SampleOrder`."""
    if not begin:
        return items
    if isinstance(items, BatchSampler):
        sampler = RestOfEpoch(cast("DistributedSampler[object]", items.sampler), begin)
        return BatchSampler(cast("Any", sampler), items.batch_size, items.drop_last)
    return RestOfEpoch(cast("DistributedSampler[object]", items), begin)
