"""Tests the order of samples in many files against a list of all samples."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.training.data.file_order import FileOrder, FileSequence

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=8)
OPTIONS = st.fixed_dictionaries(
    {
        "lanes": st.integers(1, 5),
        "batch": st.integers(1, 5),
        "shuffle": st.booleans(),
        "block": st.integers(1, 9),
        "seed": st.integers(0, 3),
        "drop_last": st.booleans(),
        "replicas": st.integers(1, 4),
    }
)


def order_of(lengths: list[int], **options: Any) -> FileOrder:
    return FileOrder(files="", samples=sum(lengths), **options)


def batches(order: FileOrder, lengths: list[int], epoch: int) -> list[list[tuple[int, int]]]:
    """Return the samples of each batch, as pairs (file, number in the file).

    The list contains the batches of all ranks, in the order of their batch numbers.
    """
    sequence = FileSequence(order, lengths, epoch)
    found = []
    for number in range(order.batches):
        lane, samples = order.lane(number), []
        for place in order.places(number):
            block, within = divmod(place, order.block)
            moved = order.block_range(lane, block)[order.permutation(epoch, lane, block)[within]]
            samples.append(sequence.find(order.lane_begin(lane) + moved))
        found.append(samples)
    return found


@given(LENGTHS, OPTIONS, st.integers(0, 2))
def test_an_epoch_contains_each_sample_once(lengths: list[int], options: dict[str, Any], epoch: int) -> None:
    order = order_of(lengths, **options)
    found = batches(order, lengths, epoch)
    samples = sorted(sample for batch in found for sample in batch)
    every = [(file, number) for file, length in enumerate(lengths) for number in range(length)]
    if order.drop_last:
        assert len(every) - order.batch < len(samples) <= len(every)
        assert set(samples) <= set(every)
        assert len(set(samples)) == len(samples)
        assert {len(batch) for batch in found} <= {order.batch}
    else:
        assert samples == every
        assert {len(batch) for batch in found[:-1]} <= {order.batch}


@given(LENGTHS, OPTIONS)
def test_without_shuffling_the_samples_of_a_lane_follow_each_other(lengths: list[int], options: dict[str, Any]) -> None:
    order = order_of(lengths, **{**options, "shuffle": False, "drop_last": False})
    every = [(file, number) for file, length in enumerate(lengths) for number in range(length)]
    lanes: dict[int, list[tuple[int, int]]] = {}
    for number, batch in enumerate(batches(order, lengths, 0)):
        lanes.setdefault(order.lane(number), []).extend(batch)
    assert [sample for lane in sorted(lanes) for sample in lanes[lane]] == every
    assert len({len(samples) for lane, samples in lanes.items() if lane < order.lanes}) <= 1


@given(LENGTHS, OPTIONS, st.integers(0, 9))
def test_ranks_receive_the_batches_in_turn(lengths: list[int], options: dict[str, Any], begin: int) -> None:
    order = order_of(lengths, **options)
    ranks = [list(order.numbers(rank, begin)) for rank in range(order.replicas)]
    assert len(set(map(len, ranks))) == 1, "all ranks receive equally many batches"
    received = [number for numbers in zip(*ranks, strict=True) for number in numbers]
    assert received == list(range(begin, begin + len(received)))
    assert max(0, order.batches - begin) - len(received) in range(order.replicas)
    assert order.position(begin, len(ranks[0])) == begin + len(received)


@given(LENGTHS, OPTIONS)
def test_the_batches_do_not_depend_on_the_number_of_ranks(lengths: list[int], options: dict[str, Any]) -> None:
    order = order_of(lengths, **options)
    other = dataclasses.replace(order, replicas=order.replicas + 1)
    assert batches(order, lengths, 1) == batches(other, lengths, 1)
    assert order.differences(other.tree()) == ""
    assert order.earlier(other.tree()) == other


def test_each_epoch_and_each_seed_has_another_order() -> None:
    lengths = [5, 6, 7, 8]
    options: dict[str, Any] = {"lanes": 2, "batch": 2, "block": 8, "drop_last": False, "replicas": 1}
    orders = [order_of(lengths, shuffle=True, seed=seed, **options) for seed in range(2)]
    found = [batches(order, lengths, epoch) for order in orders for epoch in range(2)]
    assert all(one != other for index, one in enumerate(found) for other in found[:index])


def test_blocks_are_shuffled_within_themselves_only() -> None:
    lengths = [16]
    order = order_of(lengths, lanes=1, batch=1, shuffle=True, block=4, seed=0, drop_last=False, replicas=1)
    numbers = [number for [(_, number)] in batches(order, lengths, 0)]
    assert numbers != list(range(16))
    assert [number // 4 for number in numbers] == [number // 4 for number in range(16)]


def test_other_lanes_than_those_of_the_rest_are_read_at_the_same_time() -> None:
    lengths = [4, 4, 5]
    order = order_of(lengths, lanes=3, batch=2, shuffle=False, block=1, seed=0, drop_last=False, replicas=1)
    assert [order.lane(number) for number in range(order.batches)] == [0, 1, 2, 0, 1, 2, 3]


@pytest.mark.parametrize("name", ["samples", "lanes", "batch", "shuffle", "block", "seed", "drop_last", "files"])
def test_an_order_names_what_differs(name: str) -> None:
    order = order_of([6], lanes=2, batch=2, shuffle=False, block=1, seed=0, drop_last=False, replicas=1)
    value = {"shuffle": True, "drop_last": True, "files": "other"}.get(name, 7)
    other = dataclasses.replace(order, **{name: value})
    assert name in order.differences(other.tree())
    assert order.differences({"shuffle": True}) == "the loader was of another kind"


def test_permutations_differ_by_seed_epoch_lane_and_block() -> None:
    orders = [
        order_of([1] * 100, lanes=2, batch=5, shuffle=True, block=25, seed=seed, drop_last=False, replicas=1)
        for seed in (0, 1)
    ]
    keys = [(epoch, lane, block) for epoch in (0, 1) for lane in (0, 1) for block in (0, 1)]
    assert len({tuple(order.permutation(*key)) for order in orders for key in keys}) == 16
    assert len({tuple(FileSequence(order, [1] * 100, epoch).files) for order in orders for epoch in (0, 1)}) == 4
