from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from everstep.training import rng
from everstep.training.data import DataStream
from everstep.training.data.worker_seeds import SeededItem, Seeding, WorkerDataset
from everstep.training.errors import CannotResume, SessionMisuse
from everstep.training.state_tree import decode, encode


class Noisy(Dataset[torch.Tensor]):
    """A dataset whose samples draw random numbers from the process's three generators and from its own generator."""

    def __init__(self, count: int = 10) -> None:
        self.count = count
        self.own = np.random.default_rng(4)
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        self.fetched.append(index)
        return torch.tensor(
            [index, torch.rand(()).item(), np.random.rand(), random.random(), self.own.random()], dtype=torch.float64
        )


def seed() -> None:
    rng.seed(11)


class Alternating:
    """A user-defined sampler that draws from numpy during iteration."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = -1
        self.generator = np.random.RandomState(3)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.count):
            yield (int(self.generator.randint(0, 10)) + self.epoch) % 10


class Episodes:
    """A batch sampler that draws random numbers from the process's generators, which training uses too."""

    def __init__(self, begin_lazy: int = 0) -> None:
        self.begin_lazy = begin_lazy

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        pool = list(range(10))
        random.shuffle(pool)
        for number in range(5):
            if number >= self.begin_lazy:
                pool = [pool[int(place)] for place in torch.randperm(len(pool))]
            yield [pool.pop(), pool.pop() if number < self.begin_lazy else pool.pop(int(np.random.randint(len(pool))))]


class Shuffling(IterableDataset[int]):
    """A dataset that shuffles its items for each epoch with its own generator."""

    def __init__(self) -> None:
        self.own = random.Random(0)

    def __iter__(self) -> Iterator[int]:
        yield from self.own.sample(range(10), 4)


def shared_generator() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(6)
    return DataLoader(Noisy(), batch_size=3, sampler=RandomSampler(range(10), generator=generator), generator=generator)


LOADERS = {
    "sequential": lambda: DataLoader(Noisy(), batch_size=3),
    "shuffled": lambda: DataLoader(Noisy(), batch_size=3, shuffle=True),
    "drop_last": lambda: DataLoader(Noisy(), batch_size=3, shuffle=True, drop_last=True),
    "weighted": lambda: DataLoader(Noisy(), batch_size=2, sampler=WeightedRandomSampler([1.0] * 10, 7)),
    "distributed": lambda: DataLoader(
        Noisy(), batch_size=2, sampler=DistributedSampler(Noisy(), num_replicas=2, rank=1)
    ),
    "batch_sampler": lambda: DataLoader(Noisy(), batch_sampler=BatchSampler(RandomSampler(range(10)), 4, False)),
    "own_sampler": lambda: DataLoader(Noisy(), batch_size=3, sampler=Alternating(8)),
    "unbatched": lambda: DataLoader(Noisy(5), batch_size=None, shuffle=True),
    "lazy": lambda: DataLoader(Noisy(), batch_sampler=Episodes()),
    "lazy_later": lambda: DataLoader(Noisy(), batch_sampler=Episodes(begin_lazy=2)),
    "shared_generator": shared_generator,
    "iterable": lambda: DataLoader(Shuffling(), batch_size=2),
    "list": lambda: [torch.arange(3.0) + number for number in range(4)],
    "tensor": lambda: torch.arange(20.0).reshape(4, 5),
}


def flatten(batch: Any) -> list[float]:
    return [float(value) for value in torch.as_tensor(batch).reshape(-1)]


def draw(stream: DataStream, count: int) -> list[list[float]]:
    """Return `count` batches. After each batch, draw one number from each random generator of the process.

    The test draws these numbers because training steps use the same generators.
    """
    return [
        [*flatten(stream.next()), float(torch.rand(())), float(np.random.rand()), random.random()] for _ in range(count)
    ]


def saved(stream: DataStream) -> Any:
    encoded = encode({"data": stream.state_dict(), "rng": rng.observe()}, "")
    tensors = {path: tensor.clone() for path, tensor in encoded.tensors}
    return decode(encoded.data, tensors.__getitem__)


@pytest.mark.long(keep=28)
@pytest.mark.parametrize("consumed", [0, 1, 2, 3, 4, 5, 7, 9])
@pytest.mark.parametrize("name", LOADERS)
def test_a_resumed_stream_goes_on_as_if_nothing_had_happened(name: str, consumed: int) -> None:
    seed()
    stream = DataStream("data", LOADERS[name](), seed=1)
    draw(stream, consumed)
    state = saved(stream)
    expected = draw(stream, 12)
    rng.seed(999)  # make the new process draw other numbers before the restore
    resumed = DataStream("data", LOADERS[name](), seed=1)
    resumed.load_state_dict(state["data"])
    rng.restore(state["rng"])
    assert draw(resumed, 12) == expected
    assert (resumed.epoch, resumed.consumed_count) == (stream.epoch, stream.consumed_count)


@pytest.mark.parametrize("name", LOADERS)
def test_one_resumed_between_two_epochs_begins_the_next_as_if_nothing_had_happened(name: str) -> None:
    def walk(stream: DataStream) -> list[list[float]]:
        return [flatten(batch) for batch in stream]

    seed()
    stream = DataStream("data", LOADERS[name](), seed=1)
    walk(stream)
    state = saved(stream)
    assert (state["data"]["epoch"], state["data"]["consumed"]) == (1, 0)
    expected = [walk(stream), walk(stream)]
    rng.seed(999)
    resumed = DataStream("data", LOADERS[name](), seed=1)
    resumed.load_state_dict(state["data"])
    rng.restore(state["rng"])
    assert [walk(resumed), walk(resumed)] == expected


@pytest.mark.long(keep=12)
@pytest.mark.parametrize("consumed", [0, 1, 2])
@pytest.mark.parametrize("name", LOADERS)
def test_a_loop_may_end_an_epoch_before_its_last_batch(name: str, consumed: int) -> None:
    seed()
    stream = DataStream("data", LOADERS[name](), seed=1)
    draw(stream, consumed)
    stream.end_epoch()
    assert (stream.epoch, stream.consumed_count) == (min(consumed, 1), 0)
    state = saved(stream)
    expected = draw(stream, 8)
    rng.seed(999)
    resumed = DataStream("data", LOADERS[name](), seed=1)
    resumed.load_state_dict(state["data"])
    rng.restore(state["rng"])
    assert draw(resumed, 8) == expected


@pytest.mark.parametrize("name", ["sequential", "list"])
def test_batches_that_another_run_has_used_are_skipped(name: str) -> None:
    seed()
    used = DataStream("data", LOADERS[name](), seed=1)
    draw(used, 2)
    stream = DataStream("data", LOADERS[name](), seed=1)
    stream.skip(3, 2)
    assert (stream.epoch, stream.consumed_count) == (3, 2)
    assert next(map(flatten, stream))[0] == next(map(flatten, used))[0]


@pytest.mark.parametrize("name", ["sequential", "list"])
def test_an_epoch_may_end_right_after_a_restore(name: str) -> None:
    stream = DataStream("data", LOADERS[name](), seed=1)
    seed()
    epoch = [flatten(batch) for batch in stream]
    draw(stream, 2)
    resumed = DataStream("data", LOADERS[name](), seed=1)
    resumed.load_state_dict(saved(stream)["data"])
    resumed.end_epoch()
    seed()
    assert [batch[0] for batch in map(flatten, resumed)] == [batch[0] for batch in epoch]
    assert resumed.epoch == 3


@pytest.mark.integration
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", ["lazy", "lazy_later", "shuffled", "own"])
def test_workers_that_fetch_ahead_are_resumed_where_training_stood(kind: str, persistent: bool) -> None:
    def make() -> DataLoader[Any]:
        own = torch.Generator().manual_seed(3)
        more: dict[str, Any] = {
            "lazy": {"batch_sampler": Episodes()},
            "lazy_later": {"batch_sampler": Episodes(begin_lazy=3)},
            "shuffled": {"batch_size": 2, "shuffle": True},
            "own": {"batch_size": 2, "sampler": RandomSampler(range(10), generator=own), "generator": own},
        }[kind]
        return DataLoader(Noisy(), num_workers=1, persistent_workers=persistent, **more)

    seed()
    stream = DataStream("data", make(), seed=1)
    states: dict[int, Any] = {}
    everything: list[list[float]] = []
    for consumed in range(13):
        # an epoch has 5 batches, so these are positions at the start, in the middle and at the end of an epoch
        if consumed in (0, 1, 4, 5, 8):
            states[consumed] = saved(stream)
        everything += draw(stream, 1)
    for consumed, state in states.items():
        rng.seed(999)
        resumed = DataStream("data", make(), seed=1)
        resumed.load_state_dict(state["data"])
        rng.restore(state["rng"])
        assert draw(resumed, 13 - consumed) == everything[consumed:], f"resumed behind batch {consumed}"


@pytest.mark.parametrize("generator", [None, 3])
def test_workers_that_last_are_resumed_between_two_epochs(generator: int | None) -> None:
    def make() -> DataStream:
        own = None if generator is None else torch.Generator().manual_seed(generator)
        loader = DataLoader(
            list(range(10)), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True, generator=own
        )
        return DataStream("data", loader, seed=1)

    seed()
    stream = make()
    assert len(list(stream)) == 3
    state = saved(stream)
    expected = draw(stream, 7)
    rng.seed(999)
    resumed = make()
    resumed.load_state_dict(state["data"])
    rng.restore(state["rng"])
    assert draw(resumed, 7) == expected


def test_a_sampler_that_draws_as_it_goes_is_not_in_trainings_stream() -> None:
    def batches(draws: int) -> list[list[float]]:
        seed()
        stream = DataStream("data", DataLoader(list(range(10)), batch_sampler=Episodes()), seed=1)
        found = [flatten(stream.next()) for _ in range(2)]
        random.random()
        found.append(flatten(stream.next()))
        torch.rand(draws)
        return [*found, *(flatten(stream.next()) for _ in range(2))]

    assert batches(1) == batches(100), "behind the first draw of somebody else its items follow from its own draws"


def test_nothing_is_fetched_on_the_way_to_the_position() -> None:
    seed()
    stream = DataStream("data", DataLoader(Noisy(), batch_size=2, shuffle=True), seed=1)
    draw(stream, 3)
    state = saved(stream)
    dataset = Noisy()
    resumed = DataStream("data", DataLoader(dataset, batch_size=2, shuffle=True), seed=1)
    resumed.load_state_dict(state["data"])
    dataset.fetched.clear()
    draw(resumed, 1)
    assert len(dataset.fetched) == 2


@pytest.mark.parametrize("name", ["shuffled", "list", "tensor"])
def test_a_stream_can_be_resumed_again_before_it_moves(name: str) -> None:
    seed()
    stream = DataStream("data", LOADERS[name](), seed=1)
    draw(stream, 2)
    state = saved(stream)
    expected = draw(stream, 8)
    resumed = DataStream("data", LOADERS[name](), seed=1)
    resumed.load_state_dict(state["data"])
    again = DataStream("data", LOADERS[name](), seed=1)
    again.load_state_dict(saved(resumed)["data"])
    rng.restore(state["rng"])
    assert draw(again, 8) == expected


def test_iterating_gives_the_rest_of_the_epoch_and_then_the_next() -> None:
    stream = DataStream("data", [1, 2, 3], seed=1)
    assert stream.next() == 1
    assert list(stream) == [2, 3]
    assert stream.epoch == 1
    assert list(stream) == [1, 2, 3]


def test_epochs_are_told_to_whoever_wants_to_know() -> None:
    sampler = Alternating(2)
    stream = DataStream("data", DataLoader(Noisy(), sampler=sampler), seed=1)
    epochs = []
    for _ in range(5):
        stream.next()
        epochs.append(sampler.epoch)
    assert epochs == [0, 0, 1, 1, 2]


class Own:
    """A loader that saves and restores its own position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < 3:
            self.position += 1
            yield self.position
        self.position = 0

    def state_dict(self) -> dict[str, object]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self.position = int(str(state_dict["position"]))


def test_a_loader_with_state_ends_no_epoch_before_its_last_batch() -> None:
    stream = DataStream("data", Own(), seed=1)
    assert [stream.next() for _ in range(3)] == [1, 2, 3]
    stream.end_epoch()
    assert (stream.epoch, stream.next()) == (1, 1)
    with pytest.raises(CannotResume, match="keeps its own position"):
        stream.end_epoch()


@pytest.mark.parametrize("consumed", range(8))
def test_a_loader_with_state_is_asked_for_it(consumed: int) -> None:
    stream = DataStream("data", Own(), seed=1)
    for _ in range(consumed):
        stream.next()
    state = saved(stream)
    resumed = DataStream("data", Own(), seed=1)
    resumed.load_state_dict(state["data"])
    assert [resumed.next() for _ in range(7)] == [stream.next() for _ in range(7)]
    assert resumed.epoch == stream.epoch


class Epochs(Own):
    """An iterable dataset that starts each epoch at its beginning, in a new order."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.position = epoch, 0

    def __iter__(self) -> Iterator[int]:
        for value in super().__iter__():
            yield 10 * self.epoch + value


@pytest.mark.parametrize("consumed", range(8))
def test_a_loader_with_state_is_told_its_epoch_before_it_gets_its_state_back(consumed: int) -> None:
    stream = DataStream("data", Epochs(), seed=1)
    for _ in range(consumed):
        stream.next()
    resumed = DataStream("data", Epochs(), seed=1)
    resumed.load_state_dict(saved(stream)["data"])
    assert [resumed.next() for _ in range(4)] == [stream.next() for _ in range(4)]


class Lazy(Own):
    """A loader whose `__iter__` starts at the first batch. The start of an epoch draws a random number.

    Args:
        generator: the generator of the draw; None for torch's global one.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        offset = int(torch.randint(1000, (), generator=self.generator))
        for value in super().__iter__():
            yield value + offset


class Fragile(Own):
    """A loader that cannot be restored after it was asked for its state, like those of torchdata.nodes."""

    is_asked = False

    def state_dict(self) -> dict[str, object]:
        self.is_asked = True
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        assert not self.is_asked
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("consumed", range(8))
@pytest.mark.parametrize(
    "make",
    [Lazy, lambda: Lazy(torch.Generator().manual_seed(3)), Fragile],
    ids=["global generator", "own generator", "asked"],
)
def test_a_loader_restarts_as_it_began(make: Callable[[], Own], consumed: int) -> None:
    torch.manual_seed(5)
    stream = DataStream("data", make(), seed=1)
    stream.state_dict()
    for _ in range(consumed):
        stream.next()
        torch.rand(1)  # the training draws numbers between two batches
    state = saved(stream)
    expected = [(stream.next(), float(torch.rand(1))) for _ in range(7)]
    torch.manual_seed(6)
    resumed = DataStream("data", make(), seed=1)
    resumed.state_dict()
    resumed.load_state_dict(state["data"])
    rng.restore(state["rng"])
    assert [(resumed.next(), float(torch.rand(1))) for _ in range(7)] == expected


class Greedy(Own):
    """A loader whose state needs an argument."""

    def state_dict(self, worker: int) -> dict[str, object]:  # type: ignore[override]
        return {"position": worker}


def test_a_state_that_cannot_be_asked_for_is_refused_without_a_call() -> None:
    with pytest.raises(CannotResume, match=r"Greedy\.state_dict: missing a required argument: 'worker'"):
        DataStream("data", Greedy(), seed=1)


class DrawsEach(Own):
    """A loader that draws a random number for each batch."""

    def __iter__(self) -> Iterator[int]:
        for value in super().__iter__():
            yield value + int(torch.randint(1000, ()))


@pytest.mark.parametrize("consumed", range(2, 8))
def test_a_loader_that_draws_for_each_batch_draws_again(consumed: int) -> None:
    torch.manual_seed(5)
    stream = DataStream("data", DrawsEach(), seed=1)
    for _ in range(consumed):
        stream.next()
    state = saved(stream)
    expected = [stream.next() for _ in range(7)]
    resumed = DataStream("data", DrawsEach(), seed=1)
    resumed.load_state_dict(state["data"])
    rng.restore(state["rng"])
    assert [resumed.next() for _ in range(7)] == expected


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(100)


def test_what_keeps_no_position_is_replayed_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    stream = DataStream("train", DataLoader(Endless(), batch_size=None), seed=1)
    assert "train" in caplog.text
    assert "replays" in caplog.text
    for _ in range(30):
        stream.next()
    state = saved(stream)
    resumed = DataStream("train", DataLoader(Endless(), batch_size=None), seed=1)
    resumed.load_state_dict(state["data"])
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert resumed.next() == stream.next() == 30
    assert "replaying 30 batches" in caplog.text


@pytest.mark.parametrize(
    "loader", [iter([1, 2]), (number for number in range(3)), map(str, [1]), zip([1], [2], strict=True)]
)
def test_what_can_be_walked_once_only_is_refused(loader: Any) -> None:
    with pytest.raises(CannotResume, match=r"^data/train: .*walked once only"):
        DataStream("data/train", loader, seed=1)


def test_what_is_no_loader_is_refused() -> None:
    with pytest.raises(CannotResume, match="cannot be iterated"):
        DataStream("data", 5, seed=1)  # type: ignore[arg-type]


def test_a_loader_without_batches_is_a_fault_of_the_script() -> None:
    with pytest.raises(SessionMisuse, match="yields no batches"):
        DataStream("data", [], seed=1).next()


def test_seeds_differ_by_everything_they_follow_from() -> None:
    seeds = {
        Seeding(seed, rank).of(epoch, batch, begin)
        for seed in (0, 1)
        for rank in (0, 1)
        for epoch in (0, 1)
        for batch in (0, 1)
        for begin in (0, 1)
    }
    assert len(seeds) == 32
    assert all(0 <= number < 2**64 for number in seeds)


def test_a_seeded_dataset_is_an_image_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.training.data.worker_seeds.get_worker_info", lambda: object())
    before = rng.observe()
    seeded = WorkerDataset(Noisy())
    assert len(seeded) == 10
    first = seeded.__getitems__(SeededItem([1, 2], 5))
    second = WorkerDataset(Noisy()).__getitems__(SeededItem([1, 2], 5))
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert torch.equal(torch.stack(first), torch.stack(second))
    assert not torch.equal(torch.stack(first), torch.stack(WorkerDataset(Noisy()).__getitems__(SeededItem([1, 2], 6))))  # type: ignore[arg-type]
    rng.restore(before)


def fresh_batches(sampler: Any = None, *, seed: int = 1, generator: int | None = None) -> list[Any]:
    own = None if generator is None else torch.Generator().manual_seed(generator)
    stream = DataStream(
        "data", DataLoader(Noisy(4), batch_size=2, num_workers=1, sampler=sampler, generator=own), seed=seed
    )
    return [batch[:, 1:].tolist() for batch in stream]


def test_ranks_that_share_their_samples_augment_them_alike_and_ranks_that_divide_them_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_rank(rank: int, divided: bool) -> list[Any]:
        monkeypatch.setenv("RANK", str(rank))
        return fresh_batches(
            DistributedSampler(Noisy(8 if divided else 4), num_replicas=1 + divided, rank=rank * divided, shuffle=False)
        )

    assert of_rank(0, divided=False) == of_rank(1, divided=False)
    assert of_rank(0, divided=True) != of_rank(1, divided=True)


@pytest.mark.integration
def test_the_workers_seed_is_that_of_the_loader_as_with_torch() -> None:
    assert fresh_batches(seed=1) == fresh_batches(seed=1) != fresh_batches(seed=2)
    assert (
        fresh_batches(seed=1, generator=5) == fresh_batches(seed=2, generator=5) != fresh_batches(seed=1, generator=6)
    )


class Scaled(Dataset[int]):
    """A dataset that gets its scale factor in the worker process."""

    scale = 1

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index * self.scale


def set_scale(_worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Scaled)
    info.dataset.scale = 100


@pytest.mark.integration
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_worker_init_fn_reaches_the_users_own_dataset(start: str) -> None:
    loader = DataLoader(Scaled(), batch_size=3, num_workers=1, worker_init_fn=set_scale, multiprocessing_context=start)
    batch = DataStream("data", loader, seed=1).next()
    assert isinstance(batch, torch.Tensor)
    assert batch.tolist() == [0, 100, 200]
