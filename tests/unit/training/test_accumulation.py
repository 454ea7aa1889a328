"""Tests the number of micro-batches with which another number of ranks keeps the global batch size."""

from __future__ import annotations

import pytest

from everstep.training import SessionMisuse, accumulation


@pytest.mark.parametrize(("world_size", "expected"), [(4, 3), (3, 4), (2, 6), (1, 12)])
def test_fewer_ranks_take_more_micro_batches(world_size: int, expected: int) -> None:
    assert accumulation(48, 4, variables={"WORLD_SIZE": str(world_size)}) == expected
    assert accumulation(48, 4, replicas=world_size, variables={"WORLD_SIZE": "9"}) == expected


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "world_size", "advice"),
    [
        (64, 4, 3, "3 ranks cannot share 64 samples; choose a multiple of every number of ranks"),
        (60, 8, 3, "a micro-batch of 5 fits 3 ranks"),
        (2, 1, 3, "3 ranks cannot share 2 samples"),
    ],
)
def test_ranks_that_cannot_keep_it_are_told_what_fits(
    global_batch: int, micro_batch: int, world_size: int, advice: str
) -> None:
    with pytest.raises(SessionMisuse, match=advice):
        accumulation(global_batch, micro_batch, replicas=world_size)
