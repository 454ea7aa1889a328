"""Tests `ShardedFiles`: samples, randomness, workers, ranks, and positions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from everstep.training import rng
from everstep.training.data import DataStream, ShardedFiles
from everstep.training.errors import CannotRelayout, CannotResume, SessionMisuse
from everstep.training.state_tree import is_same
from tests.unit.training.data import runs
from tests.unit.training.data.runs import Run, check, check_each_step, interleaved

LENGTHS = [5, 0, 9, 4, 7, 6]
OWN = random.Random(4)


def read(file: int) -> Iterator[tuple[float, ...]]:
    """Yield the samples of a file: (file, number, random numbers)."""
    drift = 0.0
    for number in range(LENGTHS[file]):
        drift += random.random()  # a draw that later samples depend on
        yield file, number, drift, torch.rand(()).item(), float(np.random.rand()), OWN.random()


def collate(samples: list[Any]) -> list[Any]:
    return [*samples, random.random()]


def files(**options: Any) -> ShardedFiles:
    given = {"batch_size": 2, "open_files": 3, "collate_fn": collate, "num_replicas": 1, "rank": 0, **options}
    return ShardedFiles(range(len(LENGTHS)), read, LENGTHS, **given)


def loader(workers: int = 0, persistent: bool = False, **options: Any) -> DataLoader[Any]:
    return DataLoader(files(**options), batch_size=None, num_workers=workers, persistent_workers=persistent)


OPTIONS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 4),
        "open_files": st.integers(1, 4),
        "shuffle": st.booleans(),
        "block_size": st.integers(1, 8),
        "drop_last": st.booleans(),
    }
)


@settings(max_examples=25, deadline=None)
@given(OPTIONS, st.sets(st.integers(0, 40), min_size=1, max_size=3))
def test_a_resumed_run_reads_what_the_undisturbed_run_reads(options: dict[str, Any], cuts: set[int]) -> None:
    check(lambda: loader(**options), cuts)


def test_a_run_that_is_killed_after_every_step_reads_the_same() -> None:
    check_each_step(lambda: loader(shuffle=True, block_size=5), 40)


class Info:
    """Stands for torch's description of a worker."""

    def __init__(self, worker: int, workers: int) -> None:
        self.id, self.num_workers = worker, workers


@settings(max_examples=25, deadline=None)
@given(OPTIONS, st.integers(1, 3), st.integers(1, 3), st.integers(0, 12))
def test_batches_depend_on_neither_workers_nor_ranks(
    options: dict[str, Any], workers: int, ranks: int, begin: int
) -> None:
    whole = files(**options)
    whole.set_epoch(2, begin)
    expected = runs.plain(list(whole))
    received = []
    for rank in range(ranks):
        of_rank: list[Any] = []
        for worker in range(workers):
            part = files(num_replicas=ranks, rank=rank, **options)
            part.set_epoch(2, begin)
            with patch("everstep.training.data.files.get_worker_info", return_value=Info(worker, workers)):
                of_rank.append(runs.plain(list(part)))
        received.append(interleaved(of_rank))
    together = [batch for batches in zip(*received, strict=True) for batch in batches]
    assert together == expected[: len(together)]
    assert len(expected) - len(together) < ranks


@pytest.mark.long(keep=2)
@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize(("before", "after"), [(2, 3), (0, 2), (3, 0)])
@pytest.mark.parametrize("persistent", [False, True])
def test_another_number_of_workers_continues_at_the_position(before: int, after: int, persistent: bool) -> None:
    def make(workers: int) -> DataLoader[Any]:
        return loader(workers, persistent and workers > 0, shuffle=True, block_size=4)

    rng.seed(11)
    undisturbed = [batch for batch, _, _ in Run(make(0)).steps(40)]
    rng.seed(11)
    run = Run(make(before))
    for cut in (5, 16, 17):  # an epoch has 16 batches
        rest = cut - run.stream.handed_count
        assert [batch for batch, _, _ in run.steps(rest)] == undisturbed[cut - rest : cut]
        resumed = Run(make(after))
        resumed.load(run.save())
        assert [batch for batch, _, _ in resumed.steps(18)] == undisturbed[cut : cut + 18]


@pytest.mark.integration
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_leave_the_training_loops_random_numbers_alone(persistent: bool) -> None:
    check(lambda: loader(2, persistent, shuffle=True), [0, 3, 16, 20], behind=18)


def test_the_training_loops_generators_are_not_disturbed() -> None:
    before = rng.observe()
    stream = DataStream("data", DataLoader(files(), batch_size=None, generator=torch.Generator()), 1)
    for _ in range(20):
        stream.next()
    assert is_same(rng.observe(), before)


def test_a_file_is_opened_once_per_epoch_if_each_worker_has_its_own() -> None:
    opened: list[int] = []

    def count(file: int) -> Iterator[int]:
        opened.append(file)
        yield from range(6)

    for worker in range(2):
        data = ShardedFiles(range(4), count, [6] * 4, batch_size=2, open_files=4, num_replicas=1, rank=0)
        with patch("everstep.training.data.files.get_worker_info", return_value=Info(worker, 2)):
            assert len(list(data)) == 6
    assert sorted(opened) == [0, 1, 2, 3]


def test_a_resumed_run_reads_at_most_the_file_and_the_block_again() -> None:
    opened: list[int] = []

    def count(file: int) -> Iterator[int]:
        opened.append(file)
        yield from range(6)

    data = ShardedFiles(range(9), count, [6] * 9, batch_size=2, open_files=1, block_size=6, num_replicas=1, rank=0)
    data.set_epoch(0, begin=13)
    next(iter(data))
    assert opened == [4]


class Ranks:
    """The data streams of all ranks of one launch."""

    def __init__(self, world_size: int, **options: Any) -> None:
        made = [loader(num_replicas=world_size, rank=rank, **options) for rank in range(world_size)]
        self.streams = [DataStream("data", each, 1) for each in made]

    def read(self, count: int) -> list[Any]:
        """Return the next `count` batches of all ranks together."""
        batches = []
        for _ in range(count // len(self.streams)):
            batches += [runs.plain(stream.next()) for stream in self.streams]
        return batches

    def continue_with(self, world_size: int, **options: Any) -> Ranks:
        later = Ranks(world_size, **options)
        for rank, stream in enumerate(later.streams):
            state = self.streams[rank % len(self.streams)].state_dict()
            stream.load_state_dict(stream.relaid(state, is_same_rank=False))
        return later


@settings(max_examples=25, deadline=None)
@given(OPTIONS, st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(1, 2))
def test_other_numbers_of_ranks_continue_with_the_next_batch(
    options: dict[str, Any], worlds: list[int], steps: int
) -> None:
    """Consecutive launches with different numbers of ranks read the same batches as one rank, until the epoch ends."""
    expected = [runs.plain(batch) for batch in DataStream("data", loader(**options), 1)]
    ranks, found = Ranks(worlds[0], **options), []
    for world_size in worlds:
        ranks = ranks.continue_with(world_size, **options)
        count = min(steps, (len(expected) - len(found)) // world_size) * world_size
        found += ranks.read(count)
    assert found == expected[: len(found)]


def test_the_samples_of_a_step_are_compared_after_a_change_of_ranks() -> None:
    ranks = Ranks(4)
    for stream in ranks.streams:
        stream.batches_per_step = 1
    later = ranks.continue_with(2).streams[0]
    later.batches_per_step = 1
    with pytest.raises(CannotRelayout, match="an optimizer step used 8 samples and would now use 4"):
        later.check_step()
    later.batches_per_step = 2
    later.check_step()


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"batch_size": 3}, "batch was 2, is 3"), ({"seed": 5}, "seed was 0, is 5"), ({"open_files": 2}, "lanes was 3")],
)
def test_other_options_are_refused(change: dict[str, Any], reason: str) -> None:
    state = Ranks(2).streams[0].state_dict()
    with pytest.raises(CannotRelayout, match=f"data: {reason}"):
        DataStream("data", loader(**change), 1).relaid(state, is_same_rank=False)
    with pytest.raises(CannotResume, match=f"data: {reason}"):
        DataStream("data", loader(num_replicas=2, **change), 1).load_state_dict(state)


def test_a_position_of_a_sampler_is_no_position_of_files() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler([1, 2], num_replicas=1, rank=0)  # type: ignore[arg-type]
    of_sampler = DataStream("data", DataLoader([1, 2], sampler=sampler), 1)  # type: ignore[arg-type]
    of_files = DataStream("data", loader(), 1)
    for one, other in ((of_sampler, of_files), (of_files, of_sampler)):
        with pytest.raises(CannotRelayout, match="the loader was of another kind"):
            one.relaid(other.state_dict(), is_same_rank=False)


def test_files_are_recognized_by_their_names_without_directories() -> None:
    def order(folder: str, name: str) -> Any:
        return ShardedFiles([f"{folder}/{name}"], read, [3], batch_size=1, num_replicas=1, rank=0).order

    assert order("/a", "one").differences(order("s3://b/c", "one").tree()) == ""
    assert "names or lengths" in order("/a", "one").differences(order("/a", "two").tree())


@pytest.mark.parametrize(
    ("lengths", "reason"), [([4], "only 3 samples"), ([2], "more than 2 samples"), ([1, 2], "1 files and 2 lengths")]
)
def test_wrong_lengths_are_named(lengths: list[int], reason: str) -> None:
    with pytest.raises(SessionMisuse, match=reason):
        list(ShardedFiles(["a"], lambda _: range(3), lengths, batch_size=1, num_replicas=1, rank=0))


@pytest.mark.parametrize("options", [{"rank": 2}, {"batch_size": 0}, {"block_size": 0}, {"open_files": 0}])
def test_values_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SessionMisuse, match="Ranks count from 0"):
        files(**options)


@pytest.mark.parametrize(("ranks", "workers", "is_shared"), [(4, 1, False), (2, 2, False), (3, 0, True), (1, 3, True)])
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
def test_the_log_reports_workers_that_read_the_same_files(
    ranks: int, workers: int, is_shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        DataStream("data", loader(workers, open_files=4, num_replicas=ranks), 1)
    assert caplog.text.count("data: 4 open files for 3 workers of all ranks") == len(caplog.records) == is_shared


def test_a_loader_that_batches_again_is_refused() -> None:
    with pytest.raises(CannotResume, match="batch_size=None"):
        DataStream("data", DataLoader(files(), batch_size=2), 1)
    with pytest.raises(CannotResume, match="in_order=False"):
        DataStream("data", DataLoader(files(), batch_size=None, num_workers=1, in_order=False), 1)


def test_the_rank_is_that_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    data = files(num_replicas=None, rank=None)
    assert (data.rank, data.order.replicas) == (2, 3)
    assert len(data) == len(list(data)) == 5


def test_files_need_no_loader_around_them() -> None:
    assert [Run(made).step()[0] for made in (files(), loader())] == [runs.plain(next(iter(files())))] * 2


def test_draws_of_a_file_differ_by_seed_and_epoch_only() -> None:
    def read(_: str) -> Iterator[tuple[float, float]]:
        at_open = random.random()
        return ((at_open, random.random()) for _number in range(3))

    def drawn(seed: int, epoch: int) -> list[Any]:
        files = ShardedFiles(["a"], read, [3], batch_size=1, seed=seed, collate_fn=list, num_replicas=1, rank=0)
        files.set_epoch(epoch)
        batches: list[Any] = list(files)
        return [batch[0] for batch in batches]

    random.seed(1)
    first = [drawn(*key) for key in ((0, 0), (0, 1), (1, 0))]
    random.seed(2)
    assert [drawn(*key) for key in ((0, 0), (0, 1), (1, 0))] == first
    for draws in zip(*first, strict=True):
        assert len({at_open for at_open, _ in draws}) == len({number for _, number in draws}) == 3


def test_one_of_two_ranks_resumes_at_its_own_next_batch() -> None:
    def make() -> DataLoader[Any]:
        files = ShardedFiles(["a"], lambda _: range(20), [20], batch_size=2, num_replicas=2, rank=1)
        return DataLoader(files, batch_size=None)

    assert check(make, [1, 2, 4, 5])[:5] == [[2, 3], [6, 7], [10, 11], [14, 15], [18, 19]]
