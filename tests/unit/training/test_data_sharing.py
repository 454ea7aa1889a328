"""Tests loaders that share a random generator with the training loop, with another loader, or within themselves.

The tests interrupt small random runs after an arbitrary step and resume them with new objects. Each resumed run must
produce the batches and noise of the uninterrupted run. If this is impossible, `register` must refuse the loaders by
name.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from everstep.training import rng
from everstep.training.data import DataStream, check_apart
from everstep.training.errors import CannotResume, SessionMisuse
from everstep.training.state_tree import decode, encode, is_same

STEPS_BEHIND = 9


class Noisy(Dataset[torch.Tensor]):
    """A dataset that adds noise from its own generator or from the process's generators."""

    def __init__(self, count: int, generator: torch.Generator | None) -> None:
        self.count = count
        self.generator = generator

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand((), generator=self.generator, dtype=torch.float64)


class Streamed(IterableDataset[torch.Tensor]):
    """An iterable dataset that draws a random number for each sample."""

    def __init__(self, count: int, generator: torch.Generator | None) -> None:
        self.count = count
        self.generator = generator

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.count):
            yield index + torch.rand((), generator=self.generator, dtype=torch.float64)


class Rejecting:
    """A sampler that draws a random number per item, from its own generator or the process's generators."""

    def __init__(self, count: int, generator: torch.Generator | None) -> None:
        self.count = count
        self.generator = generator

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.count):
            if self.generator is None:
                yield (random.randrange(self.count) + int(np.random.randint(self.count))) % self.count
            else:
                yield int(torch.randint(self.count, (), generator=self.generator))


class Eager(Rejecting):
    """A sampler that draws the order of all items when its iterator is created."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.count, generator=self.generator).tolist())


@dataclasses.dataclass(frozen=True)
class Shape:
    """The settings of one loader in a random run."""

    sampler: str
    count: int
    batch_size: int
    draws: str
    """Name of the generator from which the dataset draws.

    - `own`: a generator that only this loader has.
    - `shared`: the generator that the whole run shares.
    - `process`: the generators of the process.
    - `nothing`: the dataset draws no random numbers.
    """
    is_shared: bool
    """True if the sampler draws from the generator that the whole run shares.

    False if it has a generator of its own.
    """


SAMPLERS = ("shuffle", "replacement", "long", "weighted", "subset", "rejecting", "process", "eager", "streamed", "list")


def loader_of(shape: Shape, shared: torch.Generator, number: int) -> Any:
    own = torch.Generator().manual_seed(100 + number)
    generator = shared if shape.is_shared else own
    of_dataset = {"own": own, "shared": shared, "process": None}.get(shape.draws)
    count = shape.count
    dataset: Any = list(range(count)) if shape.draws == "nothing" else Noisy(count, of_dataset)
    samplers: dict[str, Any] = {
        "replacement": lambda: RandomSampler(
            range(count), replacement=True, num_samples=2 * count, generator=generator
        ),
        "long": lambda: RandomSampler(range(count), num_samples=2 * count + 1, generator=generator),
        "weighted": lambda: WeightedRandomSampler([1.0] * count, count, generator=generator),
        "subset": lambda: SubsetRandomSampler(range(count), generator=generator),
        "rejecting": lambda: Rejecting(count, generator),
        "process": lambda: Rejecting(count, None),
        "eager": lambda: Eager(count, generator),
    }
    if shape.sampler == "list":
        return [[float(index)] for index in range(count)]
    if shape.sampler == "streamed":
        return DataLoader(Streamed(count, of_dataset), batch_size=shape.batch_size)
    if shape.sampler == "shuffle":
        return DataLoader(dataset, batch_size=shape.batch_size, shuffle=True, generator=generator)
    return DataLoader(dataset, batch_size=shape.batch_size, sampler=samplers[shape.sampler]())


class Run:
    """A training loop that reads one batch from each loader and draws noise, in every step."""

    def __init__(self, shapes: list[Shape], noise: str) -> None:
        self.shared = torch.Generator().manual_seed(5)
        loaders = [loader_of(shape, self.shared, number) for number, shape in enumerate(shapes)]
        self.streams = [DataStream(f"data/{number}", loader, seed=1) for number, loader in enumerate(loaders)]
        check_apart(self.streams)
        held = [generator for stream in self.streams for generator in stream.source.generators]
        # a loop may draw from the shared generator only if a loader has it
        self.noise = noise if any(generator is self.shared for generator in held) else "process"

    def step(self) -> list[object]:
        batches = [torch.as_tensor(stream.next()).tolist() for stream in self.streams]
        drawn: list[float] = []
        if self.noise in ("shared", "both"):
            drawn.append(torch.rand((), generator=self.shared).item())
        if self.noise in ("process", "both"):
            drawn += [torch.rand(()).item(), float(np.random.rand()), random.random()]
        return [*batches, *drawn]

    def save(self) -> Any:
        encoded = encode({"data": [stream.state_dict() for stream in self.streams], "rng": rng.observe()}, "")
        return decode(encoded.data, {path: tensor.clone() for path, tensor in encoded.tensors}.__getitem__)

    def load(self, state: Any) -> None:
        for stream, position in zip(self.streams, state["data"], strict=True):
            stream.load_state_dict(position)
        rng.restore(state["rng"])


SHAPES = st.builds(
    Shape,
    sampler=st.sampled_from(SAMPLERS),
    count=st.integers(1, 40),
    batch_size=st.integers(1, 7),
    draws=st.sampled_from(("nothing", "own", "shared", "process")),
    is_shared=st.booleans(),
)


def check(shapes: list[Shape], noise: str, cuts: list[int]) -> None:
    rng.seed(11)
    run = Run(shapes, noise)
    seen, states = [], {}
    for number in range(max(cuts) + STEPS_BEHIND):
        if number in cuts:
            states[number] = run.save()
        seen.append(run.step())
    for cut in cuts:
        rng.seed(999)  # make the new process draw other numbers before the restore
        resumed = Run(shapes, noise)
        resumed.load(states[cut])
        assert [resumed.step() for _ in range(STEPS_BEHIND)] == seen[cut : cut + STEPS_BEHIND]


CUTS = st.sets(st.integers(0, 30), min_size=1, max_size=2)
NOISE = st.sampled_from(("none", "shared", "process", "both"))


@settings(max_examples=25, deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=2), NOISE, CUTS)
def test_a_resumed_run_draws_what_the_undisturbed_run_draws(shapes: list[Shape], noise: str, cuts: set[int]) -> None:
    check(shapes, noise, sorted(cuts))


@pytest.mark.parametrize("draws", ["nothing", "shared"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_generator_that_everything_shares_continues_where_it_was(sampler: str, draws: str) -> None:
    shapes = [Shape(sampler, count, 2, draws, is_shared=True) for count in (9, 40)]
    check(shapes, "both", [1, 5, 23])


def test_a_run_that_is_resumed_again_and_again_draws_what_the_undisturbed_run_draws() -> None:
    shapes = [Shape("rejecting", 12, 2, "shared", is_shared=True), Shape("process", 7, 2, "process", is_shared=False)]
    rng.seed(11)
    run = Run(shapes, "both")
    seen = [run.step() for _ in range(20)]
    rng.seed(11)
    run = Run(shapes, "both")
    for expected in seen:
        assert run.step() == expected
        state = run.save()
        rng.seed(999)
        run = Run(shapes, "both")
        run.load(state)


def test_a_walk_alone_draws_as_torch_alone_does() -> None:
    """If only the sampler uses its generator, a `DataStream` does not change how the generator advances."""
    own, other = (torch.Generator().manual_seed(3) for _ in range(2))
    loader, plain = (
        DataLoader(
            TensorDataset(torch.arange(99)), sampler=RandomSampler(range(99), True, generator=each), generator=each
        )
        for each in (own, other)
    )
    stream = DataStream("data", loader, seed=1)
    for _ in range(3):
        assert list(stream) == list(plain)
        torch.rand(())
    assert torch.equal(own.get_state(), other.get_state())


def test_a_walk_on_a_stream_of_its_own_leaves_the_shared_generator_alone() -> None:
    shared = torch.Generator().manual_seed(5)
    stream = DataStream("data", loader_of(Shape("rejecting", 20, 2, "nothing", is_shared=True), shared, 0), seed=1)
    for number in range(8):
        before = shared.get_state()
        stream.next()
        assert torch.equal(shared.get_state(), before) == (number >= 2), "it draws from it until somebody else has"
        torch.rand((), generator=shared)


def test_streams_of_a_walk_share_no_numbers_with_its_generator() -> None:
    """A loop and a sampler that draw from the same generator get different numbers."""
    for make in (lambda: torch.Generator().manual_seed(3), lambda: np.random.default_rng(3), lambda: random.Random(3)):
        generator: Any = make()
        generators = [generator]
        state = rng.generator_state(generator)
        branch = rng.branch(generators, 1)
        assert is_same(rng.generator_state(generator), state), "the generator itself does not move"
        assert not is_same(branch, state)


@pytest.mark.parametrize("fetch_ahead", [1, 2])
@pytest.mark.parametrize("sampler", ["shuffle", "replacement", "rejecting"])
def test_workers_that_fetch_ahead_share_a_generator_with_the_loop(sampler: str, fetch_ahead: int) -> None:
    def make() -> tuple[torch.Generator, DataStream]:
        shared = torch.Generator().manual_seed(5)
        plain = loader_of(Shape(sampler, 20, 2, "nothing", is_shared=True), shared, 0)
        workers: dict[str, Any] = {"num_workers": 1, "prefetch_factor": fetch_ahead}
        loader = DataLoader(plain.dataset, batch_size=2, sampler=plain.sampler, **workers)
        return shared, DataStream("data", loader, seed=1)

    def step(shared: torch.Generator, stream: DataStream) -> tuple[object, float]:
        return torch.as_tensor(stream.next()).tolist(), torch.rand((), generator=shared).item()

    rng.seed(11)
    shared, stream = make()
    for _ in range(4):
        step(shared, stream)
    encoded = encode(stream.state_dict(), "")
    state: Any = decode(encoded.data, {path: tensor.clone() for path, tensor in encoded.tensors}.__getitem__)
    seen = [step(shared, stream) for _ in range(9)]
    shared, resumed = make()
    resumed.load_state_dict(state)
    assert [step(shared, resumed) for _ in range(9)] == seen


class KeepsItself:
    """A loader that saves and restores its own state."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield torch.rand((), generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


def test_a_loader_that_restores_itself_may_not_share_its_generator_with_another_loader() -> None:
    shared = torch.Generator()
    own = DataStream("data/own", KeepsItself(shared), seed=1)
    other = DataStream("data/other", DataLoader(Noisy(3, None), shuffle=True, generator=shared), seed=1)
    check_apart([own, DataStream("data/third", KeepsItself(torch.Generator()), seed=1)])
    with pytest.raises(CannotResume, match=r"data/own: .* draws from the same generator as data/other"):
        check_apart([other, own])


def test_workers_that_carry_generators_from_epoch_to_epoch_are_refused() -> None:
    dataset = Streamed(4, None)
    DataStream("data", DataLoader(dataset, num_workers=1), seed=1)
    with pytest.raises(CannotResume, match="persistent_workers=True"):
        DataStream("data", DataLoader(dataset, num_workers=1, persistent_workers=True), seed=1)


def test_generators_are_found_in_functions() -> None:
    hidden = torch.Generator()

    def collate(samples: list[torch.Tensor], *, scale: float) -> torch.Tensor:
        return torch.stack(samples) + scale * torch.rand((), generator=hidden)

    assert rng.find_generators([functools.partial(collate, scale=2.0)]) == [hidden]
    loader = DataLoader(Noisy(4, None), collate_fn=functools.partial(collate, scale=2.0))
    assert DataStream("data", loader, seed=1).source.generators == [hidden]


def test_a_loop_that_takes_exactly_all_batches_begins_the_next_epoch() -> None:
    stream = DataStream("data", [1, 2, 3], seed=1)
    for epoch in range(3):
        taken = [batch for _, batch in zip(range(3), stream, strict=False)]
        assert (taken, stream.epoch) == ([1, 2, 3], epoch)


def test_a_run_that_is_resumed_behind_the_last_batch_of_an_epoch_finds_its_rest_empty() -> None:
    """A run resumes after the last batch of an epoch. The rest of this epoch is empty.

    A loop that makes one pass for each remaining epoch therefore makes as many passes as the uninterrupted run.
    """
    stream = DataStream("data", [1, 2, 3], seed=1)
    assert [batch for _, batch in zip(range(3), stream, strict=False)] == [1, 2, 3]
    resumed = DataStream("data", [1, 2, 3], seed=1)
    resumed.load_state_dict(stream.state_dict())
    assert [list(resumed) for _ in range(resumed.epoch, 3)] == [[], [1, 2, 3], [1, 2, 3]]


def test_an_empty_loader_stays_empty() -> None:
    stream = DataStream("data", [], seed=1)
    assert [list(stream), list(stream)] == [[], []]
    with pytest.raises(SessionMisuse, match="data yields no batches"):
        stream.next()
