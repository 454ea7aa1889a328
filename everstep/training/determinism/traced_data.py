"""Observes the samples and batches of a DataLoader during a determinism check, in its workers as well.

`TracedDataset` requests each batch's samples twice, with the same states of the random generators. If they differ, the
dataset uses a value from outside, such as the time.

Invariant: after the second call, the random generators that snapshots contain have the same states as after one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, cast

from torch.utils.data import Dataset, get_worker_info

from everstep.training import rng
from everstep.training.determinism import calls
from everstep.training.determinism.digests import digest_of


@dataclass(frozen=True, slots=True)
class BatchTrace:
    """Digests that describe how a loader made one batch."""

    order: str
    """Digest of the indices that the sampler drew."""
    samples: tuple[str, ...]
    """Digest of each sample, before `collate_fn`."""
    repeats: tuple[bool, ...]
    """Whether a second call of the dataset returned the same content, for each sample."""
    batch: str
    calls: tuple[str, ...]
    """Calls to functions whose results differ between runs."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The samples of one batch and their digests, for `TracedCollate`."""

    content: Any
    """A list of samples, or one sample if the loader does not form batches."""
    order: str
    samples: tuple[str, ...]
    repeats: tuple[bool, ...]


class TracedDataset(Dataset[object]):
    """Wraps the dataset of a loader, to compute the digest of each sample."""

    def __init__(self, dataset: Dataset[object], collate: object, plain_index: Callable[[object], object]) -> None:
        self._dataset = dataset
        self._collate = collate
        self._plain_index = plain_index
        self._generators: list[rng.Generator] | None = None

    @property
    def inner(self) -> object:
        """The user's dataset."""
        return getattr(self._dataset, "inner", self._dataset)

    def __len__(self) -> int:
        return len(cast(Sized, self._dataset))

    def __getitem__(self, item: object) -> Fetched:
        fetched, again = self._fetched_twice(lambda: self._dataset[cast(int, item)])
        return self._compared(item, [fetched], [again], fetched)

    def __getitems__(self, items: object) -> Fetched:
        fetched, again = self._fetched_twice(lambda: self._fetched(items))
        return self._compared(items, fetched, again, fetched)

    def _fetched(self, items: object) -> Sequence[object]:
        fetch = getattr(self._dataset, "__getitems__", None)
        if callable(fetch):
            return cast("Sequence[object]", fetch(items))
        return [self._dataset[index] for index in cast("list[int]", items)]

    def _fetched_twice(self, fetch: Callable[[], Any]) -> tuple[Any, Any]:
        if self._generators is None:
            # Find the dataset's random generators in the process that fetches the samples, because each DataLoader
            # worker has its own copies of them.
            self._generators = rng.find_generators([self.inner, self._collate])
            if get_worker_info() is not None:
                calls.drain()  # Drop the recorded calls of the parent process, which a forked worker inherits.
        before = rng.states(self._generators)
        again = fetch()
        rng.set_states(self._generators, before)
        return fetch(), again

    def _compared(self, items: object, samples: Sequence[object], again: Sequence[object], content: Any) -> Fetched:
        digests = tuple(map(digest_of, samples))
        repeats = tuple(one == digest_of(other) for one, other in zip(digests, again, strict=True))
        return Fetched(content, digest_of(self._plain_index(items)), digests, repeats)


class TracedCollate:
    """Wraps the `collate_fn` of a loader, to compute the digest of each batch."""

    def __init__(self, collate: Callable[[Any], object]) -> None:
        self._collate = collate

    def __call__(self, fetched: Fetched) -> tuple[object, BatchTrace]:
        batch = self._collate(fetched.content)
        trace = BatchTrace(fetched.order, fetched.samples, fetched.repeats, digest_of(batch), tuple(calls.drain()))
        return batch, trace


def untraced(item: object) -> tuple[object, BatchTrace | None]:
    """Split an item of a loader into the batch and its trace; None without a `TracedCollate`."""
    if isinstance(item, (tuple, list)):
        parts = cast("Sequence[object]", item)
        if len(parts) == 2 and isinstance(parts[1], BatchTrace):
            return parts[0], parts[1]
    return item, None
