"""Equal tensors are divided among the ranks that upload them, exactly as a plain computation of the rules does.

Each rank lists the tensors that it holds (its offer). The computation goes item by item and rank by rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from everstep.protocol.ids import Rank
from worker.core.upload_division import OWN, Division, Item, divide

ITEMS = [
    Item(number.to_bytes(16, "big"), size, is_frozen)
    for number in range(4)
    for size, is_frozen in ((7, False), (9, True))
] + [Item(number.to_bytes(16, "big"), 1 + number % 3) for number in range(4, 9)]


def largest_first(item: Item) -> tuple[int, bytes]:
    return -item.bytes, item.digest


def expected(offers: Mapping[Rank, Sequence[Item]], least_bytes: int, max_writers: int) -> dict[Rank, Division]:
    """Return the division by the rules of `divide`, without any shortcut."""
    ranks = sorted(offers)
    holders = {
        item: tuple(rank for rank in ranks if item in offers[rank]) for offer in offers.values() for item in offer
    }
    equal = {item for item in holders if not item.is_frozen and len(holders[item]) > 1}
    writers: list[Rank] = []
    object_of: dict[Item, int] = {}
    loads = dict.fromkeys(offers, 0)

    def assign(item: Item, candidates: Sequence[Rank]) -> Rank:
        writer = min(candidates, key=lambda rank: loads[rank])
        loads[writer] += item.bytes
        return writer

    # For frozen objects with the same size and digest, `divide` keeps the order in which the ranks first list them.
    for item in sorted((item for rank in ranks for item in dict.fromkeys(offers[rank])), key=largest_first):
        if item.is_frozen and item not in object_of:
            object_of[item] = len(writers)
            writers.append(assign(item, holders[item]))
    loads = {rank: sum(item.bytes for item in offer if item not in equal) for rank, offer in offers.items()}
    for held_by in sorted({holders[item] for item in equal}, key=lambda each: (-len(each), each)):
        orders = [
            [item for item in dict.fromkeys(offers[rank]) if item in equal and holders[item] == held_by]
            for rank in held_by
        ]
        count = min(len(held_by), max_writers, sum(item.bytes for item in orders[0]) // least_bytes)
        if not count or any(order != orders[0] for order in orders):
            continue
        chosen = [held_by[place * len(held_by) // count] for place in range(count)]
        made: dict[Rank, int] = {}
        for item in sorted(orders[0], key=largest_first):
            writer = assign(item, chosen)
            if writer not in made:
                made[writer] = len(writers)
                writers.append(writer)
            object_of[item] = made[writer]
    return {
        rank: Division(
            tuple(OWN if item in offer[:place] else object_of.get(item, OWN) for place, item in enumerate(offer)),
            frozenset(number for number, writer in enumerate(writers) if writer == rank),
        )
        for rank, offer in offers.items()
    }


@st.composite
def offers_of_ranks(draw: st.DrawFn) -> dict[Rank, Sequence[Item]]:
    """Return the ranks' lists of tensors (offers), many of which are equal. A rank may list an item twice.

    The ranks are in any order.
    """
    kinds = draw(st.lists(st.lists(st.sampled_from(ITEMS), max_size=10), min_size=1, max_size=4))
    ranks = draw(st.lists(st.integers(0, 20).map(Rank), unique=True, max_size=8))
    return {rank: draw(st.sampled_from(kinds)) for rank in ranks}


@given(offers_of_ranks(), st.integers(1, 12), st.integers(1, 4))
def test_the_division_follows_its_rules(offers: dict[Rank, Sequence[Item]], least_bytes: int, max_writers: int) -> None:
    divisions = divide(offers, least_bytes=least_bytes, max_writers=max_writers)
    assert divisions == expected(offers, least_bytes, max_writers)
    assert list(divisions) == list(offers)
