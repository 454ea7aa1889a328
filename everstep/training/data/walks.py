"""Implements walks: a walk is one pass through a sampler or an iterable that a resumed run can repeat exactly.

The script may draw random numbers from the generators that a sampler uses. A data position therefore contains two
states of each generator. A resumed run repeats the walk from the state at the start of the walk, and then continues
from the state when the snapshot was taken.

If other code draws from a generator between two items of a walk, a repetition without this code would produce other
samples. From such a moment on, the walk therefore uses its own random stream instead of the shared generator (a
*fork*).
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
    """One pass through a sampler or an iterable, which a resumed run can repeat exactly.

    As long as no other code draws from a random generator, the pass (walk) draws from this generator. Once other code
    has drawn from the generator, the pass uses a random stream of its own, which is derived from the generator's state
    (`Fork`).

    Args:
        items: the sampler or iterable, read from its beginning.
        generators: generators that `items` may draw from, in addition to the global generators of the process.
        place: progress of the walk. The walk updates this object.
    """

    def __init__(self, items: Iterable[object], generators: Sequence[rng.Generator], place: Place) -> None:
        self._source = items
        self._items: Iterator[object] | None = None
        self._generators = generators
        self._place = place
        self._is_known = draws_once(items)
        self._left = list(place.began)
        """State of each generator after the walk last used it.

        If the generator now has another state, other code used it.
        """
        self._streams: dict[int, Tree] = {}
        """State of the walk's own random stream, for each generator that the walk no longer uses."""

    def __iter__(self) -> Iterator[object]:
        while (item := self._next()) is not END:
            yield item

    def repeat(self, skip_count: int) -> Sequence[object]:
        """Repeat the interrupted pass through the sampler up to the item that the loader requested last.

        The method repeats the pass with the states that the random generators had at its beginning, and restores their
        current states afterwards.

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
    """Return whether `items` draws all of its random numbers when it yields the first item.

    This is true for torch's samplers and for lists.
    """
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
    """Progress of a walk (one pass through a sampler), and the generator states to repeat the walk."""

    began: rng.States
    """State of each generator when the pass through the sampler began. `Walk.repeat` starts from these states."""
    walked_count: int = 0
    """Number of items that the loader requested from the walk. The request that returned the end counts, too.

    If workers prefetch, the loader requests more items than the script receives.
    """
    forks: list[Fork] = field(default_factory=list)
    attributes: Tree = field(default_factory=dict)
    """Changed attributes of the sampler or iterable when the pass through it began (`Attributes.observe`)."""

    def tree(self) -> Tree:
        """Return the progress of the pass through the sampler as a state tree, for a snapshot."""
        forks: list[Tree] = [(fork.number, fork.index, fork.found) for fork in self.forks]
        return {
            "began": list(self.began),
            "walked": self.walked_count,
            "forks": forks,
            "attributes": self.attributes,
        }

    @classmethod
    def of(cls, tree: Tree) -> Place | None:
        """Return the progress of a pass through a sampler, as `Place.tree` encoded it; None if `tree` is None."""
        values = cast("dict[str, Any] | None", tree)
        if values is None:
            return None
        forks = [Fork(*fork) for fork in values["forks"]]
        return cls(list(values["began"]), values["walked"], forks, values["attributes"])


@dataclass(frozen=True, slots=True)
class Fork:
    """The place in a pass through a sampler (a walk) after which the pass stopped using a shared random generator.

    From the next item on, the pass uses its own random stream instead.
    """

    number: int
    """Number of the last item for which the walk (pass through the sampler) used the shared generator."""
    index: int
    """Index of the shared generator among the generators of the walk (pass through the sampler)."""
    found: Tree
    """State of the shared generator before the sampler drew the item `number` from it."""
