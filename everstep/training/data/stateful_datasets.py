"""Resumes a DataLoader over an iterable dataset that has `state_dict`: stores and restores the states of its workers.

With each batch, a worker sends its `WorkerState` after this batch. Because workers prefetch, this module stores the
state of the last batch that the script received. A DataLoader always begins with its worker 0, so a resumed run
renumbers the workers:

    received so far   batches of workers 0, 1, 2, 0; the next batch is from worker 1
    resumed           DataLoader's worker 0 is worker 1, its 1 is 2, its 2 is 0
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from everstep.training import rng
from everstep.training.data.protocols import END, Order, Stateful, set_epoch
from everstep.training.errors import CannotResume
from everstep.training.state_tree import Tree


@dataclass(frozen=True, slots=True)
class WorkerState:
    """The state from which a DataLoader worker continues after a batch."""

    worker: int
    """Index before the first resume."""
    dataset: dict[str, Tree]
    has_ended: bool
    generators: rng.States
    """States of the global generators, and of those inside the dataset and `collate_fn`."""

    def tree(self) -> Tree:
        """Return the state as a state tree."""
        return {"dataset": self.dataset, "has_ended": self.has_ended, "generators": list(self.generators)}


class StatefulDatasetLoader:
    """Resumes a DataLoader whose iterable dataset's state is its position in the epoch."""

    def __init__(self, name: str, loader: DataLoader[object]) -> None:
        self._name = name
        self._user_loader = loader
        self._dataset = cast(Stateful, loader.dataset)
        self._worker_count = loader.num_workers
        self._batches = _Batches(loader)
        self._loader = _rebuild(loader, self._batches)
        in_process = [] if loader.num_workers else [loader.dataset, loader.collate_fn]
        self.generators = rng.find_generators([loader.generator, *in_process])
        self.order: Order | None = None
        self._began: rng.States | None = None
        """Generator states at the beginning of the epoch; None between two epochs."""
        self._states: list[Tree] = _no_states(loader.num_workers)
        """State of each worker after its last received batch; None before its first batch."""
        self._next_worker = 0
        self._epoch = 0
        self._has_begun = False
        """False until the first `begin`. Before, `state_dict` is not called, because it may change the dataset."""
        self._loaded: dict[str, object] | None = None

    def begin(self, epoch: int) -> Iterator[object]:
        loaded, self._loaded, self._has_begun = self._loaded, None, True
        if loaded is not None and (self._began is None or self._batches.has_ended):
            self._end_epoch_of_dataset(loaded)
        self._epoch = epoch
        set_epoch(self._user_loader, epoch)
        set_epoch(self._dataset, epoch)
        if self._began is None:
            self._began = rng.states(self.generators)
            self._states, self._next_worker = _no_states(self._worker_count), 0
            self._batches.start([], 0)
            return self._received(iter(self._loader))
        if self._batches.has_ended:
            return iter(())
        if loaded is not None:
            self._dataset.load_state_dict(loaded)
        self._batches.start(self._states, self._next_worker)
        with rng.kept(self.generators):
            # `iter` draws a seed for workers that have no state yet. Restore the generators first, so that `iter` draws
            # the same seed as in an uninterrupted run.
            rng.set_states(self.generators, self._began)
            return self._received(iter(self._loader))

    def end(self) -> None:
        self._began = None

    def state_dict(self) -> dict[str, Tree]:
        is_own = self._has_begun and self._loaded is None and self._worker_count == 0
        dataset = self._dataset.state_dict() if is_own else self._loaded
        return {
            "epoch": self._epoch,
            "began": None if self._began is None else list(self._began),
            "dataset": cast(Tree, dataset),
            "has_ended": self._batches.has_ended,
            "workers": list(self._states),
            "next_worker": self._next_worker,
            "present": rng.generator_states(self.generators),
        }

    def load_state_dict(self, state: dict[str, Tree], consumed_count: int) -> None:
        workers = cast("list[Tree]", state["workers"])
        if len(workers) != self._worker_count:
            raise CannotResume(
                self._name,
                f"num_workers was {len(workers)}, is {self._worker_count}. The dataset's positions belong to workers. "
                f"Use num_workers={len(workers)}, or ShardedFiles, whose position does not depend on workers",
            )
        self._epoch, self._next_worker = cast(int, state["epoch"]), cast(int, state["next_worker"])
        self._began = cast("rng.States | None", state["began"])
        self._states = list(workers)
        self._batches.has_ended = self._began is not None and cast(bool, state["has_ended"])
        has_dataset_state = self._worker_count == 0 and (consumed_count > 0 or self._began is None)
        self._loaded = cast("dict[str, object] | None", state["dataset"]) if has_dataset_state else None
        rng.set_generator_states(self.generators, cast("list[Tree]", state["present"]))

    def _end_epoch_of_dataset(self, state: dict[str, object]) -> None:
        """Let the dataset end its epoch, for which some datasets need one more `next`."""
        with rng.kept(self.generators):
            set_epoch(self._dataset, self._epoch)
            self._dataset.load_state_dict(state)
            if next(iter(cast("Iterable[object]", self._dataset)), END) is not END:
                self._dataset.load_state_dict(state)

    def _received(self, batches: Iterator[object]) -> Iterator[object]:
        for batch in batches:
            if self._worker_count:
                batch, sent = cast("tuple[object, WorkerState]", batch)
                self._states[sent.worker] = sent.tree()
                self._next_worker = (sent.worker + 1) % self._worker_count
            yield batch


class _Batches(IterableDataset[object]):
    """Combines the samples of the user's dataset into batches. In a worker, each comes with its `WorkerState`."""

    def __init__(self, loader: DataLoader[object]) -> None:
        self.dataset = cast("Iterable[object]", loader.dataset)
        self._batch_size = loader.batch_size
        self._drop_last = loader.drop_last
        self._collate = cast("Callable[[object], object]", loader.collate_fn)
        self._user_init = loader.worker_init_fn
        self._states: list[Tree] = []
        self._first_worker = 0
        self.has_ended = False

    def start(self, states: list[Tree], first_worker: int) -> None:
        """Set the workers' states for the next `iter`: None or an empty list for a new epoch."""
        self._states, self._first_worker, self.has_ended = states, first_worker, False

    def start_worker(self, number: int) -> None:
        """Take the index and seed of the worker whose samples this one continues. Called once, in the worker. After a
        resume, torch's first worker must read the next batch, which another worker would have read.
        """
        info = get_worker_info()
        assert info is not None
        worker = (number + self._first_worker) % info.num_workers
        seed = info.seed - number + worker
        for name, value in (("dataset", self.dataset), ("id", worker), ("seed", seed)):
            object.__setattr__(info, name, value)  # Bypass WorkerInfo's `__setattr__`, which raises.
        rng.seed(seed)
        if self._user_init is not None:
            self._user_init(worker)

    def __iter__(self) -> Iterator[object]:
        info = get_worker_info()
        if info is None:
            yield from self._combined(iter(self.dataset))
            return
        generators = rng.find_generators([self.dataset, self._collate])
        state = cast("dict[str, Any] | None", self._states[info.id] if self._states else None)
        dataset = cast(Stateful, self.dataset)
        if state is not None:
            if state["has_ended"]:
                return
            dataset.load_state_dict(state["dataset"])
        samples = iter(self.dataset)
        if state is not None:
            rng.set_states(generators, state["generators"])
        for batch in self._combined(samples):
            sent = WorkerState(info.id, dataset.state_dict(), self.has_ended, rng.states(generators))
            yield batch, sent

    def _combined(self, samples: Iterator[object]) -> Iterator[object]:
        if self._batch_size is None:
            yield from map(self._collate, samples)
            return
        while batch := list(itertools.islice(samples, self._batch_size)):
            self.has_ended = len(batch) < self._batch_size
            if self.has_ended and self._drop_last:
                return
            yield self._collate(batch)
            if self.has_ended:
                return


def _rebuild(loader: DataLoader[object], batches: _Batches) -> DataLoader[object]:
    return DataLoader(
        batches,
        batch_size=None,
        num_workers=loader.num_workers,
        collate_fn=_unchanged,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=batches.start_worker if loader.num_workers else None,
        multiprocessing_context=loader.multiprocessing_context if loader.num_workers else None,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        in_order=True,
    )


def _no_states(worker_count: int) -> list[Tree]:
    return [None for _ in range(worker_count)]


def _unchanged(batch: object) -> object:
    return batch
