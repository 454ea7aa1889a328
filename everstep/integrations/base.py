"""The interface between Everstep and a framework that owns the training loop.

An integration answers three questions about its framework:

    What is state?              It calls `everstep.training.init` with the model, the optimizer, the scheduler, and an
                                object that holds the loop's counters. `Companions` finds what else changes.
    Where is a boundary?        The framework reads its batches from `StepBatches`, which reports a step as finished
                                right before the framework requests the first batch of the next step. At this point, the
                                framework has finished the step's logging, evaluation and callbacks.
    What is the data position?  `StepBatches` reads the session's loader, which begins at the restored position. The
                                framework must neither skip batches nor read ahead.

Outside Everstep, an integration refuses nothing: `refuse` warns, and the script trains as without Everstep.

This module imports no framework but torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import torch

from everstep.integrations.companions import Companions
from everstep.protocol.plan import CHECK_VARIABLE
from everstep.training import TrainingError, TrainingSession
from everstep.training.script import Environment

__all__ = ["Companions", "InitOptions", "NoSession", "StepBatches", "UnsupportedOption", "metrics_of", "refuse"]

_END = object()
_logger = logging.getLogger("everstep.training")


class UnsupportedOption(TrainingError):
    """An option or a value prevents an exact resume.

    Args:
        option: name of the option, as the user wrote it.
        reason: why it prevents a resume.
        alternative: what to do instead, as a sentence.
    """

    code = "unsupported_option"

    def __init__(self, option: str, reason: str, alternative: str) -> None:
        super().__init__(f"{option}: {reason}. {alternative}")
        self.option = option


class InitOptions(TypedDict, total=False):
    """Arguments that an integration passes to `everstep.training.init`, which describes them."""

    trusted_optimizers: Sequence[type]
    tokenizer: Any
    options_from_script: Sequence[str]


def is_alone() -> bool:
    """Return whether the script runs outside Everstep: without an agent, and not in a check of its determinism."""
    return Environment.read().agent_socket is None and CHECK_VARIABLE not in os.environ


def refuse(error: TrainingError) -> None:
    """Raise an error in a job of Everstep. Outside Everstep, log it as a warning, and return.

    Args:
        error: why Everstep cannot resume this training.
    """
    if not is_alone():
        raise error
    _logger.warning("A job of Everstep refuses this script. It trains without Everstep here. %s", error)


class NoSession:
    """The session of a script that trains without Everstep: it keeps, reports and restores nothing."""

    step = 0

    def log(self, **values: object) -> None:
        """Ignore values."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        """Return a context that declares nothing."""
        return contextlib.nullcontext()

    def fence(self) -> None:
        """Return at once, because nothing copies the state."""

    def close(self) -> None:
        """Do nothing."""


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
        groups: the group for each prefix of a framework's names. `{"eval_": "eval"}` makes `eval_loss` `eval/loss`.
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


def check_optimizer(optimizer: Any) -> None:
    """Check that Everstep's guard can run before the step of an optimizer without a framework's wrapper.

    Raises:
        UnsupportedOption: torch.compile compiles the step as one graph, so the guard, which is Python code, cannot run.
    """
    step = getattr(optimizer, "step", None)
    contexts = [cell.cell_contents for cell in getattr(step, "__closure__", None) or ()]
    is_full_graph = any(getattr(each, "fullgraph", False) is True for each in contexts)
    if hasattr(step, "_torchdynamo_orig_callable") and is_full_graph:
        raise UnsupportedOption(
            "torch.compile(optimizer.step, fullgraph=True)",
            "Everstep waits before the update for the copy of the state, which is not possible inside one graph",
            "Remove fullgraph=True.",
        )


def check_engine(engine: Any) -> None:
    """Check the offload of a DeepSpeed engine. `everstep.training.init` checks the engine's other options.

    Raises:
        UnsupportedOption: the engine keeps parameters in host memory. Everstep has no test that resumes such a job.
    """
    offload = engine.zero_offload_param()
    if offload is not None and not str(offload.device).endswith("none"):
        raise UnsupportedOption(
            "zero_optimization.offload_param",
            "no test resumes parameters in host memory",
            "Remove it. The optimizer's state may stay in host memory (offload_optimizer with the device cpu).",
        )


def modules_of(model: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """Return all modules of a model. Another result for the same model later means that the script has changed it."""
    return tuple(model.modules())
