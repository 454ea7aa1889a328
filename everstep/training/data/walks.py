"""Implements walks: a walk is one pass through a sampler or an iterable that a resumed run can repeat exactly.

The script may draw from a sampler's generators. A data position therefore contains each generator's states at the start
of the walk and at the snapshot. If other code draws between two items, the walk uses its own random stream from then on
(a *fork*), because a repetition without this code would produce other samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from everstep.training import rng
from everstep.training.data.protocols import END
from everstep.training.state_tree import Tree, is_same


class Walk:
    """One pass through `items`, which a resumed run can repeat exactly. It updates `place`."""

    def __init__(self, items: Iterable[object], generators: Sequence[rng.Generator], place: Place) -> None:
        self._source = items
        self._items: Iterator[object] | None = None
        self._generators = generators
        self._place = place
        self._is_known = draws_once(items)
        self._left = list(place.began)
        """Each generator's state after the walk last used it. If the present state differs, other code has used it."""
        self._streams: dict[int, Tree] = {}

    def __iter__(self) -> Iterator[object]:
        while (item := self._next()) is not END:
            yield item

    def repeat(self, skip_count: int) -> Sequence[object]:
        """Repeat the interrupted walk up to the item that the loader requested last. Returns the items whose batches
        the script has not received, after the first `skip_count`. The generators keep their states.
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
                if number >= skip_count and item is not END:
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
            elif not is_same(before, after):
                if not is_same(before, self._left[index]):
                    self._place.forks.append(Fork(number, index, before))
                    self._streams[index] = rng.branch(self._generators, index)
                self._left[index] = after
        return item

    def _draw(self) -> object:
        if self._items is None:
            self._items = iter(self._source)  # Do not call `iter` before the first item, as it may draw random numbers.
        return next(self._items, END)


def draws_once(items: object) -> bool:
    """Return whether `items` draws all of its random numbers before its first item, as torch's samplers do."""
    sampler = items.sampler if type(items) is BatchSampler else items
    if type(sampler) is RandomSampler and sampler.generator is not None:
        # A `RandomSampler` with its own generator draws random numbers during the epoch, too, if it repeats samples.
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


@dataclass(slots=True)
class Place:
    """Progress of a walk, and the generator states to repeat it."""

    began: rng.States
    walked_count: int = 0
    """Items that the loader requested, including the request that returned the end. Workers prefetch."""
    forks: list[Fork] = field(default_factory=list)
    attributes: Tree = field(default_factory=dict)
    """Changed attributes at the beginning (`Attributes.observe`)."""

    def tree(self) -> Tree:
        """Return the progress as a state tree."""
        forks: list[Tree] = [(fork.number, fork.index, fork.found) for fork in self.forks]
        return {
            "began": list(self.began),
            "walked": self.walked_count,
            "forks": forks,
            "attributes": self.attributes,
        }

    @classmethod
    def of(cls, tree: Tree) -> Place | None:
        """Return the progress that `Place.tree` encoded; None if `tree` is None."""
        values = cast("dict[str, Any] | None", tree)
        if values is None:
            return None
        forks = [Fork(*fork) for fork in values["forks"]]
        return cls(list(values["began"]), values["walked"], forks, values["attributes"])


@dataclass(frozen=True, slots=True)
class Fork:
    """The place after which a walk stopped using a shared random generator."""

    number: int
    """Last item with the shared generator."""
    index: int
    found: Tree
    """The generator's state before the sampler drew the item `number`."""
