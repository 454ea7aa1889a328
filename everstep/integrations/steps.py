"""Provides the code that the integrations of several frameworks share.

If a framework owns the training loop, the integration makes the framework read its batches from `StepBatches`.
`StepBatches` reports a step as finished right before the framework requests the first batch of the next step. At this
point, the framework has finished the step's logging, evaluation and callbacks.

This module imports no framework but torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from everstep.training import TrainingSession

_END = object()


class StepBatches:
    """The training data of one framework's loop. Each `iter` yields the remaining batches of the current epoch.

    Args:
        session: the session, which has one loader.
        end_step: reports the framework's newest step to the session, unless it is reported already. Returns whether
            training must stop.
        resume: called once, right before the first request of a batch. It restores values that the framework's hooks
            may have changed since the restore, for example random generators. None without a restore.
    """

    def __init__(
        self, session: TrainingSession, end_step: Callable[[], bool], resume: Callable[[], object] | None
    ) -> None:
        (self._stream,) = session.data.values()
        self._end_step = end_step
        self._resume = resume
        self._is_epoch_over = False

    def __iter__(self) -> Iterator[Any]:
        if self._is_epoch_over:
            # The restored step is the last one of an epoch, and the framework already starts the next epoch. First
            # iterate over the restored epoch, which has no batch left, so that the session ends this epoch too.
            self._is_epoch_over = False
            for _ in self._stream:
                raise AssertionError("the restored epoch has further batches")
        batches = iter(self._stream)
        while not self._end_step():
            if self._resume is not None:
                resume, self._resume = self._resume, None
                resume()
            if (batch := next(batches, _END)) is _END:
                return
            yield batch

    def begin_next_epoch(self) -> None:
        """Make the first `iter` start the epoch that follows the restored epoch, whose batches are all read."""
        self._is_epoch_over = True

    def end_epoch(self) -> None:
        """End the current epoch, although the loader may have further batches.

        Raises:
            CannotResume: the loader keeps its own position and has further batches.
        """
        self._stream.end_epoch()


def metrics_of(values: Mapping[str, Any], groups: Mapping[str, str], group: str) -> dict[str, Any]:
    """Return the numbers of one log entry, named by group as on the job's Metrics page.

    Args:
        values: names and values as the framework logs them. Values that are not numbers are left out.
        groups: prefix of a framework's name → group, for example `{"eval_": "eval"}`: `eval_loss` becomes `eval/loss`.
        group: group of names without such a prefix.

    Returns:
        Numbers or tensors of one element, for `session.log`.
    """
    return {
        _grouped(name, groups, group): value
        for name, value in values.items()
        if (isinstance(value, (int, float)) and not isinstance(value, bool))
        or (isinstance(value, torch.Tensor) and value.numel() == 1)
    }


def _grouped(name: str, groups: Mapping[str, str], group: str) -> str:
    for prefix, other in groups.items():
        if name.startswith(prefix):
            return f"{other}/{name.removeprefix(prefix)}"
    return f"{group}/{re.sub(r'^/+', '', name)}"
