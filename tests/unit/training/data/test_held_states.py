"""A DataLoader over a map-style dataset keeps the states of its dataset and collator, or refuses states by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from everstep.training import rng
from everstep.training.data import DataStream, SeededDataset, ShardedFiles
from everstep.training.errors import CannotResume
from tests.unit.training.data.runs import check, check_each_step


class Counter:
    """An object that counts its calls and has this count as its state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Counting(Counter, Dataset[int]):
    """A dataset whose items contain the number of items read so far."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        self.count += 1
        return 100 * index + self.count


class OfEpoch(Counting):
    """A dataset whose count begins at another number in each epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.count = 1000 * epoch


class Collator(Counter):
    def __call__(self, items: list[Any]) -> list[int]:
        self.count += 1
        return [int(item) + 10_000 * self.count for item in items]


class Curriculum(Counter):
    """A sampler that continues its difficulty from epoch to epoch."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[int]:
        for _ in range(5):
            self.count += 1
            yield self.count % 5


class Plain(Dataset[int]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(5)


pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
MANY_WORKERS = {"num_workers": 1, "multiprocessing_context": "fork"}
COUNTER = Counter()
GENERATOR = random.Random(5)


def counted_by_helper(items: list[int]) -> list[int]:
    return [add_count(item) for item in items]


def add_count(item: int) -> int:
    COUNTER.count += 1
    return item + COUNTER.count


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: DataLoader(Counting(), batch_size=2), id="dataset"),
        pytest.param(lambda: DataLoader(Counting(), batch_size=2, shuffle=True), id="shuffled"),
        pytest.param(lambda: DataLoader(OfEpoch(), batch_size=2), id="dataset_with_epochs"),
        pytest.param(lambda: DataLoader(Subset(Counting(), range(4)), batch_size=2), id="inside_a_subset"),
        pytest.param(lambda: DataLoader(SeededDataset(Counting(), seed=1), batch_size=2), id="inside_a_seeded_one"),
        pytest.param(lambda: DataLoader(Counting(), batch_size=2, collate_fn=Collator()), id="dataset_and_collator"),
        pytest.param(lambda: DataLoader(Plain(), batch_size=2, collate_fn=Collator()), id="collator"),
        pytest.param(lambda: StatefulDataLoader(Plain(), batch_size=2, collate_fn=Collator()), id="of_torchdata"),
    ],
)
def test_a_state_continues_where_the_undisturbed_run_has_it(make: Callable[[], Any]) -> None:
    check_each_step(make, 8)


def test_the_first_batches_after_a_restart_are_the_ones_of_the_undisturbed_run() -> None:
    batches = check(lambda: DataLoader(Counting(), batch_size=2), [1], behind=2)
    assert batches[1:3] == [[203, 304], [405]]


def test_a_state_of_a_rank_belongs_to_its_number_of_ranks() -> None:
    def order_of(data: Dataset[int]) -> object:
        sampler = DistributedSampler(data, num_replicas=2, rank=0)  # type: ignore[var-annotated]
        return DataStream("data", DataLoader(data, batch_size=2, sampler=sampler), seed=1).source.order

    assert order_of(Plain()) is not None
    assert order_of(Counting()) is None


@pytest.mark.parametrize(
    ("make", "named", "advice"),
    [
        pytest.param(
            lambda: DataLoader(Counting(), **MANY_WORKERS), r"\.Counting has a state", "num_workers=0", id="workers"
        ),
        pytest.param(
            lambda: DataLoader(Subset(Counting(), [0]), **MANY_WORKERS),
            r"\.Counting has a state",
            "num_workers=0",
            id="inside_a_subset_with_workers",
        ),
        pytest.param(
            lambda: StatefulDataLoader(Plain(), collate_fn=Collator(), **MANY_WORKERS),
            r"\.Collator has a state",
            "num_workers=0",
            id="collator_with_workers",
        ),
        pytest.param(
            lambda: DataLoader(Plain(), sampler=Curriculum()),
            r"sampler \S+\.Curriculum",
            "set_epoch",
            id="sampler",
        ),
        pytest.param(
            lambda: StatefulDataLoader(Plain(), sampler=Curriculum()),
            r"sampler \S+\.Curriculum",
            "set_epoch",
            id="sampler_of_a_loader_of_torchdata",
        ),
        pytest.param(
            lambda: DataLoader(Stream(), collate_fn=Collator()), r"\.Collator", "dataset's state_dict", id="iterable"
        ),
        pytest.param(
            lambda: DataLoader(ShardedFiles(["a"], range, [1], batch_size=1), batch_size=None, collate_fn=Collator()),
            r"\.Collator",
            "dataset's state_dict",
            id="files",
        ),
        pytest.param(
            lambda: DataLoader(Plain(), collate_fn=counted_by_helper, **MANY_WORKERS),
            r"\.Counter has a state",
            "num_workers=0",
            id="global_of_a_helper",
        ),
    ],
)
def test_a_state_that_no_snapshot_contains_is_refused_by_name(make: Callable[[], Any], named: str, advice: str) -> None:
    with pytest.raises(CannotResume, match=f"data: .*{named}.*{advice}"):
        DataStream("data", make(), seed=1)


def test_samplers_of_torchdata_and_modules_are_accepted() -> None:
    def with_module(items: list[Any]) -> Any:
        return module(torch.tensor([[float(item)] for item in items]))

    module = torch.nn.Linear(1, 1).requires_grad_(False)
    sampler = StatefulDistributedSampler(Plain(), num_replicas=2, rank=0)
    check_each_step(lambda: DataLoader(Plain(), batch_size=2, sampler=sampler, collate_fn=with_module), 4)


class DrawsByHelper(Dataset[int]):
    """A dataset whose method calls a function that draws from a generator of the module."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return index + self.noise()

    def noise(self) -> int:
        return draw()


def draw() -> int:
    return GENERATOR.randrange(1000)


def drawn_by_helper(items: list[Any]) -> list[int]:
    return [int(item) + draw() for item in items]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: DataLoader(DrawsByHelper(), batch_size=2), id="dataset"),
        pytest.param(lambda: DataLoader(Plain(), batch_size=2, collate_fn=drawn_by_helper), id="collator"),
        pytest.param(lambda: DataLoader(DrawsByHelper(), batch_size=2, **MANY_WORKERS), id="workers"),
    ],
)
def test_a_generator_that_a_helper_function_uses_is_kept(make: Callable[[], Any]) -> None:
    assert rng.find_generators([make().dataset, make().collate_fn]) == [GENERATOR]

    def start() -> Any:
        GENERATOR.seed(3)
        return make()

    check_each_step(start, 7)
