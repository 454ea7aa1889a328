"""Divides tensors that are equal on several ranks among these ranks. One rank writes each tensor to S3.

    rank 0 holds  a b c x       object 0 = a    written by rank 0
    rank 1 holds  a b c y   ─▶  object 1 = b c  written by rank 1
                                x and y stay in the objects of their ranks

Invariant: only tensors with equal digests and sizes share an object. Every rank that uses an object holds all its
tensors, in the same order. The division depends only on digests and sizes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from everstep.protocol.ids import Rank
from everstep.protocol.limits import MAX_SHARED_OBJECTS

# The requests for a smaller object would take longer than the transfer of its bytes.
LEAST_BYTES = 1024 * 1024
"""Minimum mean size of the objects that hold equal tensors."""
MAX_WRITERS = 64
"""Maximum number of ranks among which equal tensors are divided. More would make the lists in manifests long."""
MAX_OFFERED = MAX_SHARED_OBJECTS
"""Maximum number of tensors that a rank lists for the division: its largest tensors."""
OWN = -1
"""Marks a tensor that its rank uploads in the rank's own S3 object."""


class Item(NamedTuple):
    """A captured tensor, or an S3 object of tensors that never change."""

    digest: bytes
    """Digest of the tensor's name, type, shape and content."""
    bytes: int
    is_frozen: bool = False


@dataclass(frozen=True, slots=True)
class Division:
    """Result of `divide` for one rank."""

    objects: tuple[int, ...]
    """For each listed tensor, in order: the number of the object that contains the tensor, or `OWN`."""
    writes: frozenset[int]


def divide(
    offers: Mapping[Rank, Sequence[Item]], *, least_bytes: int = LEAST_BYTES, max_writers: int = MAX_WRITERS
) -> dict[Rank, Division]:
    """Assign equal tensors, which several ranks hold, to the rank that uploads them for all.

    Each frozen item becomes one object. Other tensors that the same ranks hold are grouped into objects of at least
    `least_bytes` on average, with at most `max_writers` writers. No tensor is split. Equal arguments, in the order of
    the slots, give equal divisions.
    """
    table = _Table(offers)
    items, ranks_of = table.items, table.ranks_of
    object_of = [OWN] * len(items)
    writers: list[Rank] = []
    loads = dict.fromkeys(offers, 0)
    for number in sorted((number for number in range(len(items)) if items[number].is_frozen), key=table.largest_first):
        object_of[number] = len(writers)
        writers.append(_assign(items[number], ranks_of[number], loads))
    is_equal = [not item.is_frozen and len(ranks) > 1 for item, ranks in zip(items, ranks_of, strict=True)]
    for numbers, ranks in table.groups:
        loads.update(dict.fromkeys(ranks, sum(items[number].bytes for number in numbers if not is_equal[number])))
    for held_by, equal in sorted(table.classes(is_equal).items(), key=lambda each: (-len(each[0]), each[0])):
        count = min(len(held_by), max_writers, sum(items[number].bytes for number in equal) // least_bytes)
        if not count:
            continue
        chosen = [held_by[place * len(held_by) // count] for place in range(count)]
        object_by: dict[Rank, int] = {}
        for number in sorted(equal, key=table.largest_first):
            writer = _assign(items[number], chosen, loads)
            if writer not in object_by:
                object_by[writer] = len(writers)
                writers.append(writer)
            object_of[number] = object_by[writer]
    writes: defaultdict[Rank, set[int]] = defaultdict(set)
    for object_number, writer in enumerate(writers):
        writes[writer].add(object_number)
    objects_of = {rank: _objects(numbers, object_of) for numbers, ranks in table.groups for rank in ranks}
    return {rank: Division(objects_of[rank], frozenset(writes[rank])) for rank in offers}


class _Table:
    """Numbers the distinct `Item`s that the ranks report, because numbers are cheaper dict keys than `Item`s."""

    def __init__(self, offers: Mapping[Rank, Sequence[Item]]) -> None:
        number_of: defaultdict[Item, int] = defaultdict()
        number_of.default_factory = number_of.__len__
        groups: dict[tuple[int, ...], list[Rank]] = {}
        for rank, offer in sorted(offers.items()):
            groups.setdefault(tuple(map(number_of.__getitem__, offer)), []).append(rank)
        self.groups = list(groups.items())
        """Each distinct list of tensors' numbers, with the ranks that reported this list in ascending order."""
        self.items = list(number_of)
        self.ranks_of = self._ranks_of()

    def _ranks_of(self) -> list[tuple[Rank, ...]]:
        first: list[int] = []
        """By tensor number: the index of the first entry of `groups` that contains the tensor."""
        later: defaultdict[int, list[int]] = defaultdict(list)
        for place, (numbers, _) in enumerate(self.groups):
            known = len(first)
            first += [place] * (max(numbers, default=-1) + 1 - known)
            for number in {number for number in numbers if number < known}:
                later[number].append(place)
        ranks_in = [tuple(ranks) for _, ranks in self.groups]
        ranks_of = list(map(ranks_in.__getitem__, first))
        merged: dict[tuple[int, ...], tuple[Rank, ...]] = {}
        for number, places in later.items():
            key = (first[number], *places)
            if key not in merged:
                merged[key] = tuple(sorted(rank for place in key for rank in ranks_in[place]))
            ranks_of[number] = merged[key]
        return ranks_of

    def largest_first(self, number: int) -> tuple[int, bytes]:
        item = self.items[number]
        return -item.bytes, item.digest

    def classes(self, is_equal: Sequence[bool]) -> dict[tuple[Rank, ...], list[int]]:
        """Group the tensors that several ranks hold, by the exact set of these ranks, in the order of their slots."""
        class_of: dict[tuple[Rank, ...], int] = {}
        ranks_of = self.ranks_of
        classes = [
            class_of.setdefault(ranks, len(class_of)) if equal else OWN
            for ranks, equal in zip(ranks_of, is_equal, strict=True)
        ]
        found: list[list[list[int]]] = [[] for _ in class_of]
        for numbers, _ in self.groups:
            orders: defaultdict[int, list[int]] = defaultdict(list)
            for number in dict.fromkeys(numbers):
                if is_equal[number]:
                    orders[classes[number]].append(number)
            for each, order in orders.items():
                found[each].append(order)
        return {
            ranks: found[each][0]
            for ranks, each in class_of.items()
            # A class whose ranks hold its tensors in different orders is omitted: an object stores them in
            # one order.
            if all(order == found[each][0] for order in found[each])
        }


def _objects(numbers: tuple[int, ...], object_of: Sequence[int]) -> tuple[int, ...]:
    """Return the number of the object for each tensor of one rank's list."""
    if len(set(numbers)) == len(numbers):
        return tuple(map(object_of.__getitem__, numbers))
    # The rank's own object contains the second of two tensors with the same content.
    seen: set[int] = set()
    objects: list[int] = []
    for number in numbers:
        objects.append(OWN if number in seen else object_of[number])
        seen.add(number)
    return tuple(objects)


def _assign(item: Item, ranks: Sequence[Rank], loads: dict[Rank, int]) -> Rank:
    """Choose the rank of `ranks` with the fewest assigned bytes, and add the item's bytes to its load."""
    rank = min(ranks, key=loads.__getitem__)
    loads[rank] += item.bytes
    return rank
