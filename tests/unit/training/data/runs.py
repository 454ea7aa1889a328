"""Runs that tests interrupt and resume: a data stream, and a training loop that draws random numbers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from everstep.training import rng
from everstep.training.data import DataStream
from everstep.training.state_tree import decode, encode


def plain(batch: Any) -> Any:
    """Return a batch as Python values, which can be compared."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return batch.tolist()
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    return [plain(each) for each in batch] if isinstance(batch, (list, tuple)) else batch


class Run:
    """A training loop that reads one batch per step, and draws from the process's generators in each step."""

    def __init__(self, loader: Iterable[object], prefetch: int = 0) -> None:
        self.stream = DataStream("data", loader, seed=1)
        self.stream.prefetch_count = prefetch

    def step(self) -> tuple[Any, tuple[int, int], list[float]]:
        """Return the batch, its epoch and index, and the random numbers of the step."""
        batch = plain(self.stream.next())
        return (
            batch,
            (self.stream.epoch, self.stream.batch),
            [torch.rand(()).item(), float(np.random.rand()), random.random()],
        )

    def steps(self, count: int) -> list[Any]:
        return [self.step() for _ in range(count)]

    def save(self) -> Any:
        encoded = encode({"data": self.stream.state_dict(), "rng": rng.observe()}, "")
        return decode(encoded.data, {path: tensor.clone() for path, tensor in encoded.tensors}.__getitem__)

    def load(self, state: Any) -> None:
        self.stream.load_state_dict(state["data"])
        rng.restore(state["rng"])


def check(
    make: Callable[[], Iterable[object]], cuts: Iterable[int], behind: int = 8, *, prefetch: int = 0
) -> list[Any]:
    """Interrupt a run before each of the steps `cuts`, and check that a resumed run continues as the undisturbed one.

    The runs fetch `prefetch` batches ahead.

    Returns:
        The batches of the undisturbed run.
    """
    cuts = sorted(set(cuts))
    rng.seed(11)
    run, seen, states = Run(make(), prefetch), [], {}
    for number in range(cuts[-1] + behind):
        if number in cuts:
            states[number] = run.save()
        seen.append(run.step())
    for cut, state in states.items():
        rng.seed(999)  # make the new process draw other numbers before the restore
        resumed = Run(make(), prefetch)
        resumed.load(state)
        if cut % 2:  # The resumed run is killed before its first step.
            state, resumed = resumed.save(), Run(make(), prefetch)
            resumed.load(state)
        for number, (found, expected) in enumerate(zip(resumed.steps(behind), seen[cut:], strict=False)):
            assert found == expected, f"resumed before step {cut}, step {cut + number}"
    return [batch for batch, _, _ in seen]


def check_each_step(make: Callable[[], Iterable[object]], steps: int) -> None:
    """Kill and resume a run after every step."""
    rng.seed(11)
    seen = Run(make()).steps(steps)
    rng.seed(11)
    run = Run(make())
    for expected in seen:
        assert run.step() == expected
        state = run.save()
        rng.seed(999)
        run = Run(make())
        run.load(state)


def interleaved(workers: list[Iterable[object]]) -> list[object]:
    """Return the items in the order in which a DataLoader yields those of its workers."""
    rounds = itertools.zip_longest(*workers, fillvalue=None)
    return [item for items in rounds for item in items if item is not None]
