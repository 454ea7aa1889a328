"""Keeps a script's own numbers and collections in its snapshots, without a class in the script."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

PLAIN = (bool, int, float, complex, str, bytes, list, tuple, dict, set, deque, torch.Tensor, np.ndarray, type(None))
"""Classes of the values that `init(extra=…)` accepts without `state_dict`."""


class Values(dict[str, Any]):
    """The plain values of `extra` by name, as `TrainingSession.extra`.

    A restore changes lists, dicts, sets, deques, and tensors and arrays of the same shape in place, so the script may
    keep its own references to them. Numbers and texts are new objects: read and write them here.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the values, with deques as lists."""
        return {name: list(value) if isinstance(value, deque) else value for name, value in self.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the values that `state_dict` returned."""
        for name, value in state.items():
            held = self.get(name)
            if isinstance(held, (list, deque)) and isinstance(value, list):
                held.clear()
                held.extend(value)
            elif isinstance(held, (dict, set)) and isinstance(value, type(held)):
                held.clear()
                held.update(value)
            elif isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor) and held.shape == value.shape:
                with torch.no_grad():
                    held.copy_(value)
            elif isinstance(held, np.ndarray) and isinstance(value, np.ndarray) and _alike(held, value):
                np.copyto(held, value)
            else:
                self[name] = value


def _alike(held: np.ndarray, value: np.ndarray) -> bool:
    return held.shape == value.shape and held.dtype == value.dtype


class counter:
    """Counts up from 0, and continues after a restart if the script passes it to `init(extra=…)`.

        rounds = everstep.training.counter()
        session = everstep.training.init(..., extra={"rounds": rounds})
        for number, batch in zip(rounds, session.batches(10_000)): ...

    Like `itertools.count`, it yields the present value first.
    """

    def __init__(self, start: int = 0) -> None:
        self.value = start
        """The number that the next call of `next` returns."""

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.value += 1
        return self.value - 1

    def state_dict(self) -> dict[str, Any]:
        """Return the present value."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the value that `state_dict` returned."""
        self.value = state["value"]
