"""Counts what changes in a rank so that its job must prove its resume again."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain

import torch

from everstep.training.attributes import functions_of
from everstep.training.state import RankState

# A look takes a millisecond for 1,000 modules.
FUNCTIONS_EVERY = 50
"""Steps between two looks at hooks and functions."""


class ResumeChanges:
    """Counts the changes after which a job must prove its resume again (`RankHalf.resume_revision`)."""

    def __init__(self, state: RankState, count: int = 0) -> None:
        self._state = state
        self._passed_count, self._modules, self._groups = self._now()
        self.count = count
        self._looks = 0
        self._functions: list[object] = []
        """The result of the last look, first after the first step of this process."""

    def look(self) -> int:
        """Return the number of changes so far. The session calls this after every step."""
        passed_count, modules, groups = self._now()
        is_same = len(modules) == len(self._modules) and all(map(operator.is_, modules, self._modules))
        if self._looks % FUNCTIONS_EVERY == 0:
            functions = functions_of(chain.from_iterable(modules))
            is_same = is_same and (self._looks == 0 or functions == self._functions)
            self._functions = functions
        self._looks += 1
        self.count += (passed_count > self._passed_count) + (not is_same or groups != self._groups)
        self._passed_count, self._modules, self._groups = passed_count, modules, groups
        return self.count

    def _now(self) -> tuple[int, list[Sequence[torch.nn.Module]], list[int]]:
        return (
            sum(stream.epoch > 0 for stream in self._state.streams.values()),
            [of_root for adapter in self._state.adapters for of_root in adapter.trees()],
            [len(group["params"]) for optimizer in self._state.optimizers() for group in optimizer.param_groups],
        )
