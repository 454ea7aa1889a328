"""Describes how the samplers of torch and accelerate share the samples of an epoch among ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from everstep.training import rng
from everstep.training.adapters.base import qualified_name
from everstep.training.data.protocols import Order, place_in_world
from everstep.training.data.shares import EpochShares


class _SharedOrder(Order):
    __slots__ = ()

    @property
    def shares(self) -> EpochShares:
        """The rule by which the ranks share the samples."""
        raise NotImplementedError

    def position(self, begin: int, batch_count: int) -> int:
        """Return the position after `batch_count` batches from `begin`, maybe behind the end of the epoch."""
        return begin + batch_count * self.batch * self.replicas


@dataclass(frozen=True, slots=True)
class SampleOrder(_SharedOrder):
    """The order of a `DistributedSampler`, which does not depend on `replicas`."""

    samples: int
    shuffle: bool
    seed: int
    drop_last: bool
    """Whether the sampler drops samples at the end of an epoch, instead of repeating some."""
    replicas: int
    batch: int
    compared: ClassVar = ("samples", "shuffle", "seed", "drop_last")

    @property
    def shares(self) -> EpochShares:
        return EpochShares(self.samples, self.replicas, 1, self.drop_last)


@dataclass(frozen=True, slots=True)
class BatchOrder(_SharedOrder):
    """The order of a sampler that all ranks walk alike, and from which each rank takes whole batches."""

    samples: int
    sampler: str
    """Class of the sampler, and its seed if each epoch's order follows from a seed."""
    drop_last: bool
    replicas: int
    batch: int
    block: int
    """Samples that a rank takes at a time: `batch`, or 1 if a single rank reads all batches."""
    compared: ClassVar = ("samples", "sampler", "drop_last")

    @property
    def shares(self) -> EpochShares:
        """Each rank takes one batch at a time, as with accelerate's `BatchSamplerShard`."""
        return EpochShares(self.samples, self.replicas, self.block, self.drop_last)


@dataclass(frozen=True, slots=True)
class Sharing:
    """One rank's share of a loader's samples."""

    order: SampleOrder | BatchOrder
    rank: int
    sampler: DistributedSampler[object] | SequentialSampler | RandomSampler
    batch_size: int | None
    drop_last: bool
    """Whether the loader drops a rank's incomplete last batch."""

    @classmethod
    def of(cls, loader: DataLoader[object]) -> Sharing | None:
        """Return how ranks share the samples of a loader; None if its samples have no order over all ranks."""
        batches = cast("BatchSampler | None", loader.batch_sampler)
        if qualified_name(type(batches)) == _ACCELERATE:
            return cls._of_accelerate(batches)
        if batches is not None and type(batches) is not BatchSampler:
            return None
        sampler: object = loader.sampler if batches is None else batches.sampler
        if not isinstance(sampler, DistributedSampler):
            if batches is None or place_in_world()[1] > 1:
                return None
            return cls._of_batches(batches, 0, 1, size=batches.batch_size, block=1)
        if type(sampler).__iter__ is not DistributedSampler.__iter__:
            return None
        order = SampleOrder(
            samples=len(cast(Sized, sampler.dataset)),
            shuffle=sampler.shuffle,
            seed=sampler.seed,
            drop_last=sampler.drop_last,
            replicas=sampler.num_replicas,
            batch=1 if batches is None else batches.batch_size,
        )
        size, drop_last = (None, False) if batches is None else (batches.batch_size, batches.drop_last)
        return cls(order, sampler.rank, sampler, size, drop_last)

    @classmethod
    def _of_accelerate(cls, shard: Any) -> Sharing | None:
        inner, replicas = shard.batch_sampler, shard.num_processes
        # Without `even_batches`, the ranks receive different numbers of batches.
        if type(inner) is not BatchSampler or not (shard.even_batches or inner.drop_last):
            return None
        size = inner.batch_size // replicas if shard.split_batches else inner.batch_size
        return cls._of_batches(inner, shard.process_index, replicas, size=size, block=size)

    @classmethod
    def _of_batches(cls, batches: BatchSampler, rank: int, replicas: int, *, size: int, block: int) -> Sharing | None:
        sampler = cast(Any, batches.sampler)
        name = qualified_name(type(sampler))
        if name == _SEEDABLE:
            name = f"{name} {sampler.initial_seed}"
        elif type(sampler) is RandomSampler and sampler.generator is None:
            return None  # It draws from the generator of the process, which differs between ranks.
        elif type(sampler) not in (SequentialSampler, RandomSampler):
            return None
        samples = len(sampler)
        if getattr(sampler, "replacement", False) or samples != len(sampler.data_source):
            return None
        order = BatchOrder(samples, name, batches.drop_last, replicas, size, block)
        return cls(order, rank, sampler, size, batches.drop_last)

    def rest(self, begin: int, generators: Sequence[rng.Generator], began: rng.States, *, is_new: bool) -> list[object]:
        """Return this rank's batches from a position on; its samples if the loader has no batches. Besides the global
        generators, the sampler may draw from `generators`. `began` are the generators' states at the beginning of the
        epoch. With `is_new`, the sampler's generator has yet to make the draws of this epoch.
        """
        whole = self._whole(generators, began, is_new=is_new)
        indices = [whole[position] for position in self.order.shares.of(self.rank, begin)]
        if self.batch_size is None:
            return indices
        return list(BatchSampler(cast("Any", indices), self.batch_size, self.drop_last))

    def _whole(self, generators: Sequence[rng.Generator], began: rng.States, *, is_new: bool) -> list[object]:
        """Return the samples of the whole epoch in the order of a single rank."""
        sampler = self.sampler
        if isinstance(sampler, DistributedSampler):
            whole: DistributedSampler[object] = DistributedSampler(
                sampler.dataset, 1, 0, shuffle=sampler.shuffle, seed=sampler.seed
            )
            whole.set_epoch(sampler.epoch)
            return list(whole)
        with rng.kept(generators):
            rng.set_states(generators, began)
            # Draw from a copy, because a seedable sampler of accelerate counts its epochs.
            indices: list[object] = list(cast("Iterable[object]", copy.copy(sampler)))
            own = cast("torch.Generator | None", getattr(sampler, "generator", None))
            after = None if own is None else own.get_state()
        if is_new and own is not None and after is not None:
            own.set_state(after)
        return indices


_ACCELERATE = "accelerate.data_loader.BatchSamplerShard"
_SEEDABLE = "accelerate.data_loader.SeedableRandomSampler"
