"""Loaders that store their own position resume exactly, however and whenever they draw random numbers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torchdata.nodes as nodes
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from everstep.training.data import DataStream
from everstep.training.errors import CannotResume
from tests.unit.training.data.runs import Run, check

COUNT, BATCH = 16, 4


@pytest.fixture(autouse=True)
def garbage_collected_by_this_thread() -> Iterator[None]:
    """Collect abandoned `nodes.Loader` iterators in the main thread.

    Such an iterator lies in a reference cycle and joins its thread when it is collected. A collection in that very
    thread raises "cannot join current thread".
    """
    gc.disable()
    yield
    gc.collect()
    gc.enable()


class Lazy:
    """A loader whose `__iter__` is a generator function, and which skips the batches before its position."""

    def __init__(self, **options: Any) -> None:
        self.position = 0
        self.loader = DataLoader(range(COUNT), batch_size=BATCH, **options)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def __iter__(self) -> Iterator[Any]:
        skipped, self.position = self.position, 0
        for batch in self.loader:
            self.position += 1
            if self.position > skipped:
                yield batch
        self.position = 0


class Drawing(Lazy):
    """Seeks without a draw, and draws for each batch."""

    def __iter__(self) -> Iterator[Any]:
        while self.position < COUNT // BATCH:
            self.position += 1
            yield self.position, torch.rand(()).item()
        self.position = 0


class Eager(Drawing):
    """As `Drawing`, with an iterator of its own. `iter` draws, too."""

    def __iter__(self) -> Iterator[Any]:
        self.offset = torch.rand(()).item()
        return self

    def __next__(self) -> Any:
        if self.position == COUNT // BATCH:
            self.position = 0
            raise StopIteration
        self.position += 1
        return self.position, torch.rand(()).item()


def of_nodes(*, has_generator: bool, is_prefetched: bool = True) -> Any:
    generator = torch.Generator().manual_seed(2) if has_generator else None
    sampler = nodes.SamplerWrapper(RandomSampler(range(COUNT), generator=generator))
    node = nodes.Batcher(nodes.Mapper(sampler, lambda index: index), batch_size=BATCH)
    return nodes.Loader(nodes.Prefetcher(node, prefetch_factor=2) if is_prefetched else node)


LOADERS: dict[str, Callable[[], Any]] = {
    "lazy": Lazy,
    "lazy_shuffled": partial(Lazy, shuffle=True),
    "lazy_workers": partial(Lazy, shuffle=True, num_workers=1),
    "lazy_generator": lambda: Lazy(shuffle=True, generator=torch.Generator().manual_seed(3)),
    "nodes": partial(of_nodes, has_generator=True),
    "nodes_global": partial(of_nodes, has_generator=False),
    "nodes_in_process": partial(of_nodes, has_generator=True, is_prefetched=False),
    "eager": Eager,
}


# The first two epochs have eight batches. A cut at 4 lies between the epochs.
@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_resumes_anywhere(name: str) -> None:
    check(LOADERS[name], range(7))


def test_a_loader_that_draws_for_each_batch_resumes_after_the_second_batch() -> None:
    check(Drawing, [2, 3, 4, 6])


@pytest.mark.parametrize("name", ["nodes", "lazy"])
def test_no_state_is_read_before_the_first_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = LOADERS[name]()
    monkeypatch.setattr(type(loader), "state_dict", lambda _: pytest.fail("state_dict() was called"))
    Run(loader).save()


class Streaming(IterableDataset[int]):
    """A dataset whose state needs an argument, as in mosaicml-streaming."""

    def state_dict(self, num_samples: int) -> dict[str, Any]:
        return {"num_samples": num_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def __iter__(self) -> Iterator[int]:
        return iter(range(COUNT))


class OwnEpoch(Dataset[int]):
    """A dataset whose `set_epoch` has another signature."""

    def set_epoch(self) -> None: ...

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(Streaming()), r"Streaming\.state_dict: missing a required argument: 'num_samples'"),
        (Streaming(), r"Streaming\.state_dict: missing a required argument: 'num_samples'"),
        (DataLoader(OwnEpoch()), r"OwnEpoch\.set_epoch: too many positional arguments"),
    ],
    ids=["dataset", "loader", "epoch"],
)
def test_another_signature_is_refused_by_name(loader: Any, message: str) -> None:
    with pytest.raises(CannotResume, match=message):
        DataStream("data", loader, seed=1)
