"""Divides tensors that are equal on several ranks among these ranks, so that one rank writes each to S3. Pure.

With data parallelism, ranks hold equal tensors. Each rank offers the digests of its captured tensors, and `divide`
assigns equal tensors to writers:

    rank 0 holds  a b c x       object 0 = a    written by rank 0
    rank 1 holds  a b c y   ─▶  object 1 = b c  written by rank 1
                                x and y stay in the objects of their ranks

Invariant: only tensors with equal digests and sizes share an object. Every rank that uses an object holds all its
tensors, in the same order. The division depends only on digests and sizes, not on the layout or the kind of
parallelism.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep.protocol.ids import Rank

LEAST_BYTES = 1024 * 1024
"""Minimum mean size of the objects that hold equal tensors.

If equal tensors have fewer bytes in total, each rank stores them in its own object. The requests for a separate object
would then take longer than the transfer of the bytes.
"""
MAX_WRITERS = 64
"""Maximum number of ranks that divide the same tensors. More writers would make the lists in manifests long."""
MAX_OFFERED = 4096
"""Maximum number of tensors in an offer. A rank with more tensors offers its largest ones."""
DIGEST_BYTES = 16
OWN = -1
"""Marks a tensor that stays in the object of its own rank."""


@dataclass(frozen=True, slots=True)
class Item:
    """One offered tensor, or one frozen object: an object in S3 with tensors that training does not change."""

    digest: bytes
    """Digest of name, type, shape and content."""
    bytes: int
    is_frozen: bool = False


@dataclass(frozen=True, slots=True)
class Division:
    """The objects that `divide` has assigned to one rank: those that hold its tensors, and those that it writes."""

    objects: tuple[int, ...]
    """For each offered item, the number of the object that holds it, or `OWN`."""
    writes: frozenset[int]
    """Numbers of the objects that the rank writes."""


def divide(
    offers: Mapping[Rank, Sequence[Item]], *, least_bytes: int = LEAST_BYTES, max_writers: int = MAX_WRITERS
) -> dict[Rank, Division]:
    """Assign each set of equal items to one of the ranks that hold them.

    Each frozen object (with tensors that training does not change) has exactly one writer. Tensors that the same ranks
    hold are divided into objects of about the same size, largest tensors first. No tensor is divided.

    Args:
        offers: the items of each rank, in the order of the rank's payload.
        least_bytes: as `LEAST_BYTES`.
        max_writers: as `MAX_WRITERS`.

    Returns:
        The division of each rank. Equal arguments give equal divisions.
    """
    holders: defaultdict[Item, list[Rank]] = defaultdict(list)
    for rank, items in sorted(offers.items()):
        for item in dict.fromkeys(items):
            holders[item].append(rank)
    frozen = {item: ranks for item, ranks in holders.items() if item.is_frozen}
    equal = {item: tuple(ranks) for item, ranks in holders.items() if not item.is_frozen and len(ranks) > 1}
    object_of: dict[Item, int] = {}
    writers: list[Rank] = []
    loads = dict.fromkeys(offers, 0)
    for item in sorted(frozen, key=_largest_first):
        object_of[item] = len(writers)
        writers.append(_assign(item, frozen[item], loads))
    loads = {rank: sum(item.bytes for item in items if item not in equal) for rank, items in offers.items()}
    for ranks, items in sorted(_classes(offers, equal).items(), key=lambda each: (-len(each[0]), each[0])):
        count = min(len(ranks), max_writers, sum(item.bytes for item in items) // least_bytes)
        if not count:
            continue
        chosen = [ranks[number * len(ranks) // count] for number in range(count)]
        number_of: dict[Rank, int] = {}
        for item in sorted(items, key=_largest_first):
            writer = _assign(item, chosen, loads)
            if writer not in number_of:
                number_of[writer] = len(writers)
                writers.append(writer)
            object_of[item] = number_of[writer]
    return {
        rank: Division(
            tuple(_numbers(items, object_of)),
            frozenset(number for number, writer in enumerate(writers) if writer == rank),
        )
        for rank, items in offers.items()
    }


def _classes(
    offers: Mapping[Rank, Sequence[Item]], equal: Mapping[Item, tuple[Rank, ...]]
) -> dict[tuple[Rank, ...], list[Item]]:
    """Group equal tensors by the exact set of ranks that hold them, in the order of the payload.

    A group is omitted if its ranks hold the tensors in different orders, because an object has one order.
    """
    found: defaultdict[tuple[Rank, ...], dict[Rank, list[Item]]] = defaultdict(dict)
    for rank, items in offers.items():
        for item in dict.fromkeys(items):
            if item in equal:
                found[equal[item]].setdefault(rank, []).append(item)
    classes: dict[tuple[Rank, ...], list[Item]] = {}
    for ranks, orders in found.items():
        first = orders[ranks[0]]
        if all(order == first for order in orders.values()):
            classes[ranks] = first
    return classes


def _numbers(items: Sequence[Item], object_of: Mapping[Item, int]) -> list[int]:
    """Return the object of each item. If a rank offers an item twice, the object contains the item once."""
    seen: set[Item] = set()
    numbers: list[int] = []
    for item in items:
        numbers.append(OWN if item in seen else object_of.get(item, OWN))
        seen.add(item)
    return numbers


def _assign(item: Item, ranks: Sequence[Rank], loads: dict[Rank, int]) -> Rank:
    """Assign an item to the rank with the fewest assigned bytes."""
    rank = min(ranks, key=lambda each: loads[each])
    loads[rank] += item.bytes
    return rank


def _largest_first(item: Item) -> tuple[int, bytes]:
    return -item.bytes, item.digest
