"""Resumes a DataLoader over a map-style dataset: advances its batch sampler without fetching samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from types import FunctionType
from typing import Any, cast

from torch.utils.data import DataLoader

from everstep.training import rng
from everstep.training.attributes import Attributes, objects_of_script
from everstep.training.data.protocols import Order, Stateful, set_epoch
from everstep.training.data.sample_order import Sharing
from everstep.training.data.walks import Place, Walk
from everstep.training.data.worker_seeds import SeededItem, Seeding, WorkerBegin, WorkerDataset, plain_index
from everstep.training.determinism.traced_data import TracedCollate, TracedDataset
from everstep.training.state_tree import Tree


class MapLoader:
    """Resumes a DataLoader over a map-style dataset, in which it puts a `PlacedSampler` around the sampler. `held` are
    objects inside dataset and `collate_fn` with a state, empty with workers. `seed` is for the workers of loaders
    without a generator.
    """

    def __init__(self, loader: DataLoader[object], seed: int, held: Sequence[Stateful], *, is_traced: bool) -> None:
        has_workers = loader.num_workers > 0
        samplers = [sampler for sampler in (loader.batch_sampler, loader.sampler) if sampler is not None]
        self._held = held
        self._loaded: list[Tree] | None = None
        self._all_samplers = list(nested_samplers(loader))
        self._have_epochs = [*self._all_samplers, loader.dataset, loader.collate_fn]
        ranks = (getattr(sampler, name, None) for sampler in self._all_samplers for name in _RANKS)
        rank = next((rank for rank in ranks if isinstance(rank, int)), 0)
        seeding = Seeding(seed if loader.generator is None else loader.generator.initial_seed(), rank)
        inner = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        # The states of `held` describe the data of one rank, so a launch with another number of ranks cannot use them.
        sharing = None if held else Sharing.of(loader)
        self.order: Order | None = None if sharing is None else sharing.order
        self._of_sampler = rng.find_generators([*samplers, loader.generator])
        # List the dataset's generators only for a loader without workers. Workers have their own copies of these
        # generators and seed them for each batch.
        in_process = [] if has_workers else [loader.dataset, loader.collate_fn]
        self._searched = [*samplers, loader.generator, *in_process], [*samplers, loader.generator]
        self.generators = rng.find_generators(self._searched[0])
        self._watched = [each for each in self._searched[0] if not isinstance(each, FunctionType)]
        """Objects that may replace their generators, also during an epoch."""
        self._of_watched = rng.find_generators(self._watched)
        in_dataset = [loader.dataset, loader.collate_fn]
        # A sampler often holds the dataset, whose attributes change with each sample and not with the sampler.
        of_samplers = objects_of_script(self._all_samplers, besides=in_dataset)
        attributes = Attributes(of_samplers, max_items=MAX_INDEXES)
        self._sampler = PlacedSampler(inner, self._of_sampler, seeding if has_workers else None, attributes, sharing)
        self._attributes = Attributes([] if has_workers else objects_of_script(in_dataset))
        self._loader = _rebuild(loader, self._sampler, is_traced=is_traced)
        self._has_begun = False

    def begin(self, epoch: int) -> Iterator[object]:
        self._sampler.epoch = epoch
        if self._loaded is not None:
            # Call `set_epoch` before loading the states, because it can reset a state. For states from the end of an
            # epoch, call `set_epoch` with this epoch now, and with the next epoch after loading. An uninterrupted run
            # makes the same calls.
            self._set_epoch(epoch if self._sampler.is_resuming else max(0, epoch - 1))
            for thing, loaded in zip(self._held, self._loaded, strict=True):
                thing.load_state_dict(cast("dict[str, object]", loaded))
        if self._loaded is None or not self._sampler.is_resuming:
            self._set_epoch(epoch)
        self._loaded = None
        is_first, self._has_begun = not self._has_begun, True
        if not self._sampler.is_resuming:
            if is_first and epoch > 0 and self._loader.persistent_workers:
                # After a resume, `iter` starts the workers and draws a base seed for them. An uninterrupted run still
                # has its workers and draws no seed here. Start the sampler from the generators' states before this
                # draw.
                self._sampler.hold()
            return iter(self._loader)
        # `iter` draws a base seed for workers. An uninterrupted run drew this seed at the start of the epoch, so undo
        # the draw.
        with rng.kept(self.generators):
            return iter(self._loader)

    def end(self) -> None:
        self._sampler.resume(None, 0, {})
        self._sampler.begin = 0

    def _set_epoch(self, epoch: int) -> None:
        # An uninterrupted run made these calls at the beginning of the epoch. Keep the later states of generators.
        before = rng.generator_states(self.generators) if self._sampler.is_resuming else None
        for each in self._have_epochs:
            set_epoch(each, epoch)
        self._follow_generators()
        if before is not None:
            rng.set_generator_states(self.generators, before)

    def _follow_generators(self) -> None:
        found = rng.find_generators(self._watched)
        if {*map(id, self._of_watched)} <= {*map(id, found)}:
            return  # A generator that the script created after init() is not kept: a rehearsal finds its effect.
        self._of_watched = found
        for known, roots in zip((self.generators, self._of_sampler), self._searched, strict=True):
            known[:] = rng.followed(rng.find_generators(roots), known, "data")  # the sampler's walk has this list, too

    def state_dict(self) -> dict[str, Tree]:
        place = self._sampler.place
        self._follow_generators()
        held = [cast(Tree, thing.state_dict()) for thing in self._held] if self._loaded is None else self._loaded
        return {
            "held": held,
            "place": None if place is None else place.tree(),
            "present": rng.generator_states(self.generators),
            "attributes": self._attributes.observe(),
            "samplers": self._sampler.attributes.observe(is_within=place is not None),
            "begin": self._sampler.begin,
            "order": None if self.order is None else self.order.tree(),
        }

    def load_state_dict(self, state: dict[str, Tree], consumed_count: int) -> None:
        self._sampler.begin = cast(int, state["begin"])
        self._sampler.resume(Place.of(state["place"]), consumed_count, cast("dict[str, Any]", state["samplers"]))
        self._loaded = cast("list[Tree]", state["held"]) if self._held else None
        rng.set_generator_states(self.generators, cast("list[Tree]", state["present"]))
        self._attributes.load(cast("dict[str, Any]", state["attributes"]))


MAX_INDEXES = 1_000_000
_RANKS = ("rank", "process_index")


def nested_samplers(loader: DataLoader[object]) -> Iterator[object]:
    """Yield the samplers of a loader and the samplers inside them, each once."""
    found: list[object] = []
    waiting: list[object] = [each for each in (loader.batch_sampler, loader.sampler) if each is not None]
    while waiting:
        sampler = waiting.pop(0)
        if not any(sampler is each for each in found):
            found.append(sampler)
            yield sampler
            inner = (getattr(sampler, name, None) for name in ("sampler", "batch_sampler"))
            waiting += [each for each in inner if each is not None]


class PlacedSampler:
    """Wraps the user's (batch) sampler so that it can start inside an epoch. With `sharing`, ranks share one order."""

    def __init__(
        self,
        inner: Iterable[object],
        generators: Sequence[rng.Generator],
        seeding: Seeding | None,
        attributes: Attributes,
        sharing: Sharing | None = None,
    ) -> None:
        self.attributes = attributes
        self._sharing = sharing
        self._generators = generators
        self._inner = inner
        self._seeding = seeding
        self._held: rng.States | None = None
        self._skip_count: int | None = None
        """Batches that the next walk skips; None if it starts an epoch."""
        self._changed: Mapping[str, Any] = {}
        self.epoch = 0
        self.begin = 0
        """Position in the epoch's order at which the walk begins; above 0 after the number of ranks has changed."""
        self.place: Place | None = None

    def __len__(self) -> int:
        return len(cast(Sized, self._inner))

    @property
    def is_resuming(self) -> bool:
        """Whether the next walk starts in the middle of an epoch."""
        return self._skip_count is not None

    def resume(self, place: Place | None, skip_count: int, changed: Mapping[str, Any]) -> None:
        """Make the next walk continue at `place`, or start an epoch if it is None. The script has received the batches
        of `skip_count` items. `changed` are the sampler's attributes at that progress.
        """
        self.place, self._skip_count = place, None if place is None else skip_count
        self._changed = changed
        if place is None:
            self.attributes.load(changed)

    def hold(self) -> None:
        """Store the generators' states for the next walk, so that draws before its start do not change it."""
        self._held = rng.states(self._generators)

    def __iter__(self) -> Iterator[object]:
        # Python runs this body at the first `next`, after the DataLoader has drawn its base seed. From here on, only
        # the sampler draws from `_generators`, in uninterrupted and in resumed runs, with and without workers.
        is_resuming, skip_count = self.is_resuming, self._skip_count or 0
        self._skip_count = None
        if not is_resuming:
            if self._held is not None:
                rng.set_states(self._generators, self._held)
                self._held = None
            self.place = Place(rng.states(self._generators), attributes=self.attributes.copy())
        assert self.place is not None
        if is_resuming:
            self.attributes.load(cast("dict[str, Any]", self.place.attributes))
        begin, source = self.begin, self._inner
        if begin:
            assert self._sharing is not None
            is_new = not self.place.walked_count
            source = self._sharing.rest(begin, self._generators, self.place.began, is_new=is_new)
        walk = Walk(source, self._generators, self.place)
        items: Iterable[object] = walk
        if is_resuming:
            items = itertools.chain(walk.repeat(skip_count), walk)
            self.attributes.load(self._changed)
        for number, item in enumerate(items, skip_count):
            yield item if self._seeding is None else SeededItem(item, self._seeding.of(self.epoch, number, begin))


def _rebuild(loader: DataLoader[object], sampler: PlacedSampler, *, is_traced: bool) -> DataLoader[object]:
    has_workers = loader.num_workers > 0
    dataset = WorkerDataset(loader.dataset, loader.collate_fn) if has_workers else loader.dataset
    collate = loader.collate_fn
    if is_traced:
        dataset = TracedDataset(dataset, collate, plain_index)
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
