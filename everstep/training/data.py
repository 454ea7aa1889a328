"""Records how far training has read its data, and resumes reading at the same position after a restart.

A *walk* is one pass through a sampler, or through an iterable that has no state of its own. A data position consists of
the epoch, the number of batches that the script received, and the `Place` of the walk. The method of resuming depends
on the loader:

    loader                                          resumed by
    torch DataLoader over a map-style dataset       advancing its batch sampler without fetching
      (torchdata's StatefulDataLoader too)
    anything with state_dict and load_state_dict    its own state
    list, tuple                                     skipping
    any other iterable                              replaying the epoch's batches, with a warning
    an iterator, a generator                        rejected: it can be read only once

**Generators.** A sampler draws random numbers from the process's generators and from its own. The script may draw
random numbers from the same generators, for example for noise in the loop, in a second loader or in the dataset. A
position therefore contains two states of each generator: the state at the start of the epoch's sampling, to repeat the
walk, and the present state, from which a resumed run continues. If other code uses a generator between two items of a
`Walk`, a repetition of the walk would produce other samples. The walk therefore continues with its own random stream
from then on.

Workers of a DataLoader (augmentation) are seeded for every batch from (seed, epoch, rank, batch index). A batch
therefore does not depend on the worker that loads it, or on the time. The rank is the sampler's rank, because the
sampler divides the data. Ranks that must see the same samples (tensor parallel) get the same batches, as with torch.

**Another number of ranks.** A `DistributedSampler` puts all samples of an epoch into one order and distributes them to
the ranks in turn. A launch with another number of ranks continues after the last sample that any rank received. No
sample is dropped or repeated. Such a launch rejects loaders without an order over all ranks.

Invariant: an undisturbed run and a resumed run yield the same batches and leave all generators in the same state.

The module has more than 500 lines. Loaders, walks and seeding all read and write the same position.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

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
from everstep.training.determinism.traced_data import TracedCollate, TracedDataset
from everstep.training.errors import CannotRelayout, CannotResume, SessionMisuse
from everstep.training.state_tree import Tree

logger = logging.getLogger("everstep.training")


@runtime_checkable
class Stateful(Protocol):
    """An object that returns and restores its own state."""

    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state_dict: dict[str, object]) -> object: ...


class Resumable(Protocol):
    """A source of batches that can report and restore its position."""

    @property
    def generators(self) -> Sequence[rng.Generator]:
        """The source's own random generators, from which its batches draw. Generators of the process are not listed."""
        ...

    def begin(self, epoch: int) -> Iterator[object]:
        """Return the batches of an epoch. After `load_state_dict`, return only the remaining ones."""
        ...

    def end(self) -> None:
        """End the epoch. Until the next `begin`, `state_dict` then returns a position between two epochs."""

    def state_dict(self) -> dict[str, Tree]:
        """Return the position of the source as a state tree."""
        ...

    def load_state_dict(self, state: dict[str, Tree], consumed_count: int) -> None:
        """Restore a position from `state_dict`. The next `begin` continues there."""


class DataStream:
    """One registered loader, across epochs.

    Args:
        name: name under which it was registered.
        loader: any loader of the table in the module's docstring.
        seed: seed of the workers' randomness, for loaders without a generator.
        is_traced: True in a determinism check, which compares samples and batches.

    Raises:
        CannotResume: the loader can be read only once, or its workers keep generators from epoch to epoch.
    """

    def __init__(self, name: str, loader: Iterable[object], seed: int, *, is_traced: bool = False) -> None:
        self.name = name
        self.observe: Callable[[str, object], object] | None = None
        """Set by a determinism check: records an item of the loader under its name, and returns the batch."""
        self._source = _source(name, loader, seed, is_traced=is_traced)
        self._iterator: Iterator[object] | None = None
        self.epoch = 0
        self.consumed_count = 0
        """Batches of this epoch that the script received, in this process or before a restart."""
        self.handed_count = 0
        """Number of batches that the script received in this process."""
        self._is_resumed = False
        """True until the first batch after `load_state_dict`."""
        self.batches_per_step = 0
        """Batches per optimizer step; 0 while unknown."""
        self._earlier_samples_per_step = 0
        """Samples per optimizer step before the number of ranks changed; 0 if it is unknown or has not changed."""

    def __iter__(self) -> Iterator[object]:
        """Yield the remaining batches of the current epoch. The next `iter` starts the next epoch.

        A loop may stop right after an epoch's last batch without exhausting the iterator. The next `iter` then also
        starts the next epoch. Exception: if this process was resumed at that position, the next `iter` yields no
        batches.
        """
        is_rest_possible = self._is_resumed or self.consumed_count == 0
        batch = self._next_of_epoch()
        if batch is _END and not is_rest_possible:
            batch = self._next_of_epoch()
        while batch is not _END:
            yield batch
            batch = self._next_of_epoch()

    def next(self) -> object:
        """Return the next batch, starting a new epoch at the end of the current one.

        Returns:
            The batch, as the loader returns it.

        Raises:
            SessionMisuse: an epoch has no batches.
        """
        for _ in range(3):  # The rest of a resumed epoch may be empty, and the next epoch may be empty too.
            batch = self._next_of_epoch()
            if batch is not _END:
                return batch
        raise SessionMisuse(f"{self.name} yields no batches")

    def end_epoch(self) -> None:
        """End the current epoch, although the loader may have further batches. The next batch begins the next epoch.

        Before the first batch of an epoch, the call changes nothing.

        Raises:
            CannotResume: the loader keeps its own position and has further batches. Its state would begin there.
        """
        if self._iterator is None and self.consumed_count == 0:
            return
        if isinstance(self._source, _OwnState):
            if self._next_of_epoch() is not _END:
                raise CannotResume(
                    self.name,
                    "the loader keeps its own position, and the script ends an epoch before the loader's last batch. "
                    "Read all batches of an epoch, or use a DataLoader over a dataset with a length",
                )
            return
        self._iterator = None
        self._source.end()
        self.epoch, self.consumed_count = self.epoch + 1, 0

    @property
    def source(self) -> Resumable:
        """The `Resumable` that yields the loader's batches."""
        return self._source

    def state_dict(self) -> dict[str, Tree]:
        """Return the position of the stream as a state tree."""
        return {
            "epoch": self.epoch,
            "consumed": self.consumed_count,
            "source": self._source.state_dict(),
            "samples_per_step": self.samples_per_step,
        }

    @property
    def samples_per_step(self) -> int:
        """Samples of all ranks together per optimizer step; 0 if unknown."""
        order = self._order
        return 0 if order is None else self.batches_per_step * order.batch * order.replicas

    @property
    def _order(self) -> SampleOrder | None:
        return self._source.order if isinstance(self._source, _MapLoader) else None

    def relaid(self, state: dict[str, Tree], *, is_same_rank: bool) -> dict[str, Tree]:
        """Convert the data position of a launch with another number of ranks into a position for `load_state_dict`.

        Changes nothing.

        Args:
            state: result of `state_dict` on a rank of the earlier launch.
            is_same_rank: True if the number of ranks has not changed, so that `state` is of this rank.

        Returns:
            The position of this rank.

        Raises:
            CannotRelayout: the loader's samples have no order over all ranks, or another order than before.
        """
        source = cast("dict[str, Any]", state["source"])
        was, now = source.get("order"), self._order
        if is_same_rank and was == (None if now is None else now.tree()):
            return state
        if was is None or now is None:
            raise CannotRelayout(
                self.name,
                "the ranks that read samples have changed, and this loader's samples have no order over all ranks. Use "
                "DataLoader(dataset, sampler=DistributedSampler(dataset)); with num_replicas=1, rank=0 if all ranks "
                "read the same samples",
            )
        earlier = SampleOrder(**was)
        if differences := earlier.differences(now):
            raise CannotRelayout(
                self.name, f"{differences}, so the samples have another order. Use the earlier dataset and sampler"
            )
        begin = earlier.position(source["begin"], cast(int, state["consumed"]))
        return {
            **state,
            "consumed": 0,
            "source": {**source, "place": None, "begin": begin},
            "earlier_samples_per_step": state["samples_per_step"],
        }

    def check_step(self) -> None:
        """Check that an optimizer step uses as many samples as before the number of ranks changed.

        Raises:
            CannotRelayout: the global batch size differs.
        """
        was, now = self._earlier_samples_per_step, self.samples_per_step
        if was and now and was != now:
            order = self._order
            assert order is not None
            raise CannotRelayout(
                self.name,
                f"an optimizer step used {was} samples and would now use {now}: {order.replicas} ranks with "
                f"{self.batches_per_step} batches of {order.batch}. Pass accumulate=everstep.training.accumulation("
                f"{was}, {order.batch}) to batches()",
            )

    def load_state_dict(self, state: dict[str, Tree]) -> None:
        """Restore a position. Fetches no batch yet."""
        self._iterator = None
        self.epoch, self.consumed_count = cast(int, state["epoch"]), cast(int, state["consumed"])
        self._is_resumed = True
        self._earlier_samples_per_step = cast(int, state.get("earlier_samples_per_step", 0))
        self._source.load_state_dict(cast("dict[str, Tree]", state["source"]), self.consumed_count)

    def _next_of_epoch(self) -> object:
        if self._iterator is None:
            self._iterator = self._source.begin(self.epoch)
        batch = next(self._iterator, _END)
        self._is_resumed = False
        if batch is _END:
            self._iterator = None
            self._source.end()
            self.epoch, self.consumed_count = self.epoch + 1, 0
        else:
            self.consumed_count += 1
            self.handed_count += 1
            if self.observe is not None:
                batch = self.observe(self.name, batch)
        return batch


_END = object()


@dataclass(frozen=True, slots=True)
class Seeding:
    """The inputs of a batch's seed."""

    seed: int
    rank: int
    """Index of this rank among the ranks that divide the data. 0 if the sampler has no rank."""

    def of(self, epoch: int, batch: int, begin: int = 0) -> int:
        """Return the 64-bit seed of one batch.

        `begin` is the position in the epoch at which the count of batches began; above 0 after the number of ranks has
        changed.
        """
        place = f"{batch}/{begin}" if begin else f"{batch}"
        return xxhash.xxh3_64_intdigest(f"{self.seed}/{epoch}/{self.rank}/{place}".encode())


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The order in which a `DistributedSampler` distributes the samples of an epoch to the ranks.

    Sample number p of an epoch belongs to the sampler's rank p mod `replicas`. The order of all samples does not depend
    on `replicas`.
    """

    samples: int
    """Length of the dataset."""
    shuffle: bool
    seed: int
    drop_last: bool
    """True if the sampler drops samples at the end of an epoch so that all ranks get equally many.

    False if it repeats samples.
    """
    replicas: int
    """Number of ranks that divide the samples."""
    batch: int
    """Samples per batch of one rank."""

    @classmethod
    def of(cls, loader: DataLoader[object]) -> SampleOrder | None:
        """Return the order of a loader; None if its sampler is not torch's `DistributedSampler`."""
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

    def tree(self) -> dict[str, Tree]:
        """Return the order as a state tree."""
        return {
            "samples": self.samples,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "replicas": self.replicas,
            "batch": self.batch,
        }

    def differences(self, other: SampleOrder) -> str:
        """Return the differences between this order of samples and another order. Empty if the orders are equal."""
        found = [
            f"{name} was {getattr(self, name)}, is {getattr(other, name)}"
            for name in ("samples", "shuffle", "seed", "drop_last")
            if getattr(self, name) != getattr(other, name)
        ]
        return "; ".join(found)

    def position(self, begin: int, batch_count: int) -> int:
        """Return the position in the epoch's order after all ranks have received `batch_count` batches from `begin`."""
        left = self.samples % self.replicas
        end = self.samples - left if self.drop_last else self.samples + (self.replicas - left if left else 0)
        return min(begin + batch_count * self.batch * self.replicas, max(begin, end))


class _Rest:
    """Yields the samples that a `DistributedSampler` gives to its rank, starting at a position of the epoch."""

    def __init__(self, sampler: DistributedSampler[object], begin: int) -> None:
        self.sampler = sampler
        self._begin = begin

    def __iter__(self) -> Iterator[object]:
        skip_count = max(0, -(-(self._begin - self.sampler.rank) // self.sampler.num_replicas))
        return itertools.islice(iter(self.sampler), skip_count, None)


def _rest_of(items: Iterable[object], begin: int) -> Iterable[object]:
    """Return a sampler or batch sampler that starts at a position of the epoch's `SampleOrder`."""
    if not begin:
        return items
    if isinstance(items, BatchSampler):
        sampler = _Rest(cast("DistributedSampler[object]", items.sampler), begin)
        return BatchSampler(cast("Any", sampler), items.batch_size, items.drop_last)
    return _Rest(cast("DistributedSampler[object]", items), begin)


class _MapLoader:
    """A DataLoader over a map-style dataset, rebuilt around a `PlacedSampler`."""

    def __init__(self, loader: DataLoader[object], seed: int, *, is_traced: bool) -> None:
        has_workers = loader.num_workers > 0
        samplers = [sampler for sampler in (loader.batch_sampler, loader.sampler) if sampler is not None]
        self._all_samplers = list(_nested(samplers))
        ranks = (getattr(sampler, name, None) for sampler in self._all_samplers for name in _RANKS)
        rank = next((rank for rank in ranks if isinstance(rank, int)), 0)
        seeding = Seeding(seed if loader.generator is None else loader.generator.initial_seed(), rank)
        inner = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self.order = SampleOrder.of(loader)
        of_sampler = rng.find_generators([*samplers, loader.generator])
        # Workers seed their own copies of the dataset's generators for each batch, so only a loader without workers
        # uses the generators of this process.
        in_process = [] if has_workers else [loader.dataset, loader.collate_fn]
        self.generators = rng.find_generators([*samplers, loader.generator, *in_process])
        self._sampler = PlacedSampler(inner, of_sampler, seeding if has_workers else None)
        self._loader = _rebuild(loader, self._sampler, is_traced=is_traced)
        self._has_begun = False
        """True after the first call of `begin` in this process."""

    def begin(self, epoch: int) -> Iterator[object]:
        self._sampler.epoch = epoch
        for sampler in self._all_samplers:
            _set_epoch(sampler, epoch)
        is_first, self._has_begun = not self._has_begun, True
        if not self._sampler.is_resuming:
            if is_first and epoch > 0 and self._loader.persistent_workers:
                # This process has just been resumed, so `iter` starts workers and draws a base seed for them. An
                # undisturbed run keeps its workers and draws none here. The walk must not depend on this draw.
                self._sampler.hold()
            return iter(self._loader)
        # `iter` draws a base seed. The undisturbed run already drew this seed at the start of the epoch, so restore the
        # generators afterwards.
        with rng.kept(self.generators):
            return iter(self._loader)

    def end(self) -> None:
        self._sampler.resume(None, 0)
        self._sampler.begin = 0

    def state_dict(self) -> dict[str, Tree]:
        place = self._sampler.place
        return {
            "place": None if place is None else place.tree(),
            "present": rng.generator_states(self.generators),
            "begin": self._sampler.begin,
            "order": None if self.order is None else self.order.tree(),
        }

    def load_state_dict(self, state: dict[str, Tree], consumed_count: int) -> None:
        self._sampler.begin = cast(int, state["begin"])
        self._sampler.resume(Place.of(state["place"]), consumed_count)
        rng.set_generator_states(self.generators, cast("list[Tree]", state["present"]))


_RANKS = ("rank", "process_index")
"""Names under which samplers store their rank: torch's, and those of accelerate."""


def _nested(samplers: Sequence[object]) -> Iterator[object]:
    """Yield samplers and the samplers inside them, each once."""
    found: list[object] = []
    waiting = list(samplers)
    while waiting:
        sampler = waiting.pop(0)
        if not any(sampler is each for each in found):
            found.append(sampler)
            yield sampler
            inner = (getattr(sampler, name, None) for name in ("sampler", "batch_sampler"))
            waiting += [each for each in inner if each is not None]


class PlacedSampler:
    """Wraps the user's (batch) sampler so that it can start in the middle of an epoch.

    Args:
        inner: the user's sampler, which decides the order of the samples.
        generators: generators that the sampler may draw from, in addition to those of the process.
        seeding: derives the seed that each batch carries to the workers. None without workers.
    """

    def __init__(self, inner: Iterable[object], generators: Sequence[rng.Generator], seeding: Seeding | None) -> None:
        self._generators = generators
        self._inner = inner
        self._seeding = seeding
        self._held: rng.States | None = None
        self._skip_count: int | None = None
        """Number of batches that the next walk skips because the script already received them.

        None if the next walk starts an epoch.
        """
        self.epoch = 0
        self.begin = 0
        """Position of the epoch's `SampleOrder` at which the walk begins.

        Above 0 after the number of ranks has changed.
        """
        self.place: Place | None = None
        """Progress of the walk through this epoch; None between two epochs."""

    def __len__(self) -> int:
        return len(cast(Sized, self._inner))

    @property
    def is_resuming(self) -> bool:
        """True if the next pass through the sampler starts in the middle of an epoch."""
        return self._skip_count is not None

    def resume(self, place: Place | None, skip_count: int) -> None:
        """Make the next walk continue the interrupted walk whose progress is `place`.

        `skip_count` is the number of items of the interrupted walk that the script received. If `place` is None, the
        next walk starts a new epoch.
        """
        self.place, self._skip_count = place, None if place is None else skip_count

    def hold(self) -> None:
        """Make the next walk start from the present states of the generators.

        The loader may draw random numbers before the walk starts. These draws then do not change the walk.
        """
        self._held = rng.states(self._generators)

    def __iter__(self) -> Iterator[object]:
        # This generator's body runs at the first `next`, after a DataLoader has drawn its base seed. From then on, only
        # the sampler draws, in undisturbed and resumed runs and with any kind of workers.
        skip_count, self._skip_count = self._skip_count or 0, None
        if skip_count == 0:
            if self._held is not None:
                rng.set_states(self._generators, self._held)
                self._held = None
            self.place = Place(rng.states(self._generators))
        assert self.place is not None
        begin = self.begin
        walk = Walk(_rest_of(self._inner, begin), self._generators, self.place)
        items = itertools.chain(walk.repeat(skip_count), walk) if skip_count else walk
        for number, item in enumerate(items, skip_count):
            yield item if self._seeding is None else SeededItem(item, self._seeding.of(self.epoch, number, begin))


@dataclass(slots=True)
class Place:
    """Progress of a walk (one pass through a sampler), and the generator states to repeat the walk."""

    began: rng.States
    """State of each generator at the start of the walk. `Walk.repeat` starts from these states."""
    walked_count: int = 0
    """Number of items that the loader requested from the walk, the end included.

    A loader whose workers prefetch requests more items than the script receives.
    """
    forks: list[Fork] = field(default_factory=list)

    def tree(self) -> Tree:
        """Return the progress of the walk as a state tree (`everstep.training.state_tree`), for a snapshot."""
        forks: list[Tree] = [(fork.number, fork.index, fork.found) for fork in self.forks]
        return {"began": list(self.began), "walked": self.walked_count, "forks": forks}

    @classmethod
    def of(cls, tree: Tree) -> Place | None:
        """Return the progress that `Place.tree` encoded as `tree`, or None if `tree` is None."""
        values = cast("dict[str, Any] | None", tree)
        if values is None:
            return None
        return cls(list(values["began"]), values["walked"], [Fork(*fork) for fork in values["forks"]])


@dataclass(frozen=True, slots=True)
class Fork:
    """The item at which a walk changed from a shared generator to its own random stream."""

    number: int
    """Number of the last item for which the walk used the shared generator."""
    index: int
    """Index of the generator among the walk's generators."""
    found: Tree
    """State in which the walk found the shared generator before that item."""


class Walk:
    """One walk through a sampler or an iterable that can be repeated exactly.

    Other code may draw from the same generators. The walk draws from the shared generators while it is the only user.
    If other code has drawn from a generator since the walk's last draw, the walk records the state that it finds
    (`Fork`) and draws one more item from this state. From the next item on, the walk draws from a stream of its own,
    derived from the state after that item. It then no longer uses the shared generator.

    Args:
        items: the sampler or iterable, read from its beginning.
        generators: generators that the items may draw from, in addition to those of the process.
        place: progress of the walk, which the walk updates.
    """

    def __init__(self, items: Iterable[object], generators: Sequence[rng.Generator], place: Place) -> None:
        self._source = items
        self._items: Iterator[object] | None = None
        self._generators = generators
        self._place = place
        self._is_known = _draws_once(items)
        self._left = list(place.began)
        """State of each generator after the walk last used it.

        A different state shows that other code used the generator.
        """
        self._streams: dict[int, Tree] = {}
        """State of the walk's own random stream, for each generator that the walk no longer uses."""

    def __iter__(self) -> Iterator[object]:
        while (item := self._next()) is not _END:
            yield item

    def repeat(self, skip_count: int) -> Sequence[object]:
        """Repeat the walk up to the item that the loader requested last.

        Afterwards, the generators have the same states as before the call.

        Args:
            skip_count: number of items whose batches the script received.

        Returns:
            The repeated items whose batches the script did not receive.
        """
        waiting: list[object] = []
        with rng.kept(self._generators):
            rng.set_states(self._generators, self._place.began)
            forked: set[int] = set()
            for number in range(self._place.walked_count):
                forks = [fork for fork in self._place.forks if fork.number == number]
                for fork in forks:
                    rng.set_state_at(self._generators, fork.index, fork.found)
                item = self._draw()
                for fork in forks:
                    rng.set_state_at(self._generators, fork.index, rng.branch(self._generators, fork.index))
                    forked.add(fork.index)
                if number >= skip_count and item is not _END:
                    waiting.append(item)
            now = rng.states(self._generators)
            self._streams = {index: now[index] for index in forked}
            self._left = now
        return waiting

    def _next(self) -> object:
        number = self._place.walked_count
        self._place.walked_count += 1
        if self._is_known:
            return self._draw()
        found = rng.states(self._generators)
        for index, stream in self._streams.items():
            rng.set_state_at(self._generators, index, stream)
        item = self._draw()
        for index, (before, after) in enumerate(zip(found, rng.states(self._generators), strict=True)):
            if index in self._streams:
                self._streams[index] = after
                rng.set_state_at(self._generators, index, before)
            elif not rng.is_same(before, after):
                if not rng.is_same(before, self._left[index]):
                    self._place.forks.append(Fork(number, index, before))
                    self._streams[index] = rng.branch(self._generators, index)
                self._left[index] = after
        return item

    def _draw(self) -> object:
        if self._items is None:
            self._items = iter(self._source)  # Create the iterator here, because `iter` may draw random numbers.
        return next(self._items, _END)


def _draws_once(items: object) -> bool:
    """Return whether `items` draws all of its random numbers when it yields the first item.

    This is true for torch's samplers and for lists.
    """
    sampler = items.sampler if type(items) is BatchSampler else items
    sampler = sampler.sampler if type(sampler) is _Rest else sampler
    if type(sampler) is RandomSampler and sampler.generator is not None:
        # Any other `RandomSampler` draws random numbers again after its first item.
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return type(sampler) in _DRAW_ONCE


_DRAW_ONCE = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    list,
    tuple,
)


@dataclass(frozen=True, slots=True)
class SeededItem:
    """An item that a sampler yields to a worker.

    It holds the user's index or indices, and the seed of their batch.
    """

    item: object
    seed: int


class SeededDataset(Dataset[object]):
    """Wraps the user's dataset in a worker.

    Before every fetch it seeds the generators for the batch.

    Args:
        inner: the user's dataset, from which every item is read.
        collate: the function that combines samples into a batch in the same worker. Its generators are seeded too.
    """

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


def _plain_index(item: object) -> object:
    """Return the user's index or indices from an item that a sampler yields."""
    return item.item if isinstance(item, SeededItem) else item


@dataclass(frozen=True, slots=True)
class WorkerBegin:
    """Worker initialization after which `get_worker_info()` returns the user's own dataset.

    The user's `worker_init_fn` may then open files on this object or select a part of the data.

    Args:
        user_init: the loader's `worker_init_fn`.
    """

    user_init: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        """Initialize the worker. Called once, in the worker.

        Args:
            worker_id: index of the worker, from 0.
        """
        info = get_worker_info()
        assert info is not None
        # A DataLoader forbids a plain assignment of this attribute.
        object.__setattr__(info, "dataset", cast("SeededDataset | TracedDataset", info.dataset).inner)
        if self.user_init is not None:
            self.user_init(worker_id)


class _OwnState:
    """Source for loaders that have `state_dict` and `load_state_dict` and so store their own position."""

    def __init__(self, loader: Stateful) -> None:
        self._loader = loader
        self._epoch = 0
        self._is_resuming = False
        self.generators = rng.find_generators([loader])

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
        """Do nothing, because the loader's state contains the end of the epoch."""

    def state_dict(self) -> dict[str, Tree]:
        return {"state": self._loader.state_dict(), "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, Tree], consumed_count: int) -> None:
        self._epoch = cast(int, state["epoch"])
        # Call set_epoch before loading the state, because set_epoch resets the position of some loaders.
        _set_epoch(self._loader, self._epoch)
        self._loader.load_state_dict(cast("dict[str, object]", state["state"]))
        self._is_resuming = consumed_count > 0


class _Replayed:
    """Source for iterables that cannot start in the middle of an epoch.

    A resumed run reads the epoch from its beginning again.
    """

    def __init__(self, name: str, iterable: Iterable[object]) -> None:
        self._name = name
        self._iterable = iterable
        self.generators = [] if isinstance(iterable, (list, tuple)) else rng.find_generators([iterable])
        self._skip_count = 0
        self._place: Place | None = None
        """Progress of the walk through this epoch; None between two epochs."""

    def begin(self, epoch: int) -> Iterator[object]:
        _set_epoch(self._iterable, epoch)
        count, self._skip_count = self._skip_count, 0
        if count == 0:
            self._place = Place(rng.states(self.generators))
        assert self._place is not None
        walk = Walk(self._iterable, self.generators, self._place)
        if count:
            if not isinstance(self._iterable, (list, tuple)):
                logger.warning("%s does not store its position: replaying %d batches to reach it", self._name, count)
            walk.repeat(count)
        return iter(walk)

    def end(self) -> None:
        self._place, self._skip_count = None, 0

    def state_dict(self) -> dict[str, Tree]:
        place = None if self._place is None else self._place.tree()
        return {"place": place, "present": rng.generator_states(self.generators)}

    def load_state_dict(self, state: dict[str, Tree], consumed_count: int) -> None:
        self._place, self._skip_count = Place.of(state["place"]), consumed_count
        rng.set_generator_states(self.generators, cast("list[Tree]", state["present"]))


def check_apart(streams: Iterable[DataStream]) -> None:
    """Raise an error if two loaders share a generator and one of them restores it from its own state.

    Args:
        streams: all registered streams.

    Raises:
        CannotResume: two loaders share a generator, and one loader restores that generator.
    """
    streams = list(streams)
    for stream, other in itertools.permutations(streams, 2):
        held = {id(generator) for generator in other.source.generators}
        if isinstance(stream.source, _OwnState) and any(id(each) in held for each in stream.source.generators):
            raise CannotResume(
                stream.name,
                f"the loader restores its own state, and draws from the same generator as {other.name}: "
                "the order of both after a restart is unknown. Give each loader its own generator",
            )


def _set_epoch(thing: object, epoch: int) -> None:
    """Call the object's `set_epoch` if it has one."""
    if callable(set_epoch := getattr(thing, "set_epoch", None)):
        set_epoch(epoch)


def _source(name: str, loader: Iterable[object], seed: int, *, is_traced: bool) -> Resumable:
    loader = _unwrap(loader)
    if isinstance(loader, Iterator) and not isinstance(loader, Stateful):
        raise CannotResume(
            name,
            f"{qualified_name(type(loader))} can be walked once only; give the loader or a list, not an iterator of it",
        )
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise CannotResume(name, f"{qualified_name(type(loader))} cannot be iterated")
    if _is_map_loader(loader):
        return _MapLoader(cast("DataLoader[object]", loader), seed, is_traced=is_traced)
    if isinstance(loader, Stateful):
        return _OwnState(loader)
    if isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers:
        raise CannotResume(
            name,
            "an IterableDataset with persistent_workers=True: its workers keep their random generators from epoch to "
            "epoch, and no snapshot contains them. Omit persistent_workers, or use a loader with state_dict",
        )
    if not isinstance(loader, (list, tuple)):
        logger.warning(
            "%s (%s) does not store its position: after a restart, the session replays the epoch up to this position",
            name,
            qualified_name(type(loader)),
        )
    return _Replayed(name, loader)


def _unwrap(loader: Iterable[object]) -> Iterable[object]:
    """Return the DataLoader inside DeepSpeed's own loader."""
    if qualified_name(type(loader)) != "deepspeed.runtime.dataloader.DeepSpeedDataLoader":
        return loader
    if getattr(loader, "curriculum_learning_enabled", False):
        raise CannotResume(
            "data", "Everstep does not know whether DeepSpeed's curriculum learning resumes bit-identically"
        )
    # This attribute is private to DeepSpeed, which builds its loader at each `iter`.
    create = getattr(loader, "_create_dataloader")  # noqa: B009
    create()
    return cast("Iterable[object]", getattr(loader, "dataloader"))  # noqa: B009


def _is_map_loader(loader: object) -> bool:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    is_stateful_dataset = isinstance(loader, Stateful) and isinstance(loader.dataset, Stateful)
    is_known = type(loader).__iter__ is DataLoader.__iter__ or qualified_name(type(loader)) == _STATEFUL_LOADER
    return is_known and not is_stateful_dataset


_STATEFUL_LOADER = "torchdata.stateful_dataloader.stateful_dataloader.StatefulDataLoader"


def _rebuild(loader: DataLoader[object], sampler: PlacedSampler, *, is_traced: bool) -> DataLoader[object]:
    """Return a plain DataLoader like `loader`, around `sampler`."""
    has_workers = loader.num_workers > 0
    dataset = SeededDataset(loader.dataset, loader.collate_fn) if has_workers else loader.dataset
    collate = loader.collate_fn
    if is_traced:
        dataset = TracedDataset(dataset, collate, _plain_index)
        collate = cast("Callable[[list[Any]], object]", TracedCollate(collate))
    return DataLoader(
        dataset,
        batch_size=None if loader.batch_sampler is None else 1,
        sampler=cast("Iterable[object]", sampler) if loader.batch_sampler is None else None,
        batch_sampler=None if loader.batch_sampler is None else cast("Iterable[list[object]]", sampler),
        num_workers=loader.num_workers,
        collate_fn=collate,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=WorkerBegin(loader.worker_init_fn) if has_workers else None,
        multiprocessing_context=loader.multiprocessing_context if has_workers else None,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        in_order=True,
    )
