"""Launches with different numbers of ranks divide the samples of one epoch: each launch continues the earlier one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

import everstep.training
from everstep.training.data import DataStream
from everstep.training.data.file_order import FileOrder
from everstep.training.data.sample_order import BatchOrder, SampleOrder, Sharing
from everstep.training.data.shares import EpochShares
from everstep.training.errors import CannotResume

Loader = Callable[[int, int, int, int, bool], DataLoader[Any]]
"""Creates a loader of (samples, ranks, rank, batch size, drop_last)."""


def of_torch(samples: int, replicas: int, rank: int, batch: int, drop_last: bool, shuffle: bool = True) -> Any:
    data: Any = range(samples)
    sampler = DistributedSampler[Any](data, replicas, rank, shuffle=shuffle, seed=3, drop_last=drop_last)
    return DataLoader(data, batch_size=batch, sampler=sampler)


def of_accelerate(samples: int, replicas: int, rank: int, batch: int, drop_last: bool, split: bool = False) -> Any:
    data: Any = range(samples)
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(3))
    return _sharded(data, sampler, replicas, rank, batch, drop_last, split)


def seedable(samples: int, replicas: int, rank: int, batch: int, drop_last: bool) -> Any:
    data: Any = range(samples)
    sampler = SeedableRandomSampler(data, data_seed=3)
    return _sharded(data, sampler, replicas, rank, batch, drop_last, False)


def _sharded(data: Any, sampler: Any, replicas: int, rank: int, batch: int, drop_last: bool, split: bool) -> Any:
    batches = BatchSampler(sampler, batch * replicas if split else batch, drop_last)
    if replicas == 1:
        return DataLoader(data, batch_sampler=batches)
    return DataLoader(data, batch_sampler=BatchSamplerShard(batches, replicas, rank, split_batches=split))


def split(samples: int, replicas: int, rank: int, batch: int, drop_last: bool) -> Any:
    return of_accelerate(samples, replicas, rank, batch, drop_last, split=True)


LOADERS = pytest.mark.parametrize("make", [of_torch, of_accelerate, split, seedable])


@given(samples=st.integers(1, 40), replicas=st.integers(1, 7), shuffle=st.booleans(), drop_last=st.booleans())
def test_the_shares_of_a_whole_epoch_are_those_of_a_distributed_sampler(
    samples: int, replicas: int, shuffle: bool, drop_last: bool
) -> None:
    epoch: list[Any] = list(of_torch(samples, 1, 0, 1, False, shuffle).sampler)
    shares = EpochShares(samples, replicas, 1, drop_last)
    for rank in range(replicas):
        of_rank = list(of_torch(samples, replicas, rank, 1, drop_last, shuffle).sampler)
        assert [epoch[position] for position in shares.of(rank, 0)] == of_rank


@given(
    samples=st.integers(1, 40),
    replicas=st.integers(2, 5),
    batch=st.integers(1, 4),
    drop_last=st.booleans(),
    is_split=st.booleans(),
)
def test_the_shares_of_a_whole_epoch_are_those_of_accelerate(
    samples: int, replicas: int, batch: int, drop_last: bool, is_split: bool
) -> None:
    shares = EpochShares(samples, replicas, batch, drop_last)
    for rank in range(replicas):
        inner = BatchSampler(range(samples), batch * replicas if is_split else batch, drop_last)  # type: ignore[arg-type]
        shard = BatchSamplerShard(inner, replicas, rank, split_batches=is_split)
        assert list(shares.of(rank, 0)) == [index for indices in shard for index in indices]


class Launch:
    """The loaders of all ranks of one launch."""

    def __init__(self, loaders: Sequence[DataLoader[Any]]) -> None:
        self.streams = [DataStream("data", loader, 0) for loader in loaders]
        self._batches = [iter(stream) for stream in self.streams]

    def restored(self, earlier: Launch) -> Launch:
        """Restore the positions of an earlier launch, which may have had another number of ranks."""
        before = [stream.state_dict() for stream in earlier.streams]
        is_same = len(before) == len(self.streams)
        for rank, stream in enumerate(self.streams):
            stream.load_state_dict(stream.relaid(before[rank % len(before)], is_same_rank=is_same))
        return self

    def next_epoch(self) -> Launch:
        self._batches = [iter(stream) for stream in self.streams]
        return self

    def step(self) -> list[list[int]]:
        """Return the batch of each rank, or an empty list at the end of the epoch."""
        rows: list[Any] = [next(batches, None) for batches in self._batches]
        are_over = {row is None for row in rows}
        assert len(are_over) == 1, "all ranks receive equally many batches"
        assert len({(stream.epoch, stream.consumed_count) for stream in self.streams}) == 1, "one common position"
        return [] if True in are_over else [row.tolist() for row in rows]


CHANGES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=4)
"""Launches as (number of ranks, batch size, number of steps)."""


@LOADERS
@given(samples=st.integers(1, 40), launches=CHANGES, drop_last=st.booleans())
def test_ranks_stay_at_one_position_and_receive_every_sample_once(
    make: Loader, samples: int, launches: list[tuple[int, int, int]], drop_last: bool
) -> None:
    received: list[int] = []
    launch, window, is_over = None, 0, False
    for replicas, batch, steps in [*launches, (*launches[-1][:2], samples + 1)]:
        loaders = [make(samples, replicas, rank, batch, drop_last) for rank in range(replicas)]
        launch = Launch(loaders) if launch is None else Launch(loaders).restored(launch)
        window = max(window, replicas * batch)
        for _ in range(steps):
            rows = launch.step()
            received += [sample for row in rows for sample in row]
            is_over = is_over or not rows
            if is_over:
                break
        if is_over:
            break
    assert is_over
    found = set(received)
    extra = len(received) - len(found)
    assert extra < window, "the last window is completed at most once"
    assert not drop_last or not extra
    assert samples - len(found) < (window if drop_last else 1), "at most the last window is dropped"


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4), (4, 6), (8, 6), (6, 4)])
@pytest.mark.parametrize("samples", [200, 203, 208])
def test_a_change_of_the_ranks_at_any_step_leaves_all_ranks_equally_many_batches(
    samples: int, before: int, after: int
) -> None:
    for steps in range(1, samples // (before * 4)):
        launch = Launch([of_torch(samples, before, rank, 4, False) for rank in range(before)])
        for _ in range(steps):
            launch.step()
        launch = Launch([of_torch(samples, after, rank, 4, False) for rank in range(after)]).restored(launch)
        while launch.step():
            pass


@LOADERS
def test_steps_use_the_samples_of_an_undisturbed_run_also_in_later_epochs(make: Loader) -> None:
    def begun(replicas: int) -> Launch:
        return Launch([make(48, replicas, rank, 12 // replicas, False) for rank in range(replicas)])

    def samples_of(launch: Launch, count: int) -> list[list[int]]:
        return [sorted(sample for row in launch.step() for sample in row) for _ in range(count)]

    undisturbed = begun(4)
    expected = samples_of(undisturbed, 5)
    expected += samples_of(undisturbed.next_epoch(), 5)
    launch = begun(4)
    found = samples_of(launch, 1)
    for replicas, steps in ((3, 1), (3, 1), (4, 2)):
        launch = begun(replicas).restored(launch)
        found += samples_of(launch, steps)
    found += samples_of(launch.next_epoch(), 2)
    launch = begun(2).restored(launch)
    found += samples_of(launch, 3)
    assert found == expected
    assert sorted(sample for step in found[:5] for sample in step) == list(range(48))


ORDERS = [
    SampleOrder(samples=8, shuffle=True, seed=1, drop_last=False, replicas=2, batch=2),
    BatchOrder(samples=8, sampler="sampler", drop_last=False, replicas=2, batch=2, block=2),
    FileOrder("files", 8, lanes=2, batch=2, shuffle=True, block=1, seed=1, drop_last=False, replicas=2),
]
ANY_NUMBER_OF_RANKS = {
    SampleOrder: {"replicas", "batch"},
    BatchOrder: {"replicas", "batch", "block"},
    FileOrder: {"replicas"},
}


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_order_differs_by_each_option_that_changes_the_order_of_samples(order: Any) -> None:
    assert order.differences(order.tree()) == ""
    for name, value in order.tree().items():
        other = f"other {value}" if isinstance(value, str) else not value if isinstance(value, bool) else value + 1
        changed = dataclasses.replace(order, **cast("dict[str, Any]", {name: other}))
        assert bool(order.differences(changed.tree())) == (name not in ANY_NUMBER_OF_RANKS[type(order)]), name


class Reversed(DistributedSampler[Any]):
    """A sampler that yields the samples in another order than its base class."""

    def __iter__(self) -> Iterator[Any]:
        yield from reversed(list(super().__iter__()))


DATA: Any = range(8)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, sampler=Reversed(DATA, 2, 0)),
        DataLoader(DATA, shuffle=True),
        DataLoader(
            DATA,
            batch_sampler=BatchSamplerShard(BatchSampler(SequentialSampler(DATA), 3, False), 2, 0, even_batches=False),
        ),
        DataLoader(DATA, batch_sampler=BatchSamplerShard(BatchSampler(RandomSampler(DATA), 3, False), 2, 0)),
        DataLoader(
            DATA,
            sampler=RandomSampler(DATA, replacement=True, generator=torch.Generator()),
        ),
    ],
    ids=["own order", "generator of the process", "uneven", "sharded, generator of the process", "with replacement"],
)
def test_a_loader_whose_samples_have_no_order_over_all_ranks(loader: Any) -> None:
    assert Sharing.of(loader) is None


def test_a_plain_loader_has_an_order_if_a_single_rank_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(DATA, batch_size=3)
    assert Sharing.of(loader) is not None
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Sharing.of(loader) is None


def test_an_elastic_job_is_refused_if_no_other_number_of_ranks_could_continue_its_loader() -> None:
    DataStream("data", of_torch(8, 2, 0, 2, False), 0).check_elastic()
    with pytest.raises(CannotResume, match=r"^rows: the job may continue on another number of nodes.*MinNodeCount"):
        DataStream("rows", [1, 2, 3], 0).check_elastic()


@pytest.mark.parametrize("is_elastic", [True, False])
def test_init_refuses_the_loader_of_an_elastic_job_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, is_elastic: bool
) -> None:
    monkeypatch.setenv("EVERSTEP_IS_ELASTIC", str(int(is_elastic)))
    model = torch.nn.Linear(1, 1)
    options: Any = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "data": [1, 2]}
    with pytest.raises(CannotResume, match="ElasticConfig") if is_elastic else nullcontext():
        everstep.training.init(**options).close()
