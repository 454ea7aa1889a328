"""A batch that was fetched before a restart is not fetched again."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from everstep.training.data import DataStream
from everstep.training.errors import CannotRelayout
from tests.unit.training.data.runs import check


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2) + index


@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Noisy(), batch_size=3, shuffle=True),
        lambda: DataLoader(Noisy(), batch_size=5, num_workers=1),
    ],
    ids=["shuffled", "workers"],
)
def test_batches_fetched_ahead_come_back(make: Callable[[], Iterable[object]], prefetch: int) -> None:
    check(make, range(0, 7, 2), prefetch=prefetch)


def test_the_index_of_a_batch_continues_in_its_epoch() -> None:
    stream = DataStream("data", DataLoader(Noisy(), batch_size=4), 1)
    assert [(stream.next(), stream.batch)[1] for _ in range(5)] == [0, 1, 2, 0, 1]
    resumed = DataStream("data", DataLoader(Noisy(), batch_size=4), 1)
    resumed.load_state_dict(stream.state_dict())
    assert resumed.batch == 1
    assert [resumed.batch for _ in resumed] == [2]


def test_another_number_of_ranks_fetches_the_batches_again_that_were_fetched_ahead() -> None:
    def make(ranks: int) -> DataStream:
        sampler = DistributedSampler(Noisy(), num_replicas=ranks, rank=0, shuffle=False)
        return DataStream("data", DataLoader(range(12), batch_size=2 // ranks, sampler=sampler), 1)  # type: ignore[arg-type]

    before, after = make(1), make(2)
    before.prefetch_count = 2
    assert before.next().tolist() == [0, 1]  # type: ignore[attr-defined]
    after.load_state_dict(after.relaid(before.state_dict(), is_same_rank=False))
    assert after.next().tolist() == [2]  # type: ignore[attr-defined]


def test_batches_of_the_epoch_before_cannot_be_fetched_again() -> None:
    before = DataStream("data", DataLoader(range(4), batch_size=2, sampler=DistributedSampler(range(4), 1, 0)), 1)  # type: ignore[arg-type]
    before.prefetch_count = 2
    before.next()
    after = DataStream("data", DataLoader(range(4), batch_size=1, sampler=DistributedSampler(range(4), 2, 0)), 1)  # type: ignore[arg-type]
    with pytest.raises(CannotRelayout, match="the epoch before"):
        after.relaid(before.state_dict(), is_same_rank=False)
