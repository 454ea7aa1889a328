"""Where training stands in its data, and how to stand there again.

A position is (epoch, batches handed out, generator states when the epoch's sampling began; between two epochs, as they are). How it is reached again
depends on what the loader is:

    loader                                          reached by
    torch DataLoader over a map-style dataset       advancing its batch sampler without fetching
      (torchdata's StatefulDataLoader too)
    anything with state_dict and load_state_dict    its own state
    list, tuple                                     skipping
    any other iterable                              replaying the epoch's batches, with a warning
    an iterator, a generator                        refused: it can be walked once only

Randomness of a DataLoader's workers (augmentation) is seeded for every batch from (seed, epoch, rank, batch index), so a batch is the same
whoever makes it and whenever. The rank is that of the sampler, which divides the data: ranks that must see the same samples (tensor parallel)
make the same batches of them, as with torch. Without workers it is drawn in the training process, whose generators are part of the state. A
sampler that draws from those as it goes is given a stream of its own (`_Walk`): else its next items would depend on what training has drawn
meanwhile.

Invariant: an undisturbed run and a resumed one hand out the same batches and leave the process's generators in the same state.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import xxhash
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from everstep.training import rng
from everstep.training.adapters.base import qualified_name
from everstep.training.errors import CannotResume, SessionMisuse
from everstep.training.state_tree import Tree

logger = logging.getLogger("everstep.training")


@runtime_checkable
class Stateful(Protocol):
    """Anything that can say and take back its own state."""

    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state_dict: dict[str, object]) -> object: ...


class Resumable(Protocol):
    """A source of batches that knows its position."""

    def begin(self, epoch: int) -> Iterator[object]:
        """Return the batches of an epoch: all of it, or what is left after `load_state_dict`."""

    def end(self) -> None:
        """The epoch is over: what `state_dict` returns until the next begins stands between two."""

    def state_dict(self) -> dict[str, Tree]:
        """Return what of the position the source knows."""

    def load_state_dict(self, state: dict[str, Tree], consumed_count: int) -> None:
        """Stand at a position: the next `begin` continues there."""


class DataStream:
    """One registered loader, across epochs.

    Args:
        name: under which it was registered.
        loader: any of the module's table.
        seed: of the workers' randomness, where the loader has no generator.

    Raises:
        CannotResume: the loader can be walked once only.
    """

    def __init__(self, name: str, loader: Iterable[object], seed: int) -> None:
        self._name = name
        self._source = _source(name, loader, seed)
        self._iterator: Iterator[object] | None = None
        self.epoch = 0
        self.consumed_count = 0
        """Batches of this epoch handed out."""
        self.handed_count = 0
        """Batches handed out by this process."""

    def __iter__(self) -> Iterator[object]:
        """Give what is left of the current epoch; the next `iter` begins the next one."""
        while (batch := self._next_of_epoch()) is not _END:
            yield batch

    def next(self) -> object:
        """Return the next batch, beginning an epoch where the last one ended.

        Returns:
            The batch, as the loader makes it.

        Raises:
            SessionMisuse: an epoch holds no batch at all.
        """
        for _ in range(3):  # the rest of a resumed epoch may be empty, and then one more
            batch = self._next_of_epoch()
            if batch is not _END:
                return batch
        raise SessionMisuse(f"{self._name} yields no batches")

    def state_dict(self) -> dict[str, Tree]:
        """Return the position, as a tree."""
        return {"epoch": self.epoch, "consumed": self.consumed_count, "source": self._source.state_dict()}

    def load_state_dict(self, state: dict[str, Tree]) -> None:
        """Stand at a position again. Fetches nothing yet."""
        self._iterator = None
        self.epoch, self.consumed_count = cast(int, state["epoch"]), cast(int, state["consumed"])
        self._source.load_state_dict(cast("dict[str, Tree]", state["source"]), self.consumed_count)

    def _next_of_epoch(self) -> object:
        if self._iterator is None:
            self._iterator = self._source.begin(self.epoch)
        batch = next(self._iterator, _END)
        if batch is _END:
            self._iterator = None
            self._source.end()
            self.epoch, self.consumed_count = self.epoch + 1, 0
        else:
            self.consumed_count += 1
            self.handed_count += 1
        return batch


_END = object()


@dataclass(frozen=True, slots=True)
class Seeding:
    """What the randomness of one batch follows from."""

    seed: int
    rank: int
    """Among those that share the data; 0 for all where nothing says so."""

    def of(self, epoch: int, batch: int) -> int:
        """Return the 64-bit seed of one batch."""
        return xxhash.xxh3_64_intdigest(f"{self.seed}/{epoch}/{self.rank}/{batch}".encode())


class _MapLoader:
    """A DataLoader over a map-style dataset, rebuilt around a sampler that knows its place."""

    def __init__(self, loader: DataLoader[object], seed: int) -> None:
        self._has_workers = loader.num_workers > 0
        self._user_samplers = [sampler for sampler in (loader.batch_sampler, loader.sampler) if sampler is not None]
        self._all_samplers = [*self._user_samplers, *(getattr(sampler, "sampler", None) for sampler in self._user_samplers)]
        ranks = (getattr(sampler, "rank", None) for sampler in self._all_samplers)
        rank = next((rank for rank in ranks if isinstance(rank, int)), 0)
        seeding = Seeding(seed if loader.generator is None else loader.generator.initial_seed(), rank)
        inner = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        of_dataset = rng.find_generators([loader.dataset])
        of_sampler = rng.find_generators([*self._user_samplers, loader.generator])
        generators = [generator for generator in of_sampler if not any(generator is other for other in of_dataset)]
        self._dataset_generators = [] if self._has_workers else of_dataset
        self._sampler = PlacedSampler(inner, generators, seeding if self._has_workers else None)
        self._loader = _rebuild(loader, self._sampler)
        self._has_begun = False
        """In this process."""

    def begin(self, epoch: int) -> Iterator[object]:
        self._sampler.epoch = epoch
        for sampler in self._all_samplers:
            _set_epoch(sampler, epoch)
        is_first, self._has_begun = not self._has_begun, True
        if not self._sampler.is_resuming:
            if is_first and epoch > 0 and self._loader.persistent_workers:
                self._sampler.hold()  # workers that have lasted since the first epoch begin this one without a base seed
            return iter(self._loader)
        before = rng.observe(with_devices=False)
        iterator = iter(self._loader)  # draws a base seed, which the undisturbed run drew when the epoch began
        rng.restore(before)
        return iterator

    def end(self) -> None:
        self._sampler.began = None

    def state_dict(self) -> dict[str, Tree]:
        began = self._sampler.began
        own = rng.generator_states(self._sampler.generators) if began is None else None
        return {"began": began, "own": own, "dataset": rng.generator_states(self._dataset_generators)}

    def load_state_dict(self, state: dict[str, Tree], consumed_count: int) -> None:
        if state["began"] is not None:
            self._sampler.resume(cast("dict[str, Tree]", state["began"]), consumed_count)
        else:
            rng.set_generator_states(self._sampler.generators, cast("list[Tree]", state["own"]))
        rng.set_generator_states(self._dataset_generators, cast("list[Tree]", state["dataset"]))


class PlacedSampler:
    """The user's (batch) sampler, which can begin in the middle of an epoch as if it had been walked there.

    Args:
        inner: the user's.
        generators: its own generators; their states belong to the position.
        seeding: marks each batch with its seed, for the workers; None without workers.
    """

    def __init__(self, inner: Iterable[object], generators: list[rng.Generator], seeding: Seeding | None) -> None:
        self.generators = generators
        self._inner = inner
        self._seeding = seeding
        self._held: dict[str, Tree] | None = None
        self._resume: tuple[dict[str, Tree], int] | None = None
        self.epoch = 0
        self.began: dict[str, Tree] | None = None
        """All generators' states when the epoch's sampling began, and those that a lazy sampler found (`_Walk`); None between two."""

    def __len__(self) -> int:
        return len(cast(Sized, self._inner))

    @property
    def is_resuming(self) -> bool:
        """The next walk begins in mid-epoch."""
        return self._resume is not None

    def resume(self, began: dict[str, Tree], skip_count: int) -> None:
        """Begin the next walk after `skip_count` items of an epoch whose sampling began with these generator states."""
        self._resume, self.began = (began, skip_count), began

    def hold(self) -> None:
        """Let the next walk begin with the generators' states of now, whatever a loader draws before it."""
        self._held = self._observe()

    def _observe(self) -> dict[str, Tree]:
        return {"process": rng.observe(with_devices=False), "own": rng.generator_states(self.generators), "lazy": None}

    def _restore(self, state: dict[str, Tree]) -> None:
        rng.restore(cast(rng.RandomState, state["process"]))
        rng.set_generator_states(self.generators, cast("list[Tree]", state["own"]))

    def __iter__(self) -> Iterator[object]:
        # The body runs at the first `next`, when a DataLoader has drawn its base seed already: from there on the draws
        # are the sampler's own, in the undisturbed run and here alike, whatever the kind and age of the loader's workers.
        count = 0
        if self._resume is None:
            if self._held is not None:
                self._restore(self._held)
                self._held = None
            self.began = self._observe()
            walk = _Walk(self._inner, self.began)
        else:
            (self.began, count), self._resume = self._resume, None
            before = rng.observe(with_devices=False)
            self._restore(self.began)
            walk = _Walk(self._inner, self.began)
            walk.skip(count)
            rng.restore(before)
        for number in itertools.count(count):
            if (item := walk.next()) is _END:
                return
            yield item if self._seeding is None else SeededItem(item, self._seeding.of(self.epoch, number))


class _Walk:
    """One walk through a sampler.

    What a sampler draws from the process's generators for its first item follows from their states when the walk began. One that draws for a later
    item is lazy: from then on it draws from a stream of its own, which begins with the states that it found.

    Args:
        sampler: the user's; walked from its beginning.
        began: its `lazy` holds those states, or None; written here when it shows.
    """

    def __init__(self, sampler: Iterable[object], began: dict[str, Tree]) -> None:
        self._items = iter(sampler)
        self._began = began
        self._is_known = _draws_once(sampler)
        self._is_begun = False
        self._stream = cast("rng.RandomState | None", began["lazy"])
        """Where the sampler's own stream stands, if it has one. Items before the first that draws from it leave it as it is."""

    def skip(self, count: int) -> None:
        """Walk so many items again; the process's generators stand as they did when that began, and are moved."""
        for number in range(count):
            next(self._items, _END)
            if number == 0 and self._stream is not None:
                rng.restore(self._stream)
        if count > 0 and self._stream is not None:
            self._stream = rng.observe(with_devices=False)
        self._is_begun = count > 0

    def next(self) -> object:
        """Return the next item, or `_END`."""
        is_first, self._is_begun = not self._is_begun, True
        if is_first or self._is_known:
            return next(self._items, _END)
        before = rng.observe(with_devices=False)
        if self._stream is not None:
            rng.restore(self._stream)
            item = next(self._items, _END)
            self._stream = rng.observe(with_devices=False)
            rng.restore(before)
        else:
            item = next(self._items, _END)
            if not rng.stands_at(before):
                self._began["lazy"] = before
                self._stream = rng.observe(with_devices=False)
        return item


def _draws_once(sampler: object) -> bool:
    """Say whether a sampler is one of torch's, which draw from the process's generators for the first item alone."""
    return type(sampler.sampler if type(sampler) is BatchSampler else sampler) in _DRAW_ONCE


_DRAW_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


@dataclass(frozen=True, slots=True)
class SeededItem:
    """What a sampler yields to a worker: the user's index or indices, and the seed of their batch."""

    item: object
    seed: int


class SeededDataset(Dataset[object]):
    """The user's dataset in a worker: every fetch begins with generators seeded for its batch.

    Args:
        inner: the user's.
    """

    def __init__(self, inner: Dataset[object]) -> None:
        self.inner = inner
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
            self.generators = rng.find_generators([self.inner])
        for generator in self.generators:
            rng.seed_generator(generator, number)


@dataclass(frozen=True, slots=True)
class WorkerBegin:
    """Begins a worker: its code is shown the user's own dataset by `get_worker_info()`, to open files on or to set a share of.

    Args:
        user_init: the loader's `worker_init_fn`.
    """

    user_init: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        """Do it. Once, in the worker.

        Args:
            worker_id: counted from 0.
        """
        info = get_worker_info()
        assert info is not None
        object.__setattr__(info, "dataset", cast(SeededDataset, info.dataset).inner)  # torch lets nobody assign to it
        if self.user_init is not None:
            self.user_init(worker_id)


class _OwnState:
    """A loader that keeps its own position."""

    def __init__(self, loader: Stateful) -> None:
        self._loader = loader
        self._epoch = 0
        self._is_resuming = False

    def begin(self, epoch: int) -> Iterator[object]:
        self._epoch = epoch
        if not self._is_resuming:
            _set_epoch(self._loader, epoch)
            return iter(cast("Iterable[object]", self._loader))
        self._is_resuming = False
        before = rng.observe(with_devices=False)
        iterator = iter(cast("Iterable[object]", self._loader))
        rng.restore(before)
        return iterator

    def end(self) -> None:
        """Nothing: its state says so."""

    def state_dict(self) -> dict[str, Tree]:
        return {"state": self._loader.state_dict(), "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, Tree], consumed_count: int) -> None:
        self._epoch = cast(int, state["epoch"])
        _set_epoch(self._loader, self._epoch)  # before its state: to some, an epoch is where they begin anew
        self._loader.load_state_dict(cast("dict[str, object]", state["state"]))
        self._is_resuming = consumed_count > 0


class _Replayed:
    """An iterable whose epochs can only be walked from their beginning."""

    def __init__(self, name: str, iterable: Iterable[object]) -> None:
        self._name = name
        self._iterable = iterable
        self._generators = [] if isinstance(iterable, (list, tuple)) else rng.find_generators([iterable])
        self._skip_count: int | None = None
        self._began: dict[str, Tree] | None = None
        """All generators' states when the epoch began; None between two."""

    def begin(self, epoch: int) -> Iterator[object]:
        _set_epoch(self._iterable, epoch)
        if self._skip_count is None:
            self._began = {"process": rng.observe(with_devices=False), "own": rng.generator_states(self._generators)}
            return iter(self._iterable)
        assert self._began is not None
        count, self._skip_count = self._skip_count, None
        if not isinstance(self._iterable, (list, tuple)):
            logger.warning("%s keeps no position: replaying %d batches to get back to where it stood", self._name, count)
        before = rng.observe(with_devices=False)
        rng.restore(cast(rng.RandomState, self._began["process"]))
        rng.set_generator_states(self._generators, cast("list[Tree]", self._began["own"]))
        iterator = iter(self._iterable)
        for _ in range(count):
            next(iterator, None)
        rng.restore(before)
        return iterator

    def end(self) -> None:
        self._began = None

    def state_dict(self) -> dict[str, Tree]:
        return {"began": self._began, "own": rng.generator_states(self._generators) if self._began is None else None}

    def load_state_dict(self, state: dict[str, Tree], consumed_count: int) -> None:
        if state["began"] is None:
            self._skip_count = None
            rng.set_generator_states(self._generators, cast("list[Tree]", state["own"]))
        else:
            self._began, self._skip_count = cast("dict[str, Tree]", state["began"]), consumed_count


def _set_epoch(thing: object, epoch: int) -> None:
    """Tell it to who wants to know."""
    if callable(set_epoch := getattr(thing, "set_epoch", None)):
        set_epoch(epoch)


def _source(name: str, loader: Iterable[object], seed: int) -> Resumable:
    loader = _unwrap(loader)
    if isinstance(loader, Iterator) and not isinstance(loader, Stateful):
        raise CannotResume(name, f"{qualified_name(type(loader))} can be walked once only; give the loader or a list, not an iterator of it")
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise CannotResume(name, f"{qualified_name(type(loader))} cannot be iterated")
    if _is_map_loader(loader):
        return _MapLoader(cast("DataLoader[object]", loader), seed)
    if isinstance(loader, Stateful):
        return _OwnState(loader)
    if not isinstance(loader, (list, tuple)):
        logger.warning("%s (%s) keeps no position: after a restart its epoch is replayed up to where it stood", name, qualified_name(type(loader)))
    return _Replayed(name, loader)


def _unwrap(loader: Iterable[object]) -> Iterable[object]:
    """Return the DataLoader inside DeepSpeed's own."""
    if qualified_name(type(loader)) != "deepspeed.runtime.dataloader.DeepSpeedDataLoader":
        return loader
    if getattr(loader, "curriculum_learning_enabled", False):
        raise CannotResume("data", "DeepSpeed's curriculum learning is not known to resume")
    create = getattr(loader, "_create_dataloader")  # noqa: B009 - private to DeepSpeed, which builds its loader at each iter
    create()
    return cast("Iterable[object]", getattr(loader, "dataloader"))  # noqa: B009


def _is_map_loader(loader: object) -> bool:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    is_stateful_dataset = isinstance(loader, Stateful) and isinstance(loader.dataset, Stateful)
    is_known = type(loader).__iter__ is DataLoader.__iter__ or qualified_name(type(loader)) == _STATEFUL_LOADER
    return is_known and not is_stateful_dataset


_STATEFUL_LOADER = "torchdata.stateful_dataloader.stateful_dataloader.StatefulDataLoader"


def _rebuild(loader: DataLoader[object], sampler: PlacedSampler) -> DataLoader[object]:
    """Return a plain DataLoader like `loader`, around `sampler`."""
    has_workers = loader.num_workers > 0
    return DataLoader(
        SeededDataset(loader.dataset) if has_workers else loader.dataset,
        batch_size=None if loader.batch_sampler is None else 1,
        sampler=cast("Iterable[object]", sampler) if loader.batch_sampler is None else None,
        batch_sampler=None if loader.batch_sampler is None else cast("Iterable[list[object]]", sampler),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=WorkerBegin(loader.worker_init_fn) if has_workers else None,
        multiprocessing_context=loader.multiprocessing_context if has_workers else None,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        in_order=True,
    )
