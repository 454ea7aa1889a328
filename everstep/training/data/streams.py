"""Provides data streams: registered loaders whose positions snapshots contain and restarts restore.

Invariant: a resumed run yields the same batches as an uninterrupted run, and leaves all random generators in the same
states.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, cast

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from everstep.training.data import hugging_face
from everstep.training.data.iterables import OwnState
from everstep.training.data.loaders import find_source
from everstep.training.data.protocols import END, Order, Resumable
from everstep.training.data.sample_order import BatchOrder
from everstep.training.data.stateful_datasets import StatefulDatasetLoader
from everstep.training.errors import CannotRelayout, CannotResume, SessionMisuse
from everstep.training.parts import find
from everstep.training.state_tree import Tree

NO_ORDER = (
    "this loader's samples have no order over all ranks. Use DataLoader(dataset, sampler=DistributedSampler(dataset)), "
    "or ShardedFiles for streams; with num_replicas=1, rank=0 if all ranks read the same samples"
)


class DataStream:
    """One registered loader, which the script reads over many epochs. Raises CannotResume if the loader can be read
    only once, or its workers keep random generators from epoch to epoch.
    """

    def __init__(self, name: str, loader: Iterable[object], seed: int, *, is_traced: bool = False) -> None:
        self.name = name
        self.loader = loader
        self.observe: Callable[[str, object], object] | None = None
        """A determinism check's function, which records an item by the loader's name, and returns the batch."""
        self._source = find_source(name, loader, seed, is_traced=is_traced)
        seeds = find([loader], lambda value: isinstance(value, np.random.SeedSequence))
        self._spawned = [(seed, seed.n_children_spawned) for seed in seeds]
        self._fingerprint = hugging_face.fingerprint(loader)
        self._iterator: Iterator[object] | None = None
        self._sample_count: int | None = None
        """Length of the dataset at the start of the epoch in this process; None if it has none."""
        self.epoch = 0
        self.consumed_count = 0
        """Batches of this epoch that the script received, also before a restart."""
        self.handed_count = 0
        self.batch = -1
        self.prefetch_count = 0
        self._ahead: deque[tuple[int, object]] = deque()
        self._is_resumed = False
        self.batches_per_step = 0
        """0 while unknown."""
        self._earlier_samples_per_step = 0
        """Samples of all ranks before the number of ranks changed; 0: unknown or unchanged."""

    def __iter__(self) -> Iterator[object]:
        """Yield the remaining batches of the current epoch. The next `iter` starts the next epoch.

        If a loop stops right after an epoch's last batch, without exhausting the iterator, the next `iter` starts the
        next epoch too. Exception: if this process was resumed at the end of an epoch, its first `iter` yields no
        batches.
        """
        is_rest_possible = self._is_resumed or self.consumed_count == 0
        batch = self._next_of_epoch()
        if batch is END and not is_rest_possible:
            batch = self._next_of_epoch()
        while batch is not END:
            self.batch = self.consumed_count - 1
            yield batch
            batch = self._next_of_epoch()

    def next(self) -> object:
        """Return the next batch, starting a new epoch at the end of the current one.

        Returns:
            The batch, as the loader returns it.

        Raises:
            SessionMisuse: several epochs in a row have no batches.
        """
        while len(self._ahead) <= self.prefetch_count:
            fetched = self._fetched()
            self._ahead.append((self.consumed_count - 1, fetched))
        self.batch, batch = self._ahead.popleft()
        return batch

    def _fetched(self) -> object:
        # The first attempt may find the end of the current epoch. One empty epoch is tolerated after it. If the epoch
        # after that is empty, too, the loader counts as empty.
        for _ in range(3):
            batch = self._next_of_epoch()
            if batch is not END:
                return batch
        raise SessionMisuse(f"{self.name} yields no batches")

    def end_epoch(self) -> None:
        """End the current epoch, although the loader may have further batches. The next batch begins the next epoch.

        Before the first batch of an epoch, the call changes nothing.

        Raises:
            CannotResume: the loader stores its own position and has further batches. A restore would return these
                batches, because the loader's state still points at them.
        """
        if self._iterator is None and self.consumed_count == 0:
            return
        if isinstance(self._source, (OwnState, StatefulDatasetLoader)):
            if self._next_of_epoch() is not END:
                raise CannotResume(
                    self.name,
                    "the loader keeps its own position, and the script ends an epoch before the loader's last batch. "
                    "Read all batches of an epoch, or use a DataLoader over a dataset with a length",
                )
            return
        self._iterator = None
        self._source.end()
        self.epoch, self.consumed_count = self.epoch + 1, 0

    def skip(self, epochs: int, batches: int) -> None:
        """Skip a number of epochs, and the first batches of the next epoch. Called before the first batch."""
        self.epoch = epochs
        for _ in range(batches):
            self._next_of_epoch()

    @property
    def source(self) -> Resumable:
        """The source of the loader."""
        return self._source

    def state_dict(self) -> dict[str, Tree]:
        """Return the data position as a state tree."""
        return {
            "epoch": self.epoch,
            "consumed": self.consumed_count,
            "source": self._source.state_dict(),
            "fingerprint": self._fingerprint,
            "samples_per_step": self.samples_per_step,
            "batch": self.batch,
            "ahead": [list(each) for each in self._ahead],
        }

    def check(self) -> None:
        """Raise CannotResume if a restart could not repeat this epoch. Either numpy's seed sequence has made seeds,
        which numpy cannot restore, or the dataset's length has changed.
        """
        if self._iterator is not None and (count := _sample_count(self.loader)) != self._sample_count:
            raise CannotResume(
                self.name,
                f"the dataset has {count} samples, and had {self._sample_count} when this epoch began, so a restart "
                "would draw another order. Change the dataset before the first batch of an epoch",
            )
        if any(seed.n_children_spawned != count for seed, count in self._spawned):
            raise CannotResume(
                self.name,
                "the loader calls spawn() of a numpy SeedSequence, whose position cannot be restored. Draw seeds from "
                "a numpy Generator, which Everstep restores",
            )

    def check_elastic(self) -> None:
        """Raise CannotResume if the loader could not continue with another number of ranks."""
        if self._source.order is None:
            raise CannotResume(
                self.name,
                f"the job may continue on another number of nodes, and {NO_ORDER}. Or submit the job with "
                "ElasticConfig.MinNodeCount and MaxNodeCount equal to NodeCount",
            )

    @property
    def samples_per_step(self) -> int:
        """Samples of all ranks; 0 if unknown."""
        order = self._source.order
        return 0 if order is None else self.batches_per_step * order.batch * order.replicas

    def relaid(self, state: dict[str, Tree], *, is_same_rank: bool) -> dict[str, Tree]:
        """Convert an earlier rank's `state_dict` into this rank's position. The stream does not change. With
        `is_same_rank`, the number of ranks has not changed. Raises CannotRelayout if the samples have no order over all
        ranks, or another order than in the earlier launch.
        """
        source = cast("dict[str, Any]", state["source"])
        was, now = source.get("order"), self._source.order
        # Earlier versions stored no order for loaders of accelerate.
        was_unnamed = was is None and isinstance(now, BatchOrder)
        if is_same_rank and (was_unnamed or was == (None if now is None else now.tree())):
            return state
        if was is None or now is None:
            raise CannotRelayout(self.name, f"the ranks that read samples have changed, and {NO_ORDER}")
        if differences := now.differences(was):
            raise CannotRelayout(
                self.name, f"{differences}, so the samples have another order. Use the earlier dataset and sampler"
            )
        consumed = cast(int, state["consumed"]) - len(cast("list[Tree]", state["ahead"]))
        if consumed < 0:
            raise CannotRelayout(
                self.name,
                "the batches that the script fetched ahead begin in the epoch before. Continue with the earlier number "
                "of ranks, or from another step",
            )
        begin, place = now.earlier(was).position(source["begin"], consumed), source.get("place")
        return {
            **state,
            "consumed": 0,
            "ahead": [],
            # This rank reads other samples than the rank that saved this state. It starts a walk (a pass through the
            # sampler) at the position `begin`, with the generator states from the beginning of the epoch.
            "source": {**source, "place": place and {**place, "walked": 0, "forks": []}, "begin": begin},
            "earlier_samples_per_step": state["samples_per_step"],
        }

    def check_step(self) -> None:
        """Raise CannotRelayout if a step uses another number of samples than before the number of ranks changed."""
        was, now = self._earlier_samples_per_step, self.samples_per_step
        if was and now and was != now:
            order = cast(Order, self._source.order)
            raise CannotRelayout(
                self.name,
                f"an optimizer step used {was} samples and would now use {now}: {order.replicas} ranks with "
                f"{self.batches_per_step} batches of {order.batch}. Accumulate everstep.training.accumulation("
                f"{was}, {order.batch}) batches per step",
            )

    def load_state_dict(self, state: dict[str, Tree]) -> None:
        """Restore a data position, without fetching a batch. Raises CannotResume if the loader differs from the earlier
        one in a way that changes the order of samples.
        """
        if state["fingerprint"] != self._fingerprint:
            raise CannotResume(
                self.name,
                "the streaming dataset is shuffled or interleaved with other random numbers than before. Pass a seed "
                "to shuffle() and interleave_datasets(), and the same seed at each start",
            )
        self._iterator = None
        self.epoch, self.consumed_count = cast(int, state["epoch"]), cast(int, state["consumed"])
        self._is_resumed = True
        self.batch = cast(int, state["batch"])
        self._ahead = deque((index, batch) for index, batch in cast("list[list[Any]]", state["ahead"]))
        self._earlier_samples_per_step = cast(int, state.get("earlier_samples_per_step", 0))
        self._source.load_state_dict(cast("dict[str, Tree]", state["source"]), self.consumed_count)

    def _next_of_epoch(self) -> object:
        if self._iterator is None:
            self._sample_count = _sample_count(self.loader)
            self._iterator = self._source.begin(self.epoch)
        batch = next(self._iterator, END)
        self._is_resumed = False
        if batch is END:
            self._iterator = None
            self._source.end()
            self.epoch, self.consumed_count = self.epoch + 1, 0
        else:
            self.consumed_count += 1
            self.handed_count += 1
            if self.observe is not None:
                batch = self.observe(self.name, batch)
        return batch


def _sample_count(loader: object) -> int | None:
    """Return the length of a DataLoader's dataset, or None if samplers do not use it."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    try:
        return len(cast(Sized, loader.dataset))
    except (TypeError, NotImplementedError):  # A sampler of the script may need no length.
        return None


def check_apart(streams: Iterable[DataStream]) -> None:
    """Raise CannotResume if two loaders share a random generator, and one restores it from its own state."""
    streams = list(streams)
    for stream, other in itertools.permutations(streams, 2):
        held = {id(generator) for generator in other.source.generators}
        if isinstance(stream.source, OwnState) and any(id(each) in held for each in stream.source.generators):
            raise CannotResume(
                stream.name,
                f"the loader restores its own state, and draws from the same generator as {other.name}: "
                "the order of both after a restart is unknown. Give each loader its own generator",
            )
