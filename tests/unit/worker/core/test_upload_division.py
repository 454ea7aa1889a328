"""Each tensor that is equal on several ranks is uploaded by one of them, and the ranks share the bytes evenly.

Each rank uploads its own tensors that differ from those of other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from everstep.protocol.ids import Rank
from worker.core.upload_division import OWN, Division, Item, divide


def item(name: int, size: int = 100, *, is_frozen: bool = False) -> Item:
    return Item(name.to_bytes(16, "big"), size, is_frozen)


def ranks(*offers: Sequence[Item]) -> dict[Rank, Sequence[Item]]:
    return {Rank(rank): offer for rank, offer in enumerate(offers)}


def contents(offers: dict[Rank, Sequence[Item]], divisions: dict[Rank, Division]) -> dict[Rank, dict[int, list[Item]]]:
    """Return the items of each S3 object for equal tensors, as the result of `divide` for each rank states them."""
    found: dict[Rank, dict[int, list[Item]]] = {}
    for rank, division in divisions.items():
        found[rank] = {}
        for each, number in zip(offers[rank], division.objects, strict=True):
            if number != OWN:
                found[rank].setdefault(number, []).append(each)
    return found


def test_equal_tensors_are_divided_evenly() -> None:
    offers = ranks(*[[item(name) for name in range(12)]] * 4)
    divisions = divide(offers, least_bytes=1)
    assert [len(division.writes) for division in divisions.values()] == [1, 1, 1, 1]
    assert {len(items) for items in contents(offers, divisions)[Rank(0)].values()} == {3}


def test_large_tensors_do_not_fall_on_one_writer() -> None:
    """The embedding and its two moments have 300 bytes each, and all other tensors together have 300 bytes.

    Each of the four ranks writes 300 bytes.
    """
    offers = ranks(*[[item(0, 300), item(1, 300), item(2, 300), *(item(name, 10) for name in range(3, 33))]] * 4)
    divisions = divide(offers, least_bytes=1)
    sizes = [sum(each.bytes for each in items) for items in contents(offers, divisions)[Rank(0)].values()]
    assert sorted(sizes) == [300, 300, 300, 300]


def test_a_tensor_that_differs_stays_with_its_rank() -> None:
    offers = ranks([item(1), item(2)], [item(1), item(3)])
    divisions = divide(offers, least_bytes=1)
    assert [division.objects[1] for division in divisions.values()] == [OWN, OWN]
    assert divisions[Rank(0)].objects[0] == divisions[Rank(1)].objects[0] != OWN


def test_a_rank_with_more_bytes_of_its_own_writes_less() -> None:
    offers = ranks([item(9, 400), *(item(name) for name in range(4))], [item(name) for name in range(4)])
    divisions = divide(offers, least_bytes=1)
    assert (divisions[Rank(0)].writes, len(divisions[Rank(1)].writes)) == (frozenset(), 1)


def test_only_ranks_that_hold_a_tensor_share_its_object() -> None:
    """Only ranks that hold a tensor write parts of the objects that contain it.

    A sharded model has two shards, each of which two ranks hold, and one tensor that all four ranks hold.
    """
    offers = ranks([item(0), item(1)], [item(0), item(2)], [item(0), item(1)], [item(0), item(2)])
    divisions = divide(offers, least_bytes=1)
    numbers = [division.objects for division in divisions.values()]
    assert numbers[0] == numbers[2] != numbers[1] == numbers[3]
    assert len({division[0] for division in numbers}) == 1


def test_small_tensors_stay_with_their_ranks_and_few_bytes_have_few_writers() -> None:
    offers = ranks(*[[item(name) for name in range(10)]] * 4)
    assert [division.objects for division in divide(offers, least_bytes=1001).values()] == [(OWN,) * 10] * 4
    divisions = divide(offers, least_bytes=500)
    assert [len(division.writes) for division in divisions.values()] == [1, 0, 1, 0]
    assert [len(division.writes) for division in divide(offers, least_bytes=1, max_writers=1).values()] == [1, 0, 0, 0]


def test_equal_tensors_in_another_order_share_no_object() -> None:
    offers = ranks([item(1), item(2)], [item(2), item(1)])
    assert {division.objects for division in divide(offers, least_bytes=1).values()} == {(OWN, OWN)}


def test_a_tensor_that_a_rank_offers_twice_is_in_one_object_once() -> None:
    offers = ranks([item(1), item(1)], [item(1), item(1)])
    assert [division.objects for division in divide(offers, least_bytes=1).values()] == [(0, OWN)] * 2


def test_each_frozen_object_has_one_writer_even_if_one_rank_holds_it() -> None:
    shared = [item(name, is_frozen=True) for name in range(4)]
    offers = ranks(shared, [*shared, item(8, is_frozen=True)])
    divisions = divide(offers)
    assert sorted(number for division in divisions.values() for number in division.writes) == [0, 1, 2, 3, 4]
    assert [len(division.writes) for division in divisions.values()] == [2, 3]


@given(
    st.lists(
        st.lists(st.builds(item, st.integers(0, 9), st.integers(1, 3), is_frozen=st.booleans()), max_size=12),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_all_ranks_build_the_same_objects_and_each_object_has_one_writer_that_holds_it(
    offered: list[list[Item]], least_bytes: int, max_writers: int
) -> None:
    offers = ranks(*offered)
    divisions = divide(offers, least_bytes=least_bytes, max_writers=max_writers)
    built = contents(offers, divisions)
    writers = [number for division in divisions.values() for number in division.writes]
    assert sorted(writers) == list(range(len(writers)))
    for rank, objects in built.items():
        assert divisions[rank].writes <= objects.keys()
        for number, items in objects.items():
            (writer,) = [each for each, division in divisions.items() if number in division.writes]
            assert items == built[writer][number]
            assert len({each.is_frozen for each in items}) == 1
    for rank, items in offers.items():
        frozen = [number for each, number in zip(items, divisions[rank].objects, strict=True) if each.is_frozen]
        assert len([number for number in frozen if number == OWN]) == len(frozen) - len(set(frozen) - {OWN})
    assert divide(dict(reversed(offers.items())), least_bytes=least_bytes, max_writers=max_writers) == divisions
